"""The faults of a chaos run and when they come: a random schedule by a seed, every kind once before any comes again.

A fault returns when the stack is whole again as far as can be asked; several may be under way, but one a target.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil

from bench.chaos_history import Injected
from bench.chaos_proxy import Proxy
from bench.chaos_stack import GATEWAYS, REDIS, SCHEDULERS, SERVICES, SHARD, WORKER, ChaosStack, until

WHOLE_S = 60.0
"""After this long a fault that is over must have left a whole stack; else the run fails."""
AT_ONCE = 2
NETWORK = ("latency", "cut", "half_open", "bytes")


class Faults:
    """Injects faults into one stack."""

    def __init__(self, stack: ChaosStack, seed: int) -> None:
        self._stack = stack
        self._rng = random.Random(seed)
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._places = asyncio.Semaphore(AT_ONCE)
        self.injected: list[Injected] = []

    async def run(self, gap_s: float, most: int, until_s: float) -> None:
        """A fault about every gap_s, until there were so many or the time (of time.monotonic()) has come.

        Raises NotReadyError when the stack does not come back.
        """
        kinds = self._kinds()
        async with asyncio.TaskGroup() as group:
            for _ in range(most):
                await asyncio.sleep(self._rng.uniform(0.2, 1.8) * gap_s)
                await self._places.acquire()
                if time.monotonic() > until_s:
                    self._places.release()
                    return
                group.create_task(self._one(next(kinds), random.Random(self._rng.randrange(1 << 31))))

    def _kinds(self) -> Iterator[str]:
        while True:
            yield from self._rng.sample(list(KINDS), len(KINDS))

    async def _one(self, kind: str, rng: random.Random) -> None:
        target = TARGETS[kind](self._stack, rng)
        try:
            async with self._locks[target]:
                fault = Injected(kind, target, time.monotonic())
                self.injected.append(fault)
                await KINDS[kind](self._stack, target, rng)
                fault.over_s = time.monotonic()
        finally:
            self._places.release()


def leader(stack: ChaosStack) -> str:
    """The scheduler that talks to the worker, or the first that runs."""
    running = [name for name in SCHEDULERS if stack.processes[name].pid]
    for name in running:
        try:
            peers = [
                connection.raddr for connection in psutil.Process(stack.processes[name].pid).net_connections("tcp")
            ]
        except psutil.Error:
            continue
        if any(peer and peer.port == stack.worker_proxy.port for peer in peers):
            return name
    return running[0] if running else SCHEDULERS[0]


async def _worker_kill(stack: ChaosStack, target: str, _: random.Random) -> None:
    before = stack.processes[target].pid
    stack.processes[target].signal(signal.SIGKILL)

    async def again() -> bool:
        return await stack.worker_pid() not in (0, before)

    await until("a worker registers again", again, WHOLE_S)
    await _led(stack)


async def _stop(stack: ChaosStack, target: str, rng: random.Random) -> None:
    stack.processes[target].signal(signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(0.5, 6.0))
    stack.processes[target].signal(signal.SIGCONT)
    await _led(stack)


async def _scheduler_kill(stack: ChaosStack, target: str, _: random.Random) -> None:
    stack.processes[target].signal(signal.SIGKILL)
    await _led(stack)


async def _led(stack: ChaosStack) -> None:
    """Somebody leads the shard and has a worker, by stats that are younger than this call."""
    begun_ms = time.time() * 1000

    async def so() -> bool:
        stats = await stack.stats()
        return stats.get("workers") == "1" and float(stats.get("time_ms", 0)) > begun_ms

    await until(f"shard {SHARD} is led and has a worker", so, WHOLE_S)


async def _end_gateway(stack: ChaosStack, target: str, how: int) -> None:
    number = GATEWAYS.index(target)
    before = stack.processes[target].pid
    stack.processes[target].signal(how)

    async def again() -> bool:
        return stack.processes[target].pid not in (0, before) and await stack.gateway_ready(number)

    await until(f"{target} is ready again", again, WHOLE_S)


async def _gateway_kill(stack: ChaosStack, target: str, _: random.Random) -> None:
    await _end_gateway(stack, target, signal.SIGKILL)


async def _gateway_term(stack: ChaosStack, target: str, _: random.Random) -> None:
    await _end_gateway(stack, target, signal.SIGTERM)


async def _end_redis(stack: ChaosStack, how: int) -> None:
    before = stack.processes[REDIS].pid
    stack.processes[REDIS].signal(how)

    async def again() -> bool:
        return stack.processes[REDIS].pid not in (0, before) and await stack.redis_answers()

    await until("Redis answers again", again, WHOLE_S)


async def _redis_restart(stack: ChaosStack, _: str, __: random.Random) -> None:
    await _end_redis(stack, signal.SIGTERM)


async def _redis_kill(stack: ChaosStack, _: str, __: random.Random) -> None:
    await _end_redis(stack, signal.SIGKILL)


def _network(way: str) -> Callable[[ChaosStack, str, random.Random], Awaitable[None]]:
    async def spoil(stack: ChaosStack, target: str, rng: random.Random) -> None:
        proxy = _proxy(stack, target)
        if way == "latency":
            proxy.latency_s = rng.uniform(0.01, 0.1)
        elif way == "cut":
            proxy.cut()
        elif way == "half_open":
            proxy.go_silent()
        else:
            proxy.byte_by_byte = True
        await asyncio.sleep(rng.uniform(0.5, 4.0))
        proxy.heal()
        await _led(stack)

    return spoil


def _proxy(stack: ChaosStack, target: str) -> Proxy:
    """Of the way that `network TARGET` names."""
    further = target.removeprefix("network ")
    return stack.worker_proxy if further == "steps" else stack.proxies[further]


Target = Callable[[ChaosStack, random.Random], str]
KINDS: dict[str, Callable[[ChaosStack, str, random.Random], Awaitable[Any]]] = {
    "worker_kill": _worker_kill,
    "worker_stop": _stop,
    "scheduler_kill": _scheduler_kill,
    "scheduler_stop": _stop,
    "gateway_kill": _gateway_kill,
    "gateway_term": _gateway_term,
    "redis_restart": _redis_restart,
    "redis_kill": _redis_kill,
    **{f"redis_{way}": _network(way) for way in NETWORK},
    **{f"steps_{way}": _network(way) for way in NETWORK},
}
"""redis_WAY: between a service and Redis; steps_WAY: between the scheduler and the worker."""
TARGETS: dict[str, Target] = {
    **dict.fromkeys(("worker_kill", "worker_stop"), lambda _, __: WORKER),
    **dict.fromkeys(("scheduler_kill", "scheduler_stop"), lambda stack, _: leader(stack)),
    **dict.fromkeys(("gateway_kill", "gateway_term"), lambda _, rng: rng.choice(GATEWAYS)),
    **dict.fromkeys(("redis_restart", "redis_kill"), lambda _, __: REDIS),
    **{f"redis_{way}": lambda _, rng: f"network {rng.choice(SERVICES)}" for way in NETWORK},
    **{f"steps_{way}": lambda _, __: "network steps" for way in NETWORK},
}
