"""Masks from the process of grammars: the same as in process, again after its end, and an end of one sequence alone."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from shared.processes import jail
from shared.processes.jail import allocator
from shared.text import grammar_process, grammars
from shared.text.grammar_process import (
    BEGIN,
    COUNT,
    ENDED,
    GO_ON,
    HEAD,
    MAX_FORCED,
    MEMORY_BYTES,
    SPENT,
    GrammarProcess,
    SequenceMatchers,
    read_masks,
    reply_to,
)
from shared.text.grammars import GrammarEndedError, GrammarError, Grammars, NoGrammarsError
from tests.support.checkpoints.tokenizers import token_ids, write_model
from tests.support.waiting import until

VOCAB = 400
PATTERN = LLMatcher.grammar_from_regex("[ab]{4}c*")
SLOW = LLMatcher.grammar_from_json_schema({"properties": {f"p{i}": {"type": "integer"} for i in range(2250)}})
"""Takes 0.1 s until its fuel is spent."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("grammars") / "m")


@pytest.fixture
def process(model: Path) -> Iterator[GrammarProcess]:
    made = GrammarProcess(model, VOCAB)
    yield made
    made.close()


def tokens(*values: int) -> Any:
    return np.array(values, np.int32)


def allowed(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def walk(process: GrammarProcess, key: int, outputs: list[int], steps: int) -> list[list[int]]:
    """Take the last allowed id of each mask; return the masks."""
    masks = []
    for _ in range(steps):
        masks.append(allowed(process.masks(key, PATTERN, tokens(*outputs))[0]))
        outputs.append(masks[-1][-1])
    return masks


def test_masks_are_those_of_a_matcher_in_process(model: Path, process: GrammarProcess) -> None:
    outputs: list[int] = []
    masks = walk(process, 1, outputs, 5)
    matcher = Grammars(model, VOCAB).matcher(PATTERN)
    for mask, token in zip(masks, outputs, strict=True):
        assert mask == allowed(matcher.compute_bitmask())
        matcher.consume_token(token)


SCHEMA = LLMatcher.grammar_from_json_schema(
    {"properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "array", "items": {"type": "integer"}}}}
)
FIXED = "the lazy dog jumps over the quick brown fox and "
WAYS = 'start: "%s" /[a-c]/ " fox"'
FREE = '%llguidance {"no_forcing": true}\n'
"""Allows a text in other tokens, too, than the tokenizer's own."""


@pytest.mark.parametrize("grammar", [SCHEMA, LLMatcher.grammar_from_lark(FREE + WAYS % FIXED)])
def test_masks_behind_guesses_are_those_of_outputs(model: Path, process: GrammarProcess, grammar: str) -> None:
    """Whatever was guessed before: 40 sequences of random ids, of which some guesses come true and some do not."""
    draw = random.Random(20261127)
    missing = compared = 0
    for key in range(1, 41):
        matcher, outputs = Grammars(model, VOCAB).matcher(grammar), tokens()
        while not matcher.is_stopped() and outputs.size < 60:
            ahead, guesses = matcher.deep_copy(), []
            for _ in range(draw.randrange(5)):
                ids = allowed(ahead.compute_bitmask()) if draw.random() < 0.9 else list(range(VOCAB))
                guesses.append(draw.choice(ids))
                if guesses[-1] not in ids or ahead.is_stopped() or not ahead.validate_tokens(guesses[-1:]):
                    break
                ahead.consume_token(guesses[-1])
            masks = process.masks(key, grammar, outputs, tokens(*guesses))
            missing += len(guesses) + 1 - len(masks)
            ahead = matcher.deep_copy()
            for mask, guess in zip(masks, [*guesses, None], strict=False):
                assert allowed(mask) == allowed(ahead.compute_bitmask())
                compared += 1
                if guess is not None and ahead.validate_tokens([guess]):
                    ahead.consume_token(guess)
            compared -= 1  # the one behind the outputs
            token = guesses[0] if len(masks) > 1 and draw.random() < 0.5 else draw.choice(allowed(masks[0]))
            matcher.consume_token(token)
            outputs = np.append(outputs, np.int32(token))
    assert missing > 0, "no guess was forbidden"
    assert compared > 100


def test_forced_tokens_are_of_the_one_text_that_is_left(model: Path, process: GrammarProcess) -> None:
    """Behind outputs in random tokens, and behind guesses of which some are forced ones and some are not."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    grammar = LLMatcher.grammar_from_lark(WAYS % FIXED)
    draw, seen = random.Random(20261127), 0
    for key in range(1, 21):
        outputs: list[int] = []
        last: list[int] = []
        while len(tokenizer.decode(outputs)) < len(FIXED):
            guesses = draw.choice([[], last[: draw.randrange(9)], [draw.randrange(VOCAB)]])
            masks = process.masks(key, grammar, tokens(*outputs), tokens(*guesses))
            forced = process.forced_tokens
            last = forced[0]
            assert len(forced) == len(masks)
            for at, some in enumerate(forced):
                text = tokenizer.decode([*outputs, *guesses[:at], *some])
                assert FIXED.startswith(text) and len(some) <= MAX_FORCED
                assert not some or some[0] in allowed(masks[at])
                seen += len(some) > 1
            outputs.append(draw.choice(allowed(masks[0])))
    assert seen > 100


def test_right_guesses_have_forced_tokens_behind_them(
    followed: SequenceMatchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "LOOK_AHEAD_S", 60.0)
    grammar = LLMatcher.grammar_from_lark(f'start: "{4 * FIXED}" /[a-z]/')
    _, forced = read_masks(reply_to(followed, question(BEGIN, 1, [], (), grammar))[1:])
    guesses: list[int] = []
    for _ in range(4):
        assert len(forced[-1]) > 1
        outputs, guesses = [*guesses, forced[-1][0]], forced[-1][1:]
        masks, forced = read_masks(reply_to(followed, question(GO_ON, 1, outputs, guesses=guesses))[1:])
        assert len(masks) == len(guesses) + 1


def test_looking_for_forced_tokens_uses_up_no_lexer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies share it: a sequence that finds it full has its grammar compiled again."""
    monkeypatch.setattr(grammar_process, "LOOK_AHEAD_S", 60.0)
    compiled: list[str] = []
    fresh = Grammars.fresh

    def counted(self: Grammars, grammar: str) -> LLMatcher:
        compiled.append(grammar)
        return fresh(self, grammar)

    monkeypatch.setattr(Grammars, "fresh", counted)
    followed = SequenceMatchers(Grammars(model, VOCAB), MEMORY_BYTES)
    outputs: list[int] = []
    grammar = LLMatcher.grammar_from_lark(FREE + "start: /a{6000}/")
    for kind in [BEGIN] + 19 * [GO_ON]:
        masks, forced = read_masks(reply_to(followed, question(kind, 1, outputs, (), grammar))[1:])
        assert not any(forced)
        outputs = [allowed(masks[0])[0]]
    assert compiled == [grammar]


def test_nothing_is_forced_where_values_begin_or_time_is_up(
    process: GrammarProcess, followed: SequenceMatchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = LLMatcher.grammar_from_lark(WAYS % FIXED)
    process.masks(1, grammar, tokens(*token_ids(FIXED)))
    assert process.forced_tokens == [[]]
    monkeypatch.setattr(grammar_process, "LOOK_AHEAD_S", 60.0)
    _, forced = read_masks(reply_to(followed, question(BEGIN, 1, [], (), grammar))[1:])
    assert len(forced[0]) > 1
    monkeypatch.setattr(grammar_process, "LOOK_AHEAD_S", 0.0)
    assert read_masks(reply_to(followed, question(BEGIN, 2, [], (), grammar))[1:])[1] == [[]]


def test_costly_masks_behind_guesses_are_left_out(followed: SequenceMatchers, monkeypatch: pytest.MonkeyPatch) -> None:
    guess = LLMatcher.grammar_from_regex("a{9}")
    (mask,), _ = read_masks(reply_to(followed, question(BEGIN, 1, [], (), guess))[1:])
    only = allowed(mask)[0]
    for limit_s, masks in ((60.0, 4), (0.0, 1)):
        monkeypatch.setattr(grammar_process, "LOOK_AHEAD_S", limit_s)
        head = HEAD.pack(GO_ON, False, 1, 0, 3, 0) + tokens(only, only, only).tobytes()
        assert COUNT.unpack_from(reply_to(followed, head), 1) == (masks,)


def test_sequences_go_on_after_the_process_was_killed(process: GrammarProcess) -> None:
    whole = walk(process, 1, [], 4)
    outputs: list[int] = []
    first = walk(process, 2, outputs, 2)
    assert process.jail.pid is not None
    os.kill(process.jail.pid, signal.SIGKILL)
    until("the process is gone", lambda: process.jail.pid is None)
    assert first + walk(process, 2, outputs, 2) == whole


def test_grammar_beyond_its_processor_time_ends_one_sequence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "QUESTION_S", 0.02)
    monkeypatch.setattr(grammar_process, "PATIENCE", 6000)  # so that processor time alone ends it
    process = GrammarProcess(model, VOCAB)
    outputs: list[int] = []
    walk(process, 1, outputs, 2)
    with pytest.raises(GrammarEndedError, match="processor time"):
        process.masks(2, SLOW, tokens())
    assert process.end_count == 1
    assert len(walk(process, 1, outputs, 2)) == 2
    process.close()


def test_outputs_that_the_grammar_forbids_are_an_error_of_that_sequence(process: GrammarProcess) -> None:
    outputs: list[int] = []
    walk(process, 1, outputs, 2)
    with pytest.raises(GrammarError):
        process.masks(2, PATTERN, tokens(0, 0, 0))
    assert len(walk(process, 1, outputs, 2)) == 2


def test_model_without_grammars_is_said_for_each_sequence(tmp_path: Path) -> None:
    process = GrammarProcess(tmp_path, VOCAB)
    with pytest.raises(NoGrammarsError, match="not available"):
        process.masks(1, PATTERN, tokens())
    process.close()


@pytest.fixture
def followed(model: Path) -> SequenceMatchers:
    return SequenceMatchers(Grammars(model, VOCAB), MEMORY_BYTES)


def question(
    kind: bytes,
    key: int,
    outputs: list[int],
    forgotten: tuple[int, ...] = (),
    grammar: str = "",
    guesses: Sequence[int] = (),
) -> bytes:
    head = HEAD.pack(kind, False, key, len(outputs), len(guesses), len(forgotten))
    return head + tokens(*outputs, *guesses).tobytes() + np.array(forgotten, "<u8").tobytes() + grammar.encode()


def test_forgotten_sequences_are_dropped(followed: SequenceMatchers) -> None:
    for key in (1, 2):
        assert reply_to(followed, question(BEGIN, key, [], (), PATTERN))[:1] == b"T"
    assert reply_to(followed, question(GO_ON, 2, [], (1,)))[:1] == b"T"
    assert reply_to(followed, question(GO_ON, 1, [])) == b"U"


def test_sequences_of_one_grammar_share_no_lexer_states(
    followed: SequenceMatchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a matcher share its lexer: one that finds it full begins with a lexer of its own."""
    monkeypatch.setattr(grammars, "LIMITS", {"max_lexer_states": 90, "verbose_errors": False})  # enough for one
    pattern = LLMatcher.grammar_from_regex("[ab ]*a[ab ]{14}c")
    draw, last = np.random.default_rng(3), {}
    for _ in range(40):
        for key in range(8):
            more = [last[key]] if key in last else []
            answer = reply_to(followed, question(GO_ON if more else BEGIN, key, more, (), "" if more else pattern))
            assert answer[:1] == b"T", answer
            last[key] = int(draw.choice(allowed(read_masks(answer[1:])[0][0])))


LARGE = LLMatcher.grammar_from_json_schema({"properties": {f"p{i}": {"type": "integer"} for i in range(400)}})
"""Takes 2 MiB."""


@pytest.fixture
def small(model: Path) -> SequenceMatchers:
    """Room for one large grammar, beside what is in use already."""
    grammars_of_model = Grammars(model, VOCAB)
    grammars_of_model.fresh(PATTERN)
    gc.collect()  # what tests before left, freed later, would be room for more
    return SequenceMatchers(grammars_of_model, allocator()[0]() + (3 << 20))


def another(name: str) -> str:
    """A small grammar: 0.1 MiB."""
    return LLMatcher.grammar_from_regex(f"{name}[ab]{{4}}c*")


def test_largest_grammar_ends_when_all_take_too_much(small: SequenceMatchers) -> None:
    """Not the last one, and not the others: the large one is told with its next question."""
    assert reply_to(small, question(BEGIN, 1, [], (), another("x")))[:1] == b"T"
    for key in (2, 3):
        assert reply_to(small, question(BEGIN, key, [], (), LARGE))[:1] == b"T"
    key = 4
    while (answer := reply_to(small, question(GO_ON, 2, [])))[:1] == b"T":
        assert reply_to(small, question(BEGIN, key, [], (), another(f"y{key}")))[:1] == b"T"
        key += 1
        assert key < 100, "no grammar ended"
    assert answer[:1] == ENDED and b"the most of all grammars" in answer
    assert reply_to(small, question(GO_ON, 3, []))[:1] == ENDED, "the same grammar's other sequence"
    for other in (1, *range(4, key)):
        assert reply_to(small, question(GO_ON, other, []))[:1] == b"T"


def test_largest_grammar_is_told_at_once_when_it_is_its_own_question(small: SequenceMatchers) -> None:
    assert reply_to(small, question(BEGIN, 1, [], (), PATTERN))[:1] == b"T"
    larger = LLMatcher.grammar_from_json_schema({"properties": {f"q{i}": {"type": "integer"} for i in range(700)}})
    assert reply_to(small, question(BEGIN, 2, [], (), larger))[:1] == ENDED
    assert reply_to(small, question(GO_ON, 2, [])) == b"U"
    assert reply_to(small, question(GO_ON, 1, []))[:1] == b"T"


def test_grammar_that_only_the_cache_keeps_goes_first(small: SequenceMatchers) -> None:
    assert reply_to(small, question(BEGIN, 1, [], (), LARGE))[:1] == b"T"
    assert reply_to(small, question(BEGIN, 2, [], (1,), PATTERN))[:1] == b"T"
    second = LLMatcher.grammar_from_json_schema({"properties": {f"q{i}": {"type": "integer"} for i in range(390)}})
    assert reply_to(small, question(BEGIN, 3, [], (), second))[:1] == b"T"
    for key in (2, 3):
        assert reply_to(small, question(GO_ON, key, []))[:1] == b"T"


def test_grammar_that_ended_for_its_memory_is_counted(process: GrammarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.jail, "ask", lambda question: SPENT.pack(0.0) + ENDED + b"it takes 2 MiB")
    with pytest.raises(GrammarEndedError, match="it takes 2 MiB"):
        process.masks(1, PATTERN, tokens())
    assert process.end_count == 1


def test_process_has_a_low_priority(process: GrammarProcess) -> None:
    process.check(PATTERN)
    pid = process.jail.pid
    assert pid is not None
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + jail.NICE)
    assert not jail.runs_when_idle(pid)
    assert os.getsid(pid) == os.getsid(0), "priorities count within a session"


def runs_when_idle(process: GrammarProcess) -> bool:
    return process.jail.pid is not None and jail.runs_when_idle(process.jail.pid)


@pytest.fixture
def in_idle_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarProcess]:
    """A process that has had its first question. It never starves by itself."""
    monkeypatch.setattr(grammar_process, "WAKE_S", 1e9)
    made = GrammarProcess(model, VOCAB, in_idle_time=True)
    made.masks(1, PATTERN, tokens())
    yield made
    made.close()


LINUX = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="there is no idle policy here")


@LINUX
def test_process_runs_in_idle_time_once_it_has_begun(in_idle_time: GrammarProcess) -> None:
    assert not runs_when_idle(in_idle_time), "it read its tokenizer"
    walk(in_idle_time, 1, [], 2)
    assert runs_when_idle(in_idle_time)


@LINUX
def test_question_that_gets_no_time_begins_anew_at_a_low_priority(
    model: Path, in_idle_time: GrammarProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped process stands for one that gets no time beside others."""
    outputs: list[int] = []
    walk(in_idle_time, 1, outputs, 2)
    starved = in_idle_time.jail.pid
    assert starved is not None
    os.kill(starved, signal.SIGSTOP)
    monkeypatch.setattr(grammar_process, "WAKE_S", 0.02)
    masks = walk(in_idle_time, 1, outputs, 2)
    assert in_idle_time.jail.pid != starved and "too little idle time" in caplog.text
    assert not runs_when_idle(in_idle_time)
    matcher = Grammars(model, VOCAB).matcher(PATTERN)
    matcher.consume_tokens(outputs[:2])
    assert masks[0] == allowed(matcher.compute_bitmask())


@LINUX
@pytest.mark.parametrize("starved_for_s", [3600.0, 0.001])
def test_short_questions_that_wait_long_are_counted_together(
    in_idle_time: GrammarProcess,
    starved_for_s: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each of these counts as one that has waited for a minute."""
    outputs: list[int] = []
    monkeypatch.setattr(grammar_process, "STARVED_FOR_S", starved_for_s)
    monkeypatch.setattr(grammar_process, "WAKE_S", -60.0)
    before = in_idle_time.jail.pid
    walk(in_idle_time, 1, outputs, 6)
    assert in_idle_time.jail.pid != before and f"for {starved_for_s:g} s" in caplog.text
    assert ("for 0.002 s" in caplog.text) == (starved_for_s < 1), "twice as long for the second time"
    monkeypatch.setattr(grammar_process, "WAKE_S", 1e9)
    walk(in_idle_time, 1, outputs, 2)
    assert runs_when_idle(in_idle_time) == (starved_for_s < 1)


@LINUX
def test_question_that_ends_its_process_in_idle_time_is_not_asked_again(
    in_idle_time: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk(in_idle_time, 1, [], 2)
    pid, ask = in_idle_time.jail.pid, in_idle_time.jail.ask
    assert pid is not None

    def end() -> bool:
        """Be called with the question."""
        os.kill(pid, signal.SIGPROF)  # as for too much processor time
        os.kill(pid, signal.SIGCONT)
        return False

    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(in_idle_time.jail, "ask", lambda question, is_starved: ask(question, is_starved=end))
    with pytest.raises(GrammarEndedError, match="processor time"):
        in_idle_time.masks(1, PATTERN, tokens())
    assert in_idle_time.end_count == 1


def test_processor_time_of_a_short_question_is_counted(process: GrammarProcess) -> None:
    spent = []
    for key in range(40):
        process.masks(key, LLMatcher.grammar_from_regex(f"[ab]{{4}}c*{key}"), tokens())
        spent.append(process.spent_s)
    assert min(spent) > 0, "the clock stands still between the looks of the kernel"
