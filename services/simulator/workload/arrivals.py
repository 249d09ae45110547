"""Build a Workload from a Spec: a trace or drawn lengths, times, classes, limits, prefixes.

Pure given the seed. Every draw has a separate random stream, so a change of one option leaves the other columns
unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from services.scheduler.core.types import CLASS_NAMES
from services.simulator.workload.traffic import LATEST_S, MAX_TOKENS, Trace, gamma_times, read_trace
from services.simulator.workload.workload import Float64, Int64, Workload

TRACES = Path(__file__).resolve().parents[3] / "assets" / "traces"
SLOWEST, MAX_RATE = 1e-6, 1e6  # bounds of a rate and of a rate scale
MAX_REQUESTS = 1_000_000
CHAT = TRACES / "azure_conv_2023.csv"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens: `64`, `16:128` (uniform, both included) or `lognormal:MEAN:SIGMA` (SIGMA of the logarithm).

    Lognormal lengths above MAX_TOKENS become MAX_TOKENS.
    """

    kind: str
    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Return the lengths that a text describes. Raises ValueError that names the value."""
        kind, *rest = text.split(":")
        try:
            if kind == "lognormal":
                mean, sigma = (float(part) for part in rest)
                if 1 <= mean <= MAX_TOKENS and 0 <= sigma <= 4:
                    return cls(kind, mean, sigma)
            elif len(rest) <= 1:
                low, high = int(kind), int(rest[0] if rest else kind)
                if 1 <= low <= high <= MAX_TOKENS:
                    return cls("uniform", low, high)
        except ValueError:
            pass
        raise ValueError(
            f"{text[:40]!r}: not a length; give N, LOW:HIGH with 1 <= LOW <= HIGH <= {MAX_TOKENS:,}, or "
            "lognormal:MEAN:SIGMA with SIGMA from 0 to 4"
        )

    def draw(self, count: int, seed: int, stream: int) -> Int64:
        rng = np.random.default_rng([seed, 10 + stream])
        if self.kind == "uniform":
            return rng.integers(int(self.low), int(self.high) + 1, count)
        mu = math.log(self.low) - self.high**2 / 2  # so that the mean is `low`
        return np.clip(np.rint(rng.lognormal(mu, self.high, count)), 1, MAX_TOKENS).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Spec:
    """The inputs of a workload. max_tokens 0 asks for the true length; rate_rps 0 uses the times of the trace."""

    trace: Path | None = CHAT
    requests: int = 0  # 0 means all of the trace, or 1000 without one
    prompt: Lengths | None = None  # None uses the trace's lengths
    output: Lengths | None = None
    rate_rps: float = 0.0
    rate_scale: float = 1.0
    cv: float = 1.0  # coefficient of variation of the intervals; 1 is Poisson
    at_once: bool = False
    max_tokens: int = 1024
    classes: dict[str, float] = field(default_factory=dict)  # share of each class; empty means all normal
    tenants: tuple[float, ...] = ()  # share of each tenant; empty means one tenant
    ttft_slo_ms: dict[str, float] = field(default_factory=dict)  # by class; "" is the default
    tbt_slo_ms: dict[str, float] = field(default_factory=dict)
    deadline_ms: dict[str, float] = field(default_factory=dict)
    prefix_groups: int = 0
    prefix_tokens: int = 0
    seed: int = 0
    acceptance: float | None = None  # chance that a draft is right; None: that of the trace, or no speculation


def build(spec: Spec) -> Workload:
    """Return the workload. Raises ValueError that names the problem and the remedy."""
    trace = _read(spec.trace) if spec.trace is not None else None
    if trace is None and (spec.prompt is None or spec.output is None):
        raise ValueError("lengths: without a trace both are needed; give --prompt-tokens and --output-tokens")
    if not SLOWEST <= spec.rate_scale <= MAX_RATE or (spec.rate_rps and spec.rate_rps * spec.rate_scale < SLOWEST):
        raise ValueError(
            f"rate {spec.rate_rps:g} x {spec.rate_scale:g}: out of range; stay within {SLOWEST:g} and {MAX_RATE:g}"
        )
    count = spec.requests or (len(trace.prompt_tokens) if trace is not None else 1000)
    if count > MAX_REQUESTS:
        raise ValueError(f"{spec.trace}: {count:,} requests are too many; give --requests N, at most {MAX_REQUESTS:,}")
    prompt = spec.prompt.draw(count, spec.seed, 0) if spec.prompt else _cycle(trace, "prompt_tokens", count)
    output = spec.output.draw(count, spec.seed, 1) if spec.output else _cycle(trace, "output_tokens", count)
    priority = _classes(spec, count)
    group = np.full(count, -1, np.int64)
    if spec.prefix_groups:
        group = np.random.default_rng([spec.seed, 5]).integers(0, spec.prefix_groups, count)
        prompt = prompt + spec.prefix_tokens
    times = _times(spec, trace, count)
    if not times[-1] <= LATEST_S:
        raise ValueError(
            f"the last of {count:,} requests arrives after {times[-1]:.3g} s, at most {LATEST_S:g} is possible; raise "
            "--rate or --rate-scale, or take fewer --requests"
        )
    return Workload(
        arrived_ns=np.rint(times * 1e9).astype(np.int64),
        prompt=prompt,
        output=output,
        max_tokens=np.maximum(output, spec.max_tokens),
        priority=priority,
        ttft_slo_ns=_limits(spec.ttft_slo_ms, priority),
        tbt_slo_ns=_limits(spec.tbt_slo_ms, priority),
        deadline_ns=_limits(spec.deadline_ms, priority),
        group=group,
        tenant=_tenants(spec, count),
        prefix_tokens=spec.prefix_tokens if spec.prefix_groups else 0,
        acceptance=_acceptance(spec, trace, count),
    )


def _read(path: Path) -> Trace:
    try:
        return read_trace(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give --trace FILE, a CSV with num_prefill_tokens") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text ({error.reason}); give --trace FILE, a CSV") from error


def _cycle(trace: Trace | None, column: str, count: int) -> Int64:
    """Return the first `count` entries of a column, repeating a shorter trace."""
    values: Int64 = getattr(trace, column)
    return np.resize(values, count)


def _times(spec: Spec, trace: Trace | None, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the arrival times: [count] seconds from the start."""
    if spec.at_once:
        return np.zeros(count)
    if spec.rate_rps > 0:
        return np.asarray(gamma_times(count, spec.rate_rps * spec.rate_scale, 1 / spec.cv**2, spec.seed))
    if trace is None or trace.arrived_at is None:
        problem = f"{spec.trace}: no column arrived_at" if trace is not None else "drawn lengths: no arrival times"
        raise ValueError(f"{problem}; give --rate R (requests a second) or --at-once")
    at = trace.arrived_at - trace.arrived_at[0]
    lap = float(at[-1]) * (1 + 1 / max(at.size - 1, 1))  # with one mean interval between the laps
    index = np.arange(count)
    times = at[index % at.size] + lap * (index // at.size)
    return np.asarray(times / spec.rate_scale)


def _acceptance(spec: Spec, trace: Trace | None, count: int) -> Float64:
    """Return [count] chances that a draft is right, or [0] where there is no speculation."""
    if spec.acceptance is not None:
        if not 0 <= spec.acceptance <= 1:
            raise ValueError(f"acceptance {spec.acceptance:g}: not a share of drafts; give 0 to 1")
        return np.full(count, spec.acceptance)
    if trace is None or trace.acceptance is None:
        return np.zeros(0)
    return np.resize(trace.acceptance, count)


def _classes(spec: Spec, count: int) -> Int64:
    if not spec.classes:
        return np.full(count, CLASS_NAMES.index("normal"), np.int64)
    numbers = [CLASS_NAMES.index(name) for name in spec.classes]
    shares = np.array(list(spec.classes.values()))
    drawn = np.random.default_rng([spec.seed, 6]).choice(numbers, count, p=shares / shares.sum())
    return drawn.astype(np.int64)


def _tenants(spec: Spec, count: int) -> Int64:
    if not spec.tenants:
        return np.zeros(count, np.int64)
    shares = np.array(spec.tenants)
    return np.random.default_rng([spec.seed, 8]).choice(shares.size, count, p=shares / shares.sum()).astype(np.int64)


def _limits(by_class: dict[str, float], priority: Int64) -> Int64:
    """Return [requests] limits in ns; 0 means none."""
    values = [by_class.get(name, by_class.get("", 0.0)) for name in CLASS_NAMES]
    return np.rint(np.array(values)[priority] * 1e6).astype(np.int64)
