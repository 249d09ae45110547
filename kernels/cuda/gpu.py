"""The device of the CUDA backend where there is a GPU: torch owns streams, memory and graphs, CuPy launches kernels.

Each thread that gives work has `main` as torch's current stream from then on, so that nothing is switched in the hot
path. Only `Event.wait` waits for the GPU, and letting go of large pinned memory.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cuda import loader
from kernels.cuda.calls import Block, Call
from kernels.cuda.device import Device, Event, Stream
from kernels.cuda.loader import CudaError
from kernels.cuda.residency import resident_of

log = logging.getLogger("orcinus.kernels")
cuda: Any = torch.cuda  # part of it has no types

CAPABILITY = (8, 0)
"""The oldest that the kernels are written for: bfloat16 on tensor cores and cp.async."""

REGISTERED_BYTES = 1 << 20
"""Pinned memory from here on is registered instead of taken from torch, which rounds up to a power of two: a host tier
of 40 GiB would take 64."""

_HOST_MAPPED = 2  # cudaHostRegisterMapped of the runtime's API: kernels read and write it under the same address
_HOST_READ_ONLY = 8  # cudaHostRegisterReadOnly: memory that this process has no right to write
entered = threading.local()  # `device` with the `main` stream that is the thread's current stream


class CudaEvent(Event):
    """An event of torch. A thread that waits sleeps."""

    def __init__(self) -> None:
        self.event = cuda.Event(enable_timing=True, blocking=True)

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream(Stream):
    """A stream of torch's on the device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.stream = cuda.Stream(device.torch_device)
        self._pointer = self.stream.cuda_stream

    def launch(self, call: Call, *touched: Tensor) -> None:
        """Raise KeyError when no source has the kernel."""
        self._device.enter()
        self._device.programs[call.name].launch(*call, self._pointer)
        self._hold(touched)

    def run(self, work: Callable[[], object]) -> None:
        self._device.enter()
        if self is self._device.main:
            work()
        else:
            with cuda.stream(self.stream):
                work()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.run(lambda: target.copy_(source, non_blocking=True))
        self._hold((target, source))

    def record(self) -> CudaEvent:
        made = CudaEvent()
        made.event.record(self.stream)
        return made

    def wait_for(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise TypeError(f"{event!r} is no event of a GPU")
        self.stream.wait_event(event.event)

    def _hold(self, tensors: tuple[Tensor, ...]) -> None:
        """Report to torch what another stream uses: it reuses memory in the order of `main`."""
        if self is not self._device.main:
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)


class _Recording:
    """Graphs, one after another, and calls of the host in between. part: is open while a graph is recorded."""

    def __init__(self, stream: Any, pool: Any) -> None:
        self._stream, self._pool = stream, pool
        self.part = ExitStack()
        self.graphs: list[Any] = []
        self.steps: list[Callable[[], object]] = []

    def begin_part(self) -> None:
        graph = cuda.CUDAGraph()
        # Other threads may wait for events and take memory meanwhile.
        how = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        self.part.enter_context(cuda.graph(graph, **how))
        self.graphs.append(graph)
        self.steps.append(graph.replay)


