"""All measurements on a GPU, in one run that stops within eight minutes.

    python -m bench.gpu --out DIR         runs part after part, each in a process of its own with a limit of its own
    python -m bench.gpu docs [RESULT]     rewrites the table of README.md from a result
    python -m bench.gpu --device emulator --quick --out DIR     the same code in small, where there is no GPU

A part that fails or hangs leaves its error and what it had found; the others go on. DIR/result.json holds all of them.
Needs torch, numpy, CuPy, grpcio, protobuf and safetensors; transformers, pytest and compute-sanitizer are used where
they are there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.gpu.context import Context
from bench.result import RESULTS, ROOT, provenance, write
from shared.errors import ConfigurationError

TOTAL_S = 470.0
PACKAGES = ("orcinus", "torch", "numpy", "cupy-cuda13x", "grpcio", "protobuf", "transformers")
WHOLE = {"probes", "checks", "decode", "engine", "prefill", "rows", "sampler", "swap"}
"""The tables of goals and of kernels show these parts."""
TAIL = 2000  # characters of a failed part's output that are kept


@dataclass(frozen=True, slots=True)
class Part:
    """`measure` names a generator function of a Context, module:function: of (name, value); lists of one name grow."""

    name: str
    limit_s: float
    measure: str


# The most important first: what is left when the time is up is left out.
PARTS = (
    Part("compile", 150, "bench.gpu.probes:compile_all"),
    Part("probes", 60, "bench.gpu.probes:probes"),
    Part("checks", 60, "bench.gpu.checks:checks"),
    Part("decode", 100, "bench.gpu.kernels:decode"),
    Part("engine", 150, "bench.gpu.engine:engine"),
    Part("prefill", 60, "bench.gpu.kernels:prefill"),
    Part("sampler", 40, "bench.gpu.kernels:sampler"),
    Part("rows", 80, "bench.gpu.kernels:rows"),
    Part("adapters", 120, "bench.gpu.adapters:adapters"),
    Part("experts", 90, "bench.gpu.experts:experts"),
    Part("swap", 30, "bench.gpu.kernels:swap"),
    Part("ranks", 400, "bench.gpu.ranks:ranks"),
    Part("transformers", 90, "bench.gpu.engine:continuous_batching"),
    Part("rings", 60, "bench.gpu.kernels:rings"),
    Part("sanitizers", 165, "bench.gpu.checks:sanitizers"),
    Part("suites", 90, "bench.gpu.checks:suites"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every part succeeded, 1 if one failed, 2 for wrong use."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["docs"]:
        return keep(given[1:])
    try:
        options = _parser().parse_args(given)
    except SystemExit as stop:
        return int(stop.code or 0)
    context = Context(options.device, options.quick, options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        try:
            return run_part(next(part for part in PARTS if part.name == options.part), context)
        except ConfigurationError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    chosen = [part for part in PARTS if not options.parts or part.name in options.parts]
    return run_all(chosen, context, ["python", "-m", "bench.gpu", *given])


def keep(argv: Sequence[str]) -> int:
    """Write the result of a run, if a file is named, and render the pages; return 2 for what is no result of a GPU.

    Adapters and experts have files of their own where the run has not the parts of a whole one.
    """
    from bench import render

    for name in argv[:1]:
        try:
            result = json.loads(Path(name).read_text())
        except (OSError, ValueError) as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 2
        if result.get("device") != "cuda" or result.get("quick"):
            print(f"error: {name}: not the result of a whole run on a GPU; give one without --quick", file=sys.stderr)
            return 2
        parts = set(result["parts"])
        files = ["gpu"] if parts >= WHOLE else [f"gpu-{part}" for part in sorted(parts & {"adapters", "experts"})]
        if not files:
            print(
                f"error: {name}: parts {', '.join(sorted(parts))}; {', '.join(sorted(WHOLE))} belong", file=sys.stderr
            )
            return 2
        for file in files:
            write(RESULTS / f"{file}.json", result)
    render.write()
    return 0


def run_part(part: Part, context: Context) -> int:
    """Run a part in this process and write each result at once, so that a killed part leaves its results."""
    target = context.out / f"{part.name}.json"
    found: dict[str, Any] = {}
    module, _, function = part.measure.partition(":")
    for name, value in getattr(import_module(module), function)(context):
        if isinstance(value, list):
            found.setdefault(name, []).extend(value)
        else:
            found[name] = value
        written = target.with_suffix(".tmp")
        written.write_text(json.dumps(found))
        os.replace(written, target)
    return 0


def run_all(parts: Sequence[Part], context: Context, command: list[str]) -> int:
    result: dict[str, Any] = {
        **provenance(command, *PACKAGES),
        "device": context.device,
        "quick": context.quick,
        "parts": {},
    }
    begun = time.monotonic()
    for part in parts:
        (context.out / f"{part.name}.json").unlink(missing_ok=True)
        left = TOTAL_S - (time.monotonic() - begun)
        print(f"{part.name} ...", file=sys.stderr, flush=True)
        took_s, error = (
            _run_one(part, context, round(min(part.limit_s, left), 1)) if left > 1 else (0.0, "no time was left")
        )
        print(f"{part.name}: {error or 'done'} ({took_s:.0f} s)", file=sys.stderr, flush=True)
        result["parts"][part.name] = {"seconds": round(took_s, 1), "error": error, **context.found(part.name)}
        write(context.out / "result.json", result)
    return 1 if any(part["error"] for part in result["parts"].values()) else 0


def _run_one(part: Part, context: Context, limit_s: float) -> tuple[float, str | None]:
    """Return the seconds and the error of a part.

    It runs in a separate process, so a kernel fault ends only that one.
    """
    quick = ["--quick"] if context.quick else []
    words = ["--part", part.name, "--device", context.device, "--out", str(context.out.resolve()), *quick]
    log, begun = context.out / f"{part.name}.log", time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu", *words],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return time.monotonic() - begun, f"longer than {limit_s:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # ranks outlive one that the driver or NCCL aborts
            child.wait()
    took_s = time.monotonic() - begun
    return took_s, None if code == 0 else f"exit {code}: {log.read_text(errors='replace')[-TAIL:]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    names = [part.name for part in PARTS]
    parser.add_argument("--out", type=Path, required=True, help="folder for result.json, each part's JSON and its log")
    parser.add_argument("--device", choices=("cuda", "emulator"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; the times mean nothing")
    parser.add_argument("--parts", nargs="+", choices=names, help="only these")
    parser.add_argument("--part", choices=names, help="this one, in this process")
    return parser


if __name__ == "__main__":
    sys.exit(main())
