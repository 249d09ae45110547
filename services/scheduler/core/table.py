"""The running sequences of one replica as a struct of arrays: one row ("slot") each.

Written while a step is planned and by apply(); the policies' parts read it. A row without a sequence has known_tokens
== limit == 0, so that it never wants to run, and generation == NEVER, so that no result is for it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.scheduler.core.ngrams import MARGIN, room_for_texts
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.types import MAX_STOP_IDS, Finish, Int32, Limits, NewRequest, Priority, Rows

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
RowIndex = Rows | slice  # how columns are indexed: row numbers, or all of the first rows as a slice
NEVER = np.iinfo(np.int64).max
UNSET = -1  # a stop id that no token has
FREE, PREFILLING, DECODING, LOADING = range(4)  # phases of a row
ONES: Int32 = np.ones(4096, np.int32)
ONES.setflags(write=False)


@dataclass(slots=True)
class DeliveryRows:
    """The rows that get a token of a step, in the order in which tokens are published: by gateway."""

    roster: int
    sampled_rows: Rows  # in the order of the step
    rows: RowIndex  # in the order of publication
    requests: list[NewRequest]
    gateways: list[str]
    choices: Int32


@dataclass(slots=True)
class Selection:
    """Rows that were selected by a mask, and as they go to the worker."""

    mask: bytes
    rows: Rows
    wire: Int32


# Rows of the two matrices that the columns are views of: a sequence enters and leaves with one assignment to each.
# planned_tokens, known_tokens and unanswered_steps stand first and together, because a planned decode adds one to all.
_INT32 = (
    "planned_tokens", "known_tokens", "unanswered_steps", "applied_tokens", "limit", "prompt", "held_blocks",
    "reserved_blocks", "capacity", "microbatch", "choice", "gateway", "tenant", "priority", "floor",
    "checkpointed_tokens", "due", "entry_tokens", "filled_tokens", "registered_blocks", "phase", "late", "drafts",
)  # fmt: skip
_INT64 = (
    "generation", "arrival_ns", "number", "ttft_slo_ns", "tbt_slo_ns", "last_token_ns", "checkpoint_ns",
)  # fmt: skip


def ones(count: int) -> Int32:
    """Return [count] int32 ones, shared: read only."""
    return ONES[:count] if count <= ONES.size else np.ones(count, np.int32)


def ramp(starts: Int64 | Int32, counts: Int32) -> Int64:
    """Return starts[i], starts[i] + 1, ... of counts[i] numbers each, for all i in order."""
    numbers: Int64 = (starts - counts.cumsum() + counts).repeat(counts)
    numbers += np.arange(numbers.size)
    return numbers


class SlotTable:
    """Columns by slot, [slots] each. All tokens are counted from the first of the prompt.

    planned_tokens: with KV that is planned; known_tokens: placeholders of steps in flight included; applied_tokens:
    really known; limit: tokens at most; entry_tokens: known when the sequence took the slot; filled_tokens: with KV
    that a result has confirmed, while it still prefills; held_blocks, reserved_blocks: blocks in the row's block
    table, and kept for it (held ones included); capacity: tokens that the held blocks take; floor: tokens from
    which a stop id counts; checkpointed_tokens: those that need no checkpoint any more; due: applied tokens at
    which the next one is due; registered_blocks: those that the prefix index has been given; generation: the step
    with which the sequence entered; last_token_ns: before the first token the arrival; late: placeholders that no
    result will fill.

    drafts: guesses in the unanswered step of the row; until it is answered, no other step has the row.

    phase: DECODING where one token is left to plan, PREFILLING where more are, LOADING while the KV is copied in or the
    row is late.

    planned_tokens < known_tokens <= limit and applied_tokens <= known_tokens hold for every row with a sequence.
    """

    planned_tokens: Int32
    known_tokens: Int32
    unanswered_steps: Int32
    applied_tokens: Int32
    limit: Int32
    prompt: Int32
    held_blocks: Int32
    reserved_blocks: Int32
    capacity: Int32
    microbatch: Int32
    choice: Int32
    gateway: Int32
    tenant: Int32
    priority: Int32
    floor: Int32
    checkpointed_tokens: Int32
    due: Int32
    entry_tokens: Int32
    filled_tokens: Int32
    registered_blocks: Int32
    phase: Int32
    late: Int32
    drafts: Int32
    generation: Int64
    arrival_ns: Int64
    number: Int64
    ttft_slo_ns: Int64
    tbt_slo_ns: Int64
    last_token_ns: Int64
    checkpoint_ns: Int64

    def __init__(self, limits: Limits) -> None:
        slots, self.width = limits.slots, limits.max_model_len + 1
        self.block_size = limits.block_size
        self.slots = slots
        self.count = 0
        self.high = 0  # one above the highest row in use: vector operations stop there
        self.roster = 0  # changes whenever a row gets another sequence, none, or another gateway
        self.stop_width = 0
        self.ints: Int32 = np.zeros((len(_INT32), slots), np.int32)
        self.longs: Int64 = np.zeros((len(_INT64), slots), np.int64)
        for i, name in enumerate(_INT32):
            setattr(self, name, self.ints[i])
        for i, name in enumerate(_INT64):
            setattr(self, name, self.longs[i])
        self.generation[:] = NEVER
        self._decode_counters: Int32 = self.ints[:3]  # planned_tokens, known_tokens, unanswered_steps
        self.active: Bool = np.zeros(slots, np.bool_)
        self.is_pinned: Bool = np.zeros(slots, np.bool_)
        self.stop_ids: Int32 = np.full((MAX_STOP_IDS, slots), UNSET, np.int32)  # a row per id: contiguous over slots
        self.blocks: Int32 = np.zeros((slots, -(-limits.max_model_len // limits.block_size)), np.int32)
        self.blocks_flat = self.blocks.reshape(-1)
        self.tokens_flat = room_for_texts(slots, self.width)
        self.tokens: Int32 = self.tokens_flat[MARGIN:-MARGIN].reshape(slots, self.width)
        self.base: Int64 = MARGIN + np.arange(slots, dtype=np.int64) * self.width
        self.sequence: npt.NDArray[np.object_] = np.full(slots, None, object)
        self.request: npt.NDArray[np.object_] = np.full(slots, None, object)
        self.tbt_rows = 0  # rows with a TBT limit
        self.low_rows = 0  # rows of class low
        self.late_rows = 0  # rows with placeholders that no result will fill
        self.stagger = 32  # the first checkpoints of rows that enter together fall due over so many steps
        self._all_rows: Rows = np.arange(slots)
        self._all_rows_int32: Int32 = np.arange(slots, dtype=np.int32)
        self._first_rows: Rows = self._all_rows[:0]
        self._selections: dict[int, Selection] = {}  # by microbatch
        self._free = list(range(slots))
        self._deliveries: dict[int, DeliveryRows] = {}  # by microbatch

    @property
    def low_yields(self) -> bool:
        """Whether a row of a better class than low runs: then those of class low do not count."""
        return self.count > self.low_rows

    def first_rows(self, count: int) -> Rows:
        """Return [count] rows: 0..count-1. The same object as long as `count` stays the same."""
        if self._first_rows.size != count:
            self._first_rows = self._all_rows[:count]
        return self._first_rows

    def mask(self, rows: Rows) -> Bool:
        """Return [high] bool: the row is one of `rows`."""
        mask = np.zeros(self.high, np.bool_)
        mask[rows] = True
        return mask

    def rows(self, slots: Rows) -> RowIndex:
        """Return how to index columns with `slots`: a slice where they are all of the first rows, which is cheaper."""
        return slice(0, slots.size) if slots is self._first_rows else slots

    def select(self, mask: Bool, microbatch: int) -> Rows:
        """Return the rows of `mask`, [high], ascending. The same object as long as the mask stays the same."""
        count = int(np.count_nonzero(mask))
        if count == mask.size:
            return self.first_rows(count)
        key = mask.tobytes()
        kept = self._selections.get(microbatch)
        if kept is None or kept.mask != key:
            rows = mask.nonzero()[0]
            kept = self._selections[microbatch] = Selection(key, rows, rows.astype(np.int32))
        return kept.rows

    def wire(self, rows: Rows, microbatch: int) -> Int32:
        """Return `rows` as they go to the worker; do not write to it."""
        if rows is self._first_rows:
            return self._all_rows_int32[: rows.size]
        kept = self._selections.get(microbatch)
        return kept.wire if kept is not None and rows is kept.rows else rows.astype(np.int32)

    def advance_decodes(self, tokens: Int32) -> None:
        """Plan tokens [high], 0 or 1 for each row: the sampled one is known as a placeholder."""
        self._decode_counters[:, : tokens.size] += tokens

    def advance(self, row: int, end: int) -> bool:
        """Plan a row up to `end` tokens; return whether it samples. A sampled token is a placeholder."""
        known = self.known_tokens.item(row)
        samples: bool = end >= known
        if samples:
            self.known_tokens[row] = known = end + 1
        self.planned_tokens[row] = end
        self.unanswered_steps[row] += 1
        self.phase[row] = DECODING if known - end == 1 else PREFILLING
        return samples

    def speculate(self, rows: Rows, drafts: Int32) -> None:
        """Plan drafts[i] guesses behind the token of a decoding row in this step, [k] both."""
        self.planned_tokens[rows] += drafts
        self.known_tokens[rows] += drafts
        self.drafts[rows] = drafts

    def rollback(self, rows: Rows, tokens: Int32) -> None:
        """Take back the last tokens[i] planned tokens of decoding rows, because they were refused or are not awaited.

        Their blocks stay in the row. Raise ValueError where the rows have no such placeholders.
        """
        known = self.known_tokens[rows] - tokens
        if (known < self.applied_tokens[rows]).any():
            raise ValueError("rollback: a row has no such placeholders; take back at most what no result will fill")
        self.planned_tokens[rows] -= tokens
        self.known_tokens[rows] = known
        self.drafts[rows] = 0

    def sit_out(self, rows: Rows) -> None:
        """Note that one placeholder of each row was not sampled: the row runs no more until plan_again()."""
        self.late_rows += int(np.count_nonzero(self.late[rows] == 0))
        self.late[rows] += 1
        self.limit[rows] = self.known_tokens[rows]
        self.phase[rows] = LOADING

    def plan_again(self, limits: Limits) -> None:
        """Let the late rows with no step unanswered run again, from the last token that is known."""
        rows = ((self.late[: self.high] > 0) & (self.unanswered_steps[: self.high] == 0)).nonzero()[0]
        self.rollback(rows, self.late[rows])
        self.set_phase(rows)
        self.late[rows] = 0
        self.late_rows -= rows.size
        self.limit[rows] = [sequence.longest(limits) for sequence in self.sequence[rows].tolist()]

    def set_phase(self, slots: Rows) -> None:
        """Set the phase of rows that have their KV by what is left to plan."""
        left = self.known_tokens[slots] - self.planned_tokens[slots]
        self.phase[slots] = np.where(left == 1, DECODING, PREFILLING)

    def enter(self, sequences: list[Sequence], step: int, microbatch: int, limits: Limits, now_ns: int) -> Rows:
        """Give each of `sequences` the lowest free slot, with nothing planned and no blocks; return the slots."""
        taken = []
        for sequence in sequences:
            s = heapq.heappop(self._free)
            taken.append(s)
            record, outputs = sequence.record, sequence.outputs.size
            request, prompt = record.request, sequence.prompt.size
            known, arrived = prompt + outputs, record.arrived_ns
            self.ints[:, s] = (
                0, known, 0, known, sequence.longest(limits), prompt, 0, 0, 0, microbatch,
                sequence.choice, record.gateway, record.tenant, request.priority, prompt + max(request.min_tokens, 1),
                prompt + sequence.checkpointed_tokens, known + self.stagger - s % self.stagger, known, 0, 0,
                PREFILLING, 0, 0,
            )  # fmt: skip
            self.longs[:, s] = (
                step, arrived, sequence.number, request.ttft_slo_ns, request.tbt_slo_ns,
                sequence.last_token_ns or arrived, sequence.checkpoint_ns or now_ns,
            )  # fmt: skip
            stops = request.stop_ids.size
            if stops:
                self.stop_ids[:stops, s] = request.stop_ids
                self.stop_width = max(self.stop_width, stops) if self.count else stops
            self.tokens[s, :prompt] = sequence.prompt
            if outputs:
                self.tokens[s, prompt:known] = sequence.outputs
            self.sequence[s], self.request[s] = sequence, request
            self.tbt_rows += request.tbt_slo_ns > 0
            self.low_rows += request.priority == Priority.LOW
            self.active[s], self.is_pinned[s] = True, sequence.is_pinned
            self.high = max(self.high, s + 1)
            self.count += 1
            sequence.state, sequence.slot = State.RUNNING, s
        self.roster += 1
        return np.array(taken)

    def redirect(self, s: int, gateway: int) -> None:
        """Let the row's tokens go to another gateway, by its interned number."""
        self.gateway[s] = gateway
        self.roster += 1

    def leave(self, s: int) -> Int32:
        """Take the sequence of slot `s` out, with the outputs applied so far; return its blocks."""
        sequence: Sequence = self.sequence[s]
        sequence.outputs = self.outputs(s)
        sequence.unanswered_steps = int(self.unanswered_steps[s])
        sequence.checkpointed_tokens = int(self.checkpointed_tokens[s] - self.prompt[s])
        sequence.checkpoint_ns = int(self.checkpoint_ns[s])
        if sequence.outputs.size:
            sequence.last_token_ns = int(self.last_token_ns[s])
        sequence.slot = -1
        blocks = self.blocks[s, : self.held_blocks[s]].copy()
        self.tbt_rows -= int(self.tbt_slo_ns[s]) > 0
        self.low_rows -= int(self.priority[s]) == Priority.LOW
        self.late_rows -= int(self.late[s]) > 0
        if self.request[s].stop_ids.size:
            self.stop_ids[:, s] = UNSET
        self.ints[:, s] = 0
        self.generation[s] = NEVER
        self.active[s] = self.is_pinned[s] = False
        self.sequence[s] = self.request[s] = None
        heapq.heappush(self._free, s)
        self.count -= 1
        self.roster += 1
        while self.high and not self.active[self.high - 1]:
            self.high -= 1
        return blocks

    def hold(self, s: int, sequence: Sequence) -> None:
        """Keep the row from running until go(): its KV is still being copied in."""
        self.limit[s] = sequence.known_tokens
        self.phase[s] = LOADING

    def go(self, s: int, limits: Limits) -> None:
        """Let the row run: its KV is there."""
        self.limit[s] = self.sequence[s].longest(limits)
        self.phase[s] = DECODING if self.known_tokens[s] - self.planned_tokens[s] == 1 else PREFILLING

    def computed_tokens(self, s: int) -> int:
        """Return how many tokens of the row have KV that results have confirmed."""
        return int(
            self.applied_tokens[s] - 1 if self.applied_tokens[s] > self.entry_tokens[s] else self.filled_tokens[s]
        )

    def outputs(self, s: int) -> Int32:
        """Return [applied_tokens - prompt] tokens, a copy."""
        return self.tokens[s, self.prompt[s] : self.applied_tokens[s]].copy()

    def fill(self, rows: Rows, sizes: Int32, blocks: Int32) -> None:
        """Put sizes[i] of `blocks` at the end of the block table of rows[i], for all [n] rows in order."""
        held = self.held_blocks[rows]
        self.blocks_flat[ramp(rows * self.blocks.shape[1] + held, sizes)] = blocks
        held += sizes
        self.held_blocks[rows] = held
        self.capacity[rows] = held * self.block_size

    def shorten(self, rows: Rows, held: Int32) -> Int32:
        """Leave rows[i] its first held[i] blocks, [n] both; return the others, those of one row after another."""
        taken = self.blocks_flat[ramp(rows * self.blocks.shape[1] + held, self.held_blocks[rows] - held)]
        self.held_blocks[rows] = held
        self.capacity[rows] = held * self.block_size
        return taken

    def append_one(self, rows: Rows, blocks: Int32) -> Int32:
        """Put one block at the end of each row's block table; return `blocks`."""
        held = self.held_blocks[rows]
        self.blocks[rows, held] = blocks
        held += 1
        self.held_blocks[rows] = held
        self.capacity[rows] = held * self.block_size
        return blocks

    def append(self, s: int, blocks: Int32) -> None:
        """Put `blocks` at the end of one row's block table."""
        held = self.held_blocks.item(s)
        end = held + blocks.size
        self.blocks[s, held:end] = blocks
        self.held_blocks[s], self.capacity[s] = end, end * self.block_size

    def spread(self, rows: Rows, values: Int32, size: int) -> Int32:
        """Return a column [size] with values[i] at rows[i]; other rows are undefined. Do not write to it."""
        if rows is self._first_rows and rows.size == size:
            return values
        column = np.empty(size, np.int32)
        column[rows] = values
        return column

    def append_tokens(self, tokens: Int32, sampled: Bool) -> Int32:
        """Append tokens[i] to each row of `sampled`, [n] both, the first n rows; return [n] tokens applied before."""
        applied = self.applied_tokens[: tokens.size]
        before = applied.copy()
        # Behind the applied tokens of a row nothing counts, so rows that did not sample may be written to.
        self.tokens_flat[self.base[: tokens.size] + before] = tokens
        applied += sampled
        return before

    def append_spans(self, rows: Rows, tokens: Int32, counts: Int32, size: int) -> tuple[Int32, Bool | None]:
        """Append counts[i] tokens to rows[i], [k] both, up to the first stop id that counts.

        tokens: those of one row after another. Return [size] tokens appended to each of the first rows, and whether the
        last of them is such an id; None if none is.
        """
        applied = self.applied_tokens[rows]
        self.tokens_flat[ramp(self.base[rows] + applied, counts)] = tokens
        kept, ends = counts, None
        if self.stop_width:
            at = rows.repeat(counts)
            hit: Bool = self.stop_ids[0, at] == tokens
            for i in range(1, self.stop_width):
                hit |= self.stop_ids[i, at] == tokens
            if np.count_nonzero(hit):
                hit &= ramp(applied, counts) >= self.floor[at] - 1
            if np.count_nonzero(hit):
                starts = np.cumsum(counts) - counts
                until = np.where(hit, ramp(np.ones_like(counts), counts), np.iinfo(np.int32).max)
                first = np.minimum.reduceat(until, starts)
                kept = np.minimum(counts, first).astype(np.int32)
                ends = np.zeros(size, np.bool_)
                ends[rows[first <= counts]] = True
        column = np.zeros(size, np.int32)
        column[rows] = kept
        self.applied_tokens[rows] = applied + kept
        return column, ends

    def find_stops(self, tokens: Int32, sampled: Bool) -> Bool | None:
        """Return [n] bool: tokens[i], just applied to row i of `sampled`, is a stop id that counts; None if none is."""
        if not self.stop_width:
            return None
        hit: Bool = self.stop_ids[0, : tokens.size] == tokens
        for i in range(1, self.stop_width):
            hit |= self.stop_ids[i, : tokens.size] == tokens
        hit &= sampled
        if not np.count_nonzero(hit):
            return None
        hit &= self.applied_tokens[: tokens.size] >= self.floor[: tokens.size]
        return hit

    def delivery_rows(self, sampled: Rows, microbatch: int, names: npt.NDArray[np.object_]) -> DeliveryRows:
        """Return where the tokens of `sampled` go. Kept per microbatch: in steady decode it stays the same."""
        kept = self._deliveries.get(microbatch)
        if kept is not None and kept.roster == self.roster:
            if kept.sampled_rows is sampled:
                return kept
            if np.array_equal(kept.sampled_rows, sampled):
                kept.sampled_rows = sampled  # the next step probably has the same object
                return kept
        gateways = self.gateway[sampled]
        rows: RowIndex = self.rows(sampled)
        if sampled.size and np.count_nonzero(gateways != gateways[0]):
            # Numbers of 16 bits are sorted by radix.
            order = (gateways.astype(np.uint16) if names.size <= 1 << 16 else gateways).argsort(kind="stable")
            rows, gateways = sampled[order], gateways[order]
        self._deliveries[microbatch] = delivery = DeliveryRows(
            self.roster,
            sampled,
            rows,
            self.request[rows].tolist(),
            names[gateways].tolist(),
            self.choice[rows].copy(),
        )
        return delivery

    def check(self, max_unanswered: int) -> None:
        """Raise RuntimeError where a row contradicts itself."""
        on = np.flatnonzero(self.active)
        off = np.flatnonzero(~self.active)
        if on.size != self.count or (on.size and on[-1] + 1 != self.high) or self.count + len(self._free) != self.slots:
            raise RuntimeError(f"{on.size} rows are in use, {self.count} are counted, high is {self.high}")
        known, planned, applied = self.known_tokens[on], self.planned_tokens[on], self.applied_tokens[on]
        wrong = (planned >= known) | (known > self.limit[on]) | (applied > known) | (planned > self.capacity[on])
        wrong |= (self.capacity[on] != self.held_blocks[on] * self.block_size) | (self.prompt[on] > applied)
        wrong |= ((known - planned == 1) != (self.phase[on] == DECODING)) & (self.phase[on] != LOADING)
        wrong |= (self.phase[on] == LOADING) & (known != self.limit[on])
        wrong |= (self.unanswered_steps[on] < 0) | (self.unanswered_steps[on] > max_unanswered)
        wrong |= known - applied - self.late[on] > self.unanswered_steps[on] + self.drafts[on]
        wrong |= (self.drafts[on] > 0) & ((self.unanswered_steps[on] != 1) | (self.late[on] > 0))
        # A row that was late keeps the blocks of what was taken back.
        wrong |= (self.capacity[on] - planned >= self.block_size + max_unanswered) & (self.held_blocks[on] > 0)
        wrong |= self.late[on] > known - applied
        if np.count_nonzero(self.late[on]) != self.late_rows:
            raise RuntimeError(f"{self.late_rows} late rows are counted, not {np.count_nonzero(self.late[on])}")
        if np.count_nonzero(self.priority[on] == Priority.LOW) != self.low_rows:
            raise RuntimeError(f"{self.low_rows} rows of class low are counted, not as many as there are")
        if wrong.any():
            raise RuntimeError(f"rows {on[wrong].tolist()} contradict themselves")
        if (
            self.held_blocks[off].any()
            or self.known_tokens[off].any()
            or self.phase[off].any()
            or self.unanswered_steps[off].any()
            or self.drafts[off].any()
            or (self.generation[off] != NEVER).any()
        ):
            raise RuntimeError("a row without a sequence holds something")
        for s in on:
            sequence: Sequence = self.sequence[s]
            if sequence.slot != s or sequence.state is not State.RUNNING or sequence.finish is not Finish.RUNNING:
                raise RuntimeError(f"slot {s} holds a sequence in state {sequence.state} of slot {sequence.slot}")
