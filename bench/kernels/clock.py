"""Times of operations, each on several operands in turn, as different layers have them.

On the CPU they are recorded into one program, which times each of its commands; on a device into a CUDA graph between
two events. So neither figure holds the interpreter. Used by `bench.kernels.main` and `bench.gpu`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.backend import Compiled, CpuOps
from kernels.cuda.device import Device
from kernels.ops import AnyOps, Batch, Cache, Pending

BUSY_BYTES, BUSY_COPIES = 1 << 30, 16
"""What a device is given to do while the host hands it what is timed."""

Thunk = Callable[[], object]
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One operation, `copies` times: run(x, prepared, i) does it on the operands number i.

    x [N, width] is copied for each of them; the batch has the tokens 0 .. N - 1. Without x its tokens may be any.
    """

    run: Callable[[Tensor, Any, int], object]
    batch: Batch
    cache: Cache
    copies: int
    x: Tensor | None = None


class Clock(ABC):
    """Makes operands and times what reads them. Times are microseconds of one call, medians over `repeats`."""

    ops: AnyOps

    @abstractmethod
    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor on the device of the operations."""

    @abstractmethod
    def compute(self, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of some work after it and all earlier work are complete."""

    @abstractmethod
    def recorded(self, work: Recorded) -> float:
        """Return a timer for one of our operations, recorded as a worker records a forward pass."""

    @abstractmethod
    def eager(self, calls: Sequence[Thunk]) -> float:
        """Return a timer for torch's operations."""

    @abstractmethod
    def called(self, calls: Sequence[Callable[[], Pending[Any]]], fresh: Thunk) -> float:
        """Return a timer for operations that cannot be recorded.

        `fresh` makes their operands before each repeat, untimed.
        """

    def random(self, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        """Return normal numbers, equal for the same shape and seed on one kind of device."""
        made = self.empty(*shape, dtype=dtype)

        def fill() -> None:
            made.normal_(generator=torch.Generator(made.device).manual_seed(seed))

        self.compute(fill)
        return made

    def wall(self, calls: Sequence[Thunk], repeats: int) -> float:
        """Time calls that return when complete, by the host's clock."""
        times = []
        for _ in range(repeats):
            begun = time.perf_counter_ns()
            for call in calls:
                call()
            times.append(time.perf_counter_ns() - begun)
        return median(times) / len(calls) / 1000


class HostClock(Clock):
    """The C++ kernels."""

    def __init__(self, ops: CpuOps, repeats: int) -> None:
        self.ops, self._repeats = ops, repeats

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def compute(self, work: Callable[[], ResultT]) -> ResultT:
        return work()

    def recorded(self, work: Recorded) -> float:
        ops, rows = self.ops, len(work.batch.tokens)
        # A recording takes results of the backend's own operations only: the operands are looked up as embeddings.
        x = work.x
        tables = [] if x is None else [ops.pack_embedding(iter([x]), *x.shape) for _ in range(work.copies)]
        nothing = torch.empty(0)

        def forward(prepared: Any) -> Tensor:
            operands = [ops.embed(prepared, table) for table in tables] or [nothing] * work.copies
            results = [work.run(operand, prepared, i) for i, operand in enumerate(operands)]
            return next((result for result in results if isinstance(result, Tensor)), nothing)

        program = ops.compile(forward, work.cache, rows, max(rows, len(work.batch.sample_rows)))
        if not isinstance(program, Compiled):
            raise TypeError(f"{ops.name}: these kernels cannot be recorded; use the cpu backend")
        prepared = ops.prepare(work.batch, work.cache)
        runs = [
            sum(ns for _, ns in program.profile(prepared)[len(tables) :]) / work.copies
            for _ in range(self._repeats + 1)
        ]
        return median(runs[1:]) / 1000

    def eager(self, calls: Sequence[Thunk]) -> float:
        self.wall(calls, 1)
        return self.wall(calls, self._repeats)

    def called(self, calls: Sequence[Callable[[], Pending[Any]]], fresh: Thunk) -> float:
        times = []
        for _ in range(self._repeats + 1):
            fresh()
            times.append(self.wall(calls, 1))
        return median(times[1:])


class DeviceClock(Clock):
    """The CUDA kernels, on a GPU or emulated."""

    def __init__(self, ops: AnyOps, device: Device, repeats: int) -> None:
        self.ops, self.repeats, self._device = ops, repeats, device
        busy = BUSY_BYTES if device.torch_device.type == "cuda" else 16
        self._busy = [device.empty((busy,), torch.uint8) for _ in range(2)]
        self._kept_recording: Thunk | None = None

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self._device.empty(shape, dtype)

    def compute(self, work: Callable[[], ResultT]) -> ResultT:
        found: list[ResultT] = []
        self._device.main.run(lambda: found.append(work()))
        self._device.main.record().wait()
        return found[0]

    def recorded(self, work: Recorded) -> float:
        prepared = self.ops.prepare(work.batch, work.cache)
        operands = [self._copy(work.x) for _ in range(work.copies)]

        def all_of_them() -> None:
            for i, operand in enumerate(operands):
                work.run(operand, prepared, i)

        return self._captured(all_of_them, work.copies)

    def eager(self, calls: Sequence[Thunk]) -> float:
        def all_of_them() -> None:
            for call in calls:
                self._device.main.run(call)

        return self._captured(all_of_them, len(calls))

    def called(self, calls: Sequence[Callable[[], Pending[Any]]], fresh: Thunk) -> float:
        begun: list[Pending[Any]] = []

        def all_of_them() -> None:
            begun.extend(call() for call in calls)

        def before() -> None:
            self._device.main.run(fresh)
            self._keep_busy()

        us = self._timed(all_of_them, len(calls), before)
        for one in begun:  # kept until now: its memory is its own while the device works on it
            one.wait()
        return us

    def host_us(self, call: Thunk, calls: int) -> float:
        """Return the host's time to submit one piece of work, by its own clock. The device must do it in less time: a
        driver's queue holds some thousand pieces, and a further one waits."""
        call()
        self._device.main.record().wait()
        begun = time.perf_counter_ns()
        for _ in range(calls):
            call()
        spent = time.perf_counter_ns() - begun
        self._device.main.record().wait()
        return spent / calls / 1000

    def replayed(self, replay: Thunk, count: int) -> float:
        """Return the device time of one of the `count` pieces of work that `replay` repeats."""
        return self._timed(replay, count, lambda: None)

    def _copy(self, x: Tensor | None) -> Tensor:
        if x is None:
            return self._device.empty((1,), torch.float32)
        made = self._device.empty(tuple(x.shape), x.dtype)
        self._device.main.run(lambda: made.copy_(x))
        return made

    def _captured(self, work: Callable[[], None], count: int) -> float:
        if self._kept_recording is None:  # torch's recordings that share memory must never all be gone at once
            self._kept_recording = self._device.capture(lambda: self._device.main.copy(*self._busy))
        work()  # what is loaded or compiled at its first use must not be captured
        self._device.main.record().wait()
        return self.replayed(self._device.capture(work), count)

    def _timed(self, work: Thunk, count: int, before: Thunk) -> float:
        stream, marks = self._device.main, []
        for _ in range(self.repeats + 1):
            before()
            start = stream.record()
            work()
            marks.append((start, stream.record()))
        stream.record().wait()
        return median(self._device.elapsed_ns(*pair) for pair in marks[1:]) / count / 1000

    def _keep_busy(self) -> None:
        """Occupy the device, so that the host's next work runs without a gap."""
        target, source = self._busy
        for _ in range(BUSY_COPIES):
            self._device.main.copy(target, source)


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected number; both on one device."""
    wide, exact = found.double(), expected.double()
    largest = float(exact.abs().max()) or 1.0
    error = float((wide - exact).abs().max()) / largest
    return error if np.isfinite(error) else float("inf")
