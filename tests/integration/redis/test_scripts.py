"""The scripts of shared/lua; those of the queue's bounds in test_queue.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos import queue_pb2
from services.scheduler.core.types import Finish, FinishedRequest, NewRequest, Outcome
from services.scheduler.requests.intake import Entry
from services.scheduler.requests.publisher import Publisher
from shared import redis_client
from shared.errors import LeaseLostError
from shared.keys import COUNTED_EPOCHS, EPOCHS, GROUP
from shared.lease import Lease
from shared.redis_client import KEPT_TTL_MS, Scripts
from shared.wire.columns import pack
from tests.integration.redis.script_calls import (
    KEYS,
    LEASE_MS,
    SHARD,
    arange,
    claim,
    claimed,
    enqueue,
    lease,
    publication,
    publish,
)
from tests.integration.redis.script_calls import client as client  # the fixtures
from tests.integration.redis.script_calls import scripts as scripts
from tests.integration.redis.script_calls import server as server

SCRIPTS = Path(redis_client.__file__).parent / "lua"


async def test_buckets_limit_requests_tokens_and_concurrency_and_are_refunded(client: Any, scripts: Scripts) -> None:
    assert (await enqueue(scripts, "r", concurrent=1, tpm=100))[0] == b"ok"
    assert (await enqueue(scripts, "b", concurrent=1, tpm=100))[0] == b"rate"
    assert float(await client.hget(KEYS.bucket("alice"), "tokens")) == pytest.approx(70, abs=1)
    assert (await enqueue(scripts, "c", tpm=100, cost=80))[::2] == [b"rate", b"100 tokens a minute"]
    assert (await enqueue(scripts, "d", rpm=1, tpm=100))[0] == b"ok"
    assert (await enqueue(scripts, "e", rpm=1, tpm=100))[::2] == [b"rate", b"1 requests a minute"]
    epoch = await lease(scripts, "acquire")
    (stream, entry), *_ = await claim(client, scripts, epoch)
    tokens = ["r", 0, 0, arange(5), 0, 0]
    await publish(scripts, publication(epoch, [], tokens, ["r"], ["r", stream, entry, "1", 10, "5", ""]))
    bucket = await client.hgetall(KEYS.bucket("alice"))
    assert int(bucket[b"running"]) == 1  # d
    assert float(bucket[b"tokens"]) == pytest.approx(55, abs=1)  # 100 - 30 - 30, and 15 of r's 30 came back


async def test_new_requests_leave_the_memory_that_output_needs(client: Any, scripts: Scripts) -> None:
    used = (await client.info("memory"))["used_memory"]
    await client.config_set("maxmemory", 4 * used)
    try:
        assert (await enqueue(scripts, "a"))[0] == b"ok"
        part = 0
        memory = await client.info("memory")
        # The server takes more than the values have, and what waits for the disk does not stay.
        while memory["used_memory"] - memory["mem_aof_buffer"] < 3.3 * used:
            await client.set(f"what runs {part}", b"x" * (used // 20))
            part += 1
            memory = await client.info("memory")
        low = await enqueue(scripts, "b")
        assert (low[0], low[1] > 3 * used, low[2]) == (b"memory", True, 4 * used)
        assert await enqueue(scripts, "a") == [b"duplicate", b"queued"]
    finally:
        await client.config_set("maxmemory", 0)
    assert await client.exists(KEYS.req("b")) == 0


@pytest.mark.parametrize("beats", [0, 1])
async def test_claim_returns_whether_the_gateway_lives(client: Any, scripts: Scripts, beats: int) -> None:
    epoch = await lease(scripts, "acquire")
    await enqueue(scripts, "r")
    if beats:
        await client.set(KEYS.alive("gateway", "g"), 0, px=5000)
    verdicts = await scripts.claim([KEYS.lease(SHARD)], [epoch, SHARD, KEYS.req("r")])
    assert (verdicts[0], verdicts[2:]) == (0, [b"g", beats])


async def test_smaller_epoch_writes_nothing(client: Any, scripts: Scripts) -> None:
    old, stream, entry = await claimed(client, scripts)
    await client.hset(KEYS.worker("w"), mapping={"ready": 1, "shard": SHARD, "run": 1})
    assert await lease(scripts, "acquire") == 0
    assert await lease(scripts, "release", old) == 1
    assert await lease(scripts, "acquire") > old
    row = [KEYS.req("r"), stream, entry]
    calls: dict[str, tuple[list[str], list[Any]]] = {
        "publish": ([KEYS.queue], publication(old, ["g", b"tokens"], [], ["r"], [])),
        "claim": ([], [old, SHARD, KEYS.req("r")]),
        "release": ([KEYS.queue], [old, GROUP, *row, b"payload"]),
        "give": ([KEYS.queue], [old, GROUP, SHARD, "shard-1", *row]),
        "drop": ([KEYS.queue], [old, GROUP, stream, entry, ""]),
        "recount": ([KEYS.queue], [old, 100]),
        "take_worker": (worker_keys("w"), [old, SHARD, KEYS.prefix, 0]),
        "give_worker": ([KEYS.worker("w")], [old, SHARD, 1]),
        "fenced": ([KEYS.stats(SHARD)], [old, 4, "HSET", KEYS.stats(SHARD), "a", 1]),
    }
    fenced = {path.stem for path in SCRIPTS.glob("*.lua") if path.read_text().startswith("-- Fenced")}
    assert calls.keys() == fenced
    before = await contents(client)
    for name, (keys, words) in calls.items():
        with pytest.raises(LeaseLostError):
            await getattr(scripts, name)([KEYS.lease(SHARD), *keys], words)
        assert await contents(client) == before, name
    assert await lease(scripts, "renew", old) == 0


async def contents(client: Any) -> dict[bytes, bytes]:
    """Return the serialized values of all keys."""
    return {key: await client.dump(key) or b"" async for key in client.scan_iter()}


@pytest.mark.parametrize(
    "command",
    [["SET", "foreign"], ["HSET", "a", "field"], ["SET", "7", "PX", "3600000"]],
    ids=["string", "hash", "clock was set back"],
)
async def test_key_that_would_stay_holds_a_shard_for_one_lease(
    client: Any, scripts: Scripts, command: list[str]
) -> None:
    name, *words = command
    await client.execute_command(name, KEYS.lease(SHARD), *words)
    assert await lease(scripts, "acquire") == 0
    assert 0 < await client.pttl(KEYS.lease(SHARD)) <= LEASE_MS
    await client.pexpire(KEYS.lease(SHARD), 1)
    async with asyncio.timeout(60):
        while not (epoch := await lease(scripts, "acquire")):
            pass
    assert await lease(scripts, "acquire", ms=2 * LEASE_MS) == 0
    assert await client.pttl(KEYS.lease(SHARD)) <= LEASE_MS, "a standby prolongs no lease"
    assert await lease(scripts, "renew", epoch) == 1


@pytest.mark.parametrize("last", ["7", "7 3600000", "7:ab 86400000", "1:2:3", "7 9007199254740000", "", None])
async def test_foreign_lease_ends_whatever_the_last_epoch_of_its_shard_says(
    client: Any, scripts: Scripts, last: str | None
) -> None:
    await client.set(KEYS.lease(SHARD), "foreign")
    if last is not None:
        await client.set(KEYS.shard_epoch(SHARD), last)
    assert await lease(scripts, "acquire") == 0
    assert 0 < await client.pttl(KEYS.lease(SHARD)) <= LEASE_MS


@pytest.mark.parametrize("command", [["SET", "7"], ["SET", "1:2:3"], ["HSET", "a", "field"]])
async def test_renewal_writes_the_last_epoch_of_its_shard_again(
    client: Any, scripts: Scripts, command: list[str]
) -> None:
    name, *words = command
    mine = await lease(scripts, "acquire")
    await client.delete(KEYS.shard_epoch(SHARD))
    await client.execute_command(name, KEYS.shard_epoch(SHARD), *words)
    assert await lease(scripts, "renew", mine) == 1
    assert await client.get(KEYS.shard_epoch(SHARD)) == f"{mine} {LEASE_MS}".encode()


async def test_lease_is_lost_where_the_last_epoch_of_its_shard_is_a_hash(client: Any, scripts: Scripts) -> None:
    mine = await lease(scripts, "acquire")
    await client.delete(KEYS.lease(SHARD), KEYS.shard_epoch(SHARD))
    await client.hset(KEYS.shard_epoch(SHARD), "a", "field")
    assert await lease(scripts, "renew", mine) == 0


async def test_standby_with_a_shorter_lease_leaves_the_holders(client: Any, scripts: Scripts) -> None:
    key = KEYS.lease(SHARD)
    mine = await lease(scripts, "acquire", ms=60_000)
    assert await lease(scripts, "acquire", ms=2000) == 0
    assert await client.pttl(key) > 2000
    await client.pexpire(key, 3_600_000)  # the clock was set back
    assert await lease(scripts, "acquire", ms=2000) == 0
    assert 2000 < await client.pttl(key) <= 60_000
    await client.set(KEYS.shard_epoch(SHARD), mine, keepttl=True)  # by a service of before
    assert await lease(scripts, "acquire", ms=2000) == 0
    assert await client.pttl(key) > 2000
    await client.delete(key)
    assert await lease(scripts, "renew", mine, ms=60_000) == 1


async def test_epoch_rises_where_redis_lost_the_last(client: Any, scripts: Scripts) -> None:
    await lease(scripts, "acquire")
    kept = await client.get(KEYS.epoch)
    await client.delete(KEYS.lease(SHARD))
    lost = await lease(scripts, "acquire")
    assert lost > int(kept)

    async def clock_has_moved() -> bool:
        seconds, micros = await client.time()
        return bool(100 * seconds + micros // 10_000 > lost)

    async with asyncio.timeout(60):
        while not await clock_has_moved():
            pass
    await client.set(KEYS.epoch, kept)
    await client.delete(KEYS.lease(SHARD))
    assert await lease(scripts, "acquire") > lost


async def test_held_lease_is_renewed_without_memory(client: Any, scripts: Scripts) -> None:
    mine = await lease(scripts, "acquire")
    await client.config_set("maxmemory", 1)
    try:
        assert await lease(scripts, "renew", mine, ms=2 * LEASE_MS) == 1
    finally:
        await client.config_set("maxmemory", 0)
    assert await client.pttl(KEYS.lease(SHARD)) > LEASE_MS
    await client.delete(KEYS.shard_epoch(SHARD))
    assert await lease(scripts, "renew", mine) == 1
    assert (await client.get(KEYS.shard_epoch(SHARD))).split() == [b"%d" % mine, b"%d" % LEASE_MS]


async def test_expired_lease_is_renewed_until_another_takes_it(client: Any, scripts: Scripts) -> None:
    mine = await lease(scripts, "acquire")
    await client.delete(KEYS.lease(SHARD))
    assert await lease(scripts, "renew", mine) == 1
    await client.delete(KEYS.lease(SHARD))
    assert await lease(scripts, "acquire") > mine
    await client.delete(KEYS.lease(SHARD))
    assert await lease(scripts, "renew", mine) == 0


async def test_shard_has_one_holder_where_redis_gives_an_epoch_twice(client: Any, scripts: Scripts) -> None:
    """The clock was set back, so the counter alone says what is next; then Redis loses the lease and its count."""
    first, second = (Lease(scripts, KEYS, SHARD, 5000) for _ in range(2))
    before = 1 << 39  # beyond the clock
    await client.set(KEYS.epoch, before)
    assert await first.take()
    await client.delete(first.key, KEYS.shard_epoch(SHARD))
    await client.set(KEYS.epoch, before)
    assert await second.take()
    assert second.epoch == first.epoch == before + 1
    with pytest.raises(LeaseLostError):
        await first.write(["SET", KEYS.policy(SHARD), "first"])
    await second.write(["SET", KEYS.policy(SHARD), "second"])
    await first.release()
    await second.write(["SET", KEYS.policy(SHARD), "second"])
    assert await client.get(KEYS.policy(SHARD)) == b"second"


@pytest.mark.parametrize(
    "counted", ["much", "1.5", "-7", str(COUNTED_EPOCHS), str(EPOCHS - 3), str(EPOCHS - 1), str((1 << 63) - 1)]
)
async def test_counter_of_epochs_that_no_service_wrote_begins_anew(client: Any, scripts: Scripts, counted: str) -> None:
    await client.set(KEYS.epoch, counted)
    held = Lease(scripts, KEYS, SHARD, 5000)
    assert await held.take()
    clock = 100 * int((await client.time())[0])
    assert clock - 100 <= held.epoch <= clock + 100
    assert await client.get(KEYS.epoch) == str(held.epoch).encode()


async def test_request_ends_with_its_record_trimmed_and_entry_deleted(client: Any, scripts: Scripts) -> None:
    await enqueue(scripts, "r", prompts=b"long")
    epoch = await lease(scripts, "acquire")
    (stream, entry), *_ = await claim(client, scripts, epoch)
    tokens = arange(6)
    await publish(scripts, publication(epoch, ["g", b"batch"], ["r", 0, 0, tokens, 0, 0], ["r"], []))
    assert await client.hget(KEYS.queue, "tokens") == b"0"
    assert await client.get(KEYS.out("r", 0)) == tokens
    end = publication(epoch, [], ["r", 0, 16, tokens[16:], 1, 4], [], ["r", stream, entry, "1", 10, "4", ""])
    for _ in range(2):  # a repeated call changes nothing
        await publish(scripts, end)
        assert await client.get(KEYS.out("r", 0)) == tokens[:16]
        record = await client.hgetall(KEYS.req("r"))
        assert (record[b"state"], record[b"output_tokens"], record[b"finish"]) == (b"finished", b"4", b"1")
        assert await client.xlen(stream) == 0
        assert (await client.xpending(stream, GROUP))["pending"] == 0
        assert not await client.exists(KEYS.prompt("r"))
        assert 0 < await client.pttl(KEYS.req("r")) <= KEPT_TTL_MS
        assert 0 < await client.pttl(KEYS.out("r", 0)) <= KEPT_TTL_MS
        assert await client.hget(KEYS.queue, "requests") == b"0"
    earlier = ["r", stream, entry, "3", 10, "2", ""]  # of another shard, that ran it too after Redis had lost its claim
    await publish(scripts, publication(epoch, [], [], [], earlier))
    assert await client.get(KEYS.out("r", 0)) == tokens[:16]
    assert await client.hmget(KEYS.req("r"), ["finish", "lengths"]) == [b"1", b"4"]


async def test_stopped_choice_is_shortened_while_other_choices_continue(client: Any, scripts: Scripts) -> None:
    epoch, *_ = await claimed(client, scripts)
    tokens = arange(6)
    await publish(scripts, publication(epoch, [], ["r", 0, 0, tokens, 0, 0, "r", 1, 0, tokens, 0, 0], ["r"], []))
    await publish(scripts, publication(epoch, [], ["r", 0, 0, b"", 1, 5], [], []))
    assert await client.get(KEYS.out("r", 0)) == tokens[:20]
    assert await client.get(KEYS.out("r", 1)) == tokens
    assert await client.hmget(KEYS.req("r"), ["finish:0", "finish:1"]) == [b"1", None]


async def test_logprobs_are_stored_beside_tokens_and_live_as_long(client: Any, scripts: Scripts) -> None:
    epoch, stream, entry = await claimed(client, scripts)
    first = publication(epoch, [], [], ["r"], [], logprobs=["r", 1, 0, bytes(8), "r", 1, 8, b"12345678"])
    await publish(scripts, first)
    assert await client.get(KEYS.logprobs("r", 1)) == bytes(8) + b"12345678"
    assert await client.pttl(KEYS.logprobs("r", 1)) > KEPT_TTL_MS
    outputs = ["r", 0, 0, arange(4), 0, 0, "r", 1, 0, arange(3), 0, 0]
    end = ["r", stream, entry, "1,1", 10, "4,3", ""]
    records = ["r", 1, 16, b"abcdefgh", "r", 1, 48, b"lost before", "gone", 0, 0, b"x"]
    last = publication(epoch, [], outputs, [], end, logprobs=records)
    for _ in range(2):
        await publish(scripts, last)
        assert await client.get(KEYS.logprobs("r", 1)) == bytes(8) + b"12345678abcdefgh", "nothing beyond the end"
        assert 0 < await client.pttl(KEYS.logprobs("r", 1)) <= KEPT_TTL_MS
    assert not await client.exists(KEYS.logprobs("gone", 0)), "a record that expired is not brought back"


async def test_records_of_prompts_keep_their_places_and_live_as_long(client: Any, scripts: Scripts) -> None:
    epoch, stream, entry = await claimed(client, scripts)
    key = KEYS.prompt_logprobs("r", 0)
    await publish(scripts, publication(epoch, [], [], ["r"], [], of_prompts=["r", 0, 0, b"12345678"]))
    assert await client.pttl(key) > KEPT_TTL_MS
    rest = ["r", 0, 4, b"5678abcd", "r", 0, 40, b"lost before", "gone", 0, 0, b"x"]
    await publish(scripts, publication(epoch, [], [], [], [], of_prompts=rest))
    assert await client.get(key) == b"12345678abcd", "written again in its place, and nothing beyond the end"
    end = ["r", stream, entry, "1", 10, "1", ""]
    await publish(scripts, publication(epoch, [], ["r", 0, 0, arange(1), 0, 0], [], end))
    assert 0 < await client.pttl(key) <= KEPT_TTL_MS
    assert not await client.exists(KEYS.prompt_logprobs("gone", 0))


async def test_nothing_is_written_beyond_the_end_of_a_record(client: Any, scripts: Scripts) -> None:
    """Redis lost its last writes: 2 of 6 tokens are left. A hole would be read as tokens of id 0."""
    epoch, stream, entry = await claimed(client, scripts)
    tokens = arange(8)
    assert await publish(scripts, publication(epoch, [], ["r", 0, 0, tokens[:24], 0, 0], ["r"], [])) == []
    await client.set(KEYS.out("r", 0), tokens[:8])
    end = ["r", stream, entry, "1", 10, "8", ""]
    sections: tuple[list[Any], ...]
    for sections in (
        ([], ["r", 0, 24, tokens[24:], 0, 0], [], []),  # the next checkpoint
        ([], ["r", 0, 0, b"", 1, 8], [], []),  # the end of the choice
        ([], [], [], end),
        ([], ["r", 0, 24, tokens[24:], 1, 8], [], end),
    ):
        assert set(await publish(scripts, publication(epoch, *sections))) == {b"r", b"0"}
        assert await client.get(KEYS.out("r", 0)) == tokens[:8]
        assert await client.hmget(KEYS.req("r"), ["state", "finish:0"]) == [b"running", None]
        assert await client.xlen(stream) == 1
    whole = ["r", 0, 0, tokens, 0, 0, "r", 0, 24, tokens[24:], 1, 8]
    assert await publish(scripts, publication(epoch, [], whole, [], end, give_up=True)) == []
    assert await client.get(KEYS.out("r", 0)) == tokens
    assert await client.hmget(KEYS.req("r"), ["state", "finish", "error"]) == [b"finished", b"1", b""]


async def test_record_that_cannot_be_whole_ends_as_an_error(client: Any, scripts: Scripts) -> None:
    epoch, stream, entry = await claimed(client, scripts)
    await publish(scripts, publication(epoch, [], ["r", 0, 0, arange(2), 0, 0], ["r"], []))
    end = ["r", stream, entry, "1", 10, "8", ""]
    await publish(scripts, publication(epoch, [], [], [], end, give_up=True))
    state, finish, lengths, error = await client.hmget(KEYS.req("r"), ["state", "finish", "lengths", "error"])
    assert (state, finish, lengths) == (b"finished", b"5", b"2")
    assert error == b"output record: tokens were lost in Redis; send the request again"
    assert await client.xlen(stream) == 0


async def test_publisher_writes_whole_outputs_where_redis_lost_tokens(client: Any, scripts: Scripts) -> None:
    """Two choices are cut, one of them at its end; the third is in order."""
    await enqueue(scripts, "r")
    held = Lease(scripts, KEYS, SHARD, 5000)
    assert await held.take()
    (stream, entry), *_ = await claim(client, scripts, held.text)
    tokens = [np.arange(5, 15, dtype=np.int32) + choice for choice in range(3)]
    ended: list[str] = []
    publisher = Publisher(
        scripts, KEYS, held, {"r": Entry(stream, entry, queue_pb2.Request())}, ended.append,
        lambda name, choice: tokens[choice] if name == "r" else None,
    )  # fmt: skip
    running = asyncio.create_task(publisher.run(lambda: None))
    try:
        publisher.put(
            Outcome(checkpoints=[("r", choice, 0, tokens[choice][:6]) for choice in range(3)], started_ids=["r"])
        )
        await publisher.caught_up()
        await client.set(KEYS.out("r", 0), pack(tokens[0][:1]))
        await client.delete(KEYS.out("r", 1))
        publisher.put(Outcome(checkpoints=[("r", choice, 6, tokens[choice][6:8]) for choice in (0, 2)]))
        await publisher.caught_up()
        assert await client.get(KEYS.out("r", 0)) == pack(tokens[0])
        assert await client.get(KEYS.out("r", 2)) == pack(tokens[2][:8])
        request = NewRequest(id="r", prompts=[np.arange(5, dtype=np.int32)], max_tokens=10, n=3)
        last = [("r", choice, 8, tokens[choice][8:]) for choice in range(3)]
        publisher.put(Outcome(checkpoints=last, ended_requests=[FinishedRequest(request, tokens, [Finish.LENGTH] * 3)]))
        await publisher.caught_up()
        assert [await client.get(KEYS.out("r", choice)) for choice in range(3)] == [pack(row) for row in tokens]
        assert await client.hmget(KEYS.req("r"), ["state", "finish", "error"]) == [b"finished", b"2,2,2", b""]
        assert ended == ["r"]
    finally:
        running.cancel()


@pytest.mark.parametrize("late", [False, True], ids=["before the end is written", "behind it"])
async def test_stop_string_after_the_end_shortens_the_record(client: Any, scripts: Scripts, late: bool) -> None:
    epoch, stream, entry = await claimed(client, scripts)
    tokens = arange(6)
    outputs = [part for choice in range(3) for part in ("r", choice, 0, tokens, 2, 6)]
    end = publication(epoch, [], outputs, ["r"], ["r", stream, entry, "2,3,2", 10, "6,6,6", ""])
    if late:
        await publish(scripts, end)
    for choice, at in ((0, 4), (1, 4), (2, 6)):
        arguments: list[Any] = [KEYS.prefix, "stop", b"command", "g", "", choice, at]
        assert await scripts.control([KEYS.req("r")], arguments) == (b"finished" if late else b"sent")
    if not late:
        await publish(scripts, end)
    found = await client.hmget(KEYS.req("r"), ["finish", "lengths", "output_tokens"])
    assert found == [b"1,3,1", b"4,6,6", b"16"]  # a cancelled choice stays so
    assert [len(await client.get(KEYS.out("r", choice))) for choice in range(3)] == [16, 24, 24]
    assert 0 < await client.pttl(KEYS.out("r", 0)) <= KEPT_TTL_MS


async def test_cancel_of_a_claimed_request_is_seen_by_the_next_claim(client: Any, scripts: Scripts) -> None:
    """Its shard may have died with the command unread."""
    epoch, *_ = await claimed(client, scripts)
    arguments: list[Any] = [KEYS.prefix, "cancel", b"command", "", ""]
    assert await scripts.control([KEYS.req("r")], arguments) == b"sent"
    verdicts = await scripts.claim([KEYS.lease(SHARD)], [epoch, SHARD, KEYS.req("r")])
    assert verdicts[0] == 1


async def test_cancel_is_a_flag_before_the_claim_then_a_command(client: Any, scripts: Scripts) -> None:
    async def cancel(tenant: str = "", gateway: str = "") -> bytes:
        arguments: list[Any] = [KEYS.prefix, "cancel", b"command", gateway, tenant]
        reply: bytes = await scripts.control([KEYS.req("r")], arguments)
        return reply

    assert await cancel() == b"unknown"
    await enqueue(scripts, "r")
    assert await cancel("mallory") == b"forbidden"
    assert await cancel("alice") == b"flagged"
    epoch = await lease(scripts, "acquire")
    verdicts = await scripts.claim([KEYS.lease(SHARD)], [epoch, SHARD, KEYS.req("r"), KEYS.req("gone")])
    assert (verdicts[::4], verdicts[2]) == ([1, 2], b"g")
    assert verdicts[1] == int(await client.hget(KEYS.req("r"), "enqueued_ms"))
    assert await cancel() == b"sent"
    assert await client.xlen(KEYS.control(SHARD)) == 1
    assert await scripts.control([KEYS.req("r")], [KEYS.prefix, "adopt", b"command", "h", "alice"]) == b"sent"
    assert await cancel(gateway="g") == b"elsewhere"
    assert await cancel(gateway="h") == b"sent"
    assert await client.xlen(KEYS.control(SHARD)) == 3
    adopt: list[Any] = [KEYS.prefix, "adopt", b"command"]
    assert await scripts.control([KEYS.req("r")], [*adopt, "i", "alice", "g"]) == b"elsewhere"  # h came first
    for _ in range(2):  # also when its answer was lost
        assert await scripts.control([KEYS.req("r")], [*adopt, "i", "alice", "h"]) == b"sent"
    assert await client.hmget(KEYS.req("r"), "gateway", "former") == [b"i", b" g h i "]


def worker_keys(name: str, before: str = "") -> list[str]:
    return [KEYS.worker(name), KEYS.epoch, KEYS.worker(before or name)]


async def test_worker_is_taken_by_one_live_shard_that_drops_another(client: Any, scripts: Scripts) -> None:
    epoch = await lease(scripts, "acquire")

    async def take(name: str = "w", before: str = "", shard: str = SHARD, least: int = 0) -> int:
        keys = [KEYS.lease(SHARD), *worker_keys(name, before)]
        return int(await scripts.take_worker(keys, [epoch, shard, KEYS.prefix, least]))

    assert await take() == 0  # no such worker
    await client.hset(KEYS.worker("w"), "address", "127.0.0.1:1")
    assert await take() == 0  # it is not ready, or drains
    await client.hset(KEYS.worker("w"), "ready", "1")
    first = await take()
    assert first > epoch
    assert await take() > first  # each Run has another epoch
    seen = first + (1 << 38)
    assert await take(least=seen) == seen, "a worker has seen so much; Redis lost its counter"
    assert await take(least=first) == seen + 1
    assert await take(shard="shard-1") == 0  # shard-0 lives
    await client.hset(KEYS.worker("w"), "shard", "shard-9")
    assert await take() > 0  # shard-9 has no lease
    await client.hset(KEYS.worker("v"), "ready", "1")
    assert await take("v", before="w") > 0
    assert await client.hgetall(KEYS.worker("w")) == {b"address": b"127.0.0.1:1", b"ready": b"1"}
    await client.hset(KEYS.worker("w"), "shard", "shard-1")
    assert await take("v", before="w") > 0
    assert await client.hget(KEYS.worker("w"), "shard") == b"shard-1"  # the shard that has it meanwhile keeps it


async def test_worker_taken_meanwhile_is_not_given_by_its_former_shard(client: Any, scripts: Scripts) -> None:
    epoch = await lease(scripts, "acquire")
    other = f"{SHARD}-2"
    await client.set(KEYS.lease(other), 9)
    await client.hset(KEYS.worker("w"), "ready", "1")

    async def take(shard: str, holder: int) -> int:
        keys = [KEYS.lease(shard), *worker_keys("w")]
        return int(await scripts.take_worker(keys, [holder, shard, KEYS.prefix, 0]))

    async def give(run: int) -> bool:
        return bool(await scripts.give_worker([KEYS.lease(SHARD), KEYS.worker("w")], [epoch, SHARD, run]) == 1)

    first = await take(SHARD, epoch)
    assert await give(first)
    assert await client.hgetall(KEYS.worker("w")) == {b"ready": b"1"}
    assert not await give(first), "there is nothing left to give"
    # The lease runs out while the shard gives its worker back, and another one takes it before that arrives.
    second = await take(SHARD, epoch)
    await client.delete(KEYS.lease(SHARD))
    third = await take(other, 9)
    assert third > second > first
    assert await lease(scripts, "renew", epoch) == 1
    assert not await give(second)
    assert await client.hget(KEYS.worker("w"), "shard") == other.encode()
    # What was given long ago arrives when the same shard has it again.
    await client.delete(KEYS.lease(other))
    last = await take(SHARD, epoch)
    assert not await give(second)
    assert await client.hmget(KEYS.worker("w"), "shard", "run") == [SHARD.encode(), str(last).encode()]


async def test_forgotten_scripts_are_loaded_again(client: Any, scripts: Scripts) -> None:
    await enqueue(scripts, "a")
    await client.script_flush()
    assert (await enqueue(scripts, "b"))[0] == b"ok"


async def test_token_streams_are_trimmed_to_half_a_minute(client: Any, scripts: Scripts) -> None:
    epoch = await lease(scripts, "acquire")
    key = KEYS.tokens("g")
    for age in range(500):  # entries of a minute ago
        await client.xadd(key, {"b": b"old"}, id=f"{1_000 + age}-0")
    await publish(scripts, publication(epoch, ["g", b"new"], [], [], []))
    assert await client.xlen(key) < 200  # whole nodes go
    assert 0 < await client.pttl(key) <= KEPT_TTL_MS


async def test_stream_of_tokens_with_an_id_of_the_future_is_bounded(client: Any, scripts: Scripts) -> None:
    """A foreign entry, or Redis's clock before it was set back: all later ids are of the future as well."""
    epoch = await lease(scripts, "acquire")
    key, now_ms = KEYS.tokens("g"), int((await client.time())[0]) * 1000
    await client.xadd(key, {"x": "y"}, id=f"{now_ms + 10**9}-0")
    for _ in range(12):
        await publish(scripts, publication(epoch, ["g", b"batch"] * 1000, [], [], []))
    assert 10_000 <= await client.xlen(key) < 10_200
    (last,) = await client.xrevrange(key, count=1)
    assert last[1] == {b"b": b"batch"}
