"""`orcinus top` over a real Redis with known stats; the pilot of textual drives its screen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from services.cli.app import app
from services.cli.top import RedisSource, Top, bars, count, milliseconds, plain, totals
from shared.keys import Keys
from shared.settings import CommonSettings, LauncherSettings
from tests.support.launcher import ROOT
from tests.support.stack import RedisServer
from tests.support.stand_ins.written_stack import REPLICA, STATS, WrittenStack

MODEL = "tiny"
ESCAPE = "\x1b]0;owned\x07\x1b[31m[bold]loud[/bold]"


@pytest.fixture
def written(redis_server: RedisServer) -> Iterator[WrittenStack]:
    redis_server.client.flushall()
    stack = WrittenStack(redis_server.client, Keys(MODEL)).lead()
    stack.worker()
    for number in range(40):
        stack.iterations.add(1_000_000, 9_000_000, 12, 340 if number % 8 == 0 else 0, 0)
    stack.replica()
    stack.replica(f"evil{ESCAPE}", role=ESCAPE, dock=1)
    stack.event("worker_lost", ESCAPE)
    stack.tell()
    yield stack


def settings(redis_server: RedisServer) -> CommonSettings:
    return CommonSettings(redis_url=redis_server.url, served_model_name=MODEL)


def words_of(app: Top) -> str:
    """Return the text on the screen."""
    return " ".join(unescape(part) for part in re.findall(r">([^<>]+)<", app.export_screenshot())).replace("\xa0", " ")


async def shown(app: Top, pilot: object, text: str) -> str:
    """Wait until the screen has `text`, letting the application run meanwhile."""
    for _ in range(600):
        if text in (words := words_of(app)):
            return words
        await pilot.pause(0.05)  # type: ignore[attr-defined]
    raise TimeoutError(f"{text!r} is not on the screen: {words_of(app)}")


async def test_screen_shows_the_stats_and_follows_them(redis_server: RedisServer, written: WrittenStack) -> None:
    app = Top(RedisSource(settings(redis_server), LauncherSettings()))
    async with app.run_test(size=(130, 50)) as pilot:
        for text in (
            f"{count(STATS['tok_s'])} tok/s",
            "policy sarathi", "87.5 ms", "p99 1.53 s", "5.0 ms", "error 82.5 ms", "3 swapped", "60 %", "600 of 1,000",
            "prefill worker of shard-0", "██░░░░░░ 16 of 64", "█████░░░ 60 %",
            "340",
        ):  # fmt: skip
            await shown(app, pilot, text)  # parts are drawn one after another
        written.tell(tok_s=88, running=0, waiting=0)
        await shown(app, pilot, "88 tok/s")
        await shown(app, pilot, "idle")
        written.leave()
        await shown(app, pilot, "no scheduler leads shard-0")
        await pilot.press("d", "s", "q")


async def test_next_model_is_shown_with_m(redis_server: RedisServer, written: WrittenStack) -> None:
    second = WrittenStack(redis_server.client, Keys("second")).lead()
    second.tell(tok_s=77)
    app = Top(*(RedisSource(settings(redis_server), LauncherSettings(), model) for model in ("", "second")))
    async with app.run_test(size=(130, 50)) as pilot:
        await shown(app, pilot, f"{count(STATS['tok_s'])} tok/s")
        await pilot.press("m")
        assert "second" in await shown(app, pilot, "77 tok/s")
        await pilot.press("m")
        await shown(app, pilot, f"{count(STATS['tok_s'])} tok/s")


async def test_screen_fits_a_narrow_terminal_and_shows_a_lost_redis(
    redis_server: RedisServer, written: WrittenStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = RedisSource(settings(redis_server), LauncherSettings())
    nowhere = RedisSource(CommonSettings(redis_url="redis://127.0.0.1:1/0"), LauncherSettings())
    app = Top(source)
    async with app.run_test(size=(60, 40)) as pilot:
        await shown(app, pilot, "sarathi")
        assert app.query_one("#totals").region.width <= 60
        monkeypatch.setattr(source, "look", nowhere.look)
        words = await shown(app, pilot, "does not answer")
        assert re.search(r"running +17", words), "the last stats stay"


def test_control_characters_do_not_reach_the_terminal(redis_server: RedisServer, written: WrittenStack) -> None:
    done = orcinus_top(redis_server.url, "--once")
    assert "\x1b]0" not in done.stdout and "\x07" not in done.stdout
    assert "[bold]loud[/bold]" in done.stdout.replace("\n", "")


def orcinus_top(url: str, *options: str) -> Result:
    env = {**{name: None for name in os.environ if name.startswith("ORCINUS_")}, "COLUMNS": "120"}
    return CliRunner().invoke(app, ["top", "--redis-url", url, "--served-model-name", MODEL, *options], env=env)


def test_json_is_one_object_with_an_exit_code(redis_server: RedisServer, written: WrittenStack) -> None:
    done = orcinus_top(redis_server.url, "--json")
    view = json.loads(done.stdout)
    assert (done.exit_code, view["model"], view["shards"]["shard-0"]["stats"]["running"]) == (0, MODEL, 17)
    assert view["shards"]["shard-0"]["replicas"]["worker-0"] == REPLICA
    assert view["shards"]["shard-0"]["iterations"]["decode"] == [12] * 40
    gone = orcinus_top("redis://127.0.0.1:1/0", "--json")
    assert gone.exit_code == 1 and "does not answer" in json.loads(gone.stdout)["error"]


def test_totals_say_what_drafts_brought() -> None:
    stats = {"tokens_total": 300, "drafted_tokens": 200, "accepted_tokens": 150}
    said = str(totals({"shards": {"a": {"stats": stats}}}))
    assert "drafted tokens 200  accepted tokens 150  drafts refused 25 %  tokens a sequence and step 2.00" in said
    assert "refused" not in str(totals({"shards": {"a": {"stats": {"tokens_total": 300}}}}))


def test_figures_are_short_and_bars_as_high_as_their_values() -> None:
    assert [*map(count, (0, 5.25, 7, 1234, 452_000, 2.5e6))] == ["0", "5.2", "7", "1,234", "452 k", "2.50 M"]
    assert [*map(milliseconds, (0, 1530, 12.25))] == ["–", "1.53 s", "12.2 ms"]
    assert bars([0, 1, 4, 8], 6) == "   ▁▄█"
    assert bars([0.001, 8], 2) == "▁█"
    assert bars([1, 2, 3, 4], 2, scale=4) == "▆█"
    assert bars([0, 0], 4) == "    "
    assert plain("a\x1b[1m\nb") == "a·[1m·b"


def test_example_of_the_redis_page_runs(redis_server: RedisServer, written: WrittenStack, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "redis.md").read_text().partition("### A board of your own")[2].partition("\n## ")[0]
    code = textwrap.dedent("\n".join(line for line in page.splitlines() if line.startswith("    ") or not line))
    (tmp_path / "board.py").write_text(code)
    command = [sys.executable, str(tmp_path / "board.py"), redis_server.url, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, *iterations = done.stdout.splitlines()
    assert first == "shard-0 (led): 17 running, 10 waiting, 1234.5 tokens/s, first token 87.5 ms, KV 60%"
    assert iterations == ["      9.00 ms: 12 decodes, 0 prompt tokens"] * 5
