"""Every operation of the forward pass beside the limits of the machine and beside torch's.

`orcinus bench kernels [--device cpu|cuda|emulator] [--json]`. Bandwidth and the rate of matrix products are measured
first; each row is checked against float64 in the same run. The emulator's times mean nothing: it shows that this works.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bench.kernels import attention as kernels_attention
from bench.kernels import kv as kernels_kv
from bench.kernels import rows as kernels_rows
from bench.kernels import sampling as kernels_sampling
from bench.kernels.backends import DEVICES, TYPES, Backend, Peaks, opened
from bench.kernels.case import Bench, Maker, run
from bench.kernels.shapes import CPU, GPU, QUICK, Plan
from bench.result import provenance
from shared.command_line.arguments import Parser
from shared.errors import OrcinusError

HEAD = ("operation", "size", "type", "us", "GB/s", "TFLOP/s", "of floor", "error", "beside it, us")


PACKAGES = ("orcinus", "torch", "numpy", "cupy-cuda13x")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 after a measurement, 1 if a kernel was wrong or failed, 2 for wrong use."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        options = _parser().parse_args(given)
    except SystemExit as stop:
        return int(stop.code or 0)
    if options.threads:
        torch.set_num_threads(options.threads)
    facts = provenance(["orcinus", "bench", "kernels", *given], *PACKAGES)
    try:
        backend = opened(options.device, options.repeats, facts["machine"]["cpu"])
        peaks = backend.peaks()
    except OrcinusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = _measure(options, backend, peaks) | facts | {"note": options.note, "instructions": backend.instructions}
    print(json.dumps(found) if options.json else table(found))
    return 1 if any(row["us"] is None for row in found["rows"]) else 0


def makers(plan: Plan, backend: Backend) -> list[Maker]:
    """Yield all cases of a plan."""
    return [
        *kernels_attention.decodes(plan),
        *kernels_attention.prompts(plan),
        *kernels_rows.rows(plan, backend.clock.ops.group_formats),
        *kernels_sampling.samplers(plan),
        *kernels_kv.copies(plan, backend.plain_copy),
    ]


def _measure(options: argparse.Namespace, backend: Backend, peaks: Peaks) -> dict[str, Any]:
    plan = QUICK if options.quick or options.device == "emulator" else {"cpu": CPU, "cuda": GPU}[options.device]
    wanted = [maker for maker in makers(plan, backend) if not options.ops or maker[0].split()[0] in options.ops]
    rows = []
    with torch.inference_mode():
        for dtype in options.dtypes or TYPES[options.device][:1]:
            bench = Bench(backend.clock, peaks, plan, getattr(torch, dtype))
            rows += [row.as_dict() for row in run(bench, wanted, partial(_say_case, dtype))]
    return {"device": options.device, "model": plan.model.name, "peaks": peaks.as_dict(), "rows": rows}


def _parser() -> Parser:
    parser = Parser("orcinus bench kernels", (__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="backend")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16", "float16"), help="default the first")
    parser.add_argument("--ops", nargs="+", metavar="OP", help="only these operations, as the first column names them")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: every core")
    parser.add_argument("--repeats", type=int, default=9, help="of a case; the median is given")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work?")
    parser.add_argument("--note", default="", help="kept in the JSON: what else the machine was doing")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser


def _say_case(dtype: str, name: str) -> None:
    _say(f"{name}, {dtype}")


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr)


def table(found: Mapping[str, Any]) -> str:
    """Return a line about the machine, then one for each row."""
    peaks = found["peaks"]
    rates = ", ".join(f"{rate:.3g} TFLOP/s {name}" for name, rate in peaks["tflop_s"].items())
    lines = [
        f"{peaks['device']}: memory is copied at {peaks['copy_gb_s']:,.0f} GB/s, read at {peaks['read_gb_s']:,.0f}; "
        f"{rates}",
        *([found["instructions"]] if found["instructions"] else []),
    ]
    return "\n".join([*lines, *columns([HEAD, *map(cells, found["rows"])])])


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one row of the table."""
    beside = [f"{name} {number(us)}" for name, us in row["peers_us"].items()]
    return (
        row["op"],
        row["shape"],
        row["dtype"],
        number(row["us"]),
        number(row["gb_s"]),
        number(row["tflop_s"]),
        "-" if row["of_floor"] is None else f"{row['of_floor']:.2f}",
        "-" if row["error"] is None else f"{row['error']:.1e}",
        "; ".join([*beside, *([row["said"]] if row["said"] else [])]),
    )


def number(value: float | None) -> str:
    """Return a number with three digits that matter."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the rows as aligned columns; all but names and the last column to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell if i == last else cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
