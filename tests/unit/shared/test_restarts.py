"""The record of a process that dies again and again."""

from __future__ import annotations

from shared.processes.restarts import Backoff


def delays(backoff: Backoff, lives: list[tuple[float, float | None]]) -> list[float]:
    """lives: (seconds from the death before to this one, seconds ready or None)."""
    found, record, now = [], list[float](), 1000.0
    for lasted_s, ready_s in lives:
        now += lasted_s
        record = backoff.counted(record, now, ready_s)
        found.append(backoff.delay_s(len(record)))
    return found


def test_restart_delay_doubles_until_a_process_lives_long() -> None:
    backoff = Backoff(first_s=1, factor=2, cap_s=5, window_s=60, settled_s=30)
    short = [(1.0, 0.5)] * 5
    assert delays(backoff, [*short, (31.0, 29.9), (31.0, 30.0), (1.0, 0.5)]) == [1, 2, 4, 5, 5, 5, 1, 2]


def test_restart_delay_resets_when_ready_without_settled_time() -> None:
    backoff = Backoff(first_s=1, factor=2, cap_s=5)
    assert delays(backoff, [(1.0, None), (1.0, None), (1.0, 0.0), (1.0, None)]) == [1, 2, 1, 2]


def test_restart_delay_counts_deaths_in_the_window() -> None:
    backoff = Backoff(first_s=1, factor=2, cap_s=100, window_s=60)
    assert delays(backoff, [(0.0, None), (30.0, None), (31.0, None), (59.0, None), (61.0, None)]) == [1, 2, 2, 2, 1]
