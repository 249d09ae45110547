"""Two models of which one is awake at a time, under requests to both: every answer is transformers', also of requests
that ran when their model went to sleep, and while the placer is killed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints.models import Reference, make_llama
from tests.support.launcher import alive, up
from tests.support.sse import DONE, parse
from tests.support.stack import PLAIN
from tests.support.waiting import until

TOKENS = 500
"""An answer lasts seconds: a worker goes a moment after its model is put to sleep, in which a short one ends."""
LONG = {"max_position_embeddings": 1024}
PAUSE_S = 1.0
"""Longer than a step takes on a busy machine, and shorter than a load."""
WAIT_S = 240.0
FILE = """
awake: 1
models:
  one: {source: one, kv_blocks: 512}
  org/Two: {source: two, kv_blocks: 256}
"""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    directory = tmp_path_factory.mktemp("models")
    one = make_llama(directory / "one", seed=21, requests=4, output_tokens=TOKENS, prompt_tokens=(4, 20), **LONG)
    two = make_llama(directory / "two", seed=22, requests=4, kind="qwen3")
    (directory / "models.yaml").write_text(FILE)
    return {"one": one, "org/Two": two}


@pytest.fixture(scope="module")
def run(references: dict[str, Reference], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    directory, file = tmp_path_factory.mktemp("up"), references["one"].path.parent / "models.yaml"
    options = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--speculate", "off")
    with up(directory, "--models", str(file), *options) as (address, _):
        yield address, directory


def states(url: str) -> dict[str, str]:
    listed = httpx.get(f"{url}/v1/models", timeout=60, verify=PLAIN).json()["data"]
    return {card["id"]: card["state"] for card in listed}


def recomputed(directory: Path) -> int:
    """Return the tokens of the first model that were computed again."""
    url = json.loads((directory / "run" / "stack.json").read_text())["ops_url"]
    shards = httpx.get(f"{url}/stats", timeout=60, verify=PLAIN).json()["shards"]
    return int(shards["shard-0"]["recomputed_tokens"])


def pids(directory: Path) -> dict[str, int]:
    return dict(json.loads((directory / "run" / "processes.json").read_text()))


def streamed(url: str, model: str, prompt: list[int], tokens: int, priority: str) -> tuple[list[int], float]:
    """Return the tokens of an answer, and the longest pause between two of them."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "priority": priority,
    }  # fmt: skip
    body_bytes, pause, last = bytearray(), 0.0, 0.0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S, verify=PLAIN) as answer:
        assert answer.status_code == 200, answer.read()
        for chunk in answer.iter_raw():  # parsed behind the end: a reader that lags behind the worker sees no pause
            now = time.monotonic()
            pause = max(pause, now - last) if last else 0.0
            last = now
            body_bytes += chunk
    got: list[int] = []
    for event in parse(bytes(body_bytes)):
        if event.data == DONE:
            return got, pause
        for choice in event.json["choices"]:
            got += choice.get("token_ids") or []
    raise AssertionError(f"the answer has no end: {body_bytes[-200:]!r}")


@pytest.mark.timeout(600)
def test_models_take_turns_and_no_token_differs(run: tuple[str, Path], references: dict[str, Reference]) -> None:
    url, directory = run
    until("one is awake and the other asleep", lambda: states(url) == {"one": "ready", "org/Two": "asleep"})
    assert httpx.get(f"{url}/health/ready", timeout=60, verify=PLAIN).status_code == 200
    assert {"worker-0", "placer-0"} <= pids(directory).keys() and "worker-1" not in pids(directory)
    served = threading.Event()
    pauses = []

    def keep_busy(at: int) -> None:
        """Ask one again and again, so that it never is without work, until the other has answered; each client with a
        length of its own, so that not all answers end at a time.
        """
        one = references["one"]
        prompt, output = one.prompts[at % 4], one.outputs[at % 4][: TOKENS - 30 * at]
        while not served.is_set():
            got, pause = streamed(url, "one", prompt, len(output), "normal")
            assert got == output
            pauses.append(pause)

    def ask_the_other(at: int) -> None:
        prompt, output = references["org/Two"].prompts[at], references["org/Two"].outputs[at]
        got, _ = streamed(url, "org/Two", prompt, len(output), "realtime")
        assert got == output

    with ThreadPoolExecutor(12) as clients:
        busy = [clients.submit(keep_busy, at) for at in range(8)]  # one at least is in the middle of an answer
        try:
            until("one is busy", lambda: len(pauses) >= 8, WAIT_S)
            asking = [clients.submit(ask_the_other, at) for at in range(4)]
            placer = pids(directory)["placer-0"]
            os.kill(placer, signal.SIGKILL)  # with requests that wait for its decision
            until("the placer is back", lambda: pids(directory).get("placer-0") not in (None, placer))
            worker = pids(directory)["worker-0"]
            for each in asking:
                each.result(WAIT_S)
            assert not alive(worker)
        finally:
            served.set()
        for each in busy:
            each.result(WAIT_S)
    assert max(pauses) > PAUSE_S, "a request ran when its model went to sleep, and went on"
    kept = (directory / "run" / "logs" / "worker-0.log").read_text()
    assert "stay for the next worker" in kept and "is mapped" in kept
    assert recomputed(directory) == 0
    until("one is awake again", lambda: states(url)["one"] == "ready")
    assert "worker-1" not in pids(directory)
