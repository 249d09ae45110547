"""The memory of the emulated device: counted, and full of NaN before it is written and after it was let go.

So reading memory that was not written, or that a kernel still needed when its tensor was dropped, shows as a wrong
number.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GARBAGE = 0x7FFF
"""Every 16 bits of it: NaN in all float types, a huge number in all integers."""

ALIGNED = 256  # bytes, as torch's allocator does at least
KEPT_BYTES = 16 << 20
"""Memory that was let go stays unused until more than this came after it."""

Words = npt.NDArray[np.int16]


class Memory:
    """`total` bytes, of which `used` are taken and `peak` were at most."""

    def __init__(self, total: int) -> None:
        self.total, self.used, self.peak = total, 0, 0
        self._starts: set[int] = set()
        self._let_go: deque[Words] = deque()
        self._let_go_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return garbage, contiguous. Raise torch.OutOfMemoryError when less than this is left of `total`."""
        size = math.prod(shape) * dtype.itemsize
        if self.used + size > self.total:
            raise torch.OutOfMemoryError(
                f"{size} bytes are asked for, {self.total - self.used} of {self.total} are free"
            )
        words = -(-size // 2)
        whole = np.full(words + ALIGNED // 2, GARBAGE, np.int16)
        ahead = -whole.ctypes.data % ALIGNED // 2
        part = whole[ahead : ahead + words]
        weakref.finalize(
            part, self._release, whole, part.ctypes.data, size
        ).atexit = False  # the tensor's storage keeps `part`
        self._starts.add(part.ctypes.data)
        self.used += size
        self.peak = max(self.peak, self.used)
        return torch.from_numpy(part).view(torch.uint8)[:size].view(dtype).view(shape)

    def adopt(self, memory: Tensor) -> Tensor:
        """Return the same bytes, as if they had been taken here; they stay as they are when it is let go."""
        part = memory.numpy()
        weakref.finalize(part, self._starts.discard, part.ctypes.data).atexit = False
        self._starts.add(part.ctypes.data)
        return torch.from_numpy(part)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the memory behind a tensor was taken here."""
        return tensor.untyped_storage().data_ptr() in self._starts

    def _release(self, whole: Words, start: int, size: int) -> None:
        self._starts.discard(start)
        self.used -= size
        whole.fill(GARBAGE)
        self._let_go.append(whole)
        self._let_go_bytes += whole.nbytes
        while self._let_go_bytes > KEPT_BYTES:
            self._let_go_bytes -= self._let_go.popleft().nbytes


def spoil(tensor: Tensor) -> None:
    """Make garbage of all the memory behind a tensor that `take` gave."""
    words: Any = torch.empty(0, dtype=torch.int16).set_(tensor.untyped_storage())
    words.fill_(GARBAGE)
