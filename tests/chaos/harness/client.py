"""A client of a chaos run: sends one request, and gets the rest at any gateway when its connection breaks.

It writes down every event of every connection and judges nothing. A request with an Idempotency-Key is sent again; one
without is taken up by its id, and when it never got one, it was not taken up.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import orjson

from tests.chaos.harness.clock import Deadline, slowdown
from tests.chaos.harness.history import CUT, DONE, GAVE_UP, LATER, LEFT, REFUSED, SLOW, Connection, Event, History
from tests.support import sse

SILENCE_S = 15.0
"""A stream in which not even a keep-alive came for so long is broken; gateways send one each second here."""
PATIENCE_S = 120.0
RETRY_S = (0.1, 0.4)
ACCEPTED = 202
FAILED = "generation_failed"
FINAL = {"cancelled", FAILED, GAVE_UP, "record_lost", "request_not_found", "internal_error", SLOW}
"""Error codes behind which coming again is of no use."""
NOT_NOW = (429, 503)
"""With these a gateway does not take a request up. They have to say when to come again."""
SLOW_S, SLOW_PAUSE_S = 10.0, (0.05, 0.4)
"""So long a slow client takes one event and pauses, before it reads what is left as fast as it can."""
NARROW_BYTES = 2048
"""What a slow client's socket and its reader hold; the rest has to wait at the gateway."""
WIDE_BYTES = 1 << 20
SEGMENT_BYTES = 536
"""Of a slow client's connection: the kernel lets a sender fill buffers by the segment, which are large on loopback."""


@dataclass(frozen=True, slots=True)
class Order:
    """What one client is to do."""

    history: History
    body: dict[str, Any]
    path: str  # /v1/completions or /v1/chat/completions
    events: int  # after so many a client of the plans return, leave and cancel does so
    seed: int


def session(narrow: bool = False, key: str = "") -> aiohttp.ClientSession:
    """One connection a request, as gateways come and go. narrow: for slow clients; small buffers. key: of the API."""

    def narrow_socket(address: Any) -> socket.socket:
        made = socket.socket(*address[:3])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BYTES)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        return made

    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=3, sock_read=60),
        connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=narrow_socket if narrow else None),
        read_bufsize=NARROW_BYTES if narrow else 1 << 16,
        headers={"Authorization": f"Bearer {key}"} if key else None,
    )


class Sessions(NamedTuple):
    """Those of one tenant."""

    usual: aiohttp.ClientSession
    narrow: aiohttp.ClientSession


