"""Read tool calls in the text of a model while it comes: hermes, llama3, granite and the two forms of mistral.

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>, one after another
    llama3    {"name": "f", "parameters": {...}}; {...} - and nothing else
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, {...}]
    granite   <|tool_call|>[{"name": "f", "arguments": {...}}, {...}]
    newer     [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]..., perhaps with [CALL_ID]x before [ARGS]; read as mistral, too

The output is a function of the text so far, however it was cut into pieces. Text that turns out to be no call stays
text. Only the structure is checked: whether arguments are valid JSON is for the client to see, as with OpenAI.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from services.gateway.request import ToolUse
from services.gateway.text.tools.formats import CLOSINGS, OPENINGS, PYTHON_TAG, SEPARATORS

ARGUMENTS = ("arguments", "parameters")
BLANKS = " \t\n\r"
BLANK = re.compile(r"\s*")
NAME = r"[\w.-]{1,64}"
"""Of a function, in a pattern."""
_BEGINS_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_HIGH_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_REPLACED = "\\ufffd"


class Escapes:
    """The characters of JSON strings in; the same out, but halves of surrogate pairs alone are replaced.

    No UTF-8 can hold such a half: clients could read it, and never send it back.
    """

    def __init__(self) -> None:
        self._escape = ""  # not whole
        self._half = ""  # a first half, before it is known whether the second follows

    @property
    def is_open(self) -> bool:
        """Return whether something is held back."""
        return bool(self._escape or self._half)

    def feed(self, char: str) -> str:
        """Return the characters that are certain now."""
        if self._escape or char == "\\":
            self._escape += char
            if _BEGINS_ESCAPE.fullmatch(self._escape):
                return ""
            char, self._escape = self._escape, ""
        half, self._half = self._half, ""
        if half and _LOW_HALF.fullmatch(char):
            return half + char
        lone = _REPLACED if half else ""
        if _HIGH_HALF.fullmatch(char):
            self._half = char
            return lone
        return lone + (_REPLACED if _LOW_HALF.fullmatch(char) else char)

    def flush(self) -> str:
        """Return the rest, where nothing more comes."""
        rest = (_REPLACED if self._half else "") + self._escape
        self._escape = self._half = ""
        return rest


class CallObject:
    """Read one call's object with `feed`, from the opening brace on.

    name: empty until it was read. has_ended: the closing brace was read. has_failed: no such object, or one without a
    name.
    """

    def __init__(self, name: str = "") -> None:
        """name: of a call of which the arguments alone are written, from their opening brace to their closing one."""
        self.name = name
        self.has_whole_arguments = False
        self.has_ended = False
        self.has_failed = False
        self._place = "open"  # what comes next: open, key, colon, value, comma
        self._key = ""
        self._chars: list[str] = []  # of the key or the name that is read; of another value the last character
        self._depth = 0  # in the value
        self._is_quoted = self._is_escaped = False
        self._early_arguments: list[str] = []  # arguments that came before the name
        self._has_arguments = False
        self._escapes = Escapes()
        self._is_alone = bool(name)
        if name:
            self._place, self._key = "value", ARGUMENTS[0]

    def feed(self, text: str) -> tuple[int, str]:
        """Return how many characters of the text belong to the object, and the arguments among them."""
        pieces: list[str] = []
        size = 0
        while size < len(text) and not (self.has_ended or self.has_failed):
            self._take(text[size], pieces)
            size += 1
        if self.has_ended and not self.name:
            self.has_failed = True
        if self.has_ended and not self._has_arguments:
            pieces.append("{}")
        if not self.name:
            self._early_arguments.append("".join(pieces))
            return size, ""
        shown, self._early_arguments = [*self._early_arguments, *pieces], []
        return size, "".join(shown)

    def flush(self) -> str:
        """Return the rest of the arguments of a call that is cut."""
        return self._escapes.flush() if self.name else ""

    def _take(self, char: str, pieces: list[str]) -> None:
        if self._place == "value":
            self._take_value(char, pieces)
        elif self._is_quoted:
            self._take_key(char)
        elif char in BLANKS:
            return
        elif self._place == "open" and char == "{":
            self._place = "key"
        elif self._place == "key" and char == '"':
            self._is_quoted, self._chars = True, [char]
        elif self._place == "colon" and char == ":":
            self._place, self._chars = "value", []
        elif self._place == "comma" and char == ",":
            self._place = "key"
        elif char == "}" and self._place in ("key", "comma"):
            self.has_ended = True
        else:
            self.has_failed = True

    def _take_key(self, char: str) -> None:
        self._chars.append(char)
        if not self._ends_string(char):
            return
        self._key = _string("".join(self._chars))
        self._place = "colon"

    def _take_value(self, char: str, pieces: list[str]) -> None:
        """Take one character of a value, or the one behind it."""
        if not self._chars and char in BLANKS:
            return
        if not self._is_quoted and self._depth == 0 and self._chars and (char in ",}" or char in BLANKS):
            self._end_value()  # of a number or a word
            self._take(char, pieces)
            return
        if self._key == "name":
            self._chars.append(char)
        else:
            self._chars = [char]
        if self._key in ARGUMENTS:
            self._has_arguments = True
            is_plain = not self._is_quoted or (char != "\\" and not self._escapes.is_open)
            pieces.append(char if is_plain else self._escapes.feed(char))
        if self._is_quoted:
            if self._ends_string(char) and self._depth == 0:
                self._end_value()
        elif char == '"':
            self._is_quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth < 0:
                self.has_failed = True
            elif self._depth == 0:
                self._end_value()

    def _end_value(self) -> None:
        self.has_whole_arguments |= self._key in ARGUMENTS
        self.has_ended = self._is_alone
        if self._key == "name" and not self.name:
            self.name = _string("".join(self._chars))
            self.has_failed = not self.name
        self._place = "comma"

    def _ends_string(self, char: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_quoted = False
            return True
        return False


_SURROGATE = re.compile("[\ud800-\udfff]")
"""What an escape without its other half leaves."""


def _string(json_text: str) -> str:
    """Return the text of a JSON string; nothing for any other value, or a text that UTF-8 cannot hold."""
    try:
        value = json.loads(json_text)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) and not _SURROGATE.search(value) else ""


_NAMED = re.compile(r"([\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?\[ARGS\]\s*(\{)?", re.ASCII)
_BEGINS_NAMED = re.compile(r"[\w.-]{1,64}(\[\w{0,7}|\[CALL_ID\]\w{0,64}(\[\w{0,4})?)?", re.ASCII)


@dataclass(slots=True)
class CallPiece:
    """A part of a call. id and name come once, with its first piece."""

    index: int
    id: str
    name: str
    arguments: str

    def body(self) -> dict[str, object]:
        """Return the form of a delta in OpenAI's stream."""
        if not self.name:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


