"""Compile and follow grammars in a process of low priority or in idle time (shared/processes/jail.py): both ends.

llguidance's fuel decides which grammars can be used, the same on any machine (shared/text/grammars.py). It counts
neither every comparison nor every byte, so processor time and memory of one question are bounded as well: a question
beyond them ends the process and itself alone. Where all grammars together take too much memory, the largest one ends.
The gateway checks grammars here, the worker gets its masks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import struct
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shared.processes.jail import (
    Jail,
    JailError,
    StarvedError,
    allocator,
    confine,
    processor_time_s,
    run_when_idle,
    runs_when_idle,
    yield_to_others,
)
from shared.text.grammars import GrammarEndedError, GrammarError, Grammars, NoGrammarsError, allows, reason

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger("orcinus.grammars")

QUESTION_S = 2.0
"""Processor time of one question. What the fuel allows takes a tenth of it, so it decides only where the fuel fails."""
PATIENCE = 15
"""An answer may take so many times its processor time: the process gets what others leave."""
JUDGE_AFTER_S, WAKE_S = 1.0, 0.02
"""The processor time of a process in idle time is compared with the wait of its questions each time that this reaches
JUDGE_AFTER_S; the first WAKE_S of a question do not count. The process starves where the wait is longer than PATIENCE
times the processor time.
"""
STARVED_FOR_S, MAX_STARVED_FOR_S = 60.0, 3600.0
"""Then another one has a low priority for so long, and twice as long each time that idle time is too short again."""
MEMORY_BYTES = 1 << 30
"""Of the process. The grammars that it keeps may take KEPT_SHARE of that, so that there is room for one question."""
KEPT_SHARE = 0.5
MIB = 1 << 20
MAX_QUESTION_BYTES, MAX_ANSWER_BYTES = 64 << 20, 1 << 20
LOOK_AHEAD_S = 0.001
"""Processor time of a question, without that of compiling, from which on no further guess is followed."""
CHECK, BEGIN, GO_ON = b"C", b"B", b"G"
"""Questions: compile a grammar; the masks behind outputs of a grammar, or behind further outputs of a sequence."""
TAKEN, REFUSED, ENDED, NO_GRAMMARS, UNKNOWN = b"T", b"R", b"E", b"N", b"U"
SPENT = struct.Struct("<d")
"""Before each answer: its processor time in seconds."""
HEAD = struct.Struct("<c?QIII")
"""Of a question: kind, whether the process is to run in idle time from now on, key of the sequence, numbers of outputs,
of guesses and of keys to forget; then these, and the grammar."""
COUNT = struct.Struct("<I")
"""Of the masks of an answer, before the rest: for each mask the number of forced tokens, these tokens, the masks."""
MAX_FORCED = 16
"""Forced tokens behind one place."""
NO_TOKENS: npt.NDArray[np.int32] = np.zeros(0, np.int32)


class IdleTime:
    """Decides whether a process computes in idle time: as long as its questions get enough of it."""

    def __init__(self, jail: Jail) -> None:
        self._jail = jail
        self._starved_until = 0.0
        self._starvations = 0  # one after the other
        self._judged_pid, self._judged_cpu_s = 0, 0.0  # the process that was judged last, its processor time then
        self._waited_s, self._waits_since = 0.0, 0.0  # wait of the questions since then, without that of the last one

    def begin_question(self) -> bool:
        """Return whether a question is to be answered in idle time."""
        pid = self._jail.pid
        if pid is None or time.monotonic() < self._starved_until:
            return False  # a new process has its tokenizer to read first
        if pid != self._judged_pid:
            self._judge(pid)
        self._waits_since = time.monotonic()
        return True

    def end_question(self) -> None:
        """Count the wait for an answer."""
        self._waited_s = self._wait_s()

    def is_starved(self) -> bool:
        """Return whether the process has got too little idle time since it was judged."""
        waited_s, pid = self._wait_s(), self._jail.pid
        if waited_s < JUDGE_AFTER_S or pid is None:
            return False
        self._waits_since = time.monotonic() - WAKE_S
        if PATIENCE * self._judge(pid) >= waited_s:
            self._starvations = 0
            return False
        return runs_when_idle(pid) and self._jail.pid == pid  # not one that has died meanwhile

    def give_up(self) -> float:
        """Take no idle time for some seconds, and return how many."""
        for_s = min(STARVED_FOR_S * 2.0**self._starvations, MAX_STARVED_FOR_S)
        self._starved_until = time.monotonic() + for_s
        self._starvations += for_s < MAX_STARVED_FOR_S
        return for_s

    def _wait_s(self) -> float:
        """Return how long questions have waited since the process was judged."""
        return self._waited_s + max(0.0, time.monotonic() - self._waits_since - WAKE_S)

    def _judge(self, pid: int) -> float:
        """Return the processor time since the process was judged, and begin anew; infinity for one that has died."""
        before_s = self._judged_cpu_s if pid == self._judged_pid else 0.0
        self._waited_s = 0.0
        try:
            self._judged_pid, self._judged_cpu_s = pid, processor_time_s(pid)
        except OSError:
            return math.inf
        return self._judged_cpu_s - before_s


class GrammarProcess:
    """The near end. Methods block; one question at a time is served. Keys of sequences are used once."""

    def __init__(
        self, model: Path, vocab_size: int, memory_bytes: int = MEMORY_BYTES, in_idle_time: bool = False
    ) -> None:
        """in_idle_time: compute in the idle time of the cores while there is enough of it; else at a low priority."""
        limits = {"seconds": QUESTION_S, "bytes": memory_bytes, "yields_first": in_idle_time}
        first = json.dumps({"model": str(model.resolve()), "vocab": vocab_size, **limits}).encode()
        self._memory_bytes = memory_bytes
        self.end_count = 0
        """Sequences and grammars that took too much processor time or memory."""
        self.spent_s = 0.0
        """Processor time of the last masks; of those that ended the process its limit."""
        self.has_begun = False
        """The last masks were the far end's first ones of their sequence, which had the grammar to compile."""
        self.forced_tokens: list[list[int]] = []
        """At the place of each of the last masks, tokens of the text that the grammar forces there, if any.

        Only at the last place: before it the guesses are such tokens. All but the first are only likely to come.
        """
        self.on_ended: Callable[[], object] = lambda: None
        self._fed_tokens: dict[int, int] = {}  # outputs that the far end has taken, by key
        self._forgotten: list[int] = []
        self.jail = Jail("shared.text.grammar_process", first, PATIENCE * QUESTION_S, MAX_ANSWER_BYTES)
        self._idle_time = IdleTime(self.jail) if in_idle_time else None

    def check(self, grammar: str) -> None:
        """Compile a grammar. Raise GrammarError, or JailError where it was the machine that failed."""
        _raise(self._ask(CHECK, grammar=grammar))

    def masks(
        self, key: int, grammar: str, outputs: npt.NDArray[np.int32], guesses: npt.NDArray[np.int32] = NO_TOKENS
    ) -> list[bytes]:
        """Return the masks behind the outputs of a sequence and behind guesses of what comes then.

        outputs: those of the sequence's last question and further ones. Raise as `check`. Masks of the last guesses may
        be missing: behind one that the grammar forbids, and where they would take long. A process that was started
        again is given all of the outputs.
        """
        self.spent_s, self.has_begun, self.forced_tokens = 0.0, False, []
        fed = self._fed_tokens.get(key)
        answer = UNKNOWN if fed is None else self._ask(GO_ON, key, outputs[fed:], guesses)
        if answer == UNKNOWN:
            self.has_begun = True
            answer = self._ask(BEGIN, key, outputs, guesses, grammar)
        if answer[:1] == ENDED:
            self._count_ended()
        _raise(answer)
        self._fed_tokens[key] = len(outputs)
        masks, self.forced_tokens = read_masks(answer[1:])
        return masks

    def forget(self, key: int) -> None:
        """Let the far end drop a sequence with the next question."""
        if self._fed_tokens.pop(key, None) is not None:
            self._forgotten.append(key)

    def close(self) -> None:
        """End the process."""
        self.jail.close()

    def _ask(
        self,
        kind: bytes,
        key: int = 0,
        outputs: npt.NDArray[np.int32] = NO_TOKENS,
        guesses: npt.NDArray[np.int32] = NO_TOKENS,
        grammar: str = "",
    ) -> bytes:
        forgotten, self._forgotten = np.array(self._forgotten, "<u8"), []
        tokens = np.concatenate([outputs, guesses]).astype("<i4")
        counts = len(outputs), len(guesses), len(forgotten)
        rest = tokens.tobytes() + forgotten.tobytes() + grammar.encode()

        def ask(idle_time: IdleTime | None) -> bytes:
            question = HEAD.pack(kind, idle_time is not None, key, *counts) + rest
            return self.jail.ask(question, is_starved=idle_time.is_starved) if idle_time else self.jail.ask(question)

        try:
            answer = self._ask_when_idle(ask)
        except JailError as error:
            if error.signal in (0, signal.SIGKILL):  # no answer in time, no process, or the machine's memory
                raise
            self.spent_s = QUESTION_S
            raise self._end_error(error) from error
        self.spent_s += SPENT.unpack_from(answer)[0]
        return answer[SPENT.size :]

    def _ask_when_idle(self, ask: Callable[[IdleTime | None], bytes]) -> bytes:
        """Return the answer to a question; it begins anew in another process where this one gets no time."""
        idle_time = self._idle_time
        if idle_time is None or not idle_time.begin_question():
            return ask(None)
        try:
            answer = ask(idle_time)
        except StarvedError:
            for_s = idle_time.give_up()
            log.warning("too little idle time for costly grammars: they have a low priority for %g s", for_s)
            return ask(None)
        idle_time.end_question()
        return answer

    def _count_ended(self) -> None:
        self.end_count += 1
        self.on_ended()

    def _end_error(self, error: JailError) -> GrammarEndedError:
        self._count_ended()
        log.warning("the process of grammars %s over one; that one is refused", error)
        return GrammarEndedError(
            f"it takes more than {QUESTION_S:g} s of processor time or {self._memory_bytes >> 20} MiB"
        )


