"""`orcinus top`: the live page in a terminal. Reads Redis alone, so it needs no gateway.

Three parts: functions that turn a view into text (pure; text from outside is shown, never interpreted), the full-screen
application, one look a second, and `run`. Without a Redis address it looks for the stack that `orcinus up` runs on this
machine. A view is what `shared.telemetry.stack_view` returns, or has `error`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, VerticalScroll
from textual.widgets import Footer, Static

from services.cli.stack import NO_STACK, none_here, redis_address
from shared.errors import ConfigurationError
from shared.keys import CLASSES, Keys
from shared.messages import hide_password, quantity
from shared.settings import CommonSettings, LauncherSettings
from shared.telemetry.stack_view import HISTORY, HISTORY_S, StackReader, View

TIMEOUT_S = 2.0
REFRESH_S = 1.0
HISTORY_POINTS = 300
EVENTS = 20
SILENT_MS = 6000
LABEL_WIDTH = 18  # of a line of bars: its name and its largest value
WORKING = ("live", "idle", "asleep")  # states of a stack that serves, or will by itself
NONE = "–"
TILES = 7
BARS = " ▁▂▃▄▅▆▇█"
TOTALS = (
    "finished",
    "cancelled",
    "failed",
    "preemptions",
    "recomputed_tokens",
    "swapped_blocks",
    "prefix_hit_tokens",
    "drafted_tokens",
    "accepted_tokens",
)
OVER_TIME = (("tok_s", "blue"), ("running", "green"), ("waiting", "magenta"), ("swapped", "cyan"))
Stats = dict[str, Any]


class Source(Protocol):
    """A source of views."""

    model: str

    async def look(self) -> View:
        """Return the current view, or `error`."""
        ...

    async def past(self, shard: str, now_ms: int) -> dict[str, list[float]]:
        """Return the last minutes of a shard, a column for each field of HISTORY."""
        ...

    async def close(self) -> None: ...


class RedisSource:
    """Looks at one stack; a Redis that does not answer is part of the view (`error`)."""

    def __init__(self, settings: CommonSettings, launcher: LauncherSettings, model: str = "") -> None:
        """model: empty for that of the settings."""
        self.model = model or settings.served_model_name
        url, access = redis_address(settings, launcher)
        options: dict[str, Any] = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, **access}
        self._redis = Redis.from_url(url, **options)
        self._address, self._none_here = hide_password(url), none_here(settings, launcher)
        self._reader = StackReader(self._redis, Keys(self.model))

    async def look(self) -> View:
        """Return the current view, or `error`."""
        try:
            return await self._reader.look()
        except (RedisError, OSError) as error:
            if self._none_here:
                return {"error": NO_STACK}
            why = (str(error) or type(error).__name__).rstrip(".")
            return {
                "error": f"Redis at {self._address} does not answer: {why}; start it, or name another with --redis-url"
            }

    async def past(self, shard: str, now_ms: int) -> dict[str, list[float]]:
        """Return the last minutes of a shard; empty if Redis does not answer."""
        try:
            return await self._reader.history(shard, now_ms - 1000 * HISTORY_S)
        except (RedisError, OSError):
            return {}

    async def close(self) -> None:
        await self._redis.aclose()


def run(settings: CommonSettings, launcher: LauncherSettings, models: Sequence[str], once: bool, as_json: bool) -> int:
    """Show the stack until q is pressed, or print one view with `once`; return 1 when Redis does not answer then.

    models: at least one; a view of the first has the states of several in `models`.
    """
    sources = [RedisSource(settings, launcher, model) for model in models]
    if not once:
        if not sys.stdout.isatty():
            raise ConfigurationError("top: the output is no terminal; give --once, or --json")
        Top(*sources).run()
        return 0
    views = asyncio.run(look_at_all(sources))
    view = views[0]
    if as_json:
        print(json.dumps(view if len(views) == 1 else {**view, "models": conditions(models, views, settings.shard)}))
    elif "error" in view:
        print(f"error: {view['error']}", file=sys.stderr)
    else:
        console = Console(highlight=False)
        for each in views:
            console.print(one_view(each, console.width))
    return 1 if "error" in view else 0


async def look_at_all(sources: Sequence[Source]) -> list[View]:
    """Return a view of each source and close them."""
    return list(await asyncio.gather(*(look_once(source) for source in sources)))


async def look_once(source: Source) -> View:
    """Return one view and close the source."""
    try:
        return await source.look()
    finally:
        await source.close()


class Top(App[None]):
    """Shows a stack until q is pressed, in panels that fit the terminal."""

    TITLE = "orcinus top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; padding: 0 1; background: $panel; }
    #tiles { grid-size: 7; height: 4; grid-gutter: 0 0; }
    .narrow #tiles, .middle #tiles { grid-size: 4; height: 8; }
    .tile, .panel { border: round $primary-darken-1; padding: 0 1; height: auto; }
    .row { height: auto; }
    .row > .panel { width: 1fr; }
    .narrow .row { layout: vertical; }
    .narrow .row > .panel { width: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "next_shard", "Next shard"),
        Binding("m", "next_model", "Next model"),
        Binding("d", "toggle_dark", "Dark or light"),
    ]
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "narrow"), (100, "middle"), (126, "wide")]  # noqa: RUF012 - as in App

    def __init__(self, *sources: Source) -> None:
        """sources: one of each model."""
        super().__init__()
        self._sources = sources
        self._source = sources[0]
        self._view: View = {}
        self._shard = ""
        self._past: dict[str, dict[str, list[float]]] = {}

    def compose(self) -> ComposeResult:
        yield Static("connecting", id="head", markup=False)
        with VerticalScroll():
            with Grid(id="tiles"):
                for number in range(TILES):
                    yield Static(id=f"tile-{number}", classes="tile", markup=False)
            yield _panel("iterations", "last iterations")
            yield _panel("replicas", "replicas")
            with Horizontal(classes="row"):
                yield _panel("throughput", "over time")
                yield _panel("classes", "classes")
            with Horizontal(classes="row"):
                yield _panel("processes", "processes")
                yield _panel("events", "events")
            yield _panel("totals", "since the scheduler started")
        yield Footer()

    async def on_mount(self) -> None:
        self.run_worker(self._follow(), exclusive=True)

    async def on_unmount(self) -> None:
        for source in self._sources:
            await source.close()

    def on_resize(self) -> None:
        self._draw()

    def action_next_shard(self) -> None:
        """Show the next of several shards."""
        shards = sorted(self._view.get("shards", {}))
        if shards:
            at = shards.index(self._shard) + 1 if self._shard in shards else 0
            self._shard = shards[at % len(shards)]
            self._draw()

    def action_next_model(self) -> None:
        """Show the next of several models."""
        if len(self._sources) > 1:
            self._source = self._sources[(self._sources.index(self._source) + 1) % len(self._sources)]
            self._view, self._shard, self._past = {}, "", {}
            self._static("head").update(f"{plain(self._source.model)}: connecting")
            self.run_worker(self._follow(), exclusive=True)  # in place of the one before

    def action_toggle_dark(self) -> None:
        """Change between a dark and a light theme."""
        self.theme = "textual-light" if self.theme != "textual-light" else "textual-dark"

    async def _follow(self) -> None:
        while True:
            view = await self._source.look()
            if "error" in view:
                self._view = {**self._view, "error": view["error"]}  # the last figures stay
            else:
                self._view = view
                await self._remember(view)
            if self._shard not in self._view.get("shards", {}):
                self._shard = next(iter(sorted(self._view.get("shards", {}))), "")
            self._draw()
            await asyncio.sleep(REFRESH_S)

    async def _remember(self, view: View) -> None:
        for name, shard in view["shards"].items():
            stats = shard["stats"]
            columns = self._past.get(name)
            if columns is None:
                self._past[name] = await self._source.past(name, view["time_ms"])
            elif stats.get("time_ms", 0) > columns.get("time_ms", [0])[-1:][0]:
                for field in HISTORY:
                    value = stats.get(field, 0)
                    columns.setdefault(field, []).append(value if isinstance(value, int | float) else 0)
                    del columns[field][:-HISTORY_POINTS]

    def _draw(self) -> None:
        view = self._view
        if not view:
            return
        self._static("head").update(head(view, self._shard, view.get("model", self._source.model)))
        for number, (title, figure, detail) in enumerate(tiles(view)):
            tile = self._static(f"tile-{number}")
            tile.border_title = title
            tile.update(f"{figure}\n{detail}")
        columns = self._past.get(self._shard, {})
        self._static("iterations").update(iterations(view, self._shard, self._width("iterations")))
        self._static("throughput").update(over_time(columns, OVER_TIME, self._width("throughput")))
        self._static("replicas").update(replicas(view))
        self._static("classes").update(classes(view))
        self._static("processes").update(processes(view))
        self._static("events").update(events(view, EVENTS))
        self._static("totals").update(totals(view))

    def _static(self, name: str) -> Static:
        return self.query_one(f"#{name}", Static)

    def _width(self, name: str) -> int:
        return self._static(name).content_size.width


def _panel(name: str, title: str) -> Static:
    panel = Static(id=name, classes="panel", markup=False)
    panel.border_title = title
    return panel


def plain(value: object) -> str:
    """Return the text without control characters, which a terminal would interpret."""
    return "".join(char if char.isprintable() else "·" for char in str(value))


def count(value: float) -> str:
    """Return a short number: 1,234, 452 k, 2.50 M."""
    for limit, name in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if value >= limit:
            return f"{value / (1e3 if name == 'k' else limit):.{0 if name == 'k' else 2}f} {name}"
    return f"{value:,.{1 if 0 < value < 10 and value != int(value) else 0}f}"


def milliseconds(value: float) -> str:
    """Return a time in ms or s; 0 means that nothing came in the last minute."""
    if value <= 0:
        return NONE
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.{0 if value >= 100 else 1}f} ms"


def percent(part: float, total: float) -> str:
    return f"{100 * part / total:.0f} %" if total else NONE


def meter(part: float, total: float, width: int = 8) -> str:
    """Return a bar filled in proportion; any part above 0 fills one character at least."""
    filled = min(width, max(int(part > 0), round(width * part / total))) if total else 0
    return "█" * filled + "░" * (width - filled)


def bars(values: Sequence[float], width: int, scale: float = 0.0) -> str:
    """Return the newest `width` values, one character each, against `scale`; 0 uses the largest of them."""
    shown = list(values)[-width:]
    scale = scale or max(shown, default=0.0)
    if scale <= 0:
        return (" " * len(shown)).rjust(width)
    heights = [min(len(BARS) - 1, max(int(value > 0), round((len(BARS) - 1) * value / scale))) for value in shown]
    return "".join(BARS[height] for height in heights).rjust(width)


def all_stats(view: View) -> list[Stats]:
    return [shard["stats"] for shard in view.get("shards", {}).values()]


def total(stats: Iterable[Stats], name: str) -> float:
    return sum(float(each.get(name) or 0) for each in stats)


def worst(stats: Iterable[Stats], name: str) -> float:
    return max((float(each.get(name) or 0) for each in stats), default=0.0)


def used_blocks(stats: list[Stats], tier: str = "") -> float:
    unused = sum(total(stats, f"{tier}blocks_{state}") for state in ("free", "cached", "draining"))
    return total(stats, f"{tier}blocks_total") - unused


def conditions(models: Sequence[str], views: Sequence[View], shard: str) -> dict[str, str]:
    """Return the state of each model. views: one of each."""
    return {model: condition(view, shard)[0] for model, view in zip(models, views, strict=True)}


def condition(view: View, shard: str) -> tuple[str, str]:
    """Return the state of the stack, one word or the thing that is missing, and its colour."""
    row = view.get("shards", {}).get(shard)
    if "error" in view:
        return plain(view["error"]), "red"
    if row is None:
        return "no scheduler has reported in the last five minutes", "yellow"
    if not row["led"]:
        return f"no scheduler leads {plain(shard)}", "red"
    if view["time_ms"] - row["stats"].get("time_ms", 0) > SILENT_MS:
        return f"the scheduler of {plain(shard)} is silent", "red"
    if not any(worker["alive"] for worker in view["workers"]):
        if "awake" in view:  # a placer lets models take turns
            return ("loading", "yellow") if view["awake"] else ("asleep", "cyan")
        return "no worker is registered", "yellow"
    return ("live", "green") if row["stats"].get("running") or row["stats"].get("waiting") else ("idle", "cyan")


def head(view: View, shard: str, model: str) -> Text:
    state, colour = condition(view, shard)
    stats = view.get("shards", {}).get(shard, {}).get("stats", {})
    policy = f"  {plain(shard)}  policy {plain(stats['policy'])}" if "policy" in stats else ""
    return Text.assemble(("Orcinus ", "bold"), ("● ", colour), state, "  ", plain(model), policy)


def tiles(view: View) -> list[tuple[str, str, str]]:
    """Return (title, figure, detail) of each tile."""
    stats = all_stats(view)
    blocks = total(stats, "blocks_total")
    return [
        ("throughput", f"{count(total(stats, 'tok_s'))} tok/s", f"{count(total(stats, 'tokens_total'))} in all"),
        ("first token", milliseconds(worst(stats, "ttft_ms_p50")), f"p99 {milliseconds(worst(stats, 'ttft_ms_p99'))}"),
        ("predicted", *forecast(stats)),
        ("token gap", milliseconds(worst(stats, "tbt_ms_p50")), f"p99 {milliseconds(worst(stats, 'tbt_ms_p99'))}"),
        ("running", count(total(stats, "running")), f"step {milliseconds(worst(stats, 'step_ms'))}"),
        ("waiting", count(total(stats, "waiting")), f"{count(total(stats, 'swapped'))} swapped"),
        ("KV in use", percent(used_blocks(stats), blocks), f"{count(used_blocks(stats))} of {count(blocks)}"),
    ]


def forecast(stats: list[Stats]) -> tuple[str, str]:
    """Return the predicted time to the first token and its error, of the shard with the largest error."""
    far = max(stats, key=lambda each: float(each.get("ttft_error_ms_p50") or 0), default={})
    error = float(far.get("ttft_error_ms_p50") or 0)
    if not error:
        return NONE, ""
    return milliseconds(float(far.get("ttft_predicted_ms_p50") or 0)), f"error {milliseconds(error)}"


def iterations(view: View, shard: str, width: int) -> Text:
    """Return the last iterations, one character each: prompt tokens, decodes, and the idle time before each."""
    rows = view.get("shards", {}).get(shard, {}).get("iterations", {})
    if not rows.get("last"):
        return Text("no iteration has been answered yet", "dim")
    room = max(10, width - LABEL_WIDTH)
    lines = Text()
    for name, colour in (("prefill", "yellow"), ("decode", "blue")):
        lines.append(f"{name:>8} {count(max(rows[name][-room:])):>6} ")
        lines.append(bars(rows[name], room), colour)
        lines.append("\n")
    idle_share = [idle / max(1, idle + step) for idle, step in zip(rows["idle_us"], rows["step_us"], strict=True)]
    lines.append(f"{'idle':>8} {percent(sum(rows['idle_us']), sum(rows['idle_us']) + sum(rows['step_us'])):>6} ")
    lines.append(bars(idle_share, room, 1.0), "dim")
    return lines


def over_time(columns: dict[str, list[float]], names: Sequence[tuple[str, str]], width: int) -> Text:
    """Return a line of bars for each (field of the history, colour)."""
    room = max(10, width - LABEL_WIDTH)
    lines = [
        Text.assemble(f"{name:>8} {count(max(columns.get(name, [0])[-room:], default=0)):>6} ",
                      (bars(columns.get(name, []), room), colour))
        for name, colour in names
    ]  # fmt: skip
    return Text("\n").join(lines)


def classes(view: View) -> Table:
    """Return a row for each priority class."""
    stats = all_stats(view)
    table = Table("class", "waiting", "predicted TTFT", "SLO missed", box=None, padding=(0, 2, 0, 0))
    for name in CLASSES:
        predicted = min((float(each.get(f"predicted_ttft_ms_{name}") or 0) for each in stats), default=0.0)
        missed = total(stats, f"slo_violations_{name}")
        late = Text(count(missed), "red" if missed else "")
        table.add_row(name, count(total(stats, f"waiting_{name}")), milliseconds(predicted), late)
    return table


def processes(view: View) -> Table:
    """Return a row for each worker, scheduler and gateway."""
    table = Table("process", "state", "what", box=None, padding=(0, 2, 0, 0))
    for worker in view.get("workers", []):
        alive = worker["alive"]
        role = f"{role} " if (role := worker.get("role", "both")) != "both" else ""
        shard, device, backend = worker.get("shard", "no shard yet"), worker.get("device"), worker.get("backend")
        what = f"{role}worker of {shard}: {device}, {backend} kernels"
        state = Text("alive", "green") if alive else Text(f"silent {worker['seen_s']:.0f} s", "red")
        table.add_row(_cell(worker["id"]), state, _cell(what if alive else "worker"))
    for process in view.get("schedulers", []):
        table.add_row(_cell(process["id"]), Text("alive", "green"), _cell(f"scheduler, step {process['last_step']}"))
    for process in view.get("gateways", []):
        table.add_row(
            _cell(process["id"]), Text("alive", "green"), _cell(f"gateway, {quantity(process['active'], 'request')}")
        )
    return table


def replicas(view: View) -> Table:
    """Return a row for each replica of all shards."""
    table = Table("replica", "state", "sequences", "KV", "host KV", "tok/s", "step", "idle", "in flight", box=None,
                  padding=(0, 2, 0, 0))  # fmt: skip
    rows = [row for shard in view.get("shards", {}).values() for row in shard.get("replicas", {}).items()]
    for name, row in rows:
        state = " ".join(word for word in (row["state"], "dock" if row["dock"] else "", row["role"]) if word)
        table.add_row(
            _cell(name),
            Text(plain(state), "green" if row["state"] == "serving" else "yellow"),
            f"{meter(row['running'], row['slots'])} {count(row['running'])} of {count(row['slots'])}",
            f"{meter(used_blocks([row]), row['blocks_total'])} {percent(used_blocks([row]), row['blocks_total'])}",
            percent(used_blocks([row], "host_"), row["host_blocks_total"]),
            count(row["tok_s"]),
            milliseconds(row["step_ms"]),
            percent(row["idle_pct"], 100),
            count(row["in_flight"]),
        )
    return table if rows else Table("no worker is linked", box=None)


def events(view: View, rows: int) -> Text:
    lines = [
        Text.assemble((_clock(event.get("time_ms")), "dim"), " ", (plain(event.get("kind")), "bold"), " ",
                      plain(event.get("text")))
        for event in view.get("events", [])[:rows]
    ]  # fmt: skip
    return Text("\n").join(lines) if lines else Text("no events: no worker, lease or policy has changed", "dim")


def totals(view: View) -> Text:
    stats = all_stats(view)
    shown = [f"{name.replace('_', ' ')} {count(total(stats, name))}" for name in TOTALS]
    drafted, accepted, produced = (total(stats, name) for name in ("drafted_tokens", "accepted_tokens", "tokens_total"))
    if drafted and produced > accepted:
        shown.append(f"drafts refused {100 * (1 - accepted / drafted):.0f} %")
        shown.append(f"tokens a sequence and step {produced / (produced - accepted):.2f}")
    return Text("  ".join(shown))


def one_view(view: View, width: int) -> Group:
    """Return the whole view for a terminal that scrolls."""
    shard = next(iter(sorted(view["shards"])), "")
    figures = Table(*(title for title, _, _ in tiles(view)), box=None, padding=(0, 2, 0, 0))
    figures.add_row(*(figure for _, figure, _ in tiles(view)))
    figures.add_row(*(detail for _, _, detail in tiles(view)), style="dim")
    tables = (replicas(view), classes(view), processes(view))
    parts = (figures, iterations(view, shard, width), *tables, events(view, 10), totals(view))
    return Group(head(view, shard, view["model"]), *(part for each in parts for part in ("", each)))


def _cell(value: object) -> Text:
    return Text(plain(value), overflow="fold")


def _clock(time_ms: object) -> str:
    return time.strftime("%H:%M:%S", time.localtime(float(str(time_ms)) / 1000)) if time_ms else ""
