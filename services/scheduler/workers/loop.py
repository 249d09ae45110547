"""One worker at work: plan and send steps, apply the answers, watch for silence.

A WorkerLoop has three tasks that end together. All loops use one core on one thread; they share a WorkerContext.
InFlight and WorkerRates are pure.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Outcome, StepPlan
from services.scheduler.quarantine import Quarantine
from services.scheduler.telemetry import Reports, Stats
from services.scheduler.workers.contract import ContractError, check_result
from services.scheduler.workers.link import ERROR_LENGTH, WorkerLink, WorkerLostError, brief
from services.scheduler.workers.wire import result_from_wire, step_to_wire
from shared.errors import ProtocolError
from shared.tasks import first_of
from shared.text.logprobs import prompt_record_bytes, record_bytes

log = logging.getLogger("orcinus.scheduler")


DRAINED = "worker drained: all steps are answered"

SCORE_BYTES = 4
"""Of the record of a sequence with a score (worker.proto, Enter.pooling)."""


class InFlight:
    """Steps that were sent and not answered, in order, and which request entered which slot with which step."""

    def __init__(self, vector_bytes: int = 0) -> None:
        """vector_bytes: of the vector of a pooled sequence."""
        self._vector_bytes = vector_bytes
        self.plans: dict[int, StepPlan] = {}
        # By slot, as far back as unanswered steps reach: first step, request, and the bytes of the log-probabilities of
        # an output token and of a prompt token.
        self._occupants: dict[int, deque[tuple[int, str, int, int]]] = {}
        self.logprob_slots: set[int] = set()  # slots with log-probabilities

    def __len__(self) -> int:
        return len(self.plans)

    def add(self, plan: StepPlan) -> None:
        """Add a step."""
        oldest = next(iter(self.plans), plan.id)
        for enter in plan.enters:
            entered = self._occupants.setdefault(enter.slot, deque())
            while len(entered) > 1 and entered[1][0] <= oldest:
                entered.popleft()
            sampling = None if enter.request.payload is None else enter.request.payload.sampling
            wanted = 0 if sampling is None else sampling.logprobs
            of_prompt = 0 if sampling is None or not enter.scored_tokens else sampling.prompt_logprobs
            pooling = 0 if sampling is None else enter.request.payload.pooling
            of_output = (record_bytes(wanted), self._vector_bytes, SCORE_BYTES)[pooling]
            sizes = of_output, prompt_record_bytes(of_prompt)
            entered.append((plan.id, enter.request.id, *sizes))
            if any(size for _, _, size, _ in entered):
                self.logprob_slots.add(enter.slot)
            else:
                self.logprob_slots.discard(enter.slot)
        self.plans[plan.id] = plan

    def pop(self, step: int) -> StepPlan:
        """Remove a step and return its plan. Raises KeyError for a step that is not in flight."""
        return self.plans.pop(step)

    def has_entered(self, slot: int, step: int) -> bool:
        """Return whether a sequence entered the slot at or before the step."""
        return any(since <= step for since, *_ in self._occupants.get(slot, ()))

    def record_bytes(self, slot: int, step: int) -> int:
        """Return the size of one token's log-probabilities of the sequence that had the slot at the step."""
        sizes = [size for since, _, size, _ in self._occupants.get(slot, ()) if since <= step]
        return sizes[-1] if sizes else 0

    def prompt_record_bytes(self, slot: int, step: int) -> int:
        """Return the same of a token of its prompt."""
        sizes = [size for since, *_, size in self._occupants.get(slot, ()) if since <= step]
        return sizes[-1] if sizes else 0

    def oldest(self) -> set[str]:
        """Return the requests of the oldest unanswered step; empty when every step was answered."""
        return self._requests(next(iter(self.plans.values()))) if self.plans else set()

    def all(self) -> set[str]:
        """Return the requests of all unanswered steps."""
        return set().union(*(self._requests(plan) for plan in self.plans.values()))

    def _requests(self, plan: StepPlan) -> set[str]:
        requests: set[str] = set()
        for slot in plan.chunk_slots.tolist():
            names = [name for since, name, *_ in self._occupants.get(slot, ()) if since <= plan.id]
            requests |= set(names[-1:])
        return requests


