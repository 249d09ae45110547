"""What an iteration costs the scheduler: plan and apply in steady decode, and the protobuf of the step apart.

`orcinus bench scheduler [--json]`. No worker, no socket: tokens come from an array. In steady decode everything runs
and nothing waits or ends; block boundaries and checkpoints are spread over the steps as they are in service.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from bench.load_report import commit, machine, versions
from services.scheduler.core.core import Core
from services.scheduler.core.presets import PRESETS
from services.scheduler.core.types import Int32, Limits, NewRequest, StepPlan, StepResult

RUNNING = (32, 256, 1024, 4096)
GOAL_US = {256: 60, 4096: 150}  # p50 of plan + apply; DESIGN.md, section 6
BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
LONGEST_PROMPT = 400
STEP_NS = 30_000_000  # virtual time between steps: what a decode step takes; makes checkpoints fall due
VOCAB = 30_000
STOP_ID = 2
FIELDS = ("plan", "apply", "total", "wire")


class Drive:
    """A core in steady decode with `running` sequences, kept `lookahead` steps ahead of its answers."""

    def __init__(self, running: int, policy: str, lookahead: int, gateways: int) -> None:
        rng = np.random.default_rng(running)
        limits = Limits(
            slots=running,
            blocks=running * (MAX_MODEL_LEN // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_step_tokens=running * LONGEST_PROMPT,
        )
        self._core = Core(policy, lookahead=lookahead, step_tokens=limits.max_step_tokens)
        self._core.join(limits)
        self._now = 1_000_000_000
        self._lookahead = lookahead
        self._tokens = rng.integers(STOP_ID + 1, VOCAB, (64, running)).astype(np.int32)
        self._flight: deque[StepPlan] = deque()
        waves = min(32, running)
        for wave in range(waves):  # enter over 32 steps, so that their checkpoints do not fall due together
            for i in range(wave, running, waves):
                self._core.add(
                    NewRequest(
                        id=f"req-{i}",
                        prompts=[
                            rng.integers(STOP_ID + 1, VOCAB, int(rng.integers(1, LONGEST_PROMPT))).astype(np.int32)
                        ],
                        max_tokens=MAX_MODEL_LEN,
                        stop_ids=np.array([STOP_ID], np.int32),
                        gateway=f"gateway-{i % gateways}",
                    ),
                    self._now,
                )
            self.step()
        while self._core.stats()["queued_tokens"]:
            self.step()
        for _ in range(40):
            self.step()

    def step(self) -> tuple[int, int, int] | None:
        """Plans one step and answers the oldest; returns ns of plan, apply and protobuf where both were pure decode."""
        begin = time.perf_counter_ns()
        plan, _ = self._core.plan(self._now)
        planned = time.perf_counter_ns()
        if plan is None:
            raise RuntimeError("nothing to plan in steady decode")
        self._flight.append(plan)
        if len(self._flight) <= self._lookahead:
            return None
        done = self._flight.popleft()
        slots = done.chunk_slots[done.samples]
        result = StepResult(done.id, done.replica, slots, self._tokens[done.id & 63, : slots.size])
        result.step_ns = STEP_NS
        self._now += STEP_NS
        before = time.perf_counter_ns()
        self._core.apply(result, self._now)
        after = time.perf_counter_ns()
        if plan.prefill_tokens or done.prefill_tokens:
            return None
        return planned - begin, after - before, _wire(plan, result.slots, result.tokens)


def _wire(plan: StepPlan, slots: Int32, tokens: Int32) -> int:
    """ns to make the Step's bytes and to read a Result's."""
    from protos import worker_pb2
    from services.scheduler.wire import result_from_wire, step_to_wire

    answer = worker_pb2.Result(epoch=1, id=plan.id, slots=slots.tobytes(), tokens=tokens.tobytes()).SerializeToString()
    begin = time.perf_counter_ns()
    step_to_wire(plan, 1).SerializeToString()
    result_from_wire(worker_pb2.Result.FromString(answer))
    return time.perf_counter_ns() - begin


def run(
    running: int, *, steps: int = 1000, policy: str = "orcinus", lookahead: int = 1, gateways: int = 2
) -> dict[str, Any]:
    """One line of the result: p50 and p99 in microseconds of plan, apply, both together, and protobuf apart."""
    drive = Drive(running, policy, lookahead, gateways)
    times = [taken for taken in (drive.step() for _ in range(steps)) if taken is not None]
    table: npt.NDArray[np.float64] = np.array(times, np.float64) / 1e3
    columns = (table[:, 0], table[:, 1], table[:, 0] + table[:, 1], table[:, 2])
    figures = {
        f"{name}_us": {"p50": round(float(np.median(c)), 1), "p99": round(float(np.percentile(c, 99)), 1)}
        for name, c in zip(FIELDS, columns, strict=True)
    }
    return {"running": running, **figures, "steps": len(times)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="orcinus bench scheduler", description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=_counts, default=RUNNING, help="sequences running, as 32,256")
    parser.add_argument("--steps", type=int, default=1000, help="steps measured; at most 1500 fit the context")
    parser.add_argument("--policy", choices=sorted(PRESETS), default="orcinus")
    parser.add_argument("--lookahead", type=int, default=1)
    parser.add_argument("--gateways", type=int, default=2, help="gateways that the tokens go to")
    parser.add_argument("--note", default="", help="kept in the JSON: what else the machine was doing")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        options = parser.parse_args(given)
    except SystemExit as stop:
        return 0 if stop.code == 0 else 2
    if not 1 <= options.steps <= 1500 or options.lookahead < 0 or options.gateways < 1:
        print("error: --steps is 1 to 1500, --lookahead at least 0, --gateways at least 1", file=sys.stderr)
        return 2
    about = {
        "bench": "scheduler",
        "command": shlex.join(["orcinus", "bench", "scheduler", *given]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "policy": options.policy,
        "lookahead": options.lookahead,
        "gateways": options.gateways,
        "note": options.note,
    }
    results = []
    for running in options.running:
        print(f"{running} running ...", file=sys.stderr)
        results.append(
            run(
                running,
                steps=options.steps,
                policy=options.policy,
                lookahead=options.lookahead,
                gateways=options.gateways,
            )
        )
    if options.json:
        print(json.dumps({"results": results, **about}, indent=1))
    else:
        _show(results)
    return 0


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None
    if not all(1 <= count <= 65536 for count in counts):
        raise argparse.ArgumentTypeError("1 to 65536 sequences")
    return counts


def _show(results: list[dict[str, Any]]) -> None:
    table = Table(title="Steady decode, microseconds an iteration (p50 / p99)")
    for name in ("running", "plan", "apply", "plan + apply", "goal (p50)", "protobuf"):
        table.add_column(name, justify="right")
    for line in results:
        plan, apply, total, wire = (f"{line[f'{n}_us']['p50']:.1f} / {line[f'{n}_us']['p99']:.1f}" for n in FIELDS)
        goal = GOAL_US.get(line["running"])
        table.add_row(str(line["running"]), plan, apply, total, f"{goal}" if goal else "", wire)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
