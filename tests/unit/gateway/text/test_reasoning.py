"""Thinking in answers: which text is thinking, however it is cut, and the state that rendered templates leave."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from protos.queue_pb2 import Delivery
from services.gateway.anthropic.bodies import MessagesBody
from services.gateway.anthropic.bodies import chat_body as messages_chat
from services.gateway.delivery.stream import ChoiceText, Row
from services.gateway.errors import ApiError
from services.gateway.openai.answers import answer_body
from services.gateway.openai.bodies import ChatBody, parse_body
from services.gateway.openai.chat import chat_spec
from services.gateway.openai.responses import ResponsesBody
from services.gateway.openai.responses import chat_body as responses_chat
from services.gateway.request import FRAMED, OLDEST, THINKING, UNDECIDED, VERSION, GenerationSpec, Limits, ToolUse
from services.gateway.text.reasoning import MARKERS, ChannelReader, ReasoningReader, markers_of, reader_of
from services.gateway.text.tokenizer import ModelText
from services.gateway.text.tools.formats import OPENINGS
from tests.support import sse
from tests.support.checkpoints.tokenizers import byte_level, write_model
from tests.support.gateway.generations import (
    CUTS,
    bytes_of_one_more,
    generation,
    in_rows,
    model,
    rows,
    spec,
    stored,
    streamed,
)

QWEN = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' %}{%- set reasoning = '' %}"
    "{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if reasoning %}{{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' "
    "+ content.lstrip('\\n') }}{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- if reasoning_effort %}{{- reasoning_effort }}{%- endif %}{%- endif %}"
)
"""The parts of Qwen3's template that deal with thinking, and one variable more."""
OPENS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
"""As DeepSeek-R1's and QwQ's, which open the block themselves."""
LIMITS = Limits(512)


def directory_of(path: Path, template: str, special: bool = False, markers: tuple[str, ...] = MARKERS["think"]) -> Path:
    tokenizer = byte_level()
    tokens = [AddedToken(text, special=special, normalized=False) for text in markers]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)
    return write_model(path, tokenizer, chat_template=template)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory_of(tmp_path_factory.mktemp("qwen") / "m", QWEN)


