"""The CPU backend's paged KV pool. What lies where inside a block is the business of src/kv.h alone."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.commands import CopyArgs, Pool
from kernels.cpu.library import Library
from kernels.cpu.memory import large
from kernels.cpu.program import Runner, address, dtype_code
from kernels.ops import Cache, CacheShape, Int32

CODES = {"auto": 0, "int8": 1, "fp8": 2}
"""By CacheShape.kv_dtype, as in src/ops.h."""


def block_bytes(library: Library, shape: CacheShape) -> int:
    """Return the bytes of one block; heads are padded (src/kv.h)."""
    code = dtype_code(shape.dtype)
    return library.block_bytes(
        shape.layers, shape.kv_heads, shape.block_size, shape.head_dim, code, CODES[shape.kv_dtype]
    )


class CpuCache(Cache):
    """Blocks of bytes, also on the host tier; both are ordinary memory here."""

    def __init__(self, shape: CacheShape, library: Library, runner: Runner, host: Tensor | None = None) -> None:
        """Take the memory. host: as Ops.new_cache. Raise ValueError for a block size that the kernels cannot use."""
        if shape.block_size % 16:
            raise ValueError(
                f"block size {shape.block_size}: the cpu kernels need a multiple of 16; give --block-size 16"
            )
        self.shape = shape
        # Of src/kv.h or src/kv_8bit.h, the same with every set of instructions; another number when that changes.
        self.layout = f"cpu-{shape.kv_dtype}-1" if shape.is_8bit else "cpu-1"
        self._library = library
        self._runner = runner
        size = block_bytes(library, shape)
        # zero_ touches every page: memory that is missing is missed now, not in the middle of a request.
        self.blocks = large(shape.blocks * size).zero_().view(shape.blocks, size)
        self.host = (torch.empty(shape.host_blocks * size, dtype=torch.uint8) if host is None else host).view(-1, size)
        self.host.zero_()
        self.pool = Pool(
            blocks=self.blocks.data_ptr(),
            block_bytes=size,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            block_size=shape.block_size,
            head_dim=shape.head_dim,
            head_stride=library.head_stride(shape.head_dim),
            dtype=dtype_code(shape.dtype),
            codes=CODES[shape.kv_dtype],
        )

    def copy_out(self, blocks: Int32, host_blocks: Int32) -> None:
        self._copy(self.blocks, self.host, blocks, host_blocks)

    def copy_in(self, host_blocks: Int32, blocks: Int32, tier: Tensor | None = None) -> None:
        self._copy(self.host if tier is None else tier, self.blocks, host_blocks, blocks)

    def host_tier(self, memory: Tensor) -> Tensor:
        return memory

    def read_block(self, block: int) -> Tensor:
        shape = self.shape
        out = torch.empty((shape.layers, 2, shape.kv_heads, shape.block_size, shape.head_dim), dtype=shape.dtype)
        self._library.read_block(self.pool, block, out.data_ptr())
        return out

    def _copy(self, source: Tensor, target: Tensor, from_: Int32, to: Int32) -> None:
        size = self.pool.block_bytes
        args = CopyArgs(source.data_ptr(), target.data_ptr(), address(from_), address(to), size)
        self._runner.now(len(to), args)
