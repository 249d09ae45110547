"""Read tool calls that stand in blocks between two marks.

    qwen3-coder  <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    glm-4.5      <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    deepseek-v3  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>, or function<｜tool▁sep｜>f and the
                 object in a fence; perhaps between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>
    kimi-k2      <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>, perhaps between
                 <|tool_calls_section_begin|> and <|tool_calls_section_end|>
    channels     <|channel|>functions.f<|message|>{"a": 1}<|call|>, as reasoning.py writes calls of gpt-oss

As in reader.py the output is a function of the text so far, however it was cut. A block that does not begin as a call
does stays text, with its marks. From the first brace or parameter on it is a call, and its arguments are told while
they come: objects as they are written, up to the closing mark; of the first two formats each value when it ends, and
texts while they come. A value is text where the schema of its parameter says so (`ToolUse.texts`), else JSON, else
text after all.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from services.gateway.request import ToolUse
from services.gateway.text.tools.formats import BLOCKS
from services.gateway.text.tools.pythonic import PythonicReader
from services.gateway.text.tools.reader import BLANK, NAME, CallObject, Reader, ToolReader, overlap, to_json

_UNDECIDED = re.compile(r"[^{>]*")
"""In a block that begins as a call does: all heads end in one of these, and all closing marks."""
MAX_HEAD = 1024
"""More characters than a match of HEADS has. In a block with so many and no head, only the closing mark decides."""


def reader_of(use: ToolUse, request_id: str, choice: int) -> Reader:
    """Return the reader of a choice's calls."""
    if use.format == "pythonic":
        return PythonicReader(use, request_id, choice)
    kind = BlockReader if use.format in BLOCKS else ToolReader
    return kind(use, request_id, choice)


class _At(Enum):
    TEXT = auto()
    SECTION = auto()  # behind the mark of a section: a block comes
    BLOCK = auto()  # in a block that is no call yet
    OBJECT = auto()  # in the arguments of a call, which are one object
    REST = auto()  # behind that object: the closing mark comes
    PAIR = auto()  # in the arguments of a call: a key comes
    VALUE = auto()  # behind a key
    BEHIND = auto()  # behind a block: another comes, or the end of the section
    OVER = auto()  # one call was all that was wanted