class Client:
    """One request from its sending to its end."""

    def __init__(self, session: aiohttp.ClientSession, urls: list[str], order: Order) -> None:
        self._session, self._urls, self._order = session, urls, order
        self._history = order.history
        self._rng = random.Random(order.seed)
        self._last = ""  # id of the last event
        self._read = 0  # events so far
        self._acted = False  # the plan was carried out
        self._cancelling: asyncio.Task[None] | None = None
        self._slow = order.history.plan == "slow"
        self._hurries_s = time.monotonic() + SLOW_S

    async def run(self) -> History:
        """Reads until an end that is final, or until patience is over."""
        patience = Deadline(PATIENCE_S)
        while True:
            connection = await self._connect()
            if self._over(connection):
                break
            if patience.passed():
                connection.end = GAVE_UP
                break
            await asyncio.sleep(self._rng.uniform(*RETRY_S))
        if self._cancelling is not None:
            await self._cancelling
        return self._history

    def _over(self, connection: Connection) -> bool:
        history = self._history
        if connection.end == DONE or connection.end in FINAL:
            return True
        if connection.end == LEFT:
            return history.plan == "leave"
        nameless = not history.request and not history.key
        if nameless and connection.end in (CUT, LATER):
            connection.end, connection.text = REFUSED, f"{connection.end}: {connection.text}"
        return nameless

    async def _connect(self) -> Connection:
        history = self._history
        number = self._rng.randrange(len(self._urls))
        connection = Connection(number, time.monotonic(), self._last)
        history.connections.append(connection)
        resuming = bool(history.request) and not history.key
        path = f"/v1/requests/{history.request}/stream" if resuming else self._order.path
        try:
            async with self._session.request(
                "GET" if resuming else "POST", self._urls[number] + path,
                data=None if resuming else orjson.dumps(self._order.body), headers=self._headers(),
            ) as answer:  # fmt: skip
                await self._take(answer, connection)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            connection.end, connection.text = CUT, type(error).__name__
        if connection.status == ACCEPTED:
            await self._ask(connection)
        return connection

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._history.key:
            headers["Idempotency-Key"] = self._history.key
        if self._last:
            headers["Last-Event-ID"] = self._last
        return headers

    async def _take(self, answer: aiohttp.ClientResponse, connection: Connection) -> None:
        connection.status = answer.status
        if answer.status not in (200, ACCEPTED):
            error = orjson.loads(await answer.read())["error"]
            connection.end, connection.text = str(error["code"]), str(error["message"])
            if answer.status in NOT_NOW and connection.end not in FINAL:
                connection.text = f"{connection.end}: {connection.text}"
                connection.end = LATER if "Retry-After" in answer.headers else "later, without Retry-After"
            return
        self._history.request = answer.headers["x-orcinus-request"]
        if self._history.stream:
            await self._take_events(answer, connection)
        elif answer.status != ACCEPTED:
            take_whole(orjson.loads(await answer.read()), connection)

    async def _ask(self, connection: Connection) -> None:
        """Whether what runs in the background has ended, at any gateway."""
        patience = Deadline(PATIENCE_S)
        while not patience.passed():
            await asyncio.sleep(self._rng.uniform(*RETRY_S))
            url = f"{self._rng.choice(self._urls)}/v1/requests/{self._history.request}"
            try:
                async with self._session.get(url) as answer:
                    status, told = answer.status, orjson.loads(await answer.read())
            except (aiohttp.ClientError, TimeoutError, OSError):
                continue
            if "result" in told:
                take_whole(told["result"], connection)
                return
            if status not in (200, *NOT_NOW) or told.get("status") == "finished":
                connection.end, connection.text = FAILED, str(told.get("error"))
                return
        connection.end = GAVE_UP

    async def _take_events(self, answer: aiohttp.ClientResponse, connection: Connection) -> None:
        async for found in _sse(answer.content):
            if found.data == sse.DONE:
                connection.end = DONE
                return
            event = found.json
            if "error" in event:
                connection.end, connection.text = str(event["error"]["code"]), str(event["error"]["message"])
                return
            self._last = found.id
            position = found.id.rpartition(":")[2]
            connection.events += [_event(choice, time.monotonic(), position) for choice in event["choices"]]
            take_usage(event.get("usage"), connection)
            self._read += 1
            if self._leaves():
                connection.end = LEFT
                return
            if self._slow:
                await self._dawdle(answer)
        connection.end, connection.text = CUT, "the stream ended without a word"

    async def _dawdle(self, answer: aiohttp.ClientResponse) -> None:
        """A pause, or, when it was slow for long enough, a wide socket."""
        if time.monotonic() < self._hurries_s:
            await asyncio.sleep(self._rng.uniform(*SLOW_PAUSE_S))
            return
        self._slow = False
        if answer.connection is not None and answer.connection.transport is not None:
            narrow = answer.connection.transport.get_extra_info("socket")
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WIDE_BYTES)

    def _leaves(self) -> bool:
        """Carries the plan out when it is time; is it to hang up?"""
        if self._acted or self._read < self._order.events or self._history.plan in ("stay", "slow"):
            return False
        self._acted = True
        if self._history.plan != "cancel":
            return True
        self._cancelling = asyncio.create_task(self._cancel())
        return False

    async def _cancel(self) -> None:
        """DELETE at any gateway until one says what became of it."""
        patience = Deadline(PATIENCE_S)
        while not patience.passed():
            url = f"{self._rng.choice(self._urls)}/v1/requests/{self._history.request}"
            try:
                async with self._session.delete(url) as answer:
                    if answer.status != 503:
                        return
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            await asyncio.sleep(self._rng.uniform(*RETRY_S))


def take_whole(whole: dict[str, Any], connection: Connection) -> None:
    """Write down an answer without streaming."""
    connection.events = [_event(choice, time.monotonic(), None) for choice in whole["choices"]]
    connection.end = DONE
    take_usage(whole["usage"], connection)


def _event(choice: dict[str, Any], at_s: float, position: str | None) -> Event:
    said = choice.get("delta", choice.get("message", choice))  # of a chat stream, of a whole chat, of a completion
    text = said.get("content", said.get("text"))
    ids = choice.get("token_ids") or []
    return Event(at_s, choice["index"], ids, text or "", choice["finish_reason"] or "", position)


async def _sse(content: aiohttp.StreamReader) -> AsyncIterator[sse.Event]:
    """Yield each event. Raises TimeoutError after SILENCE_S without a byte."""
    decoder = sse.Decoder()
    while True:
        async with asyncio.timeout(SILENCE_S * slowdown()):
            line = await content.readline()
        if not line:
            return
        if (event := decoder.feed(line.decode().rstrip())) is not None:
            yield event


def take_usage(usage: dict[str, Any] | None, connection: Connection) -> None:
    """Write down the tokens of an answer, and how many of them were drafts."""
    if usage:
        connection.usage = counts(usage)
        details = usage.get("completion_tokens_details") or {}
        connection.accepted_drafts = details.get("accepted_prediction_tokens", 0)


def counts(usage: dict[str, Any] | None) -> dict[str, int] | None:
    """The tokens of an answer; how many of them were guessed or cached depends on what else ran."""
    return usage and {name: count for name, count in usage.items() if not name.endswith("_details")}
