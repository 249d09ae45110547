"""Ending tasks for certain, and never blaming a step that was answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

import numpy as np
import pytest

from protos import queue_pb2, worker_pb2
from services.scheduler.core.types import EMPTY, Enter, Limits, NewRequest, StepPlan
from services.scheduler.service import Service
from services.scheduler.workers import fleet as fleet_module
from services.scheduler.workers.link import StepFailedError
from services.scheduler.workers.loop import InFlight
from services.scheduler.workers.registry import Registration
from shared.errors import ProtocolError
from shared.settings import SchedulerSettings
from shared.tasks import end, first_of, within
from shared.wire.columns import pack, unpack
from tests.support.waiting import free_port


async def sends_and_waits(sent: asyncio.Future[None]) -> None:
    """As redis-py sends a command."""
    await asyncio.wait_for(sent, 60)
    await asyncio.Event().wait()


async def test_cancellation_that_comes_when_send_is_complete_is_not_lost() -> None:
    sent = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(sends_and_waits(sent))
    await asyncio.sleep(0)
    sent.set_result(None)
    await end(task)
    assert task.cancelled()


async def test_others_end_with_the_first_though_one_loses_its_cancellation() -> None:
    sent = asyncio.get_running_loop().create_future()

    async def completes_the_send() -> None:
        sent.set_result(None)

    await first_of(sends_and_waits(sent), completes_the_send())


async def test_task_cancelled_while_it_ends_others_learns_it_afterwards() -> None:
    stubborn = asyncio.create_task(obeys_at_last(times := [0]))
    await asyncio.sleep(0)
    ending = asyncio.create_task(end(stubborn))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert stubborn.done()
    assert times == [3]


async def obeys_at_last(times: list[int]) -> None:
    while times[0] < 3:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            times[0] += 1


async def test_overlong_work_is_ended_and_other_work_is_not() -> None:
    async def quick() -> None:
        await asyncio.sleep(0)

    async def wrong() -> None:
        raise ValueError("wrong")

    assert await within(60, quick())
    assert not await within(0.01, asyncio.Event().wait())
    with pytest.raises(ValueError, match="wrong"):
        await within(60, wrong())


def plan(step: int, slots: list[int], enters: list[tuple[int, str]]) -> StepPlan:
    empty = dict.fromkeys(
        ("free_slots", "swap_out_gpu", "swap_out_host", "swap_in_host", "swap_in_gpu", "append_slots", "append_blocks"),
        EMPTY,
    )
    return StepPlan(
        id=step,
        replica=0,
        enters=[Enter(slot, NewRequest(name, [EMPTY], 1), 0, EMPTY, 0, 0, EMPTY) for slot, name in enters],
        chunk_slots=np.array(slots, np.int32),
        chunk_starts=EMPTY,
        chunk_lengths=EMPTY,
        samples=np.zeros(0, np.bool_),
        **empty,
    )


def test_steps_know_their_requests_though_slots_change_hands() -> None:
    steps = InFlight()
    steps.add(plan(1, [0, 1], [(0, "a"), (1, "b")]))
    for step in range(2, 9):
        steps.add(plan(step, [0], [(0, f"c{step}")]))
    assert (steps.oldest(), steps.all()) == ({"a", "b"}, {"a", "b"} | {f"c{step}" for step in range(2, 9)})
    for step in range(1, 7):
        steps.pop(step)
    assert (steps.oldest(), steps.all()) == ({"c7"}, {"c7", "c8"})
    steps.add(plan(9, [1, 0], []))
    steps.pop(7)
    steps.pop(8)
    assert steps.oldest() == steps.all() == {"b", "c8"}


class EndingLink:
    """Takes one step; the second cannot be sent any more, and only then the answer to the first is read."""

    worker = Registration("worker-0", "nowhere", "identity")
    epoch = 1
    drains = False
    info = worker_pb2.WorkerInfo(vocab_size=512)

    def __init__(self) -> None:
        self.steps: list[worker_pb2.Step] = []
        self._ended = asyncio.Event()

    async def open(self, kept: Callable[[], Iterable[str]]) -> Limits:
        return Limits(slots=4, blocks=64, block_size=16, max_model_len=128, max_step_tokens=64)

    async def send(self, step: worker_pb2.Step) -> None:
        self.steps.append(step)
        if len(self.steps) == 2:
            self._ended.set()
            raise ProtocolError("the stream has ended")

    async def results(self, has_last_step: Callable[[], bool]) -> AsyncIterator[worker_pb2.Result]:
        await self._ended.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        step = self.steps[0]
        yield worker_pb2.Result(epoch=0, id=step.id, slots=step.chunk_slots, tokens=pack(unpack(step.chunk_slots)))
        raise StepFailedError("the stream broke")

    async def watch(self, limit_s: float, idle: Callable[[], None]) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


async def test_step_with_an_unread_answer_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(SchedulerSettings(redis_url=f"redis://127.0.0.1:{free_port()}/0", lookahead=1))
    link = EndingLink()
    fleet, blamed = service.fleet, []

    def losing(worker: Registration, replica: int, in_flight: InFlight, reason: Exception | None) -> None:
        if isinstance(reason, StepFailedError):
            blamed.append(list(in_flight.plans))

    monkeypatch.setattr(fleet_module, "WorkerLink", lambda worker, settings, token: link)
    monkeypatch.setattr(fleet, "lose", losing)
    payload = queue_pb2.Request(id="a")
    service.core.add(NewRequest("a", [np.arange(5, dtype=np.int32)], 20, payload=payload), 0)
    await asyncio.wait_for(fleet.serve(link.worker), 60)
    assert [step.id for step in link.steps] == [1, 2]
    assert blamed == [[2]]
