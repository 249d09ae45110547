"""The command `orcinus`. A command imports services, torch and the web framework only if it needs them.

Exit codes: 0 success, 1 a check failed, 2 wrong use or wrong configuration. With --json a command prints exactly one
object on stdout.
"""

from __future__ import annotations

import errno
import json as json_module
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, entry_points
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated

import typer
from pydantic_settings import BaseSettings

from services.cli import adapters as cli_adapters
from services.cli import keys as cli_keys
from services.cli import models
from services.cli.options import Command, Group, build, check_policy, settings_command
from shared.command_line.options import Values, effective, env_name
from shared.errors import ConfigurationError
from shared.models.hub import require_local
from shared.processes.heap import freeze_imports
from shared.settings import (
    BatchSettings,
    ChatSettings,
    CommonSettings,
    EnginesSettings,
    GatewaySettings,
    LauncherSettings,
    PlacerSettings,
    SchedulerSettings,
    WorkerSettings,
)

app = typer.Typer(
    name="orcinus",
    cls=Group,
    help="Serve large language models. Every option is also an environment variable, named in its help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long option names
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    help="Run a benchmark; `orcinus bench NAME --help` lists its options.",
    no_args_is_help=True,
)
app.add_typer(bench, name="bench")
app.add_typer(cli_keys.app, name="keys")
app.add_typer(cli_adapters.app, name="adapters")
app.command("pull", cls=Command)(models.pull)
app.command("list", cls=Command)(models.list_models)
app.command("rm", cls=Command)(models.rm)

Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
SERVICES: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
TOOLS = "orcinus.tools"
"""Entry points of commands that are not part of the product: benches, `fleet`, `chaos`."""
EVERYTHING = (GatewaySettings, WorkerSettings, SchedulerSettings, LauncherSettings)


def run_tool(name: str, arguments: list[str]) -> int:
    """Run a command that lives outside the product and return its exit code.

    Raises ConfigurationError if only the product is installed: benches and tests come with the sources.
    """
    command = name.replace("-", " ")
    try:
        (tool,) = entry_points(group=TOOLS, name=name)
        main = tool.load()
    except ValueError:
        raise ConfigurationError(
            f"orcinus {command}: not part of this installation; run it in a checkout of the sources"
        ) from None
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"orcinus {command}: module {error.name} is missing; run it in a checkout, after `make install-dev`"
        ) from error
    return int(main(arguments))


@settings_command(app, "up", *EVERYTHING)
def up(
    values: Values,
    stop_with_parent: Annotated[bool, typer.Option(help="also stop when the parent process dies")] = False,
) -> None:
    """Start Redis and every service on this machine, and keep them running until Ctrl-C."""
    build(SchedulerSettings, values)  # the launcher does not know the policies
    from services.launcher.up import up as run_up

    raise typer.Exit(run_up(values, check_policy, stop_with_parent))


def _use(settings: CommonSettings) -> None:
    """Refuse a model that is not on this machine; keep `orcinus rm` from one that is."""
    from services.hub.store import hold

    require_local(settings.model)
    hold(settings.model)


@settings_command(app, "gateway", GatewaySettings)
def gateway(values: Values) -> None:
    """Run the HTTP gateway."""
    from services.gateway import processes

    settings = build(GatewaySettings, values)
    _use(settings)
    place = processes.Place.from_environment()
    if settings.processes > 1 and place is None:
        raise typer.Exit(processes.run(settings))
    with freeze_imports():
        from services.gateway.main import run

    raise typer.Exit(run(settings, place))


@settings_command(app, "scheduler", SchedulerSettings)
def scheduler(values: Values) -> None:
    """Run the scheduler."""
    settings = build(SchedulerSettings, values)
    with freeze_imports():
        from services.scheduler.main import run

    raise typer.Exit(run(settings))


@settings_command(app, "worker", WorkerSettings)
def worker(values: Values) -> None:
    """Run a worker."""
    settings = build(WorkerSettings, values)
    _use(settings)
    with freeze_imports():
        from services.worker.main import run

    raise typer.Exit(run(settings))


@settings_command(app, "placer", PlacerSettings)
def placer(values: Values) -> None:
    """Decide which models of a file have workers, where they take turns; `orcinus up` starts one."""
    from services.placer.service import run

    raise typer.Exit(run(build(PlacerSettings, values)))


@settings_command(app, "engines", PlacerSettings, WorkerSettings, SchedulerSettings, LauncherSettings, EnginesSettings)
def engines(values: Values) -> None:
    """Run schedulers, workers and placer of the models of a file, for gateways and a Redis that run elsewhere."""
    build(SchedulerSettings, values)  # the launcher does not know the policies
    from services.launcher.engines import engines as run

    raise typer.Exit(run(values, check_policy))