class WorkerRates:
    """The rates of one worker since the last report."""

    __slots__ = ("_idle_ns", "_step_ns", "_steps", "_tokens")

    def __init__(self) -> None:
        self._steps = self._step_ns = self._idle_ns = self._tokens = 0

    def on_answer(self, step_ns: int, idle_ns: int, tokens: int) -> None:
        """Take an answered step: its duration, the time the device waited before it, and the tokens it sampled."""
        self._steps += 1
        self._step_ns += step_ns
        self._idle_ns += idle_ns
        self._tokens += tokens

    def take(self, seconds: float) -> dict[str, float]:
        """Return tokens per second, mean step time and idle share, and start anew. seconds: since the last call."""
        busy_ns = self._idle_ns + self._step_ns
        rates = {
            "tok_s": round(self._tokens / max(seconds, 1e-9), 1),
            "step_ms": round(self._step_ns / max(self._steps, 1) / 1e6, 3),
            "idle_pct": round(100 * self._idle_ns / max(busy_ns, 1), 2),
        }
        self._steps = self._step_ns = self._idle_ns = self._tokens = 0
        return rates


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The objects that all loops share.

    put: takes an outcome and the step that it came from; full: returns whether the publisher has no room; planned:
    called after every plan; wake_idle: called when sequences still wait after a plan.
    """

    core: Scheduler
    quarantine: Quarantine
    stats: Stats
    reports: Reports
    put: Callable[[Outcome | None, int], None]
    full: Callable[[], bool]
    on_plan: Callable[[], None]
    wake_idle: Callable[[], None]


class WorkerLoop:
    """A link and its replica, from hello to the end of the Run."""

    def __init__(self, link: WorkerLink, replica: int, slots: int, context: WorkerContext) -> None:
        self.link = link
        self.replica = replica
        self.slots = slots
        self.in_flight = InFlight(4 * link.info.vector_size)
        self.answered_steps = 0
        self.pace = WorkerRates()
        self._overdue_s = 0.0  # by `run`
        self._has_hung = False
        self.wake = asyncio.Event()  # set when there is something to plan, or room to publish
        self._context = context
        self.is_paused = False  # the publisher has no room
        self.is_given_away = False  # another shard gets the worker
        self._last_step_planned = False  # the last step of a worker that drains was planned
        self._later: asyncio.TimerHandle | None = None

    @property
    def state(self) -> str:
        """Return serving, draining (the worker leaves) or leaving (another shard gets the worker)."""
        return "draining" if self.link.drains else "leaving" if self.is_given_away else "serving"

    @property
    def is_overdue(self) -> bool:
        """Return whether the worker seems to hang: a step is unanswered for half of the limit, or at all where the
        link before timed out and this one has no answer yet.
        """
        unproven = self._has_hung and not self.answered_steps
        return self.link.waited_s() > (0 if unproven else self._overdue_s)

    async def run(self, limit_s: float, patience: int = 1) -> None:
        """Run until the link ends: raises AioRpcError, ProtocolError, WorkerLostError or ValueError.

        limit_s: how long a step may stay unanswered; patience: times this, above 1 where the link before timed out.
        """
        self._overdue_s, self._has_hung = patience * limit_s / 2, patience > 1
        try:
            await first_of(self._receive(), self._pump(), self._watch(patience * limit_s))
        finally:
            if self._later is not None:
                self._later.cancel()

    def give_away(self) -> None:
        """Send no further steps, and end when all are answered: another shard gets the worker."""
        self.is_given_away = True
        self.wake.set()

    async def _pump(self) -> None:
        """Plan and send while there is something to plan, room for a step in flight, and room to publish."""
        context, link = self._context, self.link
        while True:
            sent = False
            while not ((full := context.full()) or link.drains or self.is_given_away):
                begin = time.monotonic_ns()
                plan, outcome = context.core.plan(begin, self.replica)
                context.put(outcome, 0)
                context.on_plan()
                if plan is None:
                    break
                sent = True
                context.stats.step(plan.decode_tokens, plan.prefill_tokens, time.monotonic_ns() - begin)
                await self._send(plan)
            self.is_paused = full
            if link.drains and not (self._last_step_planned or self.is_given_away or len(self.in_flight)):
                await self._send_last()
            if self.is_given_away and not len(self.in_flight):
                raise WorkerLostError("worker given to a shard that has none")
            if sent and context.core.waiting_count:
                context.wake_idle()
            self._look_again()
            await self.wake.wait()
            self.wake.clear()

    def _keeps_kv(self) -> bool:
        """Return whether the worker gets a last step when it drains: to keep KV for the workers that come."""
        return not (self.is_given_away or self._last_step_planned) and self._context.core.can_keep_kv(self.replica)

    async def _send_last(self) -> None:
        """Let the sequences of a worker that drains leave their slots, and ask it to keep their KV, if it can."""
        plan = None
        if self._keeps_kv():
            plan, outcome = self._context.core.keep_kv(self.replica, time.monotonic_ns())
            self._context.put(outcome, 0)
        self._last_step_planned = True
        if plan is None:
            raise WorkerLostError(DRAINED)
        await self._send(plan)

    async def _send(self, plan: StepPlan) -> None:
        self.in_flight.add(plan)
        try:
            await self.link.send(step_to_wire(plan, self.link.epoch))
        except (grpc.aio.AioRpcError, ProtocolError) as error:
            # Results may have come before the end: _receive reads them and then raises. Otherwise the watchdog does.
            log.debug("step %d not sent: %s", plan.id, brief(error))
            await asyncio.Event().wait()

    def _look_again(self) -> None:
        """Wake this loop when its replica may take a sequence that is reserved for another replica."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        wait_ns = self._context.core.look_again_ns(self.replica) - time.monotonic_ns()
        if 0 < wait_ns < 1_000_000_000:  # other events come sooner
            self._later = asyncio.get_running_loop().call_later(wait_ns / 1e9, self.wake.set)

    async def _receive(self) -> None:
        context, link = self._context, self.link
        async for message in link.results(self._keeps_kv):
            begin = time.monotonic_ns()
            try:
                result = result_from_wire(message, self.replica)
                check_result(message, result, link.info.vocab_size, self.in_flight)
                outcome = context.core.apply(result, begin)
            except ValueError as error:  # a column of a wrong length, other slots, a copy that was not under way
                raise ContractError(f"result of step {message.id}: {error}; repair the worker") from error
            plan = self.in_flight.pop(message.id)  # not before: apply raises for an invalid answer
            reasons = dict(zip(result.stale_peers.tolist(), message.stale_reasons, strict=False))  # older: none
            for number in outcome.lost_peers:
                if reason := reasons.get(number):
                    context.reports.event("kv_discarded", reason[:ERROR_LENGTH], worker=link.worker.id)
            context.reports.last_step = message.id
            context.reports.answered += 1
            self.answered_steps += 1
            self.wake.set()
            if link.info.host_tier and context.core.waiting_count:
                context.wake_idle()  # another replica may load what was swapped out here
            took, spent_ns = message.timings, time.monotonic_ns() - begin
            self.pace.on_answer(took.total_ns, took.idle_ns, len(message.tokens) // 4)
            context.stats.result(
                took.total_ns, took.idle_ns, plan.prefill_tokens, plan.decode_tokens, self.replica, spent_ns
            )
            if context.quarantine.has_suspects:
                rows = zip(outcome.requests, outcome.counts.tolist(), strict=True)
                context.quarantine.on_progress({request.id for request, count in rows if count}, begin)
            context.put(outcome, message.id)
        raise WorkerLostError(DRAINED if link.drains else "the stream of the worker ended")

    async def _watch(self, limit_s: float) -> None:
        """End the link when a step stays unanswered; wake the loop for deadlines."""
        await self.link.watch(limit_s, lambda: self.wake.set() if self._context.core.unfinished_count else None)
