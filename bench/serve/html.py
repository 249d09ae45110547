"""The report of `orcinus bench serve --html`: one file with everything in it, for readers and tickets.

Called by `bench/serve/main.py`. No script, nothing is fetched; text from the server is escaped.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.serve.plots import cdf
from bench.serve.report import load_name, shown
from bench.serve.stats import Run

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1b2330;background:#fff}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin-top:2rem}p.about{color:#566174;margin:.2rem 0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}div.wide{overflow-x:auto}
th,td{padding:.35rem .6rem;text-align:right;border-bottom:1px solid #e3e7ee}
th:first-child,td:first-child{text-align:left}
figure{margin:1rem 0;overflow-x:auto}svg{max-width:100%;height:auto;background:#fff}
.warning{background:#fff4d6;border-left:4px solid #d99a00;padding:.5rem .8rem;margin:.4rem 0}code{font-size:.9em}
@media(prefers-color-scheme:dark){body{color:#dde3ec;background:#14181f}p.about{color:#9aa6b8}th,td{border-color:#2b3340}
.warning{background:#3a2f10}}
"""
COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("finished", lambda run: f"{run['finished']} of {run['requests']}"),
    ("output tok/s", lambda run: shown(run["output_tok_s"])),
    ("requests/s", lambda run: shown(run["request_rps"])),
    ("goodput, requests/s", lambda run: shown(run["goodput_rps"])),
    *(
        (f"{title} {p}, ms", lambda run, name=name, p=p: shown(run[name][p]))
        for name, title in (("ttft_ms", "TTFT"), ("tbt_ms", "TBT"), ("e2e_ms", "end to end"))
        for p in ("p50", "p99")
    ),
)


def report(result: dict[str, Any], runs: Sequence[Run]) -> str:
    """Return an HTML page. result: the JSON object of the command."""
    first, machine = runs[0].result, result["machine"]
    slo = first["slo_ms"]
    about = [
        f"{first['url']}, model {first['model']}, {result['date']}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}; load before "
        f"{machine['load_1m_before']}; commit {result['commit']}",
        f"Goodput counts requests with a first token within {slo['ttft']:g} ms and the P99 of their gaps within "
        f"{slo['gap']:g} ms. Latencies count from when a request was due.",
    ]
    warnings = [f"{load_name(run.result)}: {text}" for run in runs for text in run.result["warnings"]]
    pictures = [_spread(runs)]
    if len(runs) > 1:
        pictures.insert(0, _curves(runs))
    title = f"Load test of {first['model']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="about">{escape(line)}</p>' for line in about),
        f'<p class="about"><code>{escape(result["command"])}</code></p>',
        *(f'<p class="warning">{escape(line)}</p>' for line in warnings),
        *(f"<figure>{picture}</figure>" for picture in pictures),
        f"<h2>Figures</h2><div class=wide>{_table(runs)}</div>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f"<!doctype html><html lang=en><head>{head}<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _table(runs: Sequence[Run]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("load", *(name for name, _ in COLUMNS)))
    rows = []
    for run in runs:
        cells = [load_name(run.result), *(cell(run.result) for _, cell in COLUMNS)]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _curves(runs: Sequence[Run]) -> str:
    """Plot throughput against load, and both latencies against throughput."""
    results = [run.result for run in runs]
    load = [run["rate"] or run["concurrency"] for run in results]
    unit = "requests a second" if results[0]["loop"] == "open" else "requests at a time"
    rate = [_number(run["output_tok_s"]) for run in results]
    figure = Figure(figsize=(13, 4), layout="constrained")
    first, *latencies = figure.subplots(1, 3)
    first.plot(load, rate, marker="o", label="output tok/s")
    first.set_xlabel(f"load, {unit}")
    first.set_ylabel("output tokens a second")
    right = first.twinx()
    right.plot(load, [_number(run["goodput_rps"]) for run in results], marker="s", color="tab:green", label="goodput")
    right.set_ylabel("goodput, requests a second", color="tab:green")
    right.set_ylim(bottom=0)
    _finish(first, "Throughput and goodput")
    for axes, (name, title) in zip(
        latencies, (("ttft_ms", "Time to first token"), ("tbt_ms", "Time between tokens")), strict=True
    ):
        for p in ("p50", "p99"):
            axes.plot(rate, [_number(run[name][p]) for run in results], marker="o", label=p)
        axes.set_xlabel("output tokens a second")
        axes.set_ylabel("milliseconds")
        axes.legend()
        _finish(axes, title)
    return _svg(figure)


def _spread(runs: Sequence[Run]) -> str:
    figure = Figure(figsize=(13, 4), layout="constrained")
    ttft, tbt = figure.subplots(1, 2)
    for run in runs:
        done = [record for record in run.records if record.finished]
        gaps = np.concatenate([record.gaps_s() for record in done]) if done else np.zeros(0)
        cdf(ttft, np.asarray([record.ttft_s() for record in done]), "Time to first token", load_name(run.result))
        cdf(tbt, gaps, "Time between tokens", load_name(run.result))
    for axes in (ttft, tbt):  # a tenth of the gaps is a few us and the worst may be seconds
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(left=0)
        if axes.lines:  # none of a run without an answer
            axes.legend()
    return _svg(figure)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _svg(figure: Figure) -> str:
    """Return an SVG without the XML head, to embed in a page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]