class BlockReader(Reader):
    """The text of one choice in; text and calls in blocks out."""

    def __init__(self, use: ToolUse, request_id: str, choice: int) -> None:
        super().__init__(use, request_id, choice)
        self._marks = BLOCKS[use.format]
        self._at = _At.TEXT
        self._search_start = 0  # so much of a block was looked through for its end
        self._tail = ""  # of the text that came, as much as may begin the closing mark
        self._begins = False  # the block begins as a call does
        self._ids: set[str] = set()  # that the model wrote
        self._object = CallObject()
        self._has_pairs = False  # of this call
        self._is_text_value = False
        self._value: list[str] = []  # of a value that is no text

    def _go_on(self) -> bool:
        match self._at:
            case _At.TEXT:
                return self._find_mark()
            case _At.SECTION:
                return self._begin_block()
            case _At.BLOCK:
                return self._read_block()
            case _At.OBJECT:
                return self._read_object()
            case _At.REST:
                return self._skip_rest()
            case _At.PAIR:
                return self._begin_pair()
            case _At.VALUE:
                return self._read_value()
            case _At.BEHIND:
                return self._go_behind()
            case _At.OVER:
                self._buffer = ""
                return False

    def _finish(self) -> None:
        match self._at:
            case _At.OBJECT:
                self._argue_object(len(self._buffer))
                self._argue(self._object.flush())
                self.is_cut = not self._object.has_ended
            case _At.VALUE:
                self._cut_value()
            case _At.PAIR:
                self.is_cut = True
            case _At.OVER | _At.REST:
                pass
            case _ if self._use.forced:
                self._cut_call()
            case _:
                self._say("".join(self._raw) + self._buffer)

    def _cut_call(self) -> None:
        """Tell a call that has to come and was cut: its name, if that was written whole."""
        named = NAMED[self._use.format].match(self._buffer) if self._at is _At.BLOCK else None
        name = named[1] if named is not None and named[1] in self._use.names else ""
        if not name and not self.calls and len(self._use.names) == 1:
            name = self._use.names[0]
        if name:
            self._begin_call(name)
            self.is_cut = True

    def _find_mark(self) -> bool:
        marks = [mark for mark in (self._marks.section, self._marks.opening) if mark]
        matches = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if not matches:
            keep = max(overlap(self._buffer, mark) for mark in marks)
            self._say(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        at, mark = min(matches)
        self._say(self._buffer[:at])
        self._raw, self._buffer, self._search_start = [mark], self._buffer[at + len(mark) :], 0
        self._begins = False
        self._at = _At.BLOCK if mark == self._marks.opening else _At.SECTION
        return True

    def _begin_block(self) -> bool:
        rest, opening = self._skip_blanks(), self._marks.opening
        if len(rest) < len(opening) and opening.startswith(rest):
            return False
        if not rest.startswith(opening):
            return self._is_text()
        self._raw.append(opening)
        self._buffer, self._search_start = rest[len(opening) :], 0
        self._begins = False
        self._at = _At.BLOCK
        return True

    def _read_block(self) -> bool:
        if not self._begins:
            begin = BEGINS[self._use.format].match(self._buffer)
            if begin is None:
                return self._is_text()
            self._begins = begin.end() < len(self._buffer)
        if self._begin_arguments():
            return True
        closing = self._marks.closing
        end = self._buffer.find(closing, max(0, self._search_start - len(closing)))
        if end < 0:
            self._search_start = len(self._buffer)
            if self._begins and self._search_start >= MAX_HEAD:
                self._tail = self._buffer[1 - len(closing) :]
                return self._wait(self._lacks_closing)
            return self._wait(_UNDECIDED.fullmatch if self._begins else BLANK.fullmatch)
        bare = BARE[self._use.format].fullmatch(self._buffer, 0, end) if self._use.format in BARE else None
        if bare is None:
            self._raw.append(self._buffer[: end + len(closing)])
            self._buffer = self._buffer[end + len(closing) :]
            return self._is_text()
        self._begin_call(bare[1])
        self._argue("{}")
        return self._end_call(end + len(closing))

    def _lacks_closing(self, text: str) -> bool:
        """Return whether the closing mark does not end in a text that comes."""
        closing, seen = self._marks.closing, self._tail + text
        self._tail = seen[1 - len(closing) :]
        return closing not in seen

    def _begin_arguments(self) -> bool:
        """Begin a call of which the head has come, with the beginning of its arguments."""
        pair = PAIRS.get(self._use.format)
        if self._buffer.find("{" if pair is None else ">", self._search_start) < 0:
            return False
        head = HEADS[self._use.format].match(self._buffer)
        if head is None:
            return False
        is_kimi = self._use.format == "kimi-k2"
        name = head["name"] if is_kimi else next(group for group in head.groups() if group is not None)
        written_id = head["id"] if is_kimi else ""
        self._begin_call(name, "" if written_id in self._ids or ":" not in written_id else written_id)
        self._ids.add(written_id)
        self._buffer = self._buffer[head.end() :]
        self._object, self._has_pairs = CallObject(name), False
        self._at = _At.OBJECT if pair is None else _At.PAIR
        return True

    def _end_call(self, end: int) -> bool:
        """Go on behind a call that ends there."""
        self._buffer = self._buffer[end:]
        self._at = _At.BEHIND if self._use.parallel else _At.OVER
        return True

    def _argue_object(self, size: int) -> int:
        """Take so many characters for the object; return how many belong to it."""
        size_read, arguments = self._object.feed(self._buffer[:size])
        self._argue(arguments)
        return size_read

    def _read_object(self) -> bool:
        closing = self._marks.closing
        end = self._buffer.find(closing)
        size = end if end >= 0 else len(self._buffer) - overlap(self._buffer, closing)
        size_read = self._argue_object(size)
        if not self._object.has_ended and end >= 0:  # no JSON, which is for the client to see
            self._argue(self._object.flush())
            return self._end_call(end + len(closing))
        self._buffer = self._buffer[size_read:]
        self._at = _At.REST if self._object.has_ended else _At.OBJECT
        return self._object.has_ended

    def _skip_rest(self) -> bool:
        closing = self._marks.closing
        end = self._buffer.find(closing)
        if end < 0:
            self._buffer = self._buffer[len(self._buffer) - overlap(self._buffer, closing) :]
            return False
        return self._end_call(end + len(closing))

    def _begin_pair(self) -> bool:
        pair = PAIRS[self._use.format]
        begin = pair.begin.match(self._buffer)
        if begin is None:
            return False
        if pair.eats_line_break and begin.end() == len(self._buffer) and not begin[0].endswith("\n"):
            return False  # a line break may come, which is none of the value's
        self._is_text_value = f"{self._object.name}.{begin[1]}" in self._use.texts
        self._argue(("," if self._has_pairs else "{") + f"{' ' * self._has_pairs}{to_json(begin[1])}: ")
        if self._is_text_value:
            self._argue('"')
        self._has_pairs, self._value = True, []
        self._buffer = self._buffer[begin.end() :]
        self._at = _At.VALUE
        return True

    def _read_value(self) -> bool:
        pair, at = PAIRS[self._use.format], 0
        while (mark_at := self._buffer.find(pair.mark, at)) >= 0:
            end = pair.end.match(self._buffer, mark_at)
            start = mark_at - (pair.eats_line_break and self._buffer.endswith("\n", 0, mark_at))
            if end is not None:
                self._take_value(start)
                self._end_value()
                if end["more"] is None:
                    self._argue("}")
                    return self._end_call(end.end() - start)
                self._buffer = self._buffer[end.end() - start :]
                self._at = _At.PAIR
                return True
            at = mark_at + len(pair.mark)
            if len(self._buffer) - mark_at < MAX_END and self._buffer.find(pair.mark, at) < 0:
                self._take_value(start)  # its end may come; behind another mark it cannot
                return False
        self._take_value(max(0, len(self._buffer) - len(pair.mark)))
        return False

    def _take_value(self, size: int) -> None:
        """Take so many characters as a part of the value."""
        part, self._buffer = self._buffer[:size], self._buffer[size:]
        if not self._is_text_value:
            self._value.append(part)
        else:
            self._argue(to_json(part)[1:-1])

    def _end_value(self) -> None:
        self._argue('"' if self._is_text_value else to_json(_value("".join(self._value))))

    def _cut_value(self) -> None:
        """End a value behind which nothing comes any more. It is whole where only the marks behind it are missing."""
        pair = PAIRS[self._use.format]
        mark_at = self._buffer.find(pair.mark)
        behind = "".join(self._buffer[mark_at + len(pair.mark) :].split())
        is_last = mark_at >= 0 and pair.closing.startswith(behind)
        if is_last or (mark_at >= 0 and behind.startswith(pair.next_key[: len(behind)])):
            self._take_value(mark_at - (pair.eats_line_break and self._buffer.endswith("\n", 0, mark_at)))
            self._end_value()
            if is_last:
                self._argue("}")
        else:
            marks = ("\n" * pair.eats_line_break + pair.mark, pair.mark)
            self._take_value(len(self._buffer) - max(overlap(self._buffer, mark) for mark in marks))
        self.is_cut = not is_last

    def _go_behind(self) -> bool:
        rest, end = self._skip_blanks(), self._marks.section_end
        if not rest or (len(rest) < len(end) and end.startswith(rest)):
            return False
        self._raw, self._buffer = [], rest.removeprefix(end) if end else rest
        self._at = _At.TEXT
        return True

    def _is_text(self) -> bool:
        self._at = _At.TEXT
        return super()._is_text()


NAMED = {
    "qwen3-coder": re.compile(rf"\s*<function=({NAME})>"),
    "glm-4.5": re.compile(rf"\s*({NAME})\s*[\n<]"),
    "deepseek-v3": re.compile(rf"\s*(?:function<｜tool▁sep｜>)?({NAME})\s*[\n<]"),
    "channels": re.compile(rf"({NAME})<"),
    "kimi-k2": re.compile(rf"\s*(?:functions\.)?({NAME}?)(?::\d{{1,9}})?\s*<"),
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
_BLANKS = r"\s{0,64}"
HEADS = {
    "qwen3-coder": re.compile(rf"{_BLANKS}<function=({NAME})>{_BLANKS}(?=<parameter=[^>\n]{{1,256}}>)"),
    "glm-4.5": re.compile(rf"{_BLANKS}({NAME}){_BLANKS}(?=<arg_key>[^<]{{0,256}}</arg_key>{_BLANKS}<arg_value>)"),
    "deepseek-v3": re.compile(
        rf"{_BLANKS}(?:function<｜tool▁sep｜>({NAME}){_BLANKS}```json|({NAME}){_BLANKS}<｜tool▁sep｜>){_BLANKS}(?={{)"
    ),
    "channels": re.compile(rf"({NAME})<\|message\|>{_BLANKS}(?={{)"),
    "kimi-k2": re.compile(
        rf"{_BLANKS}(?P<id>(?:functions\.)?(?P<name>{NAME}?)(?::\d{{1,9}})?){_BLANKS}"
        rf"<\|tool_call_argument_begin\|>{_BLANKS}(?={{)"
    ),
}
"""The head of a call up to its arguments. Blanks are bounded, so that looking again costs little."""
BARE = {
    "qwen3-coder": re.compile(rf"\s*<function=({NAME})>\s*</function>\s*"),
    "glm-4.5": re.compile(rf"\s*({NAME})\s*"),
}
"""Blocks of calls without arguments."""


@dataclass(frozen=True, slots=True)
class Pair:
    """How a key and its value are written. mark: behind the value, if `end` follows: another key or the block's end."""

    begin: re.Pattern[str]
    mark: str
    end: re.Pattern[str]
    closing: str  # of the block, behind the last mark and without blanks
    next_key: str  # begins another key
    eats_line_break: bool = False  # one before the mark is none of the value's


PAIRS = {
    "qwen3-coder": Pair(
        re.compile(r"<parameter=([^>\n]{1,256})>\n?"),
        "</parameter>",
        re.compile(
            rf"</parameter>{_BLANKS}(?:(?P<more>(?=<parameter=[^>\n]{{1,256}}>))|</function>{_BLANKS}</tool_call>)"
        ),
        "</function></tool_call>",
        "<parameter=",
        eats_line_break=True,
    ),
    "glm-4.5": Pair(
        re.compile(rf"<arg_key>([^<]{{0,256}})</arg_key>{_BLANKS}<arg_value>"),
        "</arg_value>",
        re.compile(
            rf"</arg_value>{_BLANKS}"
            rf"(?:(?P<more>(?=<arg_key>[^<]{{0,256}}</arg_key>{_BLANKS}<arg_value>))|</tool_call>)"
        ),
        "</tool_call>",
        "<arg_key>",
    ),
}
MAX_END = 512
"""More characters than `Pair.end` can have: a mark with so many behind it, and no end, is part of the value."""
_WORDS = {"True": True, "False": False, "None": None}


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return _WORDS.get(text.strip(), text)


def _no_constant(name: str) -> Any:
    """Refuse NaN and Infinity, which are no JSON."""
    raise ValueError(name)


def _finite(text: str) -> float:
    """Refuse numbers such as 1e999, which would be written as Infinity."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(text)
    return value
