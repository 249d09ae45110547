"""A device that only pretends: runs steps in order, each for as long as the clock says, and knows when requests stop.

One per replica, driven by engine.py. What a step samples does not depend on when it runs, so it is known as soon as the
step is sent; no row is looked at one by one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from services.scheduler.core.types import EMPTY, Int32, StepPlan
from services.simulator.device.clock import Features, StepClock
from services.simulator.workload.workload import PLAIN_ID, STOP_ID, Int64

_NEVER = 1 << 62  # due of a row that samples no stop any more


class Ticket(NamedTuple):
    """A step on its way: what its Result will say, and when."""

    end_ns: int
    id: int
    slots: Int32
    tokens: Int32
    duration_ns: int
    swap_out: Int32
    swap_in: Int32
    swap_ns: int
    peers: Int32  # of which this replica knows the host tiers from this step on
    cells: Int64  # of the sequences that get a token, in the order of slots


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

    def __init__(
        self, slots: int, clock: StepClock, output: Int64, stages: int, padded: bool, at_end: bool, block_ns: float
    ) -> None:
        self.queue: deque[Ticket] = deque()
        self.tokens = 0  # computed, padding included
        self.padding = 0
        self.busy_ns = 0  # of the first stage
        self._clock, self._output, self._padded = clock, output.tolist(), padded
        self._at_end = at_end
        self._stages = [0] * stages  # when each is free
        self._copies_ns = 0  # when the copy engine is free
        self._copied_ns = 0  # what the last step's copies took
        self._last_end = 0
        self._block_ns = block_ns
        self.undisturbed = 0  # answers to steps below this id may come in another order, since a row was preempted
        # Time is counted in steps here: the row of slot s samples its stop in step due[s], if every row that has a stop
        # to come samples in each step; a step in which one does not puts that one's off. So mostly nothing is counted.
        self._turn = 0
        self._due: Int64 = np.full(slots, _NEVER, np.int64)
        self._stops: list[tuple[int, int]] = []  # heap of (due or before, slot)
        self._going = 0  # rows with a stop to come
        self._cell: Int64 = np.full(slots, -1, np.int64)  # where the waits of the row's request are kept; -1: stopped
        self._ghosts = 0  # rows that have stopped and are not freed yet: a step may still run them
        self._stopped_by = [0] * slots  # the step in which a ghost's stop was sampled
        self._same: Int32 | None = None  # rows of the last step if it was all decodes and nobody came, went or stopped
        self._context = 0  # of these
        self._cells: Int64 = self._cell[:0]  # of these
        self._plain: Int32 = np.full(slots, PLAIN_ID, np.int32)
        self._members: set[int] = set()  # of a batch that is delivered at its end, those that have not ended
        self._stopped = 0  # members, ended ones included, whose last token is sampled

    def send(self, plan: StepPlan, ready_ns: int, cell: Callable[[int], int]) -> Ticket:
        """Takes a step at `ready_ns`; its answer comes at the ticket's end. Tickets end in the order of their ids.

        `cell(index)` is where the waits of a request that enters are kept.
        """
        if plan.free_slots.size:
            self._free(plan)
        if plan.enters:
            self._enter(plan, cell)
        decodes, slots = plan.decode_tokens, plan.chunk_slots
        sampled, prefill, prefill_context = slots, 0, 0.0
        if decodes == slots.size and slots is self._same:
            self._context += decodes
        else:
            self._context = int(np.add.reduce(plan.chunk_starts[:decodes])) if decodes else 0
            if decodes < slots.size:
                sampled = slots[plan.samples]
                prefill, prefill_context = self._prompts(plan)
            cells = self._cell[sampled]
            self._cells = cells[cells >= 0] if self._ghosts else cells
            self._same = slots if decodes == slots.size else None
        tokens = decodes + prefill
        if self._padded:
            tokens += self._idle_rows(plan)
            self.padding += tokens - decodes - plan.prefill_tokens
        self.tokens += tokens
        cells, answer = self._cells, self._sample(sampled, plan.id)
        duration = 0
        if slots.size:
            features = Features(tokens, self._context, prefill_context, prefill)
            duration = self._clock.duration_ns(plan, features)
        end = self._run(plan, duration, ready_ns)
        ticket = Ticket(
            end, plan.id, sampled, answer, duration, plan.swap_out_gpu, plan.swap_in_host, self._copied_ns,
            _named_peers(plan), cells,
        )  # fmt: skip
        self.queue.append(ticket)
        return ticket

    def disturbed(self) -> None:
        """Rows of the steps in flight may be answered in another order than sent."""
        if self.queue:
            self.undisturbed = self.queue[-1].id + 1

    def _enter(self, plan: StepPlan, cell: Callable[[int], int]) -> None:
        self._same = None
        for enter in plan.enters:
            index, slot = enter.request.payload, enter.slot
            due = self._turn + self._output[index] - (enter.tokens.size - enter.prompt_tokens)
            self._due[slot], self._cell[slot] = due, cell(index)
            heapq.heappush(self._stops, (due, slot))
        self._going += len(plan.enters)
        if self._at_end:
            self._members.update(enter.request.payload for enter in plan.enters)

    def _free(self, plan: StepPlan) -> None:
        """Rows without a sequence from this step on: those that have stopped, and those that the core took out."""
        self._same = None
        for slot in plan.free_slots.tolist():
            if self._cell[slot] < 0:
                self._ghosts -= 1
                if self.queue and self._stopped_by[slot] >= self.queue[0].id:  # preempted before its stop was known
                    self.undisturbed = plan.id
            else:
                self.undisturbed = plan.id
                self._going -= 1
                self._cell[slot], self._due[slot] = -1, _NEVER

    def _prompts(self, plan: StepPlan) -> tuple[int, float]:
        """Tokens and pairs of attention of the prompt chunks; of a padded engine all as long as the longest."""
        lengths = plan.chunk_lengths[plan.decode_tokens :].tolist()  # few, so one by one
        if self._padded:
            lengths = [max(lengths)] * len(lengths)
        starts = plan.chunk_starts[plan.decode_tokens :].tolist()
        pairs = [n * (start + (n + 1) / 2) for n, start in zip(lengths, starts, strict=True)]
        return sum(lengths), sum(pairs)

    def _sample(self, slots: Int32, step: int) -> Int32:
        """One token for each of `slots`, in the step of this id."""
        due, turn = self._due, self._turn + 1
        self._turn = turn
        if self._cells.size < self._going:
            due += 1
            due[slots] -= 1
        tokens = self._plain[: slots.size]
        stops = self._stops
        if not stops or turn < stops[0][0]:
            return tokens
        tokens = tokens.copy()
        while stops and stops[0][0] <= turn:
            slot = heapq.heappop(stops)[1]
            real = int(due[slot])
            if real == turn:
                self._stop(slot, step)
                tokens[slots == slot] = STOP_ID
            elif real < _NEVER:  # put off meanwhile
                heapq.heappush(stops, (real, slot))
        return tokens

    def _stop(self, slot: int, step: int) -> None:
        self._same = None
        self._stopped_by[slot] = step
        self._due[slot], self._cell[slot] = _NEVER, -1
        self._going -= 1
        self._ghosts += 1
        self._stopped += 1

    def _idle_rows(self, plan: StepPlan) -> int:
        """Members of the running rectangle that have finished and cost a token in this step all the same."""
        if not plan.decode_tokens:
            return 0
        overrun = int(np.count_nonzero(self._cell[plan.chunk_slots[: plan.decode_tokens]] < 0))
        return self._stopped - overrun

    def batch_ended(self, ended: Iterable[int]) -> bool:
        """Engines that deliver at a batch's end: these have ended; was the last of the batch among them?"""
        if not self._members:
            return False
        self._members.difference_update(ended)
        if self._members:
            return False
        self._stopped = 0
        return True

    def _run(self, plan: StepPlan, duration_ns: int, ready_ns: int) -> int:
        """When the Result goes out."""
        free, part = self._stages, duration_ns // len(self._stages)
        before, time = free[-1], ready_ns
        for stage, free_ns in enumerate(free):
            time = (time if time > free_ns else free_ns) + part
            free[stage] = time
        self.busy_ns += part
        self._copied_ns = 0
        if moved := max(plan.swap_out_gpu.size, plan.swap_in_gpu.size):  # both directions at a time
            begin = max(before, self._copies_ns, ready_ns)
            self._copied_ns = int(moved * self._block_ns)
            self._copies_ns = begin + self._copied_ns
            time = max(time, self._copies_ns)
        self._last_end = time = max(time, self._last_end)
        return time


def _named_peers(plan: StepPlan) -> Int32:
    """Return the numbers of the peers that the step tells of, which its result acknowledges."""
    if not plan.peers:
        return EMPTY
    return np.array([peer.number for peer in plan.peers if peer.host_tier], np.int32)
