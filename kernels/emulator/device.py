"""A device on the CPU that does its work as late, and its streams as far apart, as a GPU may.

Tests and the `emulator` backend use it in place of kernels.cuda.gpu.CudaDevice. Kernels are those of `Program`; what is
put off is done by the threads that wait, so a wait that is missing shows as a wrong number. Importing this registers
`emulator`.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cuda import loader
from kernels.cuda.backend import CudaOps
from kernels.cuda.calls import Block, Call
from kernels.cuda.device import Device, Event, Stream
from kernels.cuda.residency import resident_of
from kernels.emulator.memory import Memory, spoil
from kernels.emulator.program import FORWARD, EmulatorError, Program
from kernels.ops import register

EAGER = (0.0, 0.1, 0.5)
"""How often something is done when something is given, by the seed's remainder: 0 puts off all that it can."""

STEPS = (0, 1, 4, 16)
"""How many pieces of work are done where some are."""

STAYS = 16
"""A stream goes on for so many pieces of work on average before the other may overtake it."""


class EmulatedEvent(Event):
    """`passed_ns`: when, on a monotonic clock, the stream passed it; None before."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self.passed_ns: int | None = None

    def done(self) -> bool:
        self._device.do_some()
        return self.passed_ns is not None

    def wait(self) -> None:
        self._device.do_until(self)


class _Work(NamedTuple):
    """A piece of work. after: the event that it waits for; touched: what has to live until it is done."""

    name: str
    do: Callable[[], object]
    after: EmulatedEvent | None = None
    touched: tuple[Tensor, ...] = ()


class EmulatedStream(Stream):
    """A queue of work that is put off."""

    def __init__(self, device: EmulatedDevice, name: str) -> None:
        self._device, self.name = device, name
        self.put_off: deque[_Work] = deque()

    def ready(self) -> bool:
        """Return whether its first piece of work can be done now."""
        after = self.put_off[0].after if self.put_off else None
        return bool(self.put_off) and (after is None or after.passed_ns is not None)

    def launch(self, call: Call, *touched: Tensor) -> None:
        """Raise KeyError when no source has the kernel."""
        program, params = program_of(call.name, self._device.flags), call.params.copy()

        def work() -> None:
            program.launch(call.name, call.grid, call.block, call.shared, params, order=self._device.thread_order)

        self._device.give(self, _Work(call.name, work, touched=touched))

    def run(self, work: Callable[[], object]) -> None:
        self._device.give(self, _Work(getattr(work, "__qualname__", "work"), work))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Raise ValueError for what a GPU cannot copy in one piece, or not without waiting."""
        same = target.shape == source.shape and target.dtype == source.dtype
        if not (same and target.is_contiguous() and source.is_contiguous()):
            raise ValueError(f"a copy of {source.dtype} {tuple(source.shape)} to {target.dtype} {tuple(target.shape)}")
        if not (self._device.holds(target) and self._device.holds(source)):
            raise ValueError(f"a copy of {tuple(source.shape)} from or to host memory that is not pinned")
        self._device.give(self, _Work("copy", lambda: target.copy_(source)))

    def record(self) -> EmulatedEvent:
        self._device.refuse_while_recording("recorded")
        event = EmulatedEvent(self._device)
        self._device.give(self, _Work("record", lambda: setattr(event, "passed_ns", time.monotonic_ns())))
        return event

    def wait_for(self, event: Event) -> None:
        self._device.refuse_while_recording("waited for")
        if not isinstance(event, EmulatedEvent):
            raise TypeError(f"{event!r} is no event of an emulated device")
        self._device.give(self, _Work("wait_for", lambda: None, after=event))


class _Recording:
    """The work given to `main` while a function ran, and the memory that it took."""

    def __init__(self) -> None:
        self.work: list[_Work | Callable[[], object]] = []
        """Work, and calls of the host in between."""
        self.taken: list[Tensor] = []


