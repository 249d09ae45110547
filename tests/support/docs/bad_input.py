"""docs/bad-input.md: what was sent, what came back. `python -m tests.support.docs.bad_input` rewrites the page.

The answers are those of a real gateway over a real Redis; tests/integration/gateway/openai/test_bad_input.py asks it
again and fails when the page says anything else.
"""

from __future__ import annotations

import json
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from protos import kserve_pb2 as kserve
from protos.kserve_pb2_grpc import GRPCInferenceServiceStub
from shared.security import api_keys
from shared.security.api_keys import KeyRecord
from shared.settings import ROOT
from tests.support.checkpoints.tokenizers import write_model
from tests.support.docs.bad_calls import CALLS, USER, Called
from tests.support.docs.bad_requests import CROWDED, MAX_BODY, SECTIONS, WITHOUT_SCHEDULER, Sent
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import PLAIN, RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler, answering
from tests.support.waiting import free_port, until

PAGE = ROOT / "docs" / "bad-input.md"
HEAD = """# Bad input

What was sent to a gateway and what came back: {rows} rows. The model of the test is `tiny`, with 512 tokens of context
and a vocabulary of 362; `model` is not shown in the bodies. Bodies are at most 200,000 bytes there; the other limits
are those of the [API](api.md#limits). Errors of Messages have a type in place of the code. The page is written by the
test that checks it, `python -m tests.support.docs.bad_input`.
"""
MAX_SHOWN = 36


@dataclass(frozen=True, slots=True)
class Answer:
    """status: HTTP's number or gRPC's name."""

    status: str
    code: str
    param: str
    message: str


class Asked:
    """A gateway that can be asked everything that SECTIONS and CALLS have."""

    def __init__(self, gateway: GatewayProcess, redis: RedisServer, grpc_port: int) -> None:
        self.gateway = gateway
        self.redis = redis
        self.grpc_port = grpc_port
        self.keys = {"user": USER, "low": self._new_key("low"), "slow": self._new_key("realtime", 1)}
        until("the gateway knows its keys", lambda: all(map(self._opens, self.keys.values())))

    def _new_key(self, max_priority: str, requests_per_minute: int = 0) -> str:
        key_id, text = api_keys.new_key()
        digest = api_keys.digest(text).hex()
        record = KeyRecord(key_id, digest, key_id, key_id, max_priority, requests_per_minute, 0, 0, 0, 0)
        self.redis.client.hset(self.gateway.keys.api_keys, key_id, record.encode())
        self.redis.client.incr(self.gateway.keys.keys_version)
        return text

    def _opens(self, key: str) -> bool:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(self.gateway.url + "/v1/models", headers=headers, timeout=60, verify=PLAIN).status_code == 200

    def ask(self, sent: Sent) -> Answer:
        """The answer to one request."""
        for each in sent.before:
            self._send(each).raise_for_status()
        got = self._say(sent.raw) if sent.raw else self._send(sent)
        if got.is_success:
            raise AssertionError(f"it was served: {text_of(sent)}")
        found = got.json()
        error = found.get("error") or {"message": found.get("reason", got.text)}
        if got.status_code == 400 and error.get("type", "invalid_request_error") != "invalid_request_error":
            raise AssertionError(f"{text_of(sent)}: the error has the type {error['type']}")
        message = re.sub(r"\b(cmpl|chatcmpl)-[0-9a-f]{30}\b", r"\1-...", error["message"])  # drawn anew each time
        code = error.get("code", error.get("type"))  # Anthropic's API has no codes
        return Answer(str(got.status_code), code or "", error.get("param") or "", message)

    def _say(self, raw: bytes) -> httpx.Response:
        """What comes back to a client that says so much and then waits."""
        with socket.create_connection(("127.0.0.1", self.gateway.port), timeout=60) as connection:
            connection.sendall(raw)
            told = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, body = told.partition(b"\r\n\r\n")
        return httpx.Response(int(head.split()[1]), content=body)

    def _send(self, sent: Sent) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        if sent.key:
            headers["Authorization"] = f"Bearer {self.keys[sent.key]}"
        content = sent.body
        if isinstance(content, Mapping):
            content = json.dumps({"model": self.gateway.name, **content}).encode()
        url = self.gateway.ops_url if sent.ops else self.gateway.url
        return httpx.request(
            sent.method, url + sent.path, content=content, headers={**headers, **sent.headers}, timeout=60, verify=PLAIN
        )

    def call(self, called: Called) -> Answer:
        """The status of one gRPC call."""
        request = kserve.ModelInferRequest(model_name=called.model or self.gateway.name)
        called.fill(request)
        metadata = (("authorization", f"Bearer {called.key}"),) if called.key else ()
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            stub = GRPCInferenceServiceStub(channel)
            try:
                if called.streams:
                    return _refused(list(stub.ModelStreamInfer(iter([request]), metadata=metadata, timeout=60)))
                stub.ModelInfer(request, metadata=metadata, timeout=60)
            except grpc.RpcError as error:
                trailing: dict[str, Any] = dict(error.trailing_metadata() or ())
                name = error.code().name.lower().replace("_", " ")
                return Answer(name, trailing.get("code", ""), trailing.get("param", ""), error.details() or "")
        raise AssertionError(f"the call was served: {called.note}")


def _refused(answers: list[kserve.ModelStreamInferResponse]) -> Answer:
    """The one answer of a stream, in which a request failed alone."""
    (answer,) = answers
    parameters = answer.infer_response.parameters
    return Answer("ok", parameters["code"].string_param, parameters["param"].string_param, answer.error_message)


