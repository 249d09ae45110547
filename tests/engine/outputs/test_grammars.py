"""Sequences bound by grammars on the engine: what comes out is valid, and the same whatever the engine does meanwhile.

Scheduler and engine in one process, random weights, temperature 1. The oracles are json, jsonschema and re.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Collection
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from protos import worker_pb2
from services.scheduler.core.types import Finish, NewRequest
from services.worker import grammar as grammar_module
from services.worker.engine import Engine
from services.worker.grammar import Lane, Question
from services.worker.slots import Chunks
from shared.processes.jail import runs_when_idle
from shared.text import grammar_process
from shared.text.grammars import NOT_FOLLOWED
from shared.wire.columns import pack, unpack
from tests.engine.driver import Driver, make_engine, tokens_of
from tests.engine.late_engine import make_late_engine
from tests.support import in_process
from tests.support.checkpoints.models import BOS, EOS, IM_END, make_llama, random_prompts
from tests.support.waiting import until

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PATTERN = r"(\+[0-9]{1,3} )?[0-9]{3}-[0-9]{4}|n/a"
CHOICES = ["yes", "no", "yesterday", "né🐋"]
COUNT = 24
SMALL = {"kv_blocks": 36, "max_seqs": 16, "max_input_tokens": 48, "max_output_tokens": 96, "max_step_tokens": 512}
"""A pool in which sequences have to be preempted."""


def _json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


KINDS: list[tuple[str, Callable[[str], Any]]] = [
    (LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False}), _json),
    (LLMatcher.grammar_from_regex(PATTERN), re.compile(PATTERN).fullmatch),
    (LLMatcher.grammar_from_regex("|".join(map(re.escape, CHOICES))), CHOICES.__contains__),
    ("", lambda _: True),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("grammars") / "tiny", requests=1, output_tokens=1, hidden_size=32).path


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return make_engine(model)


def requests(count: int) -> list[NewRequest]:
    """Of every kind in turn, ended by the model's end of text."""
    made = []
    for at, prompt in enumerate(random_prompts(count, (2, 40), 11)):
        grammar, _ = KINDS[at % len(KINDS)]
        most = 96 if grammar else 20
        request = in_process.request(f"r{at}", prompt, most, temperature=1.0, seed=at, grammar=grammar)
        request.stop_ids = np.array([EOS], np.int32)
        made.append(request)
    return made


@pytest.fixture(scope="module")
def alone(engine: Engine) -> in_process.Recorded:
    """The reference: no lookahead, room for all."""
    recorded, _ = in_process.run(engine, requests(COUNT), "orcinus")
    return recorded


def wait_for_no_mask(engine: Engine, monkeypatch: pytest.MonkeyPatch, alone_s: float) -> None:
    """Let rows be late."""
    monkeypatch.setattr(engine, "takes_late", True)
    monkeypatch.setattr(grammar_module, "ALONE_S", alone_s)
    monkeypatch.setattr(grammar_module, "BESIDE_OTHERS_S", 0.0)


def text_of(tokens: list[int]) -> str:
    assert tokens[-1] == EOS
    return bytes(tokens[:-1]).decode()


def test_outputs_are_valid_and_end_where_the_grammar_is_complete(engine: Engine) -> None:
    recorded, _ = in_process.run(engine, requests(120), "orcinus", lookahead=1)
    assert not recorded.errors
    for at in range(120):
        grammar, valid = KINDS[at % len(KINDS)]
        if grammar:
            assert recorded.finish[f"r{at}", 0] == Finish.STOP
            assert valid(text_of(recorded.tokens[f"r{at}", 0]))


@pytest.mark.parametrize(
    ("engine_is_late", "masks_are_late", "lookahead"),
    [(True, False, 1), (False, True, 1), (True, True, 0)],
)
def test_tokens_are_the_same_ahead_in_chunks_preempted_and_without_masks(
    model: Path,
    alone: in_process.Recorded,
    monkeypatch: pytest.MonkeyPatch,
    engine_is_late: bool,
    masks_are_late: bool,
    lookahead: int,
) -> None:
    crowded = (make_late_engine if engine_is_late else make_engine)(model, host_blocks=0, **SMALL)
    if masks_are_late:
        wait_for_no_mask(crowded, monkeypatch, 0.002)
    try:
        recorded, core = in_process.run(
            crowded, requests(COUNT), "sarathi", microbatches=1 + lookahead, lookahead=lookahead, step_tokens=17
        )
    finally:
        crowded.grammars.close()
    assert recorded.tokens == alone.tokens and recorded.finish == alone.finish
    assert core.stats()["preemptions"] > 0, "nothing was preempted: the pool is too large"
    assert (crowded.grammars.late > 0) == masks_are_late


