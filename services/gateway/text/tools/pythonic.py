"""Read tool calls that are written as Python: `[f(a=1), g()]`, and nothing before them.

A list is told when it is whole: until then it may be no list of calls. It is read while it comes, each character once,
so that its end leaves no work for one turn of the event loop; a parser of Python would need seconds for texts that a
model can be made to write.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

from services.gateway.request import ToolUse
from services.gateway.text.tools.formats import PYTHON_START
from services.gateway.text.tools.reader import BLANK, NAME, Reader, to_json

PYTHON_END = "<|python_end|>"
MAX_LISTED = 1024
"""Calls in a list. All are told at once; a list of more stays text."""
MAX_LEVELS = 200
"""Of brackets in one another, as in Python."""

_START = re.escape(PYTHON_START)
_START_CUT = "|".join(re.escape(PYTHON_START[:size]) for size in range(len(PYTHON_START) - 1, 0, -1))
_BEGINS_LIST = re.compile(
    rf"\s*(?:{_START}\s*)?(?:(\[\s*{NAME}\s*\()|(?:\[\s*(?:{NAME}\s*)?)?\Z)|\s*(?:{_START_CUT})\Z"
)
"""The head of a list of calls (group 1), or what may become one."""
_FIRST_NAME = re.compile(rf"\s*(?:{_START}\s*)?\[\s*({NAME})\s*\(")


class PythonicReader(Reader):
    """The text of one choice in; a list of calls in Python out, if the text begins with one."""

    def __init__(self, use: ToolUse, request_id: str, choice: int) -> None:
        super().__init__(use, request_id, choice)
        self._may_begin = True
        self._is_behind = False  # the list was read, the mark behind it not
        self._list = CallList(use.names)
        self._end = 0  # of what the list has read; 0 before its bracket

    def _go_on(self) -> bool:
        if self._is_behind:
            rest = self._skip_blanks()
            if len(rest) < len(PYTHON_END) and PYTHON_END.startswith(rest):
                return False
            self._raw, self._buffer, self._is_behind = [], rest.removeprefix(PYTHON_END), False
        if not self._may_begin:
            if self._use.parallel or not self.calls:
                self._say(self._buffer)
            self._buffer = ""
            return False
        if not self._end:
            start = _BEGINS_LIST.match(self._buffer)
            if start is None:
                return self._is_plain()
            if start[1] is None:
                return self._wait(BLANK.fullmatch)  # the head of a list is not there yet
            self._end = start.start(1)
            if self._stays_in_list(self._buffer[self._end :]):
                return self._wait(self._stays_in_list)
        if self._list.has_failed:
            return self._is_plain()
        for name, arguments in self._list.calls if self._use.parallel else self._list.calls[:1]:
            self._begin_call(name)
            self._argue(arguments)
        self._buffer = self._buffer[self._end :]
        self._may_begin, self._is_behind = False, True
        return True

    def _finish(self) -> None:
        if self._use.forced:
            if not self.calls:
                match = _FIRST_NAME.match(self._buffer)
                names = self._use.names
                name = match[1] if match is not None and match[1] in names else names[0] if len(names) == 1 else ""
                if name:
                    self._begin_call(name)
                    self.is_cut = True
        elif self._use.parallel or not self.calls:
            self._say(self._buffer)

    def _is_plain(self) -> bool:
        self._may_begin = False
        return True

    def _stays_in_list(self, text: str) -> bool:
        """Read more of the list. Return whether more has to come."""
        self._end += self._list.feed(text)
        return not (self._list.has_ended or self._list.has_failed)


class _LiteralError(ValueError):
    """A text that is no list of calls with literals."""


_NOTHING = object()
"""Where a value or a key may stand and none does."""


@dataclass(slots=True)
class _Bracket:
    """An open bracket. sign: the opening one; of a call its name. values: by their keys, or else by their number."""

    sign: str
    values: dict[Any, Any] = field(default_factory=dict)
    key: Any = _NOTHING
    value: Any = _NOTHING  # whole, and neither comma nor bracket behind it
    has_comma: bool = False


class CallList:
    """Read a list of calls with `feed`, from its bracket on.

    calls: names with arguments as JSON. has_ended: the closing bracket was read. has_failed: no such list.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        """names: what may be called."""
        self.calls: list[tuple[str, str]] = []
        self.has_ended = self.has_failed = False
        self._names = names
        self._brackets: list[_Bracket] = []
        self._word: list[str] = []  # what stands outside of strings since the last sign
        self._strings: list[str] = []  # the same of strings: one behind another is one text
        self._mark = ""  # the quotes around the string that is read, or the beginning of a comment
        self._is_opening = False  # more quotes may belong to the mark
        self._is_raw = self._is_escaped = False
        self._closing_quotes = 0  # quotes at the end of what was read of a string
        self._string: list[str] = []

    def feed(self, text: str) -> int:
        """Return how many characters were read: all, if the list has neither ended nor failed."""
        at = 0
        try:
            while at < len(text) and not self.has_ended:
                at = self._read_string(text, at) if self._mark else self._read(text, at)
        except ValueError:
            self.has_failed = True
        return at

    def _read(self, text: str, at: int) -> int:
        """Read up to the next sign outside of strings; return the place behind it."""
        match = _SIGN.search(text, at)
        end = len(text) if match is None else match.start()
        self._word.append(text[at:end])
        if match is None:
            return end
        if match[0] == "#":
            self._mark = "#"
        elif match[0] in "'\"":
            self._open_string(match[0])
        else:
            self._take(match[0])
        return end + 1

    def _open_string(self, quote: str) -> None:
        prefix = "".join(self._word).lstrip().lower()
        if prefix not in ("", "r", "u"):
            raise _LiteralError
        self._mark, self._is_raw, self._is_opening = quote, prefix == "r", True
        self._word, self._string, self._closing_quotes = [], [], 0

    def _read_string(self, text: str, at: int) -> int:
        """Read a part of a string or comment; return the place behind it."""
        if self._mark == "#":
            end = text.find("\n", at)
            if end < 0:
                return len(text)
            self._mark = ""
            return end
        if self._is_opening:
            return self._open_more(text, at)
        if self._is_escaped:
            self._string.append(text[at])
            self._is_escaped = False
            return at + 1
        match = _STRING_SIGN[self._mark].search(text, at)
        end = len(text) if match is None else match.start()
        if end > at:
            self._string.append(text[at:end])
            self._closing_quotes = 0
        if match is None:
            return end
        self._string.append(match[0])
        if match[0] == "\\":
            self._is_escaped, self._closing_quotes = True, 0
        elif match[0] in "\r\n":
            raise _LiteralError
        else:
            self._closing_quotes += 1
            if self._closing_quotes == len(self._mark):
                self._end_string()
        return end + 1

    def _open_more(self, text: str, at: int) -> int:
        """Read a character behind the first quotes of a string."""
        if text[at] == self._mark[0]:
            self._mark += text[at]
            self._is_opening = len(self._mark) < 3
            return at + 1
        self._is_opening = False
        if len(self._mark) == 2:  # that was all
            self._strings.append("")
            self._mark = ""
        return at

    def _end_string(self) -> None:
        text = "".join(self._string)[: -len(self._mark)]
        if len(self._mark) == 3:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        self._strings.append(text if self._is_raw else _ESCAPE.sub(_unescape, text))
        self._mark, self._string = "", []

    def _take(self, sign: str) -> None:
        """Take a bracket, a comma, a colon or an equals sign, with the word or text before it."""
        word = "".join(self._word).strip()
        text = "".join(self._strings) if self._strings else None
        self._word, self._strings = [], []
        if sign in "[({":
            self._open(sign, word, text)
            return
        bracket = self._brackets[-1]
        if word or text is not None:
            if len(self._brackets) == 1 or bracket.value is not _NOTHING or (word and text is not None):
                raise _LiteralError
            if sign in "=:":
                self._take_key(sign, word, text)
                return
            bracket.value = _number(word) if text is None else text
        if sign == ",":
            self._keep(bracket)
            bracket.has_comma = True
        elif sign in "])}":
            self._close(bracket, sign)
        else:
            raise _LiteralError

    def _open(self, sign: str, word: str, text: str | None) -> None:
        if len(self._brackets) >= MAX_LEVELS or text is not None:
            raise _LiteralError
        if self._brackets:
            outer = self._brackets[-1]
            is_call = len(self._brackets) == 1
            may_stand = word in self._names and sign == "(" if is_call else not word
            needs_key = outer.sign not in ("[", "(") and outer.key is _NOTHING
            if not may_stand or needs_key or outer.value is not _NOTHING:
                raise _LiteralError
            sign = word if is_call else sign
        self._brackets.append(_Bracket(sign))

    def _take_key(self, sign: str, word: str, text: str | None) -> None:
        bracket = self._brackets[-1]
        if len(self._brackets) == 2:
            key = word if sign == "=" and _NAME.fullmatch(word) else None
        else:
            key = text if sign == ":" and bracket.sign == "{" else None
        if key is None or bracket.key is not _NOTHING:
            raise _LiteralError
        bracket.key = key

    def _keep(self, bracket: _Bracket) -> None:
        """Put a value that has ended where it belongs."""
        has_keys = len(self._brackets) == 2 or bracket.sign == "{"
        if bracket.value is _NOTHING or has_keys != (bracket.key is not _NOTHING):
            raise _LiteralError
        bracket.values[bracket.key if has_keys else len(bracket.values)] = bracket.value
        bracket.key = bracket.value = _NOTHING

    def _close(self, bracket: _Bracket, sign: str) -> None:
        if sign != _CLOSING.get(bracket.sign, ")"):
            raise _LiteralError
        if bracket.value is not _NOTHING or bracket.key is not _NOTHING:
            self._keep(bracket)
        self._brackets.pop()
        if not self._brackets:
            if not self.calls:
                raise _LiteralError
            self.has_ended = True
        elif len(self._brackets) == 1:
            if len(self.calls) == MAX_LISTED:
                raise _LiteralError
            self.calls.append((bracket.sign, to_json(bracket.values)))
            self._brackets[0].value = None  # a call
        elif bracket.sign == "{":
            self._brackets[-1].value = bracket.values
        else:
            items = list(bracket.values.values())
            is_alone = bracket.sign == "(" and len(items) == 1 and not bracket.has_comma
            self._brackets[-1].value = items[0] if is_alone else items


