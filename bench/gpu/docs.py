"""The table of README.md about the GPU: goals, and beside them what `bench.gpu` measured, if it ever could.

    python -m bench.gpu docs              rewrites the table from the committed result, or says that there is none
    python -m bench.gpu docs RESULT.json  keeps that result first

A test fails when table and result differ.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import ROOT

RESULT = ROOT / "bench" / "results" / "gpu.json"
README = ROOT / "README.md"
NOT_MEASURED = "not measured"
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """`measured` of a result is the figure as text; it raises LookupError where the result has none."""

    what: str
    goal: str
    measured: Callable[[Result], str]


def table(result: Result | None) -> str:
    """One row a goal; without a result, what is wanted."""
    if result is None:
        about = (
            "Not measured: no GPU was at hand. `python -m bench.gpu --out DIR` measures it, in eight minutes at most."
        )
    else:
        device = result["parts"]["probes"]["device"]["name"]
        about = f"{device}, {result['date'][:10]}, commit {result['commit']}, `{result['command']}`."
    rows = ["| what | goal | measured |", "|---|---|---|"]
    rows += [f"| {goal.what} | {goal.goal} | {_cell(goal, result)} |" for goal in GOALS]
    return "\n".join([about, "", *rows])


def main(argv: Sequence[str]) -> int:
    """Rewrites the table; 2 for a result that cannot be read or is of no GPU."""
    if argv:
        try:
            result = json.loads(Path(argv[0]).read_text())
        except (OSError, ValueError) as error:
            print(f"error: {argv[0]}: {error}", file=sys.stderr)
            return 2
        if result.get("device") != "cuda" or result.get("quick"):
            print(f"error: {argv[0]} is no result of a whole run on a GPU", file=sys.stderr)
            return 2
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    README.write_text(fill(README.read_text(), committed()))
    return 0


def committed() -> Result | None:
    """The result that is kept, if there is one."""
    result: Result | None = json.loads(RESULT.read_text()) if RESULT.is_file() else None
    return result


def fill(page: str, result: Result | None) -> str:
    """The page with the table made anew. Raises ValueError when the marker is missing."""
    text = f"<!-- bench: gpu -->\n{table(result)}\n<!-- end -->"
    filled, count = re.subn(r"<!-- bench: gpu -->.*?<!-- end -->", lambda _: text, page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{count} places for the GPU's table, expected one")
    return filled


def _cell(goal: Goal, result: Result | None) -> str:
    if result is None:
        return NOT_MEASURED
    try:
        return goal.measured(result)
    except (LookupError, TypeError, ZeroDivisionError):
        return NOT_MEASURED


def _row(result: Result, part: str, op: str, shape: str) -> dict[str, Any]:
    """A row with a figure. Raises LookupError."""
    for row in result["parts"][part]["rows"]:
        if row["op"] == op and row["shape"].startswith(shape) and row["us"] is not None:
            found: dict[str, Any] = row
            return found
    raise LookupError(f"{op} {shape}")


def _of_floor(part: str, op: str, shape: str) -> Callable[[Result], str]:
    def say(result: Result) -> str:
        row = _row(result, part, op, shape)
        return f"{row['of_floor']:.2f} ({row['us']:,.1f} us)"

    return say


def _of_multiplying(shape: str) -> Callable[[Result], str]:
    def say(result: Result) -> str:
        row = _row(result, "prefill", "attention", shape)
        rate = result["parts"]["probes"]["peaks"]["tflop_s"][row["dtype"]]
        return f"{row['tflop_s'] / rate:.2f} ({row['tflop_s']:,.0f} TFLOP/s)"

    return say


def _sampler(result: Result) -> str:
    return f"{_row(result, 'sampler', 'sample', '256 x 128256, top-p')['us']:,.1f} us"


def _layouts(result: Result) -> str:
    ours, other = (_row(result, "decode", op, "64 x 1024")["us"] for op in ("attention", "attention, layer-major"))
    return f"{ours / other:.2f}"


def _step(result: Result) -> dict[str, Any]:
    for row in result["parts"]["engine"]["steps"]:
        if row["case"] == "decode-64" and row["lookahead"] == 1:
            found: dict[str, Any] = row
            return found
    raise LookupError("decode-64")


def _transformers(result: Result) -> str:
    ms = result["parts"]["transformers"]["step_us"] / 1000
    return f"{ms:.2f} ms, ours {_step(result)['step_us'] / 1000:.2f} ms"


def _checks(result: Result) -> str:
    part = result["parts"]["checks"]
    return f"{part['wrong']} wrong of {len(part['checks'])}"


def _sanitizers(result: Result) -> str:
    return ", ".join(
        f"{run['name']} {'clean' if run['exit'] == 0 else 'NOT clean'}"
        for run in result["parts"]["sanitizers"]["sanitizers"]
    )


GOALS = (
    Goal("kernels against float64, cases", "none wrong", _checks),
    Goal(
        "decode attention, 64 sequences x 1,024, of copy bandwidth",
        ">= 0.85",
        _of_floor("decode", "attention", "64 x 1024"),
    ),
    Goal("decode attention, 8 x 32,768, of copy bandwidth", ">= 0.85", _of_floor("decode", "attention", "8 x 32768")),
    Goal("the same, block-major time / layer-major time, 64 x 1,024", "<= 1.03", _layouts),
    Goal("prefill attention, 8,192 tokens, of the rate of matrix products", ">= 0.40", _of_multiplying("1 x 8192 of")),
    Goal("sampler, 256 rows x 128,256, top-p", "< 80 us", _sampler),
    Goal(
        "rotary embedding and cache write, 4,096 rows, of bandwidth",
        ">= 0.85",
        _of_floor("rows", "rope_and_write", "4096 x"),
    ),
    Goal("residual and norm, 4,096 rows, of bandwidth", ">= 0.85", _of_floor("rows", "add_norm", "4096 x")),
    Goal(
        "swap out, 256 scattered blocks, of a plain pinned copy", ">= 0.90", _of_floor("swap", "copy_out", "256 blocks")
    ),
    Goal(
        "8B-shaped model, decode step at 64 x 1,024, of (weights + KV) / bandwidth",
        ">= 0.80",
        lambda result: f"{_step(result)['of_floor']:.2f} ({_step(result)['step_us'] / 1000:.2f} ms)",
    ),
    Goal(
        "device idle between these steps at lookahead 1",
        "< 3 %",
        lambda result: f"{100 * _step(result)['idle_share']:.1f} %",
    ),
    Goal("the same step, continuous batching of transformers", "-", _transformers),
    Goal("compute-sanitizer", "clean", _sanitizers),
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
