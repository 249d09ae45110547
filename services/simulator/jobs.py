"""Run many simulations in parallel, each in a separate process, and return the results in the order of the jobs.

command/main.py, command/search.py and the studies of `bench` pass jobs. A job is plain data, so a spawned process can
unpickle it.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from services.simulator.device.clock import StepClock
from services.simulator.engine import Run, Sample, Setup, simulate
from services.simulator.workload.arrivals import Spec, build
from services.simulator.workload.workload import Int64

_POLL_S = 0.1
LINE_S = 3.0
SURE_SHARE = 0.02  # of the requests: the time left is shown from here on
_EVERY = 64  # requests between two reports of progress
Report = Callable[[int, int], None]  # requests done, and in all
_done: Any = None  # in a worker process: finished requests of every job, shared with the parent


@dataclass(frozen=True, slots=True)
class Job:
    """One policy over one workload."""

    policy: str
    spec: Spec
    setup: Setup
    clock: StepClock


@dataclass(slots=True)
class Finished:
    """The result of a run, and the columns that plots draw."""

    result: dict[str, Any]
    ttft_ns: Int64  # [finished requests]
    gaps: tuple[npt.NDArray[np.float64], Int64]  # time between tokens in ns, and its count
    samples: list[Sample]


def run_job(job: Job, report: Callable[[int], None] | None = None) -> Finished:
    """Run one job. Raises ValueError for a workload, policy or setting that is out of range."""
    run: Run = simulate(job.policy, build(job.spec), job.setup, job.clock, progress=report)
    seen, result = run.seen, run.result
    labelled = {
        "policy": result.pop("policy"),
        "rate_scale": job.spec.rate_scale,
        "step_tokens": job.setup.step_tokens,
        **result,
    }
    return Finished(labelled, seen.ttft_ns[seen.e2e_ns >= 0], seen.gaps.distribution(), run.samples)


def run_all(jobs: Sequence[Job], processes: int) -> list[Finished]:
    """Return the result of every job, in order. Run `processes` jobs at a time; 1 runs all in this process."""
    totals = [len(build(job.spec)) for job in jobs]  # raises for bad input here, not in a child process
    with progress() as report:
        if processes == 1 or len(jobs) == 1:
            finished, before = [], 0
            for job, total in zip(jobs, totals, strict=True):
                finished.append(run_job(job, Every64th(report, sum(totals), before)))
                before += total
            return finished
        context = multiprocessing.get_context("spawn")
        counts = context.Array("q", len(jobs), lock=False)
        with context.Pool(min(processes, len(jobs)), _begin, (counts,)) as pool:
            waiting = [pool.apply_async(_run_numbered, (number, job)) for number, job in enumerate(jobs)]
            for result in waiting:
                while not result.ready():
                    result.wait(_POLL_S)
                    report(sum(counts), sum(totals))
            return [result.get() for result in waiting]


class Every64th:
    """Reports every 64th count of a job that begins after `before` of `total` requests."""

    def __init__(self, report: Report, total: int, before: int = 0) -> None:
        self._report, self._total, self._before, self._next = report, total, before, 0

    def __call__(self, ended: int) -> None:
        if ended >= self._next:
            self._next = ended + _EVERY
            self._report(self._before + ended, self._total)


def _begin(counts: Any) -> None:
    global _done
    _done = counts


def _run_numbered(number: int, job: Job) -> Finished:
    def report(ended: int, total: int) -> None:
        _done[number] = ended

    return run_job(job, Every64th(report, 0))


class _Lines:
    """Prints the progress as lines on stderr."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._next = self._begun + LINE_S

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LINE_S
        share = done / max(1, total)
        left = f", {(now - self._begun) * (1 - share) / share:.0f} s left" if share > SURE_SHARE else ""
        print(f"simulated {done:,} of {total:,} requests, {share:.0%}{left}", file=sys.stderr, flush=True)


@contextmanager
def progress() -> Iterator[Report]:
    """Show the progress on stderr, called with requests done and in all: a bar, or a line every LINE_S seconds."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("requests", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