@pytest.mark.parametrize(("masks_are_late", "most_masks", "lookahead"), [(False, 99, 0), (True, 99, 1), (False, 2, 1)])
def test_tokens_are_the_same_behind_drafts(
    model: Path,
    alone: in_process.Recorded,
    monkeypatch: pytest.MonkeyPatch,
    masks_are_late: bool,
    most_masks: int,
    lookahead: int,
) -> None:
    """Of the predictions every fifth token is wrong, and most of those are forbidden."""
    monkeypatch.setattr("services.scheduler.core.speculation.drafts.MIN_GAIN", 0.0)
    crowded = make_engine(model, host_blocks=0, **SMALL)
    compute, dropped = crowded.grammars.quick.process.masks, []

    def masks(key: int, grammar: str, outputs: Any, guesses: Any) -> list[bytes]:
        if masks_are_late and guesses.size and key % 2:  # its step does without it
            before = crowded.grammars.late
            until("a row is late", lambda: crowded.grammars.late > before)
        return compute(key, grammar, outputs, guesses)[:most_masks]

    monkeypatch.setattr(crowded.grammars.quick.process, "masks", masks)
    drop = crowded.slots.drop_drafts
    monkeypatch.setattr(crowded.slots, "drop_drafts", lambda slots: (dropped.append(slots.size), drop(slots)))
    if masks_are_late:
        wait_for_no_mask(crowded, monkeypatch, 0.002)
    predicted = [request for request in requests(COUNT) if request.grammar]
    for request in predicted:
        output = np.array(alone.tokens[request.id, 0], np.int32)
        output[4::5] += 1
        request.prediction = np.concatenate([request.prompts[0], output])
    try:
        recorded, core = in_process.run(crowded, predicted, "sarathi", lookahead=lookahead, speculate="suffix")
    finally:
        crowded.grammars.close()
    assert (
        recorded.tokens == {at: alone.tokens[at] for at in recorded.tokens} and len(recorded.tokens) == COUNT * 3 // 4
    )
    stats = core.stats()
    assert stats["preemptions"] > 0, "nothing was preempted: the pool is too large"
    assert (crowded.grammars.late > 0) == masks_are_late
    if masks_are_late:
        assert sum(dropped) > 0
    else:
        assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