def brief(value: Any) -> Any:
    """A JSON value as it fits into a cell: long texts, lists and objects by their beginning and their size."""
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        return f"{value[:8]}... ({len(value)} characters)"
    if isinstance(value, list):
        shown = [brief(item) for item in value[:4]]
        return shown if len(value) <= 8 else [*shown[:2], f"... ({len(value)} items)"]
    if isinstance(value, dict):
        if len(value) > 8:
            return {**dict(list(value.items())[:2]), "...": f"{len(value)} fields"}
        return {name: brief(item) for name, item in value.items()}
    return value


def text_of(sent: Sent) -> str:
    """The cell that says what was sent."""
    if sent.raw:
        return sent.note
    cell = f"`{sent.method} {sent.path}`"
    if isinstance(sent.body, dict) and sent.body:
        cell += f" `{json.dumps(brief(sent.body))}`"
    return f"{cell}, {sent.note}" if sent.note else cell


def row(sent: str, answer: Answer) -> str:
    """One line of a table."""
    plain = answer.message.replace("\\", "\\\\").replace("<", "&lt;").replace("*", "\\*").replace("`", "\\`")
    cells = [sent, answer.status, *(f"`{name}`" if name else "" for name in (answer.code, answer.param))]
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in [*cells, plain]) + " |"


def sections(asked: Asked, crowded: list[Answer], alone: list[Answer]) -> Iterator[tuple[str, list[str]]]:
    """Title and rows of each. crowded: what CROWDED got while much waited; alone: WITHOUT_SCHEDULER got."""
    for title, requests in SECTIONS.items():
        yield title, [row(text_of(sent), asked.ask(sent)) for sent in requests]
    yield "gRPC", [row(f"`{called.method}`, {called.note}", asked.call(called)) for called in CALLS]
    yield "Too much is asked", [row(text_of(sent), got) for sent, got in zip(CROWDED, crowded, strict=True)]
    yield "No scheduler", [row(text_of(sent), got) for sent, got in zip(WITHOUT_SCHEDULER, alone, strict=True)]


def page(asked: Asked, crowded: list[Answer], alone: list[Answer]) -> str:
    """The whole page."""
    tables = dict(sections(asked, crowded, alone))
    text = HEAD.format(rows=sum(map(len, tables.values())))
    for title, rows in tables.items():
        lines = ["| sent | status | code | param | message |", "|---|---|---|---|---|", *rows]
        text += f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    return text


@contextmanager
def answers(directory: Path) -> Iterator[tuple[Asked, list[Answer], list[Answer]]]:
    """A gateway and a scheduler that serves what is no bad input; what CROWDED and WITHOUT_SCHEDULER got before."""
    grpc_port = free_port()
    model = write_model(directory / "tiny")
    settings = {
        "api_key": USER, "max_body_bytes": MAX_BODY, "grpc_port": grpc_port,
        "tool_parser": "hermes", "read_timeout_s": 3, "max_queued_tokens": 1_000_000,
        "max_queued_bytes": 10_000_000, "files_dir": directory / "files",
    }  # fmt: skip
    with RedisServer(directory / "redis") as redis, running_gateway(directory, model, redis, **settings) as gateway:
        asked = Asked(gateway, redis, grpc_port)
        alone = [asked.ask(sent) for sent in WITHOUT_SCHEDULER]
        scheduler = ScriptedScheduler(redis.client, gateway.keys).lead()
        gateway.wait_ready()
        crowded = [ask_crowded(asked, scheduler, sent) for sent in CROWDED]
        scheduler.client.delete(gateway.keys.queue)
        scheduler.stats()
        with answering(scheduler, lambda _: [50]):
            yield asked, crowded, alone


def ask_crowded(asked: Asked, scheduler: ScriptedScheduler, sent: Sent) -> Answer:
    """The answer of a gateway to which Redis says that a million tokens wait or that requests hold ten million bytes,
    or the scheduler that they take 5 s."""
    queue, stream = asked.gateway.keys.queue, asked.gateway.keys.requests("low")
    entry = scheduler.client.xadd(stream, {"r": b""})  # without an entry nothing waits, and nothing is held
    try:
        return _ask_crowded(asked, scheduler, sent, queue)
    finally:
        scheduler.client.xdel(stream, entry)


def _ask_crowded(asked: Asked, scheduler: ScriptedScheduler, sent: Sent, queue: str) -> Answer:
    if "bytes" in sent.note:
        scheduler.client.hset(queue, mapping={"tokens": 0, "bytes": 10_000_000})
        return asked.ask(sent)
    late = isinstance(sent.body, dict) and not sent.body.keys().isdisjoint({"ttft_slo_ms", "deadline_ms"})
    if late:
        scheduler.stats(queued_tokens_normal=480, predicted_ttft_ms_normal=5000, prefill_tok_s=100)
    else:
        scheduler.stats(prefill_tok_s=50_000)
        scheduler.client.hset(queue, "tokens", 1_000_000)
    known = "100" if late else "50000"
    url = asked.gateway.ops_url + "/stats"
    until(
        "the figures are known",
        lambda: httpx.get(url, timeout=60, verify=PLAIN).json()["shards"]["shard-0"].get("prefill_tok_s") == known,
    )
    return asked.ask(sent)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, answers(Path(place)) as found:
        PAGE.write_text(page(*found))
