"""`orcinus chaos`: a stack under load, hurt at random, and a checker that misses nothing.

The stack is the one that `orcinus up` runs here, or one of its own.

Exit code 1 when a request was lost, doubled or diverged, or the stack did not come back to rest. The files of a run
that failed stay: logs, Redis's data, and the histories as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
import typer
import uvloop

from shared.command_line.arguments import Parser
from shared.errors import ConfigurationError

try:
    import aiohttp  # noqa: F401 - of the clients
except ModuleNotFoundError as error:
    raise ConfigurationError("`orcinus chaos` needs aiohttp, which is not installed; run `make install`") from error

from bench.result import provenance, write
from services.cli.options import build
from services.cli.stack import find
from shared.settings import DEMO_MODEL, ChatSettings
from tests.chaos.harness.faults import AT_ONCE, KINDS, OF_PROCESSES
from tests.chaos.harness.run import SLOTS, Result, Scenario, chaos, chaos_here
from tests.chaos.harness.target.stack import NotReadyError, RunningStack

SHOWN = 20


def parser() -> Parser:
    made = Parser(
        "orcinus chaos",
        "Load the stack that runs here, or one of its own; inject faults, check every answer.",
    )
    add = made.add_argument
    add("--seconds", type=float, default=120.0, help="of load and faults")
    add("--faults", type=int, default=1 << 30, help="stop after so many (default: as many as fit)")
    add("--kinds", help="of faults, separated by commas (default: all that the stack can take)")
    add("--at-once", type=int, default=AT_ONCE, help="faults under way at a time")
    add("--gap", type=float, default=3.0, help="seconds between two faults, on average")
    add("--clients", type=int, default=12, help="requests at a time")
    add("--own", action="store_true", help="starts a stack of its own, even where one runs")
    add("--run-dir", type=Path, help="of the running stack (default: .run or ORCINUS_RUN_DIR)")
    add("--yes", "-y", action="store_true", help="does not ask before it hurts the running stack")
    add("--slots", type=int, default=SLOTS, help="sequences that run at a time in a stack of its own")
    add("--tokens", type=int, default=240, help="longest output")
    add("--seed", type=int, help="of load and faults (default: drawn, and printed)")
    add("--model", type=Path, default=DEMO_MODEL, help="model of a stack of its own (default: the demo model)")
    add("--directory", type=Path, help="for logs and data, kept (default: a temporary one, kept when something fails)")
    add("--output", type=Path, help="writes the JSON object there, with machine, versions, commit and command")
    add("--json", action="store_true", help="print one JSON object on stdout")
    return made


def write_histories(path: Path, result: Result) -> None:
    """Everything that the checker saw, to find the reason."""
    fields: dict[str, Any] = {name: getattr(result, name) for name in Result.__dataclass_fields__}
    path.write_bytes(orjson.dumps(fields, option=orjson.OPT_INDENT_2))


def report(figures: dict[str, Any]) -> None:
    """For the person at the terminal."""
    for name, value in figures.items():
        if isinstance(value, dict):
            value = ", ".join(f"{kind} {count}" for kind, count in value.items()) or "none"
        print(f"{name:16} {value}")


def main(argv: list[str]) -> int:
    """0: nothing lost, nothing twice; 1: something was, or the stack did not come back; 2: wrong use."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as exit_:
        return int(exit_.code or 0)
    positive = (options.seconds, options.gap, options.clients, options.faults, options.at_once)
    if min(positive) <= 0 or options.tokens < 30 or options.slots < 4:
        said = "seconds, gap, clients, faults and at-once must be above 0, tokens at least 30, slots 4"
        print(f"error: {said}", file=sys.stderr)
        return 2
    running = None if options.own else running_stack(options.run_dir)
    able = KINDS if running is None else OF_PROCESSES
    kinds = options.kinds.split(",") if options.kinds else list(able)
    if unknown := set(kinds) - KINDS.keys():
        said = f"--kinds: no fault is called {', '.join(sorted(unknown))}; there are {', '.join(able)}"
        print(f"error: {said}", file=sys.stderr)
        return 2
    if unable := set(kinds) - set(able):
        said = f"{', '.join(sorted(unable))}: a fault of a stack of its own; give --own"
        print(f"error: {said}", file=sys.stderr)
        return 2
    if running is not None and not options.yes:
        typer.confirm(f"Kill, stop and drain services of {running.name} at {running.urls[0]}?", abort=True, err=True)
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    directory = options.directory or Path(tempfile.mkdtemp(prefix="orcinus-chaos-"))
    scenario = Scenario(
        options.model, seed, options.seconds, options.faults, options.gap, options.clients, options.tokens, kinds,
        options.at_once, options.slots,
    )  # fmt: skip
    print(f"seed {seed}, {len(kinds)} kinds of faults, files in {directory}", file=sys.stderr)
    return _run(directory, running, scenario, options, argv)


def running_stack(run_dir: Path | None) -> RunningStack | None:
    """Return the stack that runs here, or None. Raises ConfigurationError."""
    target = find({} if run_dir is None else {"run_dir": run_dir})
    return None if target.facts is None else RunningStack(target, target.facts)


def _run(
    directory: Path, running: RunningStack | None, scenario: Scenario, options: argparse.Namespace, argv: list[str]
) -> int:
    facts = provenance(["orcinus", "chaos", *argv], "orcinus", "redis")
    given = build(ChatSettings, {}).api_key
    key = given.get_secret_value() if given else ""
    result: Result | None = None

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(
                chaos(directory, scenario, say) if running is None else chaos_here(running, scenario, say, key)
            )
    except* NotReadyError as errors:  # several faults may wait for the same stack
        logs = directory if running is None else running.logs
        print(f"error: {errors.exceptions[0]}; logs are in {logs}", file=sys.stderr)
    if result is None:
        return 1
    figures = {"seed": scenario.seed, **result.figures()}
    if options.output:
        write(options.output, {**facts, **figures})
    if options.directory or result.violations:
        directory.mkdir(parents=True, exist_ok=True)
        write_histories(directory / "histories.json", result)
    else:
        shutil.rmtree(directory)
    if options.json:
        print(orjson.dumps(figures).decode())
    else:
        report(figures)
    for violation in result.violations[:SHOWN]:
        print(f"{violation.kind}: {violation.where}: {violation.text}", file=sys.stderr)
    return 1 if result.violations else 0