MERGED = ["th", "the", " t", " the", "na", "me", "name", "of", " of", "li", "ke", "like", "ti", "tl", "ea"]
MERGED += ['":', '": ', ' "']
"""Tokens of several bytes, each of two that stand before it or are bytes."""
TEXTS = [
    'start: "the name of it is like " /[a-d]{1,2}/ ", the title " /[e-h]/ " is not known"',
    """start: "{" /[\\n ]{0,2}/ "\\"the_name\\": " /[0-9]{1,3}/ ", \\"the_other_title\\": " ("true" | "null") "}" """,
]


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tokens that are several bytes of the texts above."""
    path = tmp_path_factory.mktemp("grammars") / "merging"
    make_llama(path, requests=1, output_tokens=1, hidden_size=32, vocab_size=IM_END + 1 + len(MERGED))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for token in (text.replace(" ", "Ġ") for text in MERGED):
        cut = next(at for at in range(len(token) - 1, 0, -1) if token[:at] in vocab and token[at:] in vocab)
        merges.append([token[:cut], token[cut:]])
        vocab[token] = IM_END + len(merges)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@pytest.mark.parametrize("lookahead", [0, 1])
def test_forced_texts_are_drafts_and_change_no_token(
    merging: Path, monkeypatch: pytest.MonkeyPatch, lookahead: int
) -> None:
    monkeypatch.setattr("services.scheduler.core.speculation.drafts.MIN_GAIN", 0.0)
    engine = make_engine(merging, host_blocks=0, **SMALL)
    bound = []
    for at, prompt in enumerate(random_prompts(COUNT, (2, 40), 11, vocab=256)):
        grammar = LLMatcher.grammar_from_lark(TEXTS[at % 2])
        request = in_process.request(f"r{at}", prompt, 96, temperature=1.0, seed=at, grammar=grammar)
        request.stop_ids, request.tenant = np.array([EOS], np.int32), f"tenant {at}"
        bound.append(request)
    try:
        truth, _ = in_process.run(engine, bound, "sarathi", speculate="off")
        found, core = in_process.run(engine, bound, "sarathi", lookahead=lookahead, speculate="suffix")
    finally:
        engine.grammars.close()
    assert found.tokens == truth.tokens and found.finish == truth.finish
    assert not truth.errors and set(truth.finish.values()) == {Finish.STOP}
    stats, tokens = core.stats(), sum(map(len, found.tokens.values()))
    ways = {len(found.tokens[f"r{at}", 0]) for at in range(0, COUNT, 2)}
    assert len(ways) > 1
    assert stats["preemptions"] > 0, "nothing was preempted: the pool is too large"
    assert stats["accepted_tokens"] > tokens // 8
    assert 3 * stats["accepted_tokens"] >= 2 * stats["drafted_tokens"]


def test_sequence_goes_on_elsewhere_with_the_tokens_it_has(engine: Engine, alone: in_process.Recorded) -> None:
    recorded = goes_on(engine, requests(COUNT), [tokens[: at % 12][:-1] for at, tokens in enumerate(tokens_of(alone))])
    assert recorded.tokens == alone.tokens and recorded.finish == alone.finish


def goes_on(engine: Engine, moved: list[NewRequest], outputs: list[list[int]]) -> in_process.Recorded:
    """Run requests that have these outputs."""
    known = in_process.Recorded()
    for request, had in zip(moved, outputs, strict=True):
        request.outputs = [np.array(had, np.int32)]
        known.tokens[request.id, 0] = list(had)
    return in_process.run(engine, moved, "orcinus", lookahead=1, known=known)[0]


def enter_two(driver: Driver, grammar: str = KINDS[2][0]) -> None:
    driver.engine.reset()
    driver.enter(0, [1, 2, 3])
    driver.enter(2, [4, 5], sampling=worker_pb2.Sampling(grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("not a grammar", "the grammar cannot be followed"),
        (LLMatcher.grammar_from_regex("(a"), "unclosed group"),
        (LLMatcher.grammar_from_json_schema({"$ref": "http://example.org/x"}), "does not fetch"),
        ('{"grammars": [{"lark_grammar": "' + " " * 70_000 + '"}]}', "longer than 65536 bytes"),
    ],
)
def test_a_sequence_with_an_unusable_grammar_fails_alone(engine: Engine, grammar: str, words: str) -> None:
    driver = Driver(engine)
    enter_two(driver, grammar)
    assert words in second_fails(driver.step({0: 64, 2: 64}))


def second_fails(result: worker_pb2.Result) -> str:
    """Return why the second sequence failed, alone."""
    assert [(error.slot, error.code) for error in result.errors] == [(2, "grammar")]
    assert unpack(result.slots).tolist() == [0]
    return str(result.errors[0].message)


def test_grammar_beyond_a_bound_says_that_it_cannot_be_followed(engine: Engine) -> None:
    """Gateways compile it without a fault, as its first row is small; they answer 400 by these words."""
    grammar = LLMatcher.grammar_from_lark("start: " + " ".join(f'"a{at}"?' for at in range(1000)))
    driver = Driver(engine)
    enter_two(driver, grammar)
    results = [driver.step({0: 64, 2: 64}) for _ in range(2)]
    assert not results[0].errors
    message = second_fails(results[1])
    assert message.startswith(f"{NOT_FOLLOWED}: ") and "max is" in message


@pytest.fixture
def takes_late(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine for a scheduler that plans late rows again; it waits for no mask."""
    wait_for_no_mask(engine, monkeypatch, 0.0)
    return engine


