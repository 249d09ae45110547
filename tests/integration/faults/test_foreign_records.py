"""A scheduler and a gateway go on among records that no service wrote; these lie in `dead`, the rest is served."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.exceptions import ResponseError

from tests.integration.faults.broken_records import BORDERS, Borders
from tests.integration.faults.foreign_records import BOUND, documented, grammars_of, run
from tests.support.stack import RedisServer
from tests.support.stand_ins.token_stack import PROMPT, TOKENS, TokenStack
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


@pytest.mark.parametrize("way", ["deleted", "another text"])
def test_request_with_a_lost_grammar_ends_alone(tmp_path: Path, way: str) -> None:
    """No sequence runs without its grammar, nor with another. A request that comes later brings the text again."""
    with (
        RedisServer(tmp_path / "redis") as server,
        TokenStack(tmp_path / "stack", server) as stack,
        ThreadPoolExecutor(2) as pool,
    ):
        client, keys = server.client, stack.keys
        worker = stack.worker("worker-a").start()
        stack.wait_answer(60)
        lease = client.get(keys.lease("shard-0"))
        stack.kill_scheduler()
        client.set(keys.lease("shard-0"), lease)  # the gateway takes requests all the same
        asked = [pool.submit(_ask_until_taken, stack, **fields) for fields in ({}, BOUND)]
        until("both are queued", lambda: client.xlen(keys.requests("normal")) == 2)
        found = client.hgetall(keys.queue_grammars)
        (name,) = [field for field, text in found.items() if field.startswith(b"text:") and b"a" * 600 in text]
        if way == "deleted":
            client.delete(keys.queue_grammars)
        else:
            client.hset(keys.queue_grammars, name, found[name].replace(b"a", b"b"))
        client.delete(keys.lease("shard-0"))
        stack.start_scheduler()
        plain, bound = [future.result() for future in asked]
        assert plain.json()["choices"][0]["token_ids"] == answer(PROMPT, TOKENS), plain.text
        assert bound.status_code == 500, bound.text
        assert "grammar: Redis has lost its text; send the request again" in bound.json()["error"]["message"]
        assert grammars_of(worker.entered, BOUND["prompt"]) == set()

        again = _ask_until_taken(stack, **BOUND)
        assert again.json()["choices"][0]["token_ids"] == answer(BOUND["prompt"], TOKENS), again.text
        assert grammars_of(worker.entered, BOUND["prompt"]) == {found[name].decode()}
        until("nothing is left", lambda: not client.exists(keys.queue_grammars))


def test_running_request_that_lost_its_grammar_ends_with_an_error(tmp_path: Path) -> None:
    """The next scheduler cannot go on with it: the tokens that it has are no whole answer."""
    with (
        RedisServer(tmp_path / "redis") as server,
        TokenStack(tmp_path / "stack", server) as stack,
        ThreadPoolExecutor(1) as pool,
    ):
        client, keys = server.client, stack.keys
        stack.worker("worker-a").start()
        stack.wait_answer(60)
        (tokens,) = client.keys(keys.tokens("*"))
        before = client.xlen(tokens)
        asked = pool.submit(stack.ask, 60.0, tokens=300, **BOUND)
        until("it has tokens", lambda: client.xlen(tokens) > before + 5)
        stack.kill_scheduler()
        client.delete(keys.queue_grammars)
        stack.start_scheduler()
        response = asked.result()
        assert response.status_code == 500, response.text
        assert "grammar: Redis has lost its text" in response.json()["error"]["message"]


def _ask_until_taken(stack: TokenStack, **fields: Any) -> httpx.Response:
    """Return the answer to a request, which is sent until the gateway sees that a scheduler leads."""

    def taken() -> httpx.Response | None:
        response = stack.ask(60.0, **fields)
        return None if response.status_code == 503 else response

    response = until("the gateway takes it", taken)
    assert response is not None
    return response


LAST = (1 << 64) - 1
HIGHEST = f"{LAST}-{LAST}"


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


@pytest.mark.parametrize("number", [LAST - 1, LAST - 3])
def test_gateway_reads_its_stream_behind_an_id_close_to_the_highest(stack: TokenStack, number: int) -> None:
    """The next entries get the ids up to the highest. Reading records instead costs each request seconds."""
    client, keys = stack.redis.client, stack.keys
    (gateway,) = [key.decode().rpartition(":")[2] for key in client.keys(f"{keys.prefix}alive:gateway:*")]
    client.xadd(keys.tokens(gateway), {"x": "y"}, id=f"{LAST}-{number}")

    def read_from_records() -> float:
        return stack.gateway.metric("orcinus_gateway_refilled_rows_total")

    def is_read() -> bool:
        before = read_from_records()
        response = stack.ask(60.0, tokens=100)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == answer(PROMPT, 100)
        return read_from_records() == before

    until(
        "the stream goes on", lambda: stack.answers() and not _last(stack, keys.tokens(gateway)).startswith(str(LAST))
    )
    until("the gateway reads it", is_read)
    assert is_read()


def _last(stack: TokenStack, stream: str) -> str:
    """Return the last id that a stream has had; empty where there is none."""
    with suppress(ResponseError):
        return str(stack.redis.client.xinfo_stream(stream)["last-generated-id"].decode())
    return ""


def _sources(stack: TokenStack) -> set[str]:
    return {fields[b"key"].decode() for _, fields in stack.redis.client.xrange(stack.keys.dead)}
