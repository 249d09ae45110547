"""Two models take turns, one of them with three adapters, and keep their KV over a sleep. All that serves them is hurt:
the engines (the agent of a box), their placer, workers and schedulers, a gateway and Redis. No answer is lost, comes
twice or changes.

The long run, with all kinds of faults: `python -m tests.chaos.several_models.test_turns FAULTS SEED`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from services.launcher.rundir import RunDir
from shared.keys import Keys
from tests.chaos.harness.checker import RETRIED
from tests.chaos.streams import Stream
from tests.support.checkpoints.adapters import make_lora
from tests.support.checkpoints.models import make_llama
from tests.support.stack import PLAIN, Stack
from tests.support.waiting import free_port, until

SEED = 20261130
CLIENTS = 6
PROMPTS, TOKENS = 3, 800
FEW_TOKENS = 300
"""In the short run."""
WAIT_S = 600.0
AGAIN_S = 0.1
"""A client waits so long before it asks the next gateway."""
GAP_S, STOPPED_S, ANSWER_S = (0.5, 3.0), (0.5, 4.0), 15.0
MODELS, ADAPTERS = ("one", "org/Two"), ("first", "second", "third")
TARGETS = (*MODELS, "org/Two", *ADAPTERS)
FILE = """
awake: 1
models:
  one: {source: one, kv_blocks: 512, host_blocks: 512}
  org/Two: {source: two, kv_blocks: 512, host_blocks: 512}
