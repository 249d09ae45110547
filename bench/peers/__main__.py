"""`python -m bench.peers`: compare Orcinus with other servers at the same model and load, in one run.

    python -m bench.peers install [NAME ...]    makes what is missing under .peers/
    python -m bench.peers                       the rounds; writes bench/results/peers.json, docs/peers.md, the chart
    python -m bench.peers --classes int8,int4   the same of these classes; the others stay as they are
    python -m bench.peers --model llama-380m    the same with the larger model; writes only what --output says

Exit codes: 0 measured, 1 a server that is installed failed, 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from bench import render
from bench.peers import install, model, plots, run, servers, table
from bench.result import RESULTS, ROOT, write

MODEL = "llama-30m"
CHART = ROOT / "docs" / "img" / "peers.png"


def parser() -> argparse.ArgumentParser:
    build = argparse.ArgumentParser(prog="python -m bench.peers", description="Compares Orcinus with other servers.")
    add = build.add_argument
    add("action", nargs="?", default="run", choices=("run", "install"))
    add("names", nargs="*", help=f"what to install: {', '.join(install.RECIPES)} (default: everything)")
    add("--model", default=MODEL, choices=list(model.SHAPES), help=f"default: {MODEL}")
    add("--peers", default="", help="only these, by comma; Orcinus always runs")
    add("--classes", default="", help=f"only these, by comma: {','.join(servers.CLASSES)}")
    add("--quick", action="store_true", help="one short round of what is installed, written nowhere")
    add("--rounds", type=int, default=0, help="how often every server runs (default: 3)")
    add("--torch-index", default="", help="index with CPU builds of torch, where pip's settings name none")
    add("--json", action="store_true", help="one JSON object on stdout, nothing else")
    add("--output", type=Path, help="writes the result here instead of into the repository")
    return build


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _stop(_number: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a second one must not cut short the ending of the server
    raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    build = parser()
    options = build.parse_args(argv)
    # Also when another program ends this one, or a shell started it with `&`, the servers have to be stopped.
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if options.action == "install":
            return install_all(options, build)
        if options.names:
            build.error(f"{options.names[0]}: only `install` takes names; use --peers")
        return compare(options, build, argv)
    except KeyboardInterrupt:
        say("stopped; no server is left")
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def install_all(options: argparse.Namespace, build: argparse.ArgumentParser) -> int:
    try:
        states = install.install(options.names or list(install.RECIPES), options.torch_index, say)
    except KeyError as error:
        build.error(f"no recipe {error}; there are {', '.join(install.RECIPES)}")
    if options.json:
        print(json.dumps({name: {"ok": state.ok, "error": state.error} for name, state in states.items()}))
    return 0 if all(state.ok for state in states.values()) else 1


def compare(options: argparse.Namespace, build: argparse.ArgumentParser, argv: list[str]) -> int:
    peers = [name for name in options.peers.split(",") if name]
    classes = [name for name in options.classes.split(",") if name]
    for name in classes:
        if name not in servers.CLASSES:
            build.error(f"no class {name!r}; there are {', '.join(servers.CLASSES)}")
    try:
        chosen = servers.chosen(peers, classes)
    except KeyError as error:
        build.error(f"no peer {error}; there are {', '.join(dict.fromkeys(s.peer for s in servers.SERVERS))}")
    plan = run.QUICK if options.quick else run.FULL if options.model == MODEL else run.LARGE
    if options.rounds:
        plan = run.Plan(options.rounds, plan.requests, plan.mix_s)
    if options.quick:
        install.install([options.model], options.torch_index, say)
        chosen = [one for one in chosen if all(install.state(name).ok for name in one.recipes(options.model))]
    else:
        needed = [name for server in chosen for name in server.recipes(options.model)]
        install.install(needed, options.torch_index, say)
    if not install.state(options.model).ok:
        say(f"the model could not be made: {install.state(options.model).error}")
        return 1
    result = run.measure(chosen, options.model, plan, ["python", "-m", "bench.peers", *argv], say)
    show(result, options, is_kept=not (options.quick or peers or options.model != MODEL))
    return 1 if any(row["error"] and row["installed"] for row in result["rows"]) else 0


def show(result: dict[str, Any], options: argparse.Namespace, is_kept: bool) -> None:
    """Print the result, and write it to the given file; the repository takes whole classes alone."""
    if options.output:
        write(options.output, result)
    elif is_kept:
        kept = RESULTS / "peers.json"
        shown = table.merged(json.loads(kept.read_text()), result) if options.classes else result
        write(kept, shown)
        render.write()
        plots.chart(shown, CHART)
    if options.json:
        print(json.dumps(result))
        return
    for part in ("classes", "ratios"):
        print(render.section("peers", part, {"peers": result}) + "\n")
    for line in table.disturbed(result["rows"]):
        print(f"disturbed: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
