"""How many requests a shard claims that has no worker: alone all that wait, beside a shard with a worker none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.scheduler.requests import claims as claims_module
from services.scheduler.requests.claims import Claims, Holdings
from tests.support.waiting import wait_until

NONE = [0, 0, 0, 0]
WAITING = 40


class Queue:
    """The request stream, and the ways out of it and back. `claimed`: requests that were read, in order."""

    def __init__(self) -> None:
        self.waiting = [f"r{number}" for number in range(WAITING)]
        self.claimed: list[str] = []
        self.held = Holdings()
        self.shards: Any = SimpleNamespace(others=[], numerics={}, orphans=[], looks=0, pending=0)
        this: Any = self
        self.claims = Claims(this, self.held, self.shards, this, this, self._take, lambda: False, this)

    def looked(self, others: list[str]) -> None:
        self.shards.looks, self.shards.others = self.shards.looks + 1, others
        self.claims.changed.set()

    async def read(self, room: list[int], one: bool) -> list[Any]:
        assert not self.shards.others, "these requests are for a shard with a worker"
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
    queue.claims.joined(4)
    assert min(queue.claims.room()) > 0
    queue.claims.lost()
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
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert len(queue.claimed) == len(queue.waiting) == WAITING, "none was claimed again"
