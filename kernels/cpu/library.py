"""The loaded library: ctypes signatures, and the check that both sides mean the same structs."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch  # noqa: F401 - loads the OpenMP runtime that the library then shares

from kernels.cpu.build import BuildError, find_library
from kernels.cpu.commands import ARGS, Command, LowRankPair, LowRankUp, Pool, Step


class Library:
    """The functions that the sources export; their meaning is in src/."""

    def __init__(self, path: Path, variant: str) -> None:
        """Raise BuildError when the file cannot be loaded or was made from other structs."""
        self.path, self.variant = path, variant
        try:
            lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"cannot load {path}: {error}; remove the file, it is compiled again") from error
        lib.orcinus_size.restype = c_int64
        for number, made, mirror in (
            (0, "Command", Command),
            (100, "Step", Step),
            (101, "Pool", Pool),
            (102, "LowRankPair", LowRankPair),
            (103, "LowRankUp", LowRankUp),
            *((op, args.__name__, args) for args, (op, _) in ARGS.items()),
        ):
            size = lib.orcinus_size(c_int32(number))
            if size != ctypes.sizeof(mirror):
                raise BuildError(f"{path}: {made} has {size} bytes, commands.py says {ctypes.sizeof(mirror)}")
        self._run = lib.orcinus_run
        self._run.argtypes = (c_void_p, c_int64, c_void_p, c_int32, c_void_p)
        self._run.restype = None
        self._packed_bytes = lib.orcinus_packed_bytes
        self._packed_bytes.argtypes, self._packed_bytes.restype = (c_int32, c_int64, c_int64), c_int64
        self._pack = lib.orcinus_pack
        self._pack.argtypes = (c_int32, c_void_p, *(c_int64,) * 4, c_void_p, c_int32, c_void_p, c_void_p)
        self._pack.restype = None
        self._block_bytes = lib.orcinus_block_bytes
        self._block_bytes.argtypes, self._block_bytes.restype = (c_int32,) * 6, c_int64
        self._head_stride = lib.orcinus_head_stride
        self._head_stride.argtypes, self._head_stride.restype = (c_int32,), c_int32
        self._read_block = lib.orcinus_read_block
        self._read_block.argtypes, self._read_block.restype = (POINTER(Pool), c_int64, c_void_p), None
        self._read = lib.orcinus_read
        self._read.argtypes, self._read.restype = (c_void_p, c_int64, c_int32), c_float
        self._multiply = lib.orcinus_multiply
        self._multiply.argtypes, self._multiply.restype = (c_int32, c_int64, c_int32), c_double
        self.lanes = int(lib.orcinus_lanes())
        self._numerics = lib.orcinus_numerics
        self._numerics.argtypes, self._numerics.restype = (c_int32,), ctypes.c_char_p
        lib.orcinus_weight_format.restype = ctypes.c_char_p
        names = iter(map(lib.orcinus_weight_format, map(c_int32, itertools.count())).__next__, None)
        self.format_numbers = {name.decode(): number for number, name in enumerate(names)}
        """Name of a weight format (src/formats.h) -> its number."""
        self.group_formats = frozenset(n for n, number in self.format_numbers.items() if lib.orcinus_is_grouped(number))
        """Those that are packed from Groups."""
        lib.orcinus_group_order.restype = ctypes.c_char_p
        self.group_order = bytes(lib.orcinus_group_order()).decode()
        """How these multiply activations in bfloat16: pairs or tiles, each in its own order; empty: as float32."""

    def run(self, commands: int, count: int, step: int, threads: int, nanoseconds: int | None = None) -> None:
        """Run `count` Commands at an address with the Step at another; release the GIL meanwhile."""
        self._run(commands, count, step, threads, nanoseconds)

    def numerics(self, dtype: int) -> str:
        """Return the name of the order and rounding of sums in this type (docs/cpu.md, exactness)."""
        return bytes(self._numerics(dtype)).decode()

    def packed_bytes(self, weight_format: int, outputs: int, inputs: int) -> int:
        return int(self._packed_bytes(weight_format, outputs, inputs))

    def pack(
        self,
        weight_format: int,
        packed: int,
        shape: Sequence[int],
        first: int,
        rows: int,
        source: int,
        source_dtype: int,
        scales: int | None = None,
        mins: int | None = None,
    ) -> None:
        """Pack rows first .. first + rows of a weight of that whole shape, [outputs, inputs]."""
        self._pack(weight_format, packed, shape[0], shape[1], first, rows, source, source_dtype, scales, mins)

    def block_bytes(self, layers: int, kv_heads: int, block_size: int, head_dim: int, dtype: int, codes: int) -> int:
        return int(self._block_bytes(layers, kv_heads, block_size, head_dim, dtype, codes))

    def head_stride(self, head_dim: int) -> int:
        return int(self._head_stride(head_dim))

    def read_block(self, pool: Pool, block: int, out: int) -> None:
        self._read_block(ctypes.byref(pool), block, out)

    def read(self, data: int, size_bytes: int, threads: int) -> None:
        """Read memory and do nothing with it, for benches."""
        self._read(data, size_bytes, threads)

    def multiply(self, dtype: int, rounds: int, threads: int) -> float:
        """Multiply numbers of this type in registers; return the floating point operations done, for benches."""
        return float(self._multiply(dtype, rounds, threads))


@cache
def load() -> Library:
    """Return the library for this machine, compiled if need be; once per process. Raise BuildError."""
    return Library(*find_library())
