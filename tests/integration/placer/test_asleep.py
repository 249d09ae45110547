"""A request for a model that is asleep: its client leaves, its deadline passes, its client comes back, a batch has it.

Gateway, scheduler and placer are processes over a real Redis. The worker has no model, and the test starts it in place
of the launcher. The model that is awake is records in Redis, and has work as long as its stream has an entry.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest

from shared.keys import PLACER_KEYS, Keys
from shared.placement import Placement, read_placements
from tests.support import sse
from tests.support.checkpoints.tokenizers import write_model
from tests.support.forked import Forked
from tests.support.gateway.process import GatewayProcess
from tests.support.launcher import settings_env
from tests.support.stack import PATIENT_MS, PLAIN, RedisServer
from tests.support.stand_ins.token_worker import TokenWorker
from tests.support.stand_ins.token_worker import answer as answer_of
from tests.support.waiting import until

AWAKE, ASLEEP, OTHER = "awake", "asleep", "other"
FILE = "awake: 1\nmodels: {awake: {source: awake}, asleep: {source: asleep}, other: {source: other}}\n"
PROMPT, TOKENS = [97, 98, 99], 12
LOAD_MS = 100
DEADLINE_MS = 3000
"""Later than the model would be awake by the placer's last word, so that the gateway admits the request."""


class Sleeper:
    """The services, and a model that has not been awake since they started."""

    def __init__(self, directory: Path, redis: RedisServer, load_ms: int) -> None:
        """load_ms: of the model, as measured last; 0 means never."""
        self.redis, self.keys, self._directory, self._load_ms = redis, Keys(ASLEEP), directory, load_ms
        for name in (AWAKE, ASLEEP, OTHER):
            write_model(directory / name)
        models = directory / "models.yaml"
        models.write_text(FILE)
        settings = {"models": models, "files_dir": directory / "files"}
        self.gateway = GatewayProcess(directory, directory / AWAKE, redis.url, **settings)
        self.scheduler: Forked | None = None
        self.placer: Forked | None = None
        self.worker: TokenWorker | None = None

    def __enter__(self) -> Sleeper:
        self.redis.client.flushall()
        busy = Keys(AWAKE)
        self.redis.client.set(busy.lease("shard-0"), "1", px=60_000)
        self.redis.client.hset(busy.stats("shard-0"), mapping={"workers": 1})
        self.redis.client.xadd(busy.requests("low"), {"r": "x"})
        self.redis.client.hset(PLACER_KEYS.placements, ASLEEP, Placement(False, self._load_ms).encode())
        self.redis.client.hset(PLACER_KEYS.placements, AWAKE, Placement(True).encode())
        self.gateway.start()
        of_scheduler = {"model": self._directory / ASLEEP, "served_model_name": ASLEEP, "lease_ms": PATIENT_MS}
        self.scheduler = self._forked("scheduler", **of_scheduler)
        self.start_placer()
        until("the model is asleep", lambda: self.gateway.status("/health/live") == 200 and self.state() == "asleep")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.gateway.stop()
        for service in (self.placer, self.scheduler):
            if service is not None:
                service.send_signal(signal.SIGTERM)
                service.wait(60)
        if self.worker is not None:
            self.worker.stop()

    def _forked(self, service: str, **settings: Any) -> Forked:
        environment = settings_env(redis_url=self.redis.url, **settings)
        return Forked(service, environment, self._directory / f"{service}.log")

    def start_placer(self) -> None:
        self.placer = self._forked("placer", models=self._directory / "models.yaml")

    def kill_placer(self) -> None:
        assert self.placer is not None
        self.placer.kill()
        self.placer.wait(60)

    def replace_gateway(self) -> None:
        """Kill the gateway and start another one at its address."""
        before = set(self.redis.client.scan_iter(self.keys.alive("gateway", "*")))
        self.gateway.stop(signal.SIGKILL)
        self.redis.client.delete(*before)  # as if it had run out
        self.gateway.start().wait_live()

    def stats(self) -> dict[bytes, bytes]:
        return self.hash(self.keys.stats("shard-0"))

    def hash(self, key: str) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self.redis.client.hgetall(key)
        return found

    def batch(self, name: str) -> dict[str, Any]:
        return dict(self.gateway.get(f"/v1/batches/{name}").json())

    def state(self) -> str:
        cards = self.gateway.get("/v1/models").json()["data"]
        return next(str(card["state"]) for card in cards if card["id"] == ASLEEP)

    def is_awake(self, name: str) -> bool:
        placed = read_placements(self.hash(PLACER_KEYS.placements))
        return name in placed and placed[name].awake

    def entries(self) -> int:
        """Return how many requests of the model have not ended."""
        return sum(self.redis.client.xlen(stream) for stream in self.keys.request_streams())

    def rest(self) -> None:
        """Take the work from the model that is awake: another one that has a request wakes."""
        self.redis.client.delete(Keys(AWAKE).requests("low"))

    def wake(self) -> None:
        """Let the model wake, and start its worker."""
        self.rest()
        until("the model is to be awake", lambda: self.is_awake(ASLEEP))
        self.worker = TokenWorker("worker-0", self.keys, self.redis.client).start()

    def check_nothing_is_left(self) -> None:
        """No request of the model waits, in the queue's counts neither, and another model that has one wakes."""
        until("the request has ended", lambda: self.entries() == 0)
        counts = self.hash(self.keys.queue)
        assert {name for name, count in counts.items() if count != b"0"} <= {b"bytes"}
        self.redis.client.xadd(Keys(OTHER).requests("low"), {"r": "x"})
        self.rest()
        until("the other model is to be awake", lambda: self.is_awake(OTHER))
        assert not self.is_awake(ASLEEP)

    def record(self, name: str) -> dict[str, Any]:
        return dict(self.gateway.get(f"/v1/requests/{name}").json())


