"""Run commands: at once, or recorded into a program that one call runs.

A recording replaces every size that follows the batch by a symbol (ROWS_TOKENS, ROWS_SAMPLES) and takes results from
buffers of the largest size. A buffer is free again when Python has dropped the tensor that showed it: commands run
in the order in which they were recorded, so its next writer comes after its last reader.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.cpu.commands import (
    BFLOAT16,
    FLOAT32,
    NAMES,
    Command,
    Step,
    command,
    resolve,
)
from kernels.cpu.library import Library
from kernels.cpu.threads import ThreadChoice

DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Type -> the weight format that holds its numbers as they are."""


def dtype_code(dtype: torch.dtype) -> int:
    """Raise ValueError for a type that the kernels do not know."""
    if dtype not in DTYPES:
        raise ValueError(f"the cpu kernels compute in float32 and bfloat16, not in {dtype}")
    return DTYPES[dtype]


def address(array: npt.NDArray[Any]) -> int:
    """Return where a contiguous array begins."""
    if not array.flags.c_contiguous:
        raise ValueError("an array that crosses into C must be contiguous")
    return int(array.__array_interface__["data"][0])


class Runner(Protocol):
    """The target of the backend's operations."""

    def rows(self, x: Tensor) -> int:
        """Return the rows of x: a number or a symbol."""

    def out(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor for so many rows."""

    def emit(self, rows: int, args: ctypes.Structure, step: Step | None, keep: object = None) -> None:
        """Run or record one command. `keep`: what must live as long as its addresses are used."""

    def exchange(self, x: Tensor, call: Callable[[Tensor], object]) -> None:
        """Call with x, or record that it is to be called, between the commands before and those after."""

    def now(self, rows: int, args: ctypes.Structure) -> None:
        """Run one command at once, recording or not."""


class Immediate:
    """Each operation is a program of one command."""

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self.threads = threads
        self._nothing = Step()

    def rows(self, x: Tensor) -> int:
        return x.shape[0]

    def out(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, width), dtype=dtype)

    def emit(self, rows: int, args: ctypes.Structure, step: Step | None, keep: object = None) -> None:
        self._run(rows, args, step or self._nothing, self.threads)

    def exchange(self, x: Tensor, call: Callable[[Tensor], object]) -> None:
        call(x)

    def now(self, rows: int, args: ctypes.Structure) -> None:
        self.emit(rows, args, None)

    def alone(self, rows: int, args: ctypes.Structure) -> None:
        """Run one command with this thread alone: one that is over before another thread would be awake."""
        self._run(rows, args, self._nothing, 1)

    def _run(self, rows: int, args: ctypes.Structure, step: Step, threads: int) -> None:
        made = command(rows, args)
        self._library.run(ctypes.addressof(made), 1, ctypes.addressof(step), threads)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call between two commands with the rows of a tensor that a step has."""

    before: int  # the command that it precedes
    x: Tensor
    rows: int  # a symbol
    call: Callable[[Tensor], object]

    def run(self, step: Step) -> None:
        count = resolve(self.rows, step.tokens_count, step.samples_count)
        self.call(self.x[:count])


@dataclass(slots=True)
class Recording:
    """Commands of a forward pass, and all that their addresses point to."""

    immediate: Immediate
    max_tokens: int
    max_samples: int
    commands: list[Command] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    _references: list[object] = field(default_factory=list)
    _free: list[Tensor] = field(default_factory=list)
    _symbols: dict[int, int] = field(default_factory=dict)  # address of a result -> its rows
    workspace_bytes: int = 0

    def rows(self, x: Tensor) -> int:
        if x.data_ptr() not in self._symbols:
            raise ValueError("a recorded forward pass may use results of this backend's operations only")
        return self._symbols[x.data_ptr()]

    def out(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        most = resolve(rows, self.max_tokens, self.max_samples)
        need = most * width * dtype.itemsize
        fitting = [buffer for buffer in self._free if buffer.numel() >= need]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
            self._free[:] = [other for other in self._free if other is not buffer]
        else:
            buffer = torch.empty(need, dtype=torch.uint8)
            self._references.append(buffer)
            self.workspace_bytes += need
        shown = buffer[:need].view(dtype).view(most, width)
        self._symbols[shown.data_ptr()] = rows
        weakref.finalize(shown, self._free.append, buffer)
        return shown

    def emit(self, rows: int, args: ctypes.Structure, step: Step | None, keep: object = None) -> None:
        self.commands.append(command(rows, args))
        self._references.append(keep)

    def exchange(self, x: Tensor, call: Callable[[Tensor], object]) -> None:
        # Another tensor on the same buffer: this one would keep it from the commands after its last reader.
        self.exchanges.append(Exchange(len(self.commands), x.detach(), self.rows(x), call))

    def now(self, rows: int, args: ctypes.Structure) -> None:
        self.immediate.now(rows, args)


class Program:
    """A recorded forward pass: one call a step, and one more for each exchange."""

    def __init__(self, library: Library, threads: int, recording: Recording, result: Tensor) -> None:
        self._library = library
        self._threads = threads
        self._choice = ThreadChoice(threads)
        self._recording = recording  # owns the memory
        self.workspace_bytes = recording.workspace_bytes
        self._result = result
        self._results: dict[int, Tensor] = {}  # by rows: a view costs more than some commands
        self._commands = (Command * len(recording.commands))(*recording.commands)
        bounds = [0, *(exchange.before for exchange in recording.exchanges), len(recording.commands)]
        self._parts = list(zip(bounds[:-1], bounds[1:], [*recording.exchanges, None], strict=True))

    def run(self, step: Step) -> Tensor:
        """Return the result's rows of this step; they hold until the next run."""
        self._check(step)
        threads = self._choice.pick(step.tokens_count)
        took = 0
        for first, end, exchange in self._parts:
            begun = time.monotonic_ns()
            self._run(first, end, step, threads)
            took += time.monotonic_ns() - begun
            if exchange is not None:
                exchange.run(step)
        self._choice.took(step.tokens_count, threads, took)
        # What runs at once afterwards, the sampler above all, keeps to this number: a thread that this step left out
        # stays asleep, and its core is left to the rest.
        self._recording.immediate.threads = threads
        count = step.samples_count
        if count not in self._results:
            self._results[count] = self._result[:count]
        return self._results[count]

    def profile(self, step: Step) -> list[tuple[str, int]]:
        """Run and return (operation, ns) of each command in order."""
        self._check(step)
        times = np.zeros(len(self._commands), np.int64)
        for first, end, exchange in self._parts:
            self._run(first, end, step, self._threads, address(times[first:]))
            if exchange is not None:
                exchange.run(step)
        return [(NAMES[made.op], int(took)) for made, took in zip(self._commands, times, strict=True)]

    def _run(self, first: int, end: int, step: Step, threads: int, times: int = 0) -> None:
        if first < end:
            commands = ctypes.addressof(self._commands) + first * ctypes.sizeof(Command)
            self._library.run(commands, end - first, ctypes.addressof(step), threads, times)

    def _check(self, step: Step) -> None:
        most = self._recording
        if step.tokens_count > most.max_tokens or step.samples_count > most.max_samples:
            raise ValueError(
                f"a step of {step.tokens_count} tokens and {step.samples_count} samples; the program was recorded for "
                f"{most.max_tokens} and {most.max_samples}"
            )
