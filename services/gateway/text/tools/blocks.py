"""Read tool calls that stand in blocks between two marks, or are written as Python; each is told when it is whole.

    qwen3-coder  <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    glm-4.5      <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    deepseek-v3  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>, or function<｜tool▁sep｜>f and the
                 object in a fence; perhaps between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>
    kimi-k2      <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>, perhaps between
                 <|tool_calls_section_begin|> and <|tool_calls_section_end|>
    channels     <|channel|>functions.f<|message|>{"a": 1}<|call|>, as reasoning.py writes calls of gpt-oss
    pythonic     [f(a=1), g()] - and nothing before it

As in reader.py the output is a function of the text so far, however it was cut. A block that is no call stays text,
with its marks. A value of the first two is text where the schema of its parameter says so (`ToolUse.texts`), else JSON,
else text after all.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from services.gateway.request import ToolUse
from services.gateway.text.tools.formats import BLOCKS, PYTHON_START
from services.gateway.text.tools.reader import Reader, ToolReader, overlap

PYTHON_END = "<|python_end|>"
_END_OF_FUNCTION = "</function>"


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call. arguments: JSON. id: as the model wrote it, empty where its format has none."""

    name: str
    arguments: str
    id: str = ""


def reader_of(use: ToolUse, request_id: str, choice: int) -> Reader:
    """Return the reader of a choice's calls."""
    if use.format == "pythonic":
        return PythonicReader(use, request_id, choice)
    kind = BlockReader if use.format in BLOCKS else ToolReader
    return kind(use, request_id, choice)


class _At(Enum):
    TEXT = auto()
    SECTION = auto()  # behind the mark of a section: a block comes
    BLOCK = auto()
    BEHIND = auto()  # behind a block: another comes, or the end of the section
    OVER = auto()  # one call was all that was wanted


