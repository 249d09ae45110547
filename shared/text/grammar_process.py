"""Compile grammars in a process of low priority (shared/processes/jail.py): both ends.

llguidance's fuel decides which grammars can be used, the same on any machine (shared/text/grammars.py). It counts
neither every comparison nor every byte, so processor time and memory of one question are bounded as well: a question
beyond them ends the process and itself alone. The gateway checks grammars here.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson

from shared.processes.jail import Jail, JailError, confine, yield_to_others
from shared.text.grammars import GrammarEndedError, GrammarError, Grammars, NoGrammarsError

log = logging.getLogger("orcinus.grammars")

QUESTION_S = 2.0
"""Processor time of one question. What the fuel allows takes a tenth of it, so it decides only where the fuel fails."""
PATIENCE = 15
"""An answer may take so many times its processor time: the process gets what others leave."""
MEMORY_BYTES = 1 << 30
MOST_QUESTION_BYTES, MOST_ANSWER_BYTES = 64 << 20, 1 << 16
TAKEN, REFUSED, NO_GRAMMARS = b"T", b"R", b"N"


class GrammarProcess:
    """The near end. Methods block; one question at a time is served."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        first = {"model": str(model.resolve()), "vocab": vocab_size, "seconds": QUESTION_S, "bytes": MEMORY_BYTES}
        self.ended = 0
        """Times that a question ended the process."""
        self.jail = Jail("shared.text.grammar_process", orjson.dumps(first), PATIENCE * QUESTION_S, MOST_ANSWER_BYTES)

    def check(self, grammar: str) -> None:
        """Compile a grammar. Raise GrammarError, or JailError where it was the machine that failed."""
        try:
            answer = self.jail.ask(grammar.encode())
        except JailError as error:
            if error.signal in (0, signal.SIGKILL):  # no answer in time, no process, or the machine's memory
                raise
            raise self._ended(error) from error
        _raise(answer)

    def close(self) -> None:
        """End the process."""
        self.jail.close()

    def _ended(self, error: JailError) -> GrammarEndedError:
        self.ended += 1
        log.warning("the process that compiles grammars %s over one; that one is refused", error)
        return GrammarEndedError(f"it takes more than {QUESTION_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB")


def _raise(answer: bytes) -> None:
    if answer[:1] != TAKEN:
        text = answer[1:].decode(errors="replace")
        raise NoGrammarsError(text) if answer[:1] == NO_GRAMMARS else GrammarError(text)


def _answer(grammars: Grammars, grammar: str) -> bytes:
    """Return the frame that answers a question."""
    try:
        grammars.fresh(grammar)
    except NoGrammarsError as error:
        return NO_GRAMMARS + str(error).encode()
    except GrammarError as error:
        return REFUSED + str(error).encode()
    except MemoryError:
        return REFUSED + f"it needs more than {MEMORY_BYTES >> 20} MiB".encode()
    return TAKEN


def main() -> int:
    """Serve the socket on standard input until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which may still have requests
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process: a handler would wait for llguidance to return
    with Connection(sys.stdin.fileno()) as connection, contextlib.suppress(EOFError, BrokenPipeError):
        settings = orjson.loads(connection.recv_bytes(1 << 20))
        grammars = _opened(settings)
        yield_to_others()
        confine(settings["bytes"])
        while True:
            grammar = connection.recv_bytes(MOST_QUESTION_BYTES).decode()
            signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
            answer = _answer(grammars, grammar)
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
