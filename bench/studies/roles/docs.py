"""The measured part of docs/roles.md, from bench/results/roles.json."""

from __future__ import annotations

from typing import Any

from bench.machine import ROOT
from bench.studies.policies.docs import replaced

PAGE = ROOT / "docs" / "roles.md"
Row = dict[str, Any]


def render(results: Row) -> None:
    """Writes the section "measured" of the page."""
    rows = results["results"]
    parts = [
        f"`{results['command']}` (`bench/results/roles.json`, {results['date']}): the scheduler's own core on a "
        f"virtual clock, {results['shape']} on {results['device']}s by data sheet, {rows[0]['finished']} requests a "
        "run, rates over the time until the last one has ended. `load` is the part of what the replicas could serve if "
        "prompts ran alone and outputs in steps of 64. Every request tells a TTFT limit of 2 s and a TBT limit of 100 "
        "ms; goodput counts requests that kept both. Times in ms: P50 / P99. The second token is what the hand-over "
        "delays. " + results["note"],
    ]
    cases: dict[tuple[str, float, int], list[Row]] = {}
    for row in rows:
        if row["limits"]:  # without, the scheduler takes 100 ms: the same figures
            cases.setdefault((row["mix"], row["load"], row["replicas"]), []).append(row)
    previous = None
    for (mix, load, replicas), group in cases.items():
        title = f"{mix}, {replicas} replicas"
        if title != previous:
            parts.append(
                f"### {title[0].upper()}{title[1:]}\n\n| load | replicas | TTFT | TBT | second token | goodput/s | "
                "output tokens/s | blocks handed over |\n|---|---|---|---|---|---|---|---|"
            )
        previous = title
        parts[-1] += "".join("\n" + _line(load, row, group) for row in group)
    parts.append(_outcomes(results))
    PAGE.write_text(replaced(PAGE.read_text(), "measured", "\n\n".join(parts)))


def _line(load: float, row: Row, group: list[Row]) -> str:
    best = max(other["goodput_rps"] for other in group)
    goodput = f"{row['goodput_rps']:.2f}"
    cells = [
        f"{load:g}",
        row["cast"],
        _pair(row["ttft_ms"]),
        _pair(row["tbt_ms"]),
        _pair(row["second_token_ms"]),
        f"**{goodput}**" if row["goodput_rps"] == best else goodput,
        f"{row['output_tok_s']:,.0f}",
        f"{row['handed_over_blocks']:,}",
    ]
    return "| " + " | ".join(cells) + " |"


def _pair(times: Row) -> str:
    return " / ".join(f"{times[p]:,.0f}" if times[p] >= 100 else f"{times[p]:.1f}" for p in ("p50", "p99"))


def _outcomes(results: Row) -> str:
    lines = [
        f"### Predicted before the first run ({results['predicted_at']}), and what came",
        "",
        "| predicted | came |",
        "|---|---|",
    ]
    lines += [f"| {said} | {came} |" for said, came in zip(results["predicted"], results["came"], strict=True)]
    return "\n".join(lines)
