"""The gateway bench counts what streams carry, measures a real gateway, and rejects measurements of another limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.fleet import redis as bench
from bench.gateway import main as gateway
from bench.gateway.streams import BrokenStreamError, Reader
from bench.local import redis_server
from shared.keys import Keys

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = (
    HEAD
    + b'28\r\nid: cmpl-1:-1\ndata: {"choices":[]}\n\n\r\n'
    + b'50\r\nid: cmpl-1:0\ndata: {"choices":[]}\n\nid: cmpl-1:3\ndata: {"choices":[]}\n\n\r\n'
    + b": keep-alive\n\nid: cmpl-1:4\ndata: x\n\n\r\ndata: [DONE]\n\n\r\n"
)


def test_reader_finds_each_event_once_wherever_the_network_cuts() -> None:
    for cut in range(len(STREAM) + 1):
        reader = Reader()
        assert reader.feed(STREAM[:cut]) + reader.feed(STREAM[cut:]) == [0, 3, 4]
        assert reader.ended


@pytest.mark.parametrize("answer", [b"HTTP/1.1 429 Too Many\r\n\r\n", HEAD + b'\r\ndata: {"error":{}}\n\n'])
def test_failed_request_ends_the_run(answer: bytes) -> None:
    with pytest.raises(BrokenStreamError):
        Reader().feed(answer)


def measured(**changes: Any) -> dict[str, Any]:
    found = {"case": "saturation", "tokens_s": 1, "gateway_ran": 0.9, "gateway_waited": 0.05, "redis_ran": 0.1}
    return {**found, "client_and_publisher_ran": 0.9, "client_and_publisher_waited": 0.1, **changes}


def test_results_are_refused_when_the_gateway_waited_for_the_bench() -> None:
    gateway.check(measured())
    gateway.check(measured(gateway_ran=0.5, gateway_waited=0.45))  # another process had its core
    gateway.check(measured(case="rate", gateway_ran=0.3, gateway_waited=0.0, late_iterations=0.0))
    with pytest.raises(gateway.WrongLimitError, match="idle for 65%"):
        gateway.check(measured(gateway_ran=0.3))
    with pytest.raises(gateway.WrongLimitError, match="late"):
        gateway.check(measured(case="rate", late_iterations=0.2))


def test_refusal_and_wrong_options_have_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> None:
        raise gateway.WrongLimitError("the client was slow")

    monkeypatch.setattr(gateway, "measure", refuse)
    assert gateway.main(["--json"]) == 1
    assert gateway.main(["--clients", "0"]) == 2
    assert gateway.main(["--cases", "nothing"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "nothing is reported: the client was slow" in shown.err


@pytest.mark.slow
def test_short_run_counts_every_token_of_a_gateway(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gateway, "check", lambda _: None)  # this machine does other things meanwhile
    monkeypatch.setattr(gateway, "WARM_S", 0.2)
    assert gateway.main(["--clients", "8", "--seconds", "1.5", "--rate", "400", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(line["case"], line["endpoint"]) for line in report["results"]] == [
        ("saturation", "completions"), ("saturation", "chat"), ("rate", "completions"), ("rate", "chat"),
    ]  # fmt: skip
    for line in report["results"]:
        assert line["tokens_s"] >= line["events_s"] > 0
        assert line["cpu_us_per_token"] > 0
    assert all(0 < line["wait_p50_ms"] <= line["wait_p99_ms"] for line in report["results"][2:])
    assert report["machine"]["cores"]


def test_requests_are_enqueued_claimed_and_ended(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (_, client):
        found = bench.measure(client, iterations=1)
        keys = Keys("bench")
        assert client.hmget(keys.queue, "requests", "tokens") == [b"0", b"0"]
        assert [client.xlen(stream) for stream in keys.request_streams()] == [0, 0, 0, 0]
        states = {client.hget(name, "state") for name in client.scan_iter(keys.req("*"), count=1000)}
    assert states == {b"finished"} and all(found[name] > 0 for name in ("enqueue_request", "claim_request"))