class CudaDevice(Device):
    """GPU number `index` of those that the process sees. All kernels are loaded at once, before any recording."""

    def __init__(self, index: int = 0) -> None:
        """Raise CudaError, with what to do, where there is no GPU that can be used."""
        demand_gpu(index)
        self.torch_device = torch.device("cuda", index)
        self.name = cuda.get_device_name(index)
        self.processors = int(cuda.get_device_properties(index).multi_processor_count)
        arch = "sm_{}{}".format(*cuda.get_device_capability(index))
        self.has_wgmma = arch == "sm_90"
        self._main = CudaStream(self)
        self.main, self.copies = self._main, CudaStream(self)
        # In threads, since what no image carries and no cache has is compiled here.
        with ThreadPoolExecutor(initializer=cuda.set_device, initargs=(self.torch_device,)) as pool:
            programs = list(pool.map(loader.Program, loader.sources(arch)))
        self.programs = {name: program for program in programs for name in program.kernels}
        self._recordings: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pool_of_recordings: Any = None
        self._recording: _Recording | None = None  # that is being made

    def enter(self) -> None:
        """Make `main` of this device what torch and CuPy use in the calling thread."""
        if getattr(entered, "device", None) is not self:
            cuda.set_device(self.torch_device)
            cuda.set_stream(self._main.stream)
            entered.device = self

    def resident(self, block: Block) -> int:
        return resident_of(loader.present_architecture(), *block)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.enter()
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Raise CudaError when the system does not give so much."""
        size = math.prod(shape) * dtype.itemsize
        if size < REGISTERED_BYTES:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared with nothing else
        memory = np.frombuffer(pages, np.uint8)
        runtime = cuda.cudart()
        found = runtime.cudaHostRegister(memory.ctypes.data, size, _HOST_MAPPED)
        if found != runtime.cudaError.success:
            raise CudaError(f"{size / 2**30:.1f} GiB of main memory cannot be pinned ({found}); lower --host-blocks")
        weakref.finalize(memory, self._release, memory.ctypes.data, runtime.cudaHostUnregister).atexit = False
        return torch.from_numpy(memory).view(dtype).view(shape)

    def registered(self, memory: Tensor, read_only: bool = False) -> Tensor:
        """Return the memory, pinned. Where the driver refuses to register it read-only, copies from it block the host.

        Raise CudaError when it refuses other memory.
        """
        from cupy.cuda import runtime  # which, unlike torch's, leaves no error behind for the next call to find

        self.enter()  # else the driver makes a context on the device that this thread last used
        pages = memory.numpy()
        try:
            runtime.hostRegister(pages.ctypes.data, pages.nbytes, _HOST_MAPPED | _HOST_READ_ONLY * read_only)
        except runtime.CUDARuntimeError as error:
            said = f"{pages.nbytes / 2**30:.1f} GiB of memory that is shared cannot be pinned ({error})"
            if not read_only:
                raise CudaError(f"{said}; lower --host-blocks, or take a --kv-share-dir on a tmpfs") from error
            log.warning("%s: copies from it make the worker wait", said)
            return memory
        weakref.finalize(pages, self._release, pages.ctypes.data, runtime.hostUnregister).atexit = False
        return torch.from_numpy(pages)

    def _release(self, address: int, unregister: Callable[[int], object]) -> None:
        """Release registered memory, which torch does not keep for copies that are under way."""
        self.enter()
        cuda.synchronize(self.torch_device)
        unregister(address)

    def elapsed_ns(self, start: Event, end: Event) -> int:
        if not (isinstance(start, CudaEvent) and isinstance(end, CudaEvent)):
            raise TypeError(f"{start!r} and {end!r} are no events of a GPU")
        return int(start.event.elapsed_time(end.event) * 1e6)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return CUDA graphs, one for each part; all recordings share one piece of memory, which loses its contents
        when another one runs.

        Torch's operations in work ran on `main` before: libraries take memory at the first call.
        """
        self.enter()
        if not self._recordings:  # torch refuses a pool without graphs while a tensor lives that one of them took
            self._pool_of_recordings = cuda.graph_pool_handle()
        recording = self._recording = _Recording(self._main.stream, self._pool_of_recordings)
        try:
            with recording.part:
                recording.begin_part()
                work()
        finally:
            self._recording = None
        self._recordings.update(recording.graphs)

        def replay() -> None:
            self.enter()
            for step in recording.steps:
                step()

        return replay

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    def cut(self, call: Callable[[], object]) -> None:
        if self._recording is None:
            raise CudaError("a recording is cut where there is none")
        self._recording.part.close()
        self._recording.steps.append(call)
        self._recording.begin_part()

    def free_bytes(self) -> tuple[int, int]:
        """Return the driver's figures after torch gave back what it only keeps. The memory of recordings is not free,
        though no tensor has it."""
        cuda.empty_cache()
        free, total = cuda.mem_get_info(self.torch_device)
        return int(free), int(total)

    def peak_bytes(self, reset: bool = False) -> int:
        peak = int(cuda.max_memory_allocated(self.torch_device))
        if reset:
            cuda.reset_peak_memory_stats(self.torch_device)
        return peak


def demand_gpu(index: int) -> None:
    """Raise CudaError, with what to do, unless torch and CuPy can use GPU number `index` for the kernels."""
    if torch.version.cuda is None:
        raise CudaError(f"torch {torch.__version__} is a build without CUDA; run make install DEVICE=cuda")
    try:
        cuda.init()
        count = cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        raise CudaError(f"torch cannot use a GPU: {error}; run `orcinus doctor` to check the driver") from error
    if index >= count:
        raise CudaError(f"GPU {index} is asked for, {count} are here; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    capability = cuda.get_device_capability(index)
    if capability < CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        name = cuda.get_device_name(index)
        raise CudaError(f"{name} has compute capability {found}, the kernels need {least}; use DEVICE=cpu")
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        raise CudaError(loader.WITHOUT_CUPY.format(error)) from error
