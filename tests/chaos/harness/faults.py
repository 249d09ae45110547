"""Faults of a chaos run: every kind with its targets and what it does, and the random schedule by which they come.

The function of a kind returns when the stack is whole again as far as can be asked, and notes when what was hurt
answered again. It raises NotReadyError when the stack does not come back. Every kind comes once before any comes
again; several may be under way, but one a target.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from services.cli.drain import drain
from shared.errors import ConfigurationError
from tests.chaos.harness.history import Injected
from tests.chaos.harness.target.proxy import Proxy
from tests.chaos.harness.target.stack import (
    MAXMEMORY,
    REDIS,
    SERVICES,
    ChaosStack,
    Stack,
    until,
)

WHOLE_S = 60.0
"""After this long a fault that is over must have left a whole stack; else the run fails."""
NETWORK = ("latency", "cut", "half_open", "bytes")
STOPPED_S, STOPPED_GATEWAY_S, SPOILT_S = (0.5, 6.0), (0.5, 9.0), (0.5, 4.0)
"""A gateway's heartbeat may run out meanwhile, so that its requests are parked."""
LITTLE_MEMORY = "1mb"
"""Less than an empty Redis takes: every write is refused."""
FORWARD_S, BACK_S = (40, 90), (600, 3600)
"""Forward: every lease and heartbeat ends, and all tokens of the stream are trimmed, but no record of the last minutes
goes. Back: what expires in seconds lasts for the rest of the run.
"""
SHORT_HANG_S = (1.0, 5.0)
"""Around the scheduler's patience; a hang for ever ends with the worker's own."""