def hold_masks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no mask come until the event is set."""
    given, compute = threading.Event(), engine.grammars.quick.process.masks

    def held(*question: Any) -> list[bytes]:
        assert given.wait(60)
        return compute(*question)

    monkeypatch.setattr(engine.grammars.quick.process, "masks", held)
    return given


def test_late_row_is_left_out_until_its_mask_is_there(takes_late: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps between, also one that was sent before the scheduler knew, compute the other rows alone."""
    given, driver = hold_masks(takes_late, monkeypatch), Driver(takes_late)
    enter_two(driver)
    result = driver.step({0: 64, 2: 64})
    assert unpack(result.slots).tolist() == [0] and unpack(result.late_slots).tolist() == [2] and not result.errors
    for start in (2, 1, 1):
        step = worker_pb2.Step(epoch=1, id=driver.next_id)
        step.chunk_slots, step.chunk_starts = pack([0, 2]), pack([driver.computed[0], start])
        step.chunk_lengths = pack([1, 1])
        inflight = takes_late.submit(step)
        result = takes_late.finish(inflight)
        assert unpack(result.slots).tolist() == [0] and unpack(result.late_slots).tolist() == [2]
        assert inflight.chunks.slots.tolist() == [0] or start == 2
        driver.next_id, driver.computed[0] = driver.next_id + 1, driver.computed[0] + 1
    given.set()
    monkeypatch.setattr(grammar_module, "ALONE_S", 60.0)
    driver.known[2], driver.computed[2] = 2, 1
    result = driver.step({2: 1})
    assert unpack(result.slots).tolist() == [2] and not result.late_slots
    assert bytes(driver.outputs[2]).decode() in {choice[0] for choice in CHOICES}


