"""Two models take turns while clients ask both; the placer, workers and schedulers are killed. Each answer is that of
transformers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.launcher.rundir import RunDir
from tests.chaos.streams import Stream, failed
from tests.support.checkpoints.models import Reference, make_llama
from tests.support.launcher import up
from tests.support.waiting import until

SEED = 13
SERVICES = ("placer-0", "worker-", "scheduler-0", "scheduler-1")
"""Killed in an order of the seed, the first one while a stream flows."""
CLIENTS = 4
TOKENS = 160
WAIT_S = 120.0
MODELS = ("one", "org/Two")
FILE = """
awake: 1
models:
  one: {source: one, kv_blocks: 256}
  org/Two: {source: two, kv_blocks: 256}
"""
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--speculate", "off")


class Clients:
    """Each asks the two models in turn, so that all of them soon wait for the one that sleeps."""

    def __init__(self, url: str, references: list[Reference]) -> None:
        self._url, self._references = url, references
        self._stop = threading.Event()
        self.streams: list[list[Stream]] = [[] for _ in range(CLIENTS)]

    def ask(self, client: int) -> None:
        for model, reference in itertools.cycle(zip(MODELS, self._references, strict=True)):
            if self._stop.is_set():
                return
            body = {
                "model": model, "prompt": reference.prompts[client], "max_tokens": TOKENS, "temperature": 0,
                "ignore_eos": True, "stream": True, "return_token_ids": True,
            }  # fmt: skip
            stream = Stream([self._url], body)
            self.streams[client].append(stream)
            assert stream.read() == reference.outputs[client], f"client {client}: {model}, {stream.reason}"

    def flow(self) -> bool:
        return any(asked and asked[-1].flowing.is_set() and not asked[-1].reason for asked in self.streams)

    def answers(self) -> list[int]:
        """Return the number of whole answers of each client."""
        return [sum(bool(stream.reason) for stream in asked) for asked in self.streams]

    def more(self, before: list[int]) -> bool:
        """Return whether each client has had an answer since."""
        return all(now > then for now, then in zip(self.answers(), before, strict=True))

    def stop(self) -> None:
        self._stop.set()


def running(directory: Path, prefix: str, but: int = 0) -> int:
    """Return the pid of a running service by the beginning of its name, not `but`; 0 if there is none."""
    found = RunDir(directory / "run").pids().items()
    return next((pid for name, pid in found if name.startswith(prefix) and pid != but), 0)


def kill(directory: Path, prefix: str) -> None:
    """Kill a service and wait until another one runs. After a worker this may be the other model's worker."""
    pid = until(f"{prefix} runs", lambda: running(directory, prefix))
    with contextlib.suppress(ProcessLookupError):  # the worker's turn may just have ended
        os.kill(pid, signal.SIGKILL)
    until(f"{prefix} runs again", lambda: running(directory, prefix, but=pid))


@pytest.mark.timeout(600)
def test_models_that_take_turns_lose_nothing_under_faults(tmp_path: Path) -> None:
    references = [
        make_llama(tmp_path / name, seed, CLIENTS, (4, 20), TOKENS, kind=kind)
        for name, seed, kind in (("one", 21, "llama"), ("two", 22, "qwen3"))
    ]
    (tmp_path / "models.yaml").write_text(FILE)
    with up(tmp_path, "--models", str(tmp_path / "models.yaml"), *OPTIONS) as (url, _):
        clients = Clients(url, references)
        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(clients.ask, client) for client in range(CLIENTS)]
            try:
                until("a stream flows", lambda: clients.flow() or failed(asking), WAIT_S)
                for service in random.Random(SEED).sample(SERVICES, len(SERVICES)):
                    kill(tmp_path, service)
                before = clients.answers()
                until("each client is answered", lambda: clients.more(before) or failed(asking), WAIT_S)
            finally:
                clients.stop()
            for each in asking:
                each.result(WAIT_S)  # of the other model than the last answer that was waited for
