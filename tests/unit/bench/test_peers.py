"""The comparison with other servers: classes, medians, ratios, tables, command lines, the model's vocabulary."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench import render
from bench.peers import client, install, model, plots, servers, table
from bench.peers.servers import EXACT, INT8, OURS, REDUCED, SERVERS, Server
from bench.serve.stats import Record

bench_main = importlib.import_module("bench.peers.__main__")


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
            "settings": {"rounds": 3},
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


def test_table_names_each_server_once_with_range_answers_and_error() -> None:
    text = render.section("peers", "classes", {"peers": THREE})
    exact, reduced = (part.split("\n\n")[1] for part in text.split("## ")[1:3])
    lines = exact.splitlines()
    assert lines[2] == "| **ours** | 16/16 | - | 1,100 (900-1,200) | - | - / - | 20.0 / 40.0 | 5.00 / 10.0 | - | - |"
    assert [line.split(" | ")[0] for line in lines[3:]] == ["| fast", "| slow"]
    (broken,) = [line for line in reduced.splitlines() if "broken" in line]
    assert r"does not run: wheel \| not found" in broken
    assert {line.replace(r"\|", "").count("|") for line in [*lines, broken]} == {11}


def test_the_page_shows_every_server_and_the_chart_is_drawn(tmp_path: Path) -> None:
    text = "".join(render.section("peers", part, {"peers": THREE}) for part in ("run", "classes", "servers"))
    assert all(one["name"] in text for one in THREE["rows"])
    assert "commit abc" in text
    plots.chart(THREE, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes()[:4] == b"\x89PNG"


def test_the_vocabulary_is_full_and_every_word_is_one_token() -> None:
    vocab, merges = model.vocabulary()
    assert sorted(vocab.values()) == list(range(model.VOCAB_SIZE))
    assert len(set(model.byte_letters())) == 256
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for tokens in (1, 128, 1500):
        text = model.prompt(tokens, 3, 1, 4)
        ids = tokenizer.encode(text).ids
        assert len(ids) == tokens
        assert tokenizer.decode(ids) == text


def named(name: str) -> Server:
    return next(server for server in SERVERS if server.name == name)


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_every_server_is_given_its_port_and_has_a_recipe(server: Server) -> None:
    for name in model.SHAPES:
        assert "4321" in server.command(name, 4321, Path("/scratch"))
        assert any(name in word for word in server.command(name, 4321, Path("/scratch")))
        assert set(server.recipes(name)) <= set(install.RECIPES)


def test_end_of_text_is_ignored_in_way_of_each_server() -> None:
    fields = servers.request(named("vllm float32"), "p", 64, stream=True)
    assert fields["ignore_eos"] is True
    assert fields["stream_options"] == {"include_usage": True}
    assert servers.request(named("llama.cpp F16"), "p", 64, stream=False)["cache_prompt"] is False


def test_chosen_peers_run_beside_ours_and_new_name_is_refused() -> None:
    names = [server.name for server in servers.chosen(["vllm"], [EXACT])]
    assert names == ["vllm float32", "orcinus float32", "orcinus float32, TBT 30 ms"]
    assert servers.chosen([], []) == list(SERVERS)
    with pytest.raises(KeyError, match="vlm"):
        servers.chosen(["vlm"], [])


def test_what_a_server_inherits_holds_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ORCINUS_DTYPE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    kept = servers.environment(named("vllm float32"))
    assert not {"ORCINUS_DTYPE", "OMP_NUM_THREADS"} & set(kept) and kept["VLLM_CPU_KVCACHE_SPACE"] == "1"


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


@pytest.mark.parametrize("argv", [["--peers", "vlm"], ["run", "vllm"], ["install", "vlm"], ["--quik"]])
def test_wrong_use_is_told_with_exit_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_main.main(argv)
    assert stopped.value.code == 2
