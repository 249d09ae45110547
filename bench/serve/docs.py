"""The table of measured figures in README.md, made from bench/results/serve-demo.json.

    python -m bench.serve.docs                              rewrites the table from the committed result
    python -m bench.serve.docs --note TEXT RUN.json ...     first gathers the outputs of several runs into that result

tests/unit/test_docs.py fails when table and result differ.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench" / "results" / "serve-demo.json"
README = ROOT / "README.md"


def load_name(run: dict[str, Any]) -> str:
    """`8 at a time`, `2 a second, Poisson`."""
    if run["loop"] == "closed":
        return f"{run['concurrency']} at a time"
    return f"{run['rate']:g} a second, Poisson"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def table(result: dict[str, Any]) -> str:
    """One row a run: load, output tokens a second, and p50 / p99 of TTFT and TBT in milliseconds."""
    rows = [
        "| requests | finished | output tok/s | goodput, requests/s | TTFT p50 / p99, ms | TBT p50 / p99, ms |",
        "|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        waits = [f"{number(run[name]['p50'])} / {number(run[name]['p99'])}" for name in ("ttft_ms", "tbt_ms")]
        cells = [
            load_name(run),
            f"{run['finished']} of {run['requests']}",
            number(run["output_tok_s"]),
            f"{run['goodput_rps']:.2f}" if run["goodput_rps"] is not None else "-",
            *waits,
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--note", default="", help="what else has to be known about how this was measured")
    parser.add_argument("runs", nargs="*", type=Path, help="files written by `orcinus bench serve --output`")
    options = parser.parse_args()
    if options.runs:
        gathered = {"note": options.note, "runs": [json.loads(path.read_text()) for path in options.runs]}
        RESULT.write_text(json.dumps(gathered, indent=1) + "\n")
    block = f"<!-- bench: serve-demo -->\n{table(json.loads(RESULT.read_text()))}\n<!-- end -->"
    text = re.sub(r"<!-- bench: serve-demo -->.*?<!-- end -->", lambda _: block, README.read_text(), flags=re.DOTALL)
    README.write_text(text)


if __name__ == "__main__":
    main()