"""
KEPT, MAPPED = "stay for the next worker", "is mapped"


@dataclass
class Client(Stream):
    """A client that asks again until its request ends; the key makes it the same request."""

    most: int = sys.maxsize  # tokens, then it leaves
    doubled: int = 0
    _seen: set[str] = field(default_factory=set)

    def _take(self, answer: httpx.Response) -> None:
        if answer.status_code in (409, 429, 503):  # another connection has it, or the gateway cannot take it now
            self.leave.wait(AGAIN_S)
        else:
            super()._take(answer)

    def _event(self, event: dict[str, Any], event_id: str) -> None:
        if "error" in event and event["error"]["code"] in RETRIED:
            return
        self.doubled += event_id in self._seen
        self._seen.add(event_id)
        super()._event(event, event_id)
        if len(self.ids) >= self.most:
            self.leave.set()


@dataclass
class Tally:
    """Counts of the requests of a run, and those that went wrong."""

    requests: int = 0
    cancels: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    resumed: int = 0
    targets: Counter[str] = field(default_factory=Counter)

    def judge(self, target: str, client: Client, expected: list[int], error: str) -> None:
        is_cancelled = client.leave.is_set() and not client.reason
        self.requests += 1
        self.cancels += is_cancelled
        self.resumed += client.resumed
        self.targets[target] += 1
        text = f"{target} {client.request}: {len(client.ids)} tokens, {client.reason or error}"
        if not is_cancelled and (error or client.reason != "length" or len(client.ids) < len(expected)):
            self.lost.append(text)
        if client.doubled or len(client.ids) > len(expected):
            self.doubled.append(text)
        elif client.ids != expected[: len(client.ids)]:
            self.diverged.append(text)


class Box:
    """Redis, two gateways, and the engines with the models and adapters."""

    def __init__(self, directory: Path, seed: int, tokens: int) -> None:
        self.tokens = tokens
        (directory / "models.yaml").write_text(FILE)
        references = [
            make_llama(directory / name, number, PROMPTS, (8, 60), tokens, kind=kind, max_position_embeddings=2048)
            for name, number, kind in (("one", seed, "llama"), ("two", seed + 1, "qwen3"))
        ]
        model = AutoModelForCausalLM.from_pretrained(directory / "one")
        for number, name in enumerate(ADAPTERS):
            make_lora(directory / "adapters" / name, model, seed + number)
        self.prompts = {name: reference.prompts for name, reference in zip(MODELS, references, strict=True)}
        self.prompts |= dict.fromkeys(ADAPTERS, references[0].prompts)
        self.expected = {name: reference.outputs for name, reference in zip(MODELS, references, strict=True)}
        self.run_dir = RunDir(directory / "run")
        self.stack = Stack(
            directory, directory / "one", models=directory / "models.yaml", served_model_name="one", dtype="float32",
            speculate="off", run_dir=self.run_dir.path, adapter_dir=directory / "adapters", max_loras=2, drain_s=0.5,
        )  # fmt: skip
        self.ports = {f"gateway-{number}": free_port() for number in range(2)}
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports.values()]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.stack.redis.start()
        try:
            self.stack.start("engines")
            for name in self.ports:
                self.start_gateway(name)
            until("the gateways are ready", lambda: all(self.listed(url) for url in self.urls), WAIT_S)
            for name in ADAPTERS:
                body = {"lora_name": name, "lora_path": name, "model": "one"}
                httpx.post(f"{self.urls[0]}/v1/load_lora_adapter", json=body, verify=PLAIN).raise_for_status()
            until("both know the adapters", lambda: all(self.listed(url) >= {*ADAPTERS} for url in self.urls))
            for name in ADAPTERS:
                self.expected[name] = [self.client(name, number, 0).read() for number in range(PROMPTS)]
            yield
        finally:
            self.stack.__exit__(None, None, None)

    def start_gateway(self, name: str) -> None:
        self.stack.start("gateway", name, port=self.ports[name])

    def listed(self, url: str) -> set[str]:
        """Return the models of a gateway."""
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{url}/v1/models", timeout=30, verify=PLAIN)
            return {card["id"] for card in answer.json()["data"]} if answer.status_code == 200 else set()
        return set()

    def client(self, target: str, prompt: int, gateway: int, most: int = sys.maxsize) -> Client:
        body = {
            "model": target, "prompt": self.prompts[target][prompt], "max_tokens": self.tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True, "priority": "realtime",
        }  # fmt: skip
        urls = [*self.urls[gateway:], *self.urls[:gateway]]
        return Client(urls, body, {"Idempotency-Key": uuid.uuid4().hex}, read_s=WAIT_S, most=most)

    def pid(self, prefix: str, but: int = 0) -> int:
        """Return the pid of a service of the engines by the beginning of its name, not `but`; 0 without one."""
        return next((pid for name, pid in self.run_dir.pids().items() if name.startswith(prefix) and pid != but), 0)

    def said(self, words: str) -> int:
        return self.stack.log("engines").count(words)

    def is_at_rest(self) -> bool:
        """Return whether no request is left in Redis."""
        client: Any = self.stack.redis.client
        for keys in map(Keys, MODELS):
            counts = client.hgetall(keys.queue)
            counts.pop(b"bytes", None)
            if set(counts.values()) - {b"0"} or any(client.xlen(stream) for stream in keys.request_streams()):
                return False
        return True

    # Faults

    def hit(self, prefix: str, how: int) -> int:
        """Signal a service of the engines, once one runs, and return its pid."""

        def hit() -> int:
            with contextlib.suppress(ProcessLookupError):  # the turn of a worker has just ended
                if pid := self.pid(prefix):
                    os.kill(pid, how)
                    return pid
            return 0

        return until(f"{prefix} runs", hit, WAIT_S)

    def signal(self, prefix: str, how: int) -> None:
        """Signal a service of the engines, and wait until another runs: after a worker perhaps the other model's."""
        pid = self.hit(prefix, how)
        until(f"{prefix} runs again", lambda: self.pid(prefix, but=pid), WAIT_S)

    def stop(self, prefix: str, seconds: float) -> None:
        pid = self.hit(prefix, signal.SIGSTOP)
        pause(seconds)
        with contextlib.suppress(ProcessLookupError):  # its supervisor has killed it
            os.kill(pid, signal.SIGCONT)

    def end_engines(self, how: int) -> None:
        """End the engines and start others; a killed launcher leaves its list of pids until the next one writes it."""
        placer = until("they have a placer", lambda: self.pid("placer-0"), WAIT_S)
        self.stack.kill("engines", how)
        self.stack.start("engines")
        until("they have another placer", lambda: self.pid("placer-0", but=placer), WAIT_S)

    def end_gateway(self, name: str) -> None:
        self.stack.kill(name)
        self.start_gateway(name)

    def end_redis(self) -> None:
        self.stack.redis.stop(signal.SIGKILL)
        self.stack.redis.start()


KINDS: dict[str, Callable[[Box, random.Random], None]] = {
    "worker_term": lambda box, _: box.signal("worker-", signal.SIGTERM),
    "worker_kill": lambda box, _: box.signal("worker-", signal.SIGKILL),
    "placer_kill": lambda box, _: box.signal("placer-0", signal.SIGKILL),
    "scheduler_0_kill": lambda box, _: box.signal("scheduler-0", signal.SIGKILL),
    "scheduler_1_kill": lambda box, _: box.signal("scheduler-1", signal.SIGKILL),
    "engines_kill": lambda box, _: box.end_engines(signal.SIGKILL),
    "engines_term": lambda box, _: box.end_engines(signal.SIGTERM),
    "gateway_kill": lambda box, rng: box.end_gateway(rng.choice(list(box.ports))),
    "redis_kill": lambda box, _: box.end_redis(),
    "worker_stop": lambda box, rng: box.stop("worker-", rng.uniform(*STOPPED_S)),
    "placer_stop": lambda box, rng: box.stop("placer-0", rng.uniform(*STOPPED_S)),
}


