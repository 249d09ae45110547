"""`orcinus chat` against a scripted server with OpenAI's API, and through a pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.cli import chat
from services.launcher.rundir import RunDir, StackFacts
from shared.errors import ConfigurationError
from shared.settings import ChatSettings
from tests.integration.conftest import KEY, TEXT
from tests.support import http_server
from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway.process import GatewayProcess
from tests.support.launcher import ROOT, clean_env
from tests.support.waiting import free_port, until

SECRET = "sk-never-shown"


class Handler(http_server.Handler):
    server: OpenAI

    def answer(self) -> None:
        key = self.headers["Authorization"]
        if self.command == "POST":
            self.complete()
        elif self.server.key and key != f"Bearer {self.server.key}":
            self.refuse(401, f"the key {key} is not valid; send it as Authorization: Bearer KEY or as X-Api-Key: KEY")
        else:
            self.reply(200, {"data": [{"id": "first"}, {"id": "second"}]})

    def complete(self) -> None:
        self.server.bodies.append(self.json())
        refusal = self.server.refusal if self.path == "/v1/chat/completions" else (404, f"unknown path {self.path}")
        if refusal:
            self.refuse(*refusal)
            return
        self.send_response(200)
        self.end_headers()
        try:
            self.stream()
        except (BrokenPipeError, ConnectionResetError):
            self.server.left.set()

    def stream(self) -> None:
        for thought in self.server.thoughts:
            self.event({"choices": [{"delta": {"reasoning_content": thought}}]})
        for piece in self.server.pieces:
            self.event({"choices": [{"delta": {"content": piece}}]})
            while self.server.hold and not self.server.hold.wait(0.02):
                self.wfile.write(b": waiting\n\n")
        if self.server.broken:
            return
        self.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        self.event({"choices": [], "usage": {"completion_tokens": 7}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value: Any) -> None:
        text = json.dumps(value, ensure_ascii=False).encode()
        for part in (b"data: ", text[:9], text[9:], b"\r", b"\n\r\n"):
            self.wfile.write(part)
            self.wfile.flush()

    def refuse(self, status: int, message: str) -> None:
        self.reply(status, {"error": {"message": message, "code": None}})


class OpenAI(http_server.HttpServer):
    """Streams `pieces` to each question. `hold`: waits behind the first piece until it is set or the client leaves."""

    handler = Handler

    def __init__(self) -> None:
        super().__init__()
        self.pieces, self.thoughts = ["Hel", "lo"], list[str]()
        self.key, self.broken = "", False
        self.refusal: tuple[int, str] | None = None
        self.hold: threading.Event | None = None
        self.bodies: list[dict[str, Any]] = []
        self.left = threading.Event()


@pytest.fixture
def server() -> Iterator[OpenAI]:
    with OpenAI() as running:
        yield running
        if running.hold:
            running.hold.set()


@dataclass
class Typed:
    """A terminal at which `lines` are typed."""

    lines: list[str]
    keys: list[str] = field(default_factory=list)
    is_interactive: bool = True
    shown: str = ""
    thoughts: str = ""
    notes: list[str] = field(default_factory=list)

    def read(self, prompt: str) -> str:
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    def write(self, text: str) -> None:
        self.shown += text

    def think(self, text: str) -> None:
        self.thoughts += text

    def note(self, text: str) -> None:
        self.notes.append(text)

    def ask_key(self, why: str) -> str:
        self.note(why)
        return self.keys.pop(0) if self.keys else ""


def talk(server: OpenAI, *lines: str, model: str = "", system: str = "", **options: Any) -> Typed:
    terminal = Typed(list(lines), **options)
    assert chat.run(ChatSettings(url=server.url), model, system, {"temperature": 0.5}, terminal) == 0
    return terminal


def said(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_answer_is_streamed_and_the_history_is_sent(server: OpenAI) -> None:
    terminal = talk(
        server, "Hi", "one\\", "two", '"""', "three", "", "four", '"""', '"""five"""', "  ", system="Be brief."
    )
    assert terminal.shown == "Hello\nHello\nHello\nHello\n\n"
    first, second, *_ = server.bodies
    assert (first["model"], first["temperature"], first["stream"]) == ("first", 0.5, True)
    assert said(first) == [("system", "Be brief."), ("user", "Hi")]
    assert said(second) == [*said(first), ("assistant", "Hello"), ("user", "one\ntwo")]
    assert [said(body)[-1][1] for body in server.bodies[2:]] == ["three\n\nfour", "five"]
    assert "7 tokens, first token" in terminal.notes[1]
    assert "cut at the limit of tokens" in terminal.notes[1]


def test_thinking_is_shown_apart_and_not_sent_again(
    server: OpenAI, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.thoughts, server.pieces = ["\nhm", "\x1b[2J\n"], ["\n\n", "Hello"]
    terminal = talk(server, "Hi", "And?", model="second")
    assert terminal.shown == "Hello\nHello\n\n"
    assert terminal.thoughts == "\nhm\u241b[2J\n\n\n" * 2
    assert said(server.bodies[1])[1] == ("assistant", "Hello") and server.bodies[1]["model"] == "second"
    server.pieces = []
    assert talk(server, "Hi").thoughts == "\nhm\u241b[2J\n\n", "an answer that was cut within its thinking"
    for is_terminal, shown in ((False, ""), (True, "\x1b[2mhm\x1b[0m")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        chat.Console().think("hm")
        assert capsys.readouterr().out == shown


def test_commands_change_and_save_the_conversation(server: OpenAI, tmp_path: Path) -> None:
    """And a model's text does not drive the terminal, but is saved as it is."""
    server.pieces = ["a\x1b[2Jb\x07\x9b1m\tc\n", "line\u2028separator"]
    raw = "".join(server.pieces)
    saved, again = tmp_path / "saved.json", tmp_path / "saved.md"
    lines = ["Hi", f"/save {saved}", f"/save {again}", f"/save {again}", "/clear", "/system Be kind.", "Ho", "/system"]
    terminal = talk(server, *lines, "Hu", "/help", "/nothing", "/save", "/quit", "unread")
    assert terminal.shown == "a\u241b[2Jb\u2407\ufffd1m\tc\nline\u2028separator\n" * 3
    assert json.loads(saved.read_text()) == {
        "model": "first", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": raw}],
    }  # fmt: skip
    assert again.read_text() == f"## user\n\nHi\n\n## assistant\n\n{raw}\n\n"
    assert [said(body) for body in server.bodies[1:]] == [
        [("system", "Be kind."), ("user", "Ho")],
        [("user", "Ho"), ("assistant", raw), ("user", "Hu")],
    ]
    notes = "\n".join(terminal.notes)
    assert f"error: {again}: cannot be written: File exists; name another file" in notes
    assert "error: /nothing: unknown command; /help lists the commands" in notes
    assert "error: /save: needs a FILE" in notes
    for command in ("/help", "/system", "/clear", "/save", "/quit"):
        assert f"\n{command}" in notes


