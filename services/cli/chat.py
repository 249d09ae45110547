"""`orcinus chat [MODEL]`: talk to a server with OpenAI's API in the terminal.

Answers are printed as they come, with control characters made visible, so that no model drives the terminal. The key is
never printed.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import orjson

from services.launcher.rundir import RunDir
from shared.errors import ConfigurationError, OrcinusError
from shared.messages import quantity
from shared.security import api_keys
from shared.settings import BatchSettings, ChatSettings

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = '''/help          this list
/system TEXT   set the system prompt; without TEXT remove it
/clear         forget the conversation
/save FILE     write the conversation: as JSON if FILE ends with .json, else as text
/quit          leave, as Ctrl-D

A line that ends with \\ goes on in the next one; """ begins and ends a message of several lines.
Ctrl-C stops an answer; at the prompt it leaves.'''
_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "\u2421"} | {
    code: "\ufffd" for code in range(128, 160)
}  # fmt: skip


_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class ChatError(OrcinusError):
    """A refusal in the server's words, or the reason why there is no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Terminal(Protocol):
    """The side of the user."""

    is_interactive: bool

    def read(self, prompt: str) -> str:
        """Return the next line. Raise EOFError at the end, KeyboardInterrupt for Ctrl-C."""

    def write(self, text: str) -> None:
        """Print text without a line end."""

    def think(self, text: str) -> None:
        """Print a part of the model's thinking, where a person reads it."""

    def note(self, text: str) -> None:
        """Print a line that is no answer."""

    def ask_key(self, why: str) -> str:
        """Say why, and return a key that was typed; empty without a terminal."""


class Console:
    """Standard input and output. Line editing is that of readline, where there is a terminal."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()
        if self.is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - its import is what input() uses

    def read(self, prompt: str) -> str:
        if self.is_interactive:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def think(self, text: str) -> None:
        if sys.stdout.isatty():
            self.write(f"{_DIM}{text}{_PLAIN}")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def ask_key(self, why: str) -> str:
        if not self.is_interactive:
            return ""
        self.note(why)
        return getpass.getpass("API key: ").strip()


@dataclass
class Conversation:
    """The messages of a chat, as OpenAI's API takes them. A question without an answer is dropped."""

    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str = "") -> list[dict[str, str]]:
        """Return all messages, and the question as the last one."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for query, answered in self.turns:
            messages += [{"role": "user", "content": query}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": question}] if question else messages

    def save(self, path: Path, model: str) -> None:
        """Write the conversation to a new file. Raise ChatError."""
        messages = self.messages()
        if path.suffix == ".json":
            text = json.dumps({"model": model, "messages": messages}, indent=1, ensure_ascii=False) + "\n"
        else:
            text = "".join(f"## {message['role']}\n\n{message['content']}\n\n" for message in messages)
        try:
            with path.expanduser().open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ChatError(f"{path}: cannot be written: {error.strerror}; name another file") from error


class Server:
    """A server with OpenAI's API."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._client = httpx.Client(base_url=self._base, timeout=httpx.Timeout(timeout_s, connect=10.0))

    @property
    def has_key(self) -> bool:
        return bool(self._key)

    def use_key(self, key: str) -> None:
        self._key = key

    def models(self) -> list[str]:
        """Return the ids of the models. Raise ChatError."""
        return [str(card["id"]) for card in self.cards()]

    def cards(self) -> list[dict[str, Any]]:
        """Return what the server says of each model and adapter. Raise ChatError."""
        with self._reaching(), self._client.stream("GET", "/v1/models", headers=self._headers()) as answer:
            self._check(answer)
            try:
                cards = orjson.loads(answer.read())["data"]
                if all("id" in card for card in cards):
                    return list(cards)
            except (orjson.JSONDecodeError, KeyError, TypeError):
                pass
            raise ChatError(f"{self._base}: no list of models; give the model's name: orcinus chat MODEL")

    def post(self, path: str, body: dict[str, Any]) -> str:
        """Return the text that the server answers. Raise ChatError."""
        with self._reaching(), self._client.stream("POST", path, json=body, headers=self._headers()) as answer:
            self._check(answer)
            return answer.read().decode("utf-8", "replace")

    def chat(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the events of one answer. Raise ChatError."""
        with (
            self._reaching(),
            self._client.stream("POST", "/v1/chat/completions", json=body, headers=self._headers()) as answer,
        ):
            self._check(answer)
            is_done = False
            for data in events(answer.iter_bytes()):
                if data == b"[DONE]":
                    is_done = True
                    break
                try:
                    event = orjson.loads(data)
                except orjson.JSONDecodeError:
                    raise ChatError(
                        f"{self._base} sent an event that is not JSON; name an OpenAI-compatible server with --url"
                    ) from None
                if event.get("error"):
                    raise ChatError(self._without_key(_message(event)))
                yield event
            if not is_done:
                raise ChatError("the connection ended before the answer did; send the message again")

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        try:
            body = orjson.loads(answer.read())
            text = _message(body)
        except orjson.JSONDecodeError:
            text = f"{self._base} answers {answer.status_code}: no OpenAI-compatible server; name one with --url"
        else:
            if answer.status_code == 401:
                text = text.partition("; send ")[0]  # a header is of no use here
            elif isinstance(error := body.get("error"), dict) and error.get("code") == "context_length_exceeded":
                text += "; /clear forgets the conversation"
        raise ChatError(self._without_key(text), answer.status_code)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise ChatError(f"no server at {self._base}; start one with `make run`, or name it with --url") from None
        except httpx.TimeoutException:
            raise ChatError(f"{self._base} did not answer in time; try again, or name another with --url") from None
        except httpx.HTTPError as error:
            raise ChatError(self._without_key(f"the connection broke off: {error}; send the message again")) from None


def events(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of each server-sent event (WHATWG, 9.2.6); comments and other fields are skipped."""
    held, data = b"", []
    for piece in pieces:
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []


def visible(text: str) -> str:
    """Return text with its control characters replaced by their pictures."""
    return text.translate(_VISIBLE)


@dataclass
class Chat:
    """One session. sampling: parameters of the API that are sent with each question."""

    server: Server
    terminal: Terminal
    model: str
    sampling: dict[str, Any]
    conversation: Conversation
    has_failed: bool = False

    def run(self) -> None:
        """Talk until the user leaves."""
        while True:
            try:
                text = self._message()
            except (EOFError, KeyboardInterrupt):
                if self.terminal.is_interactive:
                    self.terminal.write("\n")
                return
            if text in ("/quit", "/exit"):
                return
            try:
                if text.startswith("/"):
                    self._command(*text.split(None, 1))
                elif text:
                    self._answer(text)
            except ChatError as error:
                self.has_failed = True
                self.terminal.note(f"error: {_reason(error, self.server)}")

    def _message(self) -> str:
        """Return the next message, which may have several lines."""
        line = self.terminal.read("> ")
        if line.strip().startswith('"""'):
            return self._block(line.strip()[3:])
        lines = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = self.terminal.read(". ")
        return "\n".join([*lines, line]).strip()

    def _block(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith('"""'):
            lines.append(line)
            line = self.terminal.read(". ")
        return "\n".join([*lines, line.rstrip()[:-3]]).strip("\n")

    def _command(self, name: str, text: str = "") -> None:
        """Run a line that begins with a slash. Raise ChatError."""
        if name == "/help":
            self.terminal.note(HELP)
        elif name == "/system":
            self.conversation.system = text
            self.terminal.note("system prompt set" if text else "no system prompt")
        elif name == "/clear":
            self.conversation.turns.clear()
            self.terminal.note("conversation forgotten")
        elif name == "/save" and text:
            self.conversation.save(Path(text.strip()), self.model)
            self.terminal.note(f"saved to {text.strip()}")
        else:
            problem = "needs a FILE" if name == "/save" else "unknown command"
            raise ChatError(f"{name}: {problem}; /help lists the commands")

    def _answer(self, question: str) -> None:
        """Ask, and print the answer while it comes. Raise ChatError."""
        started = time.monotonic()
        began, tokens, parts, reason, is_thinking = 0.0, 0, [], "", False
        body = {
            "model": self.model, "messages": self.conversation.messages(question), **self.sampling, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        try:
            with contextlib.closing(self.server.chat(body)) as answer:
                for event in answer:
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    for choice in event.get("choices") or []:
                        reason = choice.get("finish_reason") or reason
                        delta = choice.get("delta") or {}
                        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                            began = began or time.monotonic()
                            is_thinking = True
                            self.terminal.think(visible(thought))
                        text = delta.get("content") or ""
                        if is_thinking and (text := text.lstrip("\n")):
                            is_thinking = False
                            self.terminal.think("\n\n")
                        if text:
                            began = began or time.monotonic()
                            parts.append(text)
                            self.terminal.write(visible(text))
        except KeyboardInterrupt:
            reason = "stopped"
        finally:
            if is_thinking:
                self.terminal.think("\n")
            if parts:
                self.terminal.write("\n")
                self.conversation.turns.append((question, "".join(parts)))
        if self.terminal.is_interactive:
            self.terminal.note(_measured(tokens, started, began, reason))
        elif reason == "stopped":
            raise KeyboardInterrupt


def _measured(tokens: int, started: float, began: float, reason: str) -> str:
    now = time.monotonic()
    parts = [quantity(tokens, "token")] if tokens else []
    if began:
        parts.append(f"first token {1000 * (began - started):.0f} ms")
        if tokens > 1 and now - began > 0.05:
            parts.append(f"{(tokens - 1) / (now - began):.0f} tokens/s")
    else:
        parts.append("no answer")
    if reason == "stopped":
        parts.append("stopped")
    elif reason == "length":
        parts.append("cut at the limit of tokens")
    return f"({', '.join(parts)})"


def _message(body: Any) -> str:
    """Return the sentence of an error in OpenAI's shape, or what there is."""
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:1000]


def find_server(settings: ChatSettings | BatchSettings) -> str:
    """Return the address that was given, else that of the stack that runs on this machine, else the default one."""
    running = RunDir(settings.run_dir).running()
    return settings.url or (running.url if running else DEFAULT_URL)


def run(settings: ChatSettings, model: str, system: str, sampling: dict[str, Any], terminal: Terminal) -> int:
    """Talk until the user leaves, and return the exit code. Raise ConfigurationError without a server or a model."""
    key = settings.api_key.get_secret_value() if settings.api_key else ""
    server = Server(find_server(settings), key, settings.timeout_s)
    model = model or _first_model(server, terminal)
    if terminal.is_interactive:
        terminal.note(f"{visible(model)}: /help lists the commands, Ctrl-D leaves")
    chat = Chat(server, terminal, model, sampling, Conversation(system))
    chat.run()
    return 1 if chat.has_failed and not terminal.is_interactive else 0


def _reason(error: ChatError, server: Server) -> str:
    """Return the text of an error for the terminal, with the options that give a key where the server wants one."""
    return api_keys.describe_refusal(str(error), server.has_key) if error.status == 401 else visible(str(error))


def _first_model(server: Server, terminal: Terminal) -> str:
    """Return the first model of the server; ask for a key where one is needed. Raise ConfigurationError."""
    while True:
        try:
            models = server.models()
        except ChatError as error:
            if error.status == 401 and (key := terminal.ask_key(visible(str(error)))):
                server.use_key(key)
                continue
            raise ConfigurationError(_reason(error, server)) from None
        if not models:
            raise ConfigurationError("the server lists no model; give its name: orcinus chat MODEL")
        return models[0]
