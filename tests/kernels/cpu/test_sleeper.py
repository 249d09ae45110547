"""A thread that sleeps on the core of its caller is barred from it until it has woken; else its cores stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.build import SOURCES
from tests.support.compiler import needs_compiler

CORES = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []

pytestmark = [needs_compiler, pytest.mark.skipif(len(CORES) < 2, reason="this process may use one core only")]


def test_a_thread_is_barred_from_its_callers_core_while_it_sleeps_there(tmp_path: Path) -> None:
    program, source = tmp_path / "sleeper", Path(__file__).with_name("sleeper.cpp")
    subprocess.run(["g++", "-std=c++20", "-pthread", "-I", str(SOURCES), str(source), "-o", str(program)], check=True)
    core, other = CORES[:2]
    done = subprocess.run([program, str(core), str(other)], capture_output=True, text=True, check=True, timeout=60)
    every = " ".join(map(str, CORES))
    rest = " ".join(str(one) for one in CORES if one != core)
    assert done.stdout.splitlines() == [
        f"child: {every}",
        f"sleeps: {rest}",
        f"woke: {every}",
        f"child: {every}",
        f"sleeps: {every}",
        f"woke: {every}",
    ]
