"""Clients of a gateway under test: they wait in threads, read nothing, or leave."""

from __future__ import annotations

import socket
import threading
from typing import Any

import httpx
import openai

from tests.support import sse
from tests.support.gateway.process import GatewayProcess
from tests.support.stack import PLAIN
from tests.support.stand_ins.scripted_scheduler import Claimed, ScriptedScheduler


def openai_client(gateway: GatewayProcess, key: str) -> openai.OpenAI:
    """Return OpenAI's own client, without the certificate authorities that it reads for each instance (25 ms)."""
    http_client = openai.DefaultHttpxClient(verify=PLAIN)
    return openai.OpenAI(base_url=gateway.url + "/v1", api_key=key, max_retries=0, http_client=http_client)


class Stream:
    """One streaming request, read by a thread of its own."""

    def __init__(self, gateway: GatewayProcess, **body: Any) -> None:
        fields = {"model": gateway.name, "prompt": "The", "stream": True, "return_token_ids": True, "max_tokens": 400}
        self.events: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.comments = 0
        self.done = False
        self._thread = threading.Thread(
            target=self._read, args=(gateway.url + "/v1/completions", {**fields, **body}), daemon=True
        )
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        with httpx.stream("POST", url, json=body, timeout=60, verify=PLAIN) as answer:
            decoder = sse.Decoder()
            for line in answer.iter_lines():
                event = decoder.feed(line)
                self.comments = decoder.comments
                if event is not None and event.data == sse.DONE:
                    self.done = True
                elif event is not None:
                    self.ids.append(event.id)
                    self.events.append(event.json)

    def join(self) -> Stream:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the stream did not end"
        return self

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", []) if choice["index"] == index]

    def tokens(self, index: int = 0) -> list[int]:
        return [token for choice in self.choices(index) for token in choice["token_ids"]]

    def text(self, index: int = 0) -> str:
        return "".join(choice["text"] for choice in self.choices(index))

    @property
    def reason(self) -> str | None:
        return self.choices()[-1]["finish_reason"] if self.choices() else None

    @property
    def error(self) -> dict[str, Any] | None:
        return self.events[-1].get("error") if self.events else None


def streamed(gateway: GatewayProcess, scheduler: ScriptedScheduler, **body: Any) -> tuple[Stream, Claimed]:
    """Return a stream and its request, which the scheduler has claimed."""
    return Stream(gateway, **body), scheduler.claim()


class posted:  # noqa: N801 - reads as a verb where it is used
    """A whole-answer request in a thread; its answer is in the list after the block."""

    def __init__(self, gateway: GatewayProcess, body: dict[str, Any]) -> None:
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(gateway.post("/v1/completions", body)), daemon=True
        )

    def __enter__(self) -> list[httpx.Response]:
        self._thread.start()
        return self._answers

    def __exit__(self, *_: object) -> None:
        self._thread.join(60)


def raw_post(
    gateway: GatewayProcess, body: bytes, receive_buffer: int = 0, behind: bytes = b"", key: str = ""
) -> socket.socket:
    """Return a connection that sent a request, with what is `behind` it, and reads nothing. key: its name, if any."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", gateway.port))
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    named = f"Idempotency-Key: {key}\r\n" if key else ""
    connection.sendall(f"{head}{named}\r\n".encode() + body + behind)
    return connection
