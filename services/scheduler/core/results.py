"""Apply a step's result: tokens into the slot table, ends, and what is published and checkpointed.

Called by Scheduler.apply. Columns over the first rows, masked by those that sampled; Python only for sequences that
finish, failed, or have lost their slot since the step was sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.scheduler.core.outcome import Columns, Names, OutcomeBuilder
from services.scheduler.core.placement.disaggregation import requeue_handed_over
from services.scheduler.core.placement.router import Router
from services.scheduler.core.replica import Replica, SentStep
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.table import Bool, RowIndex, ramp
from services.scheduler.core.types import EMPTY, Finish, Int32, Outcome, PromptLogprobs, Records, Rows, StepResult
from services.scheduler.core.waiting import WaitingQueue

_NONE: npt.NDArray[np.uint8] = np.zeros(4096, np.uint8)
_NONE.setflags(write=False)
_LENGTH = np.uint8(Finish.LENGTH)


def none_finish(count: int) -> npt.NDArray[np.uint8]:
    """Return [count] uint8 zeros: no sequence ended. Shared: read only."""
    return _NONE[:count] if count <= _NONE.size else np.zeros(count, np.uint8)


def spread_records(rows: Rows, records: Records, size: int) -> Records:
    """Return a column [size] with records[i] at rows[i]."""
    column: Records = np.full(size, b"", object)
    column[rows] = records
    return column


@dataclass(slots=True)
class Spans:
    """Positions of a result's tokens where a row may have several. Columns [n] over the first n rows."""

    starts: npt.NDArray[np.int64]
    counts: Int32  # 0 for a row without tokens
    rows: int  # that have tokens

    def of(self, row: int) -> range:
        """Return the positions of one row's tokens."""
        start = int(self.starts[row])
        return range(start, start + int(self.counts[row]))

    def flat(self, rows: RowIndex, counts: Int32) -> npt.NDArray[np.int64]:
        """Return the positions of the first counts[i] tokens of rows[i], one row after another."""
        return ramp(self.starts[rows], counts)


