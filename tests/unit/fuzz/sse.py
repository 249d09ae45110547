"""A reader of server-sent events after the WHATWG's standard (9.2.5, 9.2.6), for comparison: bytes in, events out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One event that was dispatched. kind: `message` where none was named."""

    kind: str
    data: str
    id: str


def read(stream: bytes) -> list[Event]:
    """All events of a whole stream; what is behind the last empty line is dropped, as the standard has it."""
    text = stream.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    found, kind, data, last_id = [], "", [], ""
    for line in text.split("\n")[:-1]:
        if not line:
            if data:
                found.append(Event(kind or "message", "\n".join(data), last_id))
            kind, data = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "data":
            data.append(value)
        elif name == "id" and "\0" not in value:
            last_id = value
    return found