class EmulatedDevice(Device):
    """order None does everything at once, for speed; a number is the seed of the order in which work is done.

    With a seed, what is given waits in the queue of its stream. A wait for an event does work, of either stream,
    until it is passed; a question whether it is passed does some; and with EAGER so does each new work. An error of
    work that was put off is raised, as an EmulatorError that names the work, by the next wait or question; the work
    behind it is done all the same.
    """

    name = "emulator"
    torch_device = torch.device("cpu")

    def __init__(
        self,
        order: int | None = None,
        thread_order: int = FORWARD,
        processors: int = 4,
        memory_bytes: int = 4 << 30,
        recording_bytes: int = 0,
        flags: tuple[str, ...] = (),
        has_wgmma: bool = False,
    ) -> None:
        """Create a device.

        thread_order, flags: those of `Program`; memory_bytes: what there is in all; recording_bytes: what the driver
        keeps for each recording.
        """
        self.thread_order, self.processors, self.flags = thread_order, processors, flags
        self.has_wgmma = has_wgmma
        self._streams = (EmulatedStream(self, "main"), EmulatedStream(self, "copies"))
        self.main, self.copies = self._streams
        self._memory, self._pinned = Memory(memory_bytes), Memory(sys.maxsize)
        self._random = None if order is None else np.random.default_rng(order)
        self._eager = 0.0 if order is None else EAGER[order % len(EAGER)]
        self._ahead = (
            0 if self._random is None else int(self._random.integers(2))
        )  # the stream that runs, while it can go on
        self._turn = threading.Lock()  # held for one piece of work at a time
        self._error: EmulatorError | None = None
        self._recording_bytes = recording_bytes
        self._recording: _Recording | None = None
        self._recordings: weakref.WeakSet[_Recording] = weakref.WeakSet()

    def resident(self, block: Block) -> int:
        return resident_of("sm_90", *block)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory full of NaN; see `Memory` for its errors."""
        taken = self._memory.take(shape, dtype)
        if self._recording is not None:
            self._recording.taken.append(taken)
        return taken

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._pinned.take(shape, dtype).zero_()

    def registered(self, memory: Tensor, read_only: bool = False) -> Tensor:
        return self._pinned.adopt(memory)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the device can copy it: what `empty` or `pinned` gave, or a part of that."""
        return self._memory.holds(tensor) or self._pinned.holds(tensor)

    def elapsed_ns(self, start: Event, end: Event) -> int:
        first, last = (event.passed_ns if isinstance(event, EmulatedEvent) else None for event in (start, end))
        if first is None or last is None:
            raise EmulatorError("the time between events is asked for that are not passed yet")
        return last - first

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record work; all recordings share one piece of memory, which loses its contents when one of them begins."""
        recording = self._recording = _Recording()
        try:
            work()
        finally:
            self._recording = None
        self._driver_keeps(self._recording_bytes)
        weakref.finalize(recording, self._driver_keeps, -self._recording_bytes).atexit = False
        self._recordings.add(recording)

        def replay() -> None:
            self.give(self._streams[0], _Work("memory of recordings", self._spoil_recordings))
            for one in recording.work:
                if isinstance(one, _Work):
                    self.give(self._streams[0], one)
                else:
                    one()

        return replay

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    def cut(self, call: Callable[[], object]) -> None:
        if self._recording is None:
            raise EmulatorError("a recording is cut where there is none")
        self._recording.work.append(call)

    def free_bytes(self) -> tuple[int, int]:
        return self._memory.total - self._memory.used, self._memory.total

    def peak_bytes(self, reset: bool = False) -> int:
        peak = self._memory.peak
        if reset:
            self._memory.peak = self._memory.used
        return peak

    def give(self, stream: EmulatedStream, work: _Work) -> None:
        """Put work at the end of a stream, or into the recording."""
        if self._recording is not None:
            if stream is self.copies:
                raise EmulatorError(f"{work.name} is given to copies in a recording")
            self._recording.work.append(work)
        elif self._random is None:
            with torch.inference_mode():
                work.do()
        else:
            stream.put_off.append(work)
            if self._random.random() < self._eager:
                self._do_pieces(wait_for_turn=False)

    def do_some(self) -> None:
        """Do a random amount of work, perhaps none."""
        self.refuse_while_recording("asked for")
        if self._random is not None:
            self._do_pieces()
            self._raise_error()

    def do_until(self, event: EmulatedEvent) -> None:
        """Do work until an event is passed."""
        self.refuse_while_recording("waited for")
        while event.passed_ns is None:
            with self._turn:
                if event.passed_ns is None:
                    self._do_piece()
        self._raise_error()

    def refuse_while_recording(self, what: str) -> None:
        """Raise EmulatorError inside `capture`."""
        if self._recording is not None:
            raise EmulatorError(f"an event is {what} in a recording")

    def _do_pieces(self, wait_for_turn: bool = True) -> None:
        if self._random is None or not self._turn.acquire(blocking=wait_for_turn):
            return
        try:
            for _ in range(int(self._random.choice(STEPS))):
                if any(stream.ready() for stream in self._streams):
                    self._do_piece()
        finally:
            self._turn.release()

    def _do_piece(self) -> None:
        """Do one piece of one stream. There is one: what was given first of all that is left waits for nothing."""
        if self._random is not None and not self._random.integers(STAYS):
            self._ahead = int(self._random.integers(len(self._streams)))
        one, other = self._streams[self._ahead], self._streams[1 - self._ahead]
        stream = one if one.ready() else other
        work = stream.put_off.popleft()
        try:
            with torch.inference_mode():
                work.do()
        except Exception as error:
            named = EmulatorError(f"stream {stream.name}, {work.name}: {error}")
            named.__cause__ = error
            self._error = self._error or named

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _driver_keeps(self, size: int) -> None:
        self._memory.total -= size  # no tensor has it, so no peak shows it

    def _spoil_recordings(self) -> None:
        for recording in self._recordings:
            for taken in recording.taken:
                spoil(taken)


@cache
def program_of(kernel: str, flags: tuple[str, ...] = ()) -> Program:
    """Return the program with a kernel of that name, compiled when it is first asked for.

    Raise KeyError when no source has it, BuildError when a source does not compile.
    """
    named = f"KERNEL({kernel},"
    for source in sorted(loader.sources(), key=lambda path: named not in path.read_text()):
        with suppress(KeyError):
            _program(source, flags).params_bytes(kernel)
            return _program(source, flags)
    raise KeyError(f"no source in {loader.SOURCES} has a kernel {kernel!r}")


@cache
def _program(source: Path, flags: tuple[str, ...]) -> Program:
    return Program(source, include=(loader.SOURCES,), flags=flags)


register("emulator", lambda device: CudaOps(EmulatedDevice()))
