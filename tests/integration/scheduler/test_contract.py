"""A worker that breaks the contract of worker.proto beside one that keeps it: all requests end right, with an event."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError

from protos import queue_pb2, worker_pb2
from services.scheduler.core.types import Finish, NewRequest
from services.scheduler.workers.contract import ContractError, check_info, check_same
from services.scheduler.workers.fleet import AVOID_S
from shared.keys import EPOCHS
from shared.settings import SchedulerSettings
from shared.tasks import end
from shared.text.logprobs import record_bytes
from shared.wire.columns import pack, unpack
from tests.support.shard import Described, Shard, serving
from tests.support.waiting import wait_until

SLOTS, VOCABULARY, TOKENS, REQUESTS = 4, 512, 12, 10
SETTINGS = SchedulerSettings(lookahead=1)

Spoil = Callable[[worker_pb2.Result], None]


def described(**changes: Any) -> worker_pb2.WorkerInfo:
    right: dict[str, Any] = {
        "id": "good", "identity": "good", "model": SETTINGS.served_model_name, "model_hash": "a1", "dtype": "float32",
        "block_size": 16, "gpu_blocks": 256, "max_seqs": SLOTS, "max_model_len": 256, "max_step_tokens": 64,
        "vocab_size": VOCABULARY, "stages": 1, "numerics": "cpu amx float32 none",
        "version": worker_pb2.Version(major=1, minor=1),
    }  # fmt: skip
    return worker_pb2.WorkerInfo(**(right | changes))


class ScriptedWorker(Described):
    """Answers token 7 for every slot; `spoil` changes each answer with a token."""

    def __init__(self, info: worker_pb2.WorkerInfo, spoil: Spoil | None = None) -> None:
        super().__init__(info)
        self.spoil, self.spoiled = spoil, 0

    async def Run(  # noqa: N802 - the name in worker.proto
        self, requests: AsyncIterator[worker_pb2.Step], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.Result]:
        known, sizes = np.zeros(8192, np.int64), np.zeros(8192, np.int32)
        async for step in requests:
            if step.HasField("hello"):
                if step.hello.takes_begun and self.info.HasField("version"):
                    yield worker_pb2.Result(epoch=step.epoch, begun=True)
                continue
            for enter in step.enters:
                known[enter.slot] = len(enter.tokens) // 4
                sizes[enter.slot] = record_bytes(enter.sampling.logprobs)
            slots = unpack(step.chunk_slots)
            sampled = slots[unpack(step.chunk_starts) + unpack(step.chunk_lengths) == known[slots]]
            known[sampled] += 1
            result = worker_pb2.Result(
                epoch=step.epoch, id=step.id, slots=pack(sampled), tokens=pack(sampled * 0 + 7),
                logprobs=bytes(int(sizes[sampled].sum())), logprob_sizes=pack(sizes[sampled]),
                timings=worker_pb2.Timings(total_ns=1_000_000),
            )  # fmt: skip
            if self.spoil is not None and sampled.size:
                self.spoil(result)
                self.spoiled += 1
            yield result


class HeldWorker(ScriptedWorker):
    """Answers no step until `go_on` is set."""

    def __init__(self, info: worker_pb2.WorkerInfo) -> None:
        super().__init__(info)
        self.go_on = asyncio.Event()

    async def Run(  # noqa: N802 - the name in worker.proto
        self, requests: AsyncIterator[worker_pb2.Step], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.Result]:
        async for result in super().Run(requests, context):
            if not result.begun:
                await self.go_on.wait()
            yield result


def ask(shard: Shard, logprobs: int = 0, tokens: int = TOKENS) -> None:
    payload = queue_pb2.Request(sampling=queue_pb2.Sampling(logprobs=logprobs))
    prompts = [np.arange(1 + number, 9 + number, dtype=np.int32) for number in range(REQUESTS)]
    shard.add(
        NewRequest(f"r{number}", [prompt], tokens, gateway="g", payload=payload)
        for number, prompt in enumerate(prompts)
    )


def assert_refused(shard: Shard, named: str) -> None:
    assert [(kind, worker) for kind, _, worker in shard.events] == [("worker_refused", "bad")]
    assert named in shard.events[0][1]


def assert_all_right(shard: Shard) -> None:
    assert set(shard.ended) == {f"r{number}" for number in range(REQUESTS)}
    for one in shard.ended.values():
        assert one.finish == [Finish.LENGTH] and one.outputs[0].tolist() == [7] * TOKENS, one.error
    assert not shard.quarantine.has_suspects


async def run_beside_a_good_worker(bad: ScriptedWorker, logprobs: int = 0) -> Shard:
    """Let the bad worker join after the good one; return the shard when all requests have ended."""
    shard = Shard(SETTINGS)
    async with serving(ScriptedWorker(described()), bad) as (good, other):
        tasks = [asyncio.create_task(shard.fleet.serve(good))]
        await wait_until(lambda: bool(shard.fleet.loops))
        tasks.append(asyncio.create_task(shard.fleet.serve(other)))
        await wait_until(lambda: len(shard.fleet.loops) == 2 or tasks[1].done())
        ask(shard, logprobs)
        try:
            await wait_until(tasks[1].done)
            tasks[1].result()
            await wait_until(lambda: len(shard.ended) == REQUESTS)
            assert not tasks[0].done() and list(shard.fleet.loops) == ["good"]
            shard.core.check()
        finally:
            await end(*tasks)
    assert_all_right(shard)
    return shard


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "another"}, "model: the worker serves 'another'"),
        ({"model_hash": "b2"}, "model_hash: 'b2', and good of this shard has 'a1'"),
        ({"dtype": "bfloat16"}, "dtype: 'bfloat16', and good"),
        ({"dtype": "int3"}, "dtype: 'int3' is none of"),
        ({"block_size": 32}, "block_size: '32', and good"),
        ({"block_size": 0}, "block_size: 0 is not between"),
        ({"vocab_size": 0}, "vocab_size: 0 is not between"),
        ({"vocab_size": 1 << 30}, "vocab_size: 1073741824 is not between"),
        ({"max_model_len": 1 << 30}, "max_model_len: 1073741824 is not between"),
        ({"max_model_len": 1 << 24, "max_seqs": 8192}, "max_seqs: 8192 sequences of 16777216 tokens"),
        ({"max_model_len": 0}, "max_model_len: 0 is not between"),
        ({"max_seqs": 0}, "max_seqs: 0 is not between"),
        ({"gpu_blocks": (1 << 32) - 1}, "gpu_blocks: 4294967295 is not between"),
        ({"max_step_tokens": 0}, "max_step_tokens: 0 is not between"),
        ({"largest_step_ms": 1 << 31}, "largest_step_ms: 2147483648 is not between"),
        ({"max_drafts": 1 << 20}, "max_drafts: 1048576 is not between"),
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token: 5 of 4 experts"),
        ({"experts_per_token": 1}, "experts_per_token: 1 of 0 experts"),
        ({"experts": 1 << 20, "experts_per_token": 1}, "experts: 1048576 is not between"),
        ({"role": "both"}, "role: 'both' is neither"),
        ({"kv_format": "x" * 5000}, "kv_format: longer than"),
        ({"run_socket": "../other"}, "run_socket: '../other' is not 32 hex digits"),
        ({"numerics": "x" * 5000}, "numerics: longer than"),
        (
            {"numerics": "cpu avx2 float32 none"},
            "numerics: 'cpu avx2 float32 none', and good of this shard has 'cpu amx",
        ),
    ],
)
def test_description_against_the_contract_is_refused(changes: dict[str, Any], named: str) -> None:
    info = described(**{"id": "bad", **changes})
    with pytest.raises(ContractError, match=re.escape(named)):
        check_info(info, SETTINGS.served_model_name)
        check_same(info, [described()])


@pytest.mark.parametrize("changes", [{"block_size": 0}, {"block_size": 32}], ids=["out of bounds", "not as the others"])
async def test_worker_that_describes_itself_wrongly_is_refused(changes: dict[str, Any]) -> None:
    shard = await run_beside_a_good_worker(ScriptedWorker(described(**{"id": "bad", **changes})))
    assert_refused(shard, "block_size: ")


def test_worker_of_unknown_or_allowed_other_numerics_may_join() -> None:
    good, other = described(), described(id="other", numerics="cpu avx2 float32 none")
    check_same(described(id="old", numerics=""), [good])
    check_same(other, [good], mixed_numerics=True)
    with pytest.raises(ContractError, match="in a shard of its own, or the scheduler with --mixed-numerics"):
        check_same(other, [good])


def test_worker_that_is_updated_joins_those_of_the_version_before() -> None:
    """Of version 1.0 the hash is one of samples, of 1.1 one of all bytes: it says nothing between them."""
    check_same(described(id="new", model_hash="a" * 32), [described(version=None)])
    with pytest.raises(ContractError, match="model_hash: "):
        check_same(described(id="new", model_hash="a" * 32), [described()])


async def test_stream_of_a_worker_without_version_goes_on_at_its_update() -> None:
    """Of version 1.0 the hash is one of samples, of 1.1 one of all bytes: for the same weights they differ."""
    shard, answers = Shard(SETTINGS), iter(range(6))

    def ends(_: worker_pb2.Result) -> None:
        if next(answers, None) is None:
            raise RuntimeError("the worker is updated")

    old, new = described(version=None), described(id="new", model_hash="a" * 32)
    async with serving(ScriptedWorker(old, ends), ScriptedWorker(new)) as records:
        ask(shard)
        await shard.fleet.serve(records[0])
        assert any(record.has_tokens for record in shard.core.records.values())
        run = asyncio.create_task(shard.fleet.serve(records[1]))
        await wait_until(lambda: not shard.core.records or bool(shard.core.stranded_requests()) or run.done())
        await end(run)
    assert_all_right(shard)


async def test_stream_of_a_lost_worker_goes_on_at_equal_numerics_alone() -> None:
    """A worker of other numerics, which comes first, runs what has no token yet."""
    shard, answers = Shard(SETTINGS), iter(range(6))

    def dies(_: worker_pb2.Result) -> None:
        if next(answers, None) is None:
            raise RuntimeError("the worker dies")

    def is_moved(left: set[str], run: asyncio.Task[None]) -> bool:
        return shard.core.records.keys() == left or run.done()

    int8, equal = described(id="int8", numerics="cpu amx int8"), described(id="equal")
    async with serving(ScriptedWorker(described(), dies), ScriptedWorker(int8), ScriptedWorker(equal)) as records:
        ask(shard)
        await shard.fleet.serve(records[0])
        begun = {name for name, record in shard.core.records.items() if record.has_tokens}
        assert begun and len(begun) < len(shard.core.records)
        for record, left in zip(records[1:], (begun, set[str]()), strict=True):
            run = asyncio.create_task(shard.fleet.serve(record))
            await wait_until(partial(is_moved, left, run))
            assert shard.core.stranded_requests() == dict.fromkeys(left, "a1 float32 cpu amx float32 none")
            assert not run.done()
            await end(run)
    assert len(shard.ended) == REQUESTS
    assert all(one.outputs[0].tolist() == [7] * TOKENS for one in shard.ended.values())


async def test_hanging_worker_is_overdue_until_it_answers_again() -> None:
    shard, held = Shard(SETTINGS.model_copy(update={"watchdog_s": 0.5})), HeldWorker(described())

    def overdue() -> Any:
        return shard.fleet.facts().get("workers_overdue")

    async with serving(held) as (record,):
        run = asyncio.create_task(shard.fleet.serve(record))
        await wait_until(lambda: bool(shard.fleet.loops))
        assert overdue() == 0
        ask(shard)
        await wait_until(lambda: overdue() == 1)
        await run  # it timed out
        assert overdue() == 0
        run = asyncio.create_task(shard.fleet.serve(record))
        await wait_until(lambda: shard.fleet.in_flight > 0)
        assert overdue() == 1  # the first step is no answer
        held.go_on.set()
        await wait_until(lambda: overdue() == 0 and len(shard.ended) == REQUESTS)
        await end(run)
    assert_all_right(shard)


def tokens(*values: int) -> Spoil:
    return lambda result: setattr(result, "tokens", pack(list(values) * (len(result.slots) // 4)))


def failing(*slots: int) -> Spoil:
    return lambda result: result.errors.extend(worker_pb2.SequenceError(slot=slot, code="x") for slot in slots)


def timed(**times: int) -> Spoil:
    return lambda result: result.timings.MergeFrom(worker_pb2.Timings(**times))


def column(name: str, change: Callable[[Any], Any]) -> Spoil:
    return lambda result: setattr(result, name, change(getattr(result, name)))


def sized(change: Callable[[bytes], bytes]) -> Spoil:
    """Change the log-probabilities, and the last one's size to fit."""

    def spoil(result: worker_pb2.Result) -> None:
        sizes = unpack(result.logprob_sizes).copy()
        result.logprobs = change(result.logprobs)
        sizes[-1] += len(result.logprobs) - int(sizes.sum())
        result.logprob_sizes = pack(np.maximum(sizes, 0)) if result.logprobs else b""

    return spoil


