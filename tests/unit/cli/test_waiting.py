"""What a command says while it waits."""

from __future__ import annotations

from services.cli.waiting import LINE_S, Waiting


def test_waiting_says_each_change_and_breaks_every_silence() -> None:
    said: list[tuple[float, str]] = []
    now = 0.0
    waiting = Waiting(lambda line: said.append((now, line)), clock=lambda: now)
    for tick in range(24):
        now = tick / 2
        waiting.look("3 run" if now < 7 else "2 run")
    assert said == [
        (0.0, "3 run"),
        (LINE_S, "3 run, after 3 s"),
        (2 * LINE_S, "3 run, after 6 s"),
        (7.0, "2 run"),
        (7.0 + LINE_S, "2 run, after 10 s"),
    ]
