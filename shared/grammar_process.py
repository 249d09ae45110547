"""Compile grammars and compute masks in a process of the lowest priority (shared/jail.py): both ends.

llguidance's fuel decides which grammars can be used, the same on any machine (shared/grammars.py). It counts neither
every comparison nor every byte, so processor time and memory of one question are bounded as well: a question beyond
them ends the process and itself alone. The gateway checks grammars here, the worker follows its sequences here.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from shared.errors import OrcinusError
from shared.grammars import GrammarEndedError, GrammarError, Grammars, NoGrammarsError, reason
from shared.jail import Jail, JailError, confine, yield_to_all

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger("orcinus.grammars")

QUESTION_S = 2.0
"""Processor time of one question. What the fuel allows takes a tenth of it, so it decides only where the fuel fails."""
PATIENCE = 15
"""An answer may take so many times its processor time: the process gets what others leave."""
MEMORY_BYTES = 1 << 30
MOST_MASK_BYTES = 1 << 20
MASK, REFUSED, NO_GRAMMARS = b"M", b"R", b"N"


@dataclass(slots=True, eq=False)
class Followed:
    """A sequence that the process follows. outputs: tokens that it has produced so far; they only grow."""

    number: int
    grammar: str
    outputs: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


class GrammarProcess:
    """The near end. Methods block; `masks` is for one thread."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        first = {"model": str(model.resolve()), "vocab": vocab_size, "seconds": QUESTION_S, "bytes": MEMORY_BYTES}
        self._first = first
        self.ended = 0
        """Times that a question ended the process."""
        self._sent: dict[int, int] = {}  # outputs that the process has of each sequence
        self._pid: int | None = None
        self._forgotten: list[int] = []
        self.jail = Jail("shared.grammar_process", orjson.dumps(first), PATIENCE * QUESTION_S, MOST_MASK_BYTES)

    def check(self, grammar: str) -> None:
        """Compile a grammar. Raise GrammarError."""
        try:
            answer = self.jail.ask(orjson.dumps([{"grammar": grammar}]))
        except JailError as error:
            raise self._ended(error) from error
        _raise(answer)

    def masks(self, sequences: Sequence[Followed]) -> Iterator[bytes | OrcinusError]:
        """Yield for each sequence, in order, the mask behind its outputs, or why there is none."""
        left = list(sequences)
        while left:
            if self.jail.pid is None or self.jail.pid != self._pid:
                self._sent.clear()
                self._forgotten.clear()
            questions = [self._question(sequence) for sequence in left]
            questions[0]["forget"], self._forgotten = self._forgotten, []
            try:
                for answer in self.jail.ask_all(orjson.dumps(questions), len(questions)):
                    self._pid = self.jail.pid
                    sequence = left.pop(0)
                    self._sent[sequence.number] = sequence.outputs.size
                    try:
                        _raise(answer)
                    except OrcinusError as error:
                        yield error
                    else:
                        yield answer[1:]
            except JailError as error:
                self._pid = None
                left.pop(0)
                yield self._ended(error)

    def forget(self, number: int) -> None:
        """Let the process forget a sequence, with the next question."""
        if self._sent.pop(number, None) is not None:
            self._forgotten.append(number)

    def prepare(self) -> None:
        """Start the process, which reads the tokenizer."""
        with contextlib.suppress(OrcinusError):
            self.check('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}')

    def close(self) -> None:
        """End the process."""
        self.jail.close()

    def _question(self, sequence: Followed) -> dict[str, Any]:
        sent = self._sent.get(sequence.number)
        question = {"number": sequence.number, "tokens": sequence.outputs[sent or 0 :].tolist()}
        return question if sent is not None else question | {"grammar": sequence.grammar}

    def _ended(self, error: JailError) -> GrammarEndedError:
        self.ended += 1
        log.warning("the process that follows grammars %s over one; that one fails", error)
        return GrammarEndedError(f"it takes more than {QUESTION_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB")


def _raise(answer: bytes) -> None:
    if answer[:1] != MASK:
        text = answer[1:].decode(errors="replace")
        raise NoGrammarsError(text) if answer[:1] == NO_GRAMMARS else GrammarError(text)


class Matchers:
    """The far end: matchers of the sequences by number."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._followed: dict[int, tuple[str, LLMatcher, list[int]]] = {}

    def answer(self, question: dict[str, Any]) -> bytes:
        """Return the frame that answers a question."""
        for number in question.get("forget", ()):
            self._followed.pop(number, None)
        try:
            if "number" not in question:
                self._grammars.matcher(question["grammar"])
                return MASK
            return MASK + self._mask(question)
        except NoGrammarsError as error:
            return NO_GRAMMARS + str(error).encode()
        except GrammarError as error:
            return REFUSED + str(error).encode()

    def _mask(self, question: dict[str, Any]) -> bytes:
        number, tokens = question["number"], question["tokens"]
        if (grammar := question.get("grammar")) is not None:
            self._followed[number] = grammar, self._grammars.matcher(grammar), []
        if number not in self._followed:  # its grammar was refused before
            raise GrammarError("it cannot be used")
        grammar, matcher, outputs = self._followed[number]
        outputs += tokens
        if mask := _advance(matcher, tokens):
            return mask
        # Copies of one grammar share the states of its lexer, and others may have used them up: once more, alone.
        self._grammars.forget(grammar)
        matcher = self._grammars.fresh(grammar)
        self._followed[number] = grammar, matcher, outputs
        if not (mask := _advance(matcher, outputs)):
            raise GrammarError(reason(matcher))
        return mask


def _advance(matcher: LLMatcher, tokens: list[int]) -> bytes:
    """Return the mask behind further tokens; empty when the matcher has failed.

    A complete grammar takes none: what was planned ahead behind the end of text counts for nothing.
    """
    if not matcher.is_stopped():
        matcher.consume_tokens(tokens)
    mask = matcher.compute_bitmask()
    return b"" if matcher.is_error() else mask


def main() -> int:
    """Serve the socket on standard input until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which may still have requests
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process: a handler would wait for llguidance to return
    with Connection(sys.stdin.fileno()) as connection, contextlib.suppress(EOFError, BrokenPipeError):
        settings = orjson.loads(connection.recv_bytes(1 << 20))
        yield_to_all()
        matchers = Matchers(_opened(settings))
        confine(settings["bytes"])
        while True:
            for question in orjson.loads(connection.recv_bytes(1 << 30)):
                signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
                answer = matchers.answer(question)
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.send_bytes(answer)
    return 0


def _opened(settings: dict[str, Any]) -> Grammars:
    grammars = Grammars(Path(settings["model"]), settings["vocab"])
    with contextlib.suppress(NoGrammarsError):  # said again at each question
        grammars.prepare()
        grammars.fresh('{"grammars": [{"json_schema": {"type": "object"}}]}')  # what is imported late
    return grammars


if __name__ == "__main__":
    sys.exit(main())