def test_late_row_takes_its_drafts_back(takes_late: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts across the end of a block: without them the row goes on from where it was."""
    size, tokens = takes_late.info().block_size, []
    for drafts in (0, 3):
        driver = Driver(takes_late)
        takes_late.reset()
        driver.enter(0, [1, 2, 3])
        sampling = worker_pb2.Sampling(grammar=LLMatcher.grammar_from_regex("[a-h]{40}"))
        driver.enter(2, [4] * (2 * size - 3), sampling=sampling, blocks=pack(driver.blocks(2)[:2]))
        monkeypatch.setattr(grammar_module, "ALONE_S", 60.0)
        driver.run(2, 3)
        driver.step({0: 64})
        monkeypatch.setattr(grammar_module, "ALONE_S", 0.0)
        appended = {"append_slots": pack([2]), "append_blocks": pack(driver.blocks(2)[2:3])}
        if drafts:
            given = hold_masks(takes_late, monkeypatch)
            step = worker_pb2.Step(epoch=1, id=driver.next_id, **appended)
            step.chunk_slots, step.chunk_starts = pack([0, 2]), pack([driver.computed[0], driver.computed[2]])
            step.chunk_lengths, step.chunk_drafts = pack([1, 1 + drafts]), pack([0, drafts])
            step.drafts = pack([97] * drafts)
            result = takes_late.execute(step)
            assert unpack(result.slots).tolist() == [0] and unpack(result.late_slots).tolist() == [2]
            assert unpack(result.token_counts).tolist() == [1]
            given.set()
            driver.next_id += 1
            driver.computed[0] += 1
        monkeypatch.setattr(grammar_module, "ALONE_S", 60.0)
        driver.step({2: 1})
        driver.step({2: 1}, **appended)
        tokens.append(driver.run(2, 8))
    assert tokens[0] == tokens[1]


def test_no_mask_is_computed_for_a_slot_that_was_freed(takes_late: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    given, compute, driver = threading.Event(), takes_late.grammars.quick.process.masks, Driver(takes_late)

    def held(key: int, *question: Any) -> list[bytes]:
        asked.append(key)
        assert given.wait(60)
        return compute(key, *question)

    monkeypatch.setattr(takes_late.grammars.quick.process, "masks", held)
    enter_two(driver)
    driver.enter(3, [4, 5], sampling=worker_pb2.Sampling(grammar=KINDS[1][0]))
    driver.step({0: 64, 2: 64, 3: 64})
    driver.free(3)
    driver.step({0: 1})
    given.set()
    monkeypatch.setattr(grammar_module, "ALONE_S", 60.0)
    driver.known[2], driver.computed[2] = 2, 1
    driver.run(2, 1)
    assert len(set(asked)) == 1


@pytest.mark.parametrize("is_first", [True, False], ids=["at its first mask", "left out"])
def test_step_waits_for_masks_alone_until_another_row_waits(
    takes_late: Engine, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    given, driver = hold_masks(takes_late, monkeypatch), Driver(takes_late)
    enter_two(driver)
    if not is_first:
        driver.step({0: 64, 2: 64})
        driver.known[2], driver.computed[2] = 2, 1
    monkeypatch.setattr(grammar_module, "ALONE_S", 60.0)
    asked: list[list[int]] = []

    def others_wait(slots: Collection[int]) -> bool:
        asked.append(list(slots))
        if len(asked) == 1:  # comes while the step waits
            threading.Thread(target=takes_late.grammars.step_came).start()
        return len(asked) > 1

    monkeypatch.setattr(takes_late.grammars, "others_wait", others_wait)
    result = driver.step({2: 64})
    given.set()
    assert asked == [[2], [2]] and unpack(result.late_slots).tolist() == [2]


def test_late_rows_alone_wait_for_no_mask_while_another_step_runs(
    takes_late: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, driver = hold_masks(takes_late, monkeypatch), Driver(takes_late)
    enter_two(driver)
    driver.step({0: 64, 2: 64})
    monkeypatch.setattr(takes_late.grammars, "others_wait", lambda slots: pytest.fail(f"slots {slots} waited"))
    one = np.ones(1, np.int32)
    late = takes_late.grammars.left_out(Chunks(2 * one, one, one, one > 0), is_idle=False)
    given.set()
    assert late == [2]


def test_sequence_with_quick_masks_alone_is_waited_for(takes_late: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other rows: a grammar that took long before costs them no time."""
    waited: list[int] = []

    def noted(masks: list[Any], seconds: float) -> None:
        waited.append(len(masks))
        wait_for(masks, seconds)

    monkeypatch.setattr(grammar_module, "wait_for", noted)
    monkeypatch.setattr(grammar_module, "BESIDE_OTHERS_S", 60.0)  # any mask is quick
    driver = Driver(takes_late)
    enter_two(driver)
    driver.step({0: 64, 2: 64})
    assert waited == [0], "a grammar that is to be compiled was waited for"
    monkeypatch.setattr(grammar_module, "ALONE_S", 60.0)
    driver.known[2], driver.computed[2] = 2 + len(driver.outputs[2]), 1 + len(driver.outputs[2])
    driver.run(2, 1)
    driver.step({0: 64, 2: 64})
    assert waited[-1] == 1 and len(driver.outputs[2]) >= 2


def test_mask_is_asked_for_under_its_tenant(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, tenants = engine.grammars.quick.ask, []
    monkeypatch.setattr(engine.grammars.quick, "ask", lambda one: (tenants.append(one.tenant), ask(one)))
    driver = Driver(engine)
    engine.reset()
    driver.enter(2, [4, 5], sampling=worker_pb2.Sampling(grammar=KINDS[2][0]), tenant=7)
    driver.step({2: 64})
    assert tenants == [7]


@pytest.mark.parametrize(
    ("lasts_s", "is_bound"),
    [(60.0, True), (60.0, False), (-1.0, True)],
    ids=["costly", "costly beside a tenant without grammars", "costly long ago"],
)
def test_tenant_with_costly_masks_is_served_apart_from_others(
    model: Path, monkeypatch: pytest.MonkeyPatch, lasts_s: float, is_bound: bool
) -> None:
    """By the second process, which starts then; a tenant alone keeps the first. Tokens are the same."""
    monkeypatch.setattr(grammar_module, "COSTLY_MASK_S", 0.0)  # any mask is costly
    monkeypatch.setattr(grammar_module, "COSTLY_FOR_S", lasts_s)
    monkeypatch.setattr(grammar_module, "TOGETHER_S", 60.0)
    engine = make_engine(model)
    driver, outputs = Driver(engine), []
    numbers = worker_pb2.Sampling(grammar=LLMatcher.grammar_from_regex("[0-9]{30}"))
    for tenants in ([1], [1, 2]):
        engine.reset()
        driver = Driver(engine)
        for tenant in tenants:
            bound = numbers if tenant == 1 or is_bound else worker_pb2.Sampling()
            driver.enter(tenant, [4, 5], sampling=bound, tenant=tenant)
        while len(driver.outputs[1]) < 6:
            driver.step({tenant: 64 for tenant in tenants})
        outputs.append(driver.outputs[1])
        is_apart = engine.grammars.costly.process.jail.pid is not None
        assert is_apart == (len(tenants) > 1 and lasts_s > 0)
    engine.grammars.close()
    assert outputs[0] == outputs[1]
    if is_bound:
        assert driver.outputs[2] == outputs[0]


def test_tenant_comes_back_from_the_second_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(grammar_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(grammar_module, "COSTLY_MASK_S", 0.0)  # any mask is costly
    monkeypatch.setattr(grammar_module, "TOGETHER_S", 60.0)
    monkeypatch.setattr(grammar_process, "WAKE_S", 1e9)  # no process starves
    engine = make_engine(model)
    driver = Driver(engine)
    for tenant in (1, 2):
        grammar = LLMatcher.grammar_from_regex("[0-9]{30}")
        driver.enter(tenant, [4, 5], sampling=worker_pb2.Sampling(grammar=grammar), tenant=tenant)
    while engine.grammars.costly.process.jail.pid is None:
        driver.step({1: 64, 2: 64})
    while not runs_when_idle(engine.grammars.costly.process.jail.pid or 0):  # from its second question on
        driver.step({1: 64, 2: 64})
    now[0] += grammar_module.COSTLY_FOR_S + 1
    monkeypatch.setattr(grammar_module, "COSTLY_MASK_S", 60.0)
    asked: list[Lane] = []
    for lane in (engine.grammars.quick, engine.grammars.costly):
        monkeypatch.setattr(lane, "ask", lambda one, lane=lane, ask=lane.ask: (asked.append(lane), ask(one)))
    size = len(driver.outputs[1])
    while len(driver.outputs[1]) < size + 4:
        driver.step({1: 64, 2: 64})
    engine.grammars.close()
    assert len(asked) > 4 and set(asked[2:]) == {engine.grammars.quick}
    assert driver.outputs[1] == driver.outputs[2]


def test_mask_is_judged_as_a_first_one_where_the_process_had_to_begin_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the end of another tenant's grammar would make the masks of all costly."""
    monkeypatch.setattr(grammar_module, "COSTLY_MASK_S", 0.0)
    monkeypatch.setattr(grammar_module, "COSTLY_BEGIN_S", 60.0)
    judged: list[bool] = []
    lane = Lane(model, 260, False, lambda question, is_costly: judged.append(is_costly))
    grammar = LLMatcher.grammar_from_regex("[0-9]{30}")

    def ask() -> None:
        question = Question(1, 1, grammar, np.zeros(0, np.int32))
        lane.ask(question)
        assert question.masks.result(60)

    ask()
    ask()
    assert lane.process.jail.pid is not None
    os.kill(lane.process.jail.pid, signal.SIGKILL)
    until("the process is gone", lambda: lane.process.jail.pid is None)
    ask()
    lane.close()
    until("the last one is judged", lambda: len(judged) == 3)
    assert judged == [False, True, False]


def test_step_that_has_to_wait_fails_the_row_without_its_mask_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = hold_masks(engine, monkeypatch)
    monkeypatch.setattr(grammar_module, "TOGETHER_S", 0.01)
    driver = Driver(engine)
    enter_two(driver)
    result = driver.step({0: 64, 2: 64})
    given.set()
    assert "was not there within" in second_fails(result)


def test_scheduler_that_takes_no_late_rows_gets_every_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "ALONE_S", 0.0)
    monkeypatch.setattr(grammar_module, "BESIDE_OTHERS_S", 0.0)
    driver = Driver(engine)
    engine.reset()
    driver.enter(2, [4, 5], sampling=worker_pb2.Sampling(grammar=KINDS[2][0]))
    result = driver.step({2: 64})
    assert unpack(result.slots).tolist() == [2] and not result.late_slots


def test_control_tokens_are_never_part_of_what_a_grammar_allows(engine: Engine) -> None:
    driver = Driver(engine)
    engine.reset()
    anything = worker_pb2.Sampling(grammar=LLMatcher.grammar_from_regex("(?s:.*)"), temperature=1.0, top_p=1.0)
    for token in (BOS, IM_END):
        anything.bias_ids += np.int32(token).tobytes()
        anything.bias_values += np.float32(100).tobytes()
    driver.enter(1, [1, 2, 3], sampling=anything)
    assert not {BOS, IM_END} & set(driver.run(1, 24))
