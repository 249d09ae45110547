"""The queue's bounds in enqueue.lua, and the counts that they go by in all the scripts that touch them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from protos import queue_pb2
from services.gateway.request import KEPT_KEY_BYTES
from services.scheduler.requests.intake import Clock, Intake
from shared.keys import GROUP, grammar_name
from shared.lease import Lease
from shared.redis_client import KEPT_TTL_MS, Scripts, place_of
from shared.wire.columns import pack
from tests.integration.redis.script_calls import (
    KEYS,
    SHARD,
    claim,
    claimed,
    enqueue,
    enqueue_all,
    lease,
    publication,
    publish,
)
from tests.integration.redis.script_calls import client as client  # the fixtures
from tests.integration.redis.script_calls import scripts as scripts
from tests.integration.redis.script_calls import server as server


async def test_queue_is_bounded_in_tokens_beyond_one_long_request(client: Any, scripts: Scripts) -> None:
    assert (await enqueue(scripts, "a", tokens=500))[0] == b"ok"
    assert await enqueue(scripts, "b", tokens=1) == [b"full", 500]
    assert await client.exists(KEYS.req("b")) == 0


async def test_tenant_with_its_share_of_the_queue_is_refused_alone(client: Any, scripts: Scripts) -> None:
    assert (await enqueue(scripts, "a", tokens=60, of_tenant=50))[0] == b"ok", "its first, however long it is"
    assert await enqueue(scripts, "b", tokens=1, of_tenant=50) == [b"tenant", 60, 1]
    assert (await enqueue(scripts, "c", tokens=40, of_tenant=50, tenant="bob"))[0] == b"ok"
    assert await client.hgetall(KEYS.queue_tenants) == {b"alice": b"60", b"bob": b"40"}
    assert await enqueue(scripts, "d", tokens=1, tenant="carol") == [b"full", 100]


async def test_long_wait_refuses_tenants_with_an_even_share_only(client: Any, scripts: Scripts) -> None:
    assert (await enqueue(scripts, "a", tokens=60, late=1))[0] == b"ok", "nothing waits"
    assert await enqueue(scripts, "b", late=1) == [b"late"]
    assert (await enqueue(scripts, "c", late=1, tenant="bob"))[0] == b"ok"
    assert (await enqueue(scripts, "d", tokens=9, late=1, tenant="bob"))[0] == b"ok"
    assert await enqueue(scripts, "e", late=1) == [b"late"]
    assert (await enqueue(scripts, "f", most=200, tokens=41, tenant="bob"))[0] == b"ok"
    assert await enqueue(scripts, "g", most=200, late=1, tenant="bob") == [b"late"], "60 each by now"


async def test_count_of_a_tenant_ends_with_its_last_waiting_request(client: Any, scripts: Scripts) -> None:
    """Of a record that is gone; test_shard_moves.py has those that start and end."""
    epoch = await lease(scripts, "acquire")
    for name, changes in {"r": {}, "other": {}, "bobs": {"tokens": 7, "tenant": "bob"}}.items():
        await enqueue(scripts, name, **changes)
    await client.delete(KEYS.req("r"))
    ((_, entry), *_) = await claim(client, scripts, epoch)
    gone = [KEYS.requests("normal"), entry, ""]
    for _ in range(2):  # a call that is repeated counts once
        await scripts.drop([KEYS.lease(SHARD), KEYS.queue], [epoch, GROUP, *gone])
    assert await client.hgetall(KEYS.queue_tenants) == {b"alice": b"10", b"bob": b"7"}
    await publish(scripts, publication(epoch, [], [], ["other", "bobs"], []))
    assert await client.exists(KEYS.queue_tenants) == 0


async def test_entry_that_redis_lost_with_its_counts_is_not_counted_back(client: Any, scripts: Scripts) -> None:
    epoch = await lease(scripts, "acquire")
    await enqueue(scripts, "r")
    ((_, entry), *_) = await claim(client, scripts, epoch)
    await client.delete(KEYS.req("r"), KEYS.requests("normal"), KEYS.queue, KEYS.queue_tenants, KEYS.queue_bytes)
    rows = [KEYS.requests("normal"), entry, ""]
    await scripts.drop([KEYS.lease(SHARD), KEYS.queue], [epoch, GROUP, *rows])
    assert await client.exists(KEYS.queue, KEYS.queue_tenants) == 0


async def test_stale_count_of_a_tenant_ends_with_the_queue(client: Any, scripts: Scripts) -> None:
    await client.hset(KEYS.queue_tenants, mapping={"alice": 5000, "bob": 3})
    assert (await enqueue(scripts, "a", of_tenant=50))[0] == b"ok"
    assert await client.hgetall(KEYS.queue_tenants) == {b"alice": b"10"}


async def test_refusal_leaves_the_others_of_its_call_alone(client: Any, scripts: Scripts) -> None:
    calls: dict[str, dict[str, Any]] = {
        "a": {"tokens": 60}, "b": {"tokens": 41}, "c": {"tokens": 40, "tenant": "bob"}, "d": {"rpm": 1, "tokens": 0},
    }  # fmt: skip
    answers = await enqueue_all(scripts, calls)
    assert [answer[0] for answer in answers] == [b"ok", b"full", b"ok", b"ok"]
    assert answers[1] == [b"full", 60], "what came before it in the call counts"
    assert [bool(await client.exists(KEYS.req(name))) for name in "abcd"] == [True, False, True, True]
    again, limited = await enqueue_all(scripts, {"a": {}, "e": {"rpm": 1, "tokens": 0}})
    assert again == [b"duplicate", b"queued"]
    assert (limited[0], limited[2]) == (b"rate", b"1 requests a minute")
    assert await client.hget(KEYS.queue, "requests") == b"3"


async def test_error_of_redis_leaves_the_others_of_the_call_alone(client: Any, scripts: Scripts) -> None:
    await client.set(KEYS.requests("low"), "of another type")
    answers = await enqueue_all(scripts, {"a": {}, "b": {"class": "low"}, "c": {}})
    assert [answer[0] for answer in answers] == [b"ok", b"error", b"ok"]
    assert b"WRONGTYPE" in answers[1][1]
    assert await client.xlen(KEYS.requests("normal")) == 2


HIGHEST = "18446744073709551615-18446744073709551615"
SIZE = len(b"payload" + b"go on") + 2048
"""Bytes of a request of `enqueue`."""
RECORD_BYTES = 1536
"""Of these, what its record holds behind its end, as in lib.lua."""
ENDED = RECORD_BYTES + len(b"go on") + KEPT_KEY_BYTES
"""What is counted behind the end of such a request with one choice."""


async def counted(client: Any) -> tuple[int, dict[bytes, bytes]]:
    return int(await client.hget(KEYS.queue, "bytes") or 0), await client.hgetall(KEYS.queue_bytes)


async def test_bytes_are_bounded_in_all_and_by_tenant(client: Any, scripts: Scripts) -> None:
    bounds = {"tokens": 1, "most_bytes": 3 * SIZE, "tenant_bytes": 2 * SIZE}
    for name in ("a", "b"):
        assert (await enqueue(scripts, name, **bounds))[0] == b"ok"
    assert await enqueue(scripts, "c", **bounds) == [b"tenant bytes", 2 * SIZE, SIZE, 0, 2, 1]
    assert (await enqueue(scripts, "d", tenant="bob", **bounds))[0] == b"ok"
    assert await enqueue(scripts, "e", tenant="carol", **bounds) == [b"bytes", 3 * SIZE, SIZE, 0, 3]
    assert await counted(client) == (3 * SIZE, {b"alice": b"%d" % (2 * SIZE), b"bob": b"%d" % SIZE})
    assert await client.exists(KEYS.req("c"), KEYS.req("e")) == 0


async def test_conversation_that_a_gateway_holds_counts(client: Any, scripts: Scripts) -> None:
    bounds = {"tokens": 1, "most_bytes": 3 * SIZE}
    assert (await enqueue(scripts, "a", conversation=SIZE, **bounds))[0] == b"ok"
    assert await counted(client) == (2 * SIZE, {b"alice": b"%d" % (2 * SIZE)})
    assert await enqueue(scripts, "b", conversation=1, **bounds) == [b"bytes", 2 * SIZE, SIZE + 1, 0, 1]
    assert (await enqueue(scripts, "c", **bounds))[0] == b"ok"


async def test_counted_bytes_cover_what_redis_holds(client: Any, scripts: Scripts) -> None:
    parts = {"request": bytes(40_000), "delivery": bytes(300), "most": 1 << 30, "of_tenant": 1 << 30}
    # Without buffers: that of the AOF holds every command again while the disk is slow.
    before = (await client.info("memory"))["used_memory_dataset"]
    for number in range(100):
        await enqueue(scripts, f"r{number}", prompts=bytes(number * 1000), **parts)
    held = (await client.info("memory"))["used_memory_dataset"] - before
    assert held / 1.25 < (await counted(client))[0] < 1.25 * held


async def test_bytes_of_prompt_logprobs_count_until_they_are_gone(client: Any, scripts: Scripts) -> None:
    bounds = {"tokens": 1, "tenant_bytes": 2 * SIZE + 5000}
    epoch, *_ = await claimed(client, scripts)
    for name in ("a", "b"):
        assert (await enqueue(scripts, name, kept=4000, **bounds))[0] == (b"ok" if name == "a" else b"tenant bytes")
    found = await client.xreadgroup(GROUP, SHARD, {KEYS.requests("normal"): ">"})
    ((_, [(entry, _)]),) = found
    end = ["a", KEYS.requests("normal"), entry, "1", 10, "0", ""]
    beside = RECORD_BYTES + 2 * KEPT_KEY_BYTES + await client.hstrlen(KEYS.req("a"), "delivery")
    await client.set(KEYS.prompt_logprobs("a", 0), bytes(4000 - beside))
    for _ in range(2):  # a call that is repeated counts once
        await publish(scripts, publication(epoch, [], [], ["a"], end))
        assert await counted(client) == (SIZE + 4000, {b"alice": b"%d" % (SIZE + 4000)}), "r waits, those of a stay"
    assert (await enqueue(scripts, "b", kept=4000, **bounds))[0] == b"tenant bytes"
    ((kept, fields),) = await client.xrange(KEYS.queue_kept)
    await client.delete(KEYS.queue_kept)
    long_ago = int(kept.partition(b"-")[0]) - KEPT_TTL_MS - 1
    await client.xadd(KEYS.queue_kept, fields, id=f"{long_ago}-0")
    assert (await enqueue(scripts, "b", kept=4000, **bounds))[0] == b"ok"
    assert await counted(client) == (2 * SIZE + 4000, {b"alice": b"%d" % (2 * SIZE + 4000)})


async def end_with_tokens(scripts: Scripts, epoch: int, name: str, entry: bytes, choices: int = 1) -> None:
    """End a request with one token in each choice."""
    tokens = [row for choice in range(choices) for row in (name, choice, 0, pack([7]), 2, 1)]
    finish, lengths = ",".join("2" * choices), ",".join("1" * choices)
    row = [name, KEYS.requests("normal"), entry, finish, 10, lengths, ""]
    assert await publish(scripts, publication(epoch, [], tokens, [name], row)) == []


async def used_bytes(client: Any) -> int:
    """Return what counts against maxmemory, without the buffer of the AOF."""
    memory = await client.info("memory")
    return int(memory["used_memory"]) - int(memory["mem_aof_buffer"])


@pytest.mark.parametrize(
    ("choices", "delivery", "requests"), [(1, 100, 1000), (1, 8000, 300), (128, 50, 60), (128, 4500, 60)],
    ids=["plain", "stop", "choices", "prompts"],
)  # fmt: skip
async def test_counted_bytes_cover_ended_requests_until_they_expire(
    client: Any, scripts: Scripts, choices: int, delivery: int, requests: int
) -> None:
    """One tenant ends requests until the next is refused."""
    kept = choices * KEPT_KEY_BYTES
    size = 2048 + len(b"payload") + delivery + kept
    bounds: dict[str, Any] = {"tokens": 0, "kept": kept, "delivery": bytes(delivery), "tenant_bytes": requests * size}
    epoch = await lease(scripts, "acquire")
    before, number = await used_bytes(client), 0
    while number < 2 * requests and (answer := await enqueue(scripts, f"r{number}", **bounds))[0] == b"ok":
        await end_with_tokens(scripts, epoch, f"r{number}", answer[1], choices)
        number += 1
    held = await used_bytes(client) - before
    total, tenants = await counted(client)
    assert answer[0] == b"tenant bytes" and requests <= number < 1.5 * requests
    assert total == int(tenants[b"alice"]) <= bounds["tenant_bytes"]
    assert total / 1.6 < held < 1.3 * total
    assert 0 < answer[3] <= KEPT_TTL_MS

    rows = await client.xrange(KEYS.queue_kept)
    assert len({place_of(entry)[0] // 1000 for entry, _ in rows}) == len(rows), "those of a second share a row"
    await client.delete(KEYS.queue_kept)
    for index, (entry, fields) in enumerate(rows):
        await client.xadd(KEYS.queue_kept, fields, id=f"{place_of(entry)[0] - KEPT_TTL_MS - 30_000}-{index}")
    assert (await enqueue(scripts, "next", **bounds))[0] == b"ok"
    assert await counted(client) == (size, {b"alice": b"%d" % size})


async def test_kept_bytes_of_a_second_are_counted_by_tenant(client: Any, scripts: Scripts) -> None:
    epoch = await lease(scripts, "acquire")
    tenants = ("alice", "bob", "alice", "bob", "alice")
    answers = await enqueue_all(scripts, {f"r{at}": {"tokens": 0, "tenant": name} for at, name in enumerate(tenants)})
    rows: list[Any] = []
    for number, answer in enumerate(answers):
        rows += [f"r{number}", KEYS.requests("normal"), answer[1], "2", 10, "0", ""]
    await publish(scripts, publication(epoch, [], [], [], rows))
    expected = {b"alice": b"%d" % (3 * ENDED), b"bob": b"%d" % (2 * ENDED)}
    assert await counted(client) == (5 * ENDED, expected)
    kept = await client.xrange(KEYS.queue_kept)
    assert len(kept) == 2 and {row[b"tenant"]: row[b"bytes"] for _, row in kept} == expected
    await scripts.recount([KEYS.lease(SHARD), KEYS.queue], [epoch, 100])
    assert (await counted(client))[0] == 5 * ENDED


async def test_end_of_an_older_gateways_request_keeps_no_bytes(client: Any, scripts: Scripts) -> None:
    """Its entry has no field `kept`, and it was admitted without them."""
    epoch = await lease(scripts, "acquire")
    answer = await enqueue(scripts, "r")
    ((_, fields),) = await client.xrange(KEYS.requests("normal"))
    entry = await client.xadd(KEYS.requests("normal"), {name: fields[name] for name in (b"r", b"tenant", b"bytes")})
    await client.xdel(KEYS.requests("normal"), answer[1])
    await end_with_tokens(scripts, epoch, "r", entry)
    assert (await counted(client), await client.xlen(KEYS.queue_kept)) == ((0, {}), 0)


@pytest.mark.parametrize("ahead_ms", [KEPT_TTL_MS + 60_000, 10**15], ids=["minutes", "ages"])
async def test_foreign_entry_of_the_future_keeps_no_bytes(client: Any, scripts: Scripts, ahead_ms: int) -> None:
    """Redis gives all entries behind it later ids, so these are counted back, too; then its clock counts again."""
    bounds = {"tokens": 1, "tenant_bytes": 2 * SIZE}
    now = int((await client.time())[0]) * 1000
    await client.xadd(KEYS.queue_kept, {"x": "y"}, id=f"{now + ahead_ms}-0")
    await client.xadd(KEYS.queue_kept, {"tenant": "alice", "bytes": -(1 << 50)}, id=f"{now + ahead_ms}-1")
    await client.xadd(KEYS.queue_kept, {"tenant": "alice", "bytes": 2 * SIZE})
    await client.hset(KEYS.queue_bytes, "alice", 2 * SIZE)
    await client.hset(KEYS.queue, "bytes", 2 * SIZE)
    assert (await enqueue(scripts, "a", **bounds))[0] == b"ok"
    assert await counted(client) == (SIZE, {b"alice": b"%d" % SIZE})
    assert await client.xlen(KEYS.queue_kept) == 0
    entry = await client.xadd(KEYS.queue_kept, {"tenant": "alice", "bytes": 1})
    assert int(entry.partition(b"-")[0]) < now + KEPT_TTL_MS
    assert (await enqueue(scripts, "b", **bounds | {"tenant": "bob"}))[0] == b"ok"
    assert await client.xlen(KEYS.queue_kept) == 1, "one of the present stays"


async def test_refusal_by_kept_bytes_says_when_enough_have_gone(client: Any, scripts: Scripts) -> None:
    """Alice keeps 3,000 bytes for three minutes and 2,000 for four. Bob holds as many; his request has not ended."""
    bounds = {"tokens": 1, "tenant": "alice", "most_bytes": 1 << 20, "tenant_bytes": SIZE + 4000}
    now = int((await client.time())[0]) * 1000
    for minutes, size in ((3, 3000), (4, 2000)):
        for tenant in ("alice", "bob"):
            at = now - KEPT_TTL_MS + minutes * 60_000
            await client.xadd(KEYS.queue_kept, {"tenant": tenant, "bytes": size}, id=f"{at}-{int(tenant == 'bob')}")
    await client.hset(KEYS.queue_bytes, mapping={"alice": 5000, "bob": 5000})
    await client.hset(KEYS.queue, "bytes", 10_000)
    assert (await enqueue(scripts, "bobs", **bounds | {"tenant": "bob", "tenant_bytes": 1 << 20}))[0] == b"ok"
    all_bytes = 10_000 + SIZE

    async def wait_s(name: bytes, **changes: Any) -> float:
        answer = await enqueue(scripts, "new", **bounds | changes)
        assert answer[0] == name
        return float(round(answer[3] / 1000, -1))

    assert await wait_s(b"tenant bytes") == 180
    assert await wait_s(b"tenant bytes", tenant_bytes=SIZE + 2000) == 180, "just enough"
    assert await wait_s(b"tenant bytes", tenant_bytes=SIZE + 1999) == 240
    assert await wait_s(b"tenant bytes", tenant_bytes=1) == 240, "when nothing is held"
    other = {"tenant": "bob", "tenant_bytes": 5000 + SIZE}
    assert await wait_s(b"tenant bytes", **other) == 0, "that request may end"
    assert await wait_s(b"tenant bytes", **other | {"tenant_bytes": 4999}) == 240, "and is not enough"
    assert await wait_s(b"bytes", most_bytes=all_bytes) == 0
    assert await wait_s(b"bytes", most_bytes=2 * SIZE + 4000) == 180
    assert await wait_s(b"bytes", most_bytes=2 * SIZE + 3999) == 240


async def test_request_larger_than_the_bound_enters_alone(client: Any, scripts: Scripts) -> None:
    assert (await enqueue(scripts, "a", most_bytes=10, tenant_bytes=10))[0] == b"ok"
    assert (await enqueue(scripts, "b", most_bytes=10, tenant_bytes=10))[0] == b"bytes"


@pytest.mark.parametrize("way", ["gone", "unreadable"])
async def test_bytes_are_counted_until_the_entry_is_deleted(client: Any, scripts: Scripts, way: str) -> None:
    """Those of requests that start, end and go back: test_shard_moves.py."""
    intake = await leading(client, scripts)
    await enqueue(scripts, "r", request=b"\xff" if way == "unreadable" else b"\x0a\x01r")  # id: r
    await enqueue(scripts, "bobs", tenant="bob", request=b"\x0a\x04bobs")
    _, tenants = await counted(client)
    if way == "gone":
        await client.delete(KEYS.req("r"))
    assert [item.request.id for item in await intake.read([9, 9, 9, 9])] == ["bobs"]
    assert await counted(client) == (int(tenants[b"bob"]), {b"bob": tenants[b"bob"]})


async def test_bytes_of_a_deleted_stream_are_forgotten(client: Any, scripts: Scripts) -> None:
    bounds = {"tokens": 1, "most_bytes": SIZE, "tenant_bytes": SIZE}
    await enqueue(scripts, "a", **bounds)
    assert (await enqueue(scripts, "b", **bounds))[0] == b"bytes"
    await client.delete(KEYS.requests("normal"))
    assert (await enqueue(scripts, "b", **bounds))[0] == b"ok"
    assert await counted(client) == (SIZE, {b"alice": b"%d" % SIZE})


@pytest.mark.parametrize("number", ["1000000", "-1000000", "x"])
async def test_wrong_counts_of_the_queue_are_forgotten_once_it_is_empty(
    client: Any, scripts: Scripts, number: str
) -> None:
    """Else all requests would be refused until an operator deletes them."""
    fields = ("tokens", "requests", "tokens:normal", "bytes")

    async def spoil() -> None:
        await client.hset(KEYS.queue, mapping=dict.fromkeys(fields, number))
        await client.hset(KEYS.queue_tenants, "alice", number)

    bounds = {"most": 100, "of_tenant": 100, "most_bytes": 1 << 20, "tenant_bytes": 1 << 20}
    await spoil()
    epoch = await lease(scripts, "acquire")
    answer = await enqueue(scripts, "a", **bounds)
    assert answer[0] == b"ok"
    assert [await client.hget(KEYS.queue, field) for field in fields] == [b"10", b"1", b"10", b"%d" % SIZE]
    assert await client.hgetall(KEYS.queue_tenants) == {b"alice": b"10"}
    await spoil()
    await enqueue(scripts, "b", **bounds)
    await ended(client, scripts, epoch, "a", answer[1])
    await client.delete(KEYS.requests("normal"))
    assert (await enqueue(scripts, "c", **bounds))[0] == b"ok"
    expected = [b"10", b"1", b"10", b"%d" % (SIZE + ENDED)]
    assert [await client.hget(KEYS.queue, field) for field in fields] == expected, "what stays of a counts"


COUNTS = (KEYS.queue, KEYS.queue_tenants, KEYS.queue_bytes, KEYS.queue_grammars)


async def counts(client: Any) -> list[dict[bytes, bytes]]:
    """Return all that is counted, without texts."""
    found = [await client.hgetall(name) for name in COUNTS]
    return [{field: number for field, number in held.items() if not field.startswith(b"text:")} for held in found]


async def busy(client: Any, scripts: Scripts) -> Lease:
    """Return the lease of a shard with a request that runs, two that wait and one that has ended with bytes kept."""
    held = Lease(scripts, KEYS, SHARD, 5000)
    await held.take()
    limits = {"most": 1000, "of_tenant": 1000}
    calls: dict[str, dict[str, Any]] = {
        "runs": {},
        "ended": {"delivery": b"d" * 9000},
        "waits": {"tokens": 30, "class": "low"},
        "bobs": {"tenant": "bob", "grammar": "sha256:a", "text": TEXT, "prompts": b"apart"},
    }
    answers = await enqueue_all(scripts, {name: values | limits for name, values in calls.items()}, share=1.0)
    row = ["ended", KEYS.requests("normal"), answers[1][1], "2", 10, "0", ""]
    await publish(scripts, publication(held.text, [], [], ["runs"], row))
    return held


@pytest.mark.parametrize("number", ["1000000", "0", "-1000000", "x"])
async def test_wrong_counts_of_a_busy_queue_are_counted_anew(client: Any, scripts: Scripts, number: str) -> None:
    """Of a queue that is never empty: else requests are refused for ever, or the bounds are not kept."""
    held = await busy(client, scripts)
    intake, before = Intake(client, client, scripts, KEYS, SHARD, held, Clock()), await counts(client)
    waiting = {b"requests": b"2", b"tokens": b"40", b"tokens:low": b"30", b"tokens:normal": b"10"}
    assert {field: before[0][field] for field in waiting} == waiting
    assert before[1:] == [
        {b"alice": b"30", b"bob": b"10"},
        {b"alice": b"%d" % (2 * SIZE + 9000 + ENDED - len(b"go on")), b"bob": b"%d" % (SIZE + 5 + 5000)},
        {b"requests:sha256:a": b"1", b"bytes:sha256:a": b"5000"},
    ]
    for key, fields in zip(COUNTS, before, strict=True):
        await client.hset(key, mapping=dict.fromkeys([*fields, "foreign"], number))
    await intake.recount(0.0)
    assert await counts(client) == before
    await client.delete(KEYS.queue, KEYS.queue_tenants, KEYS.queue_bytes)
    await intake.recount(0.1)
    assert await client.exists(KEYS.queue) == 0, "not before its time"
    await intake.recount(31.0)
    counted_anew = [{field: count for field, count in held.items() if count != b"0"} for held in before]
    assert await counts(client) == counted_anew


async def test_counts_without_their_stream_are_counted_anew(client: Any, scripts: Scripts) -> None:
    held = await busy(client, scripts)
    await client.delete(KEYS.requests("low"), KEYS.queue_kept)
    assert await scripts.recount([KEYS.lease(SHARD), KEYS.queue], [held.text, 2]) == 1
    assert await client.hgetall(KEYS.queue_tenants) == {b"bob": b"10"}
    assert await counted(client) == (2 * SIZE + 5005, {b"alice": b"%d" % SIZE, b"bob": b"%d" % (SIZE + 5005)})
    assert await scripts.recount([KEYS.lease(SHARD), KEYS.queue], [held.text, 2]) == 0


async def test_long_queue_is_not_counted_anew(client: Any, scripts: Scripts) -> None:
    """It would hold up Redis."""
    held = await busy(client, scripts)
    await client.hset(KEYS.queue, mapping={"tokens": 7, "bytes": 7})
    for most, expected in (
        (2, [b"7", b"7"]),
        (3, [b"40", b"7"]),
        (4, [b"40", b"%d" % (3 * SIZE + 14_005 + ENDED - len(b"go on"))]),
    ):
        await scripts.recount([KEYS.lease(SHARD), KEYS.queue], [held.text, most])
        assert await client.hmget(KEYS.queue, "tokens", "bytes") == expected


@pytest.mark.parametrize("seed", range(4))
async def test_counts_are_those_of_the_entries_after_each_call(client: Any, scripts: Scripts, seed: int) -> None:
    drawn, held = random.Random(seed), Lease(scripts, KEYS, SHARD, 60_000)
    await held.take()
    for number in range(60):
        name, kind = f"r{drawn.randrange(9)}", drawn.choice(["enqueue", "enqueue", "start", "end", "release", "drop"])
        fields = await client.hmget(KEYS.req(name), "stream", "entry", "state", "started_ms")
        stream, entry, state, started = (text.decode() if text else "" for text in fields)
        if kind == "enqueue":
            values = {"tenant": drawn.choice(["alice", "bob"]), "class": drawn.choice(["low", "high"]), "kept": 9}
            values |= {"grammar": "sha256:a", "text": TEXT, "tenant": "alice"} if drawn.random() < 0.3 else {}
            await enqueue(scripts, name, **values, tokens=drawn.randrange(1, 30))
        elif kind == "start" and state != "finished":
            await publish(scripts, publication(held.text, [], [], [name], []))
        elif stream and kind == "end":
            await publish(scripts, publication(held.text, [], [], [], [name, stream, entry, "2", 1, "0", ""]))
        elif stream and kind == "release":
            row = [KEYS.req(name), stream, entry, b"again"]
            await scripts.release([KEYS.lease(SHARD), KEYS.queue], [held.text, GROUP, *row])
        elif stream and kind == "drop" and not started:
            await client.delete(KEYS.req(name))
            await scripts.drop([KEYS.lease(SHARD), KEYS.queue], [held.text, GROUP, stream, entry, ""])
        assert await scripts.recount([KEYS.lease(SHARD), KEYS.queue], [held.text, 100]) == 0, f"call {number}: {kind}"


@pytest.mark.parametrize("key", [KEYS.requests("low"), KEYS.queue_kept])
async def test_queue_of_long_foreign_entries_is_not_counted_anew(client: Any, scripts: Scripts, key: str) -> None:
    """All their fields have to be read, not the requests alone."""
    held = await busy(client, scripts)
    await client.delete(key)
    for _ in range(40):
        await client.xadd(key, {"foreign": b"x" * (1 << 20)})
    await client.hset(KEYS.queue, "bytes", 7)
    await scripts.recount([KEYS.lease(SHARD), KEYS.queue], [held.text, 100])
    assert await client.hget(KEYS.queue, "bytes") == b"7"


async def test_queue_of_long_grammars_is_not_counted_anew(client: Any, scripts: Scripts) -> None:
    held = await busy(client, scripts)
    for number in range(40):
        changes = {"grammar": f"sha256:{number}", "text": b"x" * (1 << 20), "most": 1000, "of_tenant": 1000}
        assert (await enqueue(scripts, f"long-{number}", **changes))[0] == b"ok"
    await client.hset(KEYS.queue, "tokens", 7)
    await scripts.recount([KEYS.lease(SHARD), KEYS.queue], [held.text, 100])
    assert await client.hget(KEYS.queue, "tokens") == b"7"


async def test_entries_of_very_many_tokens_keep_the_queue_bounded(client: Any, scripts: Scripts) -> None:
    """From 2^53 on their sum would be read as none."""
    held = await busy(client, scripts)
    fields = {"id": "foreign", "tenant": "eve", "tokens": (1 << 53) - 1, "bytes": (1 << 53) - 1}
    for _ in range(3):
        await client.xadd(KEYS.requests("low"), {**fields})
    await scripts.recount([KEYS.lease(SHARD), KEYS.queue], [held.text, 100])
    assert (await enqueue(scripts, "next"))[0] == b"full"
    most = {"most": 1 << 53, "of_tenant": 1 << 53}
    assert (await enqueue(scripts, "next", **most, most_bytes=1 << 30))[0] == b"bytes"


async def test_request_that_comes_back_without_its_entry_is_counted(client: Any, scripts: Scripts) -> None:
    """Its stream was deleted, or an older gateway wrote its entry."""
    held = Lease(scripts, KEYS, SHARD, 5000)
    await held.take()
    await enqueue(scripts, "r")
    ((stream, entry), *_) = await claim(client, scripts, held.text)
    await client.delete(stream)
    entry_ms = int(entry.partition("-")[0])
    while 1000 * (now := await client.time())[0] + now[1] // 1000 <= entry_ms:
        pass  # a stream that begins anew gives ids of the same millisecond again
    row: list[Any] = [KEYS.req("r"), stream, entry, b"payload"]
    assert await scripts.release([KEYS.lease(SHARD), KEYS.queue], [held.text, GROUP, *row]) == 1
    await scripts.recount([KEYS.lease(SHARD), KEYS.queue], [held.text, 100])
    assert await client.hmget(KEYS.queue, "tokens", "requests") == [b"10", b"1"]
    assert await client.hgetall(KEYS.queue_tenants) == {b"alice": b"10"}


async def test_expired_request_with_prompts_apart_is_counted_back(client: Any, scripts: Scripts) -> None:
    """Neither its record nor its prompts tell the number of its tokens."""
    intake = await leading(client, scripts)
    wire = queue_pb2.Request(id="r", tenant="alice", n=1, max_tokens=1, prompts_apart=True)
    await enqueue(scripts, "r", request=wire.SerializeToString(), prompts=b"apart")
    await enqueue_bound(scripts, "waits", "")
    await client.delete(KEYS.req("r"), KEYS.prompt("r"))
    assert [item.request.id for item in await intake.read([9, 9, 9, 9])] == ["waits"]
    assert await client.hmget(KEYS.queue, "tokens", "requests", "tokens:normal") == [b"10", b"1", b"10"]
    assert await client.hgetall(KEYS.queue_tenants) == {b"alice": b"10"}


async def test_counts_of_the_queue_stay_above_zero(client: Any, scripts: Scripts) -> None:
    """Below it, more requests would wait than the bounds allow."""
    fields = ("tokens", "requests", "tokens:normal")
    epoch = await lease(scripts, "acquire")
    answer = await enqueue(scripts, "a")
    await client.hset(KEYS.queue, mapping={"tokens": 2, "requests": 0, "tokens:normal": -7})
    await ended(client, scripts, epoch, "a", answer[1])
    assert [await client.hget(KEYS.queue, field) for field in fields] == [b"0"] * 3
    await enqueue(scripts, "b")
    await client.hset(KEYS.queue, mapping=dict.fromkeys(fields, -1000))
    await enqueue(scripts, "c")
    assert [await client.hget(KEYS.queue, field) for field in fields] == [b"10", b"1", b"10"]


TEXT = b"t" * 5000
"""Of a grammar that lies apart from its requests."""
FIELDS = [b"requests:sha256:a", b"text:sha256:a", b"bytes:sha256:a"]


def bound(**changes: Any) -> dict[str, Any]:
    """Return the fields of a request of one token with a grammar."""
    return {"tokens": 1, "grammar": "sha256:a", "text": TEXT} | changes


async def leading(client: Any, scripts: Scripts) -> Intake:
    """Return the intake of a scheduler that leads the shard."""
    held = Lease(scripts, KEYS, SHARD, 5000)
    await held.take()
    intake = Intake(client, client, scripts, KEYS, SHARD, held, Clock())
    await intake.prepare()
    return intake


async def enqueue_bound(scripts: Scripts, name: str, text: str) -> None:
    """Enqueue a request of alice with a grammar that lies apart; with none where the text is empty."""
    wire = queue_pb2.Request(id=name, tenant="alice", n=1, max_tokens=1)
    wire.prompts.tokens.append(pack([5]))
    wire.sampling.grammar = grammar_name("alice", text) if text else ""
    await enqueue(scripts, name, request=wire.SerializeToString(), grammar=wire.sampling.grammar, text=text)


async def grammars(client: Any) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = await client.hgetall(KEYS.queue_grammars)
    return found


async def ended(client: Any, scripts: Scripts, epoch: int, name: str, entry: bytes) -> None:
    """End a request, by a call that is repeated: it counts once."""
    for _ in range(2):
        row = [name, KEYS.requests("normal"), entry, "2", 1, "0", ""]
        await publish(scripts, publication(epoch, [], [], [name], row))


async def test_grammar_lies_in_redis_once_until_its_last_request_ends(client: Any, scripts: Scripts) -> None:
    epoch = await lease(scripts, "acquire")
    a, b = await enqueue_all(scripts, {"a": bound(), "b": bound()}, share=1.0)
    assert (a[0], b[0]) == (b"ok", b"ok")
    assert await grammars(client) == dict(zip(FIELDS, [b"2", TEXT, b"5000"], strict=True))
    assert await counted(client) == (2 * SIZE + 5000, {b"alice": b"%d" % (2 * SIZE + 5000)})
    await ended(client, scripts, epoch, "a", a[1])
    assert await grammars(client) == dict(zip(FIELDS, [b"1", TEXT, b"5000"], strict=True))
    await ended(client, scripts, epoch, "b", b[1])
    assert await grammars(client) == {}
    assert (await counted(client))[0] == 2 * ENDED, "the text is counted back"


async def test_grammar_counts_with_the_request_that_brings_it(client: Any, scripts: Scripts) -> None:
    bounds = {"tenant_bytes": 2 * SIZE + 5000}
    assert (await enqueue(scripts, "small", tokens=1))[0] == b"ok"
    assert (await enqueue(scripts, "a", **bound(tenant_bytes=2 * SIZE + 4999)))[:3] == [
        b"tenant bytes", SIZE, SIZE + 5000,
    ]  # fmt: skip
    assert await grammars(client) == {}, "a refused request leaves nothing"
    assert (await enqueue(scripts, "a", **bound(**bounds)))[0] == b"ok"
    assert (await enqueue(scripts, "b", **bound(**bounds)))[:3] == [b"tenant bytes", 2 * SIZE + 5000, SIZE]
    assert (await enqueue(scripts, "b", **bound(tenant_bytes=3 * SIZE + 5000)))[0] == b"ok"


async def test_scheduler_keeps_one_text_of_many_requests(client: Any, scripts: Scripts) -> None:
    intake = await leading(client, scripts)
    text = "a" * 2000
    for name in ("first", "second"):
        await enqueue_bound(scripts, name, text)
    first, second = await intake.read([9, 9, 9, 9])
    assert (first.error, second.error, first.request.grammar) == ("", "", text)
    assert second.request.grammar is first.request.grammar


async def test_text_of_another_grammar_is_replaced_by_the_next_request(client: Any, scripts: Scripts) -> None:
    intake = await leading(client, scripts)
    text = "a" * 2000
    name = grammar_name("alice", text)
    answers = []
    for request_id in ("first", "second"):
        await enqueue_bound(scripts, request_id, text)
        if request_id == "first":
            await client.hset(KEYS.queue_grammars, f"text:{name}", "b" * 2000)
        answers += await intake.read([9, 9, 9, 9])
    assert [bool(item.error) for item in answers] == [True, False]
    assert answers[1].request.grammar == text


async def test_requests_with_a_replaced_text_run(client: Any, scripts: Scripts) -> None:
    """The right text came before the scheduler looked."""
    intake = await leading(client, scripts)
    text = "a" * 2000
    await enqueue_bound(scripts, "first", text)
    await client.hset(KEYS.queue_grammars, f"text:{grammar_name('alice', text)}", "b" * 2000)
    await enqueue_bound(scripts, "second", text)
    assert [(item.error, item.request.grammar) for item in await intake.read([9, 9, 9, 9])] == [("", text)] * 2


@pytest.mark.parametrize("way", ["deleted", "longer", "empty"])
async def test_bytes_of_a_grammar_are_counted_back_as_they_were_counted(
    client: Any, scripts: Scripts, way: str
) -> None:
    """Whatever stands in the place of its text at the end."""
    epoch = await lease(scripts, "acquire")
    (a,) = await enqueue_all(scripts, {"a": bound()}, share=1.0)
    if way == "deleted":
        await client.hdel(KEYS.queue_grammars, FIELDS[1])
    else:
        await client.hset(KEYS.queue_grammars, FIELDS[1], TEXT * 2 if way == "longer" else b"")
    (b,) = await enqueue_all(scripts, {"b": bound()}, share=1.0)
    assert await counted(client) == (2 * SIZE + 5000, {b"alice": b"%d" % (2 * SIZE + 5000)})
    assert (await grammars(client))[FIELDS[1]] == TEXT
    await client.hset(KEYS.queue_grammars, FIELDS[1], b"other")
    for name, entry in (("a", a[1]), ("b", b[1])):
        await ended(client, scripts, epoch, name, entry)
    assert ((await counted(client))[0], await grammars(client)) == (2 * ENDED, {})


@pytest.mark.parametrize("lost", ["grammar", "prompts"])
async def test_unreadable_request_ends_with_all_its_choices(client: Any, scripts: Scripts, lost: str) -> None:
    intake = await leading(client, scripts)
    wire = queue_pb2.Request(id="r", tenant="alice", n=2, max_tokens=1, prompts_apart=lost == "prompts")
    if lost == "grammar":
        wire.prompts.tokens.extend([pack([5])] * 3)
        wire.sampling.grammar = grammar_name("alice", "lost")
    delivery = queue_pb2.Delivery(prompt_tails=[pack([5])] * 3).SerializeToString()
    await enqueue(scripts, "r", request=wire.SerializeToString(), delivery=delivery)
    (item,) = await intake.read([9, 9, 9, 9])
    assert item.error and item.choices == 6


async def test_text_that_redis_lost_comes_again_with_the_next_request(client: Any, scripts: Scripts) -> None:
    await enqueue(scripts, "a", **bound())
    await client.hdel(KEYS.queue_grammars, FIELDS[1])
    await enqueue(scripts, "b", **bound())
    assert await grammars(client) == dict(zip(FIELDS, [b"2", TEXT, b"5000"], strict=True))
    await client.hset(KEYS.queue_grammars, FIELDS[0], "no number")
    await enqueue(scripts, "c", **bound())
    assert await grammars(client) == dict(zip(FIELDS, [b"1", TEXT, b"5000"], strict=True))


async def test_grammars_of_deleted_streams_are_forgotten(client: Any, scripts: Scripts) -> None:
    bounds = {"tokens": 1, "most_bytes": SIZE, "tenant_bytes": SIZE}
    await enqueue(scripts, "a", **bound(**bounds))
    await client.delete(KEYS.requests("normal"))
    assert (await enqueue(scripts, "b", **bounds))[0] == b"ok"
    assert (await counted(client), await grammars(client)) == ((SIZE, {b"alice": b"%d" % SIZE}), {})


async def test_request_that_its_stream_refuses_leaves_no_count(client: Any, scripts: Scripts) -> None:
    await client.xadd(KEYS.requests("normal"), {"x": "y"}, id=HIGHEST)
    limits = {"concurrent": 1, "rpm": 5, "tpm": 500, "prompts": b"apart"}
    for _ in range(2):
        assert (await enqueue(scripts, "a", **bound(**limits)))[0] == b"error"
    assert (await counted(client), await grammars(client)) == ((0, {}), {})
    assert await client.exists(KEYS.bucket("alice"), KEYS.prompt("a"), KEYS.req("a")) == 0


@pytest.mark.parametrize("grammar", ["", "a" * 2000])
async def test_request_with_the_highest_id_comes_back_with_another(client: Any, scripts: Scripts, grammar: str) -> None:
    """A foreign entry before it had the id before. Its client would wait for ever."""
    intake, stream, last = await leading(client, scripts), KEYS.requests("normal"), (1 << 64) - 1
    await client.xadd(stream, {"x": "y"}, id=f"{last}-{last - 1}")
    await enqueue_bound(scripts, "r", grammar)
    assert await client.hget(KEYS.req("r"), "entry") == HIGHEST.encode()
    before = await counted(client), await grammars(client), await client.hgetall(KEYS.queue)
    assert await intake.read([9, 9, 9, 9]) == []
    (item,) = await intake.read([9, 9, 9, 9])
    assert (item.request.id, item.error, item.request.grammar) == ("r", "", grammar)
    assert await client.hget(KEYS.req("r"), "entry") == item.entry.id.encode() != HIGHEST.encode()
    assert (await counted(client), await grammars(client), await client.hgetall(KEYS.queue)) == before


async def test_request_with_the_highest_id_behind_one_that_runs_ends_with_an_error(
    client: Any, scripts: Scripts
) -> None:
    intake, stream, last = await leading(client, scripts), KEYS.requests("normal"), (1 << 64) - 1
    await client.xadd(stream, {"x": "y"}, id=f"{last}-{last - 2}")
    for name in ("runs", "r"):
        await enqueue_bound(scripts, name, "a" * 2000)
    room = [80, 80, 80, 80]
    runs, other = await intake.read(room)
    assert (runs.request.id, runs.error, other.request.id, other.entry.id) == ("runs", "", "r", HIGHEST)
    assert "send the request again" in other.error
    assert await client.xlen(stream) == 1
    assert (await enqueue(scripts, "next", tokens=1))[1] == HIGHEST.encode(), "the stream takes entries"


async def test_stream_with_the_highest_id_goes_on_with_what_is_pending(client: Any, scripts: Scripts) -> None:
    epoch, stream, entry = await claimed(client, scripts)
    await client.xadd(stream, {"x": "y"}, id=HIGHEST)
    await client.xreadgroup(GROUP, SHARD, {stream: ">"})
    assert (await enqueue(scripts, "a", tokens=1))[0] == b"error"
    await scripts.drop([KEYS.lease(SHARD), KEYS.queue], [epoch, GROUP, stream, HIGHEST, ""])
    answer = await enqueue(scripts, "a", tokens=1)
    assert answer[0] == b"ok"
    assert [name for name, _ in await client.xrange(stream)] == [entry.encode(), answer[1]]
    (pending,) = await client.xpending_range(stream, GROUP, "-", "+", 9)
    assert (pending["message_id"], pending["consumer"]) == (entry.encode(), SHARD.encode())
    ((_, found),) = await client.xreadgroup(GROUP, SHARD, {stream: ">"})
    assert [name for name, _ in found] == [answer[1]]


__all__ = ["client", "scripts", "server"]

OVERHEAD = 256  # bytes that a response counts beside its value
HOUR_MS = 3_600_000
BOUND, TENANT_BOUND = 10_000, 5_000


async def keep(
    scripts: Scripts, name: str, value: bytes, tenant: str = "a", ms: int = HOUR_MS, only_new: bool = False
) -> int:
    keys = [KEYS.response(name), KEYS.responses]
    arguments: list[Any] = [KEYS.response(""), tenant, name, value, ms, BOUND, TENANT_BOUND, int(only_new)]
    return int(await scripts.keep(keys, arguments))


class Twin:
    """Sizes by name, the oldest first, as keep.lua has to hold them."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.tenants: dict[str, str] = {}
        self.forgotten: set[str] = set()

    def keep(self, name: str, length: int, tenant: str, only_new: bool) -> int:
        if name in self.forgotten and length:
            return 0
        if only_new and (name in self.sizes or name in self.forgotten):
            return 2
        self.sizes.pop(name, None)
        if not length:
            self.forgotten.add(name)
            return 1
        if length + OVERHEAD > TENANT_BOUND:
            return 0
        self.sizes[name], self.tenants[name] = length + OVERHEAD, tenant
        self._trim([other for other in self.sizes if self.tenants[other] == tenant], TENANT_BOUND)
        self._trim([*self.sizes], BOUND)
        return 1

    def _trim(self, names: list[str], bound: int) -> None:
        while sum(self.sizes[name] for name in names) > bound:
            del self.sizes[names.pop(0)]


