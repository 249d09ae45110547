"""`orcinus bench replicas`: one scheduler with 1, 2, 4 and 8 replicas.

`drives`: the scheduler's loop with real gRPC streams to sleep workers in another process (worker.py: no model, a
synthetic step time): CPU time of the scheduler for a step, tokens a second. Redis is left out. `routing`: the core on a
virtual clock (routing.py): hits, imbalance, first tokens, with routing by prefix and without.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.result import provenance
from bench.studies.replicas.routing import simulate
from bench.studies.replicas.worker import LIMITS
from protos import queue_pb2
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import NewRequest, Outcome
from services.scheduler.quarantine import Quarantine
from services.scheduler.telemetry import Stats
from services.scheduler.workers.fleet import Fleet
from services.scheduler.workers.loop import WorkerContext
from services.scheduler.workers.registry import Registration
from shared.command_line.arguments import Parser
from shared.settings import ROOT, SchedulerSettings

COUNTS = (1, 2, 4, 8)
PROMPT, OUTPUT = 64, 1000  # tokens; no request ends while it is measured, and the KV of all fits
WARM_S = 2.0


class TokenCounter:
    """A stand-in of the publisher: count tokens."""

    def __init__(self) -> None:
        self.tokens = 0

    def put(self, outcome: Outcome | None, step: int) -> None:
        if outcome is not None:
            self.tokens += int(outcome.counts.sum())


async def drive(count: int, step_ms: float, seconds: float) -> dict[str, Any]:
    """Let all slots of `count` sleep workers decode for this time."""
    argv = [sys.executable, "-m", "bench.studies.replicas.worker", str(count), str(step_ms)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)  # noqa: ASYNC220
    try:
        addresses = [line.strip() for _, line in zip(range(count), process.stdout or (), strict=False)]
        core, counter = Scheduler("orcinus"), TokenCounter()
        quarantine = Quarantine(core, lambda name, text: None, lambda name, finish, text: None)
        reports: Any = SimpleNamespace(last_step=0, answered=0, event=lambda *words, **ids: None)
        context = WorkerContext(
            core, quarantine, Stats(time.monotonic_ns()), reports, counter.put, lambda: False, lambda: None,
            lambda: fleet.wake_idle(),
        )  # fmt: skip
        registry: Any = SimpleNamespace(ready=[])
        claims: Any = SimpleNamespace(set_slots=lambda slots: None, on_loss=lambda: None)
        fleet = Fleet(SchedulerSettings(), registry, context, claims)
        leads = [
            asyncio.create_task(fleet.serve(Registration(f"sleep-{i}", address, f"sleep-{i}", epoch=1)))
            for i, address in enumerate(addresses)
        ]
        await _until("all workers are linked", lambda: len(fleet.loops) == count, 30)
        rng = np.random.default_rng(1)
        for number in range(count * LIMITS.slots):
            prompt = rng.integers(0, 30_000, PROMPT).astype(np.int32)
            core.add(NewRequest(f"r{number}", [prompt], OUTPUT, gateway="g", payload=queue_pb2.Request()), 1)
        fleet.wake()
        await _until("all run", lambda: not core.waiting_count, 60)
        await asyncio.sleep(WARM_S)
        steps, tokens, cpu, begin = _steps(fleet), counter.tokens, time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        steps, cpu, took = _steps(fleet) - steps, time.process_time() - cpu, time.monotonic() - begin
        for task in leads:
            task.cancel()
        await asyncio.gather(*leads, return_exceptions=True)
        return {
            "replicas": count,
            "steps": steps,
            "cpu_us_a_step": round(1e6 * cpu / steps, 1),
            "cores_used": round(cpu / took, 3),
            "output_tok_s": round((counter.tokens - tokens) / took),
            "of_what_the_sleep_allows": round(steps * step_ms / 1000 / took / count, 3),
        }
    finally:
        process.terminate()
        process.wait(10)


async def _until(what: str, condition: Callable[[], bool], seconds: float) -> None:
    """Return once `condition()` is true; raise TimeoutError after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - no event tells that a worker is linked
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise TimeoutError(f"{what}: not within {seconds:g} s") from None


def _steps(fleet: Fleet) -> int:
    return sum(each.answered_steps for each in fleet.loops.values())


def main(words: list[str]) -> int:
    """Run the command and print JSON."""
    parser = Parser("orcinus bench replicas", "Measure one scheduler with 1, 2, 4 and 8 replicas.")
    parser.add_argument("--step-ms", type=float, default=20.0, help="how long a sleep worker sleeps for a step")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each number of replicas")
    parser.add_argument("--requests", type=int, default=400, help="of the workload for each replica")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args(words)
    command = f"--step-ms {options.step_ms:g} --seconds {options.seconds:g} --requests {options.requests}"
    facts = provenance(["orcinus", "bench", "replicas", *command.split()], "grpcio", "numpy")
    drives, routing = [], []
    for count in COUNTS:
        drives.append(asyncio.run(drive(count, options.step_ms, options.seconds)))
        print(f"drives: {drives[-1]}", file=sys.stderr)
        for affinity in (False, True):
            routing.append(simulate(count, affinity, options.requests * count))
            print(f"routing: {routing[-1]}", file=sys.stderr)
    report = {
        "bench": "replicas",
        **facts,
        "slots": LIMITS.slots,
        "step_ms": options.step_ms,
        "drives": drives,
        "routing": routing,
    }
    if options.json:
        print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