def pause(seconds: float) -> None:
    """Let time pass where the time is a part of the fault: its moment, or how long a process stands still."""
    threading.Event().wait(seconds)


def kinds(names: list[str], rng: random.Random) -> Iterator[str]:
    """Yield kinds for ever: each once, in random order, before any comes again."""
    while True:
        yield from rng.sample(names, len(names))


def ask(box: Box, tally: Tally, first: str, rng: random.Random, stop: threading.Event, lock: threading.Lock) -> None:
    """Send one request after another, to `first` and then at random; cancel one in five in the middle."""
    target = first
    while not stop.is_set():
        prompt = rng.randrange(PROMPTS)
        most = rng.randrange(8, box.tokens) if rng.random() < 0.2 else sys.maxsize
        client, error = box.client(target, prompt, rng.randrange(2), most), ""
        try:
            client.read()
        except RuntimeError as raised:
            error = str(raised)
        if client.leave.is_set() and not client.reason:
            until("it is cancelled", lambda c=client: cancel(box, c.request), WAIT_S)
        with lock:
            tally.judge(target, client, box.expected[target][prompt], error)
        target = rng.choice(TARGETS)


def cancel(box: Box, request: str) -> bool:
    """Return whether a gateway has cancelled it."""
    for url in box.urls:
        with contextlib.suppress(httpx.TransportError):
            if httpx.delete(f"{url}/v1/requests/{request}", timeout=30, verify=PLAIN).status_code < 500:
                return True
    return False


def run(
    directory: Path, faults: int, seed: int, tokens: int, names: list[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures of a run, and the requests that went wrong."""
    box, rng, tally = Box(directory, seed, tokens), random.Random(seed), Tally()
    stop, lock, hits = threading.Event(), threading.Lock(), Counter[str]()
    with box.running(), ThreadPoolExecutor(CLIENTS) as pool:
        clients = [
            pool.submit(ask, box, tally, TARGETS[n], random.Random(f"{seed} {n}"), stop, lock) for n in range(CLIENTS)
        ]
        try:
            for kind in itertools.islice(kinds(names, rng), faults):
                pause(rng.uniform(*GAP_S))
                with contextlib.suppress(TimeoutError):  # faults that overtake all answers would show little
                    until("more requests end", lambda n=tally.requests: tally.requests > n, ANSWER_S)
                counts = [len(each) for each in (tally.lost, tally.doubled, tally.diverged)]
                say(f"fault {hits.total() + 1}: {kind}; {tally.requests} requests; lost, doubled, diverged: {counts}")
                KINDS[kind](box, rng)
                hits[kind] += 1
        finally:
            stop.set()
        for client in clients:
            client.result(2 * WAIT_S)
        until("no request is left", box.is_at_rest, 120)
        return {
            "seed": seed, "requests": tally.requests, "cancels": tally.cancels, "faults": dict(sorted(hits.items())),
            "resumed": tally.resumed, "targets": dict(tally.targets), "kept": box.said(KEPT),
            "mapped": box.said(MAPPED), "lost": tally.lost, "doubled": tally.doubled, "diverged": tally.diverged,
        }  # fmt: skip


def check(figures: dict[str, Any]) -> None:
    assert (figures["lost"], figures["doubled"], figures["diverged"]) == ([], [], [])
    assert figures["targets"].keys() == {*TARGETS}


@pytest.mark.timeout(900)
def test_models_that_take_turns_lose_nothing_under_faults(tmp_path: Path) -> None:
    names = ["worker_term", "engines_kill", "worker_kill", "placer_kill", "scheduler_1_kill"]
    check(run(tmp_path, len(names), SEED, FEW_TOKENS, names, print))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        say = functools.partial(print, flush=True)
        figures = run(Path(directory), int(sys.argv[1]), int(sys.argv[2]), TOKENS, list(KINDS), say)
        say(json.dumps(figures))
        check(figures)
        assert figures["kept"] > 0  # a short run may end before a worker leaves requests; test_kept.py shows that
        assert figures["mapped"] > 0
