"""A view of the stack as text and tables for a terminal. Pure; text from outside is shown, never obeyed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from shared.keys import CLASSES
from shared.stack_view import View

NONE = "–"
STEPS = " ▁▂▃▄▅▆▇█"
SILENT_MS = 6000
TOTALS = ("finished", "cancelled", "failed", "preemptions", "recomputed_tokens", "swapped_blocks", "prefix_hit_tokens")


def plain(value: object) -> str:
    """Without control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() else "·" for char in str(value))


def count(value: float) -> str:
    for limit, name in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if value >= limit:
            return f"{value / (1e3 if name == 'k' else limit):.{0 if name == 'k' else 2}f} {name}"
    return f"{value:,.{1 if 0 < value < 10 and value != int(value) else 0}f}"


def milliseconds(value: float) -> str:
    """0 is how the scheduler says that nothing came in the last minute."""
    if value <= 0:
        return NONE
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.{0 if value >= 100 else 1}f} ms"


def share(part: float, whole_: float) -> str:
    return f"{100 * part / whole_:.0f} %" if whole_ else NONE


def meter(part: float, whole_: float, width: int = 8) -> str:
    """A bar that is filled as far as `part` is of the whole; with anything at all by one at least."""
    filled = min(width, max(int(part > 0), round(width * part / whole_))) if whole_ else 0
    return "█" * filled + "░" * (width - filled)


def bars(values: Sequence[float], width: int, most: float = 0.0) -> str:
    """The newest `width` values, one character each, against their largest or `most`."""
    shown = list(values)[-width:]
    top = most or max(shown, default=0.0)
    if top <= 0:
        return (" " * len(shown)).rjust(width)
    steps = [min(len(STEPS) - 1, max(int(value > 0), round((len(STEPS) - 1) * value / top))) for value in shown]
    return "".join(STEPS[step] for step in steps).rjust(width)


def all_stats(view: View) -> list[dict[str, Any]]:
    return [shard["stats"] for shard in view.get("shards", {}).values()]


def total(stats: Iterable[dict[str, Any]], name: str) -> float:
    return sum(float(each.get(name) or 0) for each in stats)


def worst(stats: Iterable[dict[str, Any]], name: str) -> float:
    return max((float(each.get(name) or 0) for each in stats), default=0.0)


def used_blocks(stats: list[dict[str, Any]], tier: str = "") -> float:
    rest = sum(total(stats, f"{tier}blocks_{state}") for state in ("free", "cached", "draining"))
    return total(stats, f"{tier}blocks_total") - rest


def condition(view: View, shard: str) -> tuple[str, str]:
    """One word and a colour for how it goes, the word first; then what is missing."""
    told = view.get("shards", {}).get(shard)
    if "error" in view:
        return plain(view["error"]), "red"
    if told is None:
        return "no scheduler has told anything in the last five minutes", "yellow"
    if not told["led"]:
        return f"no scheduler leads {plain(shard)}", "red"
    if view["time_ms"] - told["stats"].get("time_ms", 0) > SILENT_MS:
        return f"the scheduler of {plain(shard)} is silent", "red"
    if not any(worker["alive"] for worker in view["workers"]):
        return "no worker is registered", "yellow"
    return ("live", "green") if told["stats"].get("running") or told["stats"].get("waiting") else ("idle", "cyan")


def head(view: View, shard: str, model: str) -> Text:
    words, colour = condition(view, shard)
    stats = view.get("shards", {}).get(shard, {}).get("stats", {})
    policy = f"  {plain(shard)}  policy {plain(stats['policy'])}" if "policy" in stats else ""
    return Text.assemble(("Orcinus ", "bold"), ("● ", colour), words, "  ", plain(model), policy)


def tiles(view: View) -> list[tuple[str, str, str]]:
    """Title, figure, and what stands beside it."""
    stats = all_stats(view)
    blocks = total(stats, "blocks_total")
    return [
        ("throughput", f"{count(total(stats, 'tok_s'))} tok/s", f"{count(total(stats, 'tokens_total'))} in all"),
        ("first token", milliseconds(worst(stats, "ttft_ms_p50")), f"p99 {milliseconds(worst(stats, 'ttft_ms_p99'))}"),
        ("between tokens", milliseconds(worst(stats, "tbt_ms_p50")), f"p99 {milliseconds(worst(stats, 'tbt_ms_p99'))}"),
        ("running", count(total(stats, "running")), f"step {milliseconds(worst(stats, 'step_ms'))}"),
        ("waiting", count(total(stats, "waiting")), f"{count(total(stats, 'swapped'))} swapped"),
        ("KV in use", share(used_blocks(stats), blocks), f"{count(used_blocks(stats))} of {count(blocks)}"),
    ]


