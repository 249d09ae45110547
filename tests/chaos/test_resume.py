"""Streams that go on at another gateway: nothing twice, nothing missing."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.chaos.harness.client import counts
from tests.chaos.streams import load
from tests.support import sse
from tests.support.checkpoints.models import Reference
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import PLAIN, Stack, running_stack
from tests.support.waiting import until

STREAMS = 6
LONG = 600  # tokens; the reference says what the first 64 are
FLOWING = 4  # events
SECRET = "resume-secret-one"
MODEL = {"requests": STREAMS, "output_tokens": 64, "max_position_embeddings": 4096, "seed": 20261201}


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    # A gateway that is told to end hands its streams over at once: within half a second a fast machine would end them.
    with running_stack(directory, reference.path, key=SECRET, dtype="float32", drain_s=0, max_seqs=16) as running:
        yield running


@pytest.fixture(scope="module")
def other(stack: Stack) -> Iterator[GatewayProcess]:
    """A second gateway over the same Redis."""
    with running_gateway(stack.directory, stack.model, stack.redis, api_key=SECRET, drain_s=0.5) as process:
        yield process.wait_ready()


def headers(last: str = "") -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRET}", **({"Last-Event-ID": last} if last else {})}


@dataclass
class Told:
    """What one client has read, over all its connections."""

    request: str = ""
    last: str = ""
    ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    usages: list[dict[str, int]] = field(default_factory=list)
    error: str = ""
    done: int = 0

    def read(self, lines: Iterable[str], events: int = 1 << 30) -> None:
        """Takes in so many events."""
        for event in sse.events(lines):
            if event.data == sse.DONE:
                self.done += 1
                continue
            self._take(event.json, event.id)
            events -= 1
            if not events:
                return

    def _take(self, event: dict[str, Any], event_id: str) -> None:
        if "error" in event:
            self.error = event["error"]["code"]
            return
        self.last, self.request = event_id, event["id"]
        for choice in event["choices"]:
            index = choice["index"]
            self.ids.setdefault(index, []).extend(choice.get("token_ids") or [])
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            self.text[index] = self.text.get(index, "") + (text or "")
            if choice["finish_reason"]:
                self.reasons.setdefault(index, []).append(choice["finish_reason"])
        if usage := counts(event.get("usage")):
            self.usages.append(usage)

    def go_on(self, url: str, **options: Any) -> None:
        address = f"{url}/v1/requests/{self.request}/stream"
        with httpx.stream("GET", address, headers=headers(last=self.last), timeout=120, verify=PLAIN) as answer:
            assert answer.status_code == 200, answer.read()
            self.read(answer.iter_lines(), **options)


def body(stack: Stack, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """Return the body of a stream. It has no guesses: with them it could end before the fault."""
    common = {"model": stack.name, "temperature": 0, "return_token_ids": True, "stream": True, "speculate": False}
    return {**common, "prompt": prompt, "max_tokens": LONG, "ignore_eos": True, **fields}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_streams_of_a_gateway_that_ends_go_on_at_another(
    stack: Stack, reference: Reference, other: GatewayProcess, how: int
) -> None:
    with load(stack, reference, LONG, other.url) as under_way:
        stack.kill("gateway", how)
        under_way.check(LONG)
        assert all(stream.resumed for stream in under_way.streams)
    stack.start("gateway")
    until("the stack is ready", stack.ready, 60)
    stack.settled_empty()


def test_from_every_event_the_rest_is_told_once(stack: Stack, reference: Reference, other: GatewayProcess) -> None:
    prompts = reference.prompts[:2]
    choices = {"prompt": prompts, "n": 2, "max_tokens": 9, "echo": True, "temperature": 1, "seed": 7}
    asked = body(stack, prompts[0]) | choices | {"stream_options": {"include_usage": True}}
    ends: list[tuple[str, Told]] = []
    url = f"{stack.url}/v1/completions"
    with httpx.stream("POST", url, json=asked, headers=headers(), timeout=60, verify=PLAIN) as answer:
        whole = Told()
        whole.read(answer.iter_lines())
    assert whole.done == 1
    again = Told(request=whole.request)
    again.go_on(other.url)
    assert (again.text, again.ids, again.reasons, again.usages) == (whole.text, whole.ids, whole.reasons, whole.usages)
    event = 0
    while True:
        event += 1
        part = Told(request=whole.request)
        part.go_on(other.url, events=event)
        if part.done:
            break
        ends.append((part.last, part))
        part.go_on(stack.url)
        assert (part.text, part.ids, part.reasons) == (whole.text, whole.ids, whole.reasons), ends[-1][0]
        assert (part.usages, part.done) == (whole.usages, 1)
    assert len({last for last, _ in ends}) == len(ends) >= 4 * 3


def test_stream_of_messages_goes_on_whatever_dies(stack: Stack, other: GatewayProcess) -> None:
    messages = [{"role": "user", "content": "x"}]
    asked = {"model": stack.name, "messages": messages, "max_tokens": LONG, "temperature": 1, "seed": 7}
    asked |= {"ignore_eos": True}
    url = f"{stack.url}/v1/messages"
    whole = httpx.post(url, json=asked, headers=headers(), timeout=120, verify=PLAIN).json()
    events: list[sse.Event] = []
    flow = httpx.stream("POST", url, json=asked | {"stream": True}, headers=headers(), timeout=120, verify=PLAIN)
    with contextlib.suppress(httpx.TransportError), flow as answer:
        for event in sse.events(answer.iter_lines()):
            events.append(event)
            if len(events) == FLOWING:
                stack.signal("worker", signal.SIGSTOP)  # so that the request runs on while the gateway is away
                stack.kill("gateway")
    while events[-1].id == events[-2].id:  # it belongs to an event that did not come
        events.pop()
    address = f"{other.url}/v1/requests/{events[0].json['message']['id']}"
    assert httpx.get(address, headers=headers(), timeout=60, verify=PLAIN).json()["status"] != "finished"
    stack.signal("worker", signal.SIGCONT)
    with httpx.stream("GET", f"{address}/stream", headers=headers(events[-1].id), timeout=120, verify=PLAIN) as answer:
        for count, event in enumerate(sse.events(answer.iter_lines())):
            events.append(event)
            if count == FLOWING:
                for service in ("worker", "scheduler"):
                    stack.kill(service)
                    stack.start(service)
    assert sse.message_blocks(events) == whole["content"]
    kinds = [event.kind for event in events if event.kind not in ("content_block_delta", "ping")]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert events[-2].json["delta"]["stop_reason"] == whole["stop_reason"] == "max_tokens"
    assert events[-2].json["usage"]["output_tokens"] == LONG
    stack.start("gateway")
    until("the stack is ready", stack.ready, 60)
    stack.settled_empty()
