"""The running sequences of one replica as a struct of arrays: one row ("slot") each.

Written by the passes and by apply(); the policies' parts read it. A row without a sequence has known == limit == 0, so
that it never wants to run, and since == NEVER, so that no result can be meant for it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.types import MAX_STOP_IDS, Finish, Int32, Limits, NewRequest

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Rows = Int32 | slice  # rows of the table: their numbers, or all of the first ones
NEVER = np.iinfo(np.int64).max
UNSET = -1  # a stop id that no token has


@dataclass(slots=True)
class Audience:
    """Whom the tokens of some rows are for, in the order in which they are published (by gateway)."""

    roster: int
    slots: Int32
    order: npt.NDArray[np.intp] | None  # None: they stand in order already
    requests: list[NewRequest]
    gateways: list[str]
    gateway_ids: Int32
    choices: Int32


class SlotTable:
    """Columns by slot. planned: tokens whose KV is planned; known: tokens known, placeholders of steps in flight
    included; applied: tokens really known; limit: tokens at most; capacity: tokens that the row's blocks hold.

    planned < known <= limit and applied <= known hold for every row with a sequence.
    """

    def __init__(self, limits: Limits) -> None:
        slots, self.width = limits.slots, limits.max_model_len + 1
        self.block_size = limits.block_size
        self.slots = slots
        self.count = 0
        self.high = 0  # one above the highest row in use: vector operations stop there
        self.roster = 0  # changes whenever a row gets another sequence, none, or another gateway
        self.stop_width = 0

        def column(dtype: Any, value: int = 0) -> npt.NDArray[Any]:
            return np.full(slots, value, dtype)

        self.planned: Int32 = column(np.int32)
        self.applied: Int32 = column(np.int32)
        self.known: Int32 = column(np.int32)
        self.limit: Int32 = column(np.int32)
        self.prompt: Int32 = column(np.int32)
        self.held: Int32 = column(np.int32)  # blocks in the row's block table
        self.promised: Int32 = column(np.int32)  # blocks kept for the row, held ones included
        self.capacity: Int32 = column(np.int32)
        self.unanswered: Int32 = column(np.int32)
        self.microbatch: Int32 = column(np.int32)
        self.choice: Int32 = column(np.int32)
        self.gateway: Int32 = column(np.int32)
        self.tenant: Int32 = column(np.int32)
        self.priority: Int32 = column(np.int32)
        self.floor: Int32 = column(np.int32)  # tokens from which a stop id counts
        self.checkpointed: Int32 = column(np.int32)  # tokens (prompt included) that need no checkpoint any more
        self.since: Int64 = column(np.int64, NEVER)  # the step with which the row's sequence entered: its generation
        self.arrived: Int64 = column(np.int64)
        self.number: Int64 = column(np.int64)
        self.tbt_slo_ns: Int64 = column(np.int64)
        self.last_token_ns: Int64 = column(np.int64)  # before the first one: the arrival
        self.checkpoint_ns: Int64 = column(np.int64)
        self.active: Bool = column(np.bool_)
        self.pinned: Bool = column(np.bool_)
        self.stop_ids: Int32 = np.full((MAX_STOP_IDS, slots), UNSET, np.int32)  # a row per id: contiguous over slots
        self.blocks: Int32 = np.zeros((slots, -(-limits.max_model_len // limits.block_size)), np.int32)
        self.tokens: Int32 = np.zeros((slots, self.width), np.int32)
        self.tokens_flat = self.tokens.reshape(-1)
        self.base: Int64 = np.arange(slots, dtype=np.int64) * self.width
        self.sequence: npt.NDArray[np.object_] = np.full(slots, None, object)
        self.request: npt.NDArray[np.object_] = np.full(slots, None, object)
        self._every: Int32 = np.arange(slots, dtype=np.int32)
        self._first: Int32 = self._every[:0]
        self._free = list(range(slots))
        self._audiences: dict[int, Audience] = {}

    @property
    def free(self) -> int:
        return self.slots - self.count

    def first_rows(self, count: int) -> Int32:
        """[count] int32: 0..count-1. The same object as long as `count` stays the same."""
        if self._first.size != count:
            self._first = self._every[:count]
        return self._first

    def rows(self, slots: Int32) -> Rows:
        """How to index columns with `slots`: a slice where they are all of the first rows, which is much cheaper."""
        return slice(0, slots.size) if slots is self._first else slots

    def enter(self, sequence: Sequence, step: int, microbatch: int, limits: Limits, now_ns: int) -> int:
        """Gives `sequence` the lowest free slot, with nothing planned and no blocks; returns the slot."""
        s = heapq.heappop(self._free)
        record, request, known = sequence.record, sequence.record.request, sequence.known
        self.planned[s] = self.held[s] = self.promised[s] = self.capacity[s] = self.unanswered[s] = 0
        self.applied[s] = self.known[s] = known
        self.limit[s] = sequence.longest(limits)
        self.prompt[s] = sequence.prompt.size
        self.microbatch[s] = microbatch
        self.choice[s] = sequence.choice
        self.gateway[s], self.tenant[s] = record.gateway, record.tenant
        self.priority[s] = request.priority
        self.floor[s] = sequence.prompt.size + max(request.min_tokens, 1)
        self.since[s] = step
        self.arrived[s], self.number[s] = record.arrived_ns, sequence.number
        self.tbt_slo_ns[s] = request.tbt_slo_ns
        self.last_token_ns[s] = sequence.last_token_ns or record.arrived_ns
        self.checkpointed[s] = sequence.prompt.size + sequence.checkpointed
        self.checkpoint_ns[s] = sequence.checkpoint_ns or now_ns
        self.active[s], self.pinned[s] = True, sequence.pinned
        stops = request.stop_ids.size
        self.stop_ids[:, s] = UNSET
        self.stop_ids[:stops, s] = request.stop_ids
        self.stop_width = max(self.stop_width, stops) if self.count else stops
        self.tokens[s, : sequence.prompt.size] = sequence.prompt
        self.tokens[s, sequence.prompt.size : known] = sequence.outputs
        self.sequence[s], self.request[s] = sequence, request
        sequence.state, sequence.slot = State.RUNNING, s
        self.count += 1
        self.high = max(self.high, s + 1)
        self.roster += 1
        return s

    def leave(self, s: int) -> Int32:
        """Takes the sequence of slot `s` out, with the outputs applied so far; returns its blocks."""
        sequence: Sequence = self.sequence[s]
        sequence.outputs = self.outputs(s)
        sequence.unanswered = int(self.unanswered[s])
        sequence.checkpointed = int(self.checkpointed[s] - self.prompt[s])
        sequence.checkpoint_ns = int(self.checkpoint_ns[s])
        if sequence.outputs.size:
            sequence.last_token_ns = int(self.last_token_ns[s])
        sequence.slot = -1
        blocks = self.blocks[s, : self.held[s]].copy()
        self.planned[s] = self.applied[s] = self.known[s] = self.limit[s] = 0
        self.held[s] = self.promised[s] = self.capacity[s] = self.unanswered[s] = 0
        self.since[s] = NEVER
        self.active[s] = self.pinned[s] = False
        self.sequence[s] = self.request[s] = None
        heapq.heappush(self._free, s)
        self.count -= 1
        self.roster += 1
        while self.high and not self.active[self.high - 1]:
            self.high -= 1
        return blocks

    def outputs(self, s: int) -> Int32:
        """[applied - prompt] int32, a copy."""
        return self.tokens[s, self.prompt[s] : self.applied[s]].copy()

    def append(self, s: int, blocks: Int32) -> None:
        """Puts `blocks` at the end of one row's block table."""
        held = int(self.held[s])
        self.blocks[s, held : held + blocks.size] = blocks
        self.held[s] += blocks.size
        self.capacity[s] += blocks.size * self.block_size

    def stopped(self, rows: Rows, tokens: Int32, count: Int32) -> Bool:
        """[n] bool: is the token just applied a stop id that counts? `count`: tokens applied, this one included."""
        hit: Bool = np.zeros(tokens.size, np.bool_)
        for ids in self.stop_ids[: self.stop_width]:
            hit |= ids[rows] == tokens
        if self.stop_width:
            hit &= count >= self.floor[rows]
        return hit

    def audience(self, slots: Int32, microbatch: int, names: npt.NDArray[np.object_]) -> Audience:
        """Whom the tokens of `slots` are for. Kept per microbatch: in steady decode it is the same at every step."""
        kept = self._audiences.get(microbatch)
        if (
            kept is not None
            and kept.roster == self.roster
            and (kept.slots is slots or np.array_equal(kept.slots, slots))
        ):
            return kept
        gateway_ids = self.gateway[slots]
        order = None
        if slots.size and (gateway_ids != gateway_ids[0]).any():
            order = np.argsort(gateway_ids, kind="stable")
            gateway_ids = gateway_ids[order]
        chosen = slots if order is None else slots[order]
        self._audiences[microbatch] = audience = Audience(
            self.roster,
            slots,
            order,
            self.request[chosen].tolist(),
            names[gateway_ids].tolist(),
            gateway_ids,
            self.choice[chosen],
        )
        return audience

    def check(self, max_unanswered: int) -> None:
        """Raises RuntimeError where a row contradicts itself."""
        on = np.flatnonzero(self.active)
        off = np.flatnonzero(~self.active)
        if on.size != self.count or (on.size and on[-1] + 1 != self.high) or self.count + len(self._free) != self.slots:
            raise RuntimeError(f"{on.size} rows are in use, {self.count} are counted, high is {self.high}")
        known, planned, applied = self.known[on], self.planned[on], self.applied[on]
        wrong = (planned >= known) | (known > self.limit[on]) | (applied > known) | (planned > self.capacity[on])
        wrong |= (self.capacity[on] != self.held[on] * self.block_size) | (self.prompt[on] > applied)
        wrong |= (self.unanswered[on] < 0) | (self.unanswered[on] > max_unanswered)
        wrong |= known - applied > self.unanswered[on]
        wrong |= (self.capacity[on] - planned >= self.block_size) & (self.held[on] > 0)
        if wrong.any():
            raise RuntimeError(f"rows {on[wrong].tolist()} contradict themselves")
        if (
            self.held[off].any()
            or self.known[off].any()
            or self.unanswered[off].any()
            or (self.since[off] != NEVER).any()
        ):
            raise RuntimeError("a row without a sequence holds something")
        for s in on:
            sequence: Sequence = self.sequence[s]
            if sequence.slot != s or sequence.state is not State.RUNNING or sequence.finish is not Finish.RUNNING:
                raise RuntimeError(f"slot {s} holds a sequence in state {sequence.state} of slot {sequence.slot}")
