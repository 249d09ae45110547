"""The worker's mirror of the running sequences: a Step of worker.proto applied to numpy tables, in the proto's order.

A sampled token is written behind the sequence's known tokens, so the next step need not carry it. Until the device has
it, ~slot stands in its place (kernels.ops.Batch.tokens). A step that breaks the contract raises ProtocolError; an error
of one sequence marks its slot as failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kernels.ops import Batch, Bool, Int32
from protos import worker_pb2
from services.worker.kv.peers import OWN_TIER
from services.worker.kv.transfers import KVTransfers
from services.worker.sampling import SamplingTable
from shared.errors import ProtocolError
from shared.wire.columns import unpack

NONE: Int32 = np.zeros(0, np.int32)
TOKENS, VECTOR, SCORE = 0, 1, 2
"""What a sequence gives (Enter.pooling)."""
OF_DECODERS = frozenset({TOKENS, VECTOR, SCORE})
ANY = 1 << 32
"""Limit of a column of any int32."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a step: [C] columns, and which of them sample.

    A chunk that samples draws behind its last known token and behind each of its drafts: `rows` says where.
    """

    slots: Int32
    starts: Int32
    lengths: Int32
    samples: Bool
    late: Int32 = field(default_factory=lambda: NONE)  # [L] slots with a chunk behind a token that was not sampled
    drafts: Int32 | None = None  # [C] how many of the last tokens are drafts; None: none are
    guesses: Int32 = field(default_factory=lambda: NONE)  # the drafts, one chunk after another

    def without(self, late: list[int]) -> Chunks:
        """Return the chunks but those of these slots, which have no drafts and are late."""
        kept = ~np.isin(self.slots, late)
        return Chunks(
            self.slots[kept],
            self.starts[kept],
            self.lengths[kept],
            self.samples[kept],
            np.append(self.late, np.array(late, np.int32)),
            None if self.drafts is None else self.drafts[kept],
            self.guesses,
        )

    @property
    def draws(self) -> Int32:
        """Return [chunks that sample] the tokens that are drawn for each of them."""
        if self.drafts is None:
            return np.ones(np.count_nonzero(self.samples), np.int32)
        return 1 + self.drafts[self.samples]

    @property
    def sampling(self) -> Int32:
        """Return [R] the slot of each token that is drawn."""
        slots = self.slots[self.samples]
        return slots if self.drafts is None else np.repeat(slots, self.draws)

    def behind(self) -> Int32:
        """Return [R] how many drafts stand between the last known token and each token that is drawn."""
        return counting(self.draws)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Prompt tokens with log-probabilities that a step gives.

    [P] columns of slots, then [T] columns of their tokens, those of one slot one after another.
    """

    slots: Int32
    firsts: Int32  # position of the first token of each slot
    counts: Int32
    wanted: Int32  # as Sampling.prompt_logprobs
    rows: Int32  # of the batch: the row before each token
    tokens: Int32

    @property
    def of_tokens(self) -> Int32:
        """Return [T] the slot of each token."""
        return np.repeat(self.slots, self.counts)

    @property
    def likely(self) -> int:
        """Return how many most likely tokens are found of each row."""
        return int(self.wanted.max()) - 1


def counting(counts: Int32) -> Int32:
    """Return 0, 1, ... of counts[i] numbers each, for all i in order."""
    before = np.cumsum(counts, dtype=np.int32) - counts
    return np.arange(counts.sum(), dtype=np.int32) - np.repeat(before, counts)


