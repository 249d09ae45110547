"""The interface of a device for the CUDA backend: streams, launches, events, pinned memory, recorded work to run again.

`CudaDevice` is a GPU; `kernels.emulator.device.EmulatedDevice` runs the same kernels on a CPU and puts off what a
GPU may put off, so that a missing wait shows there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cuda.calls import BF16, F16, Block, Call

_NAMES = {torch.bfloat16: BF16, torch.float16: F16}


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the stream has passed it."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the stream has passed it; other threads of Python run meanwhile."""


class Stream(ABC):
    """Work that is done in the order in which it was given."""

    @abstractmethod
    def launch(self, call: Call, *touched: Tensor) -> None:
        """Launch a kernel. touched: the tensors behind the addresses in its Params that no other object keeps alive."""

    @abstractmethod
    def run(self, work: Callable[[], object]) -> None:
        """Run torch's operations, which `work` calls, on this stream.

        They write to tensors that exist before (`out=`, `copy_`): what work returns is thrown away, and when it is
        called is the device's affair. It reads no number back (`item`, `cpu`, `nonzero`).
        """

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Call target.copy_(source) without waiting; a tensor on the host is pinned and unchanged until it is done."""

    @abstractmethod
    def record(self) -> Event:
        """Return the point behind all that was given so far."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Begin what is given from now on after the event of another stream."""


class Device(ABC):
    """`main` computes, `copies` moves blocks between the tiers beside it. One thread at a time gives work."""

    name: str
    torch_device: torch.device
    processors: int  # streaming multiprocessors, for the planner
    has_wgmma: bool  # of compute capability 9.0
    main: Stream
    copies: Stream

    @abstractmethod
    def resident(self, block: Block) -> int:
        """Return how many such blocks a multiprocessor runs at once."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory on the device, for use on `main`."""

    @abstractmethod
    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the zeros on the host that the device can copy from and to without a detour."""

    @abstractmethod
    def registered(self, memory: Tensor, read_only: bool = False) -> Tensor:
        """Return memory of the host taken elsewhere, [bytes] uint8 from the beginning of a page on, as `pinned` gives
        it: the same bytes. read_only: the process may not write there, and the device only copies from it."""

    @abstractmethod
    def elapsed_ns(self, start: Event, end: Event) -> int:
        """Return the time between two events of one stream that are done."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` gives to `main`, addresses and numbers as they are now; a call of the result repeats it.

        What work takes by `empty` belongs to the recording. Nothing may be waited for in work.
        """

    @property
    @abstractmethod
    def is_recording(self) -> bool:
        """Whether work is being recorded by `capture`."""

    @abstractmethod
    def cut(self, call: Callable[[], object]) -> None:
        """Inside `capture`, end a part of the recording: each repetition calls this behind what was given before and
        ahead of what comes after. It may wait and take memory, and is not called now. What it refers to lives as long
        as the recording: a tensor that was taken in it is to be `borrowed`, or no later one finds room there.
        """

    @abstractmethod
    def free_bytes(self) -> tuple[int, int]:
        """Return the memory that could still be taken, and all there is."""

    @abstractmethod
    def peak_bytes(self, reset: bool = False) -> int:
        """Return the most that torch's tensors have taken since the last reset, and begin anew after `reset`."""

    def close(self) -> None:
        """End when all that was given is done."""
        self.copies.record().wait()
        self.main.record().wait()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the kernels' name of a type. Raise ValueError, naming the backend that computes in it, for any other."""
    if dtype not in _NAMES:
        raise ValueError(f"the cuda kernels compute in bfloat16 and float16; {dtype} is the reference backend's")
    return _NAMES[dtype]


def pointer(tensor: Tensor | None) -> int:
    """Return the address of a tensor; 0 for None."""
    return 0 if tensor is None else int(tensor.data_ptr())


def borrowed(tensor: Tensor) -> Tensor:
    """Return a tensor in the memory of a contiguous one, without keeping that memory: its owner has to."""
    nbytes = tensor.numel() * tensor.element_size()
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, nbytes)
    return tensor.new_empty(0).set_(storage, 0, tensor.shape, tensor.stride())


def launch(stream: Stream, call: Call, *touched: Tensor | None) -> None:
    """Give a kernel to the stream; touched: all tensors behind its addresses."""
    stream.launch(call, *(tensor for tensor in touched if tensor is not None))


def put(device: Device, source: Tensor, target: Tensor | None = None) -> Tensor:
    """Copy source to the device, to `target` or to new memory; complete when this returns."""
    to = device.empty(tuple(source.shape), source.dtype) if target is None else target
    device.main.run(lambda: to.copy_(source))
    device.main.record().wait()
    return to
