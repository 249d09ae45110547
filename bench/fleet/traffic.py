"""The requests of a fleet as columns, from a trace or a distribution. Pure given the seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.simulator.workload.arrivals import CHAT, Lengths
from services.simulator.workload.traffic import read_trace
from services.simulator.workload.workload import Int64, Workload

MAX_REQUESTS = 20_000_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """One entry a request, by arrival; group -1: no shared prefix."""

    arrived_ns: Int64
    prompt: Int64
    output: Int64
    group: Int64
    prefix_tokens: int = 0

    @classmethod
    def of(cls, workload: Workload) -> Traffic:
        """Return the traffic of a workload of `orcinus simulate`."""
        return cls(workload.arrived_ns, workload.prompt, workload.output, workload.group, workload.prefix_tokens)


@dataclass(frozen=True, slots=True)
class Spec:
    """rate_rps: requests a second on average; swing: of the rate over a day of day_s, 0 (constant) to below 1."""

    requests: int
    rate_rps: float
    trace: Path = CHAT  # its lengths, drawn with repetition
    prompt: Lengths | None = None
    output: Lengths | None = None
    groups: int = 0
    prefix_tokens: int = 0
    skew: float = 0.0  # of the groups' popularity: that of the i-th is 1 / i^skew
    swing: float = 0.0
    day_s: float = 86_400.0
    seed: int = 0


def build(spec: Spec) -> Traffic:
    """Return the requests. Raises ValueError that names the problem."""
    if not 1 <= spec.requests <= MAX_REQUESTS:
        raise ValueError(f"{spec.requests:,} requests; give 1 to {MAX_REQUESTS:,}")
    if not 0 < spec.rate_rps <= 1e9 or not 0 <= spec.swing < 1:
        raise ValueError(
            f"a rate of {spec.rate_rps:g} a second swinging by {spec.swing:g}: rates are above 0, swings below 1"
        )
    rng = np.random.default_rng(spec.seed)
    count = spec.requests
    if spec.prompt is None or spec.output is None:
        trace = read_trace(spec.trace)
        rows = rng.integers(0, len(trace.prompt_tokens), count)
    prompt = spec.prompt.draw(count, spec.seed, 0) if spec.prompt else np.asarray(trace.prompt_tokens)[rows]
    output = spec.output.draw(count, spec.seed, 1) if spec.output else np.asarray(trace.output_tokens)[rows]
    group = np.full(count, -1, np.int64)
    if spec.groups:
        shares = 1 / np.arange(1, spec.groups + 1) ** spec.skew
        group = rng.choice(spec.groups, count, p=shares / shares.sum()).astype(np.int64)
        prompt = prompt + spec.prefix_tokens
    # Unit-rate arrivals, mapped through the inverse of the rate's integral.
    times = np.cumsum(rng.exponential(1 / spec.rate_rps, count))
    if spec.swing:
        times = _swung(times, spec)
    return Traffic(
        (times * 1e9).astype(np.int64), prompt.astype(np.int64), output.astype(np.int64), group, spec.prefix_tokens
    )


def _swung(times: npt.NDArray[np.float64], spec: Spec) -> npt.NDArray[np.float64]:
    """Return times at which rate * (1 - swing * cos(2 pi t / day)) has produced as many as the mean rate."""
    span = float(times[-1])
    grid = np.linspace(0, span * (1 + 2 * spec.swing) + spec.day_s, 200_001)
    turn = 2 * math.pi / spec.day_s
    return np.interp(times, grid - spec.swing * np.sin(turn * grid) / turn, grid)