class BlockReader(Reader):
    """The text of one choice in; text and calls in blocks out."""

    def __init__(self, use: ToolUse, request_id: str, choice: int) -> None:
        super().__init__(use, request_id, choice)
        self._marks = BLOCKS[use.format]
        self._parse = PARSERS[use.format]
        self._at = _At.TEXT
        self._looked = 0  # so much of a block was looked through for its end
        self._begins = False  # the block begins as a call does
        self._ids: set[str] = set()  # that the model wrote

    def _go_on(self) -> bool:
        match self._at:
            case _At.TEXT:
                return self._find_mark()
            case _At.SECTION:
                return self._begin_block()
            case _At.BLOCK:
                return self._read_block()
            case _At.BEHIND:
                return self._go_behind()
            case _At.OVER:
                self._held = ""
                return False

    def _finish(self) -> None:
        if self._use.forced:
            self._cut_call()
        elif self._at is not _At.OVER:
            self._say(self._raw + self._held)

    def _cut_call(self) -> None:
        """Tell a call that has to come and was cut: its name, if that was written whole."""
        named = NAMED[self._use.format].match(self._held) if self._at is _At.BLOCK else None
        name = named[1] if named is not None and named[1] in self._use.names else ""
        if not name and not self.calls and len(self._use.names) == 1:
            name = self._use.names[0]
        if name:
            self._begin_call(name)
            self.cut = True

    def _find_mark(self) -> bool:
        marks = [mark for mark in (self._marks.section, self._marks.opening) if mark]
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            keep = max(overlap(self._held, mark) for mark in marks)
            self._say(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        at, mark = min(found)
        self._say(self._held[:at])
        self._raw, self._held, self._looked = mark, self._held[at + len(mark) :], 0
        self._begins = False
        self._at = _At.BLOCK if mark == self._marks.opening else _At.SECTION
        return True

    def _begin_block(self) -> bool:
        rest, opening = self._skip_blanks(), self._marks.opening
        if len(rest) < len(opening) and opening.startswith(rest):
            return False
        if not rest.startswith(opening):
            return self._is_text()
        self._raw, self._held, self._looked = self._raw + opening, rest[len(opening) :], 0
        self._begins = False
        self._at = _At.BLOCK
        return True

    def _read_block(self) -> bool:
        if not self._begins and (not self._looked or self._held[self._looked :].strip()):  # blanks decide nothing
            begin = BEGINS[self._use.format].match(self._held)
            if begin is None:
                return self._is_text()
            self._begins = begin.end() < len(self._held)
        closing = self._marks.closing
        end = self._held.find(closing, max(0, self._looked - len(closing)))
        while end >= 0 and not self._ends_at(end):
            end = self._held.find(closing, end + len(closing))
        if end < 0:
            self._looked = len(self._held)
            return False
        call = self._parse(self._held[:end], self._use)
        if call is None:
            self._raw += self._held[: end + len(closing)]
            self._held = self._held[end + len(closing) :]
            return self._is_text()
        self._held = self._held[end + len(closing) :]
        self._whole_call(call)
        self._at = _At.BEHIND if self._use.parallel else _At.OVER
        return True

    def _ends_at(self, end: int) -> bool:
        """Return whether the closing mark there is that of the block, and no part of a value."""
        kind = self._use.format
        if kind not in ("qwen3-coder", "glm-4.5"):
            return True
        if kind == "glm-4.5" and self._held.find("<arg_key>", 0, end) < 0:
            return True
        while end and self._held[end - 1].isspace():
            end -= 1
        return self._held.endswith(_END_OF_FUNCTION if kind == "qwen3-coder" else "</arg_value>", 0, end)

    def _go_behind(self) -> bool:
        rest, end = self._skip_blanks(), self._marks.section_end
        if not rest or (len(rest) < len(end) and end.startswith(rest)):
            return False
        self._raw, self._held = "", rest.removeprefix(end) if end else rest
        self._at = _At.TEXT
        return True

    def _whole_call(self, call: Call) -> None:
        self._begin_call(call.name, "" if call.id in self._ids else call.id)
        self._ids.add(call.id)
        self._argue(call.arguments)

    def _is_text(self) -> bool:
        self._at = _At.TEXT
        return super()._is_text()


_NAME = r"[\w.-]{1,64}"
NAMED = {
    "qwen3-coder": re.compile(rf"\s*<function=({_NAME})>"),
    "glm-4.5": re.compile(rf"\s*({_NAME})\s*[\n<]"),
    "deepseek-v3": re.compile(rf"\s*(?:function<｜tool▁sep｜>)?({_NAME})\s*[\n<]"),
    "channels": re.compile(rf"({_NAME})<"),
    "kimi-k2": re.compile(rf"\s*(?:functions\.)?({_NAME}?)(?::\d{{1,9}})?\s*<"),
}
"""The name of a call at the beginning of a block."""
BEGINS = {
    "qwen3-coder": re.compile(r"\s*(?:<function=|<(?:f(?:u(?:n(?:c(?:t(?:i(?:o(?:n)?)?)?)?)?)?)?)?\Z|\Z)"),
    "glm-4.5": re.compile(r"\s*(?:[\w.-]{0,64}\Z|[\w.-]{1,64}\s*(?:[\n<]|\Z))"),
    "deepseek-v3": re.compile(r"\s*(?:[\w.-]{0,64}\Z|[\w.-]{1,64}\s*(?:[\n<]|\Z))"),
    "channels": re.compile(r"(?:[\w.-]{0,64}\Z|[\w.-]{1,64}<)"),
    "kimi-k2": re.compile(r"\s*(?:[\w.:-]{0,80}\Z|[\w.:-]{1,80}\s*(?:<|\Z))"),
}
"""Matches at the beginning of a block that may become a call."""
_GLM = re.compile(rf"\s*({_NAME})\s*?(?:\n|(?=<)|\Z)(.*)", re.DOTALL)
_PLAIN_NAME = re.compile(_NAME)
_KIMI_ID = re.compile(rf"(?:functions\.)?({_NAME}?)(?::\d{{1,9}})?")


@dataclass(frozen=True, slots=True)
class _Pair:
    """How a key and its value are written. end: of a value, behind which another pair comes, or nothing."""

    begin: re.Pattern[str]
    end: re.Pattern[str]


_PARAMETER = _Pair(
    re.compile(r"\s*<parameter=([^>\n]{1,256})>\n?"), re.compile(r"\n?</parameter>\s*(?=<parameter=|\Z)")
)
_ARGUMENT = _Pair(
    re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>"), re.compile(r"</arg_value>\s*(?=<arg_key>|\Z)")
)
_WORDS = {"True": True, "False": False, "None": None}


def _qwen3_coder(block: str, use: ToolUse) -> Call | None:
    head, text = NAMED["qwen3-coder"].match(block), block.rstrip()
    if head is None or not text.endswith(_END_OF_FUNCTION):
        return None
    return _pairs_call(head[1], text[head.end() : -len(_END_OF_FUNCTION)], _PARAMETER, use)


def _glm(block: str, use: ToolUse) -> Call | None:
    found = _GLM.fullmatch(block)
    return None if found is None else _pairs_call(found[1], found[2], _ARGUMENT, use)


def _pairs_call(name: str, text: str, pair: _Pair, use: ToolUse) -> Call | None:
    """Return a call whose arguments are pairs of a key and a value, one after another."""
    values: dict[str, Any] = {}
    at = 0
    while at < len(text):
        begin = pair.begin.match(text, at)
        end = pair.end.search(text, begin.end()) if begin is not None else None
        if begin is None or end is None:
            break
        values[begin[1]] = _value(text[begin.end() : end.start()], f"{name}.{begin[1]}" in use.texts)
        at = end.end()
    return None if text[at:].strip() else Call(name, _written(values))


def _written(values: dict[str, Any]) -> str:
    """Return JSON that UTF-8 can hold: surrogates that escapes left are joined to pairs, lone ones replaced."""
    written = json.dumps(values, ensure_ascii=False, allow_nan=False)
    return written.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _value(written: str, is_text: bool) -> Any:
    if is_text:
        return written
    try:
        return json.loads(written, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return _WORDS.get(written.strip(), written)


def _no_constant(name: str) -> Any:
    """Refuse NaN and Infinity, which are no JSON."""
    raise ValueError(name)


def _finite(written: str) -> float:
    """Refuse numbers such as 1e999, which would be written as Infinity."""
    value = float(written)
    if math.isinf(value):
        raise ValueError(written)
    return value


def _deepseek(block: str, _use: ToolUse) -> Call | None:
    name, mark, arguments = block.strip().partition("<｜tool▁sep｜>")
    if not mark:
        return None
    if name == "function":
        fenced, fence, rest = arguments.partition("```json")
        if fence and rest.endswith("```") and _PLAIN_NAME.fullmatch(fenced.rstrip()):
            return _object_call(fenced.rstrip(), rest.removesuffix("```").strip())
    name = name.rstrip()
    return _object_call(name, arguments.strip()) if _PLAIN_NAME.fullmatch(name) else None


def _channels(block: str, _use: ToolUse) -> Call | None:
    name, mark, arguments = block.partition("<|message|>")
    return _object_call(name, arguments.strip()) if mark else None


def _kimi(block: str, _use: ToolUse) -> Call | None:
    """Return a call under the id that the model wrote: its template shows it again beside the result."""
    head, mark, arguments = block.partition("<|tool_call_argument_begin|>")
    id = head.strip()
    found = _KIMI_ID.fullmatch(id)
    if not mark or found is None:
        return None
    call = _object_call(found[1], arguments.strip())
    return call if call is None or ":" not in id else Call(call.name, call.arguments, id)


def _object_call(name: str, arguments: str | None) -> Call | None:
    try:
        value = json.loads(arguments or "")
    except (ValueError, RecursionError):
        return None
    return Call(name, arguments or "") if isinstance(value, dict) else None


PARSERS: dict[str, Callable[[str, ToolUse], Call | None]] = {
    "qwen3-coder": _qwen3_coder,
    "glm-4.5": _glm,
    "deepseek-v3": _deepseek,
    "kimi-k2": _kimi,
    "channels": _channels,
}


class PythonicReader(Reader):
    """The text of one choice in; a list of calls in Python out, if the text begins with one."""

    def __init__(self, use: ToolUse, request_id: str, choice: int) -> None:
        super().__init__(use, request_id, choice)
        self._may_begin = True
        self._is_behind = False  # the list was read, the mark behind it not
        self._headless = 0  # so much of what is held was looked through for the head of the list
        self._looked = 0  # so much of what is held was looked through for the end of the list
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def _go_on(self) -> bool:
        if self._is_behind:
            rest = self._skip_blanks()
            if len(rest) < len(PYTHON_END) and PYTHON_END.startswith(rest):
                return False
            self._raw, self._held, self._is_behind = "", rest.removeprefix(PYTHON_END), False
        if not self._may_begin:
            if self._use.parallel or not self.calls:
                self._say(self._held)
            self._held = ""
            return False
        if self._headless and not self._held[self._headless :].strip():
            return False  # blanks decide nothing
        start = _BEGINS_LIST.match(self._held)
        if start is None:
            return self._is_plain()
        if start[1] is None:
            self._headless = len(self._held)
            return False  # the head of a list is not there yet
        self._headless = 0
        begin = start.start(1)
        end = self._end_of_list(begin)
        if end < 0:
            return self._is_plain() if self._depth < 0 else False
        calls = python_calls(self._held[begin:end], self._use.names)
        if calls is None:
            return self._is_plain()
        for call in calls if self._use.parallel else calls[:1]:
            self._begin_call(call.name)
            self._argue(call.arguments)
        self._held = self._held[end:]
        self._may_begin, self._is_behind = False, True
        return True

    def _finish(self) -> None:
        if self._use.forced:
            if not self.calls:
                named = _FIRST_NAME.match(self._held)
                names = self._use.names
                name = named[1] if named is not None and named[1] in names else names[0] if len(names) == 1 else ""
                if name:
                    self._begin_call(name)
                    self.cut = True
        elif self._use.parallel or not self.calls:
            self._say(self._held)

    def _is_plain(self) -> bool:
        self._may_begin = False
        return True

    def _end_of_list(self, begin: int) -> int:
        """Return where the list that begins there ends, -1 while it has not."""
        for at in range(max(begin, self._looked), len(self._held)):
            char = self._held[at]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in "[({":
                self._depth += 1
            elif char in "])}":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        self._looked = len(self._held)
        return -1


_START = re.escape(PYTHON_START)
_START_CUT = "|".join(re.escape(PYTHON_START[:size]) for size in range(len(PYTHON_START) - 1, 0, -1))
_BEGINS_LIST = re.compile(
    rf"\s*(?:{_START}\s*)?(?:(\[\s*{_NAME}\s*\()|(?:\[\s*(?:{_NAME}\s*)?)?\Z)|\s*(?:{_START_CUT})\Z"
)
"""The head of a list of calls (group 1), or what may become one."""
_FIRST_NAME = re.compile(rf"\s*(?:{_START}\s*)?\[\s*({_NAME})\s*\(")


def python_calls(written: str, names: tuple[str, ...]) -> list[Call] | None:
    """Return the calls of a list such as `[f(a=1), g()]`; None where it is none, or calls what may not be called."""
    try:
        tree = ast.parse(written.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        calls = [_python_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return calls if all(call.name in names for call in calls) else None


def _python_call(node: ast.expr) -> Call:
    """Raise ValueError for what is no call with named arguments that are literals."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call")
    values = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("no name")
        values[keyword.arg] = _literal(keyword.value)
    return Call(ast.unparse(node.func), _written(values))


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id="true" | "false" | "null" as word):
            return {"true": True, "false": False, "null": None}[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no key")
