"""The JSON object of one tool call, read character by character: its name, and its arguments as they were written.

It looks for the structure only. Whether the arguments are valid JSON is for whoever gets them, as with OpenAI.
"""

from __future__ import annotations

import json

ARGUMENTS = ("arguments", "parameters")
BLANKS = " \t\n\r"


class CallObject:
    """`feed` from the opening brace on. name: once it is known; ended: behind the closing brace; failed: no such
    object, or one without a name."""

    def __init__(self, name: str = "") -> None:
        """name: of a call of which the arguments alone are written, from their opening brace to their closing one."""
        self.name = name
        self.has_whole_arguments = False
        self.ended = False
        self.failed = False
        self._place = "open"  # what comes next: open, key, colon, value, comma
        self._key = ""
        self._written = ""  # of the key or the value that is read
        self._depth = 0  # in the value
        self._quoted = self._escaped = False
        self._waiting = ""  # arguments that came before the name
        self._has_arguments = False
        self._is_alone = bool(name)
        if name:
            self._place, self._key = "value", ARGUMENTS[0]

    def feed(self, text: str) -> tuple[int, str]:
        """How much of the text belongs to the object, and what its arguments gained."""
        gained: list[str] = []
        used = 0
        while used < len(text) and not (self.ended or self.failed):
            self._take(text[used], gained)
            used += 1
        if self.ended and not self.name:
            self.failed = True
        if self.ended and not self._has_arguments:
            gained.append("{}")
        if not self.name:
            self._waiting += "".join(gained)
            return used, ""
        found, self._waiting = self._waiting + "".join(gained), ""
        return used, found

    def _take(self, char: str, gained: list[str]) -> None:
        if self._place == "value":
            self._take_value(char, gained)
        elif self._quoted:
            self._take_key(char)
        elif char in BLANKS:
            return
        elif self._place == "open" and char == "{":
            self._place = "key"
        elif self._place == "key" and char == '"':
            self._quoted, self._written = True, char
        elif self._place == "colon" and char == ":":
            self._place, self._written = "value", ""
        elif self._place == "comma" and char == ",":
            self._place = "key"
        elif char == "}" and self._place in ("key", "comma"):
            self.ended = True
        else:
            self.failed = True

    def _take_key(self, char: str) -> None:
        self._written += char
        if not self._ends_string(char):
            return
        self._key = _string(self._written)
        self._place = "colon"

    def _take_value(self, char: str, gained: list[str]) -> None:
        """One character of a value, or the one behind it."""
        if not self._written and char in BLANKS:
            return
        if not self._quoted and self._depth == 0 and self._written and (char in ",}" or char in BLANKS):
            self._end_value()  # of a number or a word
            self._take(char, gained)
            return
        self._written = char if self._key in ARGUMENTS else self._written + char
        if self._key in ARGUMENTS:
            self._has_arguments = True
            gained.append(char)
        if self._quoted:
            if self._ends_string(char) and self._depth == 0:
                self._end_value()
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth < 0:
                self.failed = True
            elif self._depth == 0:
                self._end_value()

    def _end_value(self) -> None:
        self.has_whole_arguments |= self._key in ARGUMENTS
        self.ended = self._is_alone
        if self._key == "name" and not self.name:
            self.name = _string(self._written)
            self.failed = not self.name
        self._place = "comma"

    def _ends_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = False
            return True
        return False


def _string(written: str) -> str:
    """The text of a JSON string; nothing for any other value."""
    try:
        value = json.loads(written)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
