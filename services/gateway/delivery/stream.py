"""Hold one request's rows between the token reader and the handler that serves the client.

The reader puts rows in and never waits; the handler takes them out. A handler that waits may be called directly
instead, since waking its task costs more than all that it does. Every token has its index: tokens that are there
already are dropped, missing ones are reported as a gap, so the handler sees each token once and in order. `Position`
is how far the client has read: the second half of an event's id, from which any gateway can go on.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from services.gateway.errors import ApiError, shown

NOTHING, PREAMBLE = -2, -1
"""Positions before the first token: nothing was sent; what comes before the text was (a role, an echoed prompt)."""

_USAGE = "+"
_INDEX = re.compile(r"-?[0-9]{1,9}")


@dataclass(slots=True)
class Position:
    """How far a client has read. last: for each choice the index of the last token with text that the client has,
    NOTHING or PREAMBLE before; one more than the last token's with the text that only the end released, two more with
    the reason. usage: the client has the usage, too.
    """

    last: list[int]
    usage: bool = False

    @staticmethod
    def parse(given: str, request_id: str, choices: int) -> Position:
        """From an event's id. Raise ApiError(400) for one that is not of this request.

        >>> Position.parse("cmpl-1:4.-1", "cmpl-1", 2)
        Position(last=[4, -1], usage=False)
        """
        owner, _, indices = given.rpartition(":")
        parts = indices.removesuffix(_USAGE).split(".")
        if owner != request_id or len(parts) != choices or not all(_INDEX.fullmatch(part) for part in parts):
            example = f"{request_id}:{'.'.join(['0'] * choices)}"
            raise ApiError(
                400,
                f"Last-Event-ID must be the id of an event of this request, such as {example}; got {shown(given)}",
                param="Last-Event-ID",
                code="invalid_event_id",
            )
        return Position([max(NOTHING, int(part)) for part in parts], indices.endswith(_USAGE))

    def __str__(self) -> str:
        return ".".join(map(str, self.last)) + _USAGE * self.usage


class Offer(Enum):
    """The outcome of offering a row."""

    TAKEN = auto()
    DUPLICATE = auto()
    LATE = auto()  # the choice has ended
    GAP = auto()
    OVERFLOW = auto()


@dataclass(slots=True)
class Row:
    """New tokens of one choice, and how it ended (0: it has not)."""

    choice: int
    tokens: list[int]
    finish: int = 0
    error: str = ""
    logprobs: bytes = b""  # a record of each token, if the request asked (shared/logprobs.py)


@dataclass(slots=True)
class Ahead:
    """A row that came before its predecessors."""

    first: int
    row: Row


@dataclass(slots=True)
class RequestStream:
    """Rows of one request. `bound`: rows kept for a slow client; 0 means no bound (no client reads slowly). `survives`:
    the request continues without its client.
    """

    request_id: str
    choices: int
    bound: int = 0
    survives: bool = False
    record_bytes: int = 0  # of each token's log-probabilities
    received: list[int] = field(init=False)
    finished: list[bool] = field(init=False)
    left: tuple[int, int] = (-1, -1)  # requests and tokens that the key may still spend this minute; -1: no limit
    failure: ApiError | None = None
    ahead: list[Ahead] = field(default_factory=list)
    refilling: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    asked_at: float = field(default_factory=time.monotonic)
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    _rows: list[Row] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _deliver: Callable[[Row], bool] | None = None  # while its owner waits in `take`

    def __post_init__(self) -> None:
        self.received = [0] * self.choices
        self.finished = [False] * self.choices

    @property
    def done(self) -> bool:
        return all(self.finished)

    def offer(self, row: Row, first: int) -> Offer:
        """Take a row whose first token has index `first`."""
        self.heard_at = time.monotonic()
        choice = row.choice
        if self.failure is not None or not 0 <= choice < self.choices or self.finished[choice]:
            return Offer.LATE
        have = self.received[choice]
        if first > have and not row.error:
            return Offer.GAP
        late = max(0, have - first)
        tokens = row.tokens[late:] if late else row.tokens
        if not tokens and not row.finish:
            return Offer.DUPLICATE
        if self.bound and len(self._rows) >= self.bound:
            return Offer.OVERFLOW
        self.received[choice] = have + len(tokens)
        self.finished[choice] = row.finish != 0
        if late:
            row = Row(choice, tokens, row.finish, row.error, row.logprobs[late * self.record_bytes :])
        if self._deliver is None or self._rows or row.finish or not self._deliver(row):
            self._rows.append(row)
            self._wake.set()
        return Offer.TAKEN

    def put_aside(self, row: Row, first: int) -> None:
        """Keep a row that came too early, until what is before it was offered."""
        self.ahead.append(Ahead(first, row))

    def take_ahead(self) -> list[Ahead]:
        """Return rows put aside, in order; they are to be offered again."""
        waiting, self.ahead = sorted(self.ahead, key=lambda item: item.first), []
        return waiting

    def end_choice(self, choice: int) -> None:
        """End a choice at a stop string: its later rows are dropped."""
        self.finished[choice] = True

    def wake(self) -> None:
        """Let `take` return, be it with nothing: what its caller waits for may have come another way."""
        self._wake.set()

    def fail(self, error: ApiError, cut: bool = False) -> None:
        """End the request for the client. With `cut` its writer is stopped even where it waits for the socket."""
        if self.failure is None:
            self.failure = error
            self._rows.clear()
            self._wake.set()
        if cut:
            self.cut.set()

    async def take(self, timeout_s: float | None = None, deliver: Callable[[Row], bool] | None = None) -> list[Row]:
        """Return rows since the last call; empty after `timeout_s` or `wake`. Raise ApiError once the request failed.

        deliver: called with rows that come meanwhile and are no ends; those that it takes (True) are not given here.
        """
        if not self._rows and self.failure is None:
            self._deliver = deliver
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return []
            finally:
                self._deliver = None
        self._wake.clear()
        if self.failure is not None:
            raise self.failure
        rows, self._rows = self._rows, []
        return rows
