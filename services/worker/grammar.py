"""The grammars of the sequences in the slots: which ids each next token may have.

A matcher is made when its sequence enters, in a separate thread, by replaying the outputs that came with it: a
preemption or a failover needs nothing else. Just before a row is sampled its matcher is fed the tokens since; where the
last of them is still the device's secret, that step is waited for while the forward pass runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kernels.ops import STATUS_FINE, Int32
from protos import worker_pb2
from services.worker.in_flight import InFlightStep
from services.worker.slots import SlotTable
from shared.columns import unpack
from shared.errors import OrcinusError
from shared.text.grammars import NOT_FOLLOWED, GrammarError, Grammars, NoGrammarsError, reason

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger("orcinus.worker")

COMPILE_S = 5.0
"""A step waits at most so long for the grammars that entered with it; a sequence with a late grammar fails alone. The
gateway has compiled each of them before, within bounds that are a fraction of a second."""


@dataclass(slots=True)
class _Bound:
    """One sequence's grammar. fed: how many of its outputs the matcher has consumed."""

    grammar: str
    matcher: Future[LLMatcher]
    fed: int


class SlotGrammars:
    """`enter` with the sequences of a step, then `masks` for those that sample. Used by the thread that submits."""

    def __init__(self, grammars: Grammars, vocab: int) -> None:
        self._grammars = grammars
        self._mask_bytes = 4 * -(-vocab // 32)
        self._bound: dict[int, _Bound] = {}
        self._compiling = ThreadPoolExecutor(2, "grammars")

    def prepare(self) -> None:
        """Begin to read the tokenizer, which takes a second where it is large: no step is to wait for that."""
        self._compiling.submit(self._prepare)

    def _prepare(self) -> None:
        try:
            self._grammars.prepare()
        except OrcinusError as error:
            log.info("%s", error)

    def clear(self) -> None:
        """Free every slot."""
        self._bound.clear()

    def enter(self, enters: Iterable[worker_pb2.Enter]) -> None:
        """Begin to compile the grammars of sequences that take slots."""
        for enter in enters:
            self._bound.pop(enter.slot, None)
            if grammar := enter.sampling.grammar:
                outputs = unpack(enter.tokens)[enter.prompt_tokens :]
                made = self._compiling.submit(self._make, grammar, outputs)
                self._bound[enter.slot] = _Bound(grammar, made, len(outputs))

    def masks(
        self, inflight: InFlightStep, previous: InFlightStep | None, table: SlotTable
    ) -> tuple[dict[int, bytes], dict[int, str]]:
        """Return by row of inflight.sampling the ids that its token may have, and by slot its error.

        A row behind a draft that the grammar does not allow has no mask: no token of it counts.

        previous: the step before this one, which may still be out. A slot with a failed draw there has neither: it
        fails with that step. Wait for that step and for grammars that entered just now.
        """
        found: dict[int, bytes] = {}
        wrong: dict[int, str] = {}
        until = time.monotonic() + COMPILE_S
        chunks = inflight.chunks
        draws, drafts = chunks.draws.tolist(), iter(chunks.guesses.tolist())
        row = 0
        for slot, drawn in zip(chunks.slots[chunks.samples].tolist(), draws, strict=True) if self._bound else ():
            first, row = row, row + drawn
            guesses = [next(drafts) for _ in range(drawn - 1)]
            if (bound := self._bound.get(slot)) is None:
                continue
            outputs = _outputs(slot, previous, table)
            if outputs is None:
                continue
            try:
                found[first] = self._mask(bound, outputs, until)
                if guesses:
                    behind = self._behind(bound.matcher.result(), guesses)
                    found |= {first + 1 + i: mask for i, mask in enumerate(behind)}
            except TimeoutError:
                wrong[slot] = f"the grammar was not compiled within {COMPILE_S:.0f} s"
            except NoGrammarsError as error:
                wrong[slot] = str(error)
            except OrcinusError as error:
                wrong[slot] = f"{NOT_FOLLOWED}: {error}"
        return found, wrong

    def _mask(self, bound: _Bound, outputs: Int32, until: float) -> bytes:
        """Return the mask after these outputs. Raise TimeoutError or OrcinusError."""
        matcher = bound.matcher.result(max(0.0, until - time.monotonic()))
        mask = _advance(matcher, outputs[bound.fed :])
        if not mask:
            # Copies of one grammar share the states of its lexer, and others may have used them up: once more, alone.
            self._grammars.forget(bound.grammar)
            matcher = self._grammars.fresh(bound.grammar)
            bound.matcher = Future()
            bound.matcher.set_result(matcher)
            if not (mask := _advance(matcher, outputs)):
                raise GrammarError(reason(matcher))
        bound.fed = len(outputs)
        return mask[: self._mask_bytes]

    def _behind(self, matcher: LLMatcher, guesses: list[int]) -> list[bytes]:
        """Return the masks behind the first guess, the first two and so on, as far as the grammar allows them."""
        masks: list[bytes] = []
        for guess in guesses:
            if matcher.is_stopped() or not matcher.try_consume_tokens([guess]):
                break
            masks.append(matcher.compute_bitmask()[: self._mask_bytes])
        if masks and not matcher.is_error():
            matcher.rollback(len(masks))
        if matcher.is_error():
            raise GrammarError(reason(matcher))
        return masks

    def _make(self, grammar: str, outputs: Int32) -> LLMatcher:
        """Return a matcher that has consumed `outputs`; the mask shows later whether they fit."""
        matcher = self._grammars.matcher(grammar)
        matcher.consume_tokens(outputs.tolist())
        return matcher


def _advance(matcher: LLMatcher, tokens: Int32) -> bytes:
    """Return the mask behind further tokens; empty when the matcher has failed.

    A complete grammar takes none: what was planned ahead behind the end of text counts for nothing.
    """
    if not matcher.is_stopped():
        matcher.consume_tokens(tokens.tolist())
    mask = matcher.compute_bitmask()
    return b"" if matcher.is_error() else mask


def _outputs(slot: int, previous: InFlightStep | None, table: SlotTable) -> Int32 | None:
    """Return all outputs of a slot's sequence; None when the last of them could not be drawn."""
    outputs: Int32 = table.tokens[slot, table.prompt[slot] : table.known[slot]]
    if not outputs.size or outputs[-1] >= 0:
        return outputs
    if previous is None or previous.sampled is None:
        return None
    sampled = previous.sampled.wait()
    row = int(np.flatnonzero(previous.sampling == slot)[0])
    if int(sampled.status[row]) != STATUS_FINE:
        return None
    return np.append(outputs[:-1], np.int32(sampled.tokens[row]))
