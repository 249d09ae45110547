"""How the scheduler takes requests and commands from Redis, and what it reads to do so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos import queue_pb2
from services.scheduler.core.types import NewRequest
from services.scheduler.requests import claims as claims_module
from services.scheduler.requests.claims import Claims, Holdings
from services.scheduler.requests.commands import Commands
from services.scheduler.requests.intake import FULL_MS, MAX_TOKENS, Clock, Intake, decode
from services.scheduler.service import Service
from shared.keys import CLASSES, Keys
from shared.redis_client import BLOCK_MS, HIGHEST_ID
from shared.settings import SchedulerSettings
from shared.tasks import end
from shared.wire.columns import pack
from tests.support.waiting import free_port, wait_until

NONE = [0, 0, 0, 0]
WAITING = 40


class Queue:
    """The request stream, and the ways out of it and back. `claimed`: requests that were read, in order."""

    def __init__(self) -> None:
        self.waiting = [f"r{number}" for number in range(WAITING)]
        self.claimed: list[str] = []
        self.held = Holdings()
        self.shards: Any = SimpleNamespace(other_shards=[], identities={}, orphans=[], looks=0, pending_requests=0)
        this: Any = self
        self.claims = Claims(this, self.held, self.shards, this, this, self._take, lambda: False, this)

    def looked(self, others: list[str]) -> None:
        self.shards.looks, self.shards.other_shards = self.shards.looks + 1, others
        self.claims.changed.set()

    async def read(self, room: list[int], one: bool) -> list[Any]:
        assert not self.shards.other_shards, "these requests are for a shard with a worker"
        await asyncio.sleep(0)
        if not self.waiting:  # as a read that waits for a request
            await self.claims.changed.wait()
        part, self.waiting = self.waiting[: sum(room)], self.waiting[sum(room) :]
        self.claimed += part
        return [SimpleNamespace(name=name, entry=SimpleNamespace(class_number=2)) for name in part]

    def _take(self, found: list[Any]) -> None:
        for item in found:
            self.held.add(item.name, item.entry)

    async def hand_back(self, limit: int = 1 << 30) -> int:
        back = list(self.held.entries)[-limit:]
        for name in back:
            self.held.drop(name)
        self.waiting += back
        return len(back)

    async def give(self, shards: dict[str, str]) -> None:
        assert not self.held.entries, "none has begun"

    async def settle_stranded(self, shards: dict[str, str], now_s: float) -> None: ...

    def claim_begins(self) -> None: ...

    def claim_answered(self) -> None: ...


def test_shard_without_worker_claims_nothing_before_its_first_look() -> None:
    queue = Queue()
    assert queue.claims.room() == NONE, "another shard may have a worker"
    queue.looked([])
    assert min(queue.claims.room()) > WAITING
    queue.looked(["shard-1"])
    assert queue.claims.room() == NONE


def test_shard_with_worker_claims_before_its_first_look() -> None:
    queue = Queue()
    queue.claims.set_slots(4)
    assert min(queue.claims.room()) > 0
    queue.claims.on_loss()
    assert queue.claims.room() == NONE


async def test_requests_go_back_when_another_shard_gets_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    run = asyncio.create_task(queue.claims.run())
    queue.looked([])
    await wait_until(lambda: len(queue.held.entries) == WAITING)
    queue.looked(["shard-1"])
    await wait_until(lambda: len(queue.waiting) == WAITING - 1 or run.done())
    monkeypatch.setattr(claims_module, "HAND_BACK_S", 0.0)
    monkeypatch.setattr(claims_module, "GIVE_S", 0.0)
    queue.looked(["shard-1"])
    await wait_until(lambda: not queue.held.entries or run.done())
    for _ in range(3):
        queue.looked(["shard-1"])
        await wait_until(lambda: not queue.claims.changed.is_set() or run.done())
    assert not run.done(), run.exception()
    await end(run)
    assert len(queue.claimed) == len(queue.waiting) == WAITING, "none was claimed again"


def stop(name: str) -> queue_pb2.Control:
    return queue_pb2.Control(stop=queue_pb2.Control.Stop(id=name, choice=0, at_token=3))


class Shard:
    """Stands in for stream, lease and publisher; each command that is obeyed has an outcome to be written."""

    def __init__(self) -> None:
        self.coming: asyncio.Queue[queue_pb2.Control | bytes | None] = asyncio.Queue()
        self.stored: list[bytes] = []
        self.read_behind = ""
        self.held: set[str] = set()
        self.obeyed: list[str] = []
        self.trimmed: list[str] = []
        self.put_count = self.written_count = self.entries = self.reads = 0
        me = cast(Any, self)
        self.commands = Commands(me, "control", self.held, self.obey, me, me)

    def obey(self, control: queue_pb2.Control) -> None:
        self.obeyed.append(control.stop.id)
        self.put_count += 1

    async def xread(self, streams: dict[str, str], count: int, block: int) -> Any:
        self.reads += 1
        self.read_behind = streams["control"]
        control = await self.coming.get()
        if control is None:  # nothing came for a while
            return []
        if isinstance(control, bytes):
            return [[b"control", [(control, {})]]]
        self.entries += 1
        self.stored.append(b"%d-0" % self.entries)
        return [[b"control", [(self.stored[-1], {b"c": control.SerializeToString()})]]]

    async def xrevrange(self, key: str, count: int) -> Any:
        return [(entry, {}) for entry in self.stored[-1:]]

    async def write(self, *commands: Any) -> None:
        self.trimmed += [command[3] for command in commands if command[0] == "XTRIM"]
        deleted = [entry for command in commands if command[0] == "XDEL" for entry in command[2:]]
        self.stored = [entry for entry in self.stored if entry not in deleted]

    async def read(self, *controls: queue_pb2.Control | bytes) -> None:
        """These come, then nothing, and all of it has been dealt with. A command may be an id alone."""
        for control in (*controls, None):
            before = self.reads
            self.coming.put_nowait(control)
            async with asyncio.timeout(60):
                while self.reads == before:
                    await asyncio.sleep(0)


@pytest.fixture
async def shard() -> AsyncIterator[Shard]:
    made = Shard()
    running = asyncio.create_task(made.commands.run())
    while not made.reads:
        await asyncio.sleep(0)
    yield made
    running.cancel()


async def test_command_kept_for_a_claim_stays_until_its_outcome(shard: Shard) -> None:
    shard.commands.claim_begins()
    await shard.read(stop("a"))
    assert (shard.obeyed, shard.trimmed) == ([], [])
    shard.held.add("a")
    shard.commands.claim_answered()
    await shard.read()
    assert (shard.obeyed, shard.trimmed) == (["a"], [])
    shard.written_count = 1
    await shard.read()
    assert shard.trimmed == ["1-1"]


async def test_draining_scheduler_keeps_no_command_of_a_failed_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(SchedulerSettings(redis_url=f"redis://127.0.0.1:{free_port()}/0"))

    async def nothing() -> int:
        return 0

    monkeypatch.setattr(service.handover, "hand_back", nothing)
    service.commands.claim_begins()  # and got no answer
    service.claims.drain()
    await asyncio.wait_for(service.claims.run(), 60)
    assert service.commands.take(stop("of-another").SerializeToString()) == "stop"
    assert not service.commands.early


async def test_command_stays_in_the_stream_until_its_outcome_is_written(shard: Shard) -> None:
    shard.held.add("a")
    await shard.read(stop("a"))
    assert (shard.obeyed, shard.trimmed) == (["a"], [])
    shard.written_count = 1
    await shard.read()
    assert shard.trimmed == ["1-1"]


async def test_command_that_leaves_at_once_repeats_none_before_it(shard: Shard) -> None:
    shard.held.add("a")
    await shard.read(stop("a"))
    await shard.read(queue_pb2.Control(policy=queue_pb2.Control.Policy(name="fcfs")))
    await shard.read()
    assert (shard.stored, shard.read_behind) == ([b"1-0"], "2-0")
    shard.stored = [b"0-5"]  # Redis lost the stream, and its clock is behind
    await shard.read()
    assert shard.read_behind == "0-0"


async def test_stream_that_is_set_back_loses_no_command_unread(shard: Shard) -> None:
    shard.held.add("a")
    shard.entries = (1 << 64) - 5
    await shard.read(stop("a"))
    shard.written_count = 1
    shard.coming.put_nowait(HIGHEST_ID)
    await shard.read()
    assert shard.trimmed == []


class Reader:
    """Notes what it was asked for; nothing has come."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []

    async def xreadgroup(self, group: str, consumer: str, streams: dict[str, str], count: int, block: int) -> list[Any]:
        self.asked.append((list(streams), block))
        return []