@settings_command(app, "config", *EVERYTHING)
def config(
    values: Values,
    new: Annotated[
        bool, typer.Option("--new", help="the settings of a new start, also beside a stack that runs")
    ] = False,
    json: Json = False,
) -> None:
    """Print the settings of the stack that runs here, and the source of each; secrets are hidden.

    Where none runs, and with --new or any option but --run-dir, print those with which this shell would start one.
    """
    launcher = build(LauncherSettings, values)
    settings: dict[str, BaseSettings] = {name: build(kind, values) for name, kind in SERVICES.items()}
    settings["up"] = launcher
    from services.launcher.rundir import RunDir

    run_dir = RunDir(launcher.run_dir)
    running = None if new or set(values) - {"run_dir"} else run_dir.running_settings()
    services = running or {name: effective(one, values) for name, one in settings.items()}
    if json:
        found = {name: {field: value for field, (value, _) in rows.items()} for name, rows in services.items()}
        print(json_module.dumps({"pid": run_dir.owner() if running else None, **found}, indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if running:
        console.print(
            f"The stack that runs here (pid {run_dir.owner()}) has these settings; --new shows those of a new start.\n"
        )
    elif run_dir.owner():
        console.print("A new start would have these settings; the stack that runs here has its own.\n")
    for name, rows in services.items():
        console.print(f"[bold]{name}[/]")
        for field, (value, source) in rows.items():
            console.print(f"  {field:21} {value!s:36} {source:12} {env_name(field)}", markup=False)


@settings_command(app, "doctor", *EVERYTHING)
def doctor(values: Values, json: Json = False) -> None:
    """Check what a local stack needs on this machine, and name the remedy for what is missing."""
    build(SchedulerSettings, values)  # the launcher does not know the policies
    from services.cli import status
    from services.cli.stack import find
    from services.launcher.check import Check
    from services.launcher.doctor import examine, in_image, show

    def each() -> Iterator[Check]:
        yield from examine(values)
        if in_image():
            yield status.check(find(values))

    checks = list(each()) if json else show(each())
    failed = any(check.status == "fail" for check in checks)
    if json:
        print(json_module.dumps({"ok": not failed, "checks": [check.as_dict() for check in checks]}, indent=1))
    raise typer.Exit(1 if failed else 0)


def _progress(json: bool) -> Callable[[str], None]:
    """Return where a command that waits says so: nowhere with --json."""
    return (lambda _: None) if json else (lambda line: print(line, flush=True))


@settings_command(app, "policy", CommonSettings, LauncherSettings)
def policy(
    values: Values,
    name: Annotated[
        str,
        typer.Argument(help="a preset, or one with parts replaced: sarathi:order=fair,memory=peak", show_default=False),
    ] = "",
    timeout_s: Annotated[float, typer.Option(help="how long to wait for running sequences to end")] = 60.0,
    json: Json = False,
) -> None:
    """Change the policy of a running scheduler, and wait for the change: running sequences end first.

    Without a name, show the policy in force and the presets.
    """
    from services.cli.policy import show, switch
    from services.cli.stack import find

    target = find(values)
    settings = target.settings
    if not name:
        policies = show(settings, target.launcher)
        print(json_module.dumps(asdict(policies)) if json else policies.text())
        raise typer.Exit(0 if policies.policy else 1)
    answer = switch(name, settings, target.launcher, timeout_s, _progress(json))
    if json:
        result = {"shard": settings.shard, "policy": name, "changed": answer.changed, "text": answer.text}
        print(json_module.dumps(result))
    else:
        print(answer.text, file=sys.stdout if answer.changed else sys.stderr)
    raise typer.Exit(0 if answer.changed else 1)


@settings_command(app, "drain", CommonSettings, LauncherSettings)
def drain(
    values: Values,
    name: Annotated[
        str,
        typer.Argument(
            help="gateway, scheduler or worker for all of them, or an id of one (a scheduler's is its shard); "
            "without it the ids are listed",
            show_default=False,
        ),
    ] = "",
    timeout_s: Annotated[float, typer.Option("--timeout-s", "--timeout", help="how long to wait")] = 120.0,
    json: Json = False,
) -> None:
    """Let a service finish or hand over its requests and stop, and wait until it has. No request is lost; a
    gateway cuts streams that take longer than its --drain-s, and an event in them says how to go on. Of several
    models, services of all are meant unless --model names one.
    """
    from services.cli.drain import drain as run
    from services.cli.stack import find, models_of

    target = find(values)
    models = models_of(target, values)
    ends = run(name, target.settings, target.launcher, timeout_s, _progress(json), models)
    drained = all(end.drained for end in ends)
    if json:
        print(json_module.dumps({"ok": drained, "services": [asdict(end) for end in ends]}))
    for end in ends:
        if not end.drained and not json:
            of = f" of {end.model}" if len(models) > 1 and end.role != "gateway" else ""
            print(f"{end.role} {end.id}{of} {end.text}", file=sys.stderr)
    raise typer.Exit(0 if drained else 1)


@settings_command(app, "batch", BatchSettings)
def batch(
    values: Values,
    source: Annotated[Path, typer.Argument(metavar="IN", help="requests as OpenAI batch lines (JSONL)")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="answers, one line each; requests with an answer are skipped")
    ],
    json: Json = False,
) -> None:
    """Send the requests of a file to a running server; run the same command again to continue a stopped run."""
    settings = build(BatchSettings, values)
    from services.cli.batch import run
    from services.cli.chat import find_server

    settings.url = find_server(settings)
    summary = run(source, target, settings, show=not json)
    if json:
        print(json_module.dumps(summary.as_dict()))
    else:
        print(summary.text(), file=sys.stdout if summary.well else sys.stderr)
    raise typer.Exit(0 if summary.well else 1)


@settings_command(app, "chat", ChatSettings)
def chat(
    values: Values,
    model: Annotated[str, typer.Argument(help="model id; empty means the first one of the server")] = "",
    system: Annotated[str, typer.Option(help="system prompt")] = "",
    temperature: Annotated[float | None, typer.Option(help="the model's if not given")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="the model's if not given")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="output tokens of each answer")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same answers")] = None,
) -> None:
    """Talk to a model in the terminal: the stack that runs here, or any server with OpenAI's API (--url)."""
    settings = build(ChatSettings, values)
    from services.cli.chat import Console, run

    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    sampling = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(run(settings, model, system, sampling, Console()))