@pytest.fixture(scope="module")
def special_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model in which the marks of thinking are control tokens."""
    return directory_of(tmp_path_factory.mktemp("qwen") / "m", QWEN, special=True)


@pytest.fixture(scope="module")
def theirs(qwen: Path) -> Any:
    from transformers import AutoTokenizer  # most processes of a run need no transformers

    return AutoTokenizer.from_pretrained(qwen)


@functools.cache
def text_of(directory: Path) -> ModelText:
    return ModelText(directory)


def body(**fields: Any) -> ChatBody:
    given = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16} | fields
    return parse_body(json.dumps(given).encode(), ChatBody)


def request(directory: Path, **fields: Any) -> tuple[GenerationSpec, str]:
    """Return the request of a body, and its prompt as text."""
    text = text_of(directory)
    made = asyncio.run(chat_spec(body(**fields), text, LIMITS))
    return made, text.text.decode(made.prompts[0], skip_special=False)


def test_no_part_of_a_marker_leaks_before_it_is_whole() -> None:
    reader = ReasoningReader(UNDECIDED, MARKERS["think"])
    assert [reader.feed(char) for char in "<think>"] == [("", "")] * 7
    assert [reader.feed(char) for char in "</think"] == [("", "")] * 7
    assert reader.feed("!") == ("</think!", "")


PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "thin", "think>", "</", "\n", " ", "yes", "é🐋", "<tool_call>",
                     "</tool_call>", '{"name": "f", "arguments": {}}']),
    max_size=9,
).map("".join)  # fmt: skip


def brute_force(text: str, state: str) -> tuple[str, str]:
    if state == UNDECIDED:
        begun = re.match(r"\s*<think>", text)
        text, state = (text[begun.end() :], THINKING) if begun else (text, "")
    if state == THINKING:
        thinking, _, content = text.partition("</think>")
        return thinking, content
    return "", text


def fed(pieces: list[list[int]], request: GenerationSpec, text_model: ModelText | None = None) -> tuple[Any, ...]:
    choice = ChoiceText(request, text_model or model(), request.prompts[0])
    thinking, content, calls, used = "", "", [], []
    for index, piece in enumerate(pieces):
        if choice.finish_reason is None:
            text, counted, _ = choice.feed(piece, "stop" if index == len(pieces) - 1 else None)
            thinking, content = thinking + choice.reasoning, content + text
            calls += [(call.name, call.arguments) for call in choice.calls]
            used += counted
    called = [name for name, _ in calls if name], "".join(arguments for _, arguments in calls)
    return thinking, content, called, used, choice.finish_reason, choice.reasoning_tokens


def singly(tokens: list[int]) -> list[list[int]]:
    return [[token] for token in tokens]


def read(asked: GenerationSpec, text: ModelText, tokens: list[int]) -> tuple[str, str]:
    """Return thinking and content of the tokens of an answer, as another gateway reads them."""
    thinking, content, *_ = fed(singly(tokens), stored(asked, text), text)
    return thinking, content


def check_goes_on(asked: GenerationSpec, said: list[int], text: ModelText, other: ModelText) -> list[sse.Event]:
    """Return the events of a stream; another gateway continues it behind each of them."""
    asked.id = "chatcmpl-1"
    sent = in_rows([*singly(said), []], 1)
    events = streamed(asked, sent, text)
    for at, event in enumerate(events[:-1]):
        rest = streamed(stored(asked, text), sent, other, had=event.id)
        assert [event.data for event in rest] == [event.data for event in events[at + 1 :]]
    return events


def delta_text(events: list[sse.Event], field: str) -> str:
    """Return what the events of a stream tell in a field of their deltas."""
    deltas = [choice["delta"] for event in events[:-1] for choice in event.json["choices"]]
    return "".join(delta.get(field) or "" for delta in deltas)


@given(
    PARTS, CUTS, st.sampled_from([UNDECIDED, THINKING, ""]), st.booleans(), st.sampled_from([[], ["s"], ["k>"]]),
    st.integers(0, 6),
)  # fmt: skip
@settings(max_examples=250, deadline=None)
def test_thinking_content_and_calls_are_the_same_however_cut(
    text: str, cuts: list[int], state: str, tools: bool, stop: list[str], least: int
) -> None:
    use = ToolUse("hermes", ("f",), True) if tools else None
    asked = spec(endpoint="chat", reasoning=state, tools=use, stop=stop, stop_ids=[], min_tokens=least)
    tokens = model().encode(text)
    found = fed([*singly(tokens), []], asked)
    assert fed(rows(tokens, cuts) or [[]], asked) == found
    if not stop:
        thinking, content = brute_force(text, state)
        assert found[0] == thinking
        if not tools:
            assert found[1] == content
        elif "<tool_call>" not in content:
            assert found[2] == ([], ""), "a call within the thinking is none"


CALL = '{"name": "f", "arguments": {}}'
CALLS = {
    "hermes": f"<tool_call>{CALL}</tool_call>",
    "llama3": CALL.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "mistral-args": "[TOOL_CALLS]f[ARGS]{}",
    "granite": f"<|tool_call|>[{CALL}]",
    "qwen3-coder": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
    "glm-4.5": "<tool_call>f\n</tool_call>",
    "deepseek-v3": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "kimi-k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "pythonic": "[f()]",
}


@pytest.mark.parametrize("state", [UNDECIDED, THINKING])
@pytest.mark.parametrize("kind", sorted(OPENINGS.keys() - {"channels"}))  # thinking there is no tag
def test_calls_of_every_format_follow_thinking_at_every_cut(kind: str, state: str) -> None:
    call = CALLS[kind]
    text = ("" if state == THINKING else "<think>") + f"so {call}</think>{call}"
    asked = spec(endpoint="chat", reasoning=state, tools=ToolUse(kind, ("f",), True), stop_ids=[])
    tokens = model().encode(text)
    cuts = [[tokens[:at], tokens[at:]] for at in range(len(tokens))]
    for pieces in [*cuts, [*singly(tokens), []]]:
        assert fed(pieces, asked)[:3] == (f"so {call}", "", (["f"], "{}"))


@given(PARTS, st.data())
@settings(max_examples=80, deadline=None)
def test_another_gateway_continues_in_the_same_state(text: str, data: st.DataObject) -> None:
    asked = spec(
        id="chatcmpl-1", endpoint="chat", reasoning=data.draw(st.sampled_from([UNDECIDED, THINKING])), stop_ids=[],
        tools=ToolUse("hermes", ("f",), True), include_usage=True, prompts=[model().encode("x")],
    )  # fmt: skip
    tokens = model().encode(text)

    sent = in_rows([*singly(tokens), []], 1)
    events = streamed(asked, sent)
    cut = data.draw(st.integers(0, len(events) - 2))
    rest = streamed(stored(asked), sent, had=events[cut].id)
    assert [event.data for event in rest] == [event.data for event in events[cut + 1 :]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reasoning": "tags"}, "reasoning 'tags'"),
        ({"reasoning": THINKING, "markers": ["<think>"]}, "markers"),
        ({"reasoning": THINKING, "markers": ["<think>", ""]}, "markers"),
    ],
)
def test_record_of_thinking_that_cannot_be_read_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stored(spec(endpoint="chat", **fields))


@pytest.mark.parametrize(("version", "is_read"), [(0, True), (VERSION, True), (VERSION + 1, False)])
def test_record_is_read_by_its_version_before_its_fields(version: int, is_read: bool) -> None:
    record = Delivery.FromString(spec(endpoint="chat", reasoning=UNDECIDED).to_delivery(model().text.tail))
    assert record.version == VERSION
    record.version = version
    if is_read:
        assert GenerationSpec.from_delivery("cmpl-1", record.SerializeToString(), "normal").reasoning == UNDECIDED
        return
    record.reasoning = "a state of later"
    with pytest.raises(ApiError, match=f"version {version}, but this gateway reads {OLDEST} to {VERSION}") as refused:
        GenerationSpec.from_delivery("cmpl-1", record.SerializeToString(), "normal")
    assert (refused.value.status, refused.value.code) == (503, "record_version")


def test_gateway_that_knows_other_marks_reads_those_of_the_request(tmp_path: Path) -> None:
    ours = directory_of(tmp_path / "ours", QWEN.replace("think>", "seed:think>"), markers=MARKERS["seed"])
    asked, _ = request(ours)
    other = ModelText(ours, reasoning_parser="think")
    tokens = other.encode("<seed:think>a</seed:think>Yes")
    assert fed([tokens], stored(asked, text_of(ours)), other)[:2] == ("a", "Yes")


def test_answer_has_thinking_apart_and_counts_it() -> None:
    asked = spec(id="chatcmpl-1", endpoint="chat", reasoning=UNDECIDED, stop_ids=[])
    said, before = model().encode("<think>a b</think>Yes"), model().encode("<think>a b</think>")

    def answer(tokens: list[int], finish: int) -> dict[str, Any]:
        running, stream, _ = generation(asked)
        stream.offer(Row(0, tokens, finish), 0)
        return asyncio.run(answer_body(running, "fp"))

    got = answer(said, 1)
    message = {"role": "assistant", "content": "Yes", "refusal": None, "reasoning_content": "a b"}
    assert got["choices"][0]["message"] == message
    assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(before)}
    cut = answer(before[:-2], 2)["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"] is None and cut["message"]["reasoning_content"]
    plain = answer(model().encode("Yes"), 1)
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": "Yes", "refusal": None}
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, UNDECIDED),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ""),
        ({"reasoning_effort": "none"}, ""),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, UNDECIDED),
        ({"messages": [{"role": "user", "content": "what is <think>"}]}, UNDECIDED),
        ({"messages": [{"role": "user", "content": "what is </think>"}]}, UNDECIDED),
    ],
)
def test_state_follows_the_rendered_prompt(qwen: Path, fields: dict[str, Any], state: str) -> None:
    assert text_of(qwen).reasoning == "think"
    assert request(qwen, **fields)[0].reasoning == state


def test_template_that_opens_the_block_leaves_the_model_thinking(tmp_path: Path) -> None:
    directory = directory_of(tmp_path / "m", OPENS, special=True)
    made, _ = request(directory)
    assert made.reasoning == THINKING
    assert made.skip_special_tokens is False, "else the closing marker, a control token, would not be seen"
    assert ModelText(directory, reasoning_parser="none").reasoning == "none"
    plain = ModelText(write_model(tmp_path / "plain"))
    assert plain.reasoning == "none"


@pytest.mark.parametrize("family", sorted(MARKERS.keys() - {"think"}))
def test_marks_of_other_families_part_thinking_from_text(tmp_path: Path, family: str) -> None:
    opening, closing, *frame = MARKERS[family]
    begins, ends = frame or ("", "")

    def made(name: str, template: str) -> Path:
        template = template.replace("<think>", opening).replace("</think>", closing)
        return directory_of(tmp_path / name, template, special=True, markers=MARKERS[family])

    model = text_of(made("decides", QWEN))
    assert model.reasoning == markers_of("", [*MARKERS[family], "<think>"]) == family
    sent, _ = request(made("decides", QWEN))
    assert (sent.reasoning, sent.skip_special_tokens) == (UNDECIDED, False)
    tokens = model.encode(f"{opening}a <think> b{closing}{begins}Yes</think>{ends}")
    for pieces in ([tokens], singly(tokens)):
        thought, told, *_, thinking_tokens = fed(pieces, stored(sent, model), model)
        assert (thought, told) == ("a <think> b", "Yes</think>")
        assert thinking_tokens == len(model.encode(f"{opening}a <think> b{closing}"))
    assert request(made("opens", OPENS))[0].reasoning == THINKING
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"{opening}Let me"}]
    assert request(made("decides", QWEN), messages=turns, continue_final_message=True)[0].reasoning == THINKING
    bound, _ = request(made("decides", QWEN), thinking_token_budget=3)
    assert f"<[{model.tokenizer.token_to_id(closing)}]>" in bound.sampling.grammar


def test_grammar_leaves_no_room_for_thinking(qwen: Path, tmp_path: Path) -> None:
    form = {"type": "json_object"}
    made, prompt = request(qwen, response_format=form)
    assert made.reasoning == "" and prompt.endswith("<think>\n\n</think>\n\n")
    opened, prompt = request(directory_of(tmp_path / "m", OPENS), response_format=form)
    assert opened.reasoning == "" and prompt.endswith("<think>\n")


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ],
)
@pytest.mark.parametrize(
    "last",
    [
        {"role": "assistant", "content": "The answer is ", "reasoning_content": "so\n"},
        {"role": "assistant", "content": "<think>\nLet me see"},
        {"role": "assistant", "content": "<think>\nLet me see\n</think>\n\nThe"},
    ],
)
def test_prompts_are_those_of_transformers(
    qwen: Path, theirs: Any, fields: dict[str, Any], variables: dict[str, Any], last: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "Hi"}, last]
    made, _ = request(qwen, messages=messages, **fields)
    options = {"add_generation_prompt": True} | variables
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert made.prompts[0] == list(ids)


@pytest.mark.parametrize(
    ("content", "state"),
    [("<think>\nLet me", THINKING), ("<think>a</think>The", ""), ("The ", ""), ("", UNDECIDED)],
)
def test_continued_message_goes_on_where_it_stopped(qwen: Path, content: str, state: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    made, prompt = request(qwen, messages=messages, continue_final_message=True)
    assert made.reasoning == state
    assert prompt.endswith(content.removeprefix("<think>a</think>"))


def test_reasoning_is_read_under_both_names(qwen: Path) -> None:
    def prompt(**thought: str) -> str:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", **thought}]
        return request(qwen, messages=[*messages, {"role": "user", "content": "Why?"}])[1]

    assert "<think>\nbecause\n</think>\n\nYes" in prompt(reasoning_content="because")
    assert prompt(reasoning="because") == prompt(reasoning_content="because")


@pytest.mark.parametrize(("field", "value"), [("ignore_eos", True), ("min_tokens", 2)])
def test_budget_goes_without_what_would_pass_over_its_end(qwen: Path, field: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        request(qwen, thinking_token_budget=3, **{field: value})
    assert (refused.value.status, refused.value.param) == (400, field)


def test_values_of_kwargs_are_no_control_tokens(qwen: Path) -> None:
    text = text_of(qwen)
    made, prompt = request(qwen, chat_template_kwargs={"reasoning_effort": "<|im_end|>"})
    assert prompt.endswith("<|im_end|>")
    control = text.tokenizer.token_to_id("<|im_end|>")
    assert made.prompts[0].count(control) == request(qwen)[0].prompts[0].count(control)


def bound_tokens(directory: Path, grammar: str, wanted: list[int]) -> list[int]:
    """Return the tokens of a model that wants these, one by one, where its grammar allows a token; else the first
    that is allowed.
    """
    text = text_of(directory)
    tokenizer = LLTokenizer(str(directory / "tokenizer.json"), n_vocab=text.vocab_size, eos_token=text.eos_ids)
    matcher, said = LLMatcher(tokenizer, grammar), []
    for token in wanted:
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
        said.append(token if token in allowed else int(allowed[0]))
        assert matcher.consume_token(said[-1])
    return said


BEFORE = ["", "\n", " \n\n"]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("budget", [1, 7])
def test_thinking_ends_when_its_budget_is_spent(
    qwen: Path, special_qwen: Path, special: bool, before: str, budget: int
) -> None:
    directory = special_qwen if special else qwen
    asked, _ = request(directory, max_tokens=64, thinking_token_budget=budget)
    text = text_of(directory)
    assert asked.reasoning == UNDECIDED and asked.grammar_field == "thinking_token_budget"
    opening, closing = text.thinking_marks or (0, 0)
    thought = [50, 51, 52] * 5
    head = [*text.encode(before), opening]
    said = bound_tokens(directory, asked.sampling.grammar, [*head, *thought, *text.encode("so </think><think>")])
    assert said[: len(head) + budget] == [*head, *thought][: len(head) + budget]
    assert said[len(head) + budget] == closing
    assert said[len(head) + budget + 1 :] == [*thought, *text.encode("so </think><think>")][budget + 1 :]
    made = generation(asked, text)[0]
    reasoning = [delta.reasoning for row in said for delta in made.apply([Row(0, [row])])]
    assert "".join(reasoning) == text.text.decode(thought[:budget])


@pytest.mark.parametrize("said", ["so it is", "\n so <think>x", "", "</think>"])
def test_answer_without_thinking_is_free_under_a_budget(qwen: Path, said: str) -> None:
    asked, _ = request(qwen, max_tokens=64, thinking_token_budget=1)
    wanted = [*text_of(qwen).encode(said), 50, 51, 52, text_of(qwen).eos_ids[0]]
    assert bound_tokens(qwen, asked.sampling.grammar, wanted) == wanted


def test_thinking_that_ends_before_its_budget_is_free_behind_it(tmp_path: Path) -> None:
    directory = directory_of(tmp_path / "m", OPENS)
    asked, _ = request(directory, max_tokens=64, thinking_token_budget=9)
    assert asked.reasoning == THINKING
    text = text_of(directory)
    wanted = [50, 51, *text.encode("</think>"), *[52] * 20, *text.encode("</think>"), text.eos_ids[0]]
    assert bound_tokens(directory, asked.sampling.grammar, wanted) == wanted


def test_budget_binds_nothing_where_thinking_cannot_be_longer(qwen: Path, tmp_path: Path) -> None:
    assert not request(qwen, max_tokens=9, thinking_token_budget=9)[0].sampling.grammar
    assert request(qwen, max_tokens=10, thinking_token_budget=9)[0].sampling.grammar
    assert not request(qwen, reasoning_effort="none", thinking_token_budget=1)[0].sampling.grammar
    plain = write_model(tmp_path / "plain")
    assert not request(plain, thinking_token_budget=1)[0].sampling.grammar
    parted = write_model(tmp_path / "parted", chat_template=OPENS)
    with pytest.raises(ApiError, match="not one token each"):
        request(parted, thinking_token_budget=1)


CHANNELS = (
    "{# <|channel|>analysis <|channel|>commentary #}{% if tools %}{{ tools | length }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
A, F, C = (
    "<|channel|>analysis<|message|>",
    "<|start|>assistant<|channel|>final<|message|>",
    "<|constrain|>json<|message|>",
)
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("text", "thinking", "content", "calls"),
    [
        (f"{A}hm<|end|>{F}so", "hm", "so", []),
        (f"{A}hm", "hm", "", []),
        ("plain <|text|> here", "", "plain <|text|> here", []),
        (f'{A}hm<|end|><|start|>assistant<|channel|>commentary to=functions.f {C}{{"a": 1}}', "hm", "", ['{"a": 1}']),
        (f'{A}hm<|end|><|start|>assistant to=functions.f<|channel|>commentary {C}{{"a": 1}}', "hm", "", ['{"a": 1}']),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant", "", "I look.", []),
        (f"<|channel|>commentary to=functions.f {C}{{cut", "", "", ["{cut"]),
        (f"{A}one<|end|><|start|>assistant{A}two<|end|>{F}so<|return|>", "onetwo", "so", []),
        (f"{A}hm<|end|><|start|>assistant<|chan", "hm", "", []),
        ("<|channel|>" + "x" * 300, "", "<|channel|>" + "x" * 300, []),
    ],
)
def test_channels_part_thinking_content_and_calls(text: str, thinking: str, content: str, calls: list[str]) -> None:
    asked = stored(spec(endpoint="chat", reasoning="channels", tools=ToolUse("channels", ("f",), True)))
    tokens = model().encode(text)
    for pieces in ([tokens], singly(tokens), rows(tokens, [3, 7, 20])):
        *told, _, finish_reason, thinking_tokens = fed(pieces, asked)
        assert told == [thinking, content, (["f"] * len(calls), "".join(calls))]
        assert finish_reason == ("tool_calls" if calls else "stop")
        assert (thinking_tokens > 0) == bool(thinking)


def test_channels_are_found_by_the_template_and_kept_with_the_request(tmp_path: Path) -> None:
    directory = directory_of(tmp_path / "m", CHANNELS)
    asked, _ = request(directory, tools=[TOOL])
    assert (asked.reasoning, asked.skip_special_tokens) == ("channels", False)
    assert asked.tools is not None and asked.tools.format == "channels"
    forced, _ = request(directory, tools=[TOOL], tool_choice="required")
    assert forced.reasoning == "channels" and "commentary to=functions.f" in forced.sampling.grammar
    bound, _ = request(directory, guided_regex="a")
    assert bound.reasoning == ""
    with pytest.raises(ApiError, match="not one token each"):
        request(directory, tools=[TOOL], thinking_token_budget=1)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The"}]
    assert request(directory, messages=turns, continue_final_message=True)[0].reasoning == ""


HARMONY = (
    ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"],
    ["analysis", "assistant", "final"],
)
"""Marks of gpt-oss, which are control tokens, and words of its heads."""


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of channels. Each mark and name is one token, as in gpt-oss."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(HARMONY[0])
    tokenizer.add_tokens([*HARMONY[1], " anal"])
    return write_model(tmp_path_factory.mktemp("harmony") / "m", tokenizer, chat_template=CHANNELS)


HEAD = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
FORCED = {False: f"{NEXT}<|channel|>final<|message|>", True: "<|end|><|start|>"}


@pytest.mark.parametrize("may_call", [False, True])
@pytest.mark.parametrize("budget", [1, 7])
def test_analysis_ends_when_its_budget_is_spent(harmony: Path, budget: int, may_call: bool) -> None:
    fields: dict[str, Any] = {"tools": [TOOL]} if may_call else {}
    asked, _ = request(harmony, max_tokens=64, thinking_token_budget=budget, **fields)
    assert (asked.reasoning, asked.grammar_field) == ("channels", "thinking_token_budget")
    text = text_of(harmony)
    head, forced, thought = text.encode(HEAD), text.encode(FORCED[may_call]), [50, 51, 52] * 5
    said = bound_tokens(harmony, asked.sampling.grammar, [*head, *thought, *thought, *thought])
    assert said[: len(head) + budget + len(forced)] == [*head, *thought[:budget], *forced]
    rest = said[len(head) + budget + len(forced) :]
    assert rest == [*thought, *thought, *thought][budget + len(forced) :], "free again"
    wanted = text.text.decode(thought[:budget]), "" if may_call else text.text.decode(rest)
    assert read(asked, text, said) == wanted


def test_budget_counts_all_messages_of_analysis(harmony: Path) -> None:
    asked, _ = request(harmony, max_tokens=64, thinking_token_budget=4, tools=[TOOL])
    text = text_of(harmony)
    between = f"{NEXT}<|channel|>commentary<|message|>I look."
    wanted = text.encode(f"{HEAD}123{between}{NEXT}{HEAD}456")
    said = bound_tokens(harmony, asked.sampling.grammar, [*wanted, *text.encode("7")])
    assert said == [*wanted[:-2], *text.encode("<|end|><|start|>7")][: len(said)]
    later = bound_tokens(harmony, asked.sampling.grammar, [*wanted, 50, *text.encode(f"assistant{HEAD}")])
    assert later[len(wanted) + 2 :].count(text.encode("analysis")[0]) == 0, "none comes behind a spent budget"


@pytest.mark.parametrize(
    "said",
    [
        f"{HEAD}hm{NEXT}<|channel|>final<|message|>so<|return|>",
        f'{HEAD}hm{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}<|call|>',
        f"{HEAD}h{NEXT} to=functions.f<|channel|>commentary<|message|>{{}}<|call|>",
        f"{HEAD}h<|start|>assistant{HEAD}m{NEXT}{HEAD}{NEXT}<|channel|>final<|message|>analysis",
        "<|channel|>final<|message|>an analysis of <|message|> and more and more",
        "plain text without any channel, an analysis",
        "",
    ],
)
def test_channels_are_free_while_the_budget_lasts(harmony: Path, said: str) -> None:
    asked, _ = request(harmony, max_tokens=64, thinking_token_budget=3)
    text = text_of(harmony)
    wanted = [*text.encode(said), text.eos_ids[0]]
    assert bound_tokens(harmony, asked.sampling.grammar, wanted) == wanted


WISHES = st.lists(
    st.sampled_from(["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "analysis", "assistant", "final", " anal",
                     "a", " ", "\n", "x", HEAD, HEAD, NEXT, NEXT + HEAD]),
    max_size=24,
).map("".join)  # fmt: skip


@given(WISHES, st.integers(1, 4), st.booleans())
@example("<|channel|> analysis<|message|>xxx", 1, False)
@example("<|channel|>analysis <|message|>xxx", 1, True)
@settings(max_examples=60, deadline=None)
def test_no_wish_of_a_model_exceeds_the_budget_of_channels(
    harmony: Path, wished: str, budget: int, may_call: bool
) -> None:
    fields: dict[str, Any] = {"tools": [TOOL]} if may_call else {}
    asked, _ = request(harmony, max_tokens=200, thinking_token_budget=budget, **fields)
    text, reader, count = text_of(harmony), ChannelReader(), 0
    for token in bound_tokens(harmony, asked.sampling.grammar, text.encode(wished)):
        was = reader.has_thought
        reader.feed(text.text.decode([token], skip_special=False))
        count += was and reader.has_thought
    assert count <= budget


def test_messages_and_responses_bring_the_budget_of_channels(harmony: Path) -> None:
    said = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2000}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = messages_chat(parse_body(json.dumps(said | {"thinking": thinking}).encode(), MessagesBody))
    sent = {"model": "m", "input": "Hi", "max_output_tokens": 2000, "thinking_token_budget": 1024}
    response = responses_chat(parse_body(json.dumps(sent).encode(), ResponsesBody))
    for body in (message, response):
        made = asyncio.run(chat_spec(body, text_of(harmony), Limits(4096)))
        assert made.grammar_field == "thinking_token_budget"
        assert "{1024}" in made.sampling.grammar


def test_stream_of_channels_with_a_budget_goes_on_at_another_gateway(harmony: Path) -> None:
    asked, _ = request(harmony, max_tokens=64, thinking_token_budget=2, stream=True)
    text = text_of(harmony)
    said = bound_tokens(harmony, asked.sampling.grammar, [*text.encode(HEAD), *[50, 51, 52] * 6])
    events = check_goes_on(asked, said, text, text)
    assert delta_text(events, "reasoning_content") == text.text.decode([50, 51])
    assert delta_text(events, "content") == read(asked, text, said)[1] != ""


OPENING, CLOSING, BEGINS, ENDS = MARKERS["cohere"]
COMMAND = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}"
    "{% if reasoning is not defined or reasoning %}{{ '<|START_THINKING|>' }}"
    "{% else %}{{ '<|START_THINKING|><|END_THINKING|>' }}{% endif %}{% endif %}"
)
"""As Command A Reasoning's: the prompt begins the thinking, or closes it."""


