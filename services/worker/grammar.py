"""The grammars of the sequences in the slots: which ids each next token may have.

A process of low priority compiles grammars and computes masks (shared/text/grammar_process.py), so that neither their
time nor Python's lock holds up a step. Masks are ordered as soon as the host knows the token before them: when the
sequence enters, with the outputs that it came with, or when the step that samples begins, with those behind its drafts.
Tenants take turns, and the sequences of each tenant. No question is interrupted for another, so a second process serves
tenants with costly ones, if other tenants are there. It runs in idle time while there is enough: a turn of some
milliseconds would hold up a step.

A row without its mask by the time of sampling is late: it sits the step out and is planned again, while the others go
on. Until its mask is there, later steps leave the row out before they compute it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kernels.ops import STATUS_FINE, Int32
from protos import worker_pb2
from services.worker.in_flight import InFlightStep
from services.worker.slots import Chunks, SlotTable
from shared.errors import OrcinusError
from shared.processes.jail import JailError
from shared.text.grammar_process import NO_TOKENS, GrammarProcess
from shared.text.grammars import NOT_FOLLOWED, NoGrammarsError
from shared.wire.columns import unpack

MEMORY_BYTES = 2 << 30
"""Of each process: the grammars of all its sequences and the tokenizer. Beyond most of it the largest grammar ends."""
COSTLY_MASK_S, COSTLY_BEGIN_S = 0.002, 0.05
"""Processor time from which a mask is costly, and a sequence's first one, with its grammar to compile."""
COSTLY_FOR_S = 30.0
"""A tenant is served apart for so long after its last costly mask."""
ALONE_S = 0.1
"""A step that has no other rows to compute waits so long for the first of its masks."""
BESIDE_OTHERS_S = 0.001
"""Any step waits so long for the mask of a sequence if its last mask took at most as long."""
TOGETHER_S = 5.0
"""Where no row may be late a step waits so long: less than the scheduler's watchdog, which would drop the worker."""


@dataclass(slots=True)
class Question:
    """The input of masks: those behind the outputs and each guess.

    forced: with the masks, as of GrammarProcess. took_s: how long each took, without the wait for its turn.
    """

    tenant: int
    key: int
    grammar: str
    outputs: Int32
    guesses: Int32 = field(default_factory=lambda: NO_TOKENS)
    masks: Future[list[bytes]] = field(default_factory=Future)
    forced: list[list[int]] = field(default_factory=list)
    took_s: float = 0.0


class Turns:
    """Questions that wait: the tenants take turns, and the questions of each tenant go by arrival. Thread-safe.

    However many questions a tenant has, another tenant's waits for one of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, deque[Question]] = OrderedDict()  # by tenant, the next one first

    def put(self, question: Question) -> None:
        """Add a question behind those of its tenant."""
        with self._lock:
            self._waiting.setdefault(question.tenant, deque()).append(question)

    def take(self) -> Question | None:
        """Return the next question, which cannot be cancelled from now on; None when none is left."""
        with self._lock:
            while self._waiting:
                tenant, questions = self._waiting.popitem(last=False)
                question = None
                while questions and question is None:
                    first = questions.popleft()
                    question = first if first.masks.set_running_or_notify_cancel() else None
                if questions:
                    self._waiting[tenant] = questions
                if question is not None:
                    return question
        return None


class Lane:
    """One process of grammars and the thread that asks it one question after another, by Turns."""

    def __init__(
        self, model: Path, vocab: int, in_idle_time: bool, answered: Callable[[Question, bool], object]
    ) -> None:
        """in_idle_time: see GrammarProcess. answered: called with each question once its mask is there, and with
        whether the mask was costly.
        """
        self.process = GrammarProcess(model, vocab, MEMORY_BYTES, in_idle_time)
        self._answered = answered
        self._turns = Turns()
        self._thread = ThreadPoolExecutor(1, "grammars")

    def prepare(self) -> None:
        """Start the process."""
        self._thread.submit(self.process.jail.start)

    def close(self) -> None:
        """End the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.process.close()

    def ask(self, question: Question) -> None:
        """Have the mask computed."""
        self._turns.put(question)
        self._thread.submit(self._answer_next)

    def forget(self, key: int) -> None:
        """Drop a sequence after the questions that were put before."""
        self._thread.submit(self.process.forget, key)

    def _answer_next(self) -> None:
        if (question := self._turns.take()) is None:  # the others were cancelled
            return
        began_at = time.monotonic()
        try:
            masks = self.process.masks(question.key, question.grammar, question.outputs, question.guesses)
        except Exception as error:  # for the sequence
            count = 1
            question.masks.set_exception(error)
        else:
            count = len(masks)
            question.forced = self.process.forced_tokens
            question.took_s = (time.monotonic() - began_at) / count
            question.masks.set_result(masks)
        limit_s = COSTLY_BEGIN_S if self.process.has_begun else COSTLY_MASK_S
        self._answered(question, self.process.spent_s >= count * limit_s)


