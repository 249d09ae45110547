"""Tool calls in text: which text is a call and which stays text, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.request import ToolUse
from services.gateway.text.tools.reader import ToolReader, merged

NAMES = ("get_weather", "add")
A = '{"city": "Köln", "days": [1, {"x": "}\\"]"}]}'
CALL = '{"name": "get_weather", "arguments": ' + A + "}"
LLAMA = CALL.replace("arguments", "parameters")
WEATHER = ("get_weather", A)
ADD = ("add", "{}")


def read(pieces: list[str], kind: str, parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls."""
    reader = ToolReader(ToolUse(kind, NAMES, parallel), "chatcmpl-1", 0)
    content, calls = "", []
    for piece in pieces:
        text, gained = reader.feed(piece)
        content, calls = content + text, calls + gained
    text, gained = reader.flush()
    calls = merged(calls + gained)
    assert [call.index for call in calls] == list(range(reader.calls))
    assert all(call.id and call.name for call in calls)
    return content + text, [(call.name, call.arguments) for call in calls]


CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "no call at all \n", "no call at all \n", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER]),
    ("hermes", f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n", "Let me see.", [WEATHER]),
    (
        "hermes",
        f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"arguments":{{}},"name":"add"}}\n</tool_call> bye ',
        "bye",
        [WEATHER, ADD],
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [ADD]),
    ("hermes", '<tool_call>{"name": "add", "id": 7, "arguments": {}}</tool_call>', "", [ADD]),
    ("hermes", "<tool_call>nothing", "<tool_call>nothing", []),
    ("hermes", '<tool_call>{"nome": 1}</tool_call>x', '<tool_call>{"nome": 1}</tool_call>x', []),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}', '<tool_call>{"name": 1, "arguments": {}}', []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("hermes", CALL, CALL, []),
    ("llama3", LLAMA, "", [WEATHER]),
    ("llama3", f"\n {LLAMA} ; {LLAMA}", "", [WEATHER, WEATHER]),
    ("llama3", f"<|python_tag|>{LLAMA}", "", [WEATHER]),
    ("llama3", f"Well: {LLAMA}", f"Well: {LLAMA}", []),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3", "<|py", "<|py", []),
    ("llama3", "", "", []),
    ("mistral", f"[TOOL_CALLS][{CALL}]", "", [WEATHER]),
    ("mistral", f'[TOOL_CALLS] [{CALL}, {{"name": "add", "arguments": {{}}, "id": "x"}}]', "", [WEATHER, ADD]),
    ("mistral", f"Hm [TOOL_CALLS][{CALL}", "Hm", [WEATHER]),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{A}", "", [WEATHER]),
    ("mistral-args", f"[TOOL_CALLS]get_weather[ARGS]{A}", "", [WEATHER]),
    ("mistral-args", f"[TOOL_CALLS][{CALL}, {CALL}]", "", [WEATHER, WEATHER]),
    ("mistral", f"Hm [TOOL_CALLS] get_weather[ARGS] {A}[TOOL_CALLS]add[ARGS]{{}} ] bye", "Hm] bye", [WEATHER, ADD]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]Ab3[ARGS]{A}", "", [WEATHER]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": [{', "", [("add", '{"a": [{')]),
    ("mistral", "[TOOL_CALLS]add[ARGS]", "[TOOL_CALLS]add[ARGS]", []),
    ("mistral", "[TOOL_CALLS]add[ARGS] 4", "[TOOL_CALLS]add[ARGS] 4", []),
    ("mistral", "[TOOL_CALLS]add [ARGS]{}", "[TOOL_CALLS]add [ARGS]{}", []),
    ("mistral", "[TOOL_CALLS]add[CALL_ID]x", "[TOOL_CALLS]add[CALL_ID]x", []),
    ("mistral", f"[TOOL_CALLS]{'a' * 65}[ARGS]{{}}", f"[TOOL_CALLS]{'a' * 65}[ARGS]{{}}", []),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_reader_finds_calls_and_keeps_other_text(
    kind: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read([text], kind) == (content, calls)
    assert read(list(text), kind) == (content, calls), "cut into characters"


def test_reader_returns_one_call_without_parallel_calls() -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call> more"
    assert read([text], "hermes", parallel=False) == ("", [WEATHER])


def test_arguments_are_streamed_after_the_name() -> None:
    reader = ToolReader(ToolUse("hermes", NAMES, True), "chatcmpl-1", 1)
    bodies: list[Any] = []
    for char in f"<tool_call>{CALL}</tool_call>":
        _, pieces = reader.feed(char)
        bodies += [piece.body() for piece in pieces]
    assert bodies[0]["function"] == {"name": "get_weather", "arguments": ""} and bodies[0]["type"] == "function"
    assert all("name" not in body["function"] and "id" not in body for body in bodies[1:])
    assert "".join(body["function"]["arguments"] for body in bodies) == A and len(bodies) > 20


def test_call_ids_depend_on_request_choice_and_index() -> None:
    def ids(request: str, choice: int, kind: str) -> list[str]:
        reader = ToolReader(ToolUse(kind, NAMES, True), request, choice)
        text = {"hermes": f"<tool_call>{CALL}</tool_call>" * 2, "mistral": f"[TOOL_CALLS][{CALL},{CALL}]"}[kind]
        return [piece.id for piece in reader.feed(text)[1] if piece.name]

    assert ids("r", 0, "hermes") == ids("r", 0, "hermes")
    assert len({*ids("r", 0, "hermes"), *ids("r", 1, "hermes"), *ids("q", 0, "hermes")}) == 6
    assert all(len(found) == 9 and found.isalnum() for found in ids("r", 0, "mistral"))
