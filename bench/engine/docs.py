"""The tables of docs/cpu.md, made from bench/results/engine.json.

    python -m bench.engine.docs                      rewrites the tables from the committed result
    python -m bench.engine.docs --note TEXT RUN ...  first gathers outputs of `orcinus bench engine --json` into it

tests/unit/test_docs.py fails when tables and result differ.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench" / "results" / "engine.json"
PAGE = ROOT / "docs" / "cpu.md"
OPERATIONS = ("linear", "attention", "rope", "norm", "gated", "embed", "select")


def name(run: dict[str, Any]) -> str:
    """What tells the runs apart."""
    model = run["model"]
    return f"{model['name']}, {model['dtype']}" + (", int8 weights" if model["quantize"] == "int8" else "")


def times(result: dict[str, Any]) -> str:
    """One row a case of each run: the iteration beside its floor and beside torch's matrices alone."""
    rows = [
        "| model | iteration | ms | floor, ms | x floor | torch's matrices alone, ms |",
        "|---|---|--:|--:|--:|--:|",
    ]
    rows += [
        f"| {name(run)} | {case['case']} | {case['total_ms']:.2f} | {case['floor_ms']:.2f} | {case['ratio']:.2f} | "
        f"{case['torch_linear_ms']:.2f} |"
        for run in result["runs"]
        for case in run["results"]
    ]
    return "\n".join(rows)


def profile(result: dict[str, Any]) -> str:
    """One row a case of the first run: microseconds by operation."""
    run = result["runs"][0]
    rows = [
        "| iteration | " + " | ".join(OPERATIONS) + " | sampling | the rest |",
        "|---|" + "--:|" * (len(OPERATIONS) + 2),
    ]
    for case in run["results"]:
        spent = case["profile_us"]
        known = [spent.get(operation, 0.0) for operation in OPERATIONS]
        sample = 1000 * case["sample_ms"]
        rest = max(0.0, 1000 * case["total_ms"] - sum(spent.values()) - sample)
        rows.append(f"| {case['case']} | " + " | ".join(f"{us:,.0f}" for us in (*known, sample, rest)) + " |")
    return "\n".join(rows)


def floor(result: dict[str, Any]) -> str:
    """What the machine itself did during the first run."""
    run = result["runs"][0]
    found = run["floor"]
    return (
        f"Measured {run['date'][:10]}, {run['machine']['cpu']}, {found['threads']} threads: memory is read at "
        f"{found['read_gb_s']:.0f} GB/s, float32 multiplied at {found['float32_gflop_s']:.0f} GFLOP/s."
    )


PARTS = {"engine-floor": floor, "engine-times": times, "engine-profile": profile}


def fill(page: str, result: dict[str, Any]) -> str:
    """The page with every marked part made anew. Raises ValueError when a marker is missing."""
    for part, make in PARTS.items():
        pattern = re.compile(rf"(<!-- bench: {part} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = make(result)
        page, count = pattern.subn(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page)
        if count != 1:
            raise ValueError(f"{count} places for {part} in {PAGE.name}, expected one")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.docs", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="outputs of orcinus bench engine --json")
    parser.add_argument("--note", default="", help="what else the machine was doing")
    options = parser.parse_args()
    if options.runs:
        runs = [json.loads(path.read_text()) for path in options.runs]
        RESULT.write_text(json.dumps({"note": options.note, "runs": runs}, indent=1) + "\n")
    PAGE.write_text(fill(PAGE.read_text(), json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
