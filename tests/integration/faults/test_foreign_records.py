"""A scheduler and a gateway go on among records that no service wrote; these lie in `dead`, the rest is served."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from redis.exceptions import ResponseError

from tests.support.broken_records import BORDERS, Borders
from tests.support.foreign_records import documented, run
from tests.support.stack import RedisServer
from tests.support.stand_ins.token_stack import TokenStack
from tests.support.stand_ins.token_worker import answer
from tests.support.waiting import until


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[TokenStack]:
    with TokenStack(tmp_path_factory.mktemp("stack"), redis_server) as running:
        running.worker("worker-a").start()
        running.wait_answer(60)
        yield running


def test_undecodable_records_are_set_aside_at_restart(stack: TokenStack) -> None:
    client, keys = stack.redis.client, stack.keys
    (gateway,) = [key.decode().rpartition(":")[2] for key in client.keys(f"{keys.prefix}alive:gateway:*")]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(stack.ask, 60.0, [97 + number], 300) for number in range(8)]
        records = f"{keys.prefix}req:*"
        until("one runs", lambda: b"running" in {client.hget(key, "state") for key in client.keys(records)})
        stack.kill_scheduler()
        client.xadd(keys.tokens(gateway), {"b": b"\xff\xff"})
        client.hset(keys.worker("worker-bad"), mapping={"address": "x", "identity": "y", "slots": "x", "ready": 1})
        client.hset(keys.worker("worker-\u00fc"), mapping={"address": b"\xff", "ready": 1})
        client.zadd(keys.workers, {"worker-bad": 1, "worker-\u00fc": 1, b"\xff\xfe": 1})
        client.xadd(keys.control("shard-0"), {"c": b"\xff"})
        client.hset(keys.api_keys, b"\xff", b"{}")
        client.incr(keys.keys_version)
        client.hset(keys.shards, b"\xff", 1)
        client.hset(keys.queue, "tokens", "x")
        client.sadd(keys.background, b"\xff")
        stack.start_scheduler()
        answers = [future.result() for future in asked]
    for number, response in enumerate(answers):
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == answer([97 + number], 300)
    stack.check_alive()
    wanted = {keys.tokens(gateway), keys.control("shard-0"), keys.worker("worker-bad"), keys.workers, keys.api_keys}
    until("all are in `dead`", lambda: wanted <= _sources(stack))
    assert all(len(fields[b"content"]) <= 256 for _, fields in client.xrange(keys.dead))
    assert stack.gateway.metric("orcinus_gateway_unreadable_records_total") > 0


@pytest.mark.parametrize("border", BORDERS)
def test_record_that_no_service_writes_is_refused(stack: TokenStack, border: str) -> None:
    Borders(stack).check(border, BORDERS[border])


def test_services_go_on_among_mutated_records(stack: TokenStack) -> None:
    """Every answer is right or an error, whichever of the documented keys is spoilt."""
    kinds, answers = run(stack, 5, seed=20_261_123)
    assert set(kinds) == set(documented()) and len(kinds) > 40
    assert answers.get(200, 0) > 0, answers


HIGHEST = "18446744073709551615-18446744073709551615"


@pytest.mark.parametrize("first", ["18446744073709551615-1", HIGHEST])
def test_entry_with_the_highest_id_ends_no_stream(stack: TokenStack, first: str) -> None:
    """XADD adds nothing behind such an entry."""
    client, keys = stack.redis.client, stack.keys
    (gateway,) = [key.decode().rpartition(":")[2] for key in client.keys(f"{keys.prefix}alive:gateway:*")]
    streams = [
        keys.requests("normal"), keys.tokens(gateway), keys.control("shard-0"), keys.queue_kept, keys.dead, keys.events,
    ]  # fmt: skip
    for stream in streams:
        for entry in sorted({first, HIGHEST}):
            client.xadd(stream, {"x": "y"}, id=entry)
    until("the queue goes on", lambda: _last(stack, keys.requests("normal")) != HIGHEST)
    until("commands are taken", lambda: _last(stack, keys.control("shard-0")) != HIGHEST)
    with ThreadPoolExecutor(4) as pool:
        for number, response in enumerate(pool.map(lambda number: stack.ask(60.0, [97 + number], 100), range(4))):
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["token_ids"] == answer([97 + number], 100)
    until("tokens go on", lambda: _last(stack, keys.tokens(gateway)) != HIGHEST)
    stack.check_alive()
    for stream in streams:
        client.delete(stream)


def _last(stack: TokenStack, stream: str) -> str:
    """Return the last id that a stream has had; empty where there is none."""
    with suppress(ResponseError):
        return str(stack.redis.client.xinfo_stream(stream)["last-generated-id"].decode())
    return ""


def _sources(stack: TokenStack) -> set[str]:
    return {fields[b"key"].decode() for _, fields in stack.redis.client.xrange(stack.keys.dead)}
