"""Requests and their deliveries in process: a small model, and a generation with the commands that it gives."""

from __future__ import annotations

import asyncio
import functools
import itertools
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st

from protos import queue_pb2
from services.gateway.delivery.stream import Generation, Position, RequestStream, Row
from services.gateway.metrics import Metrics
from services.gateway.openai.answers import EventWriter
from services.gateway.request import GenerationSpec, ToolUse
from services.gateway.text.tokenizer import ModelText
from services.gateway.text.tools.blocks import reader_of
from services.gateway.text.tools.reader import CallPiece, merge
from tests.support import sse
from tests.support.checkpoints.tokenizers import byte_fallback, byte_level, write_model

EOS = 1
CUTS = st.lists(st.integers(0, 30), max_size=8)
Whole = TypeVar("Whole", list[int], str, bytes)


@functools.cache
def model(kind: str = "byte_level") -> ModelText:
    tokenizer = {"byte_level": byte_level, "byte_fallback": byte_fallback}[kind]()
    with tempfile.TemporaryDirectory() as directory:
        return ModelText(write_model(Path(directory) / "m", tokenizer))


def spec(**changes: Any) -> GenerationSpec:
    fields: dict[str, Any] = {
        "id": "cmpl-1", "endpoint": "completions", "model": "m", "created": 1, "prompts": [[50]], "n": 1,
        "max_tokens": 100, "stop_ids": [EOS], "sampling": queue_pb2.Sampling(), "priority": "normal", "stream": True,
    }  # fmt: skip
    return GenerationSpec(**fields | changes)


def stored(request: GenerationSpec, text: ModelText | None = None) -> GenerationSpec:
    """Return a request as another gateway reads it of its record."""
    tail = (text or model()).text.tail
    return GenerationSpec.from_delivery(request.id, request.to_delivery(tail), request.priority)


def rows(whole: Whole, cuts: list[int]) -> list[Whole]:
    """Cut tokens into rows, or a text into pieces."""
    places = sorted({0, len(whole), *(min(cut, len(whole)) for cut in cuts)})
    return [whole[a:b] for a, b in itertools.pairwise(places)]


def read_calls(use: ToolUse, pieces: list[str]) -> tuple[str, list[CallPiece], bool]:
    """Return the content and the calls of a text that comes in pieces, and whether the last call was cut."""
    reader, content, calls = reader_of(use, "r", 0), "", list[CallPiece]()
    for piece in pieces:
        text, gained = reader.feed(piece)
        content, calls = content + text, calls + gained
    text, gained = reader.flush()
    return content + text, merge(calls + gained), reader.is_cut


def bytes_of_one_more(feed: Callable[[str], object], piece: str) -> int:
    """Return the most bytes that one more call takes for a while, of a reader that has read 500 pieces."""
    for _ in range(500):
        feed(piece)
    tracemalloc.start()
    try:
        feed(piece)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Recorded:
    """Commands that a generation gave. away: Redis does not answer, so stops stay unwritten."""

    def __init__(self) -> None:
        self.stops: list[tuple[int, int]] = []
        self.closed: list[str] = []
        self.away = False
        self.unwritten: list[Callable[[], None]] = []
        self.records: list[bytes] = []  # of each prompt

    async def prompt_logprobs(self, request_id: str, prompts: int) -> list[bytes]:
        return self.records

    def stop_choice(self, request_id: str, choice: int, at_token: int, written: Callable[[], None]) -> None:
        self.stops.append((choice, at_token))
        if self.away:
            self.unwritten.append(written)
        else:
            written()

    def close(self, stream: RequestStream, cancel_reason: str = "") -> None:
        self.closed.append(cancel_reason)


def generation(
    request: GenerationSpec, text: ModelText | None = None, had: str = ""
) -> tuple[Generation, RequestStream, Recorded]:
    """Return a generation under way, to a client that has read as far as the event `had`."""
    stream, commands = RequestStream(request.id, request.choices), Recorded()
    position = Position.parse(had, request.id, request.choices) if had else None
    return Generation(request, text or model(), stream, commands, Metrics(), 0.0, position), stream, commands


def in_rows(pieces: list[list[int]], finish: int) -> list[tuple[Row, int]]:
    """Return a row of the first choice for each piece with its place; the last one ends it."""
    places = itertools.accumulate(map(len, pieces), initial=0)
    sent = [(Row(0, piece), first) for piece, first in zip(pieces, places, strict=False)]
    sent[-1][0].finish = finish
    return sent


def streamed(
    request: GenerationSpec,
    sent: Iterable[tuple[Row, int]],
    text: ModelText | None = None,
    had: str = "",
    writer_of: Callable[[Generation], Any] = lambda running: EventWriter(running, "fp"),
) -> list[sse.Event]:
    """Return the events of a stream that gets these rows one by one, behind the event `had`; the last is `[DONE]`."""

    async def told() -> bytes:
        running, stream, _ = generation(request, text, had)
        writer, written = writer_of(running), b""
        for row, first in sent:
            stream.offer(row, first)
            if not running.is_done and stream.failure is None:
                written += writer.events(await running.next(0.0))
        return bytes(written + writer.end(running.usage))

    return sse.parse(asyncio.run(told()))
