"""One model copy as the core sees it: its slots, the blocks of both tiers, its steps in flight, its speed.

The planner plans on it, apply() answers its steps; a lost replica is replaced by an empty one. Copies between the tiers
are in kv/transfers.py, prefixes in kv/prefix_cache.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.scheduler.core.kv.blocks import BlockPool
from services.scheduler.core.kv.prefix_cache import Prefix, PrefixCache
from services.scheduler.core.kv.prefix_index import Hasher
from services.scheduler.core.kv.transfers import Transfers
from services.scheduler.core.placement.adapters import Adapters
from services.scheduler.core.placement.base import Constraint
from services.scheduler.core.placement.peers import Peers
from services.scheduler.core.policy.base import Budget, Memory
from services.scheduler.core.policy.step_time import StepTime, SwapTime, TokenTime
from services.scheduler.core.sequence import SavedKV, Sequence, State
from services.scheduler.core.speculation.drafts import Speculation
from services.scheduler.core.speculation.texts import History
from services.scheduler.core.table import Bool, Int64, SlotTable
from services.scheduler.core.types import EMPTY, Int32, Limits, Rows

COLD_SHARE = 64  # a step copies at most 1 / 64 of the pool's blocks to the host before they are evicted,
COLD_BLOCKS = 32  # or so many, or a quarter of a small pool
LINK_BYTES_S = 25e9  # between the tiers, until swaps were timed: a PCIe 4 link


@dataclass(slots=True)
class SentStep:
    """A step sent and not answered yet."""

    id: int
    microbatch: int
    slots: Rows  # of its chunks, decodes first
    chunk_mask: Bool  # [n] of the first n rows: the row has a chunk
    sampled_rows: Rows  # those of `slots` that sample a token
    samples: Bool  # [n] the same
    sampled_wire: Int32  # the same, as the worker answers
    decodes: int
    ends: Int32  # of the other chunks: tokens with KV when the step is answered, drafts not counted
    tokens: int
    decode_context: int
    prefill_context: float
    moved_blocks: int  # blocks that it moves between the tiers
    drafts: Int32 | None  # [n] of the first n rows: the drafts of each; None: no row has any
    planned_ns: int
    alone: bool  # no other step of the replica was unanswered then
    adapters: dict[int, bytes]  # that the step announces, by number
    peers: dict[int, Replica | None]  # replicas with a host tier that the step announces; None: gone
    keep: Int32  # host blocks that are to outlive the worker


class KV(enum.Enum):
    """What becomes of the KV of a row that is released."""

    DROP = "drop"
    SWAP = "swap"
    HAND_OVER = "hand over"


@dataclass(slots=True)
class Departed:
    """A sequence that left its slot by preemption with steps unanswered: their results still count."""

    sequence: Sequence
    generation: int
    end_step: int  # first step that it has no part in
    prefix: Prefix | None = None  # of one that was handed over before its KV was confirmed


@dataclass(slots=True)
class LastStep:
    """What the last step was made of, for the stats."""

    tokens: int = 0
    decode: int = 0
    prefill: int = 0


@dataclass(slots=True)
class AdmissionMemo:
    """Why no sequence entered at the last look at the waiting ones, so that the next step need not look again."""

    refused_number: int = -1  # number of the sequence that lacked `cost` blocks, or a slot; -1: none
    cost: int = 0
    roster: int = 0  # of the table then
    available: int = 0  # blocks then
    retry_iteration: int = 0  # iteration in which it is judged again whatever has changed
    none_at: int = -1  # none of the waiting is for this replica: at this count of WaitingQueue.changes,
    none_until_ns: int = 0  # until this moment

    def refuse(self, sequence: Sequence, replica: Replica, cost: int, again: int) -> None:
        """Note that `sequence` was refused for lack of `cost` blocks, or of a slot (0)."""
        self.refused_number, self.cost, self.retry_iteration = sequence.number, cost, again
        self.roster, self.available = replica.table.roster, replica.available

    def still_refused(self, sequence: Sequence, replica: Replica, iteration: int) -> bool:
        """Return whether `sequence` would be refused again: no row was freed and blocks have not become more."""
        same = self.refused_number == sequence.number and self.roster == replica.table.roster
        if same and replica.available <= self.available and iteration < self.retry_iteration:
            return True
        self.refused_number = -1
        return False


class Replica:
    """Owns slots and blocks; `reserved_blocks` blocks are kept for rows and not taken yet."""

    def __init__(
        self, number: int, limits: Limits, hasher: Hasher | None, memory: Memory, tokens: Budget, history: History,
        microbatches: int = 1,
    ) -> None:  # fmt: skip
        """With a hasher prefixes are shared and kept. memory, tokens: the policy's, of this replica alone.

        history: the outputs of all replicas.
        """
        self.number = number
        self.limits = limits
        self.memory, self.tokens = memory, tokens
        self.microbatches = microbatches
        self.table = SlotTable(limits)
        self.pool = BlockPool(limits.blocks, indexed=hasher is not None)
        self.host = BlockPool(limits.host_blocks, indexed=hasher is not None)
        self.transfers = Transfers(self.pool, self.host, self.table)
        self.peers: Peers[Replica] = Peers()
        self.adapters = Adapters(limits.max_loras)
        self.handovers: list[Sequence] = []  # swapped out for another replica, and no other may take them yet
        self.prefix_cache = PrefixCache(self.pool, self.host, self.table, hasher) if hasher else None
        self.model = StepTime(limits.experts, limits.experts_per_token)
        self.token_time = TokenTime()
        self.speculation = Speculation(self.table, limits, self.model, history)
        self.swap_time = SwapTime(limits.block_bytes, LINK_BYTES_S)
        self.inflight: dict[int, SentStep] = {}
        self.inflight_of: dict[int, int] = {}  # microbatch -> steps in flight
        self.last_planned: dict[int, int] = {}  # microbatch -> its last step
        self.next_step = 1  # ids are those of one Run of the worker, so they begin anew when it joins again
        self.freed_slots: list[int] = []  # slots to free in the next step
        self.departures: dict[int, list[Departed]] = {}
        self.reserved_blocks = 0
        self.constraints: list[Constraint[Any]] = []  # of sequences that would join a step
        self.memo = AdmissionMemo()
        self.beneficiary: Sequence | None = None  # sequences were preempted for it: no other enters before it does
        self.alive = True
        self.is_keeping = False  # its worker was asked to keep KV: its host tier is not read until it has left
        self.kept_blocks: Int32 = EMPTY  # host blocks that outlive the worker, as it has acknowledged
        self.last_step = LastStep()
        self.last_answered = 0, 0  # tokens and ns of the step that was answered last

    @property
    def available(self) -> int:
        """Blocks that are free or cached, and reserved for no row."""
        return self.pool.free + self.pool.cached - self.reserved_blocks

    @property
    def swap_ns_per_block(self) -> float:
        return self.swap_time.predict(1)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def save_cold_prefixes(self) -> None:
        """When few blocks are free, copy the coldest cached ones that were found again to the host tier."""
        pool, total = self.pool, self.pool.total
        if self.prefix_cache is None or not self.host.total:
            return
        share = max(total // COLD_SHARE, min(COLD_BLOCKS, total // 4), 1)
        if pool.free >= share or not pool.cached or self.transfers.has_copies:
            return
        cold = pool.coldest(share)
        cold = cold[pool.is_reused(cold)]
        if cold.size and cold.size <= self.host.available and self.available >= cold.size:
            self.transfers.keep(cold)

    def rollback(self, rows: Rows, tokens: Int32) -> None:
        """Take back drafts of decoding rows, [n] both, and the blocks that only they needed.

        Blocks that were reserved for a row are reserved again. Raises ValueError as SlotTable.rollback.
        """
        table, size = self.table, self.limits.block_size
        table.rollback(rows, tokens)
        rows = rows[table.capacity[rows] - table.planned_tokens[rows] >= size]
        if rows.size:
            needed, held, reserved = (
                -(-table.planned_tokens[rows] // size),
                table.held_blocks[rows],
                table.reserved_blocks[rows],
            )
            self.pool.give(table.shorten(rows, needed))
            if (reserved > needed).any():
                again = np.maximum(reserved - needed, 0) - np.maximum(reserved - held, 0)
                self.reserved_blocks += int(again.sum())

    def reserve(self, slots: Rows, blocks: Int64) -> None:
        """Reserve so many blocks in all for each of these rows, [n] both, which take them as they grow.

        Blocks that a row holds already count.
        """
        for slot, count in zip(slots.tolist(), blocks.tolist(), strict=True):
            self.table.reserved_blocks[slot] = count
            self.reserved_blocks += max(count - self.table.held_blocks.item(slot), 0)

    def release(self, slot: int, kv: KV = KV.DROP) -> Sequence:
        """Take the sequence out of its row, with the outputs applied so far; row and blocks are free for the next step.

        Results in flight still count for it, unless it has ended. DROP gives its KV up. SWAP moves it to the host tier,
        or gives it up where the tier has no room (can_swap). HAND_OVER moves it, so that another replica goes on; what
        is cached of it stays cached here, and what results confirm later will be.
        """
        table = self.table
        sequence: Sequence = table.sequence[slot]
        if drafts := table.drafts.item(slot):  # their KV may count for nothing; those that are right come late
            self.rollback(np.array([slot]), np.array([drafts], np.int32))
        if table.late[slot]:  # the worker has dropped what was planned behind the last known token
            table.planned_tokens[slot] = table.applied_tokens[slot] - 1
        if kv is KV.SWAP and not (table.planned_tokens[slot] and self.can_swap(slot)):
            kv = KV.DROP
        generation, computed = int(table.generation[slot]), int(table.planned_tokens[slot])
        has_all = computed >= int(table.applied_tokens[slot]) - 1
        if self.transfers.from_peer(slot) is not None:
            table.filled_tokens[slot] = 0  # its peer may be lost before all is here
        self.reserved_blocks -= max(int(table.reserved_blocks[slot] - table.held_blocks[slot]), 0)
        prefix = None
        if self.prefix_cache is not None:
            self.prefix_cache.leaves(slot, sequence)
            if kv is KV.HAND_OVER:
                held = table.blocks[slot, : table.held_blocks[slot]].copy()
                prefix = Prefix(held, int(table.registered_blocks[slot]))
        if not self.transfers.loads(slot):  # else no step has entered the row yet
            self.freed_slots.append(slot)
        copied = self.transfers.leaves(slot)
        self.adapters.on_leave(slot)
        blocks = table.leave(slot)
        if kv is not KV.DROP:
            surplus = blocks[self.blocks_for(computed) :]  # of a row that was late
            if surplus.size:
                self.pool.give(surplus)
                blocks = blocks[: -surplus.size]
            host = self.transfers.copy_out(blocks, stay=kv is KV.HAND_OVER)
            sequence.saved_kv = SavedKV(self.number, host, computed, self.transfers.queued_out, has_all)
        else:
            sequence.lost_tokens = computed
            landing = np.isin(blocks, copied) if copied.size else None
            self.pool.give(blocks if landing is None else blocks[~landing])
            if landing is not None:
                self.pool.drain(blocks[landing])
        if sequence.unanswered_steps and sequence.state is not State.ENDED:
            self.departures.setdefault(slot, []).append(Departed(sequence, generation, self.next_step, prefix))
        return sequence

    def on_confirm(self, slot: int, step: int, end: int) -> None:
        """Note that a result has confirmed the KV of a handed-over sequence up to `end` tokens."""
        for gone in self.departures.get(slot, ()):
            if gone.sequence.state is State.ENDED:
                continue  # a stop may have cut its tokens
            if gone.generation <= step < gone.end_step and gone.prefix is not None and self.prefix_cache is not None:
                self.prefix_cache.register_departed(gone.sequence, gone.prefix, end)

    def evict(self, sequence: Sequence) -> None:
        """Give up the KV of a sequence without a slot that lies in this host tier."""
        if sequence.saved_kv is not None:
            self.host.give(sequence.saved_kv.blocks)
            sequence.lost_tokens, sequence.saved_kv = sequence.saved_kv.tokens, None
            sequence.route.generation = -1  # other replicas may take it now

    def swap_all(self) -> list[Sequence]:
        """Release all rows and swap them out as far as the host tier goes, the best classes first. No step may be in
        flight."""
        table = self.table
        rows = np.flatnonzero(table.active)
        order = np.lexsort((table.number[rows], table.priority[rows]))
        return [
            self.release(slot, KV.DROP if self.transfers.awaits(slot) else KV.SWAP) for slot in rows[order].tolist()
        ]

    def has_kept(self, sequence: Sequence) -> bool:
        """Return whether the worker has left behind all of the KV that a sequence has here; else give up its blocks."""
        if not self.kept_blocks.size or sequence.saved_kv is None:
            return False
        if np.isin(sequence.saved_kv.blocks, self.kept_blocks).all():
            return True
        self.host.give(sequence.saved_kv.blocks)
        return False

    def can_swap(self, slot: int) -> bool:
        """Return whether the host tier has room for the KV of this row, which does not wait for KV."""
        return 0 < int(self.table.held_blocks[slot]) <= self.host.free + self.host.cached

    def acknowledge(self, out_gpu: Int32, in_host: Int32) -> None:
        """Take copies between the tiers as complete. Raises ValueError for one that was not under way."""
        for load in self.transfers.acknowledge(out_gpu, in_host):
            if load.is_shared:  # the same prefix is in both tiers now
                self.pool.register(load.gpu, self.host.keys_of(load.host))
            elif load.peer >= 0 and self.prefix_cache is not None:
                self.prefix_cache.register_rows([(load.slot, self.table.filled_tokens.item(load.slot))])

    def owner(self, slot: int, step: int) -> Sequence | None:
        """Return the preempted sequence that had this slot in `step`, if the step is unanswered for it."""
        for gone in self.departures.get(slot, ()):
            if gone.generation <= step < gone.end_step:
                return gone.sequence
        return None

    def settle(self, slot: int, step: int) -> None:
        """Note that a step of a departed sequence was answered; forget the sequence with its last such step."""
        kept = []
        for gone in self.departures[slot]:
            if gone.generation <= step < gone.end_step:
                gone.sequence.unanswered_steps -= 1
            if gone.sequence.unanswered_steps and gone.sequence.slot < 0:
                kept.append(gone)
        if kept:
            self.departures[slot] = kept
        else:
            del self.departures[slot]

    def on_send(self, step: SentStep) -> None:
        self.inflight[step.id] = step
        self.inflight_of[step.microbatch] = self.inflight_of.get(step.microbatch, 0) + 1
        self.last_planned[step.microbatch] = step.id
        self.next_step += 1

    def on_answer(self, step: SentStep) -> None:
        del self.inflight[step.id]
        self.inflight_of[step.microbatch] -= 1