def merge(pieces: list[CallPiece]) -> list[CallPiece]:
    """Return one piece for each call."""
    calls: dict[int, list[CallPiece]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, []).append(piece)
    return [
        CallPiece(index, parts[0].id, parts[0].name, "".join(part.arguments for part in parts))
        for index, parts in calls.items()
    ]


class _At(Enum):
    TEXT = auto()
    BEFORE = auto()  # behind an opening: the object comes
    OBJECT = auto()
    BEHIND = auto()  # behind an object: another comes, or the closing
    OVER = auto()  # one call was all that was wanted


class Reader(ABC):
    """The text of one choice in; text and calls out. What a format needs is in `_go_on` and `_finish`."""

    def __init__(self, use: ToolUse, request_id: str, choice: int) -> None:
        self._use = use
        self._owner = f"{request_id}:{choice}"
        self._buffer = ""  # not looked at yet
        self._idle: Callable[[str], object] | None = None  # whether text behind what is held decides nothing
        self._undecided_text: list[str] = []  # such text; joined when more comes, not with each token
        self._raw: list[str] = []  # of what may be a call, while it may also be text
        self._blank: list[str] = []  # white space at the end of the text: dropped where a call follows
        self._has_text = False  # other text than white space came out
        self._behind_call = False  # and none since the last call
        self._output: list[str | CallPiece] = []
        self.parts: list[str | CallPiece] = []  # text and calls of the last `feed` or `flush`, in their order
        self.calls = 0
        self.is_cut = False  # behind `flush`: the arguments of the last call are not whole

    def feed(self, text: str) -> tuple[str, list[CallPiece]]:
        """Return the text and the calls that are certain now."""
        self._undecided_text.append(text)
        if self._idle is None or not self._idle(text):
            self._join()
            while self._buffer and self._go_on():
                pass
        return self._take()

    def flush(self) -> tuple[str, list[CallPiece]]:
        """Return the rest, at the end of the choice."""
        self._join()
        self._finish()
        if not self.calls:
            self._output.append("".join(self._blank))
        self._buffer, self._raw, self._blank = "", [], []
        return self._take()

    @abstractmethod
    def _go_on(self) -> bool:
        """Take from what is held; False when more has to come first."""

    @abstractmethod
    def _finish(self) -> None:
        """Say what is held and no call, at the end of the choice."""

    def _join(self) -> None:
        """Hold all text that has come."""
        self._buffer = "".join([self._buffer, *self._undecided_text])
        self._undecided_text, self._idle = [], None

    def _wait(self, idle: Callable[[str], object] | None = None) -> bool:
        """Return False. idle: called once with each text that comes; whether it decides nothing behind what is held."""
        self._idle = idle
        return False

    def _take(self) -> tuple[str, list[CallPiece]]:
        self.parts, self._output = self._output, []
        text = "".join(part for part in self.parts if isinstance(part, str))
        return text, [part for part in self.parts if isinstance(part, CallPiece)]

    def _begin_call(self, name: str, written_id: str = "") -> None:
        """Begin a call. written_id: as the model wrote it."""
        digest = hashlib.sha256(f"{self._owner}:{self.calls}".encode()).hexdigest()
        is_short = self._use.format.startswith("mistral")  # its templates want nine
        call_id = written_id or (digest[:9] if is_short else f"call_{digest[:24]}")
        self._output.append(CallPiece(self.calls, call_id, name, ""))
        self.calls += 1
        self._raw, self._blank = [], []
        self._behind_call = True

    def _argue(self, arguments: str) -> None:
        """Add to the arguments of the last call."""
        if arguments:
            self._output.append(CallPiece(self.calls - 1, "", "", arguments))

    def _skip_blanks(self) -> str:
        rest = self._buffer.lstrip()
        self._raw.append(self._buffer[: len(self._buffer) - len(rest)])
        self._buffer = rest
        return rest

    def _is_text(self) -> bool:
        """Treat the text that began like a call as text."""
        self._say("".join(self._raw))
        self._raw, self._has_text = [], True
        return True

    def _say(self, text: str) -> None:
        """Put out text, without the white space beside calls."""
        text = text.lstrip() if self._behind_call else text
        head = text.rstrip()
        blank = text[len(head) :]
        if not head:
            self._blank.append(blank)
            return
        self._output.append("".join(self._blank) + head)
        self._blank, self._has_text, self._behind_call = [blank], True, False


