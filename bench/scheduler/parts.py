"""The parts of the scheduler bench at one size: steady decode, an admission, and the wire.

Called by bench/scheduler/main.py, and by bench/scheduler/curves.py for the same at many sizes. Each function returns
lines of the JSON, with the goal beside what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from redis.asyncio import Connection

from bench.scheduler.drive import BLOCK_SIZE, GOAL_P99_OVER_P50, Drive, Iteration, Setup, Watch, costs, figure
from protos import worker_pb2
from services.scheduler.core.types import Limits
from services.scheduler.requests.publisher import arguments
from services.scheduler.telemetry import Stats
from services.scheduler.workers.loop import InFlight
from services.scheduler.workers.wire import result_from_wire, step_to_wire
from shared.keys import Keys

GOAL_DECODE_US = {256: 60, 4096: 150}  # p50 of plan + apply
GOAL_ADMISSION_US = 400  # p50 of plan + apply of an iteration that admits ENTERING prompts at 256 running
GOAL_WIRE_US = 300  # p50 of all that the scheduler computes for an iteration at 256 running
MAX_MODEL_LEN = 2048
LONGEST_PROMPT = 400
ENTERING = 16
PROMPT_TOKENS = 1000
LENGTHS = 8  # output tokens of the admitted: they are gone before the next come
WARM = 2  # admissions that are not measured; after the first the prefixes are cached
EPOCH = 1
SHA = "0" * 40


def steady(running: int, setup: Setup) -> Drive:
    """Set up `running` sequences in steady decode: none waits, comes or ends for 1,500 iterations."""
    limits = Limits(
        slots=running,
        blocks=running * (MAX_MODEL_LEN // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_step_tokens=running * LONGEST_PROMPT,
    )
    drive = Drive(limits, setup)
    sizes = drive.random.integers(1, LONGEST_PROMPT, running).tolist()
    drive.run([drive.prompt(size) for size in sizes], MAX_MODEL_LEN)
    return drive


def decode(running: int, setup: Setup) -> dict[str, Any]:
    """Measure steady decode, and separately the protobuf of step and answer, as wire_us."""
    drive = steady(running, setup)
    taken, wire = [], []
    with Watch() as watch:
        for done in drive.steps(setup.samples):
            taken.append((done.plan_ns, done.apply_ns))
            wire.append(sum(_protobuf(done)))
    line = {"running": running, **costs(taken, setup.rounds), "wire_us": figure(wire, setup.rounds)}
    if running in GOAL_DECODE_US:
        line["goal_us"] = GOAL_DECODE_US[running]
    line |= {"goal_p99_over_p50": GOAL_P99_OVER_P50, "steps": len(taken)} | watch.figures()
    return line


def admitting(drive: Drive, entering: int, prompt: int, cached: int, samples: int) -> Iterator[Iteration]:
    """Yield the iterations that admit `entering` new prompts of `prompt` tokens at once. The first `cached` tokens of
    each are in the prefix cache, another prefix for each prompt. The prompts end before the next ones enter."""
    prefixes = [drive.prompt(cached) for _ in range(entering)]
    for sample in range(samples + WARM):
        for prefix in prefixes:
            drive.add(np.concatenate([prefix, drive.prompt(prompt - cached)]), LENGTHS)
        for done in drive.steps(LENGTHS + drive.lookahead + 2):
            if len(done.plan.enters) == entering and sample >= WARM:
                yield done


def with_room(running: int, setup: Setup, full: bool) -> Drive:
    """Return a core with `running` sequences in steady decode, and slots and tokens a step for ENTERING more prompts.

    It has blocks for all prompts of `setup.samples` admissions; with `full` only those that can be in use at once, all
    others being cached.
    """
    admissions = setup.samples + WARM
    longest = LONGEST_PROMPT + 800 + admissions * (LENGTHS + setup.lookahead + 2)
    share = -(-(PROMPT_TOKENS + LENGTHS) // BLOCK_SIZE)
    blocks = running * (longest // BLOCK_SIZE + 1) + ENTERING * share * (4 if full else admissions + 4)
    tokens = running + ENTERING * PROMPT_TOKENS
    limits = Limits(running + ENTERING, blocks, BLOCK_SIZE, max(longest, 2 * PROMPT_TOKENS), tokens)
    drive = Drive(limits, setup)
    drive.run([drive.prompt(LONGEST_PROMPT) for _ in range(running)], longest - LONGEST_PROMPT)
    if full:
        drive.fill(PROMPT_TOKENS, ENTERING)
    return drive


def admission(running: int, setup: Setup) -> list[dict[str, Any]]:
    """An iteration that admits ENTERING prompts of PROMPT_TOKENS with prefix lookup: half of each cached, or none; and
    half with a full cache, so that others' blocks are evicted for the rest, which is how a service runs after a while.
    """
    lines = []
    for cached, full in ((PROMPT_TOKENS // 2, False), (0, False), (PROMPT_TOKENS // 2, True)):
        drive = with_room(running, setup, full)
        taken, hits = [], 0
        with Watch() as watch:
            for done in admitting(drive, ENTERING, PROMPT_TOKENS, cached, setup.samples):
                taken.append((done.plan_ns, done.apply_ns))
                hits += sum(enter.computed_tokens for enter in done.plan.enters)
        if not taken:
            raise RuntimeError(f"no iteration admitted {ENTERING} prompts at once")
        lines.append(
            {
                "running": running,
                "entering": ENTERING,
                "prompt_tokens": PROMPT_TOKENS,
                "cached_tokens": round(hits / len(taken) / ENTERING),
                "evicts": full,
                **costs(taken, setup.rounds),
                "goal_us": GOAL_ADMISSION_US,
                "iterations": len(taken),
                **watch.figures(),
            }
        )
    return lines


def wire(running: int, setup: Setup) -> list[dict[str, Any]]:
    """Measure all work of the scheduler for an iteration: steady, and (no goal) while ENTERING prompts enter.

    Not in it: what asyncio, gRPC and the kernel do to move the bytes, and the replies of Redis.
    """
    line = _wire("decode", running, steady(running, setup), None, setup)
    line["goal_us"] = GOAL_WIRE_US
    few = setup.fewer()
    return [line, _wire("admission", running, with_room(running, few, False), PROMPT_TOKENS // 2, few)]


def _wire(case: str, running: int, drive: Drive, cached: int | None, setup: Setup) -> dict[str, Any]:
    """Measure an iteration. cached: share of the entering prompts; None means steady decode."""
    if cached is None:
        iterations = drive.steps(setup.samples)
    else:
        iterations = admitting(drive, ENTERING, PROMPT_TOKENS, cached, setup.samples)
    desk = _Desk()
    with Watch() as watch:
        columns = [(done.plan_ns, done.apply_ns, *_protobuf(done), *desk.book(done)) for done in iterations]
    names = ("plan", "apply", "encode", "parse", "stats", "batch", "resp")
    found: dict[str, Any] = {"case": case, "running": running}
    for name, column in zip(names, zip(*columns, strict=True), strict=True):
        found[f"{name}_us"] = figure(column, setup.rounds)
    found["total_us"] = figure([sum(row) for row in columns], setup.rounds)
    return found | {"iterations": len(columns)} | watch.figures()


def _protobuf(done: Iteration) -> tuple[int, int]:
    """Return the ns to serialise a Step, and to parse a Result."""
    slots, tokens = done.result.slots.tobytes(), done.result.tokens.tobytes()
    answer = worker_pb2.Result(epoch=EPOCH, id=done.plan.id, slots=slots, tokens=tokens).SerializeToString()
    begin = time.perf_counter_ns()
    step_to_wire(done.plan, EPOCH).SerializeToString()
    written = time.perf_counter_ns()
    result_from_wire(worker_pb2.Result.FromString(answer))
    return written - begin, time.perf_counter_ns() - written


class _Desk:
    """The service's work in an iteration besides the core: statistics, and the publish script's call."""

    def __init__(self) -> None:
        self._stats = Stats(0)
        self._in_flight = InFlight()
        self._keys = Keys("bench")
        self._connection = Connection()  # packs commands; never connected

    def book(self, done: Iteration) -> tuple[int, int, int]:
        """Return the ns of the statistics, of the script's arguments, and of the bytes of its EVALSHA."""
        plan, outcome = done.plan, done.outcome
        begin = time.perf_counter_ns()
        self._in_flight.add(plan)
        self._stats.step(plan.decode_tokens, plan.prefill_tokens, done.plan_ns)
        self._in_flight.pop(plan.id)
        self._stats.result(done.result.step_ns, 0, plan.prefill_tokens, plan.decode_tokens)
        self._stats.outcome(outcome, begin)
        counted = time.perf_counter_ns()
        outcomes = [(0, done.known)] if done.known is not None else []
        args = arguments([*outcomes, (plan.id, outcome)], EPOCH, self._keys.prefix, {})
        built = time.perf_counter_ns()
        self._connection.pack_command("EVALSHA", SHA, 1, self._keys.queue, *args)
        return counted - begin, built - counted, time.perf_counter_ns() - built
