"""The CUDA backend's paged KV pool and its host tier, and copies between them beside the computation.

A block of all layers lies in one piece, so that blocks which follow one another on both sides are one copy at the speed
of the link. The backend asks for addresses only; what lies where is known here alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.calls import SCALE_BYTES, SLAB
from kernels.cuda.device import Device, Event
from kernels.ops import Cache, CacheShape, Done, Int32, Pending


class CudaCache(Cache):
    """The pool on the device and a host tier in pinned memory.

    keys(layer) and values(layer) are addresses of that layer's K and V of block 0, [kv_heads, block_size, head_dim], or
    with fp8 [kv_heads, slabs, bytes of a slab] (src/fp8.cuh); `block_stride` numbers further on, of the pool's dtype,
    are those of the next block.
    """

    def __init__(
        self, shape: CacheShape, device: Device, layer_major: bool = False, host: Tensor | None = None
    ) -> None:
        """Take the memory.

        layer_major: the pool is ordered [layer, K/V, block, ...] instead, for comparison; copies need a kernel then.

        host: as Ops.new_cache. Raise ValueError for a shape that the kernels cannot use.
        """
        shape.demand_kv_dtype("cuda", "auto", "fp8")
        slabs = shape.block_size // SLAB
        if shape.block_size % SLAB or slabs & (slabs - 1) or not slabs:
            raise ValueError(
                f"block size {shape.block_size}: the cuda kernels need 16, 32, 64 ...; give --block-size 16"
            )
        self.shape, self.device, self.layer_major = shape, device, layer_major
        part: tuple[int, ...] = (shape.kv_heads, shape.block_size, shape.head_dim)
        self.layout, self._dtype = "plain", shape.dtype
        if shape.is_8bit:
            part = (shape.kv_heads, slabs, SLAB * (shape.head_dim + SCALE_BYTES))
            self.layout, self._dtype = "fp8-slabs-1", torch.uint8  # another number when src/fp8.cuh changes it
        block = (shape.layers, 2, *part)
        pool = (shape.layers, 2, shape.blocks, *part) if layer_major else (shape.blocks, *block)
        self.pool = device.empty(pool, self._dtype)
        self._block = block
        if host is None:
            self.host = device.pinned((shape.host_blocks, *block), self._dtype)
        else:
            self.host = device.registered(host).view(self._dtype).view(-1, *block)
        self._by_block = self.pool.permute(2, 0, 1, 3, 4, 5) if layer_major else self.pool
        self._part_bytes = shape.block_bytes // (2 * shape.layers)
        self.block_stride, *strides = self._by_block.stride()
        layer_bytes, value_bytes = (stride * self._dtype.itemsize for stride in strides[:2])
        first = self.pool.data_ptr()
        self._keys = [first + layer * layer_bytes for layer in range(shape.layers)]
        self._values = [keys + value_bytes for keys in self._keys]

    def keys(self, layer: int) -> int:
        return self._keys[layer]

    def values(self, layer: int) -> int:
        return self._values[layer]

    def copy_out(self, blocks: Int32, host_blocks: Int32) -> None:
        self.start_copy_out(blocks, host_blocks).wait()

    def copy_in(self, host_blocks: Int32, blocks: Int32, tier: Tensor | None = None) -> None:
        self.start_copy_in(host_blocks, blocks, tier).wait()

    def host_tier(self, memory: Tensor) -> Tensor:
        return self.device.registered(memory, read_only=True).view(self._dtype).view(-1, *self._block)

    def start_copy_out(self, blocks: Int32, host_blocks: Int32) -> Pending[int]:
        return self._start(self.pool, self.host, blocks, host_blocks)

    def start_copy_in(self, host_blocks: Int32, blocks: Int32, tier: Tensor | None = None) -> Pending[int]:
        return self._start(self.host if tier is None else tier, self.pool, host_blocks, blocks)

    def read_block(self, block: int) -> Tensor:
        """Return the block as `main` sees it after all that it was given."""
        shape, main = self._by_block.shape[1:], self.device.main
        found, read = self.device.empty(shape, self._dtype), self.device.pinned(shape, self._dtype)
        main.run(lambda: found.copy_(self._by_block[block]))
        main.copy(read, found)
        main.record().wait()
        return self._decoded(read) if self.shape.is_8bit else read.clone()

    def _decoded(self, block: Tensor) -> Tensor:
        """Return the numbers of [layers, 2, kv_heads, slabs, bytes of a slab]."""
        codes, scales = block.split((SLAB * self.shape.head_dim, SLAB * SCALE_BYTES), -1)
        numbers = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (SLAB, -1))
        scaled: Tensor = numbers * scales.contiguous().view(torch.float32)[..., None]
        return scaled.flatten(3, 4).to(self.shape.dtype)

    def _start(self, source: Tensor, target: Tensor, from_: Int32, to: Int32) -> Pending[int]:
        if not len(to):
            return Done(0)
        copies = self.device.copies
        copies.wait_for(self.device.main.record())
        start = copies.record()
        if self.layer_major:
            self._copy_parts(source, target, from_, to)
        else:
            for first, first_to, count in _runs(from_, to):
                copies.copy(target[first_to : first_to + count], source[first : first + count])
        return _Copied(self.device, start, copies.record())

    def _copy_parts(self, source: Tensor, target: Tensor, from_: Int32, to: Int32) -> None:
        """Copy by a kernel that reads and writes the host tier itself."""
        pairs = np.stack((from_, to)).astype(np.int32)
        written = self.device.pinned(pairs.shape, torch.int32)
        written.numpy()[:] = pairs
        numbers = self.device.empty(pairs.shape, torch.int32)
        steps = [self._steps(tensor) for tensor in (source, target)]
        call = calls.copy_blocks(
            len(to),
            source.data_ptr(),
            target.data_ptr(),
            (steps[0][0], steps[1][0]),
            self._part_bytes,
            2 * self.shape.layers,
            (steps[0][1], steps[1][1]),
            numbers.data_ptr(),
            numbers[1].data_ptr(),
        )
        self.device.copies.copy(numbers, written)
        self.device.copies.launch(call, numbers)

    def _steps(self, tensor: Tensor) -> tuple[int, int]:
        """Return the bytes from block to block, and from part to part of a block."""
        if tensor is self.pool:
            return self._part_bytes, self.shape.blocks * self._part_bytes
        return self.shape.block_bytes, self._part_bytes


class _Copied(Pending[int]):
    """Copies between two points of a stream; the ns that they took."""

    def __init__(self, device: Device, start: Event, end: Event) -> None:
        self._device, self._start, self._end = device, start, end

    def ready(self) -> bool:
        return self._end.done()

    def wait(self) -> int:
        self._end.wait()
        return self._device.elapsed_ns(self._start, self._end)


def _runs(from_: Int32, to: Int32) -> Iterator[tuple[int, int, int]]:
    """Yield (first of from_, first of to, how many) of pairs that follow one another on both sides, in their order."""
    ends = np.flatnonzero((np.diff(from_) != 1) | (np.diff(to) != 1)) + 1
    starts = np.concatenate(([0], ends))
    counts = np.diff(starts, append=len(to))
    return zip(from_[starts].tolist(), to[starts].tolist(), counts.tolist(), strict=True)