Do = Callable[[Any, Injected, random.Random], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """targets: names that no two faults hit at a time; do: what is done."""

    targets: Callable[[Stack, random.Random], tuple[str, ...]]
    do: Do


# Whole again


async def _led(stack: Stack) -> None:
    """Return whether a scheduler leads the shard and has a worker, by stats younger than this call."""
    begun_ms = time.time() * 1000

    async def so() -> bool:
        stats = await stack.stats()
        return stats.get("workers") == stack.replicas and float(stats.get("time_ms", 0)) > begun_ms

    await until(f"shard {stack.shard} is led and has a worker", so, WHOLE_S)


async def _another_worker(stack: Stack, before: int, fault: Injected) -> None:
    async def again() -> bool:
        return await stack.worker_pid() not in (0, before)

    await until("a worker registers again", again, WHOLE_S)
    fault.ready_s = time.monotonic()
    await _led(stack)


async def _another_gateway(stack: Stack, name: str, before: int) -> None:
    async def again() -> bool:
        return stack.processes[name].pid not in (0, before) and await stack.gateway_ready(stack.gateways.index(name))

    await until(f"{name} is ready again", again, WHOLE_S)


# Processes


async def _drain(stack: Stack, name: str) -> None:
    """`orcinus drain NAME`, again while another fault is in its way."""
    settings, launcher = stack.drain_settings()

    async def drained() -> bool:
        with contextlib.suppress(ConfigurationError):
            ends = await asyncio.to_thread(drain, name, settings, launcher, WHOLE_S, lambda _: None)
            return all(end.drained for end in ends)
        return False

    await until(f"{name} drains", drained, WHOLE_S)


async def _drain_worker(stack: Stack, fault: Injected, _: random.Random) -> None:
    before = stack.processes[stack.worker].pid
    await _drain(stack, "worker")
    await _another_worker(stack, before, fault)


async def _drain_scheduler(stack: Stack, fault: Injected, _: random.Random) -> None:
    await _drain(stack, stack.shard)
    await _led(stack)


async def _drain_gateway(stack: Stack, fault: Injected, _: random.Random) -> None:
    before = stack.processes[fault.target].pid
    names: list[str] = []

    async def is_named() -> bool:
        """Whether it has a heartbeat, which a Redis that was restarted has not yet, or has ended meanwhile."""
        names[:] = [name for name in await stack.alive("gateway") if f"-{before}-" in name]
        return bool(names) or stack.processes[fault.target].pid != before

    await until(f"{fault.target} has a heartbeat", is_named, WHOLE_S)
    if names:
        await _drain(stack, names[0])
    await _another_gateway(stack, fault.target, before)
    fault.ready_s = time.monotonic()


def _end_worker(how: int) -> Do:
    async def end(stack: Stack, fault: Injected, _: random.Random) -> None:
        before = stack.processes[stack.worker].pid
        stack.processes[stack.worker].signal(how)
        await _another_worker(stack, before, fault)

    return end


def _end_scheduler(how: int) -> Do:
    async def end(stack: Stack, fault: Injected, _: random.Random) -> None:
        stack.processes[fault.target].signal(how)
        fault.ready_s = fault.at_s  # another one stands by
        await _led(stack)

    return end


async def _end_worker_and_scheduler(stack: Stack, fault: Injected, _: random.Random) -> None:
    before = stack.processes[stack.worker].pid
    for name in fault.target.split("+"):
        stack.processes[name].signal(signal.SIGKILL)
    await _another_worker(stack, before, fault)


def _end_gateways(how: int) -> Do:
    async def end(stack: Stack, fault: Injected, _: random.Random) -> None:
        before = {name: stack.processes[name].pid for name in fault.target.split("+")}
        for name in before:
            stack.processes[name].signal(how)
        await asyncio.gather(*(_another_gateway(stack, name, pid) for name, pid in before.items()))
        fault.ready_s = time.monotonic()

    return end


def _end_redis(how: int) -> Do:
    async def end(stack: Stack, fault: Injected, _: random.Random) -> None:
        before = stack.processes[REDIS].pid
        stack.processes[REDIS].signal(how)

        async def again() -> bool:
            return stack.processes[REDIS].pid not in (0, before) and await stack.redis_answers()

        await until("Redis answers again", again, WHOLE_S)
        fault.ready_s = time.monotonic()
        await _led(stack)

    return end


def _stop(seconds: tuple[float, float]) -> Do:
    async def stop(stack: Stack, fault: Injected, rng: random.Random) -> None:
        stack.processes[fault.target].signal(signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(*seconds))
        stack.processes[fault.target].signal(signal.SIGCONT)
        fault.ready_s = time.monotonic()
        await _led(stack)

    return stop


async def _fill_redis(stack: ChaosStack, fault: Injected, rng: random.Random) -> None:
    await stack.set_memory(LITTLE_MEMORY)
    await asyncio.sleep(rng.uniform(*SPOILT_S))
    await stack.set_memory(MAXMEMORY)
    fault.ready_s = time.monotonic()
    await _led(stack)


async def _set_clock_forward(stack: ChaosStack, fault: Injected, rng: random.Random) -> None:
    await stack.step_redis_clock(rng.randrange(*FORWARD_S))
    fault.ready_s = time.monotonic()
    await _led(stack)


async def _set_clock_back(stack: ChaosStack, fault: Injected, rng: random.Random) -> None:
    for name in fault.target.split("+")[1:]:
        stack.processes[name].signal(signal.SIGKILL)
    await stack.step_redis_clock(-rng.randrange(*BACK_S))
    fault.ready_s = time.monotonic()
    await _led(stack)


# Inside a step


async def _order(stack: ChaosStack, what: str) -> None:
    stack.order(what)

    async def taken() -> bool:
        return not stack.orders.exists()

    await until("the worker runs a step", taken, WHOLE_S)


def _step_fails(what: str) -> Do:
    async def fail(stack: ChaosStack, fault: Injected, _: random.Random) -> None:
        await _order(stack, what)
        fault.ready_s = time.monotonic()
        await _led(stack)

    return fail


async def _step_hangs(stack: ChaosStack, fault: Injected, rng: random.Random) -> None:
    before = stack.processes[stack.worker].pid
    seconds = rng.uniform(*SHORT_HANG_S)
    if rng.random() < 0.5:
        await _order(stack, f"hang {seconds:.3f}")
        await asyncio.sleep(seconds)
        fault.ready_s = time.monotonic()
        await _led(stack)
        return
    await _order(stack, "hang")
    await _another_worker(stack, before, fault)


# Networks


def _spoil(way: str) -> Do:
    async def spoil(stack: ChaosStack, fault: Injected, rng: random.Random) -> None:
        proxy = _proxy(stack, fault.target)
        if way == "latency":
            proxy.latency_s = rng.uniform(0.01, 0.1)
        elif way == "cut":
            proxy.cut()
        elif way == "half_open":
            proxy.go_silent()
        else:
            proxy.byte_by_byte = True
        await asyncio.sleep(rng.uniform(*SPOILT_S))
        proxy.heal()
        fault.ready_s = time.monotonic()
        await _led(stack)

    return spoil


def _proxy(stack: ChaosStack, target: str) -> Proxy:
    """Of the way that `network TARGET` names."""
    further = target.removeprefix("network ")
    return stack.worker_proxy if further == "steps" else stack.proxies[further]


def _the_worker(stack: Stack, _: random.Random) -> tuple[str, ...]:
    return (stack.worker,)


def _the_leader(stack: Stack, _: random.Random) -> tuple[str, ...]:
    return (stack.leader(),)


def _a_gateway(stack: Stack, rng: random.Random) -> tuple[str, ...]:
    return (rng.choice(stack.gateways),)


def _redis(_: Stack, __: random.Random) -> tuple[str, ...]:
    return (REDIS,)


def _way_to_redis(_: Stack, rng: random.Random) -> tuple[str, ...]:
    return (f"network {rng.choice(SERVICES)}",)


KINDS: dict[str, Kind] = {
    "worker_kill": Kind(_the_worker, _end_worker(signal.SIGKILL)),
    "worker_term": Kind(_the_worker, _end_worker(signal.SIGTERM)),
    "worker_drain": Kind(_the_worker, _drain_worker),
    "worker_stop": Kind(_the_worker, _stop(STOPPED_S)),
    "step_error": Kind(_the_worker, _step_fails("error")),
    "step_memory": Kind(_the_worker, _step_fails("memory")),
    "step_hang": Kind(_the_worker, _step_hangs),
    "scheduler_kill": Kind(_the_leader, _end_scheduler(signal.SIGKILL)),
    "scheduler_term": Kind(_the_leader, _end_scheduler(signal.SIGTERM)),
    "scheduler_drain": Kind(_the_leader, _drain_scheduler),
    "scheduler_stop": Kind(_the_leader, _stop(STOPPED_S)),
    "worker_scheduler_kill": Kind(lambda stack, _: (stack.worker, stack.leader()), _end_worker_and_scheduler),
    "gateway_kill": Kind(_a_gateway, _end_gateways(signal.SIGKILL)),
    "gateway_term": Kind(_a_gateway, _end_gateways(signal.SIGTERM)),
    "gateway_drain": Kind(_a_gateway, _drain_gateway),
    "gateway_stop": Kind(_a_gateway, _stop(STOPPED_GATEWAY_S)),
    "gateways_kill": Kind(lambda stack, _: tuple(stack.gateways), _end_gateways(signal.SIGKILL)),
    "redis_restart": Kind(_redis, _end_redis(signal.SIGTERM)),
    "redis_kill": Kind(_redis, _end_redis(signal.SIGKILL)),
    "redis_stop": Kind(_redis, _stop(STOPPED_S)),
    "redis_full": Kind(_redis, _fill_redis),
    "redis_clock_forward": Kind(_redis, _set_clock_forward),
    "redis_clock_back": Kind(_redis, _set_clock_back),
    "redis_clock_back_scheduler_kill": Kind(lambda stack, _: (REDIS, stack.leader()), _set_clock_back),
    **{f"redis_{way}": Kind(_way_to_redis, _spoil(way)) for way in NETWORK},
    **{f"steps_{way}": Kind(lambda _, __: ("network steps",), _spoil(way)) for way in NETWORK},
}
"""redis_WAY: between a service and Redis; steps_WAY: between the scheduler and the worker."""
OF_PROCESSES = tuple(name for name in KINDS if not name.startswith(("step", "redis")))
"""Those that need no proxy, no worker of the bench's own and no Redis that may be hurt."""


AT_ONCE = 2


class Faults:
    """Injects faults into one stack."""

    def __init__(
        self, stack: Stack, seed: int, kinds: Sequence[str], at_once: int = AT_ONCE,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """kinds: of KINDS; at_once: how many may be under way; say: is told of each fault."""
        self._stack, self._kinds, self._say = stack, kinds, say
        self._rng = random.Random(seed)
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._places = asyncio.Semaphore(at_once)
        self.injected: list[Injected] = []

    async def run(self, gap_s: float, most: int, until_s: float) -> None:
        """A fault about every gap_s, until there were so many or the time (of time.monotonic()) has come.

        Raises NotReadyError when the stack does not come back.
        """
        if not self._kinds:
            await asyncio.sleep(max(0.0, until_s - time.monotonic()))
            return
        kinds = self._in_turn()
        async with asyncio.TaskGroup() as group:
            for _ in range(most):
                await asyncio.sleep(self._rng.uniform(0.2, 1.8) * gap_s)
                await self._places.acquire()
                if time.monotonic() > until_s:
                    self._places.release()
                    return
                group.create_task(self._one(next(kinds), random.Random(self._rng.randrange(1 << 31))))

    def _in_turn(self) -> Iterator[str]:
        while True:
            yield from self._rng.sample(list(self._kinds), len(self._kinds))

    async def _one(self, kind: str, rng: random.Random) -> None:
        hurt = KINDS[kind]
        targets = hurt.targets(self._stack, rng)
        try:
            async with AsyncExitStack() as locks:
                for target in sorted(targets):
                    await locks.enter_async_context(self._locks[target])
                fault = Injected(kind, "+".join(targets), time.monotonic())
                self.injected.append(fault)
                self._say(f"fault {len(self.injected)}: {kind} of {fault.target}")
                await hurt.do(self._stack, fault, rng)
                fault.over_s = time.monotonic()
        finally:
            self._places.release()
