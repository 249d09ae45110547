"""The table of docs/benchmarks.md about one gateway, made from bench/results/gateway.json.

    python -m bench.gateway.docs

tests/unit/test_docs.py fails when table and result differ.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench" / "results" / "gateway.json"
PAGE = ROOT / "docs" / "benchmarks.md"


def table(result: dict[str, Any]) -> str:
    """One row a case, and what has to be known about it."""
    rows = [
        "| case | tokens/s | events/s | CPU us a token | wait p50 / p99, ms | goal |",
        "|---|---|---|---|---|---|",
    ]
    for line in result["results"]:
        waits = f"{line['wait_p50_ms']:.1f} / {line['wait_p99_ms']:.1f}" if "wait_p50_ms" in line else ""
        rows.append(
            f"| {line['case']}, {line['endpoint']} | {line['tokens_s']:,} | {line['events_s']:,} | "
            f"{line['cpu_us_per_token']:.1f} | {waits} | {_goal(line, result['goals'])} |"
        )
    about = f"{result['date'][:10]}, commit `{result['commit']}`, {result['machine']['cpu']}."
    before = f" Expected: {result['prediction']}." if result["prediction"] else ""
    return "\n".join([*rows, "", about + before + (f" Note: {result['note']}." if result["note"] else "")])


def _goal(line: dict[str, Any], goals: dict[str, float]) -> str:
    if line["case"] == "saturation":
        return f"{goals['tokens_s']:,.0f} tokens/s: {'met' if line['tokens_s'] >= goals['tokens_s'] else 'missed'}"
    return f"p50 of {goals['wait_p50_ms']:g} ms: {'met' if line['wait_p50_ms'] <= goals['wait_p50_ms'] else 'missed'}"


def fill(page: str, result: dict[str, Any]) -> str:
    """The page with the table of this result."""
    block = f"<!-- bench: gateway -->\n{table(result)}\n<!-- end -->"
    return re.sub(r"<!-- bench: gateway -->.*?<!-- end -->", lambda _: block, page, flags=re.DOTALL)


def main() -> None:
    PAGE.write_text(fill(PAGE.read_text(), json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