def read_masks(answer: bytes) -> tuple[list[bytes], list[list[int]]]:
    """Return the masks of an answer and the tokens that are forced at the place of each."""
    (count,) = COUNT.unpack_from(answer)
    counts = np.frombuffer(answer, "<i4", count, COUNT.size)
    first = COUNT.size + counts.nbytes
    tokens = np.frombuffer(answer, "<i4", counts.sum(), first)
    first += tokens.nbytes
    size = (len(answer) - first) // count
    masks = [answer[at : at + size] for at in range(first, len(answer), size)]
    return masks, [part.tolist() for part in np.split(tokens, np.cumsum(counts)[:-1])]


def _raise(answer: bytes) -> None:
    if answer[:1] != TAKEN:
        text = answer[1:].decode(errors="replace")
        kinds = {NO_GRAMMARS: NoGrammarsError, ENDED: GrammarEndedError}
        raise kinds.get(answer[:1], GrammarError)(text)


class SequenceMatchers:
    """The far end's sequences: grammar, matcher and outputs by key.

    Copies of one grammar share most of its memory, the states of its lexer, so memory is counted by grammar.
    """

    def __init__(self, grammars: Grammars, kept_bytes: int) -> None:
        """kept_bytes: of all of malloc's memory; beyond it the largest grammar ends, with its sequences."""
        self._grammars = grammars
        self._kept_bytes = kept_bytes
        self._matchers: dict[int, tuple[str, LLMatcher, list[int]]] = {}
        self._end_reasons: dict[int, str] = {}  # sequences of grammars that ended in a question of another one: why
        self._sizes: dict[str, int] = {}  # bytes by grammar, of those with a sequence or in the cache
        self._allocated_bytes, self._trim = allocator()
        self._guess_until = 0.0  # processor time of the process from which on no guess is followed

    def answer(self, question: bytes) -> bytes:
        """Return the answer without its first letter. Raise KeyError for an unknown sequence, or GrammarError."""
        kind, _is_idle, key, count, guessed, forgotten = HEAD.unpack_from(question)
        tokens = np.frombuffer(question, "<i4", count + guessed, HEAD.size).tolist()
        end = HEAD.size + 4 * len(tokens)
        for gone in np.frombuffer(question, "<u8", forgotten, end).tolist():
            self._end_reasons.pop(gone, None)
            self._leave(gone)
        grammar = question[end + 8 * forgotten :].decode()
        if kind == CHECK:
            self._grammars.fresh(grammar)
            return b""
        if key in self._end_reasons:
            raise GrammarEndedError(self._end_reasons.pop(key))
        before = self._allocated_bytes()
        try:
            if kind == BEGIN:
                self._matchers[key] = grammar, self._grammars.matcher(grammar), []
            self._guess_until = time.thread_time() + LOOK_AHEAD_S
            grammar = self._matchers[key][0]
            masks = [self._advance(key, tokens[:count])]
            forced_tokens = self._look_ahead(key, tokens[count:], masks)
        except BaseException:
            self._leave(key)
            raise
        finally:
            if grammar:
                self._sizes[grammar] = self._sizes.get(grammar, 0) + max(0, self._allocated_bytes() - before)
        self._keep_within()
        if key not in self._matchers:
            raise GrammarEndedError(self._end_reasons.pop(key))
        counts, ids = [len(some) for some in forced_tokens], [token for some in forced_tokens for token in some]
        return COUNT.pack(len(masks)) + np.array(counts + ids, "<i4").tobytes() + b"".join(masks)

    def _leave(self, key: int) -> None:
        """Drop a sequence."""
        before = self._allocated_bytes()
        grammar = self._matchers.pop(key, ("",))[0]
        if grammar in self._sizes:
            self._sizes[grammar] = max(0, self._sizes[grammar] - max(0, before - self._allocated_bytes()))
        if len(self._sizes) > 2 * (len(self._matchers) + 64):
            self._forget_sizes()

    def _forget_sizes(self) -> None:
        """Forget the sizes of grammars that nothing has any more."""
        followed = {grammar for grammar, _, _ in self._matchers.values()}
        for grammar in [name for name in self._sizes if name not in followed and not self._grammars.keeps(name)]:
            del self._sizes[grammar]

    def _keep_within(self) -> None:
        """End the largest grammar, with all its sequences, until the others are within the bound.

        Those that only the cache keeps go first.
        """
        if self._allocated_bytes() <= self._kept_bytes:
            return
        self._forget_sizes()
        while self._sizes and (total := self._allocated_bytes()) > self._kept_bytes:
            followed = {grammar for grammar, _, _ in self._matchers.values()}
            unused = self._sizes.keys() - followed
            largest = max(unused or followed & self._sizes.keys(), key=self._sizes.__getitem__)
            size = self._sizes.pop(largest)
            reason = (
                f"it takes {size / MIB:.1f} MiB, the most of all grammars; together they take {total / MIB:.1f} MiB, "
                f"the limit is {self._kept_bytes / MIB:.1f}"
            )
            self._grammars.forget(largest)
            for key in [key for key, (grammar, _, _) in self._matchers.items() if grammar == largest]:
                del self._matchers[key]
                self._end_reasons[key] = reason
        self._trim()

    def _advance(self, key: int, outputs: list[int]) -> bytes:
        grammar, matcher, before = self._matchers[key]
        before += outputs
        if mask := self._mask(matcher, outputs):
            return mask
        # Copies of one grammar share the states of its lexer, and others may have used them up: once more, alone.
        self._grammars.forget(grammar)
        matcher = self._grammars.fresh(grammar)
        if not (mask := self._mask(matcher, before)):
            raise GrammarError(reason(matcher))
        self._matchers[key] = grammar, matcher, before
        return mask

    def _look_ahead(self, key: int, guesses: list[int], masks: list[bytes]) -> list[list[int]]:
        """Append the masks behind guesses to the one before them, as far as they are allowed and quickly found.

        Return the tokens that are forced at the place of each mask: at the last one, with the time that is left. Before
        it, a mask with a forced token allows no other, so the guess was this token.
        """
        forced_tokens: list[list[int]] = [[]]
        if not guesses and not _allows_one(masks[0]):
            return forced_tokens
        matcher = self._matchers[key][1].deep_copy()
        for guess in guesses[: MAX_ANSWER_BYTES // (len(masks[0]) + 4 * MAX_FORCED) - 2]:
            if matcher.is_stopped() or not allows(masks[-1], guess) or time.thread_time() > self._guess_until:
                break
            if not (mask := self._mask(matcher, [guess])):
                return forced_tokens  # what failed is met again when the guess has come true
            masks.append(mask)
            forced_tokens.append([])
        if _allows_one(masks[-1]) and not matcher.is_stopped() and time.thread_time() <= self._guess_until:
            forced_tokens[-1] = matcher.compute_ff_tokens()[:MAX_FORCED]  # of the text that the mask was computed with
        return forced_tokens

    def _mask(self, matcher: LLMatcher, tokens: list[int]) -> bytes:
        """Return the mask behind further tokens; empty when the matcher has failed.

        A complete grammar takes none: what was planned ahead behind the end of text counts for nothing.
        """
        if not matcher.is_stopped():
            matcher.consume_tokens(tokens)
        mask = self._grammars.mask(matcher)
        return b"" if matcher.is_error() else mask


def _allows_one(mask: bytes) -> bool:
    """Return whether a mask allows one token alone, as all do where llguidance forces a text."""
    return int.from_bytes(mask, "little").bit_count() == 1


def reply_to(grammars: SequenceMatchers, question: bytes) -> bytes:
    """Return the frame that answers a question."""
    try:
        return TAKEN + grammars.answer(question)
    except KeyError:
        return UNKNOWN
    except NoGrammarsError as error:
        return NO_GRAMMARS + str(error).encode()
    except GrammarEndedError as error:
        return ENDED + str(error).encode()
    except GrammarError as error:
        return REFUSED + str(error).encode()
    except MemoryError:
        return REFUSED + b"it needs more memory than there may be for it"


def main() -> int:
    """Serve the socket on standard input until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which may still have requests
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process: a handler would wait for llguidance to return
    with Connection(sys.stdin.fileno()) as connection, contextlib.suppress(EOFError, BrokenPipeError):
        settings = json.loads(connection.recv_bytes(1 << 20))
        if settings["yields_first"]:  # no step waits for its tokenizer
            yield_to_others()
        grammars = SequenceMatchers(_open(settings), int(KEPT_SHARE * settings["bytes"]))
        if not settings["yields_first"]:
            yield_to_others()
        confine(settings["bytes"])
        while True:
            question = connection.recv_bytes(MAX_QUESTION_BYTES)
            if HEAD.unpack_from(question)[1]:
                run_when_idle()
            signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
            began_at = time.thread_time()
            answer = reply_to(grammars, question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(SPENT.pack(time.thread_time() - began_at) + answer)
    return 0


def _open(settings: dict[str, Any]) -> Grammars:
    grammars = Grammars(Path(settings["model"]), settings["vocab"])
    with contextlib.suppress(NoGrammarsError):  # said again at each question
        grammars.prepare()
        grammars.fresh('{"grammars": [{"json_schema": {"type": "object"}}]}')  # what is imported late
    return grammars


if __name__ == "__main__":
    sys.exit(main())
