"""The comparison with other servers: classes, medians, ratios, recipes, and streams that are killed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench.peers import client, install, kill, servers, table
from bench.peers.kill import Load
from bench.peers.servers import EXACT, INT8, OURS, REDUCED
from bench.serve.stats import Record


def cell(rate: float, p99: float = 10.0, **changed: Any) -> dict[str, Any]:
    return {
        "requests": 4, "finished": 4, "short": 0, "output_tok_s": rate, "ttft_ms": {"p50": 20.0, "p99": 40.0},
        "tbt_ms": {"p50": 5.0, "p99": p99, "max": 2 * p99}, "cpu_s_per_1000_tokens": 1.5, "server_cores": 1.9,
        "client_cores": 0.05, "other_cores": 0.01, **changed,
    }  # fmt: skip


def row(name: str, peer: str, declared: str, *rounds: dict[str, Any], same: int | None = 16) -> dict[str, Any]:
    return {
        "name": name, "peer": peer, "declared": declared, "about": "as it comes", "versions": {"engine": "1.0"},
        "same_answers": same, "of_answers": 16, "installed": True, "error": "" if rounds else "wheel | not found",
        "rounds": [{"round": n + 1, "start_s": 3.0, "cells": cells} for n, cells in enumerate(rounds)],
    }  # fmt: skip


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    return table.finish(
        {
            "rows": list(rows), "date": "2026-01-02T03:04:05Z", "commit": "abc", "command": "python -m bench.peers",
            "machine": {"cpu": "C", "cores": 2, "memory_gib": 8.0, "system": "S", "load_1m_before": 0.1},
            "settings": {"rounds": 3}, "model_sha256": "e5",
        }
    )  # fmt: skip


THREE = result(
    row("ours", OURS, EXACT, {"c8": cell(1200)}, {"c8": cell(900)}, {"c8": cell(1100)}),
    row("fast", "fast", EXACT, {"c8": cell(1000), "mix": cell(500, 8.0)}),
    row("slow", "slow", EXACT, {"c8": cell(800)}),
    row("loose", "loose", EXACT, {"c8": cell(4000)}, same=15),
    row("broken", "broken", REDUCED, same=None),
)


def test_a_server_is_exact_only_with_every_answer_right() -> None:
    assert table.class_of(EXACT, 16, 16) == EXACT
    assert table.class_of(EXACT, 15, 16) == REDUCED
    assert table.class_of(REDUCED, 16, 16) == REDUCED
    assert table.class_of(INT8, 0, 16) == INT8


@pytest.mark.parametrize(
    ("rates", "counted"),
    [
        ([cell(1200), cell(900), cell(1100)], (1100, 900, 1200, 3)),
        *(([cell(100), cell(900, **lost)], (100, 100, 100, 1)) for lost in (
            {"finished": 3}, {"short": 1}, {"requests": 0, "finished": 0}, {"other_cores": 0.5},
        )),
        ([cell(100, other_cores=0.5), cell(300, other_cores=0.5)], (200, 100, 300, 2)),  # none was quiet
    ],
)  # fmt: skip
def test_median_and_range_are_over_whole_and_quiet_rounds(
    rates: list[dict[str, Any]], counted: tuple[int, int, int, int]
) -> None:
    found = table.medians([{"cells": {"c8": each}} for each in rates])["c8"]["output_tok_s"]
    assert found == dict(zip(("median", "low", "high", "n"), counted, strict=True))


def test_ratio_is_that_to_the_best_peer_of_the_class() -> None:
    (line,) = THREE["ratios"]  # only c8 has both sides; the peer with 15 answers is not of this class
    assert (line["best_peer"], line["best"], line["orcinus"], line["ratio"]) == ("fast", 1000, 1100, 1.1)
    assert line["reached"]
    gaps, rate = result(
        row("ours", OURS, EXACT, {"mix": cell(400, 30.0)}),
        row("a", "a", EXACT, {"mix": cell(500, 40.0)}),
        row("b", "b", EXACT, {"mix": cell(300, 60.0)}),
    )["ratios"]
    assert (gaps["best_peer"], gaps["ratio"], gaps["reached"]) == ("a", 0.75, True), "less time is better"
    assert (rate["best_peer"], rate["ratio"], rate["goal"], rate["reached"]) == ("a", 0.8, None, None)


def test_later_run_of_a_class_replaces_that_class_alone() -> None:
    before = result(row("ours", OURS, EXACT, {"c8": cell(1200)}), row("old", OURS, INT8, {"c8": cell(300)}))
    later = {**result(row("new", OURS, INT8, {"c8": cell(400)}), row("a", "a", INT8, {"c8": cell(200)})), "commit": "d"}
    both = table.merged(before, later)
    assert [(each["name"], each["run"]["commit"]) for each in both["rows"]] == [
        ("ours", "abc"),
        ("new", "d"),
        ("a", "d"),
    ]
    assert [(line["class"], line["ratio"]) for line in both["ratios"]] == [(INT8, 2.0)]
    again = table.merged(both, {**before, "rows": before["rows"][:1], "commit": "e"})
    assert [(each["name"], each["run"]["commit"]) for each in again["rows"]] == [
        ("new", "d"),
        ("a", "d"),
        ("ours", "e"),
    ]
    with pytest.raises(ValueError, match=r"^settings: .*'rounds': 1.*, not the .*'rounds': 3"):
        table.merged(before, {**later, "settings": {"rounds": 1}})


def test_failing_recipe_stops_only_what_needs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(_log: Path, _model: str) -> None:
        raise install.InstallError("no compiler")

    for name, value in {
        "HOME": tmp_path, "make_model": lambda *_: None, "make_environment": lambda *_: Path(sys.executable),
        "installed_versions": lambda *_: {}, "build_llama": fails, "alias_vllm": lambda *_: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(install, name, value)
    said: list[str] = []
    states = install.install(["llama-30m-gguf", "vllm"], "", said.append)
    ok = {"llama-30m": True, "export": True, "llama": False, "llama-30m-gguf": False, "vllm": True}
    assert {name: state.ok for name, state in states.items()} == ok
    assert states["llama-30m-gguf"].error == "needs llama: no compiler"
    assert install.state("vllm").ok
    assert install.state("llama").error == "no compiler"
    assert "llama: no compiler" in said


def stream(start: float, times: list[float], tokens: int, asked: int = 4) -> Record:
    return Record(
        0, 128, asked, start, start, times[-1], event_s=times, event_tokens=[1] * len(times), reported_tokens=tokens
    )


def test_tokens_of_mix_are_those_that_came_within_the_window() -> None:
    streams = [stream(10.0, [10.1, 10.2, 10.6, 11.5], 4), stream(10.0, [10.5, 11.0], 4)]
    longs = [stream(10.2, [10.7], 1, asked=1)]
    figures = client.mix_figures(streams, longs, 1.0)
    # Three of the first stream's tokens by 11.0; the second's two events carried two tokens each.
    assert figures["output_tok_s"] == 7.0
    assert figures["long_ttft_ms"]["p50"] == 500.0
    # Gaps 100, 400, 900, 500 ms and two of 0 between tokens that came together.
    assert figures["tbt_ms"]["max"] == 900.0
    assert figures["tbt_ms"]["p50"] == 250.0
    assert (figures["finished"], figures["short"]) == (3, 0)


FLOAT32 = next(server for server in servers.SERVERS if server.name == "orcinus float32")


def event(text: str) -> bytes:
    return b"id: r:0\ndata: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


class Answers:
    """A server; its n-th stream is whole, breaks off, or tells an error, by n modulo 3."""

    def __init__(self) -> None:
        self.seen = 0
        self.resumed: list[tuple[str, str]] = []

    async def completions(self, call: web.Request) -> web.StreamResponse:
        number, self.seen = self.seen, self.seen + 1
        reply = web.StreamResponse(headers={"x-orcinus-request": f"r{number % 3}"})
        await reply.prepare(call)
        await reply.write(event("one"))
        endings = (event(" two") + b"data: [DONE]\n\n", b"", b'data: {"error": {"message": "gone"}}\n\n')
        await reply.write(endings[number % 3])
        return reply

    async def resume(self, call: web.Request) -> web.StreamResponse:
        self.resumed.append((call.match_info["id"], call.headers["Last-Event-ID"]))
        if call.match_info["id"] == "r2":
            return web.Response(status=404, text="not found")
        return web.Response(body=event(" two") + b"data: [DONE]\n\n", content_type="text/event-stream")


@pytest.fixture
async def answers() -> Any:
    """The server and its address."""
    made = Answers()
    app = web.Application()
    app.router.add_post("/v1/completions", made.completions)
    app.router.add_get("/v1/requests/{id}/stream", made.resume)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield made, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_broken_streams_are_told_from_whole_ones_and_go_on(answers: Any) -> None:
    made, url = answers
    async with kill.connected() as session:
        load = Load(FLOAT32, url, session)
        load.streams = load.streams[:6]
        async with asyncio.timeout(60):
            streams = await load.run()
            whole = [stream for stream in streams if not stream.error]
            assert [stream.text for stream in whole] == ["one two"] * 2
            broken = sorted(stream.error.split(" ", 1)[1][:20] for stream in streams if stream.error)
            assert broken == ["error event: {'messa"] * 2 + ["the stream ended aft"] * 2
            await load.go_on()
    assert sorted(made.resumed) == [("r1", "r:0")] * 2 + [("r2", "r:0")] * 2
    assert sorted(stream.text for stream in streams if not stream.error) == ["one two"] * 4
    assert all("http 404" in stream.error for stream in streams if stream.error)
