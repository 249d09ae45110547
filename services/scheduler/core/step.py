"""One step while it is planned: a column of tokens to compute for each row, and the blocks that they need.

The planner schedules rows, decodes first; commit() makes the StepPlan. A builder is discarded only while it is empty.
"""

from __future__ import annotations

from collections.abc import Sequence as Columns
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from services.scheduler.core.kv.transfers import NO_COPIES
from services.scheduler.core.placement.adapters import NO_NEWS as NO_ADAPTERS
from services.scheduler.core.placement.peers import NO_NEWS, to_wire
from services.scheduler.core.policy.base import Batching
from services.scheduler.core.policy.batching import whole_lengths
from services.scheduler.core.replica import LastStep, Replica, SentStep
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.speculation.drafts import Drafts
from services.scheduler.core.table import Bool, Int64, ones
from services.scheduler.core.types import EMPTY, NO_ROWS, Adapter, Enter, Int32, Rows, StepPlan

Integer = TypeVar("Integer", np.int32, np.intp)
NO_MASK: Bool = np.zeros(0, np.bool_)
TRUE: Bool = np.ones(4096, np.bool_)
TRUE.setflags(write=False)


class Chunk(NamedTuple):
    """A part of a prompt."""

    row: int
    start: int
    length: int
    samples: bool
    end: int