def iterations(view: View, shard: str, width: int) -> Text:
    """The last iterations, one character each: prompt tokens, decodes, and how long the device waited before it."""
    rows = view.get("shards", {}).get(shard, {}).get("iterations", {})
    if not rows.get("last"):
        return Text("no iteration has been answered yet", "dim")
    room = max(10, width - 18)
    lines = Text()
    for name, colour in (("prefill", "yellow"), ("decode", "blue")):
        lines.append(f"{name:>8} {count(max(rows[name][-room:])):>6} ")
        lines.append(bars(rows[name], room), colour)
        lines.append("\n")
    waited = [idle / max(1, idle + step) for idle, step in zip(rows["idle_us"], rows["step_us"], strict=True)]
    lines.append(f"{'idle':>8} {share(sum(rows['idle_us']), sum(rows['idle_us']) + sum(rows['step_us'])):>6} ")
    lines.append(bars(waited, room, 1.0), "dim")
    return lines


def over_time(columns: dict[str, list[float]], names: Sequence[tuple[str, str]], width: int) -> Text:
    """A line of bars for each field of the history: (field, colour)."""
    room = max(10, width - 18)
    lines = [
        Text.assemble(f"{name:>8} {count(max(columns.get(name, [0])[-room:], default=0)):>6} ",
                      (bars(columns.get(name, []), room), colour))
        for name, colour in names
    ]  # fmt: skip
    return Text("\n").join(lines)


def classes(view: View) -> Table:
    stats = all_stats(view)
    table = Table("class", "waiting", "predicted TTFT", "SLO missed", box=None, padding=(0, 2, 0, 0))
    for name in CLASSES:
        predicted = min((float(each.get(f"predicted_ttft_ms_{name}") or 0) for each in stats), default=0.0)
        missed = total(stats, f"slo_violations_{name}")
        late = Text(count(missed), "red" if missed else "")
        table.add_row(name, count(total(stats, f"waiting_{name}")), milliseconds(predicted), late)
    return table


def processes(view: View) -> Table:
    table = Table("process", "state", "what", box=None, padding=(0, 2, 0, 0))
    for worker in view.get("workers", []):
        alive = worker["alive"]
        role = f"{role} " if (role := worker.get("role", "both")) != "both" else ""
        what = f"{role}worker of {worker.get('shard', 'no shard yet')}: {worker.get('device')}, {worker.get('backend')}"
        state = Text("alive", "green") if alive else Text(f"silent {worker['seen_s']:.0f} s", "red")
        table.add_row(_cell(worker["id"]), state, _cell(what if alive else "worker"))
    for one in view.get("schedulers", []):
        table.add_row(_cell(one["id"]), Text("alive", "green"), _cell(f"scheduler, step {one['last_step']}"))
    for one in view.get("gateways", []):
        table.add_row(_cell(one["id"]), Text("alive", "green"), _cell(f"gateway, {one['active']} requests"))
    return table


def replicas(view: View) -> Table:
    """A row for each replica of all shards."""
    table = Table("replica", "state", "sequences", "KV", "host KV", "tok/s", "step", "idle", "in flight", box=None,
                  padding=(0, 2, 0, 0))  # fmt: skip
    rows = [row for told in view.get("shards", {}).values() for row in told.get("replicas", {}).items()]
    for name, row in rows:
        state = " ".join(word for word in (row["state"], "dock" if row["dock"] else "", row["role"]) if word)
        table.add_row(
            _cell(name),
            Text(plain(state), "green" if row["state"] == "serving" else "yellow"),
            f"{meter(row['running'], row['slots'])} {count(row['running'])} of {count(row['slots'])}",
            f"{meter(used_blocks([row]), row['blocks_total'])} {share(used_blocks([row]), row['blocks_total'])}",
            share(used_blocks([row], "host_"), row["host_blocks_total"]),
            count(row["tok_s"]),
            milliseconds(row["step_ms"]),
            share(row["idle_pct"], 100),
            count(row["in_flight"]),
        )
    return table if rows else Table("no worker is linked", box=None)


def events(view: View, rows: int) -> Text:
    lines = [
        Text.assemble((_clock(event.get("time_ms")), "dim"), " ", (plain(event.get("kind")), "bold"), " ",
                      plain(event.get("text")))
        for event in view.get("events", [])[:rows]
    ]  # fmt: skip
    return Text("\n").join(lines) if lines else Text("nothing has happened", "dim")


def totals(view: View) -> Text:
    stats = all_stats(view)
    return Text("  ".join(f"{name.replace('_', ' ')} {count(total(stats, name))}" for name in TOTALS))


def whole(view: View, width: int) -> Group:
    """Everything, once, for a terminal that scrolls."""
    shard = next(iter(sorted(view["shards"])), "")
    figures = Table(*(title for title, _, _ in tiles(view)), box=None, padding=(0, 3, 0, 0))
    figures.add_row(*(figure for _, figure, _ in tiles(view)))
    figures.add_row(*(beside for _, _, beside in tiles(view)), style="dim")
    tables = (replicas(view), classes(view), processes(view))
    parts = (figures, iterations(view, shard, width), *tables, events(view, 10), totals(view))
    return Group(head(view, shard, view["model"]), *(part for each in parts for part in ("", each)))


def _cell(value: object) -> Text:
    return Text(plain(value), overflow="fold")


def _clock(time_ms: object) -> str:
    return time.strftime("%H:%M:%S", time.localtime(float(str(time_ms)) / 1000)) if time_ms else ""