class ToolReader(Reader):
    """The text of one choice in; text and calls that are JSON objects out, while they come."""

    def __init__(self, use: ToolUse, request_id: str, choice: int) -> None:
        super().__init__(use, request_id, choice)
        self._is_mistral = use.format.startswith("mistral")
        self._may_list = self._is_mistral or use.format == "granite"
        self._at = _At.TEXT
        self._is_list = False  # inside the brackets of a list
        self._alone = False  # the last call was mistral's newer one: neither a bracket nor a comma belongs to it
        self._object = CallObject()

    def _finish(self) -> None:
        if self._use.forced:  # what has no name yet is no text: it would have become a call
            if not self.calls and len(self._use.names) == 1:
                self._begin_call(self._use.names[0])
                self.is_cut = True
        elif self._at is _At.TEXT:
            self._say(self._buffer)
        elif self._at is not _At.BEHIND and self._at is not _At.OVER:
            self._say("".join(self._raw) + ("" if self._at is _At.OBJECT else self._buffer))
        if self._at is _At.OBJECT:
            self._argue(self._object.flush())
            self.is_cut |= bool(self._object.name) and not self._object.has_whole_arguments

    def _go_on(self) -> bool:
        match self._at:
            case _At.TEXT:
                return self._open_bare() if self._use.format == "llama3" else self._find_opening()
            case _At.BEFORE:
                return self._begin_object()
            case _At.OBJECT:
                return self._read_object()
            case _At.BEHIND:
                return self._go_behind()
            case _At.OVER:
                self._buffer = ""
                return False

    def _find_opening(self) -> bool:
        opening = OPENINGS[self._use.format]
        at = self._buffer.find(opening)
        if at < 0:
            keep = overlap(self._buffer, opening)
            self._say(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._say(self._buffer[:at])
        self._raw, self._buffer = [opening], self._buffer[at + len(opening) :]
        self._at = _At.BEFORE
        return True

    def _open_bare(self) -> bool:
        """Begin a call without an opening, which is a call only where no text was before it."""
        rest = self._buffer.lstrip()
        untagged = rest.removeprefix(PYTHON_TAG)
        is_first = not self._has_text and not self.calls
        if is_first and not untagged.strip():
            return self._wait(BLANK.fullmatch)
        if is_first and PYTHON_TAG.startswith(rest):
            return False
        if not is_first or not untagged.lstrip().startswith("{"):
            self._say(self._buffer)
            self._buffer = ""
            return False
        self._raw, self._buffer = [self._buffer[: len(self._buffer) - len(untagged)]], untagged
        self._at = _At.BEFORE
        return True

    def _begin_object(self) -> bool:
        rest = self._skip_blanks()
        if not rest:
            return False
        if self._may_list and rest[0] == "[" and not self._is_list:
            self._raw.append("[")
            self._buffer, self._is_list = rest[1:], True
            return True
        if self._is_mistral and rest[0] != "{" and not self._is_list:
            return self._begin_named(rest)
        if rest[0] != "{":
            return self._is_text()
        self._object = CallObject()
        self._at = _At.OBJECT
        return True

    def _begin_named(self, rest: str) -> bool:
        """Begin a call with its name before its arguments, or treat it as text."""
        match = _NAMED.match(rest)
        if match is None or match[2] is None:
            if match is not None and match.end() == len(rest):
                return self._wait(BLANK.fullmatch)
            return False if match is None and _BEGINS_NAMED.fullmatch(rest) else self._is_text()
        self._buffer = rest[match.start(2) :]
        self._object = CallObject(match[1])
        self._begin_call(match[1])
        self._at, self._alone = _At.OBJECT, True
        return True

    def _read_object(self) -> bool:
        call = self._object
        has_begun = bool(call.name)
        size, arguments = call.feed(self._buffer)
        if not has_begun:
            self._raw.append(self._buffer[:size])
        self._buffer = self._buffer[size:]
        bare = self._use.format == "llama3"
        if call.name and not has_begun and not (bare and call.name not in self._use.names):
            self._begin_call(call.name)
            has_begun = True
        if has_begun:
            self._argue(arguments)
        if call.has_failed or call.has_ended or (bare and call.name and not has_begun):
            if not has_begun:
                return self._is_text()
            self._at = _At.BEHIND if self._use.parallel else _At.OVER
            return True
        return False

    def _go_behind(self) -> bool:
        """Take another object, the closing, or text."""
        rest = self._skip_blanks()
        closing, separator = ("", "") if self._alone else (CLOSINGS[self._use.format], SEPARATORS[self._use.format])
        if not rest or (len(rest) < len(closing) and closing.startswith(rest)):
            return False
        if separator and rest.startswith(separator):
            self._raw, self._buffer = [], rest[1:]
            self._at = _At.BEFORE
            return True
        self._raw, self._buffer = [], rest.removeprefix(closing)
        self._is_list = self._alone = False
        self._at = _At.TEXT
        return True

    def _is_text(self) -> bool:
        self._is_list, self._at = False, _At.TEXT
        return super()._is_text()


def to_json(value: Any) -> str:
    """Return JSON that UTF-8 can hold: surrogates that escapes left are joined to pairs, lone ones replaced. Raise
    ValueError for a number that JSON has not.
    """
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return written.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of the text that begins an opening."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)