@dataclass(slots=True)
class _Bound:
    """One sequence's grammar. question: for the mask after `outputs` outputs; none before the first was ordered."""

    grammar: str
    key: int
    tenant: int
    lane: Lane
    outputs: int = -1
    question: Question | None = None
    was_late: bool = False  # without this mask in a step before
    is_quick: bool = False  # the mask before took at most BESIDE_OTHERS_S


class SlotGrammars:
    """`enter` and `order` with the sequences of a step, `left_out` before it is computed, then `masks` for those that
    sample. For the thread that submits, except `step_came`.
    """

    def __init__(self, model: Path, vocab: int) -> None:
        self.quick = Lane(model, vocab, False, self._answered)
        self.costly = Lane(model, vocab, True, self._answered)
        """Its process starts with its first question."""
        self.late = 0
        """Rows that sat out a step because their mask was not there."""
        self.others_wait: Callable[[Collection[int]], bool] = lambda slots: False
        """Return whether a step with other slots than these has come, so that this one must not wait."""
        self._mask_bytes = 4 * -(-vocab // 32)
        self._bound: dict[int, _Bound] = {}
        self._tenants: dict[int, int] = {}  # by slot, with and without a grammar
        self._keys = itertools.count(1)
        self._costly_until: dict[int, float] = {}  # by tenant
        self._news = threading.Condition()  # a mask is there, or a step has come; also guards the line before

    def figures(self) -> dict[str, int]:
        """Return counts since the start: fields of worker:{id}."""
        return {"late_rows": self.late, "grammars_ended": sum(lane.process.end_count for lane in self._lanes)}

    def when_ended(self, call: Callable[[], object]) -> None:
        """Have `call` called for each grammar that took too much processor time or memory."""
        for lane in self._lanes:
            lane.process.on_ended = call

    @property
    def _lanes(self) -> tuple[Lane, Lane]:
        return self.quick, self.costly

    def prepare(self) -> None:
        """Start the process, which reads the tokenizer: a second where it is large, and no step is to wait for that."""
        self.quick.prepare()

    def close(self) -> None:
        """End the processes."""
        self.clear()
        for lane in self._lanes:
            lane.close()

    def clear(self) -> None:
        """Free every slot."""
        self._tenants.clear()
        for slot in list(self._bound):
            self._drop(slot)

    def step_came(self) -> None:
        """Note that a further step waits for this one: `others_wait` may have become true. For any thread."""
        if self._bound:
            with self._news:
                self._news.notify_all()

    def free(self, slots: Int32) -> None:
        """Drop the grammars of sequences that leave their slots; no mask is computed for them any more."""
        for slot in slots.tolist():
            self._tenants.pop(slot, None)
            self._drop(slot)

    def enter(self, enters: Iterable[worker_pb2.Enter]) -> None:
        """Begin to compile the grammars of sequences that take slots."""
        for enter in enters:
            self._drop(enter.slot)
            self._tenants[enter.slot] = enter.tenant
            if grammar := enter.sampling.grammar:
                bound = self._bound[enter.slot] = _Bound(grammar, next(self._keys), enter.tenant, self.quick)
                self._order(bound, unpack(enter.tokens)[enter.prompt_tokens :])

    def order(self, chunks: Chunks, table: SlotTable) -> None:
        """Begin to compute the masks of slots that will sample, where the host knows all tokens before."""
        for slot, guesses in self._sampling(chunks):
            outputs = table.outputs(slot)
            if not outputs.size or outputs[-1] >= 0:
                self._order(self._bound[slot], outputs, guesses)

    def left_out(self, chunks: Chunks, is_idle: bool) -> list[int]:
        """Return the slots that were late before and still have no mask: the step need not compute them.

        A step of such slots alone waits for the first of the masks if the device is idle: another step's tokens would
        wait as well.
        """
        waiting = {
            slot: bound.question.masks
            for slot in (chunks.slots[chunks.samples & (chunks.lengths == 1)].tolist() if self._bound else ())
            if (bound := self._bound.get(slot)) is not None and bound.was_late and bound.question is not None
        }
        if is_idle and waiting and len(waiting) == chunks.slots.size:
            self._wait_alone(waiting)
        late = [slot for slot, masks in waiting.items() if not masks.done()]
        self.late += len(late)
        return late

    def masks(
        self, inflight: InFlightStep, previous: InFlightStep | None, table: SlotTable, may_be_late: bool
    ) -> tuple[dict[int, list[bytes]], dict[int, str], list[int]]:
        """Return, for SamplingTable.rows, the masks of each slot: of the next token and behind each draft. Return the
        errors of slots, too, and the slots that are late, none unless `may_be_late`.

        Masks behind the last drafts may be missing: a token that is drawn there is not used. The tokens that the
        grammars force are noted in `inflight`.

        previous: the step before this one, which is waited for if it has no result yet. A slot with a failed draw there
        is in none of the three: it fails with that step.
        """
        wanted: dict[int, Future[list[bytes]]] = {}
        for slot, guesses in self._sampling(inflight.chunks):
            outputs = _outputs(slot, previous, table)
            if outputs is not None:
                wanted[slot] = self._order(self._bound[slot], outputs, guesses)
        late: list[int] = []
        if wanted and may_be_late:
            if len(wanted) == inflight.chunks.slots.size:
                self._wait_alone(wanted)
            wait_for([masks for slot, masks in wanted.items() if self._bound[slot].is_quick], BESIDE_OTHERS_S)
            late = [slot for slot, masks in wanted.items() if not masks.done()]
            for slot in late:
                self._bound[slot].was_late = True
            self.late += len(late)
        elif wanted:
            wait_for(wanted.values(), TOGETHER_S)
        ready: dict[int, list[bytes]] = {}
        errors: dict[int, str] = {}
        for slot in wanted.keys() - set(late):
            if not wanted[slot].done():
                errors[slot] = f"its mask was not there within {TOGETHER_S:g} s; send it again, or a simpler grammar"
                continue
            try:
                ready[slot] = [mask[: self._mask_bytes] for mask in wanted[slot].result()]
                if (question := self._bound[slot].question) is not None and any(question.forced):
                    inflight.forced_behind[slot] = question.forced
            except NoGrammarsError as error:
                errors[slot] = str(error)
            except OrcinusError as error:
                errors[slot] = f"{NOT_FOLLOWED}: {error}"
            except JailError as error:  # a fault of the machine's, not of the grammar's
                errors[slot] = f"the process that computes masks {error}"
        return ready, errors, late

    def _sampling(self, chunks: Chunks) -> Iterator[tuple[int, Int32]]:
        """Yield the slots with a grammar that sample in these chunks, each with its drafts."""
        if not self._bound:
            return
        drafts, first = None if chunks.drafts is None else chunks.drafts.tolist(), 0
        for at, (slot, samples) in enumerate(zip(chunks.slots.tolist(), chunks.samples.tolist(), strict=True)):
            end = first + (0 if drafts is None else drafts[at])
            if samples and slot in self._bound:
                yield slot, chunks.guesses[first:end]
            first = end

    def _order(self, bound: _Bound, outputs: Int32, guesses: Int32 = NO_TOKENS) -> Future[list[bytes]]:
        """Return the masks after these outputs and guesses, which are computed once."""
        question = bound.question
        if question is None or bound.outputs != len(outputs) or not _begins(question.guesses, guesses):
            if question is not None:
                bound.is_quick = question.masks.done() and question.took_s <= BESIDE_OTHERS_S
                question.masks.cancel()
            self._choose_lane(bound)
            question = Question(bound.tenant, bound.key, bound.grammar, outputs.copy(), guesses.copy())
            bound.question, bound.outputs, bound.was_late = question, len(outputs), False
            bound.lane.ask(question)
        return question.masks

    def _choose_lane(self, bound: _Bound) -> None:
        """Move a sequence of a tenant with costly masks out of the way of other tenants, and back when it has none."""
        if self._costly_until.get(bound.tenant, 0.0) < time.monotonic():
            lane = self.quick
        elif any(tenant != bound.tenant for tenant in self._tenants.values()):
            lane = self.costly
        else:
            return
        if lane is not bound.lane:
            bound.lane.forget(bound.key)
            bound.lane = lane

    def _answered(self, question: Question, is_costly: bool) -> None:
        """Note a tenant with costly masks, and wake the step that waits for it. For the threads of the lanes."""
        now = time.monotonic()
        with self._news:
            if is_costly:
                self._costly_until = {tenant: end for tenant, end in self._costly_until.items() if end >= now}
                self._costly_until[question.tenant] = now + COSTLY_FOR_S
            self._news.notify_all()

    def _wait_alone(self, masks: dict[int, Future[list[bytes]]]) -> None:
        """Wait for the first of these slots' masks, or until a step with other slots has come."""
        with self._news:
            self._news.wait_for(
                lambda: any(mask.done() for mask in masks.values()) or self.others_wait(masks.keys()), ALONE_S
            )

    def _drop(self, slot: int) -> None:
        if (bound := self._bound.pop(slot, None)) is not None:
            if bound.question is not None:
                bound.question.masks.cancel()
            bound.lane.forget(bound.key)


def _begins(long: Int32, short: Int32) -> bool:
    """Return whether tokens begin with others."""
    return long.size >= short.size and bool((long[: short.size] == short).all())


def _outputs(slot: int, previous: InFlightStep | None, table: SlotTable) -> Int32 | None:
    """Return all outputs of a slot's sequence; None when the last of them could not be drawn."""
    outputs = table.outputs(slot)
    if not outputs.size or outputs[-1] >= 0:
        return outputs
    if previous is None or previous.sampled is None:
        return None
    sampled = previous.sampled.wait()
    row = int(np.flatnonzero(previous.sampling == slot)[0])
    if int(sampled.status[row]) != STATUS_FINE:
        return None
    return np.append(outputs[:-1], np.int32(sampled.tokens[row]))
