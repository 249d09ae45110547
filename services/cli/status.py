"""`orcinus status`: one screen that says whether a stack runs, where it is reached and how it does."""

from __future__ import annotations

import asyncio
import json
import sys
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


def run(target: Target, as_json: bool) -> int:
    """Print the state of a stack; return 0 if its scheduler is led and reports and a worker is there, else 1."""
    source = top.RedisSource(target.settings, target.launcher)
    view = asyncio.run(top.look_once(source))
    shard = target.settings.shard
    state, _ = top.condition(view, shard)
    works = state in top.WORKING
    if as_json:
        facts = asdict(target.facts) if target.facts else None
        print(json.dumps({"ok": works, "state": state, "shard": shard, "stack": facts, "view": view}))
    elif "error" in view:
        local = target.facts is not None or "redis_url" in target.settings.model_fields_set
        print(f"error: {view['error'] if local else NO_STACK}", file=sys.stderr)
    else:
        Console(highlight=False).print(screen(view, target))
    return 0 if works else 1


def check(target: Target) -> Check:
    """Return a line of `orcinus doctor`: does a scheduler lead, and is a worker there?"""
    view = asyncio.run(top.look_once(top.RedisSource(target.settings, target.launcher)))
    state, _ = top.condition(view, target.settings.shard)
    if state in top.WORKING:
        workers = sum(bool(worker["alive"]) for worker in view["workers"])
        return Check("services", "ok", f"{state}; a scheduler leads {target.settings.shard}; workers: {workers}")
    return Check("services", "fail", state, "docker compose ps shows which service is missing, docker compose logs why")


def screen(view: View, target: Target) -> Group:
    """Return the text for a terminal: state, addresses, figures, processes, last events."""
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
    tables = [table for table in (addresses, figures, top.processes(view), dead(view)) if table.row_count]
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