@settings_command(app, "top", CommonSettings, LauncherSettings)
def top(
    values: Values,
    once: Annotated[bool, typer.Option("--once", help="print one view and exit")] = False,
    json: Json = False,
) -> None:
    """Show a running stack in the terminal, from Redis; q quits, m shows the next of several models. With --json print
    one view for programs.
    """
    from services.cli.stack import find, models_of
    from services.cli.top import run

    target = find(values)
    raise typer.Exit(run(target.settings, target.launcher, models_of(target, values), once or json, json))


@settings_command(app, "status", CommonSettings, LauncherSettings)
def status(values: Values, json: Json = False) -> None:
    """Say on one screen whether the stack runs, where it is reached and how it does."""
    from services.cli.stack import find, models_of
    from services.cli.status import run

    target = find(values)
    raise typer.Exit(run(target, json, models_of(target, values)))


@app.command(cls=Command)
def version(json: Json = False) -> None:
    """Print the version."""
    print(json_module.dumps({"version": _version()}) if json else f"orcinus {_version()}")


def _version() -> str:
    try:
        return package_version("orcinus")
    except PackageNotFoundError:
        return "unknown"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"orcinus {_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Serve large language models. Every option is also an environment variable, named in its help."""


BENCHES = {
    "scheduler": "Measure plan and apply with 32 to 4096 running sequences.",
    "gateway": "Measure tokens per second and delay of one gateway process on one core.",
    "replicas": "Measure one scheduler with 1, 2, 4 and 8 replicas: CPU time per step, and routing by prefix.",
    "engine": "Measure the engine's steps beside the limits of the machine.",
    "kernels": "Measure every operation of the forward pass beside the limits of the machine and beside torch.",
    "serve": "Load a running server and measure latencies and throughput.",
}


def _bench_command(name: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        raise typer.Exit(run_tool(f"bench-{name}", context.args))

    return run


for _name, _help in BENCHES.items():
    bench.command(_name, help=_help, context_settings=PASS_ON, add_help_option=False)(_bench_command(_name))


@app.command("simulate", context_settings=PASS_ON, add_help_option=False)
def simulate(context: typer.Context) -> None:
    """Compare scheduling policies on a virtual clock, without a worker."""
    from services.simulator.command.main import main as run

    raise typer.Exit(run(context.args))


@app.command("fleet", context_settings=PASS_ON, add_help_option=False)
def fleet(context: typer.Context) -> None:
    """Simulate up to 10,000 replicas and millions of requests: routing, failures, autoscaling, cost."""
    raise typer.Exit(run_tool("fleet", context.args))


@app.command("chaos", context_settings=PASS_ON, add_help_option=False)
def chaos(context: typer.Context) -> None:
    """Load the stack that runs here, or one of its own; inject faults at random, check every answer."""
    raise typer.Exit(run_tool("chaos", context.args))


def main() -> None:
    try:
        app()
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(
            f"error: {where}{error.strerror}; make room (df -h shows where), or choose another disk with --run-dir or "
            "HF_HOME",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
