"""The load generator against a real HTTP server on loopback that streams scripted events."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.serve import html as load_html
from bench.serve import main as load
from bench.serve import stats
from bench.serve.client import SseLines
from services.launcher.rundir import RunDir, StackFacts
from shared.settings import ROOT
from tests.support import http_server


class Handler(http_server.Handler):
    server: ScriptedServer

    def answer(self) -> None:
        key = self.headers["Authorization"]
        if self.command == "POST":
            self.complete(self.json(), key)
        elif self.server.script == "locked" and key != "Bearer secret":
            text = "revoked; send another key" if key else "missing; send it as Authorization: Bearer KEY"
            text = f"the API key is {text}"
            self.reply(401, {"error": {"message": text}})
        else:
            self.reply(200, {"object": "list", "data": [{"id": "scripted"}]})

    def complete(self, body: dict[str, Any], key: str | None) -> None:
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.keys.append(key)
            refused = server.script == "some_429" and len(server.bodies) % 2 == 0
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            if server.at_once >= server.hold:
                server.release.set()
        try:
            assert server.release.wait(60)
            if refused:
                self.reply(429, {"error": {"message": "busy"}}, Retry_After="1")
            else:
                self.stream(server.script, body)
        finally:
            with server.lock:
                server.at_once -= 1

    def stream(self, script: str, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if script == "cut":
            self.send_header("Content-Length", "1000000")
        self.end_headers()
        total, sent = body["max_tokens"], 0
        with_ids = body.get("return_token_ids", False)
        while sent < total:
            size = min(2 if with_ids else 1, total - sent)
            choice: dict[str, Any] = {"index": 0, "text": "ab" * size, "finish_reason": None}
            if with_ids:
                choice["token_ids"] = list(range(sent, sent + size))
            sent += size
            self.wfile.write(b": keepalive\n\ndata: " + json.dumps({"choices": [choice]}).encode() + b"\r\n\r\n")
            if script in ("cut", "quiet_end") and sent >= 2:
                return
            if script == "error_event" and sent >= 2:
                self.wfile.write(b'data: {"error": {"message": "worker lost", "code": "worker"}}\n\ndata: [DONE]\n\n')
                return
        last = {"index": 0, "text": "", "finish_reason": "cancelled" if script == "cancelled" else "length"}
        usage = {"prompt_tokens": 7, "completion_tokens": total + (3 if script == "merged" else 0)}
        tail = f"data: {json.dumps({'choices': [last]})}\n\ndata: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        self.wfile.write(tail.encode() + b"data: [DONE]\n\n")


class ScriptedServer(http_server.HttpServer):
    """A server with OpenAI's API. `script` decides what each completion does; none is answered before `hold` of them
    are there at once.
    """

    handler = Handler

    def __init__(self) -> None:
        super().__init__()
        self.script, self.hold = "stream", 1
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.lock, self.release = threading.Lock(), threading.Event()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as scripted:
        yield scripted


@pytest.fixture(autouse=True)
def an_idle_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted server answers at once, so the client is always the limit here; tests of that rule set their own."""
    monkeypatch.setattr(load, "CLIENT_CPU_LIMIT", 1e9)


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command without a warm-up against the server and returns its result."""

    def run(*argv: str, code: int = 0) -> dict[str, Any]:
        assert load.main(["--url", server.url, "--warmup", "0", *argv, "--json"]) == code
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return run


def test_open_loop_counts_every_token_without_the_warm_up(server: ScriptedServer, run: Run) -> None:
    result = run(
        "--model", "scripted", "--rate", "200", "--requests", "10", "--warmup", "3",
        "--prompt-tokens", "5", "--output-tokens", "7", "--seed", "4",
    )  # fmt: skip
    expected = {
        "requests": 10, "finished": 10, "errors": {}, "output_tokens": 70, "finish_reasons": {"length": 10},
        "prompt_tokens": 70, "seed": 4, "warmup": 3,  # 7 prompt tokens each by the usage of the server
    }  # fmt: skip
    assert {name: result[name] for name in expected} == expected
    assert len(server.bodies) == 13
    assert all(len(body["prompt"]) == 5 and body["ignore_eos"] and body["stream"] for body in server.bodies)
    assert {"p50", "p90", "p99"} <= result["tbt_ms"].keys()
    assert result["ttft_ms"]["p50"] > 0
    assert result["command"].startswith("orcinus bench serve --url")


def test_closed_loop_keeps_its_concurrency_and_its_seed_decides_the_prompts(server: ScriptedServer, run: Run) -> None:
    server.hold = 4
    prompts = []
    for seed in ("1", "1", "2"):
        server.bodies.clear()
        assert run("--concurrency", "4", "--requests", "12", "--seed", seed)["finished"] == 12
        prompts.append(sorted(body["prompt"] for body in server.bodies))
    assert server.most_at_once == 4
    assert prompts[0] == prompts[1] != prompts[2]


def test_text_mode_sends_words_and_takes_the_reported_usage(server: ScriptedServer, run: Run) -> None:
    server.script = "merged"
    result = run("--concurrency", "1", "--requests", "2", "--text", "--prompt-tokens", "6", "--output-tokens", "4")
    assert all(len(body["prompt"].split()) == 6 for body in server.bodies)
    assert result["output_tokens"] == 14  # four events each, seven tokens by the usage


@pytest.mark.parametrize(
    ("script", "kind", "finished"),
    [
        ("cut", "cut", 0), ("quiet_end", "cut", 0), ("error_event", "stream_error", 0),
        ("cancelled", "finish_cancelled", 0), ("some_429", "http_429", 2),
    ],
)  # fmt: skip
def test_stream_with_a_wrong_end_fails_the_run_and_a_refusal_does_not(
    server: ScriptedServer, run: Run, script: str, kind: str, finished: int
) -> None:
    server.script = script
    result = run("--concurrency", "2", "--requests", "4", code=0 if finished else 1)
    assert (result["finished"], result["errors"]) == (finished, {kind: 4 - finished})


def test_result_has_no_rates_when_the_client_was_the_limit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "CLIENT_CPU_LIMIT", 0.0)
    result = run("--concurrency", "2", "--requests", "6", code=1)
    assert all(result[name] is None for name in load.RATES)
    assert "it was the limit" in result["warnings"][0]
    assert result["ttft_ms"]["p50"] is not None


def test_key_is_sent_and_not_in_the_result(
    server: ScriptedServer, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = "locked"
    assert load.main(["--url", server.url, "--concurrency", "1", "--json"]) == 2
    assert "answers 401: the API key is missing; set ORCINUS_API_KEY, or give --api-key\n" in capsys.readouterr().err
    result = run("--concurrency", "1", "--requests", "1", "--api-key", "secret")
    assert server.keys == ["Bearer secret"]
    assert "secret" not in json.dumps(result)


def test_refused_key_is_told_with_the_servers_reason(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = "locked"
    assert load.main(["--url", server.url, "--concurrency", "1", "--api-key", "old"]) == 2
    assert capsys.readouterr().err == (
        f"error: {server.url} answers 401: the API key is revoked; set ORCINUS_API_KEY to "
        "another, or give it as --api-key\n"
    )


def test_running_stack_is_found_with_its_model_and_key(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = "locked"
    monkeypatch.setattr(load, "CLIENT_CPU_LIMIT", 1e9)
    monkeypatch.setenv("ORCINUS_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("ORCINUS_API_KEY", "secret")
    with RunDir(tmp_path / "run") as place:
        place.write_facts(StackFacts("scripted", "shard-0", server.url, "http://127.0.0.1:2", ""))
        assert load.main(["--requests", "9", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["url"], result["model"], result["finished"]) == (server.url, "scripted", 9)
    assert result["concurrency"] == load.DEFAULT_CONCURRENCY
    assert set(server.keys) == {"Bearer secret"}


def test_files_hold_result_records_and_picture(run: Run, tmp_path: Path) -> None:
    result = run(
        "--concurrency", "2", "--requests", "5", "--output-tokens", "6",
        "--output", str(tmp_path / "r.json"), "--records", str(tmp_path / "r.jsonl"), "--plot", str(tmp_path / "r.png"),
    )  # fmt: skip
    assert json.loads((tmp_path / "r.json").read_text()) == result
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [record["event_tokens"] for record in records] == [[2, 2, 2]] * 5
    for record in records:
        assert record["scheduled_s"] <= record["sent_s"] <= record["event_s"][0] <= record["end_s"]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_trace_gives_each_request_its_lengths(server: ScriptedServer, run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,11,3\n0.01,900,2\n0.02,12,1\n")
    result = run("--trace", str(trace), "--clip-tokens", "100")
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies) == [(11, 3), (12, 1), (98, 2)]
    assert result["clipped"] == 1


def test_several_loads_are_rows_of_one_result(server: ScriptedServer, run: Run, tmp_path: Path) -> None:
    result = run(
        "--concurrency", "1,3", "--requests", "4",
        "--csv", str(tmp_path / "r.csv"), "--html", str(tmp_path / "r.html"),
    )  # fmt: skip
    assert [(one["concurrency"], one["finished"]) for one in result["runs"]] == [(1, 4), (3, 4)]
    assert len(server.bodies) == 8
    rows = list(csv.DictReader((tmp_path / "r.csv").open()))
    assert [float(row["ttft_ms.p99"]) for row in rows] == [one["ttft_ms"]["p99"] for one in result["runs"]]
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 2 and "3 at a time" in page and "<script" not in page
    assert not re.findall(r"(?:src|href)=[\"']?http", page.replace("xlink:href", ""))
    evil = {**result, "command": "<script>alert(1)</script>"}
    page = load_html.report(evil, [stats.Run({**result["runs"][0], "model": "<b>x</b>"}, [])])
    assert "<script" not in page and "<b>" not in page


@pytest.mark.parametrize(
    "argv",
    [
        ["--rate", "1", "--concurrency", "1"], ["--concurrency", "0"], ["--rate", "0"],
        ["--rate", "1", "--prompt-tokens", "9:3"], ["--rate", "1,x"], ["--rate", "1,2", "--records", "r.jsonl"],
        ["--rate", "1,2", "--plot", "r.png"], ["--seconds", "5", "--concurrency", "1"],
        ["--seconds", "5", "--rate", "1", "--requests", "3"], ["--rate", "1", "--first-id", "50", "--vocab-size", "50"],
        ["--trace", "no-such-file.csv"], ["--concurrency", "1", "--url", "http://127.0.0.1:1"], ["--no-such-option"],
    ],
)  # fmt: skip
def test_wrong_use_is_exit_code_2_with_a_message(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert load.main([*argv, "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")


def test_sse_payloads_are_complete_wherever_the_network_cuts() -> None:
    stream = b': hi\n\nid: 3\ndata: {"a": 1}\r\n\r\ndata:{"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'
    for cut in range(len(stream) + 1):
        lines = SseLines()
        assert lines.feed(stream[:cut]) + lines.feed(stream[cut:]) == [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b"[DONE]"]


@pytest.mark.parametrize("option", ["--plot", "--html"])
def test_picture_is_refused_before_the_load_without_matplotlib(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert load.main([option, "file", "--url", "http://127.0.0.1:1"]) == 2
    assert "need matplotlib, which is not installed; run `make install-dev`" in capsys.readouterr().err


def test_missing_aiohttp_is_an_error_with_the_command_to_install() -> None:
    code = "import sys; sys.modules['aiohttp'] = None; from services.cli.app import main; main()"
    command = [sys.executable, "-c", code, "bench", "serve"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.returncode == 2
    assert "run `make install`" in ended.stderr and "Traceback" not in ended.stderr