@pytest.mark.parametrize(
    ("room", "block"), [([1, 1, 1, 1], BLOCK_MS), ([1, 1, 0, 1], FULL_MS), ([0, 0, 3, 0], FULL_MS)]
)
async def test_a_read_that_leaves_a_class_out_ends_soon(room: list[int], block: int) -> None:
    reader, keys = Reader(), Keys("tiny")
    nothing = cast(Any, SimpleNamespace(register_script=lambda _: None, epoch=1))
    intake = Intake(cast(Any, reader), nothing, nothing, keys, "shard-0", nothing, nothing)
    assert await intake.read(room, one=True) == []
    open_ = [keys.requests(name) for name, left in zip(CLASSES, room, strict=True) if left]
    assert reader.asked == [(open_, block)]


POOLED = {"pooling": 2, "segments": pack([1]), "label_ids": pack([1, 2])}
Sampling = queue_pb2.Sampling


def decoded(**changes: Any) -> NewRequest:
    wire = queue_pb2.Request(**{"id": "a", "n": 1, "max_tokens": 1} | changes)
    return decode(wire, queue_pb2.Prompts(tokens=[pack([5])]), "", 0, "g", Clock())


def test_request_at_the_bounds_is_taken() -> None:
    assert decoded(sampling=Sampling(logprobs=21)).payload.sampling.logprobs == 21
    assert decoded(sampling=Sampling(prompt_logprobs=21)).scored_tokens == [1]
    assert decoded(prediction=pack([0] * 8192)).prediction.size == 8192
    assert decoded(**POOLED).max_tokens == 1


