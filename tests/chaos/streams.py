"""Streams that a fault shall hit: one a prompt, long, and resumed at another gateway where one hands them over."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support import sse
from tests.support.checkpoints.models import Reference
from tests.support.stack import PLAIN, Stack
from tests.support.waiting import until

READ_S = 120.0
FLOWING = 4  # tokens


@dataclass
class Stream:
    """One client. It goes to the next of `urls` where a gateway hands its stream over, refuses it or is gone."""

    urls: Sequence[str]
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    flowing: threading.Event = field(default_factory=threading.Event)
    leave: threading.Event = field(default_factory=threading.Event)
    """Set: the client closes its connection."""
    request: str = ""
    reason: str = ""
    resumed: int = 0
    read_s: float = READ_S
    _last: str = ""

    def read(self) -> list[int]:
        """All token ids. Raises RuntimeError for an answer that is neither a stream nor a gateway's leaving."""
        turn = 0
        by = time.monotonic() + self.read_s
        while not self.reason and not self.leave.is_set() and time.monotonic() < by:
            url = self.urls[turn % len(self.urls)]
            with contextlib.suppress(httpx.TransportError), self._asked(url) as answer:
                self._take(answer)
            turn += 1
        return self.ids

    def _asked(self, url: str) -> contextlib.AbstractContextManager[httpx.Response]:
        """The stream, or the rest of it once its request is known."""
        options: dict[str, Any] = {"headers": self.headers, "timeout": READ_S, "verify": PLAIN}
        if not self.request:
            return httpx.stream("POST", f"{url}/v1/completions", json=self.body, **options)
        self.resumed += 1
        options["headers"] = {**self.headers, "Last-Event-ID": self._last}
        return httpx.stream("GET", f"{url}/v1/requests/{self.request}/stream", **options)

    def _take(self, answer: httpx.Response) -> None:
        if answer.status_code == 503:
            return  # the gateway leaves, or has just come
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.read()[:300]!r}")
        # Comments show as well that it is time to leave: a stream that stands still has no events.
        lines = itertools.takewhile(lambda _: not self.leave.is_set(), answer.iter_lines())
        for event in sse.events(lines):
            if event.data != sse.DONE:
                self._event(event.json, event.id)

    def _event(self, event: dict[str, Any], event_id: str) -> None:
        if "error" in event:
            if event["error"]["code"] != "handed_over":
                raise RuntimeError(f"{self.request}: {event['error']}")
            return
        self._last, self.request = event_id, event["id"]
        for choice in event["choices"]:
            self.ids += choice.get("token_ids") or []
            self.reason = choice["finish_reason"] or self.reason
        if len(self.ids) > FLOWING:
            self.flowing.set()


@dataclass
class Load:
    """Streams under way, one for each prompt of the reference."""

    reference: Reference
    streams: list[Stream]
    answers: list[Future[list[int]]]

    def check(self, tokens: int, but: Sequence[int] = ()) -> None:
        """Every stream, but those numbers, got the reference's tokens and as many as it asked for."""
        for number, (answer, known) in enumerate(zip(self.answers, self.reference.outputs, strict=True)):
            got = answer.result(READ_S)
            if number not in but:
                assert got[: len(known)] == known
                assert (len(got), self.streams[number].reason) == (tokens, "length")


def common(stack: Stack, tokens: int) -> dict[str, Any]:
    """Return the body of a greedy stream. It has no guesses: with them it could end before the fault.

    It may wait as long as its reader: while a worker is gone a slow machine is slower than its class allows.
    """
    return {
        "model": stack.name, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "speculate": False, "ttft_slo_ms": int(READ_S * 1000),
    }  # fmt: skip


@contextlib.contextmanager
def load(stack: Stack, reference: Reference, tokens: int, *others: str) -> Iterator[Load]:
    """The load, once every stream flows. `others`: the addresses of further gateways."""
    streams = [
        Stream([stack.url, *others], {**common(stack, tokens), "prompt": prompt}, stack.headers)
        for prompt in reference.prompts
    ]
    with ThreadPoolExecutor(len(streams)) as pool:
        answers = [pool.submit(stream.read) for stream in streams]
        try:
            until("all streams flow", lambda: all(s.flowing.is_set() for s in streams) or failed(answers), 60)
            assert not failed(answers)
            yield Load(reference, streams, answers)
        except BaseException:
            for stream in streams:
                stream.leave.set()
            raise


def failed(answers: Sequence[Future[Any]]) -> bool:
    return any(answer.done() and answer.exception() for answer in answers)


@contextlib.contextmanager
def clients(stack: Stack, reference: Reference, tokens: int) -> Iterator[tuple[list[Stream], threading.Event]]:
    """One client a prompt, which asks again and again, with drafts, until the block ends, from when every one has been
    answered once. Yield their streams, the last ones last, and an event: while it is cleared they ask nothing new.
    Raise for an answer that is not the reference's."""
    made: list[Stream] = []
    stop, may_ask = threading.Event(), threading.Event()
    may_ask.set()

    def ask(number: int) -> None:
        prompt, known = reference.prompts[number], reference.outputs[number]
        while may_ask.wait(READ_S) and not stop.is_set():
            body = {**common(stack, tokens), "prompt": prompt, "speculate": True}
            made.append(stream := Stream([stack.url], body, stack.headers))
            ids = stream.read()
            if ids[: len(known)] != known[:tokens] or len(ids) != tokens or stream.reason != "length":
                raise RuntimeError(f"prompt {number}: {len(ids)} tokens, {stream.reason}: {ids[:8]}, not {known[:8]}")

    with ThreadPoolExecutor(len(reference.prompts)) as pool:
        working = [pool.submit(ask, number) for number in range(len(reference.prompts))]
        try:
            until("all were answered", lambda: len(made) > 2 * len(working) or failed(working), 120)
            yield made, may_ask
        finally:
            stop.set()
            may_ask.set()
        for work in working:
            work.result(READ_S)
