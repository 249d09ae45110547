"""Add the products of adapters to rows: their matrices in device memory, and the rows of an iteration in items of one
adapter.

`reserve` takes their memory, so that a recording finds them where they were: a new iteration overwrites the items, a
new adapter the matrices of its number. Both go to `main`, behind the kernels of earlier iterations.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.device import Device, dtype_name, launch, put
from kernels.cuda.metadata import ALIGNMENT, Column, Staging
from kernels.ops import AnyOps, Int32, LowRankPairs, LowRankShape, RowsByAdapter


def items_of(rows: RowsByAdapter) -> Int32:
    """Return [1 + items, calls.LOW_RANK_ITEM] as low_rank.cu has them."""
    counts = np.diff(rows.starts)
    pieces = -(-counts // calls.LOW_RANK_ROWS)
    adapter = np.repeat(np.arange(len(counts)), pieces)
    piece = np.arange(len(adapter)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = rows.starts[adapter] + piece * calls.LOW_RANK_ROWS
    items = np.zeros((1 + len(adapter), calls.LOW_RANK_ITEM), np.int32)
    items[0, 0] = len(adapter)
    items[1:, 0] = rows.adapters[adapter]
    items[1:, 1] = np.minimum(rows.starts[adapter + 1] - first, calls.LOW_RANK_ROWS)
    if len(adapter):
        places = first[:, None] + np.arange(calls.LOW_RANK_ROWS)
        items[1:, 2:] = rows.order[np.minimum(places, len(rows.order) - 1)]
    return items


def most_items(rows: int, adapters: int) -> int:
    """Return how many items `rows` rows with up to `adapters` adapters make at most."""
    return min(rows, (rows + adapters * (calls.LOW_RANK_ROWS - 1)) // calls.LOW_RANK_ROWS)


class CudaRowsByAdapter(RowsByAdapter):
    """The rows of an iteration as items in device memory."""

    def __init__(self, gpu: Device, staging: Staging) -> None:
        self._gpu, self._staging = gpu, staging
        self.items: Tensor | None = None
        super().__init__()

    def reserve(self, rows: int, adapters: int) -> None:
        numbers = (1 + most_items(rows, adapters)) * calls.LOW_RANK_ITEM
        self.items = self._gpu.empty((-(-numbers // ALIGNMENT) * ALIGNMENT,), torch.int32)

    def set(self, numbers: Int32) -> None:
        super().set(numbers)
        if self.items is not None:
            items = items_of(self).ravel()
            self._staging.send(self._staging.stage([Column("items", items, len(items))]), self.items)


class LowRankRoom:
    """Memory for down(x), which one kernel writes and the next reads.

    All pairs of a device share it, as their products run one after another.
    """

    def __init__(self, gpu: Device) -> None:
        self._gpu = gpu
        self._scratch: Tensor | None = None

    @property
    def is_taken(self) -> bool:
        """Return whether any pairs have room, so that rows may have adapters."""
        return self._scratch is not None

    def of(self, numbers: int) -> Tensor:
        """Return memory for so many numbers in float32. Memory that was returned before belongs to its pairs."""
        if self._scratch is None or self._scratch.numel() < numbers:
            self._scratch = self._gpu.empty((numbers,), torch.float32)
        return self._scratch[:numbers]


class CudaLowRankPairs(LowRankPairs):
    """The matrices of all numbers, one beside the other, with room for the largest rank.

    A rank is made a multiple of calls.LOW_RANK_RANKS with zeros.
    """

    def __init__(self, ops: AnyOps, shape: LowRankShape, gpu: Device, room: LowRankRoom) -> None:
        """room: of all pairs of the device."""
        super().__init__(ops, shape)
        self._gpu, self._room = gpu, room
        self.adapters, self.rank = 0, 0
        self.inner = gpu.empty((0, shape.downs, 0), torch.float32)
        """down(x) of the rows of the latest product, [rows, downs, rank] float32."""
        self._memory: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @property
    def memory(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return down, up, ranks and reads, as low_rank.cu has them. Raise ValueError before `reserve`."""
        if self._memory is None:
            raise ValueError("adapters: no memory was reserved for them; call reserve first")
        return self._memory

    def reserve(self, adapters: int, rank: int, rows: int) -> None:
        shape, rank = self.shape, _padded(rank)
        width = sum(shape.outputs)
        dtype_name(shape.dtype)
        calls.demand_vectors(shape.inputs, *shape.outputs)
        reads = np.repeat(np.array(shape.reads, np.int32), np.array(shape.outputs) // calls.VECTOR)
        down = self._gpu.empty((adapters, shape.downs, rank, shape.inputs), shape.dtype)
        up = self._gpu.empty((adapters, rank, width), torch.float32)
        ranks, of_outputs = (
            put(self._gpu, torch.from_numpy(values))
            for values in (np.zeros((adapters, shape.downs), np.int32), np.ascontiguousarray(reads))
        )
        self.adapters, self.rank, self._memory = adapters, rank, (down, up, ranks, of_outputs)
        self.inner = self._room.of(rows * shape.downs * rank).view(rows, shape.downs, rank)

    def set(self, number: int, downs: Mapping[int, Tensor], ups: Mapping[int, Tensor]) -> None:
        """Raise ValueError for a number or a rank that no memory was reserved for."""
        down, up, ranks, _ = self.memory
        widest = max(part.shape[0] for part in downs.values())
        if not 1 <= number <= self.adapters or widest > self.rank:
            raise ValueError(
                f"adapter {number} of rank {widest}: there is room for {self.adapters} of rank {self.rank}"
            )
        of_number = np.zeros(self.shape.downs, np.int32)
        for at, part in downs.items():
            of_number[at] = _padded(part.shape[0])
            rows = torch.zeros(int(of_number[at]), self.shape.inputs, dtype=part.dtype)
            rows[: part.shape[0]] = part
            put(self._gpu, rows, down[number - 1, at, : len(rows)])
        joined, first = torch.zeros(_padded(widest), sum(self.shape.outputs)), 0
        for at, outputs in enumerate(self.shape.outputs):
            if at in ups:
                joined[: ups[at].shape[1], first : first + outputs] = ups[at].t()
            first += outputs
        put(self._gpu, joined, up[number - 1, : len(joined)])
        put(self._gpu, torch.from_numpy(of_number), ranks[number - 1])
        self.by_number[number] = (down[number - 1], up[number - 1])

    def remove(self, number: int) -> None:
        if number in self.by_number:
            super().remove(number)
            ranks = self.memory[2]
            put(self._gpu, torch.zeros(self.shape.downs, dtype=torch.int32), ranks[number - 1])

    def add(self, x: Tensor, out: Tensor, rows: CudaRowsByAdapter) -> None:
        """Give both kernels to the device, with room for any adapters of these rows: what is recorded may run with
        others."""
        for call in self.products(x, out, rows):
            launch(self._gpu.main, call, x, self.inner, out, rows.items, *self.memory)

    def products(self, x: Tensor, out: Tensor, rows: CudaRowsByAdapter) -> tuple[calls.Call, calls.Call]:
        """Return what writes `inner`, and what adds up(inner) to out. Raise ValueError where there is no room."""
        if rows.items is None:
            raise ValueError("adapters: no memory was reserved for the rows; call reserve first")
        down, up, ranks, reads = self.memory
        if x.shape[0] > len(self.inner):
            raise ValueError(f"adapters of {x.shape[0]} rows: there is room for {len(self.inner)}")
        return calls.low_rank(
            dtype_name(x.dtype),
            most_items(x.shape[0], self.adapters),
            x.shape[1],
            out.shape[1],
            self.shape.downs,
            self.rank,
            x.data_ptr(),
            down.data_ptr(),
            self.inner.data_ptr(),
            up.data_ptr(),
            out.data_ptr(),
            rows.items.data_ptr(),
            ranks.data_ptr(),
            reads.data_ptr(),
        )


def _padded(rank: int) -> int:
    return -(-rank // calls.LOW_RANK_RANKS) * calls.LOW_RANK_RANKS
