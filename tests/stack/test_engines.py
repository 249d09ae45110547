"""`orcinus engines` with two models of which one is awake at a time, beside a gateway and a Redis with a user for each
service: it heals what dies, ends with all of its processes, and shares the models with another one. Every answer is
transformers'.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deploy import redis_users
from shared.keys import PLACER, PLACER_KEYS, Keys
from shared.placement import Placement
from tests.support.checkpoints.models import Reference, make_llama
from tests.support.gateway.clients import Stream
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.launcher import ROOT, alive, settings_env
from tests.support.stack import PLAIN, RedisServer
from tests.support.waiting import until

TOKENS = 400
STREAM_TOKENS = 1600
"""Of a stream that has to be under way when its engines are stopped, a moment after its first token was read."""
LONG = {"max_position_embeddings": 2048}
START_S = 200.0
FILE = """
awake: 1
models:
  one: {source: models/one, kv_blocks: 256}
  org/Two: {source: models/two, kv_blocks: 256}
"""
ONE, TWO = Keys("one"), Keys("org/Two")
LEASES = [PLACER_KEYS.lease(PLACER), ONE.lease("shard-0"), TWO.lease("shard-0")]


class Engines:
    """One `orcinus engines`, as on a machine of its own."""

    def __init__(self, directory: Path, redis: RedisServer, models: Path, secrets: Path, name: str) -> None:
        self.run_dir, self.name = directory / name, f"worker-{name}"
        self._log = directory / f"{name}.log"
        self._environment = settings_env(
            redis_url=redis.url, redis_users=secrets, models=models, run_dir=self.run_dir, worker_id=self.name,
            device="cpu", dtype="float32", threads=1, speculate="off", log_json=True,
        )  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Engines:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "services.cli", "engines"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment, cwd=ROOT)
        return self

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def pids(self) -> dict[str, int]:
        try:
            return dict(json.loads((self.run_dir / "processes.json").read_text()))
        except FileNotFoundError:
            return {}

    def is_healthy(self) -> bool:
        """Ask as the container does."""
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"engines ended:\n{self.log[-4000:]}")
        command = [sys.executable, "deploy/healthcheck.py", "engines"]
        env = {**self._environment, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True).returncode == 0

    def wait_healthy(self) -> Engines:
        until("the engines are healthy", self.is_healthy, START_S, every=0.5)
        return self

    def wait(self) -> int | None:
        """Return the exit status of a process that ends by itself."""
        return self._process and self._process.wait(START_S)

    def end(self, how: int) -> int:
        """Return the exit status of the process; all that it started must end with it."""
        if self._process is None:
            return 0
        children = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        if self._process.poll() is None:
            self._process.send_signal(how)
        code = self._process.wait(60)
        until("no process is left", lambda: not [one.pid for one in children if alive(one.pid)])
        return code


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    directory = tmp_path_factory.mktemp("file")
    one = make_llama(
        directory / "models" / "one", seed=21, requests=2, output_tokens=TOKENS, prompt_tokens=(8, 8), **LONG
    )
    two = make_llama(directory / "models" / "two", seed=22, requests=2, kind="qwen3")
    (directory / "models.yaml").write_text(FILE)
    return {"one": one, "org/Two": two}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("secrets")
    redis_users.main([str(directory)])
    with (directory / "users.acl").open("a") as acl:
        acl.write("user looks_on on >looks-on ~* &* +@all\n")
    return directory


@pytest.fixture(scope="module")
def redis(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--aclfile", str(secrets / "users.acl"))
    server.client.connection_pool.connection_kwargs |= {"username": "looks_on", "password": "looks-on"}
    with server:
        yield server


@pytest.fixture(scope="module")
def gateway(
    redis: RedisServer, references: dict[str, Reference], secrets: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    one = references["one"].path
    access = {"redis_username": "gateway", "redis_password": (secrets / "gateway.password").read_text()}
    settings = {"models": one.parent.parent / "models.yaml", "served_model_name": "one", **access}
    with running_gateway(tmp_path_factory.mktemp("gateway"), one, redis, **settings) as running:
        yield running


@pytest.fixture
def boxes(
    redis: RedisServer, references: dict[str, Reference], secrets: Path, tmp_path: Path
) -> Iterator[tuple[Engines, Engines]]:
    file = references["one"].path.parent.parent / "models.yaml"
    both = Engines(tmp_path, redis, file, secrets, "a"), Engines(tmp_path, redis, file, secrets, "b")
    try:
        yield both
    finally:
        for each in both:
            each.end(signal.SIGTERM)
            print(each.log[-6000:], file=sys.stderr)


def request(model: str, reference: Reference) -> dict[str, Any]:
    return {
        "model": model, "prompt": reference.prompts[0], "max_tokens": len(reference.outputs[0]), "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "priority": "realtime",
    }  # fmt: skip


def answer(gateway: GatewayProcess, model: str, reference: Reference, tokens: int = 0) -> list[int]:
    """Ask a model, perhaps for more tokens than the reference has. Its answer must begin with the reference's."""
    body, known = request(model, reference), reference.outputs[0]
    body["max_tokens"] = tokens or len(known)
    got = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=START_S, verify=PLAIN)
    assert got.status_code == 200, got.text
    ids: list[int] = got.json()["choices"][0]["token_ids"]
    assert (ids[: len(known)], len(ids)) == (known, body["max_tokens"])
    return ids