async def stored(client: Any) -> dict[str, int]:
    """Return the bytes of each stored response; fail unless the counters say the same."""
    names = [key.decode().rpartition(":")[2] for key in await client.keys(KEYS.response("*"))]
    sizes = {name: await client.strlen(KEYS.response(name)) for name in names}
    sizes = {name: size + OVERHEAD for name, size in sizes.items() if size}
    index = [name.decode() for name in await client.zrange(KEYS.responses, 0, -1)]
    counted = {key.decode(): value.decode() for key, value in (await client.hgetall(KEYS.responses + ":sizes")).items()}
    held = {key.decode(): int(value) for key, value in (await client.hgetall(KEYS.responses + ":bytes")).items()}
    assert sorted(index) == sorted(sizes)
    assert {name: int(text.partition(" ")[0]) for name, text in counted.items()} == sizes
    assert held.pop("", 0) == sum(sizes.values())
    of = {tenant: 0 for tenant in held}
    for name, text in counted.items():
        of["t" + text.partition(" ")[2]] += sizes[name]
    assert held == of
    return sizes


async def test_expired_responses_are_counted_back(client: Any, scripts: Scripts) -> None:
    for number in range(3):
        assert await keep(scripts, f"resp_{number}", b"x", ms=1)
    while await client.exists(*(KEYS.response(f"resp_{number}") for number in range(3))):
        pass
    assert await keep(scripts, "resp_new", b"x")
    assert set(await stored(client)) == {"resp_new"}


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_calls_keep_what_their_twin_keeps(client: Any, scripts: Scripts, seed: int) -> None:
    drawn, twin, lengths = random.Random(seed), Twin(), [0, 6_000, *range(1, 1_500, 80)]
    answers = set()
    for call in range(200):
        name, length, tenant = f"resp_{drawn.randrange(60)}", drawn.choice(lengths), drawn.choice("abc")
        only_new = drawn.random() < 0.2
        answer = await keep(scripts, name, b"x" * length, tenant, HOUR_MS + 1000 * call, only_new)  # in this order
        assert answer == twin.keep(name, length, tenant, only_new)
        assert await stored(client) == twin.sizes
        answers.add((answer, length == 0, length + OVERHEAD > TENANT_BOUND))
    assert len(answers) == 5 and all([await client.get(KEYS.response(name)) == b"" for name in twin.forgotten])
