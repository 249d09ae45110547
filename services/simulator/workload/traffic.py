"""Arrival times and lengths of requests: Poisson and gamma processes, traces, closed loops.

Pure given a seed: the same arguments give the same schedule. The simulator, `orcinus fleet` and the load generator
(`bench/serve/main.py`) draw their requests here.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAX_TOKENS = 1_000_000  # bound of a prompt and of an output
LATEST_S = 1e9  # later times in ns come near the end of int64


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the schedule. `at_s` counts from the start of the run; a closed loop ignores it."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Columns of a trace file. `arrived_at` and `acceptance` are None if the file has no such column."""

    arrived_at: npt.NDArray[np.float64] | None
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    acceptance: npt.NDArray[np.float64] | None = None  # chance that a draft is right


def read_trace(path: Path) -> Trace:
    """Return the columns `arrived_at` (seconds, optional), `num_prefill_tokens`, `num_decode_tokens` and `acceptance`
    (0 to 1, optional) of a CSV file, sorted by arrival.

    Raises ValueError that names the file and the wrong line or column.
    """
    rows: list[tuple[float, int, int, float]] = []
    with path.open(newline="", encoding="utf-8-sig") as file:  # drop a byte order mark
        reader = csv.DictReader(file)
        try:
            names = list(reader.fieldnames or [])
            _check_names(path, names)
            timed, drafted = "arrived_at" in names, "acceptance" in names
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                at = _second(row, where) if timed else 0.0
                lengths = _tokens(row, "num_prefill_tokens", where), _tokens(row, "num_decode_tokens", where)
                rows.append((at, *lengths, _acceptance(row, where) if drafted else 0.0))
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num + 1}: {error}") from error
    if not rows:
        raise ValueError(f"{path}: holds no request; give a CSV with one line for each")
    if timed:
        rows.sort(key=lambda row: row[0])
    columns = np.asarray(rows)
    return Trace(
        columns[:, 0] if timed else None,
        columns[:, 1].astype(np.int64),
        columns[:, 2].astype(np.int64),
        columns[:, 3] if drafted else None,
    )


def _check_names(path: Path, names: list[str]) -> None:
    shown = ", ".join(names)[:200] or "none"
    for name in ("num_prefill_tokens", "num_decode_tokens"):
        if name not in names:
            raise ValueError(f"{path}: no column {name!r}; add it to the columns {shown}")
    for name in ("arrived_at", "num_prefill_tokens", "num_decode_tokens", "acceptance"):
        if names.count(name) > 1:
            raise ValueError(f"{path}: two columns {name!r}; drop one of {shown}")


def _value(row: dict[str, str], name: str, where: str) -> str:
    """Return a cell; a short line lacks its last cells. Raises ValueError if it is empty."""
    if row[name] is None or not row[name].strip():
        raise ValueError(f"{where}: no {name}; give a value in every line")
    return row[name].strip()


def _second(row: dict[str, str], where: str) -> float:
    text = _value(row, "arrived_at", where)
    try:
        at = float(text)
    except ValueError:
        at = math.nan
    if not 0 <= at <= LATEST_S:
        raise ValueError(f"{where}: arrived_at is {text[:40]!r}; give a number of seconds from 0 to {LATEST_S:g}")
    return at


def _acceptance(row: dict[str, str], where: str) -> float:
    text = _value(row, "acceptance", where)
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ValueError(f"{where}: acceptance is {text[:40]!r}; give the share of drafts that are right, 0 to 1")
    return share


def _tokens(row: dict[str, str], name: str, where: str) -> int:
    text = _value(row, name, where)
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= MAX_TOKENS:
        raise ValueError(f"{where}: {name} is {text[:40]!r}; give an integer from 1 to {MAX_TOKENS:,}")
    return count


def gamma_times(count: int, rate_rps: float, burstiness: float, seed: int) -> npt.NDArray[np.float64]:
    """Return [count] arrival times in seconds, the first at 0. Intervals are gamma with mean 1/rate.

    `burstiness` is the shape: 1 is a Poisson process, less comes in bursts, more is more even. The
    coefficient of variation of the intervals is 1/sqrt(burstiness).
    """
    intervals = np.random.default_rng([seed, 1]).gamma(burstiness, 1.0 / (rate_rps * burstiness), size=count)
    intervals[0] = 0.0
    return np.asarray(np.cumsum(intervals))


def lengths(count: int, bounds: tuple[int, int], seed: int, stream: int) -> npt.NDArray[np.int64]:
    """Return [count] lengths in tokens, uniform in `bounds`, both included.

    `stream` keeps prompts and outputs independent.
    """
    return np.random.default_rng([seed, 2 + stream]).integers(bounds[0], bounds[1] + 1, size=count)


def from_trace(
    trace: Trace, count: int, rate_rps: float, rate_scale: float, burstiness: float, seed: int
) -> list[Arrival]:
    """Return the first `count` requests of a trace; 0 means all. A rate above 0 replaces the times of the trace.

    `rate_scale` divides the trace's times: 2 is twice as fast. Raises ValueError if there are neither times nor a rate.
    """
    total = min(count, len(trace.prompt_tokens)) if count else len(trace.prompt_tokens)
    if rate_rps > 0:
        times = gamma_times(total, rate_rps, burstiness, seed)
    elif trace.arrived_at is not None:
        times = (trace.arrived_at[:total] - trace.arrived_at[0]) / rate_scale
    else:
        raise ValueError("trace: no column 'arrived_at'; give --rate")
    return [
        Arrival(float(at), int(prompt), int(output))
        for at, prompt, output in zip(times, trace.prompt_tokens, trace.output_tokens, strict=False)
    ]


def clip(arrivals: list[Arrival], most_tokens: int) -> tuple[list[Arrival], int]:
    """Cut requests to `most_tokens` of prompt and output together; return them and the number of cut requests.

    The output keeps at most half and the prompt the rest, so that a small context can run a trace of a large one.
    """
    kept, cut = [], 0
    for arrival in arrivals:
        if arrival.prompt_tokens + arrival.output_tokens > most_tokens:
            output = min(arrival.output_tokens, max(1, most_tokens // 2))
            arrival = Arrival(arrival.at_s, min(arrival.prompt_tokens, most_tokens - output), output)
            cut += 1
        kept.append(arrival)
    return kept, cut
