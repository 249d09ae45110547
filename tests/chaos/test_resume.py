"""Streams that go on at another gateway, and answers asked for twice: nothing twice, nothing missing."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.streams import load
from tests.support import sse
from tests.support.gateway_process import GatewayProcess
from tests.support.models import Reference
from tests.support.stack import Stack, running_stack
from tests.support.waiting import until

STREAMS = 6
LONG = 1500  # tokens; the reference says what the first 64 are
CONTEXT = 32768
SECRET, OTHER = "resume-secret-one", "resume-secret-two"
MODEL = {"requests": STREAMS, "output_tokens": 64, "max_position_embeddings": CONTEXT, "seed": 20261201}


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    keys = directory / "keys"
    keys.write_text(f"{SECRET}\n{OTHER}\n")
    with running_stack(
        directory, reference.path, key=SECRET, api_key_file=keys, dtype="float32", drain_s=0.5, max_seqs=16
    ) as running:
        yield running


@pytest.fixture
def other(stack: Stack, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A second gateway over the same Redis."""
    settings = {"api_key_file": stack.settings["api_key_file"], "drain_s": 0.5}
    process = GatewayProcess(tmp_path, stack.model, stack.redis.url, **settings).start()
    try:
        yield process.wait_ready()
    finally:
        process.stop()


def headers(key: str = SECRET, last: str = "") -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **({"Last-Event-ID": last} if last else {})}


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
        if event.get("usage"):
            self.usages.append(event["usage"])

    def go_on(self, url: str, **options: Any) -> None:
        address = f"{url}/v1/requests/{self.request}/stream"
        with httpx.stream("GET", address, headers=headers(last=self.last), timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            self.read(answer.iter_lines(), **options)


def body(stack: Stack, prompt: list[int], **fields: Any) -> dict[str, Any]:
    common = {"model": stack.name, "temperature": 0, "return_token_ids": True, "stream": True}
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
    with httpx.stream("POST", url, json=asked, headers=headers(), timeout=60) as answer:
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


def test_chat_goes_on_behind_its_role_and_its_stop_string(stack: Stack, other: GatewayProcess) -> None:
    asked = {
        "model": stack.name, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 40,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    plain = stack.post("/v1/chat/completions", asked)
    plain.raise_for_status()
    text = plain.json()["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:2]
    assert stop, "the model says too little"
    whole = Told()
    with httpx.stream(
        "POST", f"{stack.url}/v1/chat/completions", json={**asked, "stop": [stop], "stream": True}, headers=headers(),
        timeout=60,
    ) as answer:  # fmt: skip
        whole.read(answer.iter_lines())
    assert whole.reasons == {0: ["stop"]}
    assert whole.text[0] == text[: text.index(stop)]
    for events in (1, 2, 3):
        part = Told(request=whole.request)
        part.go_on(other.url, events=events)
        part.go_on(other.url)
        assert (part.text, part.reasons, part.done) == (whole.text, whole.reasons, 1)


def test_requests_of_a_dead_gateway_are_parked_until_adopted(
    stack: Stack, reference: Reference, other: GatewayProcess
) -> None:
    client = Told()
    url = f"{stack.url}/v1/completions"
    asked = body(stack, reference.prompts[0], max_tokens=CONTEXT - 100)  # so many that it is not over before
    with httpx.stream("POST", url, json=asked, headers=headers(), timeout=60) as answer:
        client.read(answer.iter_lines(), events=6)
        stack.kill("gateway")
    until("it is parked", lambda: stack.stats().get("parked") == "1")
    assert stack.stats()["running"] == "0"
    client.go_on(other.url, events=3)  # the record, and what came after it was adopted
    until("nothing is parked any more", lambda: stack.stats().get("parked") == "0")
    stack.start("gateway")
    until("the stack is ready", stack.ready, 60)
    assert client.ids[0][:64] == reference.outputs[0]
    assert 64 < len(client.ids[0]) < CONTEXT - 100


def test_only_its_tenant_may_go_on_with_a_request(stack: Stack, reference: Reference, other: GatewayProcess) -> None:
    client = Told()
    with httpx.stream(
        "POST", f"{other.url}/v1/completions", json=body(stack, reference.prompts[0], max_tokens=4),
        headers=headers(), timeout=60,
    ) as answer:  # fmt: skip
        client.read(answer.iter_lines())
    address = f"{other.url}/v1/requests/{client.request}/stream"
    assert httpx.get(address, headers=headers(OTHER), timeout=60).status_code == 404
    assert httpx.get(address, timeout=60).status_code == 401
    unknown = f"{other.url}/v1/requests/cmpl-unknown/stream"
    assert httpx.get(unknown, headers=headers(), timeout=60).status_code == 404
    for wrong in ("cmpl-unknown:1", f"{client.request}:1.1", f"{client.request}:x", "1"):
        answered = httpx.get(address, headers=headers(last=wrong), timeout=60)
        assert (answered.status_code, answered.json()["error"]["code"]) == (400, "invalid_event_id")
        assert wrong in answered.json()["error"]["message"]


def test_answer_is_made_once_under_its_idempotency_key(
    stack: Stack, reference: Reference, other: GatewayProcess
) -> None:
    asked = body(stack, reference.prompts[2], stream=False, speculate=False)  # so that it takes its time
    named = {**headers(), "Idempotency-Key": "order 66"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{stack.url}/v1/completions", json=asked, headers=named, timeout=httpx.Timeout(60, read=0.3))
    answers = [
        httpx.post(f"{url}/v1/completions", json=asked, headers=named, timeout=120)
        for url in (other.url, stack.url, other.url)
    ]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].json()["choices"][0]["token_ids"][:64] == reference.outputs[2]
    record: dict[bytes, bytes] = stack.redis.client.hgetall(stack.keys.req(answers[0].json()["id"]))  # type: ignore[assignment]
    assert (record[b"attempts"], record[b"output_tokens"]) == (b"1", str(LONG).encode())
    differs = httpx.post(f"{other.url}/v1/completions", json={**asked, "n": 2}, headers=named, timeout=60)
    assert (differs.status_code, differs.json()["error"]["code"]) == (409, "idempotency_key_reused")
    stranger = httpx.post(
        f"{other.url}/v1/completions", json={**asked, "max_tokens": 2}, timeout=60,
        headers={**headers(OTHER), "Idempotency-Key": "order 66"},
    )  # fmt: skip
    assert stranger.json()["id"] != answers[0].json()["id"]
