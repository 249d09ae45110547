"""The cost of engine iterations beside the machine's limits: decode at several batch sizes, prefill, a mix.

`orcinus bench engine [--profile] [--json]`. In process: no Redis, no gRPC, no scheduler. Floors: weights and KV that
an iteration must read over the measured memory bandwidth, and its multiplications over the measured peak; whichever is
longer. Beside them, the time of torch alone for the same matrices.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.engine.adapters import CASES as ADAPTED
from bench.engine.adapters import beside, stored
from bench.engine.cases import CASES, Case, TorchMatrices, measure
from bench.kernels.backends import opened
from bench.kernels.clock import Clock
from bench.kernels.floor import Floor, machine_floor
from bench.result import provenance
from kernels.ops import MAX_CODE
from services.worker.engine import Engine
from services.worker.models.config import load_config
from services.worker.quantization import METHODS
from shared.command_line.arguments import Parser
from shared.errors import ConfigurationError, OrcinusError
from shared.settings import DEMO_MODEL, WorkerSettings

WIDTH = 110  # a pipe has no width; the tables need this


ON_A_DEVICE = ("cuda", "emulator")
"""Kernels that are timed by the device's own clock, one step given before the last is answered."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("orcinus bench engine", __doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="Hugging Face model directory")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="as the worker's option"
    )
    parser.add_argument(
        "--kernels", choices=("auto", "cpu", "reference", *ON_A_DEVICE), default="auto", help="as the worker's option"
    )
    parser.add_argument("--quantize", choices=tuple(METHODS), default="none", help="as the worker's option")
    parser.add_argument("--kv-dtype", choices=("auto", *MAX_CODE), default="auto", help="as the worker's option")
    parser.add_argument("--deterministic", action="store_true", help="as the worker's option")
    parser.add_argument(
        "--load-format", choices=("auto", "safetensors", "dummy"), default="auto", help="as the worker's option"
    )
    parser.add_argument("--threads", type=int, default=0, help="0 means every core")
    parser.add_argument("--cases", type=_cases, default=CASES, help="some of " + ",".join(c.name for c in CASES))
    parser.add_argument("--steps", type=int, default=60, help="iterations of a case; the median is given")
    parser.add_argument("--profile", action="store_true", help="where an iteration's time goes, operation by operation")
    parser.add_argument(
        "--adapters", type=_counts, default=(), help="LoRA adapters beside none instead of the cases, such as 1,8"
    )
    parser.add_argument("--note", default="", help="kept in the JSON: what else the machine was doing")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        options = parser.parse_args(given)
    except SystemExit as stop:
        return int(stop.code or 0)
    if not 1 <= options.steps <= 10_000:
        print(f"error: --steps is 1 to 10,000, not {options.steps}", file=sys.stderr)
        return 2
    facts = provenance(["orcinus", "bench", "engine", *given])
    try:
        found = _run(options)
    except OrcinusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found |= {**facts, "note": options.note}
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


def _run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return _measured(options, Path(folder))


