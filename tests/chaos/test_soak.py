"""`make soak` in small: all is right and comes back to rest. What grows in half an hour does not show in one minute.

Its judgement is tested on series with a known trend.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from tests.chaos.harness.batches import LINES
from tests.chaos.harness.load import GRAMMAR, PATTERN
from tests.chaos.soak.__main__ import Soak, soak
from tests.chaos.soak.samples import draw
from tests.chaos.soak.trend import FLOORS, by_minute, trend

pytestmark = pytest.mark.timeout(300)
MINUTES = 22


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(soak(tmp_path_factory.mktemp("soak"), minutes=0.1, clients=8, templates=4))


def test_answers_under_mixed_load_are_right_and_the_stack_settles(short: Soak) -> None:
    assert short.result.violations == []
    assert short.figures()["finished"] > 0


def test_grammars_batches_and_both_tenants_come_up(short: Soak) -> None:
    """The run waits for them before it ends, and has checked their answers."""
    figures = short.figures()
    assert len(figures["tenants"]) == 2 and min(figures["tenants"]) > 0
    assert figures["grammars"] >= 2
    assert figures["batch_lines"] == LINES * figures["batches"] > 0
    bound = [outcome.texts[0] for name, outcome in short.result.outcomes.items() if name.startswith(GRAMMAR)]
    assert re.fullmatch(PATTERN, bound[0])
    assert set(json.loads(bound[1])) == {"name", "kind", "counts"}


def test_every_process_and_redis_are_looked_at_and_drawn(short: Soak, tmp_path: Path) -> None:
    names = set(short.samples.rows[0])
    services = ("redis", "worker", "scheduler-0", "scheduler-1", "gateway-0", "gateway-1")
    assert {f"{kind} {service}" for kind in ("rss_mib", "fds", "threads") for service in services} < names
    assert {name.split()[0] for name in names} == set(FLOORS)
    assert max(short.samples.column("pending redis")) > 0
    assert max(short.samples.column("blocks scheduler")) > 0
    draw(short.samples, short.warm_up_s, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size > 10_000


def series(value: Callable[[float], float]) -> list[float]:
    """Medians of minutes of a quantity with the noise of a load, 200 MiB and MINUTES long."""
    rng = random.Random(20261123)
    at_s = [float(second) for second in range(60 * MINUTES)]
    return by_minute(at_s, [value(at / 60) + rng.gauss(0, 2) for at in at_s], 0.0)


@pytest.mark.parametrize(
    ("value", "grows"),
    [
        (lambda _: 200.0, False),
        (lambda minute: 200.0 + 0.5 * minute, True),  # 11 MiB
        (lambda minute: 200.0 + 0.1 * minute, False),  # 2.2 MiB are within the bound
        (lambda minute: 200.0 - 0.5 * minute, False),
        (lambda minute: 220.0 if minute < 0.5 else 200.0, False),
        (lambda minute: 220.0 if minute > 20 else 200.0, False),  # one step near the end is no trend
    ],
)
def test_growth_is_found_in_noise_and_noise_is_no_growth(value: Callable[[float], float], grows: bool) -> None:
    found = trend("rss_mib", series(value))
    assert found is not None and found.grows == grows


def test_a_short_run_says_nothing_about_growth() -> None:
    assert trend("fds", [float(minute) for minute in range(9)]) is None
