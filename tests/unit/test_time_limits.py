"""A test that does not end is failed after its time limit, and its fixtures end what they began."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stack import ROOT

TESTS = """
import asyncio
import time

import pytest


@pytest.fixture
def server():
    yield
    print("the server has ended")


async def busy():
    until = time.monotonic() + 30
    while time.monotonic() < until:
        time.sleep(0.01)
        await asyncio.sleep(0)


async def test_of_a_busy_task(server):
    tasks = [asyncio.create_task(busy()) for _ in range(2)]
    await asyncio.wait(tasks)


async def test_of_a_busy_callback(server):
    loop, until = asyncio.get_running_loop(), time.monotonic() + 30

    def again():
        time.sleep(0.01)
        if time.monotonic() < until:
            loop.call_soon(again)

    again()
    await asyncio.sleep(30)
"""


@pytest.mark.parametrize("name", ["task", "callback"])
def test_time_limit_ends_a_test_that_keeps_the_event_loop_busy(tmp_path: Path, name: str) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_timeout_set_timer\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nasyncio_mode = auto\ntimeout = 1\n")
    (tmp_path / "test_busy.py").write_text(TESTS)
    run = [sys.executable, "-m", "pytest", f"test_busy.py::test_of_a_busy_{name}", "-p", "no:schemathesis"]
    done = subprocess.run([*run, "-p", "no:valkey"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "1 failed" in done.stdout.splitlines()[-1], done.stdout
    assert "the server has ended" in done.stdout and "Timeout (>1.0s) from pytest-timeout" in done.stdout
