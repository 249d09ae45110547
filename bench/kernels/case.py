"""One operation at one size: its execution, the bytes and operations that it needs at least, its error.

Error and time come from the same run, and where the error is too large there is no time: a wrong kernel is no figure.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from bench.kernels.backends import Peaks, type_name
from bench.kernels.clock import Clock, Recorded, Thunk
from bench.kernels.shapes import Plan

LIMITS = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of the largest number expected: twice what roundings to the type are off, those of weights and of the result."""

SAID = 200  # characters of an error that are kept


@dataclass(frozen=True, slots=True)
class Bench:
    """The data that all cases of a run share."""

    clock: Clock
    peaks: Peaks
    plan: Plan
    dtype: torch.dtype
    wall_repeats: int = 5


@dataclass(frozen=True, slots=True)
class Case:
    """`time` returns microseconds of one call; `peers`, torch's ways to the same result, do the same."""

    op: str
    shape: str
    moved_bytes: float
    operations: float
    time: Callable[[], float]
    error: Callable[[], float]
    limit: float
    peers: dict[str, Callable[[], float]] = field(default_factory=dict)
    floor_us: float | None = None  # where it is not what bandwidth and multiplications say
    dtype: torch.dtype | None = None  # where it is not the bench's


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a case. Times are None where the kernel was wrong or a peer could not run; `said` then has the
    reason."""

    op: str
    shape: str
    dtype: str
    us: float | None
    gb_s: float | None
    tflop_s: float | None
    floor_us: float
    of_floor: float | None
    error: float | None
    peers_us: dict[str, float | None]
    said: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Maker = tuple[str, Callable[[Bench], Case]]
"""What is made and how; making a case takes the memory of its operands."""


def recorded(
    bench: Bench,
    op: str,
    shape: str,
    work: Recorded,
    amounts: tuple[float, float],
    error: Callable[[], float],
    peers: dict[str, Callable[[], Sequence[Thunk]]],
) -> Case:
    """Return a case of an operation that can be recorded. amounts: bytes and operations; a peer makes calls to time."""
    return Case(
        op,
        shape,
        *amounts,
        time=lambda: bench.clock.recorded(work),
        error=error,
        limit=LIMITS[bench.dtype],
        peers={name: partial(_eager, bench, make) for name, make in peers.items()},
    )


def _eager(bench: Bench, make: Callable[[], Sequence[Thunk]]) -> float:
    return bench.clock.eager(make())


def run(bench: Bench, makers: Sequence[Maker], tell: Callable[[str], None]) -> Iterator[Row]:
    """Make, check and time the cases in turn; a failure becomes a row with its error."""
    for name, make in makers:
        tell(name)
        try:
            case = make(bench)
            yield measured(bench, case)
            del case
        except Exception as error:
            yield _failed(bench, name, error)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measured(bench: Bench, case: Case) -> Row:
    """Time and error of a case, and the times of its peers."""
    dtype = case.dtype or bench.dtype
    floor_us = bench.peaks.floor_us(case.moved_bytes, case.operations, dtype)
    if case.floor_us is not None:
        floor_us = case.floor_us
    error = case.error()
    us, said = None, []
    if error <= case.limit:
        us = case.time()
    else:
        said.append(f"wrong: the error is {error:.2g}, at most {case.limit:.2g} is right")
    peers_us: dict[str, float | None] = {}
    for name, time_it in case.peers.items():
        try:
            peers_us[name] = time_it()
        except Exception as failure:
            peers_us[name] = None
            said.append(f"{name}: {_short(failure)}")
    return Row(
        case.op,
        case.shape,
        type_name(dtype),
        us,
        gb_s=case.moved_bytes / us / 1e3 if us else None,
        tflop_s=case.operations / us / 1e6 if us and case.operations else None,
        floor_us=floor_us,
        of_floor=floor_us / us if us else None,
        error=error,
        peers_us=peers_us,
        said="; ".join(said),
    )


def _failed(bench: Bench, name: str, error: Exception) -> Row:
    op, _, shape = name.partition(" ")
    return Row(op, shape, type_name(bench.dtype), None, None, None, 0.0, None, None, {}, _short(error))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:SAID].replace("\n", " ")
