"""`orcinus up` with the name of a model that is not here yet: fetched, served under that name, and kept while it is."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints.gguf import write_model
from tests.support.checkpoints.models import Reference, make_llama
from tests.support.launcher import ROOT, clean_env
from tests.support.stack import PLAIN
from tests.support.stand_ins.hub import StandInHub
from tests.support.waiting import free_port, until

NAME, GGUF = "Acme/Tiny", "Acme/Tiny-GGUF"
ORCINUS = [sys.executable, "-m", "services.cli"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandInHub]:
    model = make_llama(tmp_path / "tiny", requests=1, output_tokens=4).path
    with StandInHub() as hub:
        hub.add(NAME, {path.name: path.read_bytes() for path in model.iterdir()})
        yield hub


def test_model_is_fetched_and_served_by_its_name(hub: StandInHub, tmp_path: Path) -> None:
    env = clean_env(HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1")
    with serving(NAME, env, tmp_path) as (url, log):
        assert f"{NAME} is not on this machine: fetching it" in log.read_text()
        body = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, verify=PLAIN, timeout=60)
        assert (answer.status_code, answer.json()["model"]) == (200, NAME)
        removal = subprocess.run([*ORCINUS, "rm", "--yes", NAME], cwd=ROOT, env=env, capture_output=True, text=True)
        assert removal.returncode == 2 and "in use" in removal.stderr
    removal = subprocess.run([*ORCINUS, "rm", "--yes", NAME], cwd=ROOT, env=env, capture_output=True, text=True)
    assert removal.returncode == 0 and not list((tmp_path / "home" / "hub").glob("models--*"))


def test_gguf_file_is_pulled_and_answers_as_transformers(hub: StandInHub, tmp_path: Path) -> None:
    make_llama(tmp_path / "plain", requests=1, output_tokens=1, hidden_size=256, intermediate_size=512)
    write_model(tmp_path / "plain", tmp_path / "x.gguf", lambda _: "Q4_K", tmp_path / "meant")
    hub.add(GGUF, {"q4/tiny-q4_k.gguf": (tmp_path / "x.gguf").read_bytes()})
    env = clean_env(HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1")
    pull = [*ORCINUS, "pull", GGUF, "--file", "q4/tiny-q4_k.gguf"]
    subprocess.run(pull, cwd=ROOT, env=env, check=True, capture_output=True)
    case = Reference(tmp_path / "meant").cases(1, (4, 40), 16, seed=3)[0]
    with serving(GGUF, env, tmp_path) as (url, _):
        body = {"model": GGUF, "prompt": case.prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, verify=PLAIN, timeout=60)
        assert answer.json()["choices"][0]["token_ids"] == case.tokens


@contextmanager
def serving(model: str, env: dict[str, str], folder: Path) -> Iterator[tuple[str, Path]]:
    """A stack of that model: its address and its log. It has to end well."""
    port, log = free_port(), folder / "up.log"
    options = [
        "--model", model, "--port", str(port), "--ops-port", str(free_port()), "--run-dir", str(folder / "run"),
        "--device", "cpu", "--threads", "2", "--kv-blocks", "512",
    ]  # fmt: skip
    with log.open("wb") as out:
        running = subprocess.Popen([*ORCINUS, "up", *options], cwd=ROOT, env=env, stdout=out, stderr=out)
    try:

        def greeted() -> bool:
            assert running.poll() is None, log.read_text()
            return f"Orcinus serves {model} at" in log.read_text()

        until("the stack serves", greeted, 90)
        yield f"http://127.0.0.1:{port}", log
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0, log.read_text()
