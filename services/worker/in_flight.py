"""Steps between the moment they are given to the device and their Results. Used by the engine alone, under its lock.

A step in flight knows the generation of its slots at submission: meanwhile they may be freed and taken again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernels.ops import (
    STATUS_FINE,
    STATUS_NOT_FINITE,
    STATUS_NOTHING_ALLOWED,
    AnyOps,
    Bool,
    Float32,
    Int32,
    Int64,
    Pending,
    Sampled,
    Scored,
)
from protos import worker_pb2
from services.worker.kv.transfers import KVTransfers
from services.worker.slots import SCORE, VECTOR, Chunks, ScoredTokens, SlotTable
from shared.text.logprobs import pack_prompt_records, pack_record, prompt_record_bytes
from shared.wire.columns import pack, pack_float

NO_ROWS: Int32 = np.zeros(0, np.int32)
UNMASKED = -2
"""In place of the token of a row without its mask: the rank that samples tells the others so."""
NO_TOKENS: Int64 = np.zeros(0, np.int64)

WHY = {
    STATUS_NOT_FINITE: ("nan_logits", "the model gave logits that are not finite"),
    STATUS_NOTHING_ALLOWED: ("nothing_allowed", "bans and mask leave no token to choose"),
}
GRAMMAR = "grammar"
"""The code of a sequence with a grammar that cannot be followed; the message says why."""


@dataclass(slots=True)
class Marks:
    """Points in the device's time (Ops.mark). before: the end of the step before this one, None for a Run's first."""

    before: Any
    start: Any
    forwarded: Any = None
    ended: Any = None

    def timings(self, ops: AnyOps, queued_ns: int, swap_ns: int) -> worker_pb2.Timings:
        """Return the timings with those of the device, which has passed the end when this returns."""
        return worker_pb2.Timings(
            queued_ns=queued_ns,
            idle_ns=0 if self.before is None else max(0, ops.elapsed_ns(self.before, self.start)),
            forward_ns=ops.elapsed_ns(self.start, self.forwarded),
            sample_ns=ops.elapsed_ns(self.forwarded, self.ended),
            total_ns=ops.elapsed_ns(self.start, self.ended),
            swap_ns=swap_ns,
        )


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step between `Engine.submit` and `Engine.finish`."""

    epoch: int
    id: int
    chunks: Chunks
    sampling: Int32  # [R] the slot of each token that is drawn, in the order of the chunks
    generations: Int64  # [C] of the chunks' slots when this was submitted
    departures: int  # of the slots by then
    transfers: KVTransfers
    marks: Marks
    queued_ns: int
    errors: list[worker_pb2.SequenceError]  # of slots that had failed before and are in the step again
    failed: dict[int, tuple[str, str]] = field(default_factory=dict)  # slots that give no token; code and message
    late: list[int] = field(default_factory=list)  # slots that give none yet
    positions: Int32 = field(default_factory=lambda: NO_ROWS)  # [R] where in its sequence each sampled token belongs
    logprobs: Int32 = field(default_factory=lambda: NO_ROWS)  # [R] as in the sequences' sampling
    has_grammars: bool = False  # with several ranks: whether a sequence that samples is bound by one
    swaps: bool = False
    peers: list[int] = field(default_factory=list)  # new peers of the step with a host tier that can be read
    unreadable: dict[int, str] = field(default_factory=dict)  # why the others cannot, by number
    adapters: list[int] = field(default_factory=list)  # those of the step that are loaded
    keep: Int32 = field(default_factory=lambda: NO_ROWS)  # host blocks that are to outlive the worker
    begun_ns: int = 0  # time.monotonic_ns() when the device was given it
    sampled: Pending[Sampled] | None = None
    scoring: ScoredTokens | None = None  # prompt tokens with log-probabilities that are wanted
    scores: Scored | None = None  # these, when they are known: [T] rows
    pooled: Int64 = field(default_factory=lambda: NO_TOKENS)  # [P] rows, of R, with a vector or a score as their record
    kinds: Int32 = field(default_factory=lambda: NO_ROWS)  # [P] which of the two (slots.VECTOR, SCORE)
    has_vectors: bool = False
    has_scores: bool = False
    vector_size: int = 0  # numbers of the largest of these
    vectors: Float32 | None = None  # these, when they are known: [P, vector_size]; a score is the first number
    learned: bool = False  # whether the slots know the tokens
    counts: Int32 | None = None  # of a step with drafts: by slot that samples, the tokens that count
    counting: Bool | None = None  # [R] of a step with drafts: whether the token counts
    unmasked: list[int] = field(default_factory=list)  # rows behind drafts of which the masks are missing
    # Tokens that grammars force: behind the outputs and each draft of a slot, on the rank that samples; then by row.
    forced_behind: dict[int, list[list[int]]] = field(default_factory=dict)
    forced: dict[int, list[int]] = field(default_factory=dict)
    # With several ranks: when the tokens came from the rank that samples, its grammar errors by row, and [R] which rows
    # were late there.
    arrived_ns: int = 0
    grammar_errors: dict[int, str] = field(default_factory=dict)
    late_rows: Bool | None = None

    def pool(self, pooling: Int32, vector_size: int) -> None:
        """Note which rows have a vector or a score. pooling: [R] Enter.pooling of each row's sequence."""
        self.pooled = np.flatnonzero(pooling)
        self.kinds = pooling[self.pooled]
        self.has_vectors, self.has_scores = VECTOR in self.kinds, SCORE in self.kinds
        self.vector_size = vector_size if self.has_vectors else 1

    def masks_of_rows(self, masks: Mapping[int, list[bytes]]) -> dict[int, bytes]:
        """Return the masks by row. masks: by slot, behind its outputs and its drafts, as far as there are any."""
        if not masks:
            return {}
        behind = None if self.chunks.drafts is None else self.chunks.behind().tolist()
        of_rows: dict[int, bytes] = {}
        for row, slot in enumerate(self.sampling.tolist()):
            if (of_slot := masks.get(slot)) is None:
                continue
            at = 0 if behind is None else behind[row]
            if at < len(of_slot):
                of_rows[row] = of_slot[at]
            else:
                self.unmasked.append(row)
            if forced := self.forced_behind.get(slot, [])[at : at + 1]:
                self.forced[row] = forced[0]
        return of_rows

    def timings(self, ops: AnyOps, swap_ns: int) -> worker_pb2.Timings:
        """Return the timings of the Result, once the device is done.

        All are of this rank. The total of a step with tokens from another rank ends when these arrive.
        """
        timings = self.marks.timings(ops, self.queued_ns, swap_ns)
        if self.arrived_ns:
            timings.total_ns = self.arrived_ns - self.begun_ns
        return timings

    def generation(self, slot: int) -> int | None:
        """Return the generation of one of the chunks' slots; None for a slot that has no chunk here."""
        at = np.flatnonzero(self.chunks.slots == slot)
        return int(self.generations[at[0]]) if at.size else None

    def write_prompt_logprobs(self, result: worker_pb2.Result) -> None:
        """Write the columns of the Result for prompt tokens, without those of sequences that failed."""
        scoring, scores = self.scoring, self.scores
        if scoring is None or scores is None:
            return
        kept = ~np.isin(scoring.slots, list(self.failed))
        ends = np.cumsum(scoring.counts)
        records, sizes = [], []
        for at in kept.nonzero()[0].tolist():
            part, wanted = slice(ends[at] - scoring.counts[at], ends[at]), int(scoring.wanted[at])
            ids, best = scores.ids[part, : wanted - 1], scores.best[part, : wanted - 1]
            records.append(pack_prompt_records(scores.logprobs[part], scores.ranks[part], ids, best))
            sizes.append(prompt_record_bytes(wanted))
        result.prompt_slots, result.prompt_firsts = pack(scoring.slots[kept]), pack(scoring.firsts[kept])
        result.prompt_counts, result.prompt_sizes = pack(scoring.counts[kept]), pack(sizes)
        result.prompt_logprobs = b"".join(records)

    def write_forced(self, result: worker_pb2.Result) -> None:
        """Write the columns of the Result for forced tokens: those behind the last token that each slot gets."""
        if self.sampled is None or not self.forced:
            return
        tokens, forced_by_slot = self.sampled.wait().tokens.tolist(), {}
        for row, forced in self.forced.items():
            slot = int(self.sampling[row])
            if forced[:1] == tokens[row : row + 1] and self._is_last(row) and slot not in (*self.failed, *self.late):
                forced_by_slot[slot] = forced[1:]
        forced_by_slot = {slot: forced for slot, forced in forced_by_slot.items() if forced}
        result.forced_slots = pack(list(forced_by_slot))
        result.forced_counts = pack([len(forced) for forced in forced_by_slot.values()])
        result.forced_tokens = pack([token for forced in forced_by_slot.values() for token in forced])

    def _is_last(self, row: int) -> bool:
        """Return whether the token of a row is the last that counts of its slot."""
        if self.counting is None:
            return True
        has_next = row + 1 < self.sampling.size and self.sampling[row + 1] == self.sampling[row]
        return bool(self.counting[row]) and not (has_next and self.counting[row + 1])

    def late_slots(self) -> bytes:
        """Return the column of the Result."""
        return pack([slot for slot in self.late if slot not in self.failed]) if self.late else b""

    def all_errors(self) -> list[worker_pb2.SequenceError]:
        """Return those of the Result."""
        if not self.failed:
            return self.errors
        return self.errors + [
            worker_pb2.SequenceError(slot=slot, code=code, message=message)
            for slot, (code, message) in self.failed.items()
        ]


