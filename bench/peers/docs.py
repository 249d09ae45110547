"""Writes docs/peers.md and its chart from bench/results/peers.json. Called by `python -m bench.peers [docs]`.

Everything measured on the page comes from the result; tests/unit/bench/test_peers.py compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers import table
from bench.peers.install import ROOT
from bench.peers.servers import CLASSES, OURS

RESULT = ROOT / "bench" / "results" / "peers.json"
PAGE = ROOT / "docs" / "peers.md"
CHART = ROOT / "docs" / "img" / "peers.png"
OURS_COLOUR, THEIR_COLOURS = "#d1495b", ("#30638e", "#5b8e7d", "#8a7aa8", "#a98467", "#7a8b99", "#b7b7a4")
Row = dict[str, Any]

INTRODUCTION = """\
# Other servers

Orcinus and other servers, the same model, prompts and lengths, on one machine in one run. Written by
`python -m bench.peers docs`. Figures of different runs or machines must not be compared with each other; ratios of
one run may.
"""
UNMEASURED = "No whole run on a quiet machine has been kept yet.\n"

HOW = """\
## How it is run

    make peers                                   installs what is missing, measures (half an hour), writes this page
    make peers-quick                             one short round of what is installed, written nowhere
    python -m bench.peers install [NAME ...]     only installs: `model export openvino llama transformers vllm`
    python -m bench.peers --peers vllm,openvino  Orcinus and these; also --only-exact, --only-reduced, --rounds, --json

Every peer has an environment of its own under `.peers/` (ignored by git, about 8 GB), pinned in
`bench/peers/install.py` together with the repairs that some need. llama.cpp's server is built from the sources
inside the llama-cpp-python package. A peer that does not install or does not start is a row with its error. Where
pip's settings name no index with CPU builds of torch, give one with `--torch-index`.

- **Model**: a Llama of 32 million parameters with random weights, made by `bench/peers/model.py` from a seed: hidden
  512, 8 layers, 8 heads, 4 KV heads, intermediate 1408, vocabulary 8192, every matrix times two so that the best token
  stands clear of the next. The vocabulary is a formula: bytes, syllables, words of two syllables.
- **Prompts** are made of words that are one token each, so that a text has the same number of tokens for every
  server. No prompt comes twice in a run, and prefix caches are off where a server has one.
- **Rounds** alternate: every server is started, measured at 1, 8 and 32 requests at a time (closed loop; prompt 128,
  output 64, greedy, end of text ignored), then under long prompts, and stopped, before the next one starts; then all
  again. A figure is the median of the rounds with its range; of two, the mean.
- **Long-prompt mix**: 8 streams (prompt 128, output 128, the next when one ends) decode for 12 s while a prompt of
  1,500 tokens arrives every 1.5 s. TBT is that of the 8 streams; tokens that arrive in one event are 0 apart.
- **Client**: one for all, that of `orcinus bench serve`, streaming, on the same machine, a new connection for every
  request. Tokens are counted by the server's usage.
- **Settings** stand in `bench/peers/servers.py`. Token budgets of a step are each server's default, but for
  transformers, whose cache and budget are bounded, since it would take most of the memory. vLLM computes on every
  core: by default it keeps one for its front, which measured slower on two.
- **CPU seconds** are those of all of the server's processes; for Orcinus that is Redis, gateway, scheduler, worker and
  launcher. OpenVINO GenAI has no HTTP server of its own on the package index: its engine stands behind a thin front
  of ours.
- **Classes**: a server counts as exact only if all of 16 prompts (64 tokens each, 8 at a time) give the text that
  transformers gives in float32; else it is compared among those of reduced precision.
"""


def page(result: Row | None) -> str:
    """The whole text of docs/peers.md; without a result what there is to say before the first one."""
    if result is None:
        return "\n".join([INTRODUCTION, UNMEASURED, HOW])
    machine = result["machine"]
    parts = [
        INTRODUCTION,
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}; "
        f"{result['date'][:10]}, commit {result['commit']}, {result['settings']['rounds']} rounds; "
        f"load before the run {machine['load_1m_before']}. `{result['command']}`; every round's figures are in "
        "[`bench/results/peers.json`](../bench/results/peers.json).\n",
        "## Orcinus against the best of each class\n",
        table.ratio_table(result["ratios"]) + "\n",
        "![output tokens a second](img/peers.png)\n",
    ]
    for precision, meaning in CLASSES.items():
        if any(row["class"] == precision for row in result["rows"]):
            parts += [f"## {precision.capitalize()}: {meaning}\n", table.closed_table(result["rows"], precision) + "\n"]
            parts += ["With the long-prompt mix:\n", table.mix_table(result["rows"], precision) + "\n"]
    parts += ["## What was compared\n", about(result["rows"]) + "\n", disturbances(result["rows"]) + "\n", HOW]
    return "\n".join(parts)


def about(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["name"],
            row["about"],
            ", ".join(f"{name} {version}" for name, version in row["versions"].items()) or "-",
            f"{row['rounds'][0]['start_s']:.0f} s" if row["rounds"] else "-",
            row["error"] or "-",
        ]
        for row in rows
    ]
    return table.markdown(("server", "how it runs", "versions", "start", "error"), lines)


def disturbances(rows: Sequence[Row]) -> str:
    found = table.disturbed(rows)
    if not found:
        return f"Other programs used at most {table.BUSY_CORES} cores during every measurement."
    return (
        f"Other programs used more than {table.BUSY_CORES} cores during these measurements, which count only where no "
        "round of the same was quiet: " + "; ".join(found) + "."
    )


def kept() -> Row | None:
    """The committed result; None before the first."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else None


def write(result: Row | None) -> None:
    PAGE.write_text(page(result))
    if result is not None:
        chart(result, CHART)


def chart(result: Row, path: Path) -> None:
    """Output tokens a second at 1, 8 and 32, one panel a class; whiskers are the range of the rounds."""
    from matplotlib.figure import Figure

    classes = [name for name in CLASSES if any(row["class"] == name and row["medians"] for row in result["rows"])]
    figure = Figure(figsize=(6 * len(classes), 4.2), layout="constrained")
    for axes, precision in zip(figure.subplots(1, len(classes), squeeze=False)[0], classes, strict=True):
        members = [row for row in result["rows"] if row["class"] == precision and row["medians"]]
        width = 0.8 / len(members)
        colours = iter(THEIR_COLOURS * 3)
        for place, row in enumerate(members):
            bars = [
                (spot, found["output_tok_s"])
                for spot, cell in enumerate(("c1", "c8", "c32"))
                if (found := table.in_cell(row, cell))
            ]
            heights = [figures["median"] for _, figures in bars]
            spans = [[f["median"] - f["low"] for _, f in bars], [f["high"] - f["median"] for _, f in bars]]
            axes.bar(
                [spot + (place - (len(members) - 1) / 2) * width for spot, _ in bars],
                heights,
                width * 0.92,
                yerr=spans,
                capsize=2,
                label=row["name"],
                color=OURS_COLOUR if row["peer"] == OURS else next(colours),
            )
        axes.set_xticks(range(3), ["1", "8", "32"])
        axes.set_xlabel("requests at a time")
        axes.set_ylabel("output tokens a second")
        axes.set_title(f"{precision}: {CLASSES[precision]}", fontsize=9)
        axes.legend(fontsize=7, frameon=False)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)
