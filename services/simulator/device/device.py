"""A simulated device: runs steps in order, takes the time of each from the clock, and knows the length of each output.

One per replica, driven by engine.py. The tokens that a step samples do not depend on its start time, so `send` computes
them at once. No loop goes over single rows.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from services.scheduler.core.ngrams import MIN_MATCH
from services.scheduler.core.types import EMPTY, Int32, StepPlan
from services.simulator.device.clock import Features, StepClock
from services.simulator.workload.workload import ODD_COUNT, ODD_IDS, PATH, PLAIN_ID, STOP_ID, Float64, Int64

_NEVER = 1 << 62  # `due` of a row that samples no further stop


class Ticket(NamedTuple):
    """A step in flight: the content and the time of its result."""

    end_ns: int
    id: int
    slots: Int32
    tokens: Int32
    duration_ns: int
    swap_out: Int32
    swap_in: Int32
    swap_ns: int
    peers: Int32  # peers with host tiers that this replica can read from this step on
    counts: Int32 | None  # tokens of each slot; None: one each
    cells: Int64  # `Recorder.cell` of the sequences that get a token, in the order of slots


class Device:
    """Runs the steps of one replica.

    output: [requests] the true output length of every request, indexed by its payload.

    stages: number of pipeline stages. A step occupies each stage for duration / stages, one after the other, so
    `stages` steps run at a time. The even split and the free transfer of activations are an approximation.

    block_ns: time of the copy engine for one block. Copies run beside the compute. The copies of a step start when the
    compute of the previous step has ended. The step's result waits for them; the compute of the next step does not.

    padded: batches run as one rectangle. A finished member costs one token a step until the batch ends. The prompts of
    a step cost their number times the longest. The contexts of finished members are not read, in favour of such
    engines.

    at_end: tokens are delivered when their batch ends.
    """

    def __init__(
        self, slots: int, clock: StepClock, output: Int64, stages: int, padded: bool, at_end: bool, block_ns: float
    ) -> None:
        self.queue: deque[Ticket] = deque()
        self.tokens = 0  # computed, padding included
        self.padding = 0
        self.busy_ns = 0  # compute time of the first stage
        self._clock, self._output, self._padded = clock, output.tolist(), padded
        self._at_end = at_end
        self._stages = [0] * stages  # time at which each stage is free
        self._copies_ns = 0  # time at which the copy engine is free
        self._copied_ns = 0  # duration of the last step's copies
        self._last_end = 0
        self._block_ns = block_ns
        self.undisturbed = 0  # rows of steps below this id may be answered in another order: a row was preempted
        # `_due` counts steps: the row of slot s samples its stop in step due[s] if every row with a stop to come
        # samples in each step. A step that leaves a row out postpones the stop of that row, which is rare.
        self._turn = 0
        self._due: Int64 = np.full(slots, _NEVER, np.int64)
        self._stops: list[tuple[int, int]] = []  # heap of (due or before, slot)
        self._unstopped = 0  # rows with a stop to come
        self._cell: Int64 = np.full(slots, -1, np.int64)  # `Recorder.cell` of the row's request; -1 after its stop
        self._ghosts = 0  # rows that have stopped and are not freed yet: a step may still run them
        self._stopped_by = [0] * slots  # the step that sampled the stop of a ghost
        self._same: Int32 | None = None  # rows of the last step if it had decodes only and no row changed since
        self._context = 0  # decode context of the rows in `_same`
        self._cells: Int64 = self._cell[:0]  # cells of the rows in `_same`
        self._plain: Int32 = np.full(slots, PLAIN_ID, np.int32)
        self._members: set[int] = set()  # unfinished members of a batch that is delivered at its end
        self._stopped = 0  # members that have sampled their last token, ended ones included

    def send(self, plan: StepPlan, ready_ns: int, cell: Callable[[int], int]) -> Ticket:
        """Start a step at `ready_ns` and return its ticket; the result comes at `end_ns`. Tickets end in order of ids.

        `cell(index)` returns the place of the waits of an entering request, see `Recorder.cell`.
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
        if plan.drafts.size:
            counts = plan.chunk_drafts
            tokens += plan.drafts.size
            prefill_context += float((counts * (plan.chunk_starts + (counts + 1) / 2)).sum())
        self.tokens += tokens
        cells = self._cells
        answer, given = self._answer(sampled, plan)
        duration = 0
        if slots.size:
            features = Features(tokens, self._context, prefill_context, prefill)
            duration = self._clock.duration_ns(plan, features)
        end = self._run(plan, duration, ready_ns)
        ticket = Ticket(
            end, plan.id, sampled, answer, duration, plan.swap_out_gpu, plan.swap_in_host, self._copied_ns,
            _named_peers(plan), given, cells,
        )  # fmt: skip
        self.queue.append(ticket)
        return ticket

    def disturbed(self) -> None:
        """Note that rows of the steps in flight may be answered in another order than they were sent."""
        if self.queue:
            self.undisturbed = self.queue[-1].id + 1

    def _enter(self, plan: StepPlan, cell: Callable[[int], int]) -> None:
        self._same = None
        for enter in plan.enters:
            index, slot = enter.request.payload, enter.slot
            due = self._turn + self._output[index] - (enter.tokens.size - enter.prompt_tokens)
            self._due[slot], self._cell[slot] = due, cell(index)
            heapq.heappush(self._stops, (due, slot))
        self._unstopped += len(plan.enters)
        if self._at_end:
            self._members.update(enter.request.payload for enter in plan.enters)

    def _free(self, plan: StepPlan) -> None:
        """Free the rows that have no sequence from this step on: stopped ones, and those that the core took out."""
        self._same = None
        for slot in plan.free_slots.tolist():
            if self._cell[slot] < 0:
                self._ghosts -= 1
                if self.queue and self._stopped_by[slot] >= self.queue[0].id:  # preempted before its stop was known
                    self.undisturbed = plan.id
            else:
                self.undisturbed = plan.id
                self._unstopped -= 1
                self._cell[slot], self._due[slot] = -1, _NEVER

    def _prompts(self, plan: StepPlan) -> tuple[int, float]:
        """Return the tokens and attention pairs of the prompt chunks; a padded engine pads all to the longest."""
        lengths = plan.chunk_lengths[plan.decode_tokens :].tolist()  # few, so a loop is cheap
        if self._padded:
            lengths = [max(lengths)] * len(lengths)
        starts = plan.chunk_starts[plan.decode_tokens :].tolist()
        pairs = [n * (start + (n + 1) / 2) for n, start in zip(lengths, starts, strict=True)]
        return sum(lengths), sum(pairs)

    def _answer(self, slots: Int32, plan: StepPlan) -> tuple[Int32, Int32 | None]:
        """Return the tokens of `slots` in a step, and how many each has; None: one each."""
        return self._sample(slots, plan.id), None

    def _sample(self, slots: Int32, step: int) -> Int32:
        """Return one token for each of `slots` in the step with this id: [slots] int32."""
        due, turn = self._due, self._turn + 1
        self._turn = turn
        if self._cells.size < self._unstopped:
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
            elif real < _NEVER:  # postponed meanwhile
                heapq.heappush(stops, (real, slot))
        return tokens

    def _stop(self, slot: int, step: int) -> None:
        self._same = None
        self._stopped_by[slot] = step
        self._due[slot], self._cell[slot] = _NEVER, -1
        self._unstopped -= 1
        self._ghosts += 1
        self._stopped += 1

    def _idle_rows(self, plan: StepPlan) -> int:
        """Return the number of finished members of the running rectangle, which cost a token each in this step."""
        if not plan.decode_tokens:
            return 0
        overrun = int(np.count_nonzero(self._cell[plan.chunk_slots[: plan.decode_tokens]] < 0))
        return self._stopped - overrun

    def batch_ended(self, ended: Iterable[int]) -> bool:
        """Take the ended requests out of a batch that is delivered at its end; return whether the batch is complete."""
        if not self._members:
            return False
        self._members.difference_update(ended)
        if self._members:
            return False
        self._stopped = 0
        return True

    def _run(self, plan: StepPlan, duration_ns: int, ready_ns: int) -> int:
        """Return the time of the result, in ns: after all stages, and after the copies of the step."""
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


