"""A device that only pretends: runs steps in order, each for as long as the clock says, and knows when requests stop.

One per replica, driven by engine.py. What a step samples does not depend on when it runs, so it is known as soon as the
step is sent; no row is looked at one by one.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from bench.simulator.clock import Features, StepClock
from bench.simulator.workload import PLAIN_ID, STOP_ID, Int64
from services.scheduler.core.types import Int32, StepPlan

_NEVER = np.iinfo(np.int32).max // 2  # tokens left of a row that samples no stop any more


class Ticket(NamedTuple):
    """A step on its way: what its Result will say, and when."""

    end_ns: int
    id: int
    slots: Int32
    tokens: Int32
    duration_ns: int
    swap_out: Int32
    swap_in: Int32
    microbatch: int


class Device:
    """`output`: true length of every request by its payload.

    stages: a pipeline of that many; a step occupies each for duration / stages, one after the other, so that `stages`
    steps run at a time. The even split and free hand-over are an approximation: real stages differ and hand over
    activations. Swaps run beside the compute on a copy engine of `swap_bytes_s`; those of a step start when the compute
    of the step before has ended, and its Result waits for them; the next step's compute does not.
    padded: batches run as one rectangle: a member that has finished still costs a token a step until the batch ends,
    and the prompts of a step cost their number times the longest. Contexts of the finished are not read (in favour of
    such engines).
    """

    def __init__(self, slots: int, clock: StepClock, output: Int64, stages: int, padded: bool, block_ns: float) -> None:
        self.queue: deque[Ticket] = deque()
        self.tokens = 0  # computed, padding included
        self.padding = 0
        self.busy_ns = 0  # of the first stage
        self._clock, self._output, self._padded = clock, output, padded
        self._stages = [0] * stages  # when each is free
        self._copies_ns = 0  # when the copy engine is free
        self._last_end = 0
        self._block_ns = block_ns
        self._left: Int32 = np.full(slots, _NEVER, np.int32)  # tokens until the row's stop
        self._soonest = _NEVER  # no row stops before so many steps
        self._plain: Int32 = np.full(slots, PLAIN_ID, np.int32)
        self._members: set[int] = set()  # of the running batch of a padded engine, finished ones included
        self._stopped = 0  # those of them whose last token is sampled
        self._ended = 0  # those of them whose end the core knows

    def send(self, plan: StepPlan, ready_ns: int) -> Ticket:
        """Takes a step at `ready_ns`; its answer comes at the ticket's end. Tickets end in the order of their ids."""
        left = self._left
        if plan.free_slots.size:
            left[plan.free_slots] = _NEVER
        for enter in plan.enters:
            produced = enter.tokens.size - enter.prompt_tokens
            rest = int(self._output[enter.request.payload]) - produced
            left[enter.slot] = rest
            self._soonest = min(self._soonest, rest)
        decodes, slots, starts = plan.decode_tokens, plan.chunk_slots, plan.chunk_starts
        tokens, prefill, prefill_context = decodes, 0, 0.0
        sampled = slots
        if decodes < slots.size:
            sampled = slots[plan.samples]
            lengths = plan.chunk_lengths[decodes:].astype(np.int64)
            prefill = int(lengths.sum())
            tokens += prefill
            prefill_context = float((lengths * (starts[decodes:] + (lengths + 1) / 2)).sum())
            starts = starts[:decodes]
            if self._padded:
                longest = int(lengths.max())
                prefill = lengths.size * longest
                prefill_context = lengths.size * longest * (longest + 1) / 2 + longest * float(
                    plan.chunk_starts[decodes:].sum()
                )
        rectangle = tokens
        if self._padded:
            rectangle = prefill + self._rows(plan)
            self.padding += rectangle - tokens
        self.tokens += rectangle
        features = Features(rectangle, int(np.add.reduce(starts)) if decodes else 0, prefill_context, prefill)
        answer = self._sample(sampled)
        duration = self._clock.duration_ns(plan, features) if slots.size else 0
        end = self._run(plan, duration, ready_ns)
        ticket = Ticket(end, plan.id, sampled, answer, duration, plan.swap_out_gpu, plan.swap_in_host, plan.microbatch)
        self.queue.append(ticket)
        return ticket

    def _sample(self, slots: Int32) -> Int32:
        """One token for each of `slots`. Nobody stops for the next `_soonest` steps, so mostly there is no look."""
        left = self._left
        left[slots] -= 1
        self._soonest -= 1
        if self._soonest > 0:
            return self._plain[: slots.size]
        stops = left[slots] == 0
        tokens = np.where(stops, np.int32(STOP_ID), np.int32(PLAIN_ID))
        left[slots[stops]] = _NEVER
        self._stopped += int(np.count_nonzero(stops))
        self._soonest = int(left.min())
        return tokens

    def _rows(self, plan: StepPlan) -> int:
        """Rows of the running rectangle that compute one token in this step: those planned and the finished."""
        self._members.update(enter.request.payload for enter in plan.enters)
        if not plan.decode_tokens:
            return 0
        overrun = int(np.count_nonzero(self._left[plan.chunk_slots[: plan.decode_tokens]] > _NEVER // 2))
        return plan.decode_tokens + self._stopped - overrun

    def batch_ended(self, ended: int) -> bool:
        """Padded engines: `ended` more members have; was the last among them? Then the next batch begins anew."""
        self._ended += ended
        if self._ended < len(self._members):
            return False
        self._members.clear()
        self._stopped = self._ended = 0
        return True

    def _run(self, plan: StepPlan, duration_ns: int, ready_ns: int) -> int:
        """When the Result goes out."""
        free, part = self._stages, duration_ns // len(self._stages)
        before, time = free[-1], ready_ns
        for stage, free_ns in enumerate(free):
            time = (time if time > free_ns else free_ns) + part
            free[stage] = time
        self.busy_ns += part
        if moved := max(plan.swap_out_gpu.size, plan.swap_in_gpu.size):  # both directions at a time
            begin = max(before, self._copies_ns, ready_ns)
            self._copies_ns = begin + int(moved * self._block_ns)
            time = max(time, self._copies_ns)
        self._last_end = time = max(time, self._last_end)
        return time
