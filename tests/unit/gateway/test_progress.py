"""/health/progress: an alarm when work stands still, and none otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.progress import Progress, Seen

LED = frozenset({"shard-0"})
BUSY = {"epoch": 1.0, "last_step": 7.0, "running": 2.0}
IDLE = {"epoch": 1.0, "last_step": 7.0}


def stalled(looks: list[tuple[Seen | None, int]]) -> float:
    """After so many looks, a second apart; no time before the first."""
    progress = Progress(0.0)
    for second, (seen, unfinished) in enumerate(looks):
        progress.look(seen, unfinished, float(second))
    return progress.stalled(len(looks) - 1.0)[0]


def shown(stats: dict[str, float] | None = None, leases: frozenset[str] = LED, **more: Any) -> Seen:
    return Seen(leases, {} if stats is None else {"shard-0": stats}, **more)


STALLED: dict[str, tuple[Seen | None, int]] = {
    "a worker hangs": (shown(BUSY), 0),
    "no worker runs a waiting request": (shown({**IDLE, "waiting": 1.0}), 0),
    "a step is not answered": (shown({**IDLE, "in_flight": 1.0}), 0),
    "a scheduler hangs": (shown(BUSY, leases=frozenset()), 0),
    "a scheduler hangs and its statistic says idle": (shown(IDLE, leases=frozenset()), 3),
    "the same, for another gateway's request": (shown(IDLE, leases=frozenset(), queued=1.0), 0),
    "no scheduler ever led": (shown(None), 1),
    "Redis is away": (None, 1),
}
WITHOUT_WORK: dict[str, tuple[Seen | None, int]] = {
    "idle": (shown(IDLE), 0),
    "nothing known": (shown(None), 0),
    "Redis is away": (None, 0),
    "parked until a client continues it": (shown({**IDLE, "parked": 2.0}, queued=2.0), 0),
    "a shard that lost its work to others": (Seen(frozenset({"shard-1"}), {"shard-0": BUSY, "shard-1": IDLE}), 0),
}


@pytest.mark.parametrize("look", STALLED.values(), ids=STALLED)
def test_stalled_work_raises_an_alarm(look: tuple[Seen | None, int]) -> None:
    assert stalled([look] * 41) >= 39


@pytest.mark.parametrize("look", WITHOUT_WORK.values(), ids=WITHOUT_WORK)
def test_no_alarm_without_work(look: tuple[Seen | None, int]) -> None:
    assert stalled([look] * 41) == 0


def test_step_or_heartbeat_with_another_step_now_and_then_is_progress() -> None:
    for shows in (
        lambda step: shown({**BUSY, "last_step": float(step)}),
        lambda step: shown(None, steps={"alive:worker:w": str(1 + step)}),
    ):
        assert stalled([(shows(second // 20), 1) for second in range(100)]) == 19


def test_heartbeat_that_expires_or_restarts_is_no_progress() -> None:
    beats: list[dict[str, str]] = [{"w": "9"}, *[{}, {"w": "0"}] * 20]
    assert stalled([(shown(None, steps=beat), 1) for beat in beats]) >= 39


def test_stalled_shard_is_named_beside_a_working_one() -> None:
    leases = frozenset({"shard-0", "shard-1"})
    progress = Progress(0.0)
    for second in range(41):
        stats = {"shard-0": BUSY, "shard-1": {**BUSY, "last_step": float(second)}}
        progress.look(Seen(leases, stats), 1, float(second))
    assert progress.stalled(40.0) == (40.0, "shard shard-0")


def test_alarm_waits_when_work_comes_after_idle() -> None:
    assert stalled([(shown(IDLE), 0)] * 100 + [(shown({**IDLE, "running": 1.0}), 1)] * 3) <= 3