def test_deadline_counts_from_the_enqueueing() -> None:
    """Not from a claim: a request that another shard takes over gets no time anew."""
    wire = queue_pb2.Request(id="a", n=1, max_tokens=1, deadline_ms=5_000)
    request = decode(wire, queue_pb2.Prompts(tokens=[pack([5])]), "", 1_000, "g", Clock())
    assert request.deadline_ns == 6_000 * 1_000_000


def test_adapter_of_a_request_parts_its_prefixes_from_those_of_others() -> None:
    found = decoded(cache_salt=b"tenant", adapter=bytes(32))
    assert (found.adapter, found.salt) == (bytes(32), b"tenant" + bytes(32))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sampling": Sampling(logprobs=22)}, "^logprobs: 21 tokens besides the sampled one; ask for at most 20"),
        ({"sampling": Sampling(prompt_logprobs=22)}, "prompt_logprobs: 21 tokens"),
        ({"max_tokens": MAX_TOKENS + 1}, f"max_tokens={MAX_TOKENS + 1}, min_tokens=0: at most {MAX_TOKENS}"),
        ({"min_tokens": (1 << 32) - 1}, f"max_tokens=1, min_tokens=4294967295: at most {MAX_TOKENS}"),
        ({"adapter": b"short"}, "adapter: a digest of 5 bytes; 32 are needed, or none"),
        ({"prediction": pack([0] * 8193)}, "prediction: 8193 tokens; send at most 8192"),
        ({"prediction": pack([3, -1])}, "prediction: token id -1 is negative; send ids from 0"),
        (POOLED | {"pooling": 3}, "pooling 3"),
        (POOLED | {"max_tokens": 2}, "pooling 2, max_tokens=2"),
        (POOLED | {"sampling": Sampling(logprobs=1)}, "no logprobs"),
        (POOLED | {"sampling": Sampling(prompt_logprobs=1)}, "no logprobs"),
        (POOLED | {"segments": pack([1, 1])}, "segments: 2 for 1 prompts"),
        (POOLED | {"segments": pack([-1])}, "segments: 1 for 1 prompts, or one below 0"),
        (POOLED | {"label_ids": pack([1])}, "label ids: 4 bytes"),
    ],
)
def test_request_that_no_gateway_sends_is_unservable(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decoded(**changes)