def test_refusals_are_told_in_the_servers_words_and_forgotten(server: OpenAI) -> None:
    server.refusal = (429, "queue full; retry later")
    terminal = Typed(["Hi", "Ho"], is_interactive=False)
    assert chat.run(ChatSettings(url=server.url + "/v1/"), "", "", {}, terminal) == 1
    assert terminal.notes == ["error: queue full; retry later"] * 2
    assert said(server.bodies[1]) == [("user", "Ho")]
    server.refusal, server.broken = None, True
    terminal = talk(server, "Hi")
    assert "error: the connection ended before the answer did; send the message again" in terminal.notes


def test_key_is_asked_for_and_never_shown(server: OpenAI) -> None:
    server.key = SECRET
    terminal = talk(server, "Hi", keys=["sk-wrong-one", SECRET])
    assert terminal.shown == "Hello\n\n"
    assert terminal.notes[:2] == ["the key None is not valid", "the key Bearer *** is not valid"]
    wrong = ChatSettings(url=server.url, api_key="sk-wrong-one")
    with pytest.raises(
        ConfigurationError, match=r"the key Bearer \*\*\* is not valid; set ORCINUS_API_KEY to another"
    ) as error:
        chat.run(wrong, "", "", {}, Typed([]))
    assert "sk-wrong" not in str(error.value)
    server.refusal = 401, "the key is missing; send it as X-Api-Key: KEY"
    notes = talk(server, "Hi", model="first").notes
    assert notes[-1] == "error: the key is missing; set ORCINUS_API_KEY, or give --api-key"