@pytest.fixture(scope="module", params=[True, False], ids=["control", "plain"])
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with control tokens as its marks, and one with plain tokens."""
    folder = tmp_path_factory.mktemp("command") / "m"
    return directory_of(folder, COMMAND, special=request.param, markers=MARKERS["cohere"])


@pytest.mark.parametrize(
    ("fields", "end", "state"),
    [
        ({}, OPENING, THINKING),
        ({"reasoning_effort": "none"}, OPENING + CLOSING, FRAMED),
        ({"chat_template_kwargs": {"enable_thinking": False}}, OPENING + CLOSING, FRAMED),
        ({"chat_template_kwargs": {"enable_thinking": False, "reasoning": True}}, OPENING, THINKING),
        ({"guided_regex": "a"}, OPENING + CLOSING, ""),
    ],
)
def test_switch_of_command_models_closes_the_thinking(
    command: Path, fields: dict[str, Any], end: str, state: str
) -> None:
    made, prompt = request(command, **fields)
    assert text_of(command).reasoning == "cohere"
    assert prompt.endswith("assistant" + end)
    assert (made.reasoning, made.markers) == (state, list(MARKERS["cohere"]) if state else [])
    assert made.skip_special_tokens is not (state == THINKING and text_of(command).hides_markers)


def test_budget_binds_no_command_model_that_does_not_think(command: Path) -> None:
    assert request(command, thinking_token_budget=1)[0].sampling.grammar
    assert not request(command, thinking_token_budget=1, reasoning_effort="none")[0].sampling.grammar


@pytest.mark.parametrize(
    ("content", "state"),
    [
        (f"{OPENING}Let me", THINKING),
        (f"{OPENING}a{CLOSING}", FRAMED),
        (f"{OPENING}a{CLOSING}{BEGINS}The", FRAMED),
        (f"{BEGINS}The", FRAMED),
        ("The ", FRAMED),
    ],
)
def test_continued_message_of_command_models_goes_on(command: Path, content: str, state: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    made, _ = request(command, messages=messages, continue_final_message=True)
    assert made.reasoning == state
    text = text_of(command)
    rest = f" b{CLOSING}{BEGINS} fox{ENDS}" if state == THINKING else f" fox{ENDS}"
    assert read(made, text, text.encode(rest)) == (" b" if state == THINKING else "", " fox")


FRAMES = st.lists(
    st.sampled_from([OPENING, CLOSING, BEGINS, ENDS, BEGINS, ENDS, "<|START_", "<|END_", "RESPONSE|>", "THINKING|>",
                     "<|", "\n", " ", "yes", "é🐋"]),
    max_size=9,
).map("".join)  # fmt: skip


def unframed(text: str, state: str) -> tuple[str, str]:
    """Return thinking and content of a whole answer of a Command model."""
    thinking = ""
    if state == UNDECIDED and (begun := re.match(rf"\s*{re.escape(OPENING)}", text)):
        text, state = text[begun.end() :], THINKING
    if state == THINKING:
        thinking, _, text = text.partition(CLOSING)
    found = re.fullmatch(rf"(?:\s*{re.escape(BEGINS)})?(.*?)(?:{re.escape(ENDS)}\s*)?", text, re.DOTALL)
    assert found is not None
    return thinking, found[1]


@given(FRAMES, CUTS, st.sampled_from([UNDECIDED, THINKING, FRAMED]), st.sampled_from([[], ["s"], ["E|>"]]))
@example(f"{BEGINS}a{ENDS}b{ENDS} {ENDS}\n", [1, 2], UNDECIDED, [])
@example(f"a{CLOSING} {BEGINS}b{ENDS} ", [5], THINKING, [])
@settings(max_examples=120, deadline=None)
def test_framed_answers_are_the_same_however_cut(text: str, cuts: list[int], state: str, stop: list[str]) -> None:
    asked = stored(spec(endpoint="chat", reasoning=state, markers=list(MARKERS["cohere"]), stop=stop, stop_ids=[]))
    tokens = model().encode(text)
    found = fed([*singly(tokens), []], asked)
    assert fed(rows(tokens, cuts) or [[]], asked) == found
    if stop:
        return
    assert found[:2] == unframed(text, state)
    for pieces in ([text], rows(text, cuts), list(text)):
        reader = reader_of(state, MARKERS["cohere"])
        parts = [*map(reader.feed, pieces), reader.flush()]
        assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == unframed(text, state)


def test_stream_of_a_command_model_goes_on_at_another_gateway(command: Path) -> None:
    asked, _ = request(command, max_tokens=64, thinking_token_budget=2, stream=True)
    text = text_of(command)
    wanted = [50, 51, 52, 53, *text.encode(f"{BEGINS}so{ENDS}")]
    said = bound_tokens(command, asked.sampling.grammar, wanted)
    assert said == [50, 51, *text.encode(CLOSING), *wanted[3:]]
    events = check_goes_on(asked, [*said[:3], *said[4:]], text, ModelText(command, reasoning_parser="think"))
    assert delta_text(events, "reasoning_content") == text.text.decode([50, 51])
    assert delta_text(events, "content") == "so"


@pytest.mark.parametrize("family", ["think", "cohere"])
def test_spaces_before_thinking_are_not_copied_with_each_token(family: str) -> None:
    assert bytes_of_one_more(reader_of(UNDECIDED, MARKERS[family]).feed, "\n" * 1024) < 64 << 10