def _measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what was measured. folder: for adapters."""
    cases = ADAPTED if options.adapters else options.cases
    settings = WorkerSettings(
        model=options.model,
        device="cuda" if options.kernels == "cuda" else "cpu",
        dtype=options.dtype,
        kernels=options.kernels,
        quantize=options.quantize,
        kv_dtype=options.kv_dtype,
        deterministic=options.deterministic,
        load_format=options.load_format,
        threads=options.threads,
        max_seqs=max(case.sequences for case in cases),
        max_step_tokens=max(case.step_tokens for case in cases),
        **({"adapter_dir": folder, "max_loras": max(options.adapters)} if options.adapters else {}),
    )
    config = load_config(options.model)
    if config.mixture is not None:
        raise ConfigurationError(
            f"{options.model}: this bench has no floor for a mixture of experts; give a model without experts, or "
            "measure the service with orcinus bench serve"
        )
    on_device = _device(options.kernels) if options.kernels in ON_A_DEVICE else None  # before memory is taken
    _say(f"loading {settings.served_model_name}")
    fitting = [case for case in cases if case.fits(config.context, options.steps)]
    # The pool of a worker may be smaller: a service lets sequences wait, a case does not.
    blocks = max((case.sequences * case.blocks(settings.block_size, options.steps) for case in fitting), default=0)
    engine = Engine(settings.model_copy(update={"kv_blocks": max(blocks, -(-config.context // settings.block_size))}))
    engine.warm_up()
    about = {"model": _about(engine, options)}
    if options.adapters:
        digests = stored(folder, engine.config, max(options.adapters))
        rows = []
        for case in cases:
            _say(case.name)
            rows.append(beside(engine, case, options.steps, digests, options.adapters))
        return about | {"threads": torch.get_num_threads(), "results": rows}
    if on_device is None:
        _say("measuring the machine")
    floor, clock = on_device or (machine_floor(), None)
    torch_alone = TorchMatrices(engine.config, engine.dtype, clock)
    results = []
    for case in options.cases:
        if not case.fits(engine.lengths.model, options.steps):
            _say(f"{case.name} is left out, the context of {engine.lengths.model} tokens is too short for it")
            continue
        _say(case.name)
        results.append(measure(engine, case, options.steps, floor, torch_alone, options.profile))
    return about | {"floor": floor.as_dict(), "results": results}


def _about(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    info = engine.info()
    found = {"name": info.model, "layers": info.layers, "dtype": info.dtype, "backend": info.backend}
    found |= {"numerics": info.numerics, "quantize": options.quantize, "deterministic": options.deterministic}
    return found | {"kv_dtype": options.kv_dtype, "block_bytes": info.block_bytes}


def _device(kernels: str) -> tuple[Floor, Clock]:
    _say("measuring the device")
    backend = opened(kernels, repeats=5)
    with torch.inference_mode():
        peaks = backend.peaks()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    gflop_s = peaks.tflop_s["bfloat16"] * 1000
    return Floor(0, peaks.bandwidth_gb_s, gflop_s / 2, gflop_s, peaks.device), backend.clock


def _cases(text: str) -> tuple[Case, ...]:
    known = {case.name: case for case in CASES}
    if wrong := set(text.split(",")) - known.keys():
        raise argparse.ArgumentTypeError(f"no case {sorted(wrong)[0][:40]!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(map(int, text.split(",")))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= 64 for count in counts):
        raise argparse.ArgumentTypeError(f"numbers from 1 to 64, such as 1,8, not {text[:40]!r}")
    return counts


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr)


def show(found: dict[str, Any]) -> None:
    """Print iterations beside their floors and, where it was measured, where their time goes."""
    console = Console()
    console.width = max(console.width, WIDTH)
    if "floor" not in found:
        return _show_adapters(found, console)
    model, floor = found["model"], found["floor"]
    weights = "" if model["quantize"] == "none" else f", {model['quantize']} weights"
    weights += "" if model["kv_dtype"] == "auto" else f", {model['kv_dtype']} KV"
    where = f"{floor['threads']} threads" if not floor["device"] else floor["device"]
    rate = f"{floor['float32_gflop_s']:.0f} GFLOP/s float32, {floor['bfloat16_gflop_s']:.0f} bfloat16"
    if floor["device"]:
        rate = f"{floor['bfloat16_gflop_s'] / 1000:.3g} TFLOP/s in 16 bits"
    console.print(
        f"{model['name']}, {model['layers']} layers, {model['dtype']}{weights}, {model['numerics']}, "
        f"{where}; memory {floor['read_gb_s']:.0f} GB/s, {rate}"
    )
    table = Table()
    for name in ("iteration", "tokens", "ms", "p99", "forward", "sample", "floor", "x floor", "torch's matrices"):
        table.add_column(name, justify="left" if name == "iteration" else "right", no_wrap=True)
    for row in found["results"]:
        numbers = (row[name] for name in ("total_ms", "p99_ms", "forward_ms", "sample_ms", "floor_ms"))
        table.add_row(
            row["case"],
            str(row["tokens"]),
            *(f"{number:.2f}" for number in numbers),
            f"{row['ratio']:.2f}",
            f"{row['torch_linear_ms']:.2f}",
        )
    console.print(table)
    profiled = [row for row in found["results"] if "profile_us" in row]
    if not profiled:
        return
    names = sorted(set().union(*(row["profile_us"] for row in profiled)))
    table = Table(title="microseconds of an iteration by operation")
    table.add_column("iteration")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("outside", justify="right")
    for row in profiled:
        spent = row["profile_us"]
        outside = 1000 * row["total_ms"] - sum(spent.values())
        table.add_row(row["case"], *(f"{spent.get(name, 0.0):.0f}" for name in names), f"{outside:.0f}")
    console.print(table)


def _show_adapters(found: dict[str, Any], console: Console) -> None:
    model = found["model"]
    console.print(f"{model['name']}, {model['layers']} layers, {model['numerics']}, {found['threads']} threads")
    table = Table()
    for name in ("iteration", "adapters", "ms without", "times", "CPU time, times", "bytes, times"):
        table.add_column(name, justify="left" if name == "iteration" else "right", no_wrap=True)
    for row in found["results"]:
        for one in row["adapters"]:
            ratios = (f"{one[name]:.2f}" for name in ("forward_ratio", "cpu_ratio", "bytes_ratio"))
            table.add_row(row["case"], str(one["adapters"]), f"{row['forward_ms']:.2f}", *ratios)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