def stat(redis: RedisServer, keys: Keys, name: str) -> int:
    """Return a statistic of a model's shard."""
    client: Any = redis.client
    return int(client.hget(keys.stats("shard-0"), name) or 0)


@pytest.mark.timeout(600)
def test_engines_serve_models_in_turn_heal_a_worker_and_end_cleanly(
    boxes: tuple[Engines, Engines], gateway: GatewayProcess, redis: RedisServer, references: dict[str, Reference]
) -> None:
    engines = boxes[0].start().wait_healthy()
    assert engines.pids().keys() == {"worker-0", "scheduler-0", "scheduler-1", "placer-0"}
    for name, reference in references.items():
        answer(gateway, name, reference)
    worker = engines.pids()["worker-1"]
    psutil.Process(worker).kill()
    until("another worker runs", lambda: engines.pids().get("worker-1") not in (None, worker))
    for name, reference in references.items():
        answer(gateway, name, reference)
    traces = [*LEASES, TWO.worker(f"{engines.name}.1")]
    assert redis.client.exists(*traces) == len(traces)
    lines = [json.loads(line) for line in engines.log.splitlines() if line.startswith("{")]
    assert "orcinus.engines" in {line["logger"] for line in lines}
    assert engines.end(signal.SIGTERM) == 0
    assert not redis.client.exists(*traces, ONE.worker(f"{engines.name}.0"))
    assert not [path for path in engines.run_dir.iterdir() if path.is_file()]


@pytest.mark.timeout(600)
def test_engines_that_are_killed_leave_no_process_and_the_next_ones_go_on(
    boxes: tuple[Engines, Engines], gateway: GatewayProcess, redis: RedisServer, references: dict[str, Reference]
) -> None:
    first, second = boxes
    first.start().wait_healthy()
    expected = answer(gateway, "one", references["one"], STREAM_TOKENS)
    stream = Stream(gateway, **request("one", references["one"]) | {"max_tokens": STREAM_TOKENS})
    until("it has a token", stream.tokens, START_S)
    os.kill(first.pids()["worker-0"], signal.SIGSTOP)  # so that it does not finish first
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    state = redis.client.hget(ONE.req(stream.events[0]["id"]), "state")
    assert state == b"running", "tokens are missing, which the next ones compute"
    second.start()
    until("it has all tokens", lambda: stream.done, START_S)
    assert stream.tokens() == expected


@pytest.mark.timeout(600)
def test_two_engines_share_the_models_under_one_placer(
    boxes: tuple[Engines, Engines], gateway: GatewayProcess, redis: RedisServer, references: dict[str, Reference]
) -> None:
    first, second = boxes
    first.start().wait_healthy()
    led = redis.client.mget(LEASES)
    second.start().wait_healthy()
    until("the shard has both workers", lambda: stat(redis, ONE, "workers") == 2)
    assert redis.client.mget(LEASES) == led and None not in led, "those of the first lead, those of the second stand by"
    answer(gateway, "org/Two", references["org/Two"])
    until("both have changed", lambda: all({"worker-1"} <= each.pids().keys() for each in boxes))
    until("no worker of the other is left", lambda: not any("worker-0" in each.pids() for each in boxes))
    until("the shard has both workers", lambda: stat(redis, TWO, "workers") == 2)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    for name, reference in references.items():
        answer(gateway, name, reference)


@pytest.mark.timeout(600)
def test_engines_end_beside_a_placer_for_other_models_before_they_load(
    boxes: tuple[Engines, Engines], redis: RedisServer
) -> None:
    lease, placements = PLACER_KEYS.lease(PLACER), PLACER_KEYS.placements
    redis.client.delete(placements)
    redis.client.hset(placements, "one", Placement(True).encode())
    redis.client.hset(placements, "other", Placement(False).encode())
    redis.client.set(lease, "7:5eed", px=600_000)
    redis.client.set(PLACER_KEYS.shard_epoch(PLACER), "7:5eed 600000", px=600_000)
    try:
        assert boxes[0].start().wait() == 2
    finally:
        redis.client.delete(lease, placements)
    assert "has a placer for other models, one, other" in boxes[0].log
    assert "worker-0 of one: starting" not in boxes[0].log
