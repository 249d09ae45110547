"""A real gateway over a real Redis and a scripted scheduler. A module's GATEWAY is the settings of its gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.keys import Keys
from shared.security import api_keys
from shared.security.api_keys import KeyRecord
from tests.support.checkpoints.tokenizers import shared_byte_level, token_ids, write_model
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler, answering

KEY = "sk-test-0123456789"
OTHER = "sk-other-9876543210"
TEXT = "The quick brown fox 🐋 jumps over the lazy dog"


def add_key(server: RedisServer, keys: Keys, tenant: str = "alice", **fields: Any) -> str:
    """Write a key as `orcinus keys add` does; return its text."""
    key_id, text = api_keys.new_key()
    record = KeyRecord(key_id, api_keys.digest(text).hex(), "test", tenant, **fields)
    server.client.hset(keys.api_keys, key_id, record.encode())
    server.client.incr(keys.keys_version)
    return text


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for each process of pytest."""
    with RedisServer(tmp_path_factory.mktemp("redis"), "--maxmemory", "64mb") as server:
        yield server


@pytest.fixture(scope="module")
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """The shared server, empty."""
    shared_redis.client.flushall()
    return shared_redis


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return shared_byte_level()


@pytest.fixture(scope="module")
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path, redis_server: RedisServer
) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("gateway")
    settings = getattr(request.module, "GATEWAY", None)
    if settings is None:
        (directory / "keys").write_text(f"{KEY}\n\n{OTHER}\n")
        settings = {"api_key_file": directory / "keys", "max_queued_tokens": 1000, "max_body_bytes": 200_000}
    with running_gateway(directory, model, redis_server, **settings) as running:
        if "api_key_file" in settings:
            running.key = KEY
        yield running


@pytest.fixture
def scheduler(gateway: GatewayProcess, redis_server: RedisServer) -> ScriptedScheduler:
    redis_server.client.delete(gateway.keys.queue)
    leading = ScriptedScheduler(redis_server.client, gateway.keys).lead()
    gateway.wait_ready()
    return leading


@pytest.fixture
def answers(scheduler: ScriptedScheduler) -> Iterator[None]:
    """Every request is answered with TEXT."""
    with answering(scheduler, lambda _: token_ids(TEXT)):
        yield
