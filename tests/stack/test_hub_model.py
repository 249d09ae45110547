"""`orcinus up` with the name of a model that is not here yet: fetched, served under that name, and kept while it is."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.launcher import ROOT, clean_env
from tests.support.models import make_llama
from tests.support.stack import PLAIN
from tests.support.stand_ins.hub import StandInHub
from tests.support.waiting import free_port, until

NAME = "Acme/Tiny"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandInHub]:
    model = make_llama(tmp_path / "tiny", requests=1, output_tokens=4).path
    with StandInHub() as hub:
        hub.add(NAME, {path.name: path.read_bytes() for path in model.iterdir()})
        yield hub


def test_model_is_fetched_and_served_by_its_name(hub: StandInHub, tmp_path: Path) -> None:
    env = clean_env(HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1")
    port, log = free_port(), tmp_path / "up.log"
    orcinus = [sys.executable, "-m", "services.cli"]
    options = [
        "--model", NAME, "--port", str(port), "--ops-port", str(free_port()), "--run-dir", str(tmp_path / "run"),
        "--device", "cpu", "--threads", "2", "--kv-blocks", "512",
    ]  # fmt: skip
    with log.open("wb") as out:
        running = subprocess.Popen([*orcinus, "up", *options], cwd=ROOT, env=env, stdout=out, stderr=out)
    try:

        def greeted() -> bool:
            assert running.poll() is None, log.read_text()
            return f"Orcinus serves {NAME} at" in log.read_text()

        until("the stack serves", greeted, 90)
        assert f"{NAME} is not on this machine: fetching it" in log.read_text()
        body = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, verify=PLAIN, timeout=60)
        assert (answer.status_code, answer.json()["model"]) == (200, NAME)
        removal = subprocess.run([*orcinus, "rm", "--yes", NAME], cwd=ROOT, env=env, capture_output=True, text=True)
        assert removal.returncode == 2 and "in use" in removal.stderr
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0, log.read_text()
    removal = subprocess.run([*orcinus, "rm", "--yes", NAME], cwd=ROOT, env=env, capture_output=True, text=True)
    assert removal.returncode == 0 and not list((tmp_path / "home" / "hub").glob("models--*"))
