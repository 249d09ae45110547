"""Redis loses what it had acknowledged, under load: an answer may end as an error then, and is never a wrong text.

Ways: the append-only file loses its last seconds or is cut at any byte, an older copy of it is restored, a replica that
lacks the tail takes over, or everything is deleted, also with the clock set back. The stack must serve again
afterwards, and its counters must be those of what is there.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from shared.settings import DEMO_MODEL
from shared.tasks import end
from tests.chaos.harness.checker import Violation, check_epochs, check_exits, check_tokens
from tests.chaos.harness.client import Sessions, session
from tests.chaos.harness.history import DONE, History, Outcome, Rest
from tests.chaos.harness.load import Load, grammars, templates, undisturbed
from tests.chaos.harness.rest import epochs, said, settled
from tests.chaos.harness.run import SETTINGS
from tests.chaos.harness.target.stack import REDIS, ChaosStack, until

SEED = 20261123
CLIENTS = 8
TOKENS = 240
TEMPLATES = 6
SETTLE_S = 20.0
RECOVERY_S = 60.0
BEFORE, AFTER = 8, 16
"""Requests that have ended before Redis loses something, and after each loss."""
TAIL_BYTES = 100_000
TAIL_S = 2
BACK_S = 3600
SECOND = re.compile(rb"#TS:([0-9]+)\r\n")
"""What Redis writes into the file when a second begins, with `aof-timestamp-enabled`."""

Lose = Callable[[ChaosStack, random.Random], Awaitable[None]]


def logs(stack: ChaosStack) -> list[Path]:
    """Return the parts of the append-only file that grow."""
    return sorted((stack.directory / "redis").glob("**/*.incr.aof"))


async def end_redis(stack: ChaosStack, spoil: Callable[[], None]) -> None:
    """Kill Redis; spoil: what happens to its files before it starts again."""
    redis = stack.processes[REDIS]
    before = redis.pid
    redis.before_start = spoil
    redis.signal(signal.SIGKILL)

    async def again() -> bool:
        return redis.pid not in (0, before) and await stack.redis_answers()

    await until("Redis answers again", again, RECOVERY_S)
    redis.before_start = None


async def cut_at_a_byte(stack: ChaosStack, rng: random.Random) -> None:
    def cut() -> None:
        log = logs(stack)[-1]
        size = log.stat().st_size
        with log.open("r+b") as file:
            file.truncate(size - rng.randrange(1, size // 3))

    await end_redis(stack, cut)


async def cut_the_last_seconds(stack: ChaosStack, _: random.Random) -> None:
    await stack.redis.config_set("aof-timestamp-enabled", "yes")

    def tail() -> int:
        """Return where the last seconds begin; 0 while there are not as many."""
        seconds = [(int(found[1]), found.start()) for found in SECOND.finditer(logs(stack)[-1].read_bytes())]
        return next((at for second, at in seconds[1:] if second > seconds[-1][0] - TAIL_S), 0)

    async def long_enough() -> bool:
        return tail() > 0

    await until("Redis writes for some seconds", long_enough, RECOVERY_S, every=0.5)

    def cut() -> None:
        with logs(stack)[-1].open("r+b") as file:
            file.truncate(tail())

    await end_redis(stack, cut)


async def restore_an_older_copy(stack: ChaosStack, _: random.Random) -> None:
    data, copy = stack.directory / "redis", stack.directory / "copy"
    shutil.copytree(data, copy)
    size = logs(stack)[-1].stat().st_size

    async def grown() -> bool:
        return logs(stack)[-1].stat().st_size > size + size // 5

    await until("Redis writes more", grown, RECOVERY_S)

    def restore() -> None:
        shutil.rmtree(data)
        copy.rename(data)

    await end_redis(stack, restore)


async def promote_a_replica_without_the_tail(stack: ChaosStack, _: random.Random) -> None:
    await stack.follow()
    stack.unfollow()
    offset = (await stack.redis.info("replication"))["master_repl_offset"]

    async def gone_on() -> bool:
        return (await stack.redis.info("replication"))["master_repl_offset"] > offset + TAIL_BYTES

    await until("Redis has written what the replica lacks", gone_on, RECOVERY_S)
    await stack.promote()


async def delete_everything(stack: ChaosStack, _: random.Random) -> None:
    await stack.redis.flushall()


async def delete_everything_and_set_the_clock_back(stack: ChaosStack, _: random.Random) -> None:
    await stack.step_redis_clock(-BACK_S)
    await stack.redis.flushall()


WAYS: list[list[Lose]] = [
    [cut_the_last_seconds, cut_at_a_byte],
    [restore_an_older_copy, promote_a_replica_without_the_tail],  # the last: nothing follows the replica
    [delete_everything, delete_everything_and_set_the_clock_back],
]
"""Those of one stack, in turn."""


class Run:
    """One stack under load that loses what Redis had, again and again."""

    def __init__(self, stack: ChaosStack) -> None:
        self.stack = stack
        self.outcomes: dict[str, Outcome] = {}
        self.histories: list[History] = []

    async def under_load(self, ways: list[Lose], seed: int) -> None:
        async with session() as usual, session(narrow=True) as narrow:
            chosen = [*templates(self.stack.name, TOKENS, SEED)[:TEMPLATES], grammars(self.stack.name, SEED)[1]]
            for template in chosen:
                self.outcomes[template.name] = await undisturbed(usual, self.stack.urls, template)
            load = Load([Sessions(usual, narrow)], self.stack.urls, chosen, seed)
            self.histories = load.histories
            ended: list[History] = []
            loading = asyncio.create_task(load.run(CLIENTS, ended.append))

            async def so_many(count: int) -> None:
                async def reached() -> bool:
                    if loading.done():
                        await loading
                    return sum(history.end == DONE for history in ended) >= count

                await until(f"{count} requests have ended", reached, 2 * RECOVERY_S)

            try:
                await so_many(BEFORE)
                for lose in ways:
                    await lose(self.stack, random.Random(seed))
                    await until("the stack is ready", self.stack.ready, RECOVERY_S)
                    await so_many(sum(history.end == DONE for history in ended) + AFTER)
                load.stop()
                await loading
            finally:
                await end(loading)

    def wrong(self) -> list[Violation]:
        """Return what no loss explains: an answer that says a token twice, holds another or ends short as if whole."""
        return [
            violation
            for history in self.histories
            for violation in check_tokens(history, self.outcomes[history.template])
        ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ways", WAYS, ids=["file is cut", "older data", "everything"])
def test_data_lost_by_redis_is_an_error_never_other_text(tmp_path: Path, ways: list[Lose]) -> None:
    async def whole() -> tuple[Run, Rest, list[Violation]]:
        async with ChaosStack(tmp_path / "stack", DEMO_MODEL, **SETTINGS, max_seqs=16, kv_blocks=400) as stack:
            run = Run(stack)
            await run.under_load(ways, SEED)
            rest = await settled(stack, SETTLE_S)
            steps = (await epochs(stack))["steps of the worker"]
            exits = {name: process.exits for name, process in stack.processes.items() if name != REDIS}
            return run, rest, [*check_epochs("steps", steps), *check_exits(exits, said(stack))]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run, rest, found = runner.run(whole())
    assert run.wrong() == []
    assert found == []
    assert rest.quiet(), rest
