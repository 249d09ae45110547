"""How long a step takes on the pretended device: from coefficients, from a roofline, or from a worker's own log.

Called by device.py once a step, so an answer costs a few hundred nanoseconds; no state, so replicas share one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from services.scheduler.core.types import StepPlan

MIN_STEP_NS = 1_000  # no step is free, whatever a fit says
COEFFICIENTS = ("c0", "c1", "c2", "c3")
MOST_NS = 1e12  # of a coefficient
_MOST = 1e15  # of any figure in a step's log


class Features(NamedTuple):
    """What a step computes; of a padded engine with its padding."""

    tokens: int
    decode_context: float  # tokens in KV before each decode, summed
    prefill_context: float  # of each prompt chunk length * (start + (length + 1) / 2), summed: pairs of attention
    prefill_tokens: int


class StepClock(Protocol):
    """Any model of a step's time."""

    def duration_ns(self, plan: StepPlan, features: Features) -> int: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """t = c0 + c1*tokens + c2*decode_context + c3*prefill_context, in ns (docs/simulate.md#step-times)."""

    c0: float
    c1: float = 0.0
    c2: float = 0.0
    c3: float = 0.0

    def duration_ns(self, plan: StepPlan, features: Features) -> int:
        tokens, decode_context, prefill_context, _ = features
        time = self.c0 + self.c1 * tokens + self.c2 * decode_context + self.c3 * prefill_context
        return max(int(time), MIN_STEP_NS)


class StepNs(Protocol):
    """The part of roofline.Roofline that a clock needs."""

    def step_ns(self, tokens: int, decode_context: float, prefill_context: float) -> float: ...


@dataclass(frozen=True, slots=True)
class RooflineClock:
    """Times of a (model shape, device)."""

    roofline: StepNs

    def duration_ns(self, plan: StepPlan, features: Features) -> int:
        tokens, decode_context, prefill_context, _ = features
        return max(int(self.roofline.step_ns(tokens, decode_context, prefill_context)), MIN_STEP_NS)


def read_coefficients(path: Path) -> Linear:
    """`{"c0": ns, "c1": ns, "c2": ns, "c3": ns}`; what is left out is 0. Raises ValueError that says what is wrong."""
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(given, dict) or not set(given) <= set(COEFFICIENTS) or "c0" not in given:
        raise ValueError(f'{path} must hold {{"c0": ns, "c1": ns, "c2": ns, "c3": ns}}, c0 at least; not {given!r:.80}')
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_NS:
            raise ValueError(
                f"{path}: {name} is {str(value)[:40]}; it must be a number of ns, 0 or more, to {MOST_NS:g}"
            )
    return Linear(**{name: float(value) for name, value in given.items()})


def fit_step_log(path: Path) -> Linear:
    """Least squares over a worker's --step-log: time = forward + sample, against the columns that the log has.

    Lines without decode_context and prefill_context give c0 and c1 only. Robust: lines over 5 median absolute
    deviations off are left out and the rest is fitted again. Negative coefficients become 0. Raises ValueError.
    """
    rows: list[tuple[float, float, float, float]] = []
    try:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
                time_ns = 1000.0 * (float(line["forward_us"]) + float(line["sample_us"]))
                context = float(line.get("decode_context", 0)), float(line.get("prefill_context", 0))
                row = time_ns, float(line["tokens"]), *context
                if not all(0 <= value <= _MOST for value in row):
                    raise ValueError(f"a figure is not within 0 and {_MOST:g}")
                rows.append(row)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise ValueError(f"{path}, line {number} is not one of a worker's --step-log: {error!r}") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text ({error.reason}); give a worker's --step-log") from error
    table = np.array([row for row in rows if row[1] > 0], np.float64).reshape(-1, 4)
    if len(table) < 8:
        raise ValueError(f"{path} has {len(table)} steps with tokens; a fit needs at least 8")
    columns = [np.ones(len(table)), *(table[:, i] for i in (1, 2, 3))]
    used = [i for i, column in enumerate(columns) if i == 0 or np.ptp(column) > 0]
    matrix, times = np.column_stack([columns[i] for i in used]), table[:, 0]
    keep = np.ones(len(times), np.bool_)
    for _ in range(3):
        scale = np.maximum(np.abs(matrix[keep]).max(axis=0), 1e-12)
        found = np.linalg.lstsq(matrix[keep] / scale, times[keep], rcond=None)[0] / scale
        off = np.abs(matrix @ found - times)
        keep = off <= max(5 * float(np.median(off)), 1.0)
    values = dict.fromkeys(COEFFICIENTS, 0.0)
    values.update({COEFFICIENTS[i]: max(float(value), 0.0) for i, value in zip(used, found, strict=True)})
    return Linear(**values)
