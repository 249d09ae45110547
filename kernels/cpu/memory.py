"""Large memory on huge pages where the system gives them, so that reading it does not wait for address translation.

Weights and KV pools lie here; both are read from end to end in every iteration.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_BYTES = 2 << 20


def large(size: int) -> Tensor:
    """Return [size] uint8 of zeros, aligned to 2 MiB when it is at least that long; freed with the tensor.

    Pages are taken when they are touched first. Raise OSError when the system has no such room.
    """
    if size < HUGE_BYTES:
        return torch.zeros(size, dtype=torch.uint8)
    area = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(area, dtype=torch.uint8)  # keeps the mapping
    skipped = -whole.data_ptr() % HUGE_BYTES
    with suppress(AttributeError, OSError):  # a Python or a system that knows no huge pages
        # Whole ones only: the last bytes would take a page of 2 MiB for themselves.
        area.madvise(mmap.MADV_HUGEPAGE, skipped, size // HUGE_BYTES * HUGE_BYTES)
    return whole[skipped : skipped + size]