def test_address_is_that_of_the_stack_that_runs_here(server: OpenAI, tmp_path: Path) -> None:
    settings = ChatSettings(run_dir=tmp_path / "run")
    assert chat.find_server(settings) == "http://127.0.0.1:8000"
    with RunDir(tmp_path / "run") as here:
        here.write_facts(StackFacts("first", "shard-0", server.url, "http://127.0.0.1:1", ""))
        assert chat.find_server(settings) == server.url
        assert chat.find_server(ChatSettings(run_dir=tmp_path / "run", url="http://other:1/v1")) == "http://other:1/v1"
    assert chat.find_server(settings) == "http://127.0.0.1:8000"


def test_server_that_is_not_there_is_named_with_the_remedy() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigurationError, match=f"no server at {url}; start one with `make run`"):
        chat.run(ChatSettings(url=url), "", "", {}, Typed([]))


def test_ctrl_c_stops_an_answer_and_a_second_one_leaves(server: OpenAI) -> None:
    server.hold = threading.Event()
    control, terminal = pty.openpty()
    command = [sys.executable, "-m", "services.cli", "chat", "--url", server.url]
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=ROOT, start_new_session=True,
        env=clean_env(TERM="dumb"),
    )  # fmt: skip
    os.close(terminal)
    seen = bytearray()

    def reads(words: bytes) -> bool:
        seen.extend(os.read(control, 4096))
        return words in seen

    try:
        until("the prompt", lambda: reads(b"> "), 60)
        os.write(control, b"Hi\n")
        until("the first piece", lambda: reads(b"Hel"), 60)
        process.send_signal(signal.SIGINT)
        until("the note", lambda: reads(b"stopped"), 60)
        assert server.left.wait(60), "the server's connection is closed"
        server.hold.set()
        os.write(control, b"More\n")
        until("the answer", lambda: reads(b"7 tokens"), 60)
        assert said(server.bodies[1]) == [("user", "Hi"), ("assistant", "Hel"), ("user", "More")]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(control)


def orcinus(gateway: GatewayProcess, *words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    environment = clean_env(ORCINUS_URL=gateway.url, ORCINUS_API_KEY=KEY)
    command = [sys.executable, "-m", "services.cli", *words]
    return subprocess.run(command, input=typed, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)


def test_batch_has_an_answer_for_each_line(tmp_path: Path, gateway: GatewayProcess, answers: None) -> None:
    lines: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/completions", gateway.name, {"prompt": "0"}),
        ("/v1/chat/completions", gateway.name, {"messages": [{"role": "user", "content": "1"}]}),
        ("/v1/completions", "wrong", {"prompt": "2"}),
    ]
    with (tmp_path / "in").open("w") as file:
        for number, (url, model, more) in enumerate(lines):
            body = {"model": model, "max_tokens": 100, **more}
            print(json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": body}), file=file)
    done = orcinus(gateway, "batch", str(tmp_path / "in"), str(tmp_path / "out"), "--json")
    summary = json.loads(done.stdout)
    assert (summary["succeeded"], summary["failed"], done.returncode) == (2, 1, 1)
    assert summary["completion_tokens"] == 2 * len(token_ids(TEXT))
    answered = map(json.loads, (tmp_path / "out").read_text().splitlines())
    found = {answer["custom_id"]: answer["response"] for answer in answered}
    assert found["0"]["body"]["choices"][0]["text"] == TEXT
    assert found["1"]["body"]["choices"][0]["message"]["content"] == TEXT
    assert (found["2"]["status_code"], found["2"]["body"]["error"]["code"]) == (404, "model_not_found")


def test_chat_answers_the_lines_of_a_pipe(gateway: GatewayProcess, answers: None) -> None:
    done = orcinus(gateway, "chat", gateway.name, "--max-tokens", "60", typed="Hello\nAgain\n")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{TEXT}\n{TEXT}\n")
