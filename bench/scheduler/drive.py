"""Drive a core ahead of its answers as the service does, without worker and sockets, and time it.

Called by the parts of the scheduler bench. Tokens come from an array and time is virtual: STEP_NS an iteration. The
plan and the apply that are timed together are those of one and the same iteration.
"""

from __future__ import annotations

import gc
import resource
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from protos import queue_pb2
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Int32, Limits, NewRequest, Outcome, StepPlan, StepResult

BLOCK_SIZE = 16
STEP_NS = 30_000_000  # virtual time between steps: what a decode step takes; makes checkpoints fall due
VOCAB = 30_000
STOP_ID = 2
WAVES = 32  # the running enter over so many steps, so that their checkpoints do not fall due together
SETTLED = 40  # steps after the last of them has entered
PATIENCE = 400  # steps until all have
GOAL_P99_OVER_P50 = 4  # of plan + apply in steady decode


class NotRunningError(Exception):
    """The policy does not let as many run at once as were asked for."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The fixture of every part. `samples`: iterations of a figure, divided into `rounds`."""

    policy: str = "orcinus"
    lookahead: int = 1
    gateways: int = 2
    samples: int = 1000
    rounds: int = 5

    def fewer(self) -> Setup:
        """Return a shorter plan, for a point of a curve and for admissions, which take many iterations each."""
        return replace(self, samples=max(self.samples // 5, self.rounds))


@dataclass(slots=True)
class Iteration:
    """One iteration, planned and answered."""

    plan: StepPlan
    known: Outcome | None  # of plan()
    result: StepResult
    outcome: Outcome  # of apply()
    plan_ns: int
    apply_ns: int


class Drive:
    """A core with one replica, kept `lookahead` steps ahead of its answers."""

    def __init__(self, limits: Limits, setup: Setup) -> None:
        self.core = Scheduler(setup.policy, lookahead=setup.lookahead, step_tokens=limits.max_step_tokens)
        self.core.join(limits)
        self.random = np.random.default_rng(limits.slots)
        self.lookahead = setup.lookahead
        self._gateways = setup.gateways
        self.now_ns = 1_000_000_000
        self._tokens = self.random.integers(STOP_ID + 1, VOCAB, (64, limits.slots)).astype(np.int32)
        self._flight: deque[tuple[StepPlan, Outcome | None, int]] = deque()
        self._next_number = 0
        self._stopping: list[int] = []
        self._stop_ids = np.array([STOP_ID], np.int32)
        sampling = queue_pb2.Sampling(temperature=0.7, top_p=0.9, seed=1)
        self._payload = queue_pb2.Request(sampling=sampling, stop_token_ids=self._stop_ids.tobytes())

    @property
    def running(self) -> int:
        return self.core.replicas[0].table.count

    def prompt(self, tokens: int) -> Int32:
        """Return [tokens] int32, random: no other prompt has the same prefix."""
        return self.random.integers(STOP_ID + 1, VOCAB, tokens).astype(np.int32)

    def add(self, prompt: Int32, max_tokens: int, *, salt: bytes = b"", ttft_slo_ns: int = 0) -> None:
        """Add one request of one sequence."""
        number, self._next_number = self._next_number, self._next_number + 1
        request = NewRequest(
            id=f"req-{number}",
            prompts=[prompt],
            max_tokens=max_tokens,
            stop_ids=self._stop_ids,
            gateway=f"gateway-{number % self._gateways}",
            ttft_slo_ns=ttft_slo_ns,
            salt=salt,
            payload=self._payload,
        )
        self.core.add(request, self.now_ns)

    def run(self, prompts: Sequence[Int32], max_tokens: int) -> None:
        """Step until all sequences have decoded for a while. Raises NotRunningError if the policy prevents that."""
        before, steps = self.running, 0
        self.add(prompts[0], max_tokens)
        for _ in range(SETTLED):  # alone, until the policy knows how long steps take
            self.step()
        waves = min(WAVES, len(prompts) - 1)
        for wave in range(waves):
            for prompt in prompts[1 + wave :: waves]:
                self.add(prompt, max_tokens)
            self.step()
        while steps < PATIENCE and self.core.stats()["queued_tokens"]:
            self.step()
            steps += 1
        for _ in range(SETTLED):
            self.step()
        if self.running != before + len(prompts):
            raise NotRunningError(f"{self.running} run under this policy where {before + len(prompts)} were to")

    def fill(self, prompt_tokens: int, at_once: int) -> None:
        """Fill all unused blocks with cached prefixes: prompts of this many tokens with one output token each."""
        cached_at_once = at_once * (prompt_tokens // BLOCK_SIZE)
        for _ in range(self.core.replicas[0].limits.blocks // cached_at_once + 1):
            for _ in range(at_once):
                self.add(self.prompt(prompt_tokens), 1)
            for _ in self.steps(self.lookahead + 2):
                pass

    def stop(self, slot: int) -> None:
        """Let the sequence in `slot` sample its stop token in the next step that is answered."""
        self._stopping.append(slot)

    def step(self) -> Iteration | None:
        """Plan one iteration and answer the oldest one, which is returned; None while no answer is due."""
        begin = time.perf_counter_ns()
        plan, known = self.core.plan(self.now_ns)
        planned = time.perf_counter_ns()
        if plan is None:
            raise NotRunningError("nothing can be planned under this policy")
        self._flight.append((plan, known, planned - begin))
        if len(self._flight) <= self.lookahead:
            return None
        done, known, plan_ns = self._flight.popleft()
        slots = done.chunk_slots[done.samples]
        tokens = self._tokens[done.id & 63, : slots.size]
        if self._stopping:
            tokens = np.where(np.isin(slots, self._stopping), np.int32(STOP_ID), tokens)
            self._stopping.clear()
        result = StepResult(done.id, done.replica, slots, tokens)
        result.step_ns = STEP_NS
        self.now_ns += STEP_NS
        before = time.perf_counter_ns()
        outcome = self.core.apply(result, self.now_ns)
        after = time.perf_counter_ns()
        return Iteration(done, known, result, outcome, plan_ns, after - before)

    def steps(self, count: int) -> Iterator[Iteration]:
        """Run this number of answered iterations."""
        while count > 0:
            if (iteration := self.step()) is not None:
                count -= 1
                yield iteration


class Watch:
    """Counts disturbances of the iterations inside it: garbage collections, and switches to other processes.

    Like the service, it leaves Python's garbage collector on. Older garbage is collected first.
    """

    def __init__(self) -> None:
        self._counts = [0, 0, 0]
        self._longest_ns = self._total_ns = self._began = self._switches = 0

    def __enter__(self) -> Self:
        gc.collect()
        gc.callbacks.append(self._seen)
        self._switches = -_switches()
        return self

    def __exit__(self, *_: object) -> None:
        self._switches += _switches()
        gc.callbacks.remove(self._seen)

    def _seen(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter_ns()
            return
        took = time.perf_counter_ns() - self._began
        self._counts[about["generation"]] += 1
        self._longest_ns = max(self._longest_ns, took)
        self._total_ns += took

    def figures(self) -> dict[str, Any]:
        """Return gc (collections by generation, longest and total time) and switches to other processes."""
        longest, total = (round(ns / 1e3, 1) for ns in (self._longest_ns, self._total_ns))
        found = {"enabled": gc.isenabled(), "collections": self._counts, "longest_us": longest, "total_us": total}
        return {"gc": found, "switches": self._switches}


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def figure(taken_ns: Sequence[int], rounds: int) -> dict[str, float]:
    """Return microseconds: p50 and p99 are medians over the rounds; lowest and lowest_p99 are of the best round."""
    parts = np.array_split(np.array(taken_ns, np.float64) / 1e3, min(rounds, len(taken_ns)))
    p50 = [float(np.median(part)) for part in parts]
    p99 = [float(np.percentile(part, 99)) for part in parts]
    found = {"p50": np.median(p50), "p99": np.median(p99), "lowest": min(p50), "lowest_p99": min(p99)}
    return {name: round(float(value), 1) for name, value in found.items()}


def costs(taken_ns: Sequence[tuple[int, int]], rounds: int) -> dict[str, Any]:
    """Return figures of plan_us, apply_us and total_us from [n] (plan, apply), and the deviation of the total's p99."""
    line: dict[str, Any] = {
        "plan_us": figure([plan for plan, _ in taken_ns], rounds),
        "apply_us": figure([apply for _, apply in taken_ns], rounds),
        "total_us": figure([plan + apply for plan, apply in taken_ns], rounds),
    }
    line["p99_over_p50"] = round(line["total_us"]["p99"] / line["total_us"]["p50"], 2)
    return line