class InFlightSteps:
    """The steps of one Run that are in flight, in order."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._out: list[InFlightStep] = []

    @property
    def is_empty(self) -> bool:
        """Return whether no step waits for its result."""
        return not self._out

    def begin(self, inflight: InFlightStep) -> None:
        self._out.append(inflight)

    def unknown(self, slots: Int32) -> list[InFlightStep]:
        """Return those, in order, that sample for one of these slots a token that the host does not know yet."""
        return [one for one in list(self._out) if one.sampled and not one.learned and _concerns(one, slots)]

    def learn(self, inflight: InFlightStep, sampled: Sampled) -> Int32:
        """Write the sampled tokens to the slots and return them; a failed draw fails the sequence."""
        tokens = sampled.tokens.astype(np.int32)
        if inflight.unmasked:
            tokens[inflight.unmasked] = UNMASKED
        if inflight.learned:
            return tokens
        inflight.learned = True
        self.learn_scores(inflight)
        if inflight.late_rows is not None:
            self._take_back(inflight, inflight.late_rows)
        wrong = sampled.status != STATUS_FINE
        if inflight.late:
            wrong &= ~np.isin(inflight.sampling, inflight.late)  # drawn without their masks, and drawn again
        if inflight.chunks.drafts is not None:
            wrong &= tokens != UNMASKED
            inflight.counting = _that_count(inflight.chunks, np.where(wrong, -1, tokens))
            inflight.counts = np.add.reduceat(
                inflight.counting, np.cumsum(inflight.chunks.draws) - inflight.chunks.draws, dtype=np.int32
            )
            wrong &= inflight.counting
        for row in wrong.nonzero()[0].tolist():
            self.fail(inflight, int(inflight.sampling[row]), *WHY[int(sampled.status[row])])
        for row, why in inflight.grammar_errors.items():
            if inflight.counting is None or inflight.counting[row]:
                self.fail(inflight, int(inflight.sampling[row]), GRAMMAR, why)
        self._record(inflight, tokens)
        return tokens

    def learn_scores(self, inflight: InFlightStep) -> None:
        """Let the sequences fail with a prompt token that has no log-probability. Changes nothing when called again."""
        scoring, scores = inflight.scoring, inflight.scores
        if scoring is None or scores is None or not scores.status.any():
            return
        of_tokens = scoring.of_tokens
        for row in np.flatnonzero(scores.status != STATUS_FINE).tolist():
            self.fail(inflight, int(of_tokens[row]), *WHY[int(scores.status[row])])

    def settle(self, inflight: InFlightStep, sampled: Sampled | None) -> tuple[Int32, Int32, Int32, list[bytes]]:
        """Return the slots, their tokens, the counts of these and the records of log-probabilities of the Result.

        No count where each slot has one token. One record per token, empty for a sequence without log-probabilities; no
        record when no sequence wants any.
        """
        if inflight in self._out:  # else a new Run has begun
            self._out.remove(inflight)
        slots = inflight.sampling
        if sampled is None:
            return slots, slots, NO_ROWS, []
        tokens = self.learn(inflight, sampled)
        if not inflight.failed and not inflight.late and inflight.counting is None:
            return slots, tokens, NO_ROWS, _with_vectors(_records(sampled, inflight.logprobs), inflight)
        fine, counts = ~np.isin(slots, [*inflight.failed, *inflight.late]), NO_ROWS
        answered = slots[fine]
        if inflight.counting is not None and inflight.counts is not None:
            starts = np.cumsum(inflight.chunks.draws) - inflight.chunks.draws
            alive = fine[starts]
            answered, counts = slots[starts][alive], inflight.counts[alive]
            fine &= inflight.counting
        records = _with_vectors(_records(sampled, np.where(fine, inflight.logprobs, 0)), inflight)
        records = [records[row] for row in np.flatnonzero(fine).tolist()] if records else []
        return answered, tokens[fine], counts, records

    def fail(self, inflight: InFlightStep, slot: int, code: str, message: str) -> None:
        """Mark the sequence that the slot held in this step as failed: no token, here and in the later steps."""
        if slot in inflight.failed:
            return
        inflight.failed[slot] = (code, message)
        generation = inflight.generation(slot)
        if self._slots.generation[slot] == generation:
            self._slots.fail(slot, code, message)
        for later in self._out:
            if later.id > inflight.id and later.generation(slot) == generation:
                later.failed.setdefault(slot, (code, message))

    def _take_back(self, inflight: InFlightStep, late: Bool) -> None:
        """Expect no token in rows that were late on the rank that samples. Slots may hold other sequences by now."""
        chunks, draws = inflight.chunks, inflight.chunks.draws
        first = np.cumsum(draws) - draws
        late = late[first]
        slots = inflight.sampling[first][late]
        inflight.late += slots.tolist()
        same = self._slots.generation[slots] == inflight.generations[chunks.samples][late]
        slots = slots[same]
        self._slots.sit_out(slots, inflight.positions[first][late][same])
        self._slots.drop_drafts(slots[draws[late][same] > 1])

    def _record(self, inflight: InFlightStep, tokens: Int32) -> None:
        """Write the tokens to the slots that still hold the sequences of this step."""
        table, slots, positions, chunks = self._slots, inflight.sampling, inflight.positions, inflight.chunks
        if table.departures == inflight.departures and inflight.counts is None and not inflight.late:
            table.record(slots, positions, tokens)
            return
        generations = np.repeat(inflight.generations[chunks.samples], chunks.draws)
        same: Bool = table.generation[slots] == generations
        same &= ~np.isin(slots, inflight.late)
        if inflight.counting is not None and inflight.counts is not None:
            ends = np.cumsum(chunks.draws) - 1
            kept = same[ends] & (chunks.draws > 1)
            known = positions[ends] - chunks.draws + 1 + inflight.counts
            table.settle(slots[ends][kept], known[kept])
            same = same & inflight.counting
        table.record(slots[same], positions[same], tokens[same])


def _concerns(inflight: InFlightStep, slots: Int32) -> bool:
    """Return whether a step samples for one of these slots, or scores tokens of its prompt."""
    scored = inflight.scoring is not None and bool(np.isin(inflight.scoring.slots, slots).any())
    return scored or bool(np.isin(inflight.sampling, slots).any())


def _that_count(chunks: Chunks, tokens: Int32) -> Bool:
    """Return [R] which of the drawn tokens count: those before which every draft was drawn."""
    draws = chunks.draws
    starts, ends = np.cumsum(draws) - draws, np.cumsum(draws) - 1
    right = np.zeros(tokens.size, np.bool_)
    behind = np.ones(tokens.size, np.bool_)
    behind[ends] = False  # no draft stands behind the last token that is drawn
    right[behind] = (tokens[behind] == chunks.guesses) & (tokens[behind] >= 0)  # a failed draw equals no draft
    wrong: Int64 = np.cumsum(~right) - ~right  # wrong ones before each row
    counting: Bool = wrong == np.repeat(wrong[starts], draws)
    counting &= tokens != UNMASKED
    return counting


def _with_vectors(records: list[bytes], inflight: InFlightStep) -> list[bytes]:
    """Return the records with those of pooled rows, which are their vectors or scores."""
    if inflight.vectors is None:
        return records
    records = records or [b""] * len(inflight.sampling)
    for row, kind, vector in zip(inflight.pooled.tolist(), inflight.kinds.tolist(), inflight.vectors, strict=True):
        records[row] = pack_float(vector[:1] if kind == SCORE else vector)
    return records


def _records(sampled: Sampled, wanted: Int32) -> list[bytes]:
    """Return one per row, empty where `wanted` [R] is 0; none at all when all are 0. Loops over the wanted rows."""
    if sampled.logprobs is None or not wanted.any():
        return []
    records, sampled_logprobs = [b""] * len(wanted), sampled.logprobs
    likely, none = sampled.likely, np.zeros((len(wanted), 0))
    ids, best = (none, none) if likely is None else (likely.ids.cpu().numpy(), likely.logprobs.cpu().numpy())
    for row in np.flatnonzero(wanted).tolist():
        most = int(wanted[row]) - 1
        records[row] = pack_record(sampled_logprobs[row], ids[row, :most], best[row, :most])
    return records