class SlotTable:
    """State of the slots: one row per slot; a sequence has no other name here."""

    def __init__(
        self,
        max_seqs: int,
        max_model_len: int,
        block_size: int,
        blocks: int,
        host_blocks: int,
        vocab: int,
        poolings: frozenset[int] = OF_DECODERS,
        wrong_adapter: Callable[[int], str] = lambda number: "this worker has none" if number else "",
    ) -> None:
        """poolings: those that sequences may have. wrong_adapter: why one cannot have the adapter of that number."""
        self.poolings, self._wrong_adapter = poolings, wrong_adapter
        self.max_seqs = max_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.total_blocks = blocks
        self.total_host_blocks = host_blocks
        self.vocab = vocab
        self.max_blocks = -(-max_model_len // block_size)
        self.tokens = np.zeros((max_seqs, max_model_len), np.int32)
        self.known = np.zeros(max_seqs, np.int32)
        self.computed = np.zeros(max_seqs, np.int32)
        self.prompt = np.zeros(max_seqs, np.int32)
        self.pooling = np.zeros(max_seqs, np.int32)  # what the record of the first token is
        self.label_ids = np.zeros((max_seqs, 2), np.int32)  # of a score by a decoder
        self.adapter = np.zeros(max_seqs, np.int32)  # its number in the Run, 0: the base model
        self.segment = np.zeros(max_seqs, np.int32)  # first token of the second text, 0 without one
        self.scored = np.zeros(max_seqs, np.int32)  # first prompt tokens with log-probabilities that were told before
        self.tables = np.zeros((max_seqs, self.max_blocks), np.int32)
        self.table_blocks = np.zeros(max_seqs, np.int32)
        self.active = np.zeros(max_seqs, np.bool_)
        self.generation = np.zeros(max_seqs, np.int64)  # another number for each sequence that a slot has held
        self.departures = 0  # how often slots were freed: unchanged means that all generations are
        self.sampling = SamplingTable(max_seqs, vocab)
        self.failed: dict[int, tuple[str, str]] = {}  # slot -> code, message
        self.late: set[int] = set()  # slots that sampled no token, because the mask was not there

    def clear(self) -> None:
        """Free every slot."""
        self.active[:] = False
        self.generation += 1
        self.departures += 1
        self.failed.clear()
        self.late.clear()
        self.sampling.clear()

    def apply(self, step: worker_pb2.Step, transfers: KVTransfers) -> Chunks:
        """Apply frees, copies, enters and appends in this order; return the chunks to compute. Raise ProtocolError."""
        if step.free_slots:
            self._free(self._column(step.free_slots, "free_slots", self.max_seqs))
        self._swap(step, transfers)
        for enter in step.enters:
            self._enter(enter)
        if step.append_slots or step.append_blocks:
            self._append(step)
        return self._chunks(step)

    def batch(self, chunks: Chunks) -> Batch:
        """Return the iteration's tokens flattened, one chunk after another. All of it in numpy at once."""
        lengths = chunks.lengths
        query_start = np.zeros(len(lengths) + 1, np.int32)
        np.add.accumulate(lengths, out=query_start[1:])
        row_slot = chunks.slots.repeat(lengths)
        positions = np.arange(query_start[-1], dtype=np.int32) + (chunks.starts - query_start[:-1]).repeat(lengths)
        context = chunks.starts + lengths
        used = -(-int(np.maximum.reduce(context, initial=1)) // self.block_size)
        sample_rows = query_start[1:][chunks.samples] - 1
        if chunks.drafts is not None:
            sample_rows = np.repeat(sample_rows - chunks.drafts[chunks.samples], chunks.draws) + chunks.behind()
        return Batch(
            tokens=self.tokens[row_slot, positions],
            positions=positions,
            query_start=query_start,
            context=context,
            tables=self.tables[chunks.slots, :used],
            write_blocks=self.tables[row_slot, positions // self.block_size],
            write_offsets=positions % self.block_size,
            sample_rows=sample_rows,
        )

    def scored_tokens(self, chunks: Chunks) -> ScoredTokens | None:
        """Return the prompt tokens with log-probabilities that the chunks give; None without any."""
        wanted = self.sampling.prompt_logprobs[chunks.slots]
        if not np.count_nonzero(wanted):
            return None
        slots, starts = chunks.slots, chunks.starts
        firsts = np.maximum(starts + 1, self.scored[slots])
        counts = np.minimum(starts + chunks.lengths + 1, self.prompt[slots]) - firsts
        which = (wanted > 0) & (counts > 0)
        if not which.any():
            return None
        before = np.cumsum(chunks.lengths, dtype=np.int32) - chunks.lengths
        firsts, counts = firsts[which], counts[which]
        positions = np.repeat(firsts, counts) + counting(counts)
        return ScoredTokens(
            slots=slots[which],
            firsts=firsts,
            counts=counts,
            wanted=wanted[which],
            rows=np.repeat((before - starts)[which], counts) + positions - 1,
            tokens=self.tokens[np.repeat(slots[which], counts), positions],
        )

    def outputs(self, slot: int) -> Int32:
        """Return the outputs of a slot's sequence; the last is below 0 while only the device has it."""
        return self.tokens[slot, self.prompt[slot] : self.known[slot]]

    def slots_of(self, column: bytes) -> Int32:
        """Read a column of slots. Raise ProtocolError."""
        return self._column(column, "chunk_slots", self.max_seqs)

    def computed_through(self, chunks: Chunks) -> None:
        """Record that the KV of the chunks' tokens is in its blocks for every later step."""
        self.computed[chunks.slots] = chunks.starts + chunks.lengths

    def expect(self, slots: Int32, positions: Int32) -> None:
        """Count the token at each slot's position as known although only the device has it."""
        self.tokens[slots, positions] = ~slots
        self.known[slots] = positions + 1

    def sit_out(self, slots: Int32, positions: Int32) -> None:
        """Take back that the tokens at these positions are expected: the slots are late."""
        self.known[slots] = positions
        self.late.update(slots.tolist())

    def record(self, slots: Int32, positions: Int32, tokens: Int32) -> None:
        """Write tokens that were expected."""
        self.tokens[slots, positions] = tokens

    def settle(self, slots: Int32, known: Int32) -> None:
        """Take back the drafts of these slots that were wrong, and the blocks that only they needed.

        known: how many tokens are known now; all but the last are computed.
        """
        self.known[slots] = known
        self.computed[slots] = known - 1
        self.table_blocks[slots] = -(-(known - 1) // self.block_size)

    def drop_drafts(self, slots: Int32) -> None:
        """Take back the drafts of slots that are late, and the blocks that only they needed."""
        self.computed[slots] = self.known[slots]
        self.table_blocks[slots] = -(-self.computed[slots] // self.block_size)

    def fail(self, slot: int, code: str, message: str) -> None:
        """Stop computing the sequence; its chunks answer with this error until the slot is freed."""
        self.failed[slot] = (code, message)

    def errors(self, step: worker_pb2.Step) -> list[worker_pb2.SequenceError]:
        """Return the errors of failed sequences that have a chunk in this step."""
        if not self.failed:
            return []
        return [
            worker_pb2.SequenceError(slot=slot, code=self.failed[slot][0], message=self.failed[slot][1])
            for slot in unpack(step.chunk_slots).tolist()
            if slot in self.failed
        ]

    def _column(self, data: bytes, name: str, limit: int) -> Int32:
        """Read a column of indices in 0..limit-1. Raise ProtocolError."""
        try:
            column = unpack(data)
        except ValueError as error:
            raise ProtocolError(f"{name}: {len(data)} bytes are no int32 column") from error
        self._within(column, name, limit)
        return column

    def _within(self, column: Int32, name: str, limit: int) -> None:
        if np.count_nonzero(column.view(np.uint32) >= limit):  # which is also true of what is below zero
            worst = column.min() if column.min() < 0 else column.max()
            raise ProtocolError(f"{name}: {worst} is outside 0..{limit - 1}")

    def _pair(self, first: Int32, second: Int32, names: str) -> None:
        if len(first) != len(second):
            raise ProtocolError(f"{names}: columns of {len(first)} and {len(second)} entries")

    def _free(self, slots: Int32) -> None:
        idle = slots[~self.active[slots]]
        if idle.size:
            raise ProtocolError(f"free_slots: slot {idle[0]} holds no sequence")
        if len(np.unique(slots)) != len(slots):
            raise ProtocolError("free_slots: a slot is freed twice")
        self.active[slots] = False
        self.generation[slots] += 1
        self.departures += 1
        self.late.difference_update(slots.tolist() if self.late else ())
        if self.failed:
            for slot in slots.tolist():
                self.failed.pop(slot, None)

    def _swap(self, step: worker_pb2.Step, transfers: KVTransfers) -> None:
        """Begin the step's copies between the tiers."""
        columns = (step.swap_out_gpu, step.swap_out_host, step.swap_in_gpu, step.swap_in_host, step.swap_in_peers)
        if not any(columns):
            return
        if not self.total_host_blocks and not (step.swap_in_peers and not step.swap_out_gpu):
            raise ProtocolError("the step swaps, but this worker has no host blocks (see Describe)")
        out_gpu = self._column(step.swap_out_gpu, "swap_out_gpu", self.total_blocks)
        out_host = self._column(step.swap_out_host, "swap_out_host", self.total_host_blocks)
        in_peers = self._column(step.swap_in_peers, "swap_in_peers", ANY)
        in_host = self._column(step.swap_in_host, "swap_in_host", ANY if in_peers.size else self.total_host_blocks)
        in_gpu = self._column(step.swap_in_gpu, "swap_in_gpu", self.total_blocks)
        self._pair(out_gpu, out_host, "swap_out_gpu, swap_out_host")
        self._pair(in_host, in_gpu, "swap_in_host, swap_in_gpu")
        if in_peers.size:
            self._pair(in_host, in_peers, "swap_in_host, swap_in_peers")
            for number in np.unique(in_peers).tolist():
                held = self.total_host_blocks if number == OWN_TIER else transfers.peers.tier(number).host_blocks
                self._within(in_host[in_peers == number], f"swap_in_host of peer {number}", held)
        transfers.begin(step.id, out_gpu, out_host, in_host, in_gpu, in_peers)

    def _enter(self, enter: worker_pb2.Enter) -> None:
        slot = enter.slot
        if slot >= self.max_seqs:
            raise ProtocolError(f"enters: slot {slot} is outside 0..{self.max_seqs - 1}")
        if self.active[slot]:
            raise ProtocolError(f"enters: slot {slot} still holds a sequence")
        blocks = self._column(enter.blocks, f"enters: blocks of slot {slot}", self.total_blocks)
        try:
            tokens, labels = unpack(enter.tokens), unpack(enter.label_ids)
        except ValueError as error:
            raise ProtocolError(f"enters: tokens or label ids of slot {slot} are no int32 column") from error
        count = len(tokens)
        if not 1 <= count <= self.max_model_len or not 1 <= enter.prompt_tokens <= count:
            raise ProtocolError(
                f"enters: slot {slot} has {count} tokens, {enter.prompt_tokens} of them prompt; "
                f"1..{self.max_model_len} are served"
            )
        if enter.computed >= count or enter.computed > len(blocks) * self.block_size:
            raise ProtocolError(
                f"enters: slot {slot} has {enter.computed} computed of {count} tokens in {len(blocks)} blocks"
            )
        if len(blocks) > self.max_blocks:
            raise ProtocolError(f"enters: slot {slot} has {len(blocks)} blocks, at most {self.max_blocks} are served")
        self.active[slot] = True
        self.tokens[slot, :count] = tokens
        self.known[slot] = count
        self.computed[slot] = enter.computed
        self.prompt[slot] = enter.prompt_tokens
        self.scored[slot] = min(enter.scored, count)
        unusable = self._wrong_pooling(enter, labels)
        self.pooling[slot] = TOKENS if unusable else enter.pooling
        self.label_ids[slot] = labels if labels.size == 2 and not unusable else 0
        self.segment[slot] = min(enter.segment, count)
        self.tables[slot, : len(blocks)] = blocks
        self.table_blocks[slot] = len(blocks)
        wrong = self.sampling.enter(slot, enter.sampling)
        lacking = self._wrong_adapter(enter.adapter)
        self.adapter[slot] = 0 if lacking else enter.adapter
        if lacking:
            self.fail(slot, "adapter", lacking)
        elif unusable:
            self.fail(slot, "invalid_pooling", unusable)
        elif wrong:
            self.fail(slot, "invalid_sampling", wrong)
        elif tokens.min() < 0 or tokens.max() >= self.vocab:
            worst = tokens.min() if tokens.min() < 0 else tokens.max()
            self.fail(slot, "invalid_token", f"token {worst} is outside the vocabulary of {self.vocab}")

    def _wrong_pooling(self, enter: worker_pb2.Enter, labels: Int32) -> str:
        """Return why the sequence cannot be pooled so, empty where it can."""
        if enter.pooling not in self.poolings:
            return f"pooling {enter.pooling}: this model has {', '.join(map(str, sorted(self.poolings)))}"
        is_encoder = TOKENS not in self.poolings
        needed = 2 if enter.pooling == SCORE and not is_encoder else 0
        if labels.size != needed or (needed and not 0 <= labels.min() <= labels.max() < self.vocab):
            return f"label ids {labels.tolist()[:4]}: {needed} ids of a vocabulary of {self.vocab} are needed"
        if is_encoder and enter.sampling.prompt_logprobs:
            return f"prompt_logprobs {enter.sampling.prompt_logprobs}: an encoder has no log-probabilities"
        return ""

    def _append(self, step: worker_pb2.Step) -> None:
        """Append blocks to the slots' tables; the k-th appearance of a slot goes to its k-th next place."""
        slots = self._column(step.append_slots, "append_slots", self.max_seqs)
        blocks = self._column(step.append_blocks, "append_blocks", self.total_blocks)
        self._pair(slots, blocks, "append_slots, append_blocks")
        self._check_active(slots, "append_slots")
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        is_first = np.ones(len(ordered), np.bool_)
        is_first[1:] = ordered[1:] != ordered[:-1]
        first = np.flatnonzero(is_first)
        counts = np.diff(np.append(first, len(ordered)))
        place = self.table_blocks[ordered] + np.arange(len(ordered)) - np.repeat(first, counts)
        if (place >= self.max_blocks).any():
            slot = ordered[place >= self.max_blocks][0]
            raise ProtocolError(f"append_slots: slot {slot} would have more than {self.max_blocks} blocks")
        self.tables[ordered, place] = blocks[order]
        self.table_blocks[ordered[first]] += counts.astype(np.int32)

    def _chunks(self, step: worker_pb2.Step) -> Chunks:
        slots = self._column(step.chunk_slots, "chunk_slots", self.max_seqs)
        starts = self._column(step.chunk_starts, "chunk_starts", self.max_model_len)
        lengths = self._column(step.chunk_lengths, "chunk_lengths", self.max_model_len + 1)
        self._pair(slots, starts, "chunk_slots, chunk_starts")
        self._pair(slots, lengths, "chunk_slots, chunk_lengths")
        self._check_active(slots, "chunk_slots")
        if np.count_nonzero(np.bincount(slots) > 1):
            raise ProtocolError("chunk_slots: a slot has two chunks in one step")
        drafts, guesses = self._drafts(step, slots)
        late = NONE
        if self.late:  # the scheduler did not know yet, or plans them again
            is_late = np.isin(slots, list(self.late)) & (starts + lengths > self.known[slots])
            if drafts is not None:
                is_late &= drafts == 0
                drafts = drafts[~is_late]
            late = slots[is_late]
            self.late.difference_update(slots[~is_late].tolist())
            slots, starts, lengths = slots[~is_late], starts[~is_late], lengths[~is_late]
        if self.failed:
            alive = np.array([slot not in self.failed for slot in slots.tolist()], np.bool_)
            slots, starts, lengths = slots[alive], starts[alive], lengths[alive]
            if drafts is not None:
                drafts, guesses = drafts[alive], guesses[np.repeat(alive, drafts)]
        ends = starts + lengths
        known = self.known[slots]
        samples = ends == known
        if drafts is not None:
            samples = ends - drafts == known
        wrong = {
            "is empty": lengths < 1,
            "leaves a gap behind the computed tokens": starts > self.computed[slots],
            "passes the known tokens": ends > (known if drafts is None else known + drafts),
            "passes the blocks of the slot": ends > self.table_blocks[slots] * self.block_size,
            "samples past the context": samples & (ends >= self.max_model_len),
        }
        if drafts is not None:
            wrong["has drafts, and not behind its last known token"] = (drafts > 0) & (~samples | (drafts >= lengths))
        if any(map(np.count_nonzero, wrong.values())):
            self._refuse(slots, starts, lengths, wrong)
        if drafts is not None:
            # A guess outside the vocabulary equals nothing that is drawn; another id is computed in its place.
            ids = np.where(guesses.view(np.uint32) < self.vocab, guesses, 0)
            self.tokens[np.repeat(slots, drafts), np.repeat(known, drafts) + counting(drafts)] = ids
        return Chunks(slots, starts, lengths, samples, late, drafts, guesses)

    def _drafts(self, step: worker_pb2.Step, slots: Int32) -> tuple[Int32 | None, Int32]:
        """Read the drafts of the chunks: how many each has, and which. Raise ProtocolError."""
        if not step.chunk_drafts and not step.drafts:
            return None, NONE
        drafts = self._column(step.chunk_drafts, "chunk_drafts", self.max_model_len)
        self._pair(slots, drafts, "chunk_slots, chunk_drafts")
        guesses = self._column(step.drafts, "drafts", 1 << 31)  # below zero are marks of tokens that were not drawn
        if int(drafts.sum(dtype=np.int64)) != guesses.size:
            raise ProtocolError(f"drafts: {guesses.size} ids for chunks with {drafts.sum(dtype=np.int64)} drafts")
        return drafts, guesses

    def _refuse(self, slots: Int32, starts: Int32, lengths: Int32, wrong: dict[str, Bool]) -> None:
        """Raise ProtocolError for the first chunk that is wrong for the first of these reasons."""
        reason, rows = next((reason, rows) for reason, rows in wrong.items() if rows.any())
        i = int(np.flatnonzero(rows)[0])
        slot = int(slots[i])
        raise ProtocolError(
            f"chunk of slot {slot}, start {starts[i]}, length {lengths[i]}, {reason} (known {self.known[slot]}, "
            f"computed {self.computed[slot]}, blocks {self.table_blocks[slot]} of {self.block_size} tokens)"
        )

    def _check_active(self, slots: Int32, name: str) -> None:
        idle = slots[~self.active[slots]]
        if idle.size:
            raise ProtocolError(f"{name}: slot {idle[0]} holds no sequence")