class Endings(Protocol):
    """The part of the scheduler by which results end sequences."""

    def collector(self) -> OutcomeBuilder:
        """Return the builder of the next Outcome, with what was not told yet."""

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of its row or the waiting queue before its end."""

    def on_complete(self, sequence: Sequence) -> None:
        """Note that a sequence ended without a client's or an operator's doing."""

    def end(self, sequence: Sequence, finish: Finish, error: str, out: OutcomeBuilder) -> None:
        """End a sequence that holds neither slot nor blocks any more."""


class Results:
    """Applies results. A result counts for a slot only if its sequence had the slot when the step was sent."""

    def __init__(
        self,
        endings: Endings,
        router: Router,
        waiting: WaitingQueue,
        names: Names,
        checkpoint_tokens: int,
        checkpoint_ns: int,
    ) -> None:
        self.tokens_total = 0
        self._endings = endings
        self._router = router
        self._waiting = waiting
        self._names = names
        self._checkpoint_tokens = checkpoint_tokens
        self._checkpoint_ns = checkpoint_ns

    def apply(self, replica: Replica, step: SentStep, result: StepResult, now_ns: int) -> Outcome:
        """Return the Outcome of one answered step. Raises ValueError when the result is not of this step."""
        rows, samples, table = step.sampled_rows, step.samples, replica.table
        sent = step.sampled_wire  # comparing bytes takes a third of what array_equal takes
        if result.late.size or (result.slots is not sent and result.slots.tobytes() != sent.tobytes()):
            rows = self._answered_slots(replica, step, result)
            samples = np.zeros(samples.size, np.bool_)
            samples[rows] = True
        spans = self._spans(step, rows, result) if step.drafts is not None else None
        if result.tokens.size != (rows.size if spans is None else int(spans.counts.sum())):
            raise ValueError(f"the result of step {step.id} has {result.tokens.size} tokens for {rows.size} slots")
        if spans is None and result.token_counts is not None:
            raise ValueError(f"the result of step {step.id} has token counts, but the step has no drafts")
        if result.kept_blocks > step.keep.size:
            raise ValueError(f"the result of step {step.id} keeps {result.kept_blocks} of {step.keep.size} blocks")
        scored = self._match_logprobs(replica, step, result) if result.prompt_logprobs else []
        out = self._endings.collector()
        replica.on_answer(step)
        if replica.speculation.possible:
            replica.speculation.on_answer(step.planned_ns, result.step_ns, now_ns, step.alone)
        for number in result.stale_peers.tolist():
            if self._taken_over(replica, number, now_ns, out) or step.peers.get(number) is not None:
                out.lost_peers.append(number)  # the worker reads it no more, or could not map it
        self._learn(replica, step, result)
        if result.kept_blocks:
            if missing := replica.transfers.queued_out - replica.transfers.copied_out:
                raise ValueError(
                    f"the result of step {step.id} keeps blocks, but {missing} copies are not acknowledged"
                )
            replica.kept_blocks = step.keep[: result.kept_blocks]
        news = step.adapters or result.adapter_acks.size
        if news and replica.adapters.acknowledge(step.adapters, result.adapter_acks, now_ns):
            self._router.update_replicas(self._router.placement.alive)
        if step.peers and replica.peers.acknowledge(step.peers, result.peer_acks):
            self._router.update_replicas(self._router.placement.alive)
        if step.ends.size and replica.prefix_cache is not None:
            self._register_prompts(replica, step, result.errors)
        present = table.generation[: samples.size] <= step.id  # rows that still have the sequence of the step
        if table.late_rows and np.count_nonzero(samples & present & (table.late[: samples.size] > 0)):
            raise ValueError(f"the result of step {step.id} has a token of a slot that was late in an earlier step")
        table.unanswered_steps[: samples.size] -= step.chunk_mask & present
        if spans is None:
            tokens = table.spread(rows, result.tokens, samples.size)
            logprobs = spread_records(rows, result.logprobs, samples.size) if result.logprobs is not None else None
        else:
            tokens, logprobs = result.tokens, result.logprobs
        for sequence, scores in scored:  # before a token that ends the sequence
            self._publish(sequence, scores, out)
        if np.count_nonzero(samples > present):
            stayed = present[rows]
            for row in rows[~stayed].tolist():
                for at in (row,) if spans is None else spans.of(row):
                    record = logprobs[at] if logprobs is not None else b""
                    self._append_departed(replica, step, row, int(tokens[at]), record, now_ns, out)
            samples, rows = samples & present, rows[stayed]
        columns = None
        if rows.size:
            columns = self._tokens(replica, step, rows, samples, tokens, spans, logprobs, now_ns, out)
        if result.forced_tokens is not None:
            self._force(replica, step, rows, *result.forced_tokens)
        for slot, code, message in result.errors:
            self._end_failed(replica, step, slot, f"{code}: {message}" if code else message, out)
        if result.late.size:
            self._sit_out(replica, step, result.late.astype(np.intp))
        if table.late_rows:
            table.plan_again(replica.limits)
        if replica.departures:
            for slot in step.slots[~present[step.slots]].tolist():
                if slot in replica.departures:
                    replica.settle(slot, step.id)  # after the failures, which belong to its last result
        if replica.handovers:
            requeue_handed_over(replica, self._waiting, now_ns)
        if result.swap_out_acks.size:
            self._waiting.changes += 1  # peers may read it now
        return out.build(columns)

    def _taken_over(self, replica: Replica, number: int, now_ns: int, out: OutcomeBuilder) -> bool:
        """Let sequences wait again that load KV from a peer with a newer Run: it is computed again. Return whether the
        peer was readable.
        """
        if replica.peers.taken_over(number) is None:
            return False  # it was lost, and with it the loads
        for slot in replica.transfers.loading_from(number):
            self._waiting.requeue(replica.release(slot), now_ns, out)
        self._router.update_replicas(self._router.placement.alive)
        return True

    @staticmethod
    def _learn(replica: Replica, step: SentStep, result: StepResult) -> None:
        """Learn how long the step took, and take the copies that are complete."""
        replica.last_answered = step.tokens, result.step_ns
        if step.tokens and not (
            step.moved_blocks and not replica.limits.role
        ):  # with a role nearly every step moves some
            replica.model.observe(step.tokens, step.decode_context, step.prefill_context, result.step_ns)
            replica.token_time.observe(step.tokens, result.step_ns)
        if result.swap_out_acks.size or result.swap_in_acks.size:
            replica.acknowledge(result.swap_out_acks, result.swap_in_acks)
            replica.swap_time.observe(result.swap_out_acks.size + result.swap_in_acks.size, result.swap_ns)

    @staticmethod
    def _register_prompts(replica: Replica, step: SentStep, errors: list[tuple[int, str, str]]) -> None:
        """Let the blocks of the step's prompt chunks be shared: their KV is there."""
        table, failed = replica.table, {slot for slot, _, _ in errors}
        chunks = [
            (slot, end)
            for slot, end in zip(step.slots[step.decodes :].tolist(), step.ends.tolist(), strict=True)
            if slot not in failed
        ]
        if replica.departures:
            for slot, end in chunks:
                if table.generation.item(slot) > step.id:
                    replica.on_confirm(slot, step.id, end)
        present = [(slot, end) for slot, end in chunks if table.generation.item(slot) <= step.id]
        for slot, end in present:
            table.filled_tokens[slot] = end
        if replica.prefix_cache is not None:
            replica.prefix_cache.register_rows(present)

    @staticmethod
    def _match_logprobs(replica: Replica, step: SentStep, result: StepResult) -> list[tuple[Sequence, PromptLogprobs]]:
        """Return log-probabilities of prompts with their sequences; those of sequences that have ended are left out.

        Raises ValueError, before anything is applied, for a slot without a chunk or with two records, for tokens that
        the prompt has not, and where tokens before the first one are missing.
        """
        scored: dict[int, tuple[Sequence, PromptLogprobs]] = {}
        for scores in result.prompt_logprobs:
            if scores.slot in scored or not (step.slots == scores.slot).any():
                how = "twice" if scores.slot in scored else "which has no chunk"
                raise ValueError(f"the result of step {step.id} scores a prompt of slot {scores.slot}, {how}")
            is_present = replica.table.generation[scores.slot] <= step.id
            sequence: Sequence | None = (
                replica.table.sequence[scores.slot] if is_present else replica.owner(scores.slot, step.id)
            )
            if sequence is None or sequence.state is State.ENDED:
                continue
            end = scores.first_position + scores.count
            if (
                not 0 < scores.first_position <= sequence.scored_tokens
                or not scores.first_position < end <= sequence.prompt.size
            ):
                raise ValueError(
                    f"the result of step {step.id} scores tokens {scores.first_position} to {end - 1} of slot "
                    f"{scores.slot}, which has {sequence.prompt.size} and lacks those from {sequence.scored_tokens} on"
                )
            scored[scores.slot] = sequence, scores
        return list(scored.values())

    @staticmethod
    def _publish(sequence: Sequence, scores: PromptLogprobs, out: OutcomeBuilder) -> None:
        """Publish log-probabilities of a prompt, each token's once: a recomputed token has its first ones."""
        end = scores.first_position + scores.count
        if end <= sequence.scored_tokens:
            return
        size = len(scores.records) // scores.count
        records = scores.records[(sequence.scored_tokens - scores.first_position) * size :]
        request = sequence.record.request
        prompt, count = sequence.choice // request.n, end - sequence.scored_tokens
        out.prompt_logprobs.append((request.id, prompt, sequence.scored_tokens, count, records))
        sequence.scored_tokens = end

    @staticmethod
    def _answered_slots(replica: Replica, step: SentStep, result: StepResult) -> Rows:
        """Return the slots of a result that leaves some out: those that failed in this step or before, or are late.

        Raises ValueError where another slot is missing or late, or the slots are not those of the step.
        """
        answered = np.isin(step.sampled_rows, result.slots)
        failed = [slot for slot, _, _ in result.errors]
        missing = step.sampled_rows[~answered]
        if not np.isin(result.late, missing).all() or np.isin(result.late, failed).any():
            raise ValueError(f"the result of step {step.id} has a late slot that did not sample, or that it answers")
        if np.unique(result.late).size < result.late.size:
            raise ValueError(f"the result of step {step.id} has a late slot twice")
        missing = missing[~np.isin(missing, result.late)]
        missing = missing[~np.isin(missing, failed) & (replica.table.generation[missing] <= step.id)]
        if missing.size or not np.array_equal(result.slots, step.sampled_rows[answered]):
            raise ValueError(f"the result of step {step.id} is for other slots than those that sampled")
        return result.slots.astype(np.intp)

    @staticmethod
    def _spans(step: SentStep, rows: Rows, result: StepResult) -> Spans:
        """Return where the tokens of each row stand. Raises ValueError for counts that the step cannot give."""
        counts, drafts = result.token_counts, step.drafts
        if counts is None and not rows.size:
            counts = EMPTY  # none of them got a token: all failed
        if drafts is None or counts is None or counts.size != rows.size:
            found = 0 if counts is None else counts.size
            raise ValueError(f"the result of step {step.id} has {found} token counts for {rows.size} slots")
        if rows.size and (counts.min() < 1 or (counts - drafts[rows]).max() > 1):
            raise ValueError(f"the result of step {step.id} has more tokens for a slot than its drafts, or none")
        spans = Spans(np.zeros(step.samples.size, np.int64), np.zeros(step.samples.size, np.int32), rows.size)
        spans.starts[rows], spans.counts[rows] = counts.cumsum() - counts, counts
        return spans

    @staticmethod
    def _force(replica: Replica, step: SentStep, rows: Rows, slots: Int32, counts: Int32, tokens: Int32) -> None:
        """Take the tokens that grammars force as guesses, for those of `rows` that go on."""
        going = np.isin(slots, rows) & (replica.table.generation.take(slots, mode="clip") <= step.id)
        if replica.speculation.possible and going.any():
            tokens = tokens[np.repeat(going, counts)]
            replica.speculation.force(slots[going].astype(np.intp), counts[going], tokens)

    def _sit_out(self, replica: Replica, step: SentStep, late: Rows) -> None:
        """Keep late sequences from running until their steps are answered; the step gave none of them a token."""
        table = replica.table
        present = table.generation[late] <= step.id
        drafted = late[present & (table.drafts[late] > 0)]
        if drafted.size:
            replica.rollback(drafted, table.drafts[drafted])
        if replica.speculation.possible:
            replica.speculation.sat_out(late[present])
        table.sit_out(late[present])
        for slot in late[~present].tolist():
            sequence = replica.owner(slot, step.id)
            if sequence is None or (saved := sequence.saved_kv) is None:
                continue
            if (uncomputed := saved.tokens - sequence.known_tokens + 1) > 0:  # it was saved with all that was planned
                needed = max(replica.blocks_for(sequence.known_tokens - 1), 1)
                if needed < saved.blocks.size:
                    replica.host.give(saved.blocks[needed:])
                sequence.saved_kv = replace(saved, blocks=saved.blocks[:needed], tokens=sequence.known_tokens - 1)
                if sequence.state is State.WAITING:
                    self._waiting.grew(sequence, uncomputed)

    def _tokens(
        self, replica: Replica, step: SentStep, rows: Rows, samples: Bool, tokens: Int32, spans: Spans | None,
        logprobs: Records | None, now_ns: int, out: OutcomeBuilder,
    ) -> Columns:  # fmt: skip
        """Append the tokens of `rows`, up to the first that ends a sequence.

        samples, tokens, logprobs: [n] columns over the first n rows. With spans the last two stand as it says.
        """
        table, size = replica.table, samples.size
        delivery = table.delivery_rows(rows, step.microbatch, self._names.array)
        counts = None
        if spans is None or step.drafts is None:
            before = table.append_tokens(tokens, samples)
            stopped = table.find_stops(tokens, samples)
        else:
            before = table.applied_tokens[:size].copy()
            given = spans.counts[rows]
            present = tokens if rows.size == spans.rows else tokens[spans.flat(rows, given)]
            counts, stopped = table.append_spans(rows, present, given, size)
            drafted = step.drafts[rows].nonzero()[0]
            drafts, right, drafted = step.drafts[rows[drafted]], given[drafted] - 1, rows[drafted]
            replica.speculation.learn(drafted, drafts, right)
            replica.rollback(drafted, drafts - right)
        first = (before - table.prompt[:size])[delivery.rows]
        waits = now_ns - table.last_token_ns[:size]
        np.copyto(table.last_token_ns[:size], now_ns, where=samples)
        self.tokens_total += rows.size if counts is None else int(counts.sum())
        cached = self._cached_tokens(replica, delivery.rows, first)
        done = table.applied_tokens[:size] >= table.limit[:size]
        done &= samples
        if stopped is not None:
            done |= stopped
        ended = np.count_nonzero(done)
        if self._checkpoint_tokens:
            self._checkpoints(replica, samples > done if ended else samples, now_ns, out)
        at, which = delivery.rows, delivery.rows
        if counts is not None and spans is not None:
            counts = counts[at]
            in_order = isinstance(at, slice) and rows.size == spans.rows and stopped is None
            which = slice(tokens.size) if in_order else spans.flat(at, counts)
        finish = none_finish(rows.size)
        if ended:
            kinds = done * _LENGTH
            if stopped is not None:
                kinds[stopped] = Finish.STOP
            finish = kinds[at]
            for row in rows[done[rows]].tolist():
                table.sequence[row].state = State.ENDED
                if replica.speculation.possible:
                    replica.speculation.on_end(row)
                sequence = replica.release(row)
                self._endings.on_complete(sequence)
                self._endings.end(sequence, Finish(int(kinds[row])), "", out)
        records = logprobs[which] if logprobs is not None else None
        guesses = step.drafts[at] if counts is not None and step.drafts is not None else None
        return Columns(delivery, first, tokens[which], counts, guesses, cached, finish, waits[at], records)

    @staticmethod
    def _cached_tokens(replica: Replica, at: RowIndex, first: Int32) -> dict[int, int]:
        """Return, by row of the Outcome, the prompt tokens that the prefix cache had, of rows with a first token."""
        if replica.prefix_cache is None or not (rows := (first == 0).nonzero()[0]).size:
            return {}
        sequences = replica.table.sequence[rows if isinstance(at, slice) else at[rows]].tolist()  # a slice begins at 0
        return {row: s.cached_tokens for row, s in zip(rows.tolist(), sequences, strict=True) if s.cached_tokens > 0}

    def _checkpoints(self, replica: Replica, going: Bool, now_ns: int, out: OutcomeBuilder) -> None:
        """Checkpoint the rows of `going`, [n] of the first n rows, that have enough tokens since their last one."""
        table, size = replica.table, going.size
        due = table.applied_tokens[:size] >= table.due[:size]
        due |= table.checkpoint_ns[:size] <= now_ns - self._checkpoint_ns
        due &= going
        which = due.nonzero()[0]
        if not which.size:
            return
        start, stop = table.checkpointed_tokens[which], table.applied_tokens[which]
        sizes = stop - start
        table.checkpointed_tokens[which] = stop
        table.due[which] = stop + self._checkpoint_tokens
        table.checkpoint_ns[which] = now_ns
        if not np.count_nonzero(sizes != sizes[0]):  # in steady decode all have as many: one gather
            tokens = list(table.tokens_flat[(table.base[which] + start)[:, None] + np.arange(sizes[0])])
        else:
            first = table.base[which] + start
            spans = zip(first.tolist(), (first + sizes).tolist(), strict=True)
            tokens = [table.tokens_flat[a:b].copy() for a, b in spans]
        ids = [request.id for request in table.request[which].tolist()]
        indices = (start - table.prompt[which]).tolist()
        out.checkpoints.extend(zip(ids, table.choice[which].tolist(), indices, tokens, strict=True))

    @staticmethod
    def checkpoint(replica: Replica, slot: int, out: OutcomeBuilder) -> None:
        """Checkpoint what one running sequence has beyond its last checkpoint."""
        table = replica.table
        begin, end = int(table.checkpointed_tokens[slot]), int(table.applied_tokens[slot])
        if end > begin:
            first = begin - int(table.prompt[slot])
            tokens = table.tokens[slot, begin:end].copy()
            out.checkpoints.append((table.request[slot].id, int(table.choice[slot]), first, tokens))
            table.checkpointed_tokens[slot] = end

    def _append_departed(
        self,
        replica: Replica,
        step: SentStep,
        slot: int,
        token: int,
        logprobs: bytes,
        now_ns: int,
        out: OutcomeBuilder,
    ) -> None:
        """Append a token to a sequence that has lost its slot if it was preempted or parked; else drop the token."""
        sequence = replica.owner(slot, step.id)
        if sequence is None or sequence.state not in (State.WAITING, State.PARKED):
            return
        sequence.outputs = np.append(sequence.outputs, np.int32(token))
        wait_ns = now_ns - (sequence.last_token_ns or sequence.record.arrived_ns)
        sequence.last_token_ns = now_ns
        if sequence.state is State.WAITING:
            self._waiting.grew(sequence)
        self.tokens_total += 1
        finish = sequence.verdict(sequence.longest(replica.limits))
        if finish is not Finish.RUNNING:
            self._endings.withdraw(sequence)
            self._endings.on_complete(sequence)
            sequence.finish = finish
        out.add_departed(sequence, token, logprobs, wait_ns)
        if finish is not Finish.RUNNING:
            self._endings.end(sequence, finish, "", out)
        else:
            out.checkpoint(sequence)

    def _end_failed(self, replica: Replica, step: SentStep, slot: int, message: str, out: OutcomeBuilder) -> None:
        """End a sequence after an error in its part of the step; the other sequences go on.

        A sequence that fails because no replica can load its adapter also ends those that wait for it.
        """
        sequence: Sequence | None
        if replica.table.generation[slot] <= step.id:
            sequence = replica.table.sequence[slot]
        else:
            sequence = replica.owner(slot, step.id)
        if sequence is None or sequence.state is State.ENDED:
            return
        adapter = sequence.record.request.adapter
        is_first_reason = replica.adapters.on_failure(adapter, message)  # called while the row has the adapter
        self._fail(sequence, message, out)
        if is_first_reason:
            for other in [s for s in self._waiting if s.record.request.adapter == adapter]:
                if error := self._router.placement.refusal(other):
                    self._fail(other, error, out)

    def _fail(self, sequence: Sequence, message: str, out: OutcomeBuilder) -> None:
        self._endings.withdraw(sequence)
        out.row(sequence, Finish.ERROR, message)
        self._endings.end(sequence, Finish.ERROR, message, out)
