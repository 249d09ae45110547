"""Encode texts in a process apart, with bounds of time and memory: a tokenizer is a program that comes with a model.

The service's end is `Encoders` (tokenizer.py), which starts this module in a jail (shared/processes/jail.py). The first
frame is IDLE and the checked JSON of the tokenizer; each further one is a question, QUESTION and the texts, and is
answered by TAKEN or REFUSED. A text that takes more processor time or memory ends the process; the next question starts
another.
"""

from __future__ import annotations

import contextlib
import resource
import select
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from shared.processes.jail import allocator, confine
from shared.text.tokenizer import (
    IDLE,
    MAX_NORMALIZED_BYTES,
    MEMORY_BYTES,
    QUESTION,
    REFUSED,
    TAKEN,
    TokenizerError,
    encode,
    parse,
)
from shared.wire.columns import pack

KEPT_BYTES = 64 * 1024
"""Behind a longer text or answer, free memory goes back to the system."""


def main() -> int:
    """Serve the socket on standard input until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which may still have requests
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process: a handler would wait for the library to return
    _, trim = allocator()
    with Connection(sys.stdin.fileno()) as connection, contextlib.suppress(EOFError, BrokenPipeError):
        first = connection.recv_bytes()
        (idle_s,) = IDLE.unpack_from(first)
        tokenizer = parse(first[IDLE.size :].decode())
        del first
        tokenizer.encode_batch_fast(["a"])  # what the library makes at its first text
        trim()
        confine(_data_bytes() + MEMORY_BYTES)
        while True:
            # `poll` of a connection needs a file more than `confine` leaves.
            if not select.select([connection], [], [], idle_s or None)[0]:
                signal.raise_signal(signal.SIGKILL)  # a question that comes right now is asked again
            question = connection.recv_bytes(QUESTION.size + MAX_NORMALIZED_BYTES)
            seconds, special, is_pair, end = QUESTION.unpack_from(question)
            end += QUESTION.size
            texts = [part.decode("utf-8", "surrogatepass") for part in (question[QUESTION.size : end], question[end:])]
            ids: list[int] = []
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                ids, segment = encode(tokenizer, texts[0], texts[1] if is_pair else None, special)
                answer = TAKEN + pack([segment, *ids])
            except TokenizerError as error:
                answer = REFUSED + str(error).encode("utf-8", "replace")
            except MemoryError:
                answer = REFUSED + b"it needs too much memory; send a shorter text"
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(answer)
            if max(len(question), len(answer)) > KEPT_BYTES:
                del question, texts, answer, ids
                trim()
    return 0


def _data_bytes() -> int:
    """Return what this process has of what RLIMIT_DATA counts."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except (OSError, IndexError):  # no Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    sys.exit(main())
