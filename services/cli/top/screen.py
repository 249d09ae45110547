"""The full-screen form of `orcinus top`: one look a second, drawn into panels that fit the terminal."""

from __future__ import annotations

import asyncio
from typing import ClassVar, Protocol

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, VerticalScroll
from textual.widgets import Footer, Static

from services.cli.top import words
from shared.stack_view import HISTORY, View

EVERY_S = 1.0
KEPT = 300
EVENTS = 20


class Looks(Protocol):
    """Where views come from."""

    model: str

    async def look(self) -> View: ...

    async def past(self, shard: str, now_ms: int) -> dict[str, list[float]]: ...

    async def close(self) -> None: ...


class Top(App[None]):
    """Shows a stack until q is pressed."""

    TITLE = "orcinus top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; padding: 0 1; background: $panel; }
    #tiles { grid-size: 6; height: 4; grid-gutter: 0 0; }
    .narrow #tiles { grid-size: 3; height: 8; }
    .tile, .panel { border: round $primary-darken-1; padding: 0 1; height: auto; }
    .row { height: auto; }
    .row > .panel { width: 1fr; }
    .narrow .row { layout: vertical; }
    .narrow .row > .panel { width: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "next_shard", "Next shard"),
        Binding("d", "toggle_dark", "Dark or light"),
    ]
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "narrow"), (100, "wide")]

    def __init__(self, source: Looks) -> None:
        super().__init__()
        self._source = source
        self._view: View = {}
        self._shard = ""
        self._past: dict[str, dict[str, list[float]]] = {}

    def compose(self) -> ComposeResult:
        yield Static("connecting", id="head", markup=False)
        with VerticalScroll():
            with Grid(id="tiles"):
                for number in range(6):
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
        await self._source.close()

    def on_resize(self) -> None:
        self._draw()

    def action_next_shard(self) -> None:
        """To the next of several shards."""
        shards = sorted(self._view.get("shards", {}))
        if shards:
            at = shards.index(self._shard) + 1 if self._shard in shards else 0
            self._shard = shards[at % len(shards)]
            self._draw()

    def action_toggle_dark(self) -> None:
        """Between a dark and a light set of colours."""
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
            await asyncio.sleep(EVERY_S)

    async def _remember(self, view: View) -> None:
        for shard, told in view["shards"].items():
            stats = told["stats"]
            columns = self._past.get(shard)
            if columns is None:
                self._past[shard] = await self._source.past(shard, view["time_ms"])
            elif stats.get("time_ms", 0) > columns.get("time_ms", [0])[-1:][0]:
                for name in HISTORY:
                    value = stats.get(name, 0)
                    columns.setdefault(name, []).append(value if isinstance(value, int | float) else 0)
                    del columns[name][:-KEPT]

    def _draw(self) -> None:
        view = self._view
        if not view:
            return
        self._panel("head").update(words.head(view, self._shard, view.get("model", self._source.model)))
        for number, (title, figure, beside) in enumerate(words.tiles(view)):
            tile = self._panel(f"tile-{number}")
            tile.border_title = title
            tile.update(f"{figure}\n{beside}")
        self._panel("iterations").update(words.iterations(view, self._shard, self._width("iterations")))
        lines = (("tok_s", "blue"), ("running", "green"), ("waiting", "magenta"), ("swapped", "cyan"))
        columns = self._past.get(self._shard, {})
        self._panel("throughput").update(words.over_time(columns, lines, self._width("throughput")))
        self._panel("replicas").update(words.replicas(view))
        self._panel("classes").update(words.classes(view))
        self._panel("processes").update(words.processes(view))
        self._panel("events").update(words.events(view, EVENTS))
        self._panel("totals").update(words.totals(view))

    def _panel(self, name: str) -> Static:
        return self.query_one(f"#{name}", Static)

    def _width(self, name: str) -> int:
        return self._panel(name).content_size.width


def _panel(name: str, title: str) -> Static:
    panel = Static(id=name, classes="panel", markup=False)
    panel.border_title = title
    return panel