def scored(**columns: list[int]) -> Spoil:
    """Add records of a prompt that wants none."""

    def spoil(result: worker_pb2.Result) -> None:
        told = {"slots": [int(unpack(result.slots)[0])], "firsts": [1], "counts": [1], "sizes": [8]} | columns
        for name, values in told.items():
            setattr(result, f"prompt_{name}", pack(values))
        result.prompt_logprobs = bytes(8)

    return spoil


def forcing(slots: list[int], counts: list[int], ids: list[int]) -> Spoil:
    """Name forced tokens. Of a slot, -1 is the first one with a token, -2 none with one."""

    def spoil(result: worker_pb2.Result) -> None:
        sampled = unpack(result.slots).tolist()
        other = next(slot for slot in range(SLOTS + 1) if slot not in sampled)
        result.forced_slots = pack([{-1: sampled[0], -2: other}[slot] for slot in slots])
        result.forced_counts, result.forced_tokens = pack(counts), pack(ids)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "named", "logprobs"),
    [
        (tokens(VOCABULARY), f"tokens: {VOCABULARY} is outside the vocabulary of {VOCABULARY}", 0),
        (tokens(-1), "tokens: -1 is outside", 0),
        (tokens(7, 7), "tokens for", 0),
        (column("tokens", lambda old: old[:-1]), "result of step", 0),
        (column("slots", lambda old: pack([9999] * (len(old) // 4))), "other slots", 0),
        (column("slots", lambda old: old[4:]), "other slots", 0),
        (column("slots", lambda old: old + old[-4:]), "slots: ", 3),
        (column("token_counts", lambda _: pack([1])), "token counts, but the step has no drafts", 0),
        # They say how many records of log-probabilities there are, and 2^30 are never made room for.
        (column("token_counts", lambda _: pack([1 << 30])), "token_counts: 1 counts for", 3),
        (failing(9999), "errors: slot 9999", 0),
        (failing(SLOTS - 1, SLOTS - 1), f"errors: slot {SLOTS - 1}", 0),
        (timed(total_ns=-1), "timings: -1 ns", 0),
        (timed(idle_ns=-(1 << 62)), "timings: -4611686018427387904 ns", 0),
        (timed(swap_ns=1 << 62), "timings: 4611686018427387904 ns", 0),
        (column("swap_out_acks", lambda _: pack([3])), "acknowledged", 0),
        (column("swap_out_acks", lambda _: pack([1 << 30])), "acknowledged", 0),
        (column("swap_in_acks", lambda _: pack([-5])), "acknowledged", 0),
        (sized(lambda old: b""), "logprobs: ", 3),
        (sized(lambda old: old[:-4]), "logprobs: ", 3),
        (sized(lambda old: old + bytes(4)), "logprobs: ", 3),
        (scored(sizes=[8]), "prompt_logprobs: 8 bytes for 1 tokens", 0),
        (scored(sizes=[8, 8]), "prompt_logprobs: 8 bytes do not fit", 0),
        (scored(counts=[0]), "prompt_logprobs: columns of", 0),
        (scored(slots=[SLOTS - 1]), "prompt_logprobs: 8 bytes for 1 tokens", 0),
        (scored(counts=[1 << 30]), "prompt_logprobs: 8 bytes do not fit", 0),
        (forcing((SLOTS + 1) * [-1], (SLOTS + 1) * [1], (SLOTS + 1) * [7]), f"forced_slots: {SLOTS + 1} slots", 0),
        (forcing([-2], [1], [7]), "has no token in this result", 0),
        (forcing([-1], [17], 17 * [7]), "forced_counts: 17 tokens of one slot (limit 16)", 0),
        (forcing([-1], [2], [7, -7]), f"forced_tokens: -7 is outside the vocabulary of {VOCABULARY}", 0),
        (forcing([-1], [2], [7, VOCABULARY]), f"forced_tokens: {VOCABULARY} is outside", 0),
        (column("id", lambda old: old + 1), "answered step 2 of epoch", 0),
        (column("epoch", lambda old: 0), "of epoch 0; expected 1", 0),
    ],
)
async def test_wrongly_answering_worker_is_dropped_and_its_requests_go_on(
    spoil: Spoil, named: str, logprobs: int
) -> None:
    bad = ScriptedWorker(described(id="bad"), spoil)
    shard = await run_beside_a_good_worker(bad, logprobs)
    assert bad.spoiled
    assert_refused(shard, named)


@pytest.mark.parametrize("seed", range(3))
async def test_mutated_answers_end_no_service_and_no_request_wrongly(seed: int) -> None:
    rng = random.Random(seed)

    def spoil(result: worker_pb2.Result) -> None:
        if rng.random() < 0.5:
            return
        raw = bytearray(result.SerializeToString())
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        mutated = worker_pb2.Result()
        with suppress(DecodeError):  # bytes that are no Result never reach the scheduler: gRPC ends the stream
            mutated.ParseFromString(bytes(raw))
            if len(mutated.tokens) % 4 == 0:
                values = unpack(mutated.tokens)
                if (values != 7).any() and ((values >= 0) & (values < VOCABULARY)).all():
                    return  # another token of the vocabulary is no fault that can be seen
            if any(error.slot < SLOTS for error in mutated.errors) or mutated.error:
                return  # a worker may let a sequence or a step fail
            if rng.random() < 0.2:
                mutated.errors.add(slot=rng.choice([SLOTS, 9999, (1 << 32) - 1]))
            result.CopyFrom(mutated)

    shard = Shard(SETTINGS)
    async with serving(ScriptedWorker(described()), ScriptedWorker(described(id="bad"), spoil)) as (good, other):
        tasks = [asyncio.create_task(shard.fleet.serve(good))]
        await wait_until(lambda: bool(shard.fleet.loops))

        async def again() -> None:
            while True:
                await shard.fleet.serve(other)

        tasks.append(asyncio.create_task(again()))
        ask(shard)
        try:
            await wait_until(lambda: len(shard.ended) == REQUESTS or tasks[1].done())
            assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
            shard.core.check()
        finally:
            await end(*tasks)
    assert_all_right(shard)


async def test_worker_that_fails_all_its_steps_ends_no_request() -> None:
    """Its device may be broken: the suspects of its steps are tried at the other worker."""
    shard = Shard(SETTINGS)

    def fail(result: worker_pb2.Result) -> None:
        result.CopyFrom(worker_pb2.Result(epoch=result.epoch, id=result.id, error="no device"))

    async with serving(ScriptedWorker(described()), ScriptedWorker(described(id="bad"), fail)) as (good, other):
        tasks = [asyncio.create_task(shard.fleet.serve(good))]
        await wait_until(lambda: bool(shard.fleet.loops))

        def is_left_alone() -> bool:
            return shard.fleet.not_before().get("bad", 0.0) > time.monotonic() + 2

        async def serve_again() -> None:
            while True:
                await shard.fleet.serve(other)
                await wait_until(lambda: not is_left_alone())

        tasks.append(asyncio.create_task(serve_again()))
        await wait_until(lambda: len(shard.fleet.loops) == 2)
        ask(shard)
        for number in range(REQUESTS):
            shard.quarantine.add(f"r{number}", "g", time.monotonic_ns())

        def has_ended() -> bool:
            if is_left_alone():  # the suspects have waited long enough for it
                shard.quarantine.check_gateways({"g"}, time.monotonic_ns() + 4_000_000_000)
            return len(shard.ended) + len(shard.given_up) == REQUESTS

        try:
            await wait_until(has_ended)
        finally:
            await end(*tasks)
    assert not shard.given_up
    assert_all_right(shard)
    assert ("worker_refused", "step 1 failed: no device", "bad") in shard.events


async def test_refused_worker_is_left_alone_for_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    shard, waits = Shard(SETTINGS), []
    async with serving(ScriptedWorker(described(id="bad", block_size=0))) as (other,):
        for _ in range(8):
            await shard.fleet.serve(other)
            waits.append(shard.fleet.not_before()[other.identity] - 1000)
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]


async def test_worker_that_differed_is_taken_when_the_other_one_leaves() -> None:
    shard, other = Shard(SETTINGS), described(id="bad", block_size=32)
    async with serving(ScriptedWorker(described()), ScriptedWorker(other)) as (good, bad):
        run = asyncio.create_task(shard.fleet.serve(good))
        await wait_until(lambda: bool(shard.fleet.loops))
        await shard.fleet.serve(bad)
        assert bad.identity in shard.fleet.not_before()
        assert_refused(shard, "block_size: '32', and good")
        await end(run)
        assert shard.fleet.not_before().get(bad.identity, 0.0) < time.monotonic() + 1
        run = asyncio.create_task(shard.fleet.serve(bad))
        await wait_until(lambda: list(shard.fleet.loops) == ["bad"])
        await end(run)


class RefusingWorker(Described):
    """Takes no Run. Of version 1.2 it says so before it reads hello, of 1.1 behind it, of 1.0 behind the first step."""

    ends_with = (grpc.StatusCode.FAILED_PRECONDITION, "token: not that of the lease")

    async def Run(  # noqa: N802 - the name in worker.proto
        self, requests: AsyncIterator[worker_pb2.Step], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.Result]:
        if self.info.version.minor > 1:
            await context.abort(*self.ends_with)
        async for step in requests:
            if self.info.HasField("version") or not step.HasField("hello"):
                await context.abort(*self.ends_with)
        yield worker_pb2.Result()  # not reached


@pytest.mark.parametrize("minor", [0, 1, 2])
async def test_worker_that_refuses_the_run_is_left_alone(minor: int) -> None:
    shard = Shard(SETTINGS)
    version = worker_pb2.Version(major=1, minor=minor) if minor else None
    async with serving(RefusingWorker(described(id="bad", version=version))) as (worker,):
        ask(shard, tokens=1)  # of one step: with a write under way gRPC would forget the status of the end
        begun = time.monotonic()
        for _ in range(2):
            await shard.fleet.serve(worker)
    assert [(kind, text) for kind, text, _ in shard.events] == [("worker_refused", "token: not that of the lease")] * 2
    assert shard.fleet.not_before()[worker.identity] >= begun + 2 * AVOID_S, "for longer each time"
    if minor:
        assert not shard.linked and not shard.core.replicas, "it was never linked"
        assert not any(record.has_started for record in shard.core.records.values())
    shard.core.check()


@pytest.mark.parametrize("minor", [0, 1, 2])
async def test_worker_that_another_shard_took_is_not_blamed(minor: int) -> None:
    shard = Shard(SETTINGS)
    taken = RefusingWorker(described(id="taken", version=worker_pb2.Version(major=1, minor=minor) if minor else None))
    taken.ends_with = (grpc.StatusCode.ABORTED, "epoch 1 is older than 2, which was here")
    async with serving(taken) as (worker,):
        ask(shard, tokens=1)  # of one step: with a write under way gRPC would forget the status of the end
        await shard.fleet.serve(worker)
    assert "worker_refused" not in [kind for kind, *_ in shard.events]
    assert shard.fleet.not_before().get(worker.identity, 0.0) < time.monotonic() + 1
    shard.core.check()


async def test_worker_that_has_seen_more_than_the_counter_raises_it() -> None:
    """FLUSHALL with the clock set back: the counter starts at the clock, below the Runs of the workers."""
    shard = Shard(SETTINGS)
    async with serving(ScriptedWorker(described(highest_epoch=5000))) as (worker,):
        await shard.fleet.serve(worker)
        assert list(shard.registry.least_epochs.values()) == [5001] and not shard.events
        serving_now = asyncio.create_task(shard.fleet.serve(replace(worker, epoch=5001)))
        await wait_until(lambda: bool(shard.fleet.loops))
        assert not shard.registry.least_epochs, "the counter has it now"
        await end(serving_now)


async def test_epoch_that_one_worker_has_seen_outlasts_runs_of_others() -> None:
    shard = Shard(SETTINGS)
    workers = [ScriptedWorker(described(id=f"w{seen}", highest_epoch=seen)) for seen in (5000, 3000)]
    async with serving(*workers) as (high, low):
        high, low = replace(high, identity="high"), replace(low, identity="low")
        await shard.fleet.serve(high)
        await shard.fleet.serve(low)
        assert shard.registry.least_epochs == {"high": 5001, "low": 3001}
        serving_now = asyncio.create_task(shard.fleet.serve(replace(low, epoch=3001)))
        await wait_until(lambda: bool(shard.fleet.loops))
        assert shard.registry.least_epochs == {"high": 5001}
        await end(serving_now)


async def test_epoch_near_the_bound_is_not_taken_over() -> None:
    """Else the counter would follow it, and soon give epochs that every other worker refuses."""
    shard = Shard(SETTINGS)
    claimed = ScriptedWorker(described(highest_epoch=EPOCHS - 3)), ScriptedWorker(described(highest_epoch=1 << 39))
    async with serving(*claimed) as (near, high):
        await shard.fleet.serve(replace(near, identity="near"))
        await shard.fleet.serve(replace(high, identity="high"))
    (event,) = shard.events
    assert event[0] == "worker_refused" and event[1].startswith("highest_epoch: 1099511627773 is far beyond Redis's")
    assert shard.registry.least_epochs == {"high": (1 << 39) + 1}


async def test_epoch_beyond_all_bounds_is_refused_with_an_event() -> None:
    shard = Shard(SETTINGS)
    async with serving(ScriptedWorker(described(highest_epoch=1 << 62))) as (worker,):
        await shard.fleet.serve(worker)
    (event,) = shard.events
    assert event[0] == "worker_refused" and event[1].startswith("highest_epoch: 4611686018427387904 is not between")
