"""Step times of the simulated device: from coefficients, from a roofline, or fitted to the step log of a worker.

device.py calls a clock once a step, so a call costs a few hundred nanoseconds. A clock has no state, so replicas share
one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from services.scheduler.core.types import StepPlan

MIN_STEP_NS = 1_000  # a fit can give less, but no step is free
COEFFICIENTS = ("c0", "c1", "c2", "c3")
MAX_COEFFICIENT_NS = 1e12
_MAX_FIGURE = 1e15  # of any figure in a step log


class Features(NamedTuple):
    """The amounts of work in a step, padding of a padded engine included."""

    tokens: int
    decode_context: float  # sum over decodes of the tokens in KV
    prefill_context: float  # sum over prompt chunks of length * (start + (length + 1) / 2): pairs of attention
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
    """Step times of a model shape on a device."""

    roofline: StepNs

    def duration_ns(self, plan: StepPlan, features: Features) -> int:
        tokens, decode_context, prefill_context, _ = features
        return max(int(self.roofline.step_ns(tokens, decode_context, prefill_context)), MIN_STEP_NS)


def read_coefficients(path: Path) -> Linear:
    """Return the coefficients in a file, `{"c0": ns, "c1": ns, "c2": ns, "c3": ns}`; missing ones are 0.

    Raises ValueError that names the file and the problem.
    """
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a file that can be read") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(given, dict) or not set(given) <= set(COEFFICIENTS) or "c0" not in given:
        raise ValueError(f'{path}: got {given!r:.80}; give {{"c0": ns, "c1": ns, "c2": ns, "c3": ns}}, c0 at least')
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_COEFFICIENT_NS:
            raise ValueError(
                f"{path}: {name} is {str(value)[:40]}; give a number of ns from 0 to {MAX_COEFFICIENT_NS:g}"
            )
    return Linear(**{name: float(value) for name, value in given.items()})


def fit_step_log(path: Path) -> Linear:
    """Fit the coefficients to a worker's --step-log by least squares: time = forward + sample.

    A log without decode_context and prefill_context gives c0 and c1 only. Lines that are off by more than 5 median
    absolute deviations are dropped and the rest is fitted again. Negative coefficients become 0. Raises ValueError that
    names the file, the line and the problem.
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
                if not all(0 <= value <= _MAX_FIGURE for value in row):
                    raise ValueError(f"a figure is not within 0 and {_MAX_FIGURE:g}")
                rows.append(row)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a line of a step log: {error!r}; give a worker's --step-log"
                ) from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a file that can be read") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text ({error.reason}); give a worker's --step-log") from error
    table = np.array([row for row in rows if row[1] > 0], np.float64).reshape(-1, 4)
    if len(table) < 8:
        raise ValueError(f"{path}: {len(table)} steps with tokens, a fit needs at least 8; give a longer log")
    columns = [np.ones(len(table)), *(table[:, i] for i in (1, 2, 3))]
    used = [i for i, column in enumerate(columns) if i == 0 or np.ptp(column) > 0]
    matrix, times = np.column_stack([columns[i] for i in used]), table[:, 0]
    keep = np.ones(len(times), np.bool_)
    for _ in range(3):
        scale = np.maximum(np.abs(matrix[keep]).max(axis=0), 1e-12)
        fitted = np.linalg.lstsq(matrix[keep] / scale, times[keep], rcond=None)[0] / scale
        off = np.abs(matrix @ fitted - times)
        keep = off <= max(5 * float(np.median(off)), 1.0)
    values = dict.fromkeys(COEFFICIENTS, 0.0)
    values.update({COEFFICIENTS[i]: max(float(value), 0.0) for i, value in zip(used, fitted, strict=True)})
    return Linear(**values)
