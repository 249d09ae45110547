"""One worker at work: steps are planned for its replica and sent, answers are applied, silence is watched.

Three tasks that stand and fall together. All drives use one core on one thread; what they share is the WorkerContext.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from services.scheduler.core.core import Core
from services.scheduler.core.types import Outcome, StepPlan
from services.scheduler.quarantine import Quarantine
from services.scheduler.tasks import first_of
from services.scheduler.telemetry import Reports, Stats
from services.scheduler.workers.link import WorkerLink, WorkerLostError, brief
from services.scheduler.workers.wire import result_from_wire, step_to_wire
from shared.errors import ProtocolError

log = logging.getLogger("orcinus.scheduler")


class InFlight:
    """Plans by step id, in order; and which request entered which slot with which step."""

    def __init__(self) -> None:
        self._plans: dict[int, StepPlan] = {}
        self._occupants: dict[int, deque[tuple[int, str]]] = {}  # by slot, as far back as unanswered steps reach

    def __len__(self) -> int:
        return len(self._plans)

    def sent(self, plan: StepPlan) -> None:
        oldest = next(iter(self._plans), plan.id)
        for enter in plan.enters:
            entered = self._occupants.setdefault(enter.slot, deque())
            while len(entered) > 1 and entered[1][0] <= oldest:
                entered.popleft()
            entered.append((plan.id, enter.request.id))
        self._plans[plan.id] = plan

    def answered(self, step: int) -> StepPlan:
        return self._plans.pop(step)

    def oldest(self) -> set[str]:
        """The requests of the oldest unanswered step; empty when every step was answered."""
        return self._requests(next(iter(self._plans.values()))) if self._plans else set()

    def all(self) -> set[str]:
        """The requests of every unanswered step."""
        return set().union(*(self._requests(plan) for plan in self._plans.values()))

    def _requests(self, plan: StepPlan) -> set[str]:
        found = set()
        for slot in plan.chunk_slots.tolist():
            names = [name for since, name in self._occupants.get(slot, ()) if since <= plan.id]
            found |= set(names[-1:])
        return found


class WorkerRates:
    """Fed by a WorkerLoop with each answer, emptied by each report."""

    __slots__ = ("_idle_ns", "_step_ns", "_steps", "_tokens")

    def __init__(self) -> None:
        self._steps = self._step_ns = self._idle_ns = self._tokens = 0

    def answered(self, step_ns: int, idle_ns: int, tokens: int) -> None:
        """A step ran for so long, after the device had waited for so long, and sampled so many tokens."""
        self._steps += 1
        self._step_ns += step_ns
        self._idle_ns += idle_ns
        self._tokens += tokens

    def take(self, seconds: float) -> dict[str, float]:
        """Tokens a second, a step's mean time, the share of the time without one. `seconds`: since the last call."""
        busy_ns = self._idle_ns + self._step_ns
        found = {
            "tok_s": round(self._tokens / max(seconds, 1e-9), 1),
            "step_ms": round(self._step_ns / max(self._steps, 1) / 1e6, 3),
            "idle_pct": round(100 * self._idle_ns / max(busy_ns, 1), 2),
        }
        self._steps = self._step_ns = self._idle_ns = self._tokens = 0
        return found


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What every drive works with. put: an outcome, with the step that it is of, goes to stats and publisher; full: has
    the publisher no room? planned: called after every plan; passed_on: a step was planned and others wait still."""

    core: Core
    parking: Quarantine
    stats: Stats
    reports: Reports
    put: Callable[[Outcome | None, int], None]
    full: Callable[[], bool]
    planned: Callable[[], None]
    passed_on: Callable[[], None]


class WorkerLoop:
    """A link and its replica, from hello to the end of the Run."""

    def __init__(self, link: WorkerLink, replica: int, slots: int, desk: WorkerContext) -> None:
        self.link = link
        self.replica = replica
        self.slots = slots
        self.in_flight = InFlight()
        self.answered = 0
        self.pace = WorkerRates()
        self.wake = asyncio.Event()  # something to plan, or room to publish
        self._desk = desk
        self.paused = False  # the publisher has no room
        self.leaves = False  # for the sake of another shard
        self._later: asyncio.TimerHandle | None = None

    @property
    def state(self) -> str:
        """serving; draining: the worker leaves; leaving: it is for another shard."""
        return "draining" if self.link.leaving else "leaving" if self.leaves else "serving"

    async def run(self, limit_s: float) -> None:
        """Raises AioRpcError, ProtocolError, WorkerLostError or ValueError when the link is of no use any more; a step
        may stay unanswered for limit_s."""
        try:
            await first_of(self._receive(), self._pump(), self._watch(limit_s))
        finally:
            if self._later is not None:
                self._later.cancel()

    def leave(self) -> None:
        """No further steps: the worker is for another shard when those that it has are answered."""
        self.leaves = True
        self.wake.set()

    async def _pump(self) -> None:
        """Plans and sends while there is something to plan, a place in flight, and room to publish."""
        desk, link = self._desk, self.link
        while True:
            sent = False
            while not ((full := desk.full()) or link.leaving or self.leaves):
                begin = time.monotonic_ns()
                plan, outcome = desk.core.plan(begin, self.replica)
                desk.put(outcome, 0)
                desk.planned()
                if plan is None:
                    break
                sent = True
                self.in_flight.sent(plan)
                desk.stats.step(plan.decode_tokens, plan.prefill_tokens, time.monotonic_ns() - begin)
                try:
                    await link.send(step_to_wire(plan, link.epoch))
                except (grpc.aio.AioRpcError, ProtocolError) as error:
                    # Results may have come before the end: _receive reads them, and then says why it ended. Else the
                    # watchdog does.
                    log.debug("step %d was not sent: %s", plan.id, brief(error))
                    await asyncio.Event().wait()
            self.paused = full
            if self.leaves and not len(self.in_flight):
                raise WorkerLostError("another shard has none: it is given to it")
            if sent and desk.core.waiting_count:
                desk.passed_on()
            self._look_again()
            await self.wake.wait()
            self.wake.clear()

    def _look_again(self) -> None:
        """Wakes this drive when its replica may take one that is held for another."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        wait_ns = self._desk.core.look_again_ns(self.replica) - time.monotonic_ns()
        if 0 < wait_ns < 1_000_000_000:  # longer than that something else wakes it
            self._later = asyncio.get_running_loop().call_later(wait_ns / 1e9, self.wake.set)

    async def _receive(self) -> None:
        desk, link = self._desk, self.link
        async for message in link.results():
            begin = time.monotonic_ns()
            outcome = desk.core.apply(result_from_wire(message, self.replica), begin)
            plan = self.in_flight.answered(message.id)  # not before: an answer that is of no use is none
            desk.reports.last_step = message.id
            desk.reports.answered += 1
            self.answered += 1
            self.wake.set()
            if link.info.host_tier and desk.core.waiting_count:
                desk.passed_on()  # what was swapped out here may be for another one to load
            took, spent_ns = message.timings, time.monotonic_ns() - begin
            self.pace.answered(took.total_ns, took.idle_ns, len(message.tokens) // 4)
            desk.stats.result(
                took.total_ns, took.idle_ns, plan.prefill_tokens, plan.decode_tokens, self.replica, spent_ns
            )
            if desk.parking.suspecting:
                rows = zip(outcome.requests, outcome.counts.tolist(), strict=True)
                desk.parking.progressed({request.id for request, count in rows if count}, begin)
            desk.put(outcome, message.id)
        raise WorkerLostError("it drains, and has answered what it had" if link.leaving else "its stream ended")

    async def _watch(self, limit_s: float) -> None:
        """Ends the link when a step stays unanswered; wakes the loop for deadlines when nothing else does."""
        await self.link.watch(limit_s, lambda: self.wake.set() if self._desk.core.unfinished else None)