class StepBuilder:
    """The next step of one replica and microbatch."""

    def __init__(
        self, replica: Replica, microbatch: int, max_running: int, max_seqs: int, max_tokens: int, now_ns: int
    ) -> None:
        """max_running: sequences that may have a slot. max_seqs, max_tokens: what the step may hold."""
        self.now_ns = now_ns
        self.replica = replica
        self.microbatch = microbatch
        self.max_running = max_running
        self.seqs_left = max_seqs
        self.tokens_left = max_tokens
        self.n: Int32 = np.zeros(replica.table.slots, np.int32)  # [slots] tokens to compute in this step
        self.decodes: Rows = NO_ROWS
        self.enters: list[Enter] = []
        self.prefill_tokens = 0
        self.preemptions = 0  # sequences
        self.has_prompts = False  # some running rows have more than one token to go
        self.lacks_blocks = False  # a decoding row had no block, and sequences that wait go behind it
        self.has_budget = False  # `tokens_left` is what the policy leaves for prompts
        self.waiting_count = 0  # sequences that the budget takes to wait for this replica
        self.waiting_tokens = 0  # of their prompts
        self.aside = 0  # sequences set aside for a prefix that another one computes
        self.admitted_sequences: list[Sequence] = []  # by constraints and admission; memory may refuse some yet
        self.missing_adapters: list[bytes] = []  # adapters of sequences that may enter once the worker has them
        self.base_only = False  # no further sequence with an adapter enters: one has waited too long for its own
        self.passed_over: list[Sequence] = []  # not admitted; what enters in front of them is counted
        self._starts: Int32 = EMPTY
        self._decode_mask: Bool = NO_MASK  # [high] the same as `decodes`
        self._drafts: Drafts | None = None
        self._context = 0
        self._prefill_context = 0.0
        self._chunks: list[Chunk] = []
        self._appends: list[tuple[Rows, Int32]] = []  # rows, blocks

    @property
    def empty(self) -> bool:
        """Whether no row has a token to compute."""
        return not self.decodes.size and not self._chunks

    @property
    def context(self) -> int:
        """Sum of the context lengths of the decodes."""
        return self._context

    def __bool__(self) -> bool:
        """Return whether there is something to send."""
        replica = self.replica
        news = replica.peers.news or replica.adapters.news
        return not self.empty or bool(self.enters or replica.transfers.has_copies or news)

    def missing_blocks(self, decodes: Bool) -> tuple[Rows, int]:
        """Return the rows of `decodes`, [high], that need a block, and for how many of them one is reserved."""
        table, high = self.replica.table, decodes.size
        edge = (decodes & (table.planned_tokens[:high] == table.capacity[:high])).nonzero()[0]
        reserved = int(np.count_nonzero(table.reserved_blocks[edge] > table.held_blocks[edge])) if edge.size else 0
        return edge, reserved

    def decode(self, decodes: Bool, rows: Rows, edge: Rows, reserved: int) -> None:
        """Schedule one token of each row of `decodes`, [high], the same as `rows`.

        edge, reserved: missing_blocks(decodes), which must be available.
        """
        table, high = self.replica.table, decodes.size
        if edge.size:
            self._append(edge, table.append_one(edge, self.replica.pool.take(edge.size)), reserved)
        self.decodes, self._starts = rows, table.planned_tokens[table.rows(rows)].copy()
        self._context = int(np.add.reduce(self._starts))
        self.n[:high] = self._decode_mask = decodes
        table.advance_decodes(self.n[:high])
        if self.replica.microbatches > 1:
            table.microbatch[rows] = self.microbatch
        self.seqs_left -= rows.size
        self.tokens_left -= rows.size

    def speculate(self, drafts: Drafts) -> None:
        """Add drafts behind the tokens of rows that decode in this step; their blocks must be reserved or available.

        The microbatch has no other step until this one is answered.
        """
        table, pool, size = self.replica.table, self.replica.pool, self.replica.limits.block_size
        rows, counts = drafts.rows, drafts.counts
        starts = table.planned_tokens[rows]
        short = (starts + counts > table.capacity[rows]).nonzero()[0]
        if short.size:
            ends, growing = starts[short] + counts[short], rows[short]
            held = table.held_blocks[growing]
            more = -(-ends // size) - held
            reserved = np.minimum(np.maximum(table.reserved_blocks[growing] - held, 0), more)
            blocks = pool.take(int(more.sum()))
            table.fill(growing, more, blocks)
            self._append(growing.repeat(more), blocks, int(reserved.sum()))
        table.speculate(rows, counts)
        self.n[rows] += counts
        self._drafts = drafts
        self._prefill_context += float((counts * (starts + (counts + 1) / 2)).sum())
        self.tokens_left -= drafts.tokens.size

    def chunks(self, batch: Batching, rest: Int64, before: Int64) -> Int64:
        """Return the lengths of the next chunks of prompts in this order, as Batching.chunks.

        A replica that computes prompts whole gets those that fit; a prompt longer than the budget has a step to itself.
        """
        if not self.replica.limits.whole_prompts:
            return batch.chunks(rest, before, self.tokens_left, not self.prefill_tokens, self.empty)
        least = int(rest[0]) if self.empty else 0  # at most the worker's largest step: no longer prompt fits it
        return whole_lengths(rest, max(self.tokens_left, least), first=False)

    def schedule(self, rows: Rows, tokens: Int64) -> None:
        """Add tokens[i] tokens of the prompt of rows[i] to the step and take their blocks, reserved or available.

        rows: [k], each at most once a step; tokens: [k], at least 1. Raises ValueError when a row is scheduled already:
        two chunks of one sequence cannot share a step.
        """
        table, replica, size = self.replica.table, self.replica, self.replica.limits.block_size
        chunks, growth = [], []
        reserved = 0
        for row, length in zip(rows.tolist(), tokens.tolist(), strict=True):
            if self.n[row]:
                raise ValueError(f"row {row}: already in step {replica.next_step}; plan once")
            start, held = table.planned_tokens.item(row), table.held_blocks.item(row)
            more = max(-(-(start + length) // size) - held, 0)
            reserved += min(max(table.reserved_blocks.item(row) - held, 0), more)
            chunks.append((row, start, length))
            growth.append(more)
            self.n[row] = length
        if total := sum(growth):
            blocks = replica.pool.take(total)
            self._append(rows.repeat(growth), blocks, reserved)
            for (row, _, _), more in zip(chunks, growth, strict=True):
                if more:
                    table.append(row, blocks[:more])
                    blocks = blocks[more:]
        for row, start, length in chunks:
            end = start + length
            self._chunks.append(Chunk(row, start, length, table.advance(row, end), end))
            self._prefill_context += length * (start + (length + 1) / 2)
        if replica.microbatches > 1:
            table.microbatch[rows] = self.microbatch
        scheduled = sum(length for _, _, length in chunks)
        self.prefill_tokens += scheduled
        self.seqs_left -= len(chunks)
        self.tokens_left -= scheduled

    def forget(self, row: int) -> None:
        """Drop the entry of a row that was preempted before the step was sent."""
        fresh = len(self.enters)
        if fresh:
            self.enters = [enter for enter in self.enters if enter.slot != row]
            if len(self.enters) < fresh:
                self.replica.freed_slots.remove(row)

    def commit(self, keep: Int32 = EMPTY) -> StepPlan:
        """Return the step as it goes on the wire; it is in flight from now on. keep: host blocks that are to outlive
        the worker."""
        replica, table = self.replica, self.replica.table
        rows, starts, ends = self.decodes, self._starts, EMPTY
        lengths, samples = ones(rows.size), trues(rows.size)
        computed = samples_of = self._decode_mask
        sampled = rows
        decodes, drafted, guesses, drafts = rows.size, 0, None, EMPTY
        if self._drafts is not None:
            guesses = np.zeros(table.high, np.int32)
            guesses[self._drafts.rows] = self._drafts.counts
            lengths, drafts, drafted = self.n[rows], self._drafts.tokens, self._drafts.tokens.size
            computed = samples_of = computed > 0
        counts = EMPTY if guesses is None else guesses[rows]
        if self._chunks:
            chunks = np.array(self._chunks, np.int32).T
            ends = chunks[4]
            rows = np.concatenate([rows, chunks[0]])
            starts = np.concatenate([starts, chunks[1]])
            lengths = self.n[rows]
            computed = samples_of = self.n[: table.high] > 0
            sampled = rows
            if all(chunk.samples for chunk in self._chunks):
                samples = trues(rows.size)
            else:
                samples = np.concatenate([samples, chunks[3] > 0])
                sampled = rows[samples]
                samples_of = table.mask(sampled)
            if guesses is not None:
                counts = np.concatenate([counts, np.zeros(len(self._chunks), np.int32)])
        wire = table.wire(rows, self.microbatch)
        replica.save_cold_prefixes()
        copies = replica.transfers.take_copies() if replica.transfers.has_copies else NO_COPIES
        news = replica.peers.take_news() if replica.peers.news else NO_NEWS
        adapters = replica.adapters.take_news() if replica.adapters.news else NO_ADAPTERS
        step = SentStep(
            id=replica.next_step,
            microbatch=self.microbatch,
            slots=rows,
            chunk_mask=computed,
            sampled_rows=sampled,
            samples=samples_of,
            sampled_wire=wire if sampled is rows else wire[samples],
            decodes=decodes,
            ends=ends,
            tokens=decodes + drafted + self.prefill_tokens,
            decode_context=self._context,
            prefill_context=self._prefill_context,
            moved_blocks=copies.out_gpu.size + copies.in_host.size,
            drafts=guesses,
            planned_ns=self.now_ns,
            alone=not replica.inflight,
            adapters=adapters,
            peers=news,
            keep=keep,
        )
        freed, replica.freed_slots = replica.freed_slots, []
        replica.on_send(step)
        replica.last_step = LastStep(step.tokens, decodes, self.prefill_tokens)
        return StepPlan(
            id=step.id,
            replica=replica.number,
            free_slots=np.array(freed, np.int32) if freed else EMPTY,
            swap_out_gpu=copies.out_gpu,
            swap_out_host=copies.out_host,
            swap_in_host=copies.in_host,
            swap_in_gpu=copies.in_gpu,
            enters=self.enters,
            append_slots=join_columns([rows for rows, _ in self._appends]).astype(np.int32) if self._appends else EMPTY,
            append_blocks=join_columns([blocks for _, blocks in self._appends]) if self._appends else EMPTY,
            chunk_slots=wire,
            chunk_starts=starts,
            chunk_lengths=lengths,
            samples=samples,
            microbatch=self.microbatch,
            decode_tokens=decodes,
            prefill_tokens=self.prefill_tokens,
            adapters=[Adapter(number, digest) for number, digest in adapters.items()],
            peers=to_wire(news) if news else [],
            swap_in_peers=copies.in_peers,
            keep=keep,
            chunk_drafts=counts,
            drafts=drafts,
        )

    @property
    def scheduled_rows(self) -> tuple[Rows, Int32]:
        """Rows of the step and their tokens, in the order of the step."""
        rows = np.concatenate([self.decodes, np.array([chunk.row for chunk in self._chunks], np.intp)])
        return rows, self.n[rows]

    def _append(self, rows: Rows, blocks: Int32, reserved: int) -> None:
        """Tell the worker of blocks at the end of these rows; so many of them were reserved."""
        self.replica.reserved_blocks -= reserved
        self._appends.append((rows, blocks))


def trues(count: int) -> Bool:
    """Return [count] bool, all true; read only."""
    return TRUE[:count] if count <= TRUE.size else np.ones(count, np.bool_)


def join_columns(columns: Columns[npt.NDArray[Integer]]) -> npt.NDArray[Integer]:
    """Return one column of several."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)
