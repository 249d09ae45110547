"""Mixtures of experts: the matrices of a layer's experts in device memory, and the kernels that rows go through.

Which experts a row is given to is known to the device alone, so that a step can be recorded: all launches have room for
any choice, and what has nothing to do ends at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.device import Device, dtype_name, launch, pointer
from kernels.ops import Routing

FEW_ROWS, MANY_ROWS = 16, 512
"""Pairs of an expert, on average, up to which an H100 is fastest with 16 or 64 rows in a tile; beyond, with 128."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Matrices of one size: gate_up [experts, 2 I, hidden] and down [experts, hidden, I]."""

    gate_up: Tensor
    down: Tensor


def tile_rows(pairs: int, experts: int) -> int:
    """Return how many rows a tile has: as many as most experts can fill."""
    average = pairs / experts
    return 16 if average <= FEW_ROWS else 64 if average <= MANY_ROWS else 128


def stacked(device: Device, weights: Sequence[Tensor]) -> Tensor:
    """Return matrices of one size in one piece of memory."""
    whole = device.empty((len(weights), *weights[0].shape), weights[0].dtype)

    def copy() -> None:
        for to, weight in zip(whole, weights, strict=True):
            to.copy_(weight)

    device.main.run(copy)
    device.main.record().wait()
    return whole


class Experts:
    """Computes with experts on a device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._block_counter = device.empty((1,), torch.int32)  # of routing.cu
        device.main.run(self._block_counter.zero_)

    def multiply(
        self,
        x: Tensor,
        logits: Tensor,
        packed: PackedExperts,
        routing: Routing,
        shared: Tensor | None,
        shared_logits: Tensor | None,
        present: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        """See Ops.experts. present: tensor and address of a number for each row, below zero where it is padding."""
        rows, hidden = x.shape
        out = self._device.empty((rows, hidden), x.dtype)
        if not rows:
            return out
        experts, _, inner = packed.down.shape
        main, dtype, top_k = self._device.main, dtype_name(x.dtype), routing.top_k
        pairs = rows * top_k
        size = tile_rows(pairs, experts)
        tiles = calls.most_tiles(pairs, experts, size)
        chosen, order = (self._device.empty((pairs,), torch.int32) for _ in range(2))
        weights = self._device.empty((pairs,), torch.float32)
        of_tiles = self._device.empty((tiles, calls.EXPERTS_TILE_BYTES // 4), torch.int32)
        call = calls.route(
            rows,
            experts,
            top_k,
            size,
            routing.normalize,
            logits.data_ptr(),
            chosen.data_ptr(),
            weights.data_ptr(),
            order.data_ptr(),
            of_tiles.data_ptr(),
            self._block_counter.data_ptr(),
            0 if present is None else present[1],
        )
        of_rows = None if present is None else present[0]
        launch(main, call, logits, chosen, weights, order, of_tiles, self._block_counter, of_rows)
        activated = self._device.empty((pairs, inner), x.dtype)
        given = self._device.empty((pairs, hidden), x.dtype)
        for source, matrices, to, activation in (
            (x, packed.gate_up, activated, routing.activation),
            (activated, packed.down, given, ""),
        ):
            call = calls.experts(
                dtype,
                size,
                tiles,
                source.shape[1],
                to.shape[1],
                top_k,
                source.data_ptr(),
                matrices.data_ptr(),
                to.data_ptr(),
                order.data_ptr(),
                of_tiles.data_ptr(),
                activation,
            )
            launch(main, call, source, matrices, to, order, of_tiles)
        addresses = (given.data_ptr(), weights.data_ptr(), out.data_ptr(), pointer(shared), pointer(shared_logits))
        call = calls.combine(dtype, rows, hidden, top_k, *addresses)
        launch(main, call, given, weights, out, shared, shared_logits)
        return out