class DraftingDevice(Device):
    """A device that checks drafts, which are right with the chance of their request.

    All outputs repeat PATH, which each request predicts, so that the shipped scheduler finds drafts behind any three
    tokens of it. A token behind three such is the next one with the chance of its request, drafted or not; else a token
    comes that never comes again.
    """

    def __init__(
        self, slots: int, clock: StepClock, output: Int64, stages: int, block_ns: float, acceptance: Float64, seed: int
    ) -> None:
        """acceptance: [requests] the chance of a draft."""
        super().__init__(slots, clock, output, stages, padded=False, at_end=False, block_ns=block_ns)
        self.undisturbed = _NEVER  # answers have several tokens a row, so no row has a cell known beforehand
        self._chance = acceptance
        self._random = np.random.default_rng([seed, 7])
        self._odd = 0  # tokens that are not of PATH
        self._since: Int64 = np.zeros(slots, np.int64)  # tokens of PATH behind the last one that is not
        self._index: Int64 = np.zeros(slots, np.int64)  # of the next token of the output
        self._left: Int64 = np.zeros(slots, np.int64)  # tokens of the output to come; 0: it has ended
        self._accepts: Float64 = np.zeros(slots)

    def send(self, plan: StepPlan, ready_ns: int, cell: Callable[[int], int]) -> Ticket:
        """Start a step, as Device.send."""
        self._same = None  # contexts grow by more than one token
        return super().send(plan, ready_ns, cell)

    def disturbed(self) -> None:
        """Note nothing: all answers may be in another order."""

    def _enter(self, plan: StepPlan, cell: Callable[[int], int]) -> None:
        super()._enter(plan, cell)
        for enter in plan.enters:
            index: int = enter.request.payload
            self._index[enter.slot] = done = enter.tokens.size - enter.prompt_tokens
            self._left[enter.slot] = self._output[index] - done
            self._accepts[enter.slot], self._since[enter.slot] = self._chance[index], 0
        self._stops.clear()

    def _free(self, plan: StepPlan) -> None:
        super()._free(plan)
        self.undisturbed = _NEVER

    def _answer(self, slots: Int32, plan: StepPlan) -> tuple[Int32, Int32 | None]:
        left, index, since = self._left[slots], self._index[slots], self._since[slots]
        most = 0
        if plan.drafts.size:
            drafts = plan.chunk_drafts[plan.samples]
            most = int(drafts.max())
        ahead = np.arange(most + 1)
        drawn = PATH[(index[:, None] + ahead) % PATH.size]
        odd = self._random.random(drawn.shape) >= self._accepts[slots][:, None]
        odd &= since[:, None] + ahead >= MIN_MATCH
        right = np.zeros(slots.size, np.intp)
        if most:
            guessed = np.full(drawn.shape, PLAIN_ID, np.int32)
            guessed[ahead < drafts[:, None]] = plan.drafts
            right = np.logical_and.accumulate((guessed == drawn) & ~odd, axis=1).sum(axis=1)
        rows = np.arange(slots.size)
        other = odd[rows, right]
        count = int(np.count_nonzero(other))
        drawn[rows[other], right[other]] = ODD_IDS - (self._odd + np.arange(count)) % ODD_COUNT
        self._odd += count
        counts = (1 + np.where(left > 0, np.minimum(right, left - 1), right)).astype(np.int32)
        tokens = drawn[ahead < counts[:, None]]
        self._since[slots] = np.where(other, 0, since + counts)
        stopped = (left > 0) & (counts == left)
        tokens[np.cumsum(counts)[stopped] - 1] = STOP_ID
        self._left[slots], self._index[slots] = np.maximum(left - counts, 0), index + counts
        for slot in slots[stopped].tolist():
            self._stop(slot, plan.id)
        return tokens, counts if plan.drafts.size else None


def _named_peers(plan: StepPlan) -> Int32:
    """Return the numbers of the peers that the step announces and its result acknowledges."""
    if not plan.peers:
        return EMPTY
    return np.array([peer.number for peer in plan.peers if peer.host_tier], np.int32)
