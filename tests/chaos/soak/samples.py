"""Sample a soak every second, and draw it: memory, files and threads of each process, Redis, the scheduler.

Streams that fill for an hour before they are trimmed (docs/redis.md) are taken off Redis's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from redis.exceptions import RedisError

from shared.keys import CLASSES, GROUP
from tests.chaos.harness.target.stack import SHARD, ChaosStack

EVERY_S = 1.0
PANELS = {
    "rss_mib": "resident memory, MiB", "fds": "open files", "threads": "threads", "memory_mib": "Redis's memory, MiB",
    "keys": "keys in Redis", "tokens": "entries of the token streams", "entries": "requests in the streams",
    "pending": "pending entries", "blocks": "KV blocks in use",
}  # fmt: skip


@dataclass(slots=True)
class Samples:
    """Rows by second; a row has a value by name: `rss_mib gateway-0`, `memory_mib redis`."""

    at_s: list[float] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)

    async def collect(self, stack: ChaosStack) -> None:
        """Until cancelled. Times are those since this call."""
        begun_s = time.monotonic()
        processes = {name: psutil.Process(service.pid) for name, service in stack.processes.items()}
        while True:
            due_s = time.monotonic() + EVERY_S
            with contextlib.suppress(RedisError, OSError):  # the machine is busy: one sample less
                row = {**_of_processes(processes), **await _of_redis(stack), **await _of_scheduler(stack)}
                self.at_s.append(time.monotonic() - begun_s)
                self.rows.append(row)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    def drop_after(self, seconds: float) -> None:
        count = sum(at <= seconds for at in self.at_s)
        del self.at_s[count:], self.rows[count:]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows]


def _of_processes(processes: dict[str, psutil.Process]) -> dict[str, float]:
    row: dict[str, float] = {}
    for name, process in processes.items():
        with process.oneshot():
            row[f"rss_mib {name}"] = process.memory_info().rss / 2**20
            row[f"threads {name}"] = process.num_threads()
        row[f"fds {name}"] = process.num_fds()
    return row


async def _of_redis(stack: ChaosStack) -> dict[str, float]:
    redis, keys = stack.redis, stack.keys
    gateways = await stack.alive("gateway")
    pipe = redis.pipeline(transaction=False)
    for name in CLASSES:
        pipe.xlen(keys.requests(name))
        pipe.xpending(keys.requests(name), GROUP)
    for gateway in gateways:
        pipe.xlen(keys.tokens(gateway))
    pipe.xlen(keys.control(SHARD))
    pipe.hget(keys.queue, "requests")
    pipe.dbsize()
    pipe.info("memory")
    pipe.memory_usage(keys.stats_history(SHARD), samples=0)
    *counts, control, queued, size, memory, history = await pipe.execute()
    asked, tokens = counts[: 2 * len(CLASSES)], counts[2 * len(CLASSES) :]
    return {
        "entries redis": sum(asked[::2]),
        "pending redis": sum(pending["pending"] for pending in asked[1::2]),
        "tokens redis": sum(tokens),
        "control redis": control,
        "queued redis": float(queued or 0),
        "keys redis": size,
        "memory_mib redis": (memory["used_memory"] - (history or 0)) / 2**20,
    }


async def _of_scheduler(stack: ChaosStack) -> dict[str, float]:
    stats = {name: float(value) for name, value in (await stack.stats()).items() if value.replace(".", "", 1).isdigit()}
    return {
        "blocks scheduler": stats["blocks_total"] - stats["blocks_free"] - stats["blocks_cached"],
        "sequences scheduler": stats["running"] + stats["waiting"] + stats["parked"],
    }


def draw(samples: Samples, warm_up_s: float, path: Path) -> None:
    """Draw one panel for each kind of quantity, all samples, the warm-up shaded. Needs matplotlib.

    path: the format is that of its ending.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    minutes = [at / 60 for at in samples.at_s]
    for axes, (kind, title) in zip(figure.subplots(3, 3).flat, PANELS.items(), strict=True):
        for name in samples.rows[0]:
            if name.split()[0] == kind:
                axes.plot(minutes, samples.column(name), linewidth=0.8, label=name.split()[1])
        axes.axvspan(minutes[0], warm_up_s / 60, color="0.9")
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes")
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=90)
