"""Rows that are written as soon as they are read from Redis: the writer's bytes, in order."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from services.gateway.anthropic.answers import MessageEvents
from services.gateway.delivery.stream import Offer, Row
from services.gateway.openai import answers
from services.gateway.openai.answers import KEEP_ALIVE, EventStream, EventWriter
from tests.support.gateway.generations import generation, model, spec


class Client:
    """One stream over a connection; `room` says whether it takes bytes."""

    def __init__(self, at_once: bool = True, keepalive_s: float = 1000.0, had: str = "", **changes: Any) -> None:
        self.generation, self.stream, self.commands = generation(spec(**changes), had=had)
        self.writer = EventWriter(self.generation, "fp")
        self.events_response = EventStream(self.generation, self.writer, keepalive_s)
        self.body = b""
        self.room = True
        self.at_once = 0
        own = {"orcinus.has_room": {"call": lambda: self.room}, "orcinus.write": {"call": self._write}}
        self.scope: dict[str, Any] = {"type": "http", "extensions": own if at_once else {}}

    def _write(self, body: bytes) -> None:
        assert self.room
        self.at_once += 1
        self.body += body

    async def send(self, message: Message) -> None:
        if not self.room:
            await asyncio.sleep(0)  # as one that waits for room
        self.body += message.get("body", b"")

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def serve(self, send: Callable[[Message], Any] | None = None) -> asyncio.Task[None]:
        """Begin to serve the stream."""
        serving = asyncio.create_task(self.events_response(self.scope, self.receive, send or self.send))
        await self.settled()
        return serving

    async def run(self, rows: list[tuple[Row, int, bool]]) -> None:
        """Serve all rows, one after another; the last ones have to end the request."""
        serving = await self.serve()
        for row, first, room in rows:
            self.room = room
            assert self.stream.offer(row, first) in (Offer.TAKEN, Offer.LATE)
            await self.settled()
        for written in self.commands.unwritten:  # stops: Redis is back
            written()
            await self.settled()
        await asyncio.wait_for(serving, 60)

    @staticmethod
    async def settled() -> None:
        for _ in range(12):
            await asyncio.sleep(0)


SPECS = st.fixed_dictionaries(
    {
        "endpoint": st.sampled_from(["chat", "completions"]),
        "n": st.integers(1, 3),
        "return_token_ids": st.booleans(),
        "include_usage": st.booleans(),
        "continuous_usage": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "min_tokens": st.integers(0, 3),
        "echo": st.booleans(),
        "prompt_texts": st.just(["The"]),
        "stop": st.lists(st.sampled_from(["e", "th", "o", " q"]), max_size=2),
    }
)


@st.composite
def rows_of(draw: st.DrawFn, choices: int) -> list[tuple[Row, int, bool]]:
    """Tokens of every choice in some order, and the end of each; with each row, whether the connection has room."""
    had = [0] * choices
    found = []
    tokens = st.lists(st.integers(0, 420), min_size=1, max_size=3)
    for choice in draw(st.lists(st.integers(0, choices - 1), max_size=12)):
        row = Row(choice, draw(tokens))
        found.append((row, had[choice], draw(st.booleans())))
        had[choice] += len(row.tokens)
    for choice in draw(st.permutations(range(choices))):
        ending = draw(st.lists(st.integers(0, 399), max_size=1))
        found.append((Row(choice, ending, finish=draw(st.sampled_from([1, 2, 4]))), had[choice], True))
    return found


@given(st.data(), SPECS, st.booleans())
@settings(max_examples=80, deadline=None)
def test_rows_written_at_once_are_the_bytes_of_the_writer(
    data: st.DataObject, changes: dict[str, Any], away: bool
) -> None:
    rows = data.draw(rows_of(changes["n"]))

    async def both() -> tuple[Client, Client]:
        by_writer, at_once = Client(False, **changes), Client(True, **changes)
        by_writer.commands.away = at_once.commands.away = away
        by_writer.generation.is_plain = by_writer.writer.is_plain = False
        await by_writer.run(rows)
        await at_once.run(rows)
        return by_writer, at_once

    by_writer, at_once = asyncio.run(both())
    # A stop that is written while it is told wakes the writer for nothing: then it says that it is there.
    assert at_once.body.replace(KEEP_ALIVE, b"") == by_writer.body.replace(KEEP_ALIVE, b"")
    assert at_once.body.endswith(b"data: [DONE]\n\n")
    assert not by_writer.at_once


def plain_rows(count: int) -> Iterator[tuple[Row, int, bool]]:
    for index in range(count):
        yield Row(0, [100 + index]), index, True
    yield Row(0, [90], finish=2), count, True


def test_all_rows_but_the_last_are_written_at_once() -> None:
    client = Client()
    asyncio.run(client.run(list(plain_rows(20))))
    assert client.at_once == client.body.count(b"\nid: ") + client.body.startswith(b"id: ") - 2  # text and reason


async def test_nothing_overtakes_the_end_by_a_stop_string() -> None:
    client = Client(stop=["fox"], n=2)
    client.commands.away = True
    serving = await client.serve()
    client.stream.offer(Row(0, model().encode("a fox")), 0)
    assert client.at_once == 1
    client.stream.offer(Row(1, model().encode("a")), 0)
    assert client.at_once == 1
    await client.settled()
    client.commands.unwritten[0]()
    client.stream.offer(Row(1, model().encode("b")), 1)
    await client.settled()
    client.stream.offer(Row(1, [], finish=2), 2)
    await asyncio.wait_for(serving, 60)
    assert KEEP_ALIVE not in client.body
    assert client.body.count(b'"finish_reason":"stop"') == 1


@pytest.mark.parametrize("writer", [None, MessageEvents])
def test_answer_that_has_ended_is_gone_without_the_garbage_collector(writer: type[MessageEvents] | None) -> None:
    client = Client()
    if writer is not None:
        client.writer = writer(client.generation)
        client.events_response = EventStream(client.generation, client.writer, 1000.0)
    kept = [weakref.ref(each) for each in (client.events_response, client.generation, client.writer)]
    gc.disable()
    try:
        asyncio.run(client.run(list(plain_rows(3))))
        del client.events_response, client.generation, client.writer
        assert [each() for each in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_resumed_stream_begins_after_the_last_event_id() -> None:
    client = Client(had="cmpl-1:3")
    asyncio.run(client.run(list(plain_rows(8))))
    assert client.at_once == 4
    assert client.body.startswith(b"id: cmpl-1:4\n")


def test_stream_ends_when_the_client_has_the_finish() -> None:
    tokens = model().encode("a fox")
    client = Client(stop=["fox"], had=f"cmpl-1:{len(tokens) + 1}")
    asyncio.run(client.run([(Row(0, tokens), 0, True)]))
    assert client.body == b"data: [DONE]\n\n"


async def test_nothing_overtakes_a_writer_that_waits_for_room() -> None:
    client, room = Client(), asyncio.Event()

    async def slow(message: Message) -> None:
        if message["type"] == "http.response.body":
            await room.wait()
        await client.send(message)

    serving = await client.serve(slow)
    client.room = False
    for row, first, _ in plain_rows(6):
        client.stream.offer(row, first)
        await client.settled()
        client.room = True  # of the connection; the writer still holds what came before
    assert client.at_once == 0
    room.set()
    await asyncio.wait_for(serving, 60)
    places = [int(line.rpartition(b":")[2]) for line in client.body.splitlines() if line.startswith(b"id: ")]
    assert places == sorted(places)


async def test_row_that_cannot_be_written_fails_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    monkeypatch.setattr(client.writer, "events", lambda _: 1 // 0)
    serving = await client.serve()
    assert client.stream.offer(Row(0, [100]), 0) is Offer.TAKEN
    await asyncio.wait_for(serving, 60)
    assert b'"code":"internal_error"' in client.body


async def test_keep_alive_is_sent_after_silence_and_not_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(keepalive_s=10.0)
    now = 0.0
    asked: list[float] = []

    async def next_(timeout_s: float, deliver: Callable[[Row], bool]) -> list[Any]:
        nonlocal now
        asked.append(timeout_s)
        now += timeout_s
        if len(asked) == 1:
            client.stream.last_row_at = 4.0  # a token, written at once, while it waited
        elif len(asked) > 4:
            client.generation.choices[0].finish_reason = "length"
        return []

    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(client.generation, "next", next_)
    client.stream.last_row_at = 0.0
    await asyncio.wait_for(client.events_response(client.scope, client.receive, client.send), 60)
    assert asked[:3] == [10.0, 4.0, 10.0]
    assert client.body.count(KEEP_ALIVE) == len(asked) - 2  # not behind a token, nor at the end
