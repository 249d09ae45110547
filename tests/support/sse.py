"""Read server-sent events after the WHATWG's standard (9.2.5, 9.2.6): the one reader of all tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    """One event that was dispatched. kind: `message` where none was named."""

    kind: str
    data: str
    id: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)


@dataclass
class Decoder:
    """Lines in, events out. What is behind the last empty line is dropped, as the standard has it."""

    comments: int = 0
    _kind: str = ""
    _data: list[str] = field(default_factory=list)
    _id: str = ""

    def feed(self, line: str) -> Event | None:
        """Return the event that an empty line ends."""
        if not line:
            found = Event(self._kind or "message", "\n".join(self._data), self._id) if self._data else None
            self._kind, self._data = "", []
            return found
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self._id = value
        self.comments += not name
        return None


def events(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events of a stream, `[DONE]` as well."""
    decoder = Decoder()
    for line in lines:
        if (event := decoder.feed(line)) is not None:
            yield event


def objects(lines: Iterable[str]) -> Iterator[Any]:
    """Yield the JSON of every event but `[DONE]`."""
    return (event.json for event in events(lines) if event.data != DONE)


def parse(stream: bytes) -> list[Event]:
    """Return all events of a whole stream."""
    text = stream.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return list(events(text.split("\n")[:-1]))
