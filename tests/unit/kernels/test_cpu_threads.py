"""How many threads a step gets: the faster of two numbers for its size, found by trying both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from kernels.cpu.threads import SELDOM, TRIED_EVERY, ThreadChoice


def drive(choice: ThreadChoice, steps: int, cost: Callable[[int, int], int], rows: int = 8) -> Counter[int]:
    """Run steps that take cost(rows, threads); return how often each number of threads was picked."""
    picked: Counter[int] = Counter()
    for _ in range(steps):
        threads = choice.pick(rows)
        picked[threads] += 1
        choice.took(rows, threads, cost(rows, threads))
    return picked


def test_one_thread_is_always_picked_alone() -> None:
    assert drive(ThreadChoice(1), 50, lambda rows, threads: 1000) == {1: 50}


@pytest.mark.parametrize("threads", [2, 3, 16])
@pytest.mark.parametrize("fast", [-1, 0])
def test_faster_thread_count_is_found_and_the_other_retried(threads: int, fast: int) -> None:
    best = threads + fast
    choice = ThreadChoice(threads)
    drive(choice, 100, lambda rows, used: 1000 if used == best else 1200)
    later = drive(choice, 3200, lambda rows, used: 1000 if used == best else 1200)
    assert set(later) == {threads, threads - 1}
    assert later.total() - later[best] == pytest.approx(3200 / TRIED_EVERY, abs=2)


def test_much_slower_thread_count_is_tried_seldom() -> None:
    choice = ThreadChoice(2)
    drive(choice, 100, lambda rows, used: 1000 if used == 2 else 2000)
    later = drive(choice, 10 * SELDOM, lambda rows, used: 1000 if used == 2 else 2000)
    assert later[1] == pytest.approx(10, abs=1)


def test_step_sizes_are_judged_apart() -> None:
    choice = ThreadChoice(2)
    for _ in range(300):
        drive(choice, 1, lambda rows, used: 900 if used == 1 else 1200, rows=1)
        drive(choice, 1, lambda rows, used: 9000 if used == 2 else 18000, rows=32)
    assert drive(choice, 20, lambda rows, used: 1000, rows=1)[1] >= 19
    assert drive(choice, 20, lambda rows, used: 1000, rows=32)[2] >= 19


def test_thread_count_follows_a_machine_that_changes() -> None:
    choice = ThreadChoice(2)
    drive(choice, 200, lambda rows, used: 1000 if used == 2 else 1400)
    drive(choice, 40 * TRIED_EVERY, lambda rows, used: 1500 if used == 2 else 1400)
    assert drive(choice, 31, lambda rows, used: 1500 if used == 2 else 1400)[1] >= 30


def test_single_slow_step_changes_no_thread_count() -> None:
    choice = ThreadChoice(2)
    drive(choice, 200, lambda rows, used: 1000 if used == 2 else 1100)
    choice.took(8, 2, 1_000_000)
    assert drive(choice, 31, lambda rows, used: 1000 if used == 2 else 1100)[2] >= 30


@pytest.mark.parametrize("rows", [65, 512, 2048])
def test_large_step_always_has_all_threads(rows: int) -> None:
    assert drive(ThreadChoice(4), 400, lambda rows, used: 1000 if used == 3 else 2000, rows) == {4: 400}
