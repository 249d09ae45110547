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


def message_blocks(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the blocks that events of `/v1/messages` add up to, as a client reads them, without signatures."""
    found: list[dict[str, Any]] = []
    for event in events:
        body = event.json
        assert event.kind == body["type"]
        match body["type"]:
            case "content_block_start":
                assert body["index"] == len(found)
                found.append(body["content_block"] | {"open": True, "json": ""})
            case "content_block_delta":
                block, delta = found[body["index"]], body["delta"]
                assert block["open"] and body["index"] == len(found) - 1
                for name in ("text", "thinking"):
                    block[name] = block.get(name, "") + delta.get(name, "")
                block["json"] += delta.get("partial_json", "")
            case "content_block_stop":
                found[body["index"]]["open"] = False
    assert not any(block["open"] for block in found)
    return [
        {"type": block["type"], **{name: block[name] for name in ("text", "thinking", "id", "name") if block.get(name)}}
        | ({"input": json.loads(block["json"] or "{}")} if block["type"] == "tool_use" else {})
        for block in found
    ]
