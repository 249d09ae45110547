"""The states of an iteration: steady, churn, hole, spans and admission, as ratios to the floor.

Called by bench/scheduler/main.py. The floor (floor.py) and our cases of the same size take turns in each round, so that
a machine that slows down slows all of them. Each figure is of the round in which it was lowest: on a busy machine other
rounds measure what else runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from bench.scheduler.drive import (
    BLOCK_SIZE,
    SETTLED,
    STEP_NS,
    STOP_ID,
    VOCAB,
    Drive,
    Iteration,
    NotRunningError,
    Setup,
    Watch,
)
from bench.scheduler.floor import LONGEST_PROMPT, MAX_MODEL_LEN, Floor
from bench.scheduler.parts import ENTERING, PROMPT_TOKENS, admitting, with_room
from services.scheduler.core.types import Limits, StepPlan, StepResult

GOAL_STEADY = 1.25
GOAL_CHURN = {256: 2.2}
GOAL_ADMISSION = 7
GOAL_HOLE_TO_STEADY = 1.1
GOAL_SPANS_TO_STEADY = 1.3
BLOCKS_PER_SLOT = 150
"""Enough for the whole context of every sequence, and for the share of the pool that policies keep free."""
MARGIN_TOKENS = 128
"""Context beyond the floor's, for the steps before the measured ones."""

Line = dict[str, Any]
Times = tuple[int, int]
"""ns of plan and of apply."""


def cases(counts: Sequence[int], at: int, setup: Setup) -> list[Line]:
    """Return a line for each case at each of `counts` running sequences, and for admission at `at`."""
    lines = []
    for running in counts:
        lines += _decoding(running, setup)
    return lines + _admission(at, setup)


def _decoding(running: int, setup: Setup) -> list[Line]:
    """Measure floor, steady, churn and hole at one size."""
    churn = Churn(running, setup)
    sources: dict[str, Callable[[], Iterator[Times]]] = {
        "floor": floor_steps(running),
        "steady": steps(_decode(running, running, setup)),
        "churn": churn.steps,
        "hole": steps(with_hole(running, setup)),
    }
    floor, steady, churning, hole = _measure(sources, running, setup.samples, setup.rounds)
    steady |= {"goal_ratio": GOAL_STEADY}
    churning |= {"add_us": _best(churn.adding_ns, setup.rounds)}
    if running in GOAL_CHURN:
        churning |= {"goal_ratio": GOAL_CHURN[running]}
    hole |= {
        "ratio_to_steady": round(hole["total_us"]["p50"] / steady["total_us"]["p50"], 3),
        "goal_ratio_to_steady": GOAL_HOLE_TO_STEADY,
    }
    return [_judged(line) for line in (floor, steady, churning, hole)] + _spans(running, setup)


def _spans(running: int, setup: Setup) -> list[Line]:
    """Measure iterations in which most rows have drafts, beside steady decode."""
    few = setup.fewer()
    spans = Spans(running, few)
    sources: dict[str, Callable[[], Iterator[Times]]] = {
        "floor": floor_steps(running),
        "steady": steps(_decode(running, running, few)),
        "spans": spans.steps,
    }
    _, steady, line = _measure(sources, running, few.samples, few.rounds)
    line |= spans.figures()
    line |= {
        "steady_us": steady["total_us"],
        "ratio_to_steady": round(line["total_us"]["p50"] / steady["total_us"]["p50"], 3),
        "goal_ratio_to_steady": GOAL_SPANS_TO_STEADY,
    }
    return [_judged(line)]


