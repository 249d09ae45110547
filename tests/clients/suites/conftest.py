"""What the suites know of the server that they talk to. Runs inside a client's environment: nothing but the standard
library, pytest and the client is there."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

QUESTION = "Write a function that adds two numbers."
SERVER = ("url", "key", "model", "grpc", "limited")


def pytest_addoption(parser: pytest.Parser) -> None:
    for name in (*SERVER, "descriptor"):
        parser.addoption(f"--server-{name}", default="")


@dataclass(frozen=True)
class Server:
    """A running stack. limited: a key that may send 30 requests a minute."""

    url: str
    key: str
    model: str
    grpc: str
    limited: str

    @property
    def base(self) -> str:
        return f"{self.url}/v1"

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What a client-free HTTP call gets: the same request in the plainest form."""
        return self._ask(path, json.dumps({"model": self.model, **body}).encode())

    def ended(self, request_id: str) -> dict[str, Any]:
        """The record of a request once it has ended, however that came."""

        def look() -> dict[str, Any] | None:
            found = self._ask(f"/v1/requests/{request_id}")
            return found if found["status"] == "finished" else None

        return until(f"{request_id} has ended", look)

    def _ask(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers), timeout=120) as answer:
            return json.load(answer)


def until(what: str, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.02)
    return value


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Server:
    return Server(*(request.config.getoption(f"--server-{name}") for name in SERVER))


@pytest.fixture(scope="session")
def chat() -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="session")
def thinks(chat: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return a conversation in which the model is within its thinking; the demo model begins none by itself."""
    return [*chat, {"role": "assistant", "content": "<think>\nI"}]


@pytest.fixture(scope="session")
def said(server: Server, chat: list[dict[str, str]]) -> str:
    """What the model says, greedily and in 12 tokens, to `chat`."""
    answer = server.post("/v1/chat/completions", {"messages": chat, "max_tokens": 12, "temperature": 0})
    return answer["choices"][0]["message"]["content"]


@pytest.fixture(scope="session")
def continued(server: Server) -> str:
    """How the model goes on, greedily and in 12 tokens, behind `def add(`."""
    answer = server.post("/v1/completions", {"prompt": "def add(", "max_tokens": 12, "temperature": 0})
    return answer["choices"][0]["text"]


@pytest.fixture(scope="session")
def add_tool() -> dict[str, Any]:
    """A function as chat offers it. The demo model fills what a grammar leaves free with blanks, so calls get room."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    parameters = {
        "type": "object", "properties": {"a": digit, "b": digit}, "required": ["a", "b"],
        "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": "add", "description": "adds", "parameters": parameters}}


@pytest.fixture(scope="session")
def answer_schema() -> dict[str, Any]:
    """A schema with few instances."""
    properties = {"sure": {"type": "boolean"}, "size": {"enum": ["small", "big"]}}
    return {
        "type": "object", "title": "Answer", "properties": properties, "required": ["sure", "size"],
        "additionalProperties": False,
    }  # fmt: skip


def fits(value: dict[str, Any]) -> bool:
    """Whether a value is an instance of `answer_schema`."""
    return set(value) == {"sure", "size"} and isinstance(value["sure"], bool) and value["size"] in ("small", "big")


@pytest.fixture(scope="session")
def is_answer() -> Callable[[dict[str, Any]], bool]:
    return fits


@pytest.fixture(scope="session")
def is_sum() -> Callable[[dict[str, Any]], bool]:
    """Whether a value is what `add` takes."""
    return lambda value: set(value) == {"a", "b"} and all(value[name] in range(10) for name in "ab")
