"""`orcinus batch`: every line once, whatever happens to the run, over a scripted server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.cli import batch as cli_batch
from services.cli.batch import Summary, run
from shared.errors import ConfigurationError
from shared.settings import BatchSettings
from tests.support import http_server
from tests.support.stack import ROOT
from tests.support.waiting import free_port, until

Answer = tuple[int, dict[str, str], Any]
ENOUGH: Answer = (200, {}, {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}})


class Handler(http_server.Handler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def answer(self) -> None:
        server, body = self.server, self.json()
        before = sum(known["prompt"] == body["prompt"] for _, known, _ in server.seen)
        server.seen.append((self.path, body, {name.lower(): value for name, value in self.headers.items()}))
        with server.counting:
            server.active += 1
            server.most = max(server.most, server.active)
        server.gate.wait(60)
        status, headers, answer = server.answer(body, before)
        with server.counting:
            server.active -= 1
        if status:
            self.reply(status, answer, **headers)
        else:
            self.close_connection = True


class ScriptedServer(http_server.HttpServer):
    """Answers with `answer(body, how often this line was seen)`; `gate` can hold all answers back."""

    handler = Handler

    def __init__(self) -> None:
        super().__init__()
        self.answer: Callable[[dict[str, Any], int], Answer] = lambda body, seen: ENOUGH
        self.seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.gate, self.counting = threading.Event(), threading.Lock()
        self.gate.set()
        self.active = self.most = 0


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as made:
        yield made
        made.gate.set()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_batch, "FIRST_WAIT_S", 0.001)


def lines_of(count: int, url: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"line-{n}", "method": "POST", "url": url, "body": {"model": "m", "prompt": f"{n}", **body}}
        for n in range(count)
    ]


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers_in(path: Path) -> list[dict[str, Any]]:
    """Return the answers, without a last line that was cut."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def go(tmp_path: Path, server: ScriptedServer, **settings: Any) -> Summary:
    return run(tmp_path / "in", tmp_path / "out", BatchSettings(url=server.url, **settings), show=False)


def test_class_of_a_line_is_low_by_default(tmp_path: Path, server: ScriptedServer) -> None:
    written(tmp_path / "in", [*lines_of(1), *lines_of(2, priority="high")[1:]])
    for priority, expected in (("low", ["low", "high"]), ("none", [None, "high"])):
        go(tmp_path, server, **({} if priority == "low" else {"priority": priority}))
        bodies = sorted((body for _, body, _ in server.seen), key=lambda body: str(body["prompt"]))
        assert [body.get("priority") for body in bodies] == expected
        (tmp_path / "out").unlink()
        server.seen.clear()


def test_run_alone_answers_every_line_once_with_so_many_in_flight(tmp_path: Path, server: ScriptedServer) -> None:
    written(tmp_path / "in", lines_of(12))
    server.gate.clear()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(go, tmp_path, server, concurrency=3)
        until("three are there", lambda: server.active == 3)
        with pytest.raises(ConfigurationError, match="another run writes it"):
            go(tmp_path, server)
        server.gate.set()
        summary = running.result(60)
    found = answers_in(tmp_path / "out")
    assert sorted(answer["custom_id"] for answer in found) == sorted(f"line-{n}" for n in range(12))
    assert all(answer["error"] is None and answer["response"]["status_code"] == 200 for answer in found)
    assert len({answer["id"] for answer in found}) == 12
    assert (summary.succeeded, summary.prompt_tokens, summary.completion_tokens) == (12, 24, 36)
    assert summary.well and server.most == 3


def test_killed_run_continues_with_each_line_once(tmp_path: Path, server: ScriptedServer) -> None:
    written(tmp_path / "in", lines_of(30))

    def answer(body: dict[str, Any], seen: int) -> Answer:
        if int(body["prompt"]) >= 10:
            server.gate.clear()
            server.gate.wait(60)
        return ENOUGH

    server.answer = answer
    command = [sys.executable, "-m", "services.cli", "batch", str(tmp_path / "in"), str(tmp_path / "out")]
    running = subprocess.Popen([*command, "--url", server.url, "--concurrency", "2"], cwd=ROOT)
    until("ten lines are there", lambda: (tmp_path / "out").exists() and len(answers_in(tmp_path / "out")) >= 10)
    until("more are under way", lambda: len(server.seen) > 10)
    running.kill()
    running.wait(60)
    with (tmp_path / "out").open("ab") as out:
        out.write(b'{"custom_id": "line-29", "respo')  # a kill within the write of a line
    before = answers_in(tmp_path / "out")
    first = {body["prompt"]: headers["idempotency-key"] for _, body, headers in server.seen}
    server.answer = lambda body, seen: ENOUGH
    server.gate.set()
    server.seen.clear()
    summary = go(tmp_path, server)
    after = answers_in(tmp_path / "out")
    assert after[: len(before)] == before
    assert sorted(answer["custom_id"] for answer in after) == sorted(f"line-{n}" for n in range(30))
    assert (summary.skipped, summary.succeeded) == (len(before), 30 - len(before))
    again = {body["prompt"]: headers["idempotency-key"] for _, body, headers in server.seen}
    both = first.keys() & again.keys()
    assert both  # what was under way when the run died
    assert all(first[prompt] == again[prompt] for prompt in both)


