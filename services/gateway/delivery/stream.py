"""Hold one request's rows from Redis and turn them into text for the handler that serves the client.

The reader of Redis offers rows to a `RequestStream` and never waits; a `Generation` takes them out. A handler that
waits may be called directly instead, since waking its task costs more than all that it does. Every token has its index:
tokens that are there already are dropped, missing ones are reported as a gap, so the handler sees each token once and
in order. The text after token i of a choice is a function of the request and tokens 0..i alone (detokenizer.py,
stop.py), so every gateway produces the same text. `Position` is how far the client has read: the second half of an
event's id, from which any gateway can continue.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from typing import Any, Protocol

from protos import queue_pb2
from services.gateway.errors import (
    HANDED_OVER,
    TAKEN_OVER,
    ApiError,
    broken_record,
    unavailable,
    worker_error,
)
from services.gateway.metrics import Metrics
from services.gateway.request import GenerationSpec
from services.gateway.text import reasoning
from services.gateway.text.logprobs import Logprobs, PromptLogprobs
from services.gateway.text.stop import StopMatcher
from services.gateway.text.tokenizer import ModelText
from services.gateway.text.tools.blocks import reader_of
from services.gateway.text.tools.reader import CallPiece, Reader
from services.gateway.tracing import RequestSpan
from shared.dead_letters import integer
from shared.messages import quote
from shared.text.logprobs import check_records, split_records
from shared.wire.columns import unpack, unpack_list

NOTHING, PREAMBLE = -2, -1
"""Positions before the first token: nothing was sent; what comes before the text was (a role, an echoed prompt)."""

AT_ONCE = 2048
"""Most tokens that one `take` returns, fewer with log-probabilities. An answer that is read again comes as one row, and
its text would hold the event loop.
"""
RECORD_BYTES = 8
"""Bytes of log-probabilities that take about as long as a token."""

_USAGE = "+"
_INDEX = re.compile(r"-?[0-9]{1,9}")


@dataclass(slots=True)
class Position:
    """How far a client has read.

    last_indices: for each choice the index of the last token with text that the client has, NOTHING or PREAMBLE before;
    one more than the last token's with the text that only the end released, two more with the reason. usage: the client
    has the usage, too.
    """

    last_indices: list[int]
    usage: bool = False

    @staticmethod
    def parse(event_id: str, request_id: str, choices: int) -> Position:
        """Return the position in an event's id. Raise ApiError(400) for an id that is not of this request.

        >>> Position.parse("cmpl-1:4.-1", "cmpl-1", 2)
        Position(last=[4, -1], usage=False)
        """
        owner, _, indices = event_id.rpartition(":")
        parts = indices.removesuffix(_USAGE).split(".")
        if owner != request_id or len(parts) != choices or not all(_INDEX.fullmatch(part) for part in parts):
            example = f"{request_id}:{'.'.join(['0'] * choices)}"
            raise ApiError(
                400,
                f"Last-Event-ID must be the id of an event of this request, such as {example}; got {quote(event_id)}",
                param="Last-Event-ID",
                code="invalid_event_id",
            )
        return Position([max(NOTHING, int(part)) for part in parts], indices.endswith(_USAGE))

    def __str__(self) -> str:
        return ".".join(map(str, self.last_indices)) + _USAGE * self.usage


class Offer(Enum):
    """The outcome of offering a row."""

    TAKEN = auto()
    DUPLICATE = auto()
    LATE = auto()  # the choice has ended
    GAP = auto()
    OVERFLOW = auto()
    OTHER_TOKENS = auto()  # than those that came before in their places


@dataclass(slots=True)
class Row:
    """New tokens of one choice, and how it ended (0: it has not)."""

    choice: int
    tokens: list[int]
    finish: int = 0
    error: str = ""
    logprobs: bytes = b""  # a record of each token, if the request asked (shared/text/logprobs.py)
    drafts: int = 0  # guesses in the step that brought the tokens
    cached_tokens: int = 0  # prompt tokens that the prefix cache had, with the first token


@dataclass(slots=True)
class EarlyRow:
    """A row that came before its predecessors."""

    first_index: int
    row: Row


@dataclass(slots=True)
class RequestStream:
    """Rows of one request.

    max_rows: rows kept for a slow client; 0 means no bound (no client reads slowly). survives: the request continues
    without its client. client: the tenant of the connection that waits for it; empty for a request without one.
    """

    request_id: str
    choices: int
    max_rows: int = 0
    survives: bool = False
    client: str = ""
    record_bytes: int = 0  # of each token's log-probabilities, or vector
    logprob_count: int = 0  # Sampling.logprobs; 0 of vectors
    accepted_drafts: int = 0  # guesses that were right, and the others
    rejected_drafts: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)  # choice -> prompt tokens that the prefix cache had
    received_tokens: list[int] = field(init=False)
    _ids: list[array[int]] = field(init=False)  # these tokens
    choice_has_ended: list[bool] = field(init=False)
    allowance: tuple[int, int] = (-1, -1)  # requests and tokens that the key may still spend this minute; -1: no limit
    failure: ApiError | None = None
    ahead: list[EarlyRow] = field(default_factory=list)
    is_enqueued: bool = True  # else no record is there yet
    is_refilling: bool = False
    last_row_at: float = field(default_factory=time.monotonic)
    last_read_at: float = field(default_factory=time.monotonic)
    is_cut: asyncio.Event = field(default_factory=asyncio.Event)
    _rows: list[Row] = field(default_factory=list)
    _parts: deque[Row] = field(default_factory=deque)  # of a row that was begun to be taken, before all others
    _has_more: bool = False  # whether the last `take` left rows
    _is_awaited: bool = False  # while its owner waits in `take`
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _deliver: Callable[[Row], bool] | None = None  # while its owner waits in `take`

    def __post_init__(self) -> None:
        self.received_tokens = [0] * self.choices
        self._ids = [array("i") for _ in range(self.choices)]
        self.choice_has_ended = [False] * self.choices

    @property
    def is_done(self) -> bool:
        return all(self.choice_has_ended)

    @property
    def is_crowded(self) -> bool:
        """Whether half of the rows that may wait do, and one turn of the event loop lets their owner take them. An
        owner that waits for the socket takes none.
        """
        return self._is_awaited and 0 < self.max_rows <= 2 * len(self._rows)

    def offer(self, row: Row, first: int) -> Offer:
        """Take a row; `first` is the index of its first token."""
        self.last_row_at = time.monotonic()
        choice = row.choice
        if self.failure is not None or not 0 <= choice < self.choices or self.choice_has_ended[choice]:
            return Offer.LATE
        have = self.received_tokens[choice]
        if first > have and not row.error:
            return Offer.GAP
        late = max(0, have - first)
        tokens = row.tokens[late:] if late else row.tokens
        if late and row.tokens[:late] != self._ids[choice][first : first + len(row.tokens)].tolist():
            return Offer.OTHER_TOKENS
        if not tokens and not row.finish:
            return Offer.DUPLICATE
        if self.max_rows and len(self._rows) >= self.max_rows:
            return Offer.OVERFLOW
        if row.drafts:
            right = min(max(len(tokens) - 1, 0), row.drafts)
            self.accepted_drafts += right
            self.rejected_drafts += 0 if late else row.drafts - right  # of a row that came again they are counted
        if row.cached_tokens:
            self.cached_tokens[choice] = row.cached_tokens
        self.received_tokens[choice] = have + len(tokens)
        self._ids[choice].extend(tokens)
        self.choice_has_ended[choice] = row.finish != 0
        if late:
            row = Row(choice, tokens, row.finish, row.error, row.logprobs[late * self.record_bytes :])
        if self._deliver is None or self._rows or row.finish or not self._deliver(row):
            self._rows.append(row)
            self._wake.set()
        return Offer.TAKEN

    def put_aside(self, row: Row, first: int) -> None:
        """Keep a row that came too early, until what is before it was offered."""
        self.ahead.append(EarlyRow(first, row))

    def take_ahead(self) -> list[EarlyRow]:
        """Return rows put aside, in order; they are to be offered again."""
        waiting, self.ahead = sorted(self.ahead, key=lambda item: item.first_index), []
        return waiting

    def expire(self) -> None:
        """End all choices that have not ended, as past the deadline."""
        for choice, has_ended in enumerate(self.choice_has_ended):
            if not has_ended:
                self.offer(Row(choice, [], Finish.DEADLINE), self.received_tokens[choice])

    def end_choice(self, choice: int) -> None:
        """End a choice at a stop string: its later rows are dropped."""
        self.choice_has_ended[choice] = True

    def wake(self) -> None:
        """Let `take` return, also with nothing: its caller may wait for something else."""
        self._wake.set()

    def fail(self, error: ApiError, is_cut: bool = False) -> None:
        """End the request for the client. With `is_cut` its writer is stopped even where it waits for the socket."""
        if self.failure is None:
            self.failure = error
            self._rows.clear()
            self._parts.clear()
            self._wake.set()
        if is_cut:
            self.is_cut.set()

    async def take(self, timeout_s: float | None = None, deliver: Callable[[Row], bool] | None = None) -> list[Row]:
        """Return rows since the last call; empty after `timeout_s` or `wake`. Raise ApiError once the request failed.

        It returns AT_ONCE tokens at most. The next call returns more, after one turn of the event loop.
        deliver: called with rows that come meanwhile and are no ends; those that it takes (True) are not given here.
        """
        self._is_awaited = True
        try:
            if self._has_more:
                await asyncio.sleep(0)
            elif not self._rows and self.failure is None:
                self._deliver = deliver
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
        except TimeoutError:
            return []
        finally:
            self._is_awaited, self._deliver = False, None
        self._wake.clear()
        if self.failure is not None:
            raise self.failure
        most = max(1, AT_ONCE // (1 + self.record_bytes // RECORD_BYTES))
        if not self._parts and self._rows and len(self._rows[0].tokens) > most:
            self._parts.extend(_split_row(self._rows.pop(0), most, self.record_bytes))
        parts = [self._parts.popleft()] if self._parts else []
        if not self._parts:  # rows that have to wait stay where the bound counts them
            room = most - sum(len(row.tokens) for row in parts)
            ends = itertools.accumulate(len(row.tokens) for row in self._rows)
            fit_count = len(list(itertools.takewhile(lambda end: end <= room, ends)))
            parts += self._rows[:fit_count]
            del self._rows[:fit_count]
        self._has_more = bool(self._parts or self._rows)
        return parts


def _split_row(row: Row, max_tokens: int, record_bytes: int) -> Iterator[Row]:
    """Yield rows of at most so many tokens that say the same. record_bytes: of each token."""
    for first in range(0, len(row.tokens) - max_tokens, max_tokens):
        records = row.logprobs[first * record_bytes : (first + max_tokens) * record_bytes]
        yield Row(row.choice, row.tokens[first : first + max_tokens], logprobs=records)
    last = (len(row.tokens) - 1) // max_tokens * max_tokens if row.tokens else 0
    yield replace(row, tokens=row.tokens[last:], logprobs=row.logprobs[last * record_bytes :])


def finishes(record: dict[bytes, bytes], choices: int) -> list[tuple[int, int]]:
    """Return (choice, finish) of the choices that have ended by their record; their `out` is complete.

    Raise ValueError for a record that no scheduler wrote.
    """
    if record.get(b"state") == b"finished":
        parts = record.get(b"finish", b"").split(b",")
        if len(parts) != choices:
            raise ValueError(f"finish: {len(parts)} reasons of {choices} choices")
        return [(choice, integer(part, Finish.STOP, Finish.ERROR)) for choice, part in enumerate(parts)]
    found = [(choice, integer(record.get(b"finish:%d" % choice), 0, Finish.ERROR)) for choice in range(choices)]
    return [(choice, finish) for choice, finish in found if finish]


def rows_of(batch: queue_pb2.TokenBatch) -> Iterator[tuple[str, int, Row]]:
    """Yield request, index of the first token, and row, for each row of a batch. Raise ValueError for a broken one."""
    choices, first = unpack_list(batch.choices), unpack_list(batch.first)
    counts, tokens = unpack_list(batch.counts), unpack_list(batch.tokens)
    logprobs = [b""] * len(counts)
    if batch.logprobs or batch.logprob_sizes:
        logprobs = split_records(batch.logprobs, unpack(batch.logprob_sizes), len(counts)).tolist()
    drafts = unpack_list(batch.drafts) or [0] * len(counts)
    finish, errors, cached_tokens, offset = batch.finish, dict(batch.errors), dict(batch.cached), 0
    for index, request_id in enumerate(batch.requests):
        end = offset + counts[index]
        error = errors.get(index, "")
        row = Row(
            choices[index],
            tokens[offset:end],
            finish[index],
            error,
            logprobs[index],
            drafts[index],
            cached_tokens.get(index, 0),
        )
        yield request_id, first[index], row
        offset = end


def check_logprobs(rows: Iterable[tuple[RequestStream, Row]], vocab_size: int) -> None:
    """Raise ValueError where the log-probabilities of a row are not those of its tokens, or no worker's.

    Rows of one width are checked as one: a call of numpy for each would take 3 % of the event loop.
    """
    by_width: dict[int, list[bytes]] = {}
    for stream, row in rows:
        if len(row.logprobs) != stream.record_bytes * len(row.tokens):
            raise ValueError(f"{len(row.logprobs)} bytes of log-probabilities for {len(row.tokens)} tokens")
        if stream.logprob_count and row.logprobs:
            by_width.setdefault(stream.logprob_count, []).append(row.logprobs)
    for wanted, records in by_width.items():
        check_records(b"".join(records), wanted, vocab_size)


def ends(record: dict[bytes, bytes], choices: int, rows: list[tuple[int, Row]]) -> list[Row]:
    """Return the ends of the finished choices; the dispatcher has read all their tokens. rows: those of `out`.

    Raise ValueError for a record that no scheduler wrote, and where `out` has more tokens than it says.
    """
    lengths = _lengths(record, choices)
    for first, row in rows:
        if (end := first + len(row.tokens)) > (length := lengths.get(row.choice, end)):
            raise ValueError(f"lengths: {length} tokens of choice {row.choice}; `out` has {end}")
    error = record.get(b"error", b"").decode("utf-8", "replace")
    return [Row(choice, [], finish, error) for choice, finish in finishes(record, choices)]


def take_cached(stream: RequestStream, record: dict[bytes, bytes]) -> RequestStream:
    """Take from a record how many tokens of the prompts the prefix cache had, where no row has said so.

    Raise ValueError for a record that no gateway wrote.
    """
    for choice in range(stream.choices):
        if choice not in stream.cached_tokens and (found := record.get(b"cached:%d" % choice)) is not None:
            stream.cached_tokens[choice] = integer(found)
    return stream


def _lengths(record: dict[bytes, bytes], choices: int) -> dict[int, int]:
    """Return the tokens of each choice that ended well, by the record; none before the request has finished."""
    if record.get(b"state") != b"finished":
        return {}
    lengths = [integer(part) for part in record.get(b"lengths", b"").split(b",") if part]
    ended = zip(finishes(record, choices), lengths, strict=False)
    return {choice: length for (choice, finish), length in ended if finish in REASONS}


def lacks_tokens(stream: RequestStream, record: dict[bytes, bytes]) -> bool:
    """Return whether a finished request had more tokens than a stream with all of `out` has: `out` is not whole."""
    lengths = _lengths(record, stream.choices)
    return any(
        not stream.choice_has_ended[choice] and stream.received_tokens[choice] < length
        for choice, length in lengths.items()
    )


def fill(stream: RequestStream, record: dict[bytes, bytes], rows: list[tuple[int, Row]]) -> RequestStream:
    """Return a stream that gets nothing else, with the rows of a record."""
    take_cached(stream, record)
    for first, row in rows:
        stream.offer(row, first)
    if lacks_tokens(stream, record):
        stream.fail(broken_record())
    for row in ends(record, stream.choices, rows):
        stream.offer(row, stream.received_tokens[row.choice])
    return stream


HELD_FINISH_S = 30.0
"""How long an end waits for a Redis that is away. Then it is sent all the same: it is right."""


class HeldFinishes:
    """Hold ends by a stop string back from the client until Redis has them.

    The scheduler learns of a stop string from the gateway alone: if the end were sent first and the gateway killed
    then, the record would keep another end.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called when `take` has something new."""
        self._wake = wake
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._ready: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._timers or self._ready)

    def hold(self, choice: int) -> Callable[[], None]:
        """Hold the end of a choice until what is returned is called, or for HELD_FINISH_S."""

        def release() -> None:
            if (timer := self._timers.pop(choice, None)) is not None:
                timer.cancel()
                self._ready.append(choice)
                self._wake()

        self._timers[choice] = asyncio.get_running_loop().call_later(HELD_FINISH_S, release)
        return release

    def take(self) -> list[int]:
        """Return the choices with an end that Redis has taken since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """Drop all held ends."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


class Finish(IntEnum):
    """How a choice ended, as in protos/queue.proto."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5


REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.DEADLINE: "deadline"}


@dataclass(slots=True)
class Delta:
    """The text and tokens that one choice gained."""

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    calls: list[CallPiece] = field(default_factory=list)
    reasoning: str = ""  # before the text
    parts: list[str | CallPiece] = field(default_factory=list)  # text and calls in their order, where there are calls


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    accepted_drafts: int = 0  # guesses of next tokens that were right, and the others
    rejected_drafts: int = 0
    reasoning_tokens: int | None = None  # tokens of thinking; None of a request without
    cached_tokens: int = 0  # prompt tokens that the prefix cache had

    def body(self) -> dict[str, Any]:
        """Return OpenAI's `usage`."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        details: dict[str, int] = {}
        if self.reasoning_tokens is not None:
            details["reasoning_tokens"] = self.reasoning_tokens
        if self.accepted_drafts or self.rejected_drafts:
            details |= {
                "accepted_prediction_tokens": self.accepted_drafts,
                "rejected_prediction_tokens": self.rejected_drafts,
            }
        if details:
            usage["completion_tokens_details"] = details
        return usage


class ChoiceText:
    """Turn the tokens of one choice into text."""

    # fmt: off
    __slots__ = (
        "_detokenizer", "_has_offsets", "_include", "_length", "_matcher", "_min_tokens", "_reader", "_silent",
        "_stop_ids", "_tools", "calls", "count", "finish_reason", "is_plain", "offsets", "parts", "reasoning",
        "reasoning_tokens",
    )
    # fmt: on

    def __init__(self, spec: GenerationSpec, model: ModelText, prompt: list[int], index: int = 0) -> None:
        self._detokenizer = model.text.start(prompt, spec.skip_special_tokens)
        self._matcher = StopMatcher(spec.stop, spec.include_stop_str_in_output) if spec.stop else None
        self._stop_ids = frozenset(spec.stop_ids)
        self._include = spec.include_stop_str_in_output
        self._min_tokens = spec.min_tokens
        self._has_offsets = spec.logprobs is not None and spec.endpoint == "completions"
        self._length = 0  # of the text of all tokens so far, held back or not
        self.offsets: list[int] = []  # where in that text each token begins; only if an answer has it
        self._tools = None if spec.tools is None else reader_of(spec.tools, spec.id, index)
        self.calls: list[CallPiece] = []  # of tools, by the last `feed`
        self.parts: list[str | CallPiece] = []  # the same with the text, in their order
        self._reader = reasoning.reader_of(spec.reasoning, spec.markers or model.markers) if spec.reasoning else None
        self.reasoning = ""  # by the last `feed`
        self.reasoning_tokens = 0  # with those of the marks
        self.count = 0
        self.finish_reason: str | None = None
        self.is_plain = not (
            spec.stop or self._has_offsets or spec.tools or spec.reasoning
        )  # then `grow` does as `feed`
        self._silent = frozenset() if self._include else self._stop_ids

    @property
    def stop_string(self) -> str | None:
        """Return the stop string that ended the choice."""
        return None if self._matcher is None else self._matcher.matched_stop

    def grow(self, tokens: list[int]) -> str:
        """Return the text of tokens that end nothing, where nothing has to be looked for in it."""
        self.count += len(tokens)
        text = ""
        for token in tokens:
            if token not in self._silent:
                text += self._detokenizer.feed(token)
        return text

    def feed(self, tokens: list[int], finish_reason: str | None) -> tuple[str, list[int], bool]:
        """Return text that can be shown, the tokens that count, and whether a stop string ended the choice here."""
        self.reasoning = ""
        if self._reader is None or self._reader.is_over:
            text, token_count, has_stopped = self._feed(tokens, finish_reason)
        else:
            text, token_count, has_stopped = self._think(self._reader, tokens, finish_reason)
        if self._tools is not None:
            text = self._read_calls(self._tools, text)
        return text, token_count, has_stopped

    def _think(
        self, reader: reasoning.Reader, tokens: list[int], finish_reason: str | None
    ) -> tuple[str, list[int], bool]:
        """Return as `feed` the text behind the thinking, which goes to `reasoning`. Thinking is read token by token:
        how many tokens it has does not depend on how many came at once.
        """
        text, token_count, has_stopped = "", 0, False
        while token_count < len(tokens) and not (reader.is_over or has_stopped):
            is_last = token_count + 1 == len(tokens)
            piece, _, has_stopped = self._feed(
                tokens[token_count : token_count + 1], finish_reason if is_last else None
            )
            token_count += 1
            text += self._split(reader.feed(piece))
            if reader.has_thought:
                self.reasoning_tokens = self.count
        if not has_stopped and (token_count < len(tokens) or not tokens):
            piece, counted, has_stopped = self._feed(tokens[token_count:], finish_reason)
            token_count += len(counted)
            text += self._split(reader.feed(piece))
        if self.finish_reason is not None:
            text += self._split(reader.flush())
        return text, tokens[:token_count], has_stopped

    def _split(self, parts: tuple[str, str]) -> str:
        """Keep the thinking of two parts and return the text."""
        self.reasoning += parts[0]
        return parts[1]

    def _read_calls(self, tools: Reader, text: str) -> str:
        """Return the text without tool calls, which go to `calls`."""
        text, self.calls = tools.feed(text)
        self.parts = tools.parts
        if self.finish_reason is None:
            return text
        rest, last = tools.flush()
        self.calls += last
        self.parts += tools.parts
        if self.finish_reason == "stop" and tools.calls and not tools.is_cut:
            self.finish_reason = "tool_calls"
        return text + rest

    def _feed(self, tokens: list[int], finish_reason: str | None) -> tuple[str, list[int], bool]:
        text, matcher = "", self._matcher
        for token_count, token in enumerate(tokens, 1):
            self.count += 1
            if self._has_offsets:
                self.offsets.append(self._length)
            if token in self._stop_ids and not self._include:
                continue
            piece = self._detokenizer.feed(token)
            self._length += len(piece)
            if matcher is None:
                text += piece
                continue
            text += self._match(matcher, piece)
            if matcher.matched_stop is not None:
                self.finish_reason = "stop"
                return text, tokens[:token_count], True
        if finish_reason is None:
            return text, tokens, False
        self.finish_reason = finish_reason
        rest = self._detokenizer.flush()
        if matcher is None:
            return text + rest, tokens, False
        text += self._match(matcher, rest) + matcher.flush()
        if matcher.matched_stop is not None:  # the text ended with the stand-in of half a character
            self.finish_reason = "stop"
            return text, tokens, True
        return text, tokens, False

    def _match(self, matcher: StopMatcher, text: str) -> str:
        if not text:
            return ""
        if self.count <= self._min_tokens:  # stop strings end nothing before min_tokens
            return text
        return matcher.feed(text)


class Commands(Protocol):
    """The commands that a generation gives the dispatcher."""

    def stop_choice(self, request_id: str, choice: int, at_token: int, on_written: Callable[[], None]) -> None: ...

    def close(self, stream: RequestStream, cancel_reason: str = "") -> None: ...

    async def prompt_logprobs(self, request_id: str, prompts: int) -> list[bytes]: ...


class Generation:
    """A request in flight. `close` must be called once, however it ends."""

    def __init__(
        self,
        spec: GenerationSpec,
        model: ModelText,
        stream: RequestStream,
        commands: Commands,
        metrics: Metrics,
        arrived_at: float,
        position: Position | None = None,
        on_leave: Callable[[], None] | None = None,
    ) -> None:
        """Begin the delivery.

        arrived_at: time.monotonic() at the request's arrival. position: how far the client has read. on_leave: called
        when the client has left and the request continues without it.
        """
        self.spec = spec
        self.stream = stream
        stream.record_bytes = spec.record_bytes
        stream.logprob_count = 0 if spec.pooling else spec.sampling.logprobs
        self._commands = commands
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._last_delta_at: float | None = None
        self._is_closed = False
        self.span: RequestSpan | None = None  # set where traces are sent
        self._on_leave = on_leave
        self.passed_over: Callable[[Delta], None] = _unread
        """Take what the client has already, for a writer with events that depend on it."""
        self._held_finishes = HeldFinishes(stream.wake)
        self._deadline: asyncio.TimerHandle | None = None
        self._error: ApiError | None = None  # raised by the next call of `next`
        self.failure: ApiError | None = None
        prompts = [spec.prompts[index // spec.n] for index in range(spec.choices)]
        self.choices = [ChoiceText(spec, model, prompt, index) for index, prompt in enumerate(prompts)]
        self._text = model.text
        self._vocab_size = model.vocab_size
        self.vectors = [b""] * spec.choices  # float32, of a request with pooling
        self.logprobs = Logprobs(spec, model.text, self.choices) if spec.record_bytes else None
        self.position = position or Position([NOTHING] * spec.choices)
        self._had = [last + 1 for last in self.position.last_indices]  # tokens that the client has as text
        self.is_plain = (
            self.choices[0].is_plain and not spec.record_bytes and max(self._had) <= 0
        )  # then only rows end it

    @property
    def is_done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices) and not self._held_finishes

    @property
    def usage(self) -> Usage:
        stream, tokens = self.stream, sum(choice.count for choice in self.choices)
        if self.spec.prompt_only:
            tokens = 0
        reasoning_tokens = sum(choice.reasoning_tokens for choice in self.choices) if self.spec.reasoning else None
        # Of each prompt's first choice: later ones may find what it has computed.
        cached = sum(stream.cached_tokens.get(choice, 0) for choice in range(0, self.spec.choices, self.spec.n))
        return Usage(
            self.spec.prompt_tokens, tokens, stream.accepted_drafts, stream.rejected_drafts, reasoning_tokens, cached
        )

    async def prompt_logprobs(self) -> PromptLogprobs | None:
        """Return the log-probabilities of the prompts, once the request has ended; None where none are wanted.

        Raise ApiError for records that are not whole.
        """
        spec = self.spec
        if not spec.prompt_wanted:
            return None
        records = await self._commands.prompt_logprobs(spec.id, len(spec.prompts))
        prompt_logprobs = PromptLogprobs(spec, self._text, records)
        for prompt in range(len(spec.prompts)):
            reasons = [choice.finish_reason for choice in self.choices[prompt * spec.n : (prompt + 1) * spec.n]]
            if prompt_logprobs.has(prompt):
                prompt_logprobs.check(prompt, self._vocab_size)
            elif "deadline" not in reasons:
                raise broken_record()
        return prompt_logprobs

    def end_at(self, deadline_at: float) -> None:
        """End the request as past its deadline at time.monotonic() `deadline_at`, unless it has ended: a client that
        set one waits no longer, whatever its tokens wait for.
        """
        delay_s = max(0.0, deadline_at - time.monotonic())
        self._deadline = asyncio.get_running_loop().call_later(delay_s, self.stream.expire)

    async def next(self, timeout_s: float | None = None, deliver: Callable[[Row], bool] | None = None) -> list[Delta]:
        """Return the gain since the last call, at most one Delta a choice; empty after `timeout_s`.

        deliver: as in `RequestStream.take`; it has to `apply` the rows that it takes. Raise ApiError when the request
        failed, was cancelled or its client was cut; earlier rows are returned first.
        """
        try:
            if self._error is not None:
                raise self._error
            return self.apply(await self.stream.take(timeout_s, deliver))
        except ApiError as error:
            self.failure = error
            if error.code == HANDED_OVER and not self._is_wanted:
                text = "this gateway is shutting down and the request is cancelled; send it again"
                self.failure = unavailable(text, "shutting_down")
            raise self.failure from None

    @property
    def has_failed(self) -> bool:
        """Whether the request itself ended without success; any other error is of its delivery here."""
        return self._error is not None

    @property
    def holds_end(self) -> bool:
        """Whether a stop string was found and its end is still held back."""
        return bool(self._held_finishes)

    def apply(self, rows: list[Row]) -> list[Delta]:
        """Return the gain of rows, in order. Raise ApiError when the first of them is a failure."""
        if self.is_plain and len(rows) == 1 and not rows[0].finish:
            return self._grow(rows[0])
        deltas: dict[int, Delta] = {}
        for row in rows:
            choice = self.choices[row.choice]
            if choice.finish_reason is not None:
                continue
            if row.finish in (Finish.ERROR, Finish.CANCELLED):
                self._error = _failure(row, self.spec)
                if not deltas:
                    raise self._error
                break
            reason = REASONS.get(Finish(row.finish)) if row.finish else None
            skipped_tokens = max(0, self._had[row.choice] - choice.count)
            text, tokens, has_stopped = self._feed(row.choice, row.tokens, reason)
            calls, reasoning, parts = choice.calls, choice.reasoning, choice.parts
            self._keep_logprobs(row, skipped_tokens, tokens)
            finish_reason = choice.finish_reason
            beyond = self._had[row.choice] - choice.count  # see Position
            if has_stopped:
                self.stream.end_choice(row.choice)
                if row.finish != Finish.STOP:  # also when the row has an end: the record has to agree with the client
                    written = self._held_finishes.hold(row.choice) if beyond < 2 else _do_nothing
                    self._commands.stop_choice(self.spec.id, row.choice, choice.count, written)
                    finish_reason = None
            if choice.finish_reason is not None:
                if beyond >= 1:
                    self.passed_over(Delta(row.choice, text, [], None, calls, reasoning, parts))
                    text, calls, reasoning, parts = "", [], "", []
                if beyond >= 2:
                    continue
            delta = deltas.setdefault(row.choice, Delta(row.choice, "", [], None))
            delta.text += text
            delta.parts += parts
            delta.calls += calls
            delta.reasoning += reasoning
            delta.token_ids = delta.token_ids + tokens
            delta.finish_reason = finish_reason
        for number in self._held_finishes.take():
            reason = self.choices[number].finish_reason
            deltas.setdefault(number, Delta(number, "", [], None)).finish_reason = reason
        self._observe(sum(len(delta.token_ids) for delta in deltas.values()))
        return list(deltas.values())

    def _grow(self, row: Row) -> list[Delta]:
        """Add the text of a plain row, as nearly every row is. No choice can have ended before."""
        text = self.choices[row.choice].grow(row.tokens)
        self._observe(len(row.tokens))
        return [Delta(row.choice, text, row.tokens, None)]

    def _feed(self, number: int, tokens: list[int], reason: str | None) -> tuple[str, list[int], bool]:
        """Feed a choice and return only what the client does not have yet."""
        choice = self.choices[number]
        skipped_tokens = max(0, self._had[number] - choice.count)
        if not skipped_tokens:
            return choice.feed(tokens, reason)
        skips_all = skipped_tokens >= len(tokens)
        text, _, has_stopped = choice.feed(tokens[:skipped_tokens], None)
        self.passed_over(Delta(number, text, [], None, choice.calls, choice.reasoning, choice.parts))
        if has_stopped or (skips_all and reason is None):
            choice.calls, choice.reasoning, choice.parts = [], "", []
            return "", [], has_stopped
        return choice.feed(tokens[skipped_tokens:], reason)

    def _keep_logprobs(self, row: Row, skipped_tokens: int, tokens: list[int]) -> None:
        """Keep the log-probabilities of `tokens`, those of the row that count, behind those that the client has."""
        if self.spec.pooling:
            self.vectors[row.choice] += row.logprobs
        elif self.logprobs is not None:
            size = self.spec.record_bytes
            records = row.logprobs[size * skipped_tokens : size * (skipped_tokens + len(tokens))]
            self.logprobs.keep(row.choice, self.choices[row.choice].count - len(tokens), tokens, records)

    def close(self) -> None:
        """End the request's delivery; what still runs is cancelled, unless its client promised to come back."""
        if self._is_closed:
            return
        self._is_closed = True
        self.passed_over = _unread  # the writer, which refers to this generation
        if self.span is not None:
            ends = [choice.finish_reason or "" for choice in self.choices]
            self.span.end(self.usage.completion_tokens, ends, self.is_done, self.failure)
        if self.is_done:
            reasons = [choice.finish_reason for choice in self.choices]
            took_s = time.monotonic() - self._arrived_at
            self._metrics.count_finished(self.spec, reasons, self.usage.completion_tokens, took_s)
            self._commands.close(self.stream)
        elif self._is_wanted:
            self._commands.close(self.stream)
            if self._on_leave is not None and not self._has_moved:
                self._on_leave()
        elif self.failure is not None:
            self._commands.close(self.stream, self.failure.message)
        else:
            self._metrics.cancellations.inc()
            self._commands.close(self.stream, "the client left")
        self._held_finishes.close()
        if self._deadline is not None:
            self._deadline.cancel()

    @property
    def _has_moved(self) -> bool:
        """Whether another connection or gateway delivers the request, or will."""
        failure = self.failure or self.stream.failure
        return failure is not None and failure.code in (TAKEN_OVER, HANDED_OVER)

    @property
    def _is_wanted(self) -> bool:
        """Whether the rest is still wanted: by another connection, or by the client when it comes back. An error of the
        delivery here, such as of a field of the record, says nothing about the request.
        """
        failure = self.failure or self.stream.failure
        if self.spec.survives_client or failure is None:
            return self.spec.survives_client
        return failure.code == TAKEN_OVER or (failure.code == HANDED_OVER and self.spec.stream)

    def _observe(self, tokens: int) -> None:
        if not tokens:
            return
        now = time.monotonic()
        self._metrics.on_delivery(tokens, None if self._last_delta_at is None else now - self._last_delta_at)
        if self._last_delta_at is None:
            if self.span is not None:
                self.span.first_token()
            self._metrics.ttft.labels(self.spec.endpoint).observe(now - self._arrived_at)
        self._last_delta_at = now


def _unread(_delta: Delta) -> None:
    """Ignore what the client has: events of most writers do not depend on it."""


def _do_nothing() -> None:
    """Ignore that a stop is written: the client has had the end before."""


def _failure(row: Row, spec: GenerationSpec) -> ApiError:
    """Return the error of a row that ends its request without success."""
    if row.finish == Finish.CANCELLED:
        return ApiError(409, "the request was cancelled", code="cancelled")
    return worker_error(row.error, spec.grammar_field)
