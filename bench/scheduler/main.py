"""Measure the cost of an iteration in the scheduler: plan and apply, in steady decode and when prompts enter; messages
and writes; and the growth of the cost with running sequences, waiting ones and blocks.

`orcinus bench scheduler [--json]`. No worker, no socket: tokens come from an array. Goals stand beside the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.result import provenance
from bench.scheduler.cases import cases
from bench.scheduler.curves import BLOCKS, RUNNING, WAITING, by_blocks, by_running, by_waiting, draw
from bench.scheduler.drive import NotRunningError, Setup
from bench.scheduler.parts import admission, decode, wire
from bench.scheduler.report import show
from services.scheduler.core.policy.presets import parse
from shared.command_line.arguments import Parser

COUNTS = (32, 256, 1024, 4096)
AT = 256  # sequences running where something else varies
CURVES = ("running", "waiting", "blocks")
PARTS = ("decode", "admission", "wire", "cases", *CURVES)
MAX_RUNNING = 65_536
BOUNDS = {"steps": (1, 1500), "rounds": (1, 1500), "lookahead": (0, 4), "gateways": (1, 1000)}  # 1500: fit the context
QUICK_AT = 24
QUICK_STEPS = 20


def measure(parts: Sequence[str], counts: Sequence[int], setup: Setup, quick: bool) -> dict[str, Any]:
    """Return the measured part of the JSON: `results` of steady decode, and a key for each other part."""
    at, few = (QUICK_AT if quick else AT), setup.fewer()
    admissions: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "admission": lambda: admission(at, few),
        "wire": lambda: wire(at, setup),
    }
    curves: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "running": lambda: by_running(RUNNING[:3] if quick else RUNNING, few),
        "waiting": lambda: by_waiting(WAITING[:3] if quick else WAITING, at, few),
        "blocks": lambda: by_blocks(BLOCKS[:2] if quick else BLOCKS, few),
    }
    found: dict[str, Any] = {"results": []}
    for count in counts if "decode" in parts else ():
        _say(f"steady decode, {count} running")
        found["results"].append(decode(count, setup))
    for name, run in admissions.items():
        if name in parts:
            _say(f"{name}, {at} running")
            found[name] = run()
    if "cases" in parts:
        _say(f"cases beside the floor, {', '.join(map(str, counts))} running")
        found["cases"] = cases(counts, at, setup)
    if any(name in parts for name in curves):
        found["curves"] = {}
    for name, run in curves.items():
        if name in parts:
            _say(f"cost by {name}")
            found["curves"][name] = run()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("orcinus bench scheduler", "Measure plan and apply, and how their cost grows with the load.")
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"some of {','.join(PARTS)}; all unless given")
    parser.add_argument("--running", type=_counts, default=COUNTS, help="sequences in steady decode, as 32,256")
    parser.add_argument("--steps", type=int, default=1000, help="iterations of a figure of steady decode, at most 1500")
    parser.add_argument("--rounds", type=int, default=5, help="that they are divided into; medians over them are given")
    parser.add_argument("--policy", type=_policy, default="orcinus", help="a preset, or one with parts replaced")
    parser.add_argument("--lookahead", type=int, default=1, help="steps planned ahead of the answers")
    parser.add_argument("--gateways", type=int, default=2, help="gateways that the tokens go to")
    parser.add_argument("--quick", action="store_true", help="everything small, in seconds: does it run?")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the curves there, as scheduler.png")
    parser.add_argument("--note", default="", help="kept in the JSON: what else the machine was doing")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        options = parser.parse_args(given)
    except SystemExit as stop:
        return 0 if stop.code == 0 else 2
    if wrong := _wrong(options) or _undrawable(options.plots):
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    quick = options.quick
    setup = Setup(
        policy=options.policy,
        lookahead=options.lookahead,
        gateways=options.gateways,
        samples=min(options.steps, QUICK_STEPS) if quick else options.steps,
        rounds=options.rounds,
    )
    counts = tuple(count for count in options.running if count <= AT) if quick else options.running
    about = {
        "bench": "scheduler",
        **provenance(["orcinus", "bench", "scheduler", *given]),
        "policy": setup.policy,
        "lookahead": setup.lookahead,
        "gateways": setup.gateways,
        "rounds": setup.rounds,
        "quick": quick,
        "note": options.note,
    }
    try:
        found = measure(options.parts, counts, setup, quick)
    except NotRunningError as error:
        print(f"error: policy {setup.policy}: {error}", file=sys.stderr)
        return 1
    if options.plots is not None:
        title = f"Scheduler: one iteration, policy {setup.policy} (p50 and p99)"
        _say(f"wrote {draw(found['curves'], options.plots, title)}")
    if options.json:
        print(json.dumps({**found, **about}, indent=1))
    else:
        show(found)
    return 0


def _wrong(options: argparse.Namespace) -> str:
    """Return the problem of options that are valid one by one; empty if there is none."""
    for name, (low, high) in BOUNDS.items():
        if not low <= (value := getattr(options, name)) <= high:
            return f"--{name} is {low} to {high:,}, not {str(value)[:40]}"
    if options.plots is not None and not set(options.parts) & set(CURVES):
        return f"--plots draws {', '.join(CURVES)}: --parts must have one of them"
    return ""


def _undrawable(folder: Path | None) -> str:
    """Return the reason that a plot cannot be drawn there; empty if it can. Makes the folder."""
    if folder is None:
        return ""
    try:
        import matplotlib.figure  # noqa: F401

        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except ImportError as error:
        return f"--plots: needs matplotlib ({error}); run `make install-dev` in a checkout"
    except OSError as error:
        return f"--plots {folder}: {error.strerror}; give a folder"


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr)


def _policy(text: str) -> str:
    try:
        parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _parts(text: str) -> tuple[str, ...]:
    wrong = set(text.split(",")) - set(PARTS)
    if wrong:
        raise argparse.ArgumentTypeError(f"no part {', '.join(sorted(wrong))!r}; there are {', '.join(PARTS)}")
    return tuple(text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a list of whole numbers, as 32,256") from None
    if wrong := [count for count in counts if not 1 <= count <= MAX_RUNNING]:
        raise argparse.ArgumentTypeError(f"{str(wrong[0])[:40]} sequences; give 1 to {MAX_RUNNING}")
    return counts


if __name__ == "__main__":
    sys.exit(main())