def test_busy_server_is_retried_after_its_retry_time(
    tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    written(tmp_path / "in", lines_of(1))
    busy = (429, {"Retry-After": "7"}, {"error": {"message": "full"}})
    server.answer = lambda body, seen: (busy, (503, {}, {}), (0, {}, None), ENOUGH)[seen]
    summary = go(tmp_path, server)
    (wait_s,) = [seconds for seconds in waits if seconds > 1]
    assert 5.25 <= wait_s <= 8.75  # 7 s, spread so that not all come at once
    assert (summary.retries, summary.succeeded) == (3, 1)
    assert len({headers["idempotency-key"] for _, _, headers in server.seen}) == 1


def test_final_error_is_the_answer_of_its_line(tmp_path: Path, server: ScriptedServer) -> None:
    refusal = {"error": {"message": "no", "type": "invalid_request_error", "param": "model", "code": "x"}}
    fault = {"error": {"message": "it failed", "type": "server_error", "param": None, "code": "generation_failed"}}
    written(tmp_path / "in", lines_of(3))
    server.answer = lambda body, seen: {"0": (400, {}, refusal), "1": (500, {}, fault)}.get(body["prompt"], ENOUGH)
    summary = go(tmp_path, server)
    found = {answer["custom_id"]: answer["response"] for answer in answers_in(tmp_path / "out")}
    assert (found["line-0"]["status_code"], found["line-0"]["body"]) == (400, refusal)
    assert (found["line-1"]["status_code"], found["line-1"]["body"]) == (500, fault)
    assert (summary.succeeded, summary.failed, summary.well) == (1, 2, False)
    faults = [headers["idempotency-key"] for _, body, headers in server.seen if body["prompt"] == "1"]
    assert len(set(faults)) == len(faults) == cli_batch.FAULT_TRIES  # a fault is an answer, too


def test_refused_key_stops_the_run_and_writes_nothing(tmp_path: Path, server: ScriptedServer) -> None:
    written(tmp_path / "in", lines_of(3))
    refusal = {"error": {"message": "the API key is revoked; send another key", "type": "x"}}
    server.answer = lambda body, seen: (401, {}, refusal)
    summary = go(tmp_path, server)
    assert summary.stopped == "the API key is revoked; set ORCINUS_API_KEY, or give --api-key"
    assert (summary.failed, summary.well, (tmp_path / "out").read_text()) == (0, False, "")


GOOD = lines_of(1)[0]
BAD = {
    "no JSON": "{", "no object": "[]", "a field too few": json.dumps({"custom_id": "a"}),
    "a field too many": json.dumps({**GOOD, "x": 1}), "no id": json.dumps({**GOOD, "custom_id": ""}),
    "another method": json.dumps({**GOOD, "method": "GET"}),
    "another address": json.dumps({**GOOD, "url": "/v1/messages"}),
    "a stream": json.dumps({**GOOD, "body": {"stream": True}}),
    "an id twice": json.dumps(GOOD) + "\n" + json.dumps(GOOD),
}  # fmt: skip


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_bad_line_is_named_before_anything_is_sent(tmp_path: Path, server: ScriptedServer, text: str) -> None:
    last = text.count("\n") + 2
    (tmp_path / "in").write_text(json.dumps({**GOOD, "custom_id": "first"}) + "\n" + text + "\n")
    with pytest.raises(ConfigurationError, match=f"in:{last}: "):
        go(tmp_path, server)
    assert server.seen == []


def test_silent_server_is_said_at_once_and_stops_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "in", lines_of(3))
    settings = BatchSettings(url=f"http://127.0.0.1:{free_port()}", patience_s=0.05)
    summary = run(tmp_path / "in", tmp_path / "out", settings, show=True)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("ConnectError") == 1 and settings.url in said
    assert "lines are sent again until none was answered for 0.05 s" in said
    assert "ConnectError" in summary.stopped and "no line was answered for 0.05 s" in summary.stopped
    assert not summary.well and (tmp_path / "out").read_text() == ""