def body(**fields: Any) -> dict[str, Any]:
    return {
        "model": ASLEEP, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip


@pytest.fixture
def sleeper(request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer) -> Iterator[Sleeper]:
    with Sleeper(tmp_path, redis_server, getattr(request, "param", 0)) as running:
        yield running


@contextmanager
def streaming(sleeper: Sleeper, method: str, path: str, headers: dict[str, str], **options: Any) -> Iterator[Any]:
    """Yield the answer while it streams; leave it at the end of the block."""
    url = sleeper.gateway.url + path
    with httpx.stream(method, url, headers=headers, timeout=60, verify=PLAIN, **options) as answer:
        assert answer.status_code == 200, answer.read()
        yield answer


def tokens_of(answer: httpx.Response) -> list[int]:
    """Return the token ids of the rest of a stream. Raise AssertionError where it has no end."""
    found: list[int] = []
    for event in sse.events(answer.iter_lines()):
        if event.data == sse.DONE:
            return found
        for choice in event.json["choices"]:
            found += choice.get("token_ids") or []
    raise AssertionError(f"the stream has no end behind {found}")


def test_client_that_leaves_cancels_its_request(sleeper: Sleeper) -> None:
    with streaming(sleeper, "POST", "/v1/completions", {}, json=body(stream=True)) as answer:
        name = answer.headers["x-orcinus-request"]
        until("the request waits", lambda: sleeper.entries() == 1)
    sleeper.check_nothing_is_left()
    assert sleeper.record(name)["finish_reasons"] == ["cancelled"]


@pytest.mark.parametrize("sleeper", [LOAD_MS], indirect=True)
@pytest.mark.parametrize("background", [False, True])
def test_request_ends_at_its_deadline(sleeper: Sleeper, background: bool) -> None:
    """No placer runs meanwhile, so the model sleeps longer than the last one has said."""
    sleeper.kill_placer()
    answer = sleeper.gateway.post("/v1/completions", body(deadline_ms=DEADLINE_MS, background=background))
    name = answer.headers["x-orcinus-request"]
    assert answer.status_code == (202 if background else 200), answer.text
    if not background:
        (choice,) = answer.json()["choices"]
        assert (choice["finish_reason"], choice["token_ids"]) == ("deadline", [])
    until("the request has ended", lambda: sleeper.record(name)["status"] == "finished")
    if background:  # without a client the scheduler alone ends it
        assert sleeper.record(name)["finish_reasons"] == ["deadline"]
    sleeper.start_placer()
    sleeper.check_nothing_is_left()


def test_client_with_a_key_comes_back_and_reads_all(sleeper: Sleeper) -> None:
    call: dict[str, Any] = {
        "method": "POST",
        "path": "/v1/completions",
        "headers": {"Idempotency-Key": "k"},
        "json": body(stream=True),
    }
    with streaming(sleeper, **call):
        until("the request waits", lambda: sleeper.entries() == 1)
    with streaming(sleeper, **call) as answer:
        assert sleeper.state() == "asleep" and sleeper.entries() == 1
        sleeper.wake()
        assert tokens_of(answer) == answer_of(PROMPT, TOKENS)
    with streaming(sleeper, **call) as answer:
        assert tokens_of(answer) == answer_of(PROMPT, TOKENS), "read again"


def test_client_goes_on_behind_the_death_of_its_gateway(sleeper: Sleeper) -> None:
    with streaming(sleeper, "POST", "/v1/completions", {}, json=body(stream=True)) as answer:
        name = answer.headers["x-orcinus-request"]
        until("the scheduler has seen request and gateway", lambda: sleeper.stats().get(b"waiting") == b"1")
        sleeper.replace_gateway()
    until("the request is parked", lambda: sleeper.stats().get(b"parked") == b"1")
    with streaming(sleeper, "GET", f"/v1/requests/{name}/stream", {}) as answer:
        assert sleeper.state() == "asleep"
        sleeper.wake()
        assert tokens_of(answer) == answer_of(PROMPT, TOKENS)


def test_lines_of_a_batch_wait_for_the_model(sleeper: Sleeper) -> None:
    prompts = {f"line-{at}": [*PROMPT, 100 + at] for at in range(3)}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body(prompt=prompt)}
        for name, prompt in prompts.items()
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    form: dict[str, Any] = {"files": {"file": ("x.jsonl", content)}, "data": {"purpose": "batch"}}
    file = sleeper.gateway.request("POST", "/v1/files", **form).json()
    order = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    name = sleeper.gateway.request("POST", "/v1/batches", json=order).json()["id"]
    until("all lines wait", lambda: sleeper.entries() == len(lines))
    assert sleeper.batch(name)["request_counts"] == {"total": 3, "completed": 0, "failed": 0}
    sleeper.wake()
    until("the batch has ended", lambda: sleeper.batch(name)["status"] == "completed")
    output = sleeper.gateway.get(f"/v1/files/{sleeper.batch(name)['output_file_id']}/content").text
    rows = {row["custom_id"]: row["response"]["body"]["choices"][0] for row in map(json.loads, output.splitlines())}
    expected = {name: answer_of(prompt, TOKENS) for name, prompt in prompts.items()}
    assert {name: choice["token_ids"] for name, choice in rows.items()} == expected
