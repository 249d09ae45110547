"""`orcinus status`: one screen that says whether a stack runs, where it is reached and how it does."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from services.cli import top
from services.cli.stack import NO_STACK, Target
from services.launcher.check import Check
from shared.telemetry.stack_view import View

EVENTS = 3
DEAD = 3


def run(target: Target, as_json: bool, models: Sequence[str] = ()) -> int:
    """Print the state of a stack; return 0 if a model has a scheduler that leads and reports, and a worker, else 1.

    models: to show; empty means that of the target. The figures are of the first.
    """
    models = models or [target.settings.served_model_name]
    shard = target.settings.shard
    sources = [top.RedisSource(target.settings, target.launcher, model) for model in models]
    views = asyncio.run(top.look_at_all(sources))
    states, view = top.conditions(models, views, shard), views[0]
    works = any(state in top.WORKING for state in states.values())
    if as_json:
        facts = asdict(target.facts) if target.facts else None
        report = {"ok": works, "state": states[models[0]], "shard": shard, "stack": facts, "models": states}
        print(json.dumps({**report, "view": view}))
    elif "error" in view:
        local = target.facts is not None or "redis_url" in target.settings.model_fields_set
        print(f"error: {view['error'] if local else NO_STACK}", file=sys.stderr)
    else:
        Console(highlight=False).print(screen(view, target, others(models[1:], views[1:], shard)))
    return 0 if works else 1


def others(models: Sequence[str], views: Sequence[View], shard: str) -> Table:
    """Return a row for each model beside the first."""
    table = Table.grid(padding=(0, 2))
    for model, view in zip(models, views, strict=True):
        state, colour = top.condition(view, shard)
        stats = top.all_stats(view)
        work = f"running {top.count(top.total(stats, 'running'))}  waiting {top.count(top.total(stats, 'waiting'))}"
        table.add_row(Text(top.plain(model)), Text(state, colour), Text(work, "dim"))
    return table


def check(target: Target) -> Check:
    """Return a line of `orcinus doctor`: does a scheduler lead, and is a worker there?"""
    view = asyncio.run(top.look_once(top.RedisSource(target.settings, target.launcher)))
    state, _ = top.condition(view, target.settings.shard)
    if state in top.WORKING:
        workers = sum(bool(worker["alive"]) for worker in view["workers"])
        return Check("services", "ok", f"{state}; a scheduler leads {target.settings.shard}; workers: {workers}")
    return Check("services", "fail", state, "docker compose ps shows which service is missing, docker compose logs why")


def screen(view: View, target: Target, models: Table) -> Group:
    """Return the text for a terminal: state, further models, addresses, figures, processes, last events."""
    addresses = Table.grid(padding=(0, 2))
    if facts := target.facts:
        for name, where in (
            ("API", f"{facts.url}/v1"),
            ("chat", f"{facts.url}/"),
            ("live page", f"{facts.ops_url}/dashboard"),
            ("logs", str(target.launcher.run_dir / "logs")),
        ):
            addresses.add_row(Text(name, "dim"), Text(top.plain(where)))
    figures = Table.grid(padding=(0, 2))
    tiles = top.tiles(view)
    figures.add_row(*(Text(title, "dim") for title, _, _ in tiles))
    figures.add_row(*(Text(figure) for _, figure, _ in tiles))
    tables = [table for table in (models, addresses, figures, top.processes(view), dead(view)) if table.row_count]
    blank = Text()
    between = [part for table in tables for part in (table, blank)]
    return Group(top.head(view, target.settings.shard, view["model"]), blank, *between, top.events(view, EVENTS))


def dead(view: View) -> Table:
    """Return the last rows of `dead`: requests that killed workers, and records that could not be read."""
    table = Table.grid(padding=(0, 2))
    for row in view["dead"][:DEAD]:
        source = str(row.get("key") or row.get("request") or "")
        table.add_row(Text("dead", "red"), Text(top.plain(source)), Text(top.plain(str(row.get("text", "")))))
    if view["dead_rows"] > DEAD:
        table.add_row(
            Text("dead", "dim"), Text(f"{view['dead_rows'] - DEAD} more in the stream `dead` of Redis"), Text()
        )
    return table
