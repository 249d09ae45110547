"""Tool calls in text: which text is a call and which stays text, however it is cut."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from services.gateway.request import ToolUse
from services.gateway.text.tools.blocks import reader_of
from services.gateway.text.tools.pythonic import MAX_LISTED
from services.gateway.text.tools.reader import CallObject, CallPiece, merge
from tests.support.gateway.generations import bytes_of_one_more, read_calls

NAMES = ("get_weather", "add")
A = '{"city": "Köln", "days": [1, {"x": "}\\"]"}]}'
CALL = '{"name": "get_weather", "arguments": ' + A + "}"
LLAMA = CALL.replace("arguments", "parameters")
WEATHER = ("get_weather", A)
ADD = ("add", "{}")


def read(pieces: list[str], kind: str) -> tuple[str, list[tuple[str, str]]]:
    """Return content and calls."""
    content, calls, _ = read_calls(ToolUse(kind, NAMES, True, texts=("get_weather.city",)), pieces)
    assert [call.index for call in calls] == list(range(len(calls)))
    assert all(call.id and call.name for call in calls)
    return content, [(call.name, call.arguments) for call in calls]


QWEN = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\n7\n</parameter>\n"
    '<parameter=days>\n[1, "x"]\n</parameter>\n</function>\n</tool_call>'
)
FUNCTION = "<tool_call><function=add>x</function></tool_call>"
D_SECTION, D_OPEN, D_SEP, D_CLOSE, D_END = (
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
K_SECTION, K_OPEN, K_ARGS, K_CLOSE, K_END = (
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
)
DEEP = '<tool_call>{"name": ' + "[" * 3000 + "]" * 3000 + "}</tool_call>"
HALF, HALVES = r"\udC0b", r"\ud83D\ud83d\udc0b\uD83d\\\udc0b \\ud83d \ud83d\n \u12"
HALVED = r"""{"\ufffd": "\ufffd\ud83d\udc0b\ufffd\\\ufffd \\ud83d \ufffd\n \u12"}"""
LONE = '<tool_call>{"name": "\\ud800", "arguments": {}}'
"""With a name that UTF-8 cannot hold, and so no answer either."""
WRITTEN = r"""[add(a='''it's''', b=r'\d', c='\x41\
\d' "b", d=(1,), e=(0x1_F), f={'k': ()}, # no [
 class=.5e1,),]"""
READ = r"""{"a": "it's", "b": "\\d", "c": "A\\db", "d": [1], "e": 31, "f": {"k": []}, "class": 5.0}"""
"""One call with the literals of Python, and its arguments."""
BAD = [
    "a=f'x'", "a=b'x'", "a=007", "a=1e999", "a=1 2", "a=1 'x'", "a='x' 1", "a=[1}", "a=,", "a", "=1", "a=b=1",
    "a={'x'}", "a={1: 2}", "a={x: 2}", "a=[b=1]", "a={b=1}", "a=x", "a=[1][0]", "a='\n'", "**a", "a=*b", "a=(,)",
    "a=1)(", "a=1+1", r"a='\xz'", r"a='\N{NO SUCH NAME}'", "a=" + "9" * 5_000, "a=" + "[" * 300 + "]" * 300,
    "a=1), (b=2",
]  # fmt: skip
"""Arguments of a call in Python that are no literals by their names."""
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
    ("hermes", DEEP, DEEP, []),
    ("hermes", LONE, LONE, []),
    ("granite", f"<|tool_call|>[{LONE[11:]}", f"<|tool_call|>[{LONE[11:]}", []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("hermes", CALL, CALL, []),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {{"{HALF}": "{HALVES}"}}}}', "", [("add", HALVED)]),
    ("hermes", f'<tool_call>{{"arguments": {{"{HALF}": "{HALVES}"}}, "name": "add"}}', "", [("add", HALVED)]),
    ("hermes", r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d\ud8', "", [("add", r'{"a": "\ufffd\ud8')]),
    ("mistral", f'[TOOL_CALLS]add[ARGS]{{"{HALF}": "{HALVES}"}}', "", [("add", HALVED)]),
    ("channels", f'<|channel|>functions.add<|message|>{{"{HALF}": "{HALVES}"}}<|call|>', "", [("add", HALVED)]),
    ("kimi-k2", rf'{K_OPEN}add:0{K_ARGS}{{"a": "\ud83d\u{K_CLOSE}', "", [("add", r'{"a": "\ufffd\u')]),
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
    ("granite", f"Hm <|tool_call|>[{CALL}, {CALL}]", "Hm", [WEATHER, WEATHER]),
    ("granite", "<|tool_call|>get_weather[ARGS]{}", "<|tool_call|>get_weather[ARGS]{}", []),
    ("qwen3-coder", f"So.\n{QWEN}\n{QWEN} bye", "So.bye", [("get_weather", '{"city": "7", "days": [1, "x"]}')] * 2),
    ("qwen3-coder", "<tool_call>\n<function=add>\n</function>\n</tool_call>", "", [ADD]),
    ("qwen3-coder", "<tool_call><function=add><parameter=a>1</", "", [("add", '{"a": ')]),
    ("qwen3-coder", "<tool_call><function=add><parameter=a>1</parameter>", "", [("add", '{"a": 1}')]),
    ("qwen3-coder", "<tool_call><function=add><parameter=a>1</parameter>\n</function>\n", "", [("add", '{"a": 1}')]),
    ("qwen3-coder", FUNCTION, FUNCTION, []),
    ("qwen3-coder", f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>", []),
    ("qwen3-coder", "a <tool_call><funny", "a <tool_call><funny", []),
    ("glm-4.5", "<tool_call>add\n</tool_call><tool_call>add</tool_call>", "", [ADD, ADD]),
    (
        "glm-4.5",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>7\n</arg_value>\n<arg_key>on</arg_key>\n"
        "<arg_value>True</arg_value>\n</tool_call>",
        "",
        [("get_weather", '{"city": "7\\n", "on": true}')],
    ),
    ("glm-4.5", "<tool_call>add<arg_key>a</arg_key><arg_value>1</", "", [("add", '{"a": ')]),
    ("glm-4.5", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>", "", [("add", '{"a": 1}')]),
    ("glm-4.5", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>\n", "", [("add", '{"a": 1}')]),
    (
        "glm-4.5",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1e999</arg_value></tool_call>",  # too large for a number
        "",
        [("add", '{"a": "1e999"}')],
    ),
    (
        "glm-4.5",
        r'<tool_call>add<arg_key>a</arg_key><arg_value>"\ud83d\udc0b \ud83d"</arg_value></tool_call>',
        "",
        [("add", '{"a": "🐋 �"}')],
    ),
    ("glm-4.5", "<tool_call>well, no</tool_call>", "<tool_call>well, no</tool_call>", []),
    ("glm-4.5", "<tool_call>add\n<arg_key>a</tool_call>", "<tool_call>add\n<arg_key>a</tool_call>", []),
    (
        "deepseek-v3",
        f"{D_SECTION}{D_OPEN}add{D_SEP}{{}}{D_CLOSE}{D_OPEN}get_weather{D_SEP}{A}{D_CLOSE}{D_END}",
        "",
        [ADD, WEATHER],
    ),
    (
        "deepseek-v3",
        f"Hm {D_SECTION}{D_OPEN}function{D_SEP}add\n```json\n{{}}\n```{D_CLOSE}\n{D_END} so",
        "Hmso",
        [ADD],
    ),
    ("deepseek-v3", f"{D_OPEN}add{D_SEP}{{nonsense{D_CLOSE} so", "so", [("add", "{nonsense")]),
    ("deepseek-v3", f"{D_OPEN}add{D_SEP}nonsense{D_CLOSE}", f"{D_OPEN}add{D_SEP}nonsense{D_CLOSE}", []),
    ("deepseek-v3", f"{D_SECTION} no", f"{D_SECTION} no", []),
    (
        "kimi-k2",
        f"{K_SECTION}{K_OPEN}functions.add:0{K_ARGS}{{}}{K_CLOSE}{K_OPEN}functions.get_weather:1{K_ARGS}{A}{K_CLOSE}{K_END}",
        "",
        [ADD, WEATHER],
    ),
    ("kimi-k2", f"{K_OPEN}add {K_ARGS} {{}} {K_CLOSE}", "", [ADD]),
    ("kimi-k2", f"{K_OPEN}functions.add:0{K_ARGS}[]{K_CLOSE}", f"{K_OPEN}functions.add:0{K_ARGS}[]{K_CLOSE}", []),
    (
        "pythonic",
        "[get_weather(city='K\\'n]', days=[1, -2.5], on={'a': None}), add()]",
        "",
        [("get_weather", '{"city": "K\'n]", "days": [1, -2.5], "on": {"a": null}}'), ADD],
    ),
    ("pythonic", " <|python_start|>[add(a=true)]<|python_end|>", "", [("add", '{"a": true}')]),
    ("pythonic", r'[add(a="\ud83d\udc0b \ud83d")]', "", [("add", '{"a": "🐋 �"}')]),
    ("pythonic", WRITTEN, "", [("add", READ)]),
    *(("pythonic", f"[add({bad})]", f"[add({bad})]", []) for bad in BAD),
    ("pythonic", "[add(), 1]", "[add(), 1]", []),
    ("pythonic", "[add(),, add()]", "[add(),, add()]", []),
    ("pythonic", "[add(1)]", "[add(1)]", []),
    ("pythonic", "[add(a=__import__('os'))]", "[add(a=__import__('os'))]", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    ("pythonic", "[1, 2] are numbers", "[1, 2] are numbers", []),
    ("pythonic", "See [add()]", "See [add()]", []),
    ("pythonic", "[add(a=1)", "[add(a=1)", []),
    ("pythonic", "[add(a=1)] done", "done", [("add", '{"a": 1}')]),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_reader_finds_calls_and_keeps_other_text(
    kind: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read([text], kind) == (content, calls)
    assert read(list(text), kind) == (content, calls), "cut into characters"


def test_arguments_are_streamed_after_the_name() -> None:
    reader = reader_of(ToolUse("hermes", NAMES, True), "chatcmpl-1", 1)
    bodies: list[Any] = []
    for char in f"<tool_call>{CALL}</tool_call>":
        _, pieces = reader.feed(char)
        bodies += [piece.body() for piece in pieces]
    assert bodies[0]["function"] == {"name": "get_weather", "arguments": ""} and bodies[0]["type"] == "function"
    assert all("name" not in body["function"] and "id" not in body for body in bodies[1:])
    assert "".join(body["function"]["arguments"] for body in bodies) == A and len(bodies) > 20


STREAMED = {
    "qwen3-coder": '<tool_call><function=get_weather><parameter=city>\nKöln "am" Rhein\n</parameter>'
    "<parameter=days>[1, 2]</parameter></function></tool_call>",
    "glm-4.5": '<tool_call>get_weather\n<arg_key>city</arg_key><arg_value>Köln "am" Rhein</arg_value>\n'
    "<arg_key>days</arg_key><arg_value>[1, 2]</arg_value></tool_call>",
    "deepseek-v3": f"{D_OPEN}get_weather{D_SEP}{A}{D_CLOSE}",
    "kimi-k2": f"{K_OPEN}functions.get_weather:0{K_ARGS}{A}{K_CLOSE}",
    "channels": f"<|channel|>functions.get_weather<|message|>{A}<|call|>",
}


@pytest.mark.parametrize("kind", STREAMED)
def test_arguments_in_blocks_are_streamed(kind: str) -> None:
    reader = reader_of(ToolUse(kind, NAMES, True, texts=("get_weather.city",)), "chatcmpl-1", 0)
    gained = [reader.feed(char)[1] for char in STREAMED[kind]]
    pieces = [piece for each in gained for piece in each]
    assert [bool(piece.name) for piece in pieces].count(True) == 1 and pieces[0].name == "get_weather"
    arguments = json.loads("".join(piece.arguments for piece in pieces))
    assert arguments["city"] == ("Köln" if "Rhein" not in STREAMED[kind] else 'Köln "am" Rhein')
    assert sum(bool(each) for each in gained) > 14, "most characters of the arguments are told at once"
    begun = "".join(piece.arguments for each in gained[: STREAMED[kind].index("days")] for piece in each)
    assert begun.startswith('{"city": "K')


def test_call_ids_depend_on_request_choice_and_index() -> None:
    def ids(request: str, choice: int, kind: str) -> list[str]:
        reader = reader_of(ToolUse(kind, NAMES, True), request, choice)
        text = {"hermes": f"<tool_call>{CALL}</tool_call>" * 2, "mistral": f"[TOOL_CALLS][{CALL},{CALL}]"}[kind]
        return [piece.id for piece in reader.feed(text)[1] if piece.name]

    assert ids("r", 0, "hermes") == ids("r", 0, "hermes")
    assert len({*ids("r", 0, "hermes"), *ids("r", 1, "hermes"), *ids("q", 0, "hermes")}) == 6
    assert all(len(found) == 9 and found.isalnum() for found in ids("r", 0, "mistral"))


def test_calls_of_kimi_keep_the_ids_that_the_model_wrote() -> None:
    calls = "".join(f"{K_OPEN}functions.add:{at}{K_ARGS}{{}}{K_CLOSE}" for at in (4, 4, 5))
    ids = [piece.id for piece in reader_of(ToolUse("kimi-k2", NAMES, True), "r", 0).feed(calls)[1] if piece.name]
    assert (ids[0], ids[2]) == ("functions.add:4", "functions.add:5") and ids[1].startswith("call_")


BLANKS = "\n" * 150_000
HOSTILE = {
    "kimi: blanks between members": ("kimi-k2", f'{K_OPEN}functions.add:0{K_ARGS}{{"a": 1,{BLANKS}"b": 2}}{K_CLOSE}'),
    "kimi: blanks in an object": ("kimi-k2", f"{K_OPEN}functions.add:0{K_ARGS}{{{BLANKS}}}x{K_CLOSE}"),
    "deepseek: blanks between members": ("deepseek-v3", f'{D_OPEN}add{D_SEP}{{"a": 1,{BLANKS}"b": 2}}{D_CLOSE}'),
    "deepseek: blanks in an object": ("deepseek-v3", f"{D_OPEN}add{D_SEP}{{{BLANKS}x{D_CLOSE}"),
    "glm: marks again and again": ("glm-4.5", f"<tool_call>add<arg_key>{'</arg_key><arg_value>' * 50_000}</tool_call>"),
    "qwen: ends of values": (
        "qwen3-coder", f"<tool_call><function=add><parameter=a>{'</parameter> ' * 50_000}</function></tool_call>",
    ),
    "qwen: marks where a head may come": ("qwen3-coder", f"<tool_call><function=add>{'> ' * 50_000}</tool_call>"),
    "kimi: braces where a head may come": ("kimi-k2", f"{K_OPEN}add:0<{'{ ' * 50_000}{K_CLOSE}"),
    "pythonic: brackets in a text": ("pythonic", f"[add(a='{'])} ' * 50_000}')]"),
    "pythonic: fields of a text": ("pythonic", f"[add(a=f'{'{1}' * 500_000}')]"),
    "pythonic: levels": ("pythonic", f"[add(a={'[' * 500_000})]"),
    "qwen: blanks at the beginning": ("qwen3-coder", "<tool_call>" + BLANKS),
    "qwen: blanks around the head": ("qwen3-coder", f"<tool_call>{' ' * 256_000}<function=add>{BLANKS}no"),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "text"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_block_takes_work_in_proportion_to_its_size(kind: str, text: str) -> None:
    """With lazy groups each of them took minutes or hours."""
    content, calls = read([text], kind)
    assert content == text or [name for name, _ in calls] == ["add"]
    assert read([text[at : at + 32] for at in range(0, len(text), 32)], kind) == (content, calls)


def test_list_of_calls_in_python_is_text_beyond_a_bound_of_calls() -> None:
    """They are all told at once, and an event loop waits for it."""
    most, more = (f"[{', '.join(['add(a=1)'] * count)}]" for count in (MAX_LISTED, MAX_LISTED + 1))
    assert read([most], "pythonic")[1] == [("add", '{"a": 1}')] * MAX_LISTED
    assert read([more], "pythonic") == (more, [])


@pytest.mark.parametrize("begun", ["[add(a=[" + "'x', -1, " * 2_000 + "])", "[" + "add(a='x'), " * 1_000])
def test_end_of_a_list_of_calls_in_python_takes_no_work_for_its_length(begun: str) -> None:
    """The list is read while it comes: its end is no long turn of the event loop."""
    reader, steps = reader_of(ToolUse("pythonic", NAMES, parallel=False), "r", 0), 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    reader.feed(begun)
    sys.setprofile(count)
    try:
        _, calls = reader.feed("]")
    finally:
        sys.setprofile(None)
    assert [call.name for call in calls if call.name] == ["add"]
    assert steps < 300


@pytest.mark.timeout(60)
def test_pieces_of_a_call_are_joined_in_proportion_to_their_size() -> None:
    """Added to one another, they took minutes."""
    count = 400_000
    pieces = [CallPiece(0, "id", "add", ""), *[CallPiece(0, "", "", "x" * 16)] * count]
    assert merge(pieces) == [CallPiece(0, "id", "add", "x" * 16 * count)]


HELD = [
    ("hermes", "", " "), ("hermes", "<tool_call>", " "), ("hermes", '<tool_call>{"x": "', "y"), ("llama3", "", " "),
    ("llama3", "<|python_tag|>", "\n"), ("llama3", '{"x": "', "y"), ("mistral", "[TOOL_CALLS]add[ARGS]", " "),
    ("granite", '<|tool_call|>[{"name": "add"}', " "), ("qwen3-coder", "<tool_call>", "\n"),
    ("qwen3-coder", "<tool_call><function=add>", "y"), ("glm-4.5", "<tool_call>add", " "),
    ("glm-4.5", "<tool_call>add</tool_call>", " "), ("deepseek-v3", D_SECTION, "\n"),
    ("kimi-k2", K_OPEN + "add:0", " "), ("pythonic", "", " "), ("pythonic", "[", " "),
    ("pythonic", "[add(a='", "y"), ("pythonic", "[add()]", "\n"), ("pythonic", "[add(a='", "])}"),
    ("qwen3-coder", "<tool_call><function=add>", "a > "), ("glm-4.5", "<tool_call>add<", "a > "),
    ("deepseek-v3", D_OPEN + "add<", "{}"), ("kimi-k2", K_OPEN + "add:0<", "{}"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "begun", "piece"), HELD)
def test_text_that_is_held_back_is_not_copied_with_each_token(kind: str, begun: str, piece: str) -> None:
    reader = reader_of(ToolUse(kind, NAMES, True), "r", 0)
    reader.feed(begun)
    assert bytes_of_one_more(reader.feed, piece * 1024) < 64 << 10


def test_key_of_a_call_that_is_held_back_is_not_copied_with_each_token() -> None:
    for begun in ('{"x": "', '{"arguments": {"x": "'):
        call = CallObject()
        call.feed(begun)
        assert bytes_of_one_more(call.feed, "y" * 1024) < 64 << 10