def _admission(running: int, setup: Setup) -> list[Line]:
    """Measure iterations in which ENTERING prompts of PROMPT_TOKENS tokens enter, beside the floor.

    Half of each prompt is cached, or none; or half, with a full cache from which other blocks are evicted.
    """
    few = setup.fewer()
    variants = {
        "admission, half cached": (PROMPT_TOKENS // 2, False),
        "admission, uncached": (0, False),
        "admission, evicting": (PROMPT_TOKENS // 2, True),
    }
    sources: dict[str, Callable[[], Iterator[Times]]] = {"floor": floor_steps(running)}
    for name, (cached, full) in variants.items():
        sources[name] = _admissions(with_room(running, few, full), cached, few)
    floor, *lines = _measure(sources, running, few.samples, few.rounds)
    about = {"entering": ENTERING, "prompt_tokens": PROMPT_TOKENS, "goal_ratio": GOAL_ADMISSION}
    return [_judged(line) for line in (floor, *(line | about for line in lines))]


def _measure(sources: dict[str, Callable[[], Iterator[Times]]], running: int, samples: int, rounds: int) -> list[Line]:
    """Take turns: in each round `samples / rounds` iterations of each source. Return a line for each."""
    rounds = min(rounds, samples)
    share = samples // rounds
    taken: dict[str, list[Times]] = {name: [] for name in sources}
    streams = {name: source() for name, source in sources.items()}
    with Watch() as watch:
        for _ in range(rounds):
            for name, stream in streams.items():
                taken[name] += islice(stream, share)
    floor = _best([sum(times) for times in taken["floor"]], rounds)["p50"]
    lines = []
    for name, times in taken.items():
        if len(times) < rounds:
            raise NotRunningError(f"{name}: {len(times)} of {samples} iterations came about")
        line: Line = {"case": name, "running": running}
        line["plan_us"] = _best([plan for plan, _ in times], rounds)
        line["apply_us"] = _best([apply for _, apply in times], rounds)
        line["total_us"] = _best([sum(each) for each in times], rounds)
        line["ratio"] = round(line["total_us"]["p50"] / floor, 3)
        lines.append(line | {"iterations": len(times), "switches": watch.figures()["switches"]})
    return lines


def _judged(line: Line) -> Line:
    """Add whether the goal is met, where there is one."""
    for name in ("ratio", "ratio_to_steady"):
        if (goal := line.get(f"goal_{name}")) is not None:
            line["met"] = line[name] <= goal
    return line


def _best(taken_ns: Sequence[int], rounds: int) -> dict[str, float]:
    """Return p50 and p90 in microseconds, each of the round in which it was lowest."""
    parts = np.array_split(np.array(taken_ns, np.float64) / 1e3, min(rounds, len(taken_ns)))
    return {f"p{at}": round(min(float(np.percentile(part, at)) for part in parts), 1) for at in (50, 90)}


def floor_steps(running: int) -> Callable[[], Iterator[Times]]:
    """Return a source of the floor's steps."""
    floor = Floor(running)

    def stream() -> Iterator[Times]:
        while True:
            yield floor.step()

    return stream


def steps(drive: Drive) -> Callable[[], Iterator[Times]]:
    """Return a source of the iterations of a core to which nothing is added."""

    def stream() -> Iterator[Times]:
        while True:
            if (done := drive.step()) is not None:
                yield done.plan_ns, done.apply_ns

    return stream


def _admissions(drive: Drive, cached: int, setup: Setup) -> Callable[[], Iterator[Times]]:
    def stream() -> Iterator[Times]:
        for done in admitting(drive, ENTERING, PROMPT_TOKENS, cached, setup.samples):
            yield done.plan_ns, done.apply_ns

    return stream


def _decode(running: int, slots: int, setup: Setup) -> Drive:
    """Return a core with `running` sequences in steady decode, as the floor has them."""
    limits = Limits(
        slots=slots,
        blocks=slots * BLOCKS_PER_SLOT,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN + MARGIN_TOKENS,
        max_step_tokens=slots * LONGEST_PROMPT,
    )
    drive = Drive(limits, setup)
    lengths = drive.random.integers(1, LONGEST_PROMPT, running).tolist()
    drive.run([drive.prompt(length) for length in lengths], limits.max_model_len)
    return drive


def with_hole(running: int, setup: Setup) -> Drive:
    """Return a core with `running` sequences in steady decode and a free slot in the middle of theirs."""
    drive = _decode(running + 1, running + 1, setup)
    drive.stop(running // 2)
    for _ in drive.steps(SETTLED):
        pass
    if drive.running != running:
        raise NotRunningError(f"{drive.running} run where {running} were to")
    return drive


class Churn:
    """A core in which each step one sequence enters and another, drawn at random, samples its stop token."""

    def __init__(self, running: int, setup: Setup) -> None:
        self._drive = _decode(running, running, setup)
        self._stopped: list[int] = []  # slots of stopped sequences with a row in a step in flight
        self._slots = np.arange(running, dtype=np.int32)  # of the last step that was answered
        self.adding_ns: list[int] = []
        """What adding the request took that enters, of each iteration; no part of plan or apply."""
        for _ in range(SETTLED):
            self._step()
        self.adding_ns.clear()

    def steps(self) -> Iterator[Times]:
        """Yield the iterations. Raises NotRunningError for one without one entering and one ending sequence."""
        while True:
            done = self._step()
            if len(done.plan.enters) != 1 or len(done.outcome.ended_requests) != 1:
                entered, ended = len(done.plan.enters), len(done.outcome.ended_requests)
                raise NotRunningError(f"{entered} sequences entered and {ended} ended in a step; one of each was to")
            yield done.plan_ns, done.apply_ns

    def _step(self) -> Iteration:
        drive = self._drive
        prompt = drive.prompt(int(drive.random.integers(1, LONGEST_PROMPT)))
        begin = time.perf_counter_ns()
        drive.add(prompt, MAX_MODEL_LEN + MARGIN_TOKENS)
        self.adding_ns.append(time.perf_counter_ns() - begin)
        slot = int(drive.random.choice(self._slots))
        while slot in self._stopped:
            slot = int(drive.random.choice(self._slots))
        drive.stop(slot)
        done = drive.step()
        if done is None:
            raise NotRunningError("no step was answered")
        self._stopped = [*self._stopped, slot][-drive.lookahead :] if drive.lookahead else []
        self._slots = done.result.slots
        return done


class Spans:
    """A core with drafts: each row repeats a text with random errors, and gets one or more tokens a step.

    An error ends the drafts of its row for some steps. The shipped scheduler finds the drafts, 4 a row at most on
    the average.
    """

    PERIOD = 64  # tokens of the text that a row repeats
    ERRORS = 0.05  # share of tokens that are others
    MAX_DRAFTS = 4  # of a row, on the average

    def __init__(self, running: int, setup: Setup) -> None:
        most = LONGEST_PROMPT + (1 + self.MAX_DRAFTS) * (setup.samples + 3 * SETTLED) * 2
        limits = Limits(
            slots=running,
            blocks=running * -(-most // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_model_len=most,
            max_step_tokens=running * LONGEST_PROMPT,
            max_drafts=running * self.MAX_DRAFTS,
        )
        self._drive = drive = Drive(limits, setup)
        random = drive.random
        texts = np.tile(random.integers(STOP_ID + 1, VOCAB, (running, self.PERIOD)), most // self.PERIOD + 1)
        errors = random.random(texts.shape) < self.ERRORS
        self._texts = np.where(errors, random.integers(STOP_ID + 1, VOCAB, texts.shape), texts).astype(np.int32)
        lengths = random.integers(2 * self.PERIOD, LONGEST_PROMPT, running)
        for row, length in enumerate(lengths.tolist()):
            drive.add(self._texts[row, :length], most)
        self._running = running
        self._now_ns = drive.now_ns
        self._drafted: list[int] = []
        self._tokens: list[int] = []
        for _ in range(2 * SETTLED):
            self._step()
        if drive.running != running:
            raise NotRunningError(f"{drive.running} run where {running} were to")
        self._drafted.clear()
        self._tokens.clear()

    def steps(self) -> Iterator[Times]:
        """Yield the iterations."""
        while True:
            yield self._step()

    def figures(self) -> dict[str, float]:
        """Return the mean drafts and tokens of a row, and the share of drafts that were refused."""
        drafts, tokens = float(np.mean(self._drafted)), float(np.mean(self._tokens))
        refused = 1 - (tokens - self._running) / drafts if drafts else 0.0
        per_row = {"drafts_per_row": drafts / self._running, "tokens_per_row": tokens / self._running}
        return {name: round(value, 3) for name, value in (per_row | {"refused": refused}).items()}

    def _step(self) -> Times:
        """Plan a step and answer it. While its drafts are out, a second plan is refused, as in the service."""
        core = self._drive.core
        begin = time.perf_counter_ns()
        plan, _ = core.plan(self._now_ns)
        if plan is not None and plan.drafts.size:
            core.plan(self._now_ns)
        planned = time.perf_counter_ns()
        if plan is None:
            raise NotRunningError("nothing can be planned under this policy")
        result = self._answer(plan)
        self._now_ns += result.step_ns
        before = time.perf_counter_ns()
        core.apply(result, self._now_ns)
        applied = time.perf_counter_ns()
        self._drafted.append(plan.drafts.size)
        self._tokens.append(result.tokens.size)
        return planned - begin, applied - before

    def _answer(self, plan: StepPlan) -> StepResult:
        """Return the tokens that the texts have at the places of the step."""
        known = plan.samples.nonzero()[0]
        slots, counts = plan.chunk_slots[known], plan.chunk_lengths[known]
        drafts = plan.chunk_drafts[known] if plan.drafts.size else np.zeros(slots.size, np.int32)
        ends = plan.chunk_starts[known] + counts - drafts  # where the first token of each row stands
        tokens, given, at = [], [], 0
        for slot, end, most in zip(slots.tolist(), ends.tolist(), drafts.tolist(), strict=True):
            text, guess = self._texts[slot, end : end + most + 1], plan.drafts[at : at + most]
            at += most
            wrong = (text[:most] != guess).nonzero()[0]
            given.append(1 + (int(wrong[0]) if wrong.size else most))
            tokens.append(text[: given[-1]])
        result = StepResult(plan.id, plan.replica, slots, np.concatenate(tokens) if tokens else plan.drafts)
        if plan.drafts.size:
            result.token_counts = np.array(given, np.int32)
        # A draft of each row costs a quarter of a plain step.
        result.step_ns = int(STEP_NS * (0.75 + 0.25 * int(plan.chunk_lengths.sum()) / self._running))
        return result
