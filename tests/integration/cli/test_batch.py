"""`orcinus batch`: every line once, whatever happens to the run; over a scripted server, and over a real gateway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.cli import batch as cli_batch
from services.cli.batch import Summary, run
from shared.errors import ConfigurationError
from shared.settings import BatchSettings
from tests.integration.conftest import KEY, TEXT
from tests.support.gateway_process import GatewayProcess
from tests.support.stack import ROOT
from tests.support.tokenizers import token_ids
from tests.support.waiting import free_port, until

Answer = tuple[int, dict[str, str], Any]
ENOUGH: Answer = (200, {}, {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}})


@dataclass
class ScriptedServer:
    """Answers with `answer(body, how often this line was seen)`; `gate` can hold all answers back."""

    answer: Callable[[dict[str, Any], int], Answer] = lambda body, seen: ENOUGH
    seen: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    counting: threading.Lock = field(default_factory=threading.Lock)
    active: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self.gate.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                before = sum(known["prompt"] == body["prompt"] for _, known, _ in outer.seen)
                outer.seen.append((self.path, body, {name.lower(): value for name, value in self.headers.items()}))
                with outer.counting:
                    outer.active += 1
                    outer.most = max(outer.most, outer.active)
                outer.gate.wait(60)
                status, headers, answer = outer.answer(body, before)
                with outer.counting:
                    outer.active -= 1
                if not status:
                    self.close_connection = True
                    return
                content = json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    yield made
    made.close()


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


def test_every_line_gets_one_answer(tmp_path: Path, server: ScriptedServer) -> None:
    written(tmp_path / "in", lines_of(40))
    summary = go(tmp_path, server, concurrency=8)
    found = answers_in(tmp_path / "out")
    assert {answer["custom_id"] for answer in found} == {f"line-{n}" for n in range(40)}
    assert len(found) == 40
    assert all(answer["error"] is None and answer["response"]["status_code"] == 200 for answer in found)
    assert len({answer["id"] for answer in found}) == 40
    assert (summary.succeeded, summary.prompt_tokens, summary.completion_tokens) == (40, 80, 120)
    assert summary.well


def test_class_of_a_line_is_low_by_default(tmp_path: Path, server: ScriptedServer) -> None:
    written(tmp_path / "in", [*lines_of(1), *lines_of(2, priority="high")[1:]])
    go(tmp_path, server)
    assert {body["prompt"]: body["priority"] for _, body, _ in server.seen} == {"0": "low", "1": "high"}
    (tmp_path / "out").unlink()
    server.seen.clear()
    go(tmp_path, server, priority="none")
    assert ["priority" in body for _, body, _ in sorted(server.seen, key=lambda one: one[1]["prompt"])] == [False, True]


def test_requests_in_flight_are_bounded(tmp_path: Path, server: ScriptedServer) -> None:
    written(tmp_path / "in", lines_of(12))
    server.gate.clear()
    working = threading.Thread(target=go, args=(tmp_path, server), kwargs={"concurrency": 3}, daemon=True)
    working.start()
    until("three are there", lambda: server.active == 3)
    server.gate.set()
    working.join(60)
    assert len(answers_in(tmp_path / "out")) == 12
    assert server.most == 3


def test_killed_run_continues_with_each_line_once(tmp_path: Path, server: ScriptedServer) -> None:
    written(tmp_path / "in", lines_of(30))
    held = threading.Event()

    def answer(body: dict[str, Any], seen: int) -> Answer:
        if int(body["prompt"]) >= 10:
            held.set()
            server.gate.clear()
            server.gate.wait(60)
        return ENOUGH

    server.answer = answer
    command = [sys.executable, "-m", "services.cli", "batch", str(tmp_path / "in"), str(tmp_path / "out")]
    running = subprocess.Popen([*command, "--url", server.url, "--concurrency", "2"], cwd=ROOT)
    assert held.wait(60)
    until("ten lines are there", lambda: len(answers_in(tmp_path / "out")) >= 10)
    running.send_signal(signal.SIGKILL)
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
    assert Counter(answer["custom_id"] for answer in after) == Counter(f"line-{n}" for n in range(30))
    assert (summary.skipped, summary.succeeded) == (len(before), 30 - len(before))
    again = {body["prompt"]: headers["idempotency-key"] for _, body, headers in server.seen}
    both = first.keys() & again.keys()
    assert both  # what was under way when the run died
    assert all(first[prompt] == again[prompt] for prompt in both)


def test_busy_server_is_retried_after_its_retry_time(
    tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    real = cli_batch.asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    monkeypatch.setattr(cli_batch.asyncio, "sleep", sleep)
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
    refusal = {"error": {"message": "the API key is revoked; send it as X-Api-Key: KEY", "type": "x"}}
    server.answer = lambda body, seen: (401, {}, refusal)
    summary = go(tmp_path, server)
    assert summary.stopped == "the API key is revoked; set ORCINUS_API_KEY, or give --api-key"
    assert (summary.failed, summary.well, (tmp_path / "out").read_text()) == (0, False, "")


def test_unreachable_server_stops_the_run_and_writes_nothing(tmp_path: Path, server: ScriptedServer) -> None:
    written(tmp_path / "in", lines_of(3))
    server.answer = lambda body, seen: (0, {}, None)
    summary = go(tmp_path, server, patience_s=0.05)
    assert "no line was answered for 0.05 s" in summary.stopped
    assert not summary.well
    assert (tmp_path / "out").read_text() == ""


def test_output_of_another_run_is_refused(tmp_path: Path, server: ScriptedServer) -> None:
    written(tmp_path / "in", lines_of(1))
    server.gate.clear()
    working = threading.Thread(target=go, args=(tmp_path, server), daemon=True)
    working.start()
    until("it runs", lambda: server.seen)
    with pytest.raises(ConfigurationError, match="another run writes it"):
        go(tmp_path, server)
    server.gate.set()
    working.join(60)


GOOD = lines_of(1)[0]
BAD = {
    "no JSON": "{",
    "no object": "[]",
    "a field too few": json.dumps({"custom_id": "a"}),
    "a field too many": json.dumps({**GOOD, "x": 1}),
    "no id": json.dumps({**GOOD, "custom_id": ""}),
    "another method": json.dumps({**GOOD, "method": "GET"}),
    "another address": json.dumps({**GOOD, "url": "/v1/messages"}),
    "a stream": json.dumps({**GOOD, "body": {"stream": True}}),
    "an id twice": json.dumps(GOOD) + "\n" + json.dumps(GOOD),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_bad_line_is_named_before_anything_is_sent(tmp_path: Path, server: ScriptedServer, text: str) -> None:
    last = text.count("\n") + 2
    (tmp_path / "in").write_text(json.dumps({**GOOD, "custom_id": "first"}) + "\n" + text + "\n")
    with pytest.raises(ConfigurationError, match=f"in:{last}: "):
        go(tmp_path, server)
    assert server.seen == []


def test_gateway_answers_each_line_once(tmp_path: Path, gateway: GatewayProcess, answers: None) -> None:
    lines = lines_of(6, model=gateway.name, max_tokens=100)
    for line in lines[3:]:
        line["url"] = "/v1/chat/completions"
        line["body"]["messages"] = [{"role": "user", "content": line["body"].pop("prompt")}]
    written(tmp_path / "in", [*lines, {**GOOD, "custom_id": "wrong"}])
    command = [sys.executable, "-m", "services.cli", "batch", str(tmp_path / "in"), str(tmp_path / "out"), "--json"]
    environment = {**os.environ, "ORCINUS_URL": gateway.url, "ORCINUS_API_KEY": KEY}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    summary = json.loads(done.stdout)
    assert (summary["succeeded"], summary["failed"], done.returncode) == (6, 1, 1)
    assert summary["completion_tokens"] == 6 * len(token_ids(TEXT))
    found = {answer["custom_id"]: answer["response"] for answer in answers_in(tmp_path / "out")}
    assert found["line-0"]["body"]["choices"][0]["text"] == TEXT
    assert found["line-5"]["body"]["choices"][0]["message"]["content"] == TEXT
    assert (found["wrong"]["status_code"], found["wrong"]["body"]["error"]["code"]) == (404, "model_not_found")


def test_server_that_is_not_there_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "in", lines_of(3))
    settings = BatchSettings(url=f"http://127.0.0.1:{free_port()}", patience_s=0.05)
    summary = run(tmp_path / "in", tmp_path / "out", settings, show=True)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("ConnectError") == 1 and settings.url in said
    assert "lines are sent again until none was answered for 0.05 s" in said
    assert "ConnectError" in summary.stopped
