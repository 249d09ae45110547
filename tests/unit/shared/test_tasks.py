"""Work that a cancellation waits for."""

from __future__ import annotations

import asyncio

import pytest

from shared.tasks import to_its_end


async def test_a_cancellation_waits_for_the_work() -> None:
    begun, gate = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def work() -> None:
        begun.set()
        await gate.wait()
        done.append("work")

    task = asyncio.create_task(to_its_end(work()))
    await begun.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done() and not done
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["work"]


async def test_work_that_is_not_cancelled_gives_what_it_returns_or_raises() -> None:
    async def give(error: Exception | None) -> int:
        if error is not None:
            raise error
        return 3

    assert await to_its_end(give(None)) == 3
    with pytest.raises(ValueError, match="broken"):
        await to_its_end(give(ValueError("broken")))