_SIGN = re.compile(r"[\[\](){},:='\"#]")
_STRING_SIGN = {
    mark: re.compile(rf"[\\{quote}{breaks}]") for quote in "'\"" for mark, breaks in ((quote, "\r\n"), (3 * quote, ""))
}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_NAME = re.compile(r"[^\W\d]\w*")
_DIGITS = "[0-9](?:_?[0-9])*"
_INTEGER = re.compile(r"0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+|0(?:_?0)*|[1-9](?:_?[0-9])*")
_FLOAT = re.compile(rf"(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?|{_DIGITS}[eE][+-]?{_DIGITS}")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(
    r"\\(?:N\{([^{}]*)\}|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL
)
_CONTROLS = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_CONTROLS["v"] = "\v"


def _number(word: str) -> Any:
    """Return the value of a word or number. Raise ValueError."""
    if word in _WORDS:
        return _WORDS[word]
    digits = word.removeprefix("-").lstrip()
    sign = -1 if digits != word else 1
    if _INTEGER.fullmatch(digits):
        return sign * int(digits, 0)
    if _FLOAT.fullmatch(digits) and math.isfinite(value := float(digits)):
        return sign * value
    raise _LiteralError


def _unescape(escape: re.Match[str]) -> str:
    """Return the character of an escape. Raise ValueError."""
    name, *codes, octal, char = escape.groups()
    if name is not None:
        try:
            return unicodedata.lookup(name)
        except KeyError:
            raise _LiteralError from None
    code = next((code for code in codes if code is not None), None)
    if code is not None:
        return chr(int(code, 16))
    if octal is not None:
        return chr(int(octal, 8))
    if char in "NxuU":
        raise _LiteralError
    return _CONTROLS.get(char, "\\" + char)
