"""A forward pass recorded at a few numbers of rows, so that an iteration in which all sequences decode is one launch.

A batch is padded up to the next of these numbers. A padded row has no token, no slot and no work item: the kernels
write nothing for it but its rows of what the graph computes, which is never read.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kernels.cuda.cache import CudaCache
from kernels.cuda.device import Device
from kernels.cuda.metadata import CudaPrepared
from kernels.cuda.planner import Planner

log = logging.getLogger("orcinus.kernels")


def sizes_up_to(most: int) -> list[int]:
    """Return the numbers of rows to record: 1, 2, 4, 8, ...

    64 in steps of 8, ... 128 in steps of 16, and so on, and `most`.
    """
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 8 else max(8, (1 << size.bit_length() - 1) // 4)
    return [*sizes, most]


class Graphs:
    """What CudaOps.compile returns: replays a graph for batches that were prepared for one, else runs operations."""

    def __init__(
        self,
        device: Device,
        run: Callable[[Any], Tensor],
        sizes: list[int],
        columns: Tensor,
        cache: CudaCache,
        planner: Planner,
    ) -> None:
        """Record nothing yet.

        run: the forward pass, operation by operation; columns: int32 on the device, which all graphs read.

        cache: what run reads and writes; planner: of its attention.
        """
        self.cache, self.planner, self.columns = cache, planner, columns
        self._device, self._run, self._sizes = device, run, sizes
        self._recorded: dict[int, tuple[Callable[[], None], Tensor]] = {}

    def size_for(self, rows: int) -> int:
        """Return the rows of the smallest graph that holds so many; 0 where none does."""
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else 0

    def record(self, padding: Callable[[int], CudaPrepared]) -> None:
        """Record all graphs. padding: makes a batch of padded rows that was prepared for the graph of a size."""
        for done, size in enumerate(reversed(self._sizes)):  # the largest first: the others find room in what it took
            self._record(size, padding(size))
            if not done % 8:
                log.info(
                    "recorded the decode graph for %d sequences, %d more to come", size, len(self._sizes) - done - 1
                )

    def __call__(self, prepared: CudaPrepared) -> Tensor:
        """Return the forward pass. Its result holds until the next call."""
        if not prepared.graph or prepared.is_sent:
            return self._run(prepared)
        prepared.send(self.columns)
        replay, result = self._recorded[prepared.graph]
        replay()
        return result[: prepared.samples]

    def _record(self, size: int, prepared: CudaPrepared) -> None:
        prepared.send(self.columns)
        prepared.rows = prepared.samples = size
        results = [self._run(prepared)]  # libraries load what they need, and take memory
        replay = self._device.capture(lambda: results.append(self._run(prepared)))
        self._recorded[size] = replay, results[-1]
