"""Parse JSON that clients write, within bounds of width and depth: bodies, JSON in their strings, lines of batches.

orjson holds the interpreter while it parses, and the garbage collector goes through new containers again and again: 4
MB of empty lists took 0.9 s, in which no thread went on. So containers are counted before any is made. A value of more
levels than MAX_DEPTH would exceed the recursion of what walks through it or writes it again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

MAX_DEPTH = 32
MAX_MEMBERS = 4096
"""Of one object. A check may find a fault in every member, and each costs the event loop two microseconds."""
MAX_CONTAINERS = 65_536
"""Objects and lists of a text."""


class JsonError(ValueError):
    """A text that is not JSON or out of bounds. code: as in the API's errors."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse(text: bytes, place: str) -> Any:
    """Return the value of a text. place: its name in errors. Raise JsonError."""
    brackets = check_width(text, place)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise JsonError("invalid_json", f"{place} is not valid JSON in UTF-8: {error}") from error
    # Small texts cannot be out of bounds, and are not looked through.
    if brackets > MAX_DEPTH or text.count(b":") > MAX_MEMBERS:
        _check_shape(value, place)
    return value


def check_width(text: bytes, place: str) -> int:
    """Return at least how many objects and lists a text has; several valid ones may be joined. Raise JsonError."""
    brackets = text.count(b"[") + text.count(b"{")
    if brackets > MAX_CONTAINERS and (brackets := _brackets_outside_strings(text)) > MAX_CONTAINERS:
        message = f"{place} may have {MAX_CONTAINERS} JSON objects and lists; got {brackets}: send less at once"
        raise JsonError("json_too_wide", message)
    return brackets


def _brackets_outside_strings(text: bytes) -> int:
    """Return how many brackets open outside the strings of a JSON text; an expression takes ten times as long."""
    plain = np.frombuffer(text.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    inside = np.add.accumulate(plain == ord('"'), dtype=np.uint8) & 1  # behind an odd number of quotes
    return int(np.count_nonzero(((plain == ord("[")) | (plain == ord("{"))) > inside))


def _check_shape(value: Any, place: str) -> None:
    """Check depth and width of a value, without recursion. Raise JsonError."""
    depth = 0
    level = [value]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise JsonError("json_too_deep", f"{place} nests JSON deeper than {MAX_DEPTH} levels")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                if len(item) > MAX_MEMBERS:
                    message = f"a JSON object in {place} may have {MAX_MEMBERS} members; got {len(item)}"
                    raise JsonError("json_too_wide", message)
                below += [child for child in item.values() if isinstance(child, dict | list)]
            elif isinstance(item, list):
                below += [child for child in item if isinstance(child, dict | list)]
        level = below
