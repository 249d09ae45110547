"""GGUF: matrices in the types that the file has, each packed as the `Groups` that its type unpacks to.

`GGUF_FORMATS` of `checkpoint/stored.py` lists the format of each type, UNPACK has ggml's formulas and rounding. Numbers
and products are the file's, so a multiplication in float32 has the bits of the unpacked weights.
Source: https://github.com/ggml-org/llama.cpp, ggml-quants.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kernels.ops import AnyOps, Groups
from services.worker.checkpoint.source import Source, as_piece, powers
from services.worker.quantization.base import Matrix
from services.worker.quantization.stored import StoredMethod, row_steps


class Gguf(StoredMethod):
    packs_tables = True

    def numerics(self, ops: AnyOps, dtype: torch.dtype) -> str:
        """Return what tells packed weights from unpacked ones; a file has several types, and bits are those of most."""
        return ops.group_numerics(dtype)

    def check_stored(self, source: Source, matrix: Matrix) -> None:
        source.check(f"{matrix.name}.weight", (matrix.outputs, matrix.inputs), UNPACK.keys())

    def read_stored(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor | Groups]:
        columns = matrix.columns
        for rows in row_steps(matrix.rows, matrix.inputs):
            groups = source.read_groups(f"{matrix.name}.weight", rows.start, len(rows))
            if columns.start % groups.group:
                yield as_piece(groups.plain()[:, columns.start : columns.stop], dtype)
            else:
                yield _columns(groups, columns)


def _columns(groups: Groups, columns: range) -> Groups:
    """Return some inputs, which begin with a group."""
    if len(columns) == groups.numbers.shape[1]:
        return groups
    some = slice(columns.start // groups.group, -(-columns.stop // groups.group))
    return replace(
        groups,
        numbers=groups.numbers[:, columns.start : columns.stop].contiguous(),
        scales=groups.scales[:, some].contiguous(),
        mins=None if groups.mins is None else groups.mins[:, some].contiguous(),
    )


def _half(raw: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte of each block, [rows, blocks, 1] float32."""
    return raw[:, :, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Return [..., n] bytes as [..., 2, n]: the low halves, then the high ones."""
    return torch.stack((raw & 15, raw >> 4), -2)


def _bits(raw: Tensor, width: int) -> Tensor:
    """Return [..., n] bytes as [..., 8 / width, n]: from the lowest bits on."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return raw[..., None, :] >> shifts & (1 << width) - 1


def _fifth_bits(raw: Tensor) -> Tensor:
    """Return the bits of 4 bytes, [rows, blocks, 32], as 16."""
    return (raw[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2) << 4


def _groups(
    bits: int, size: int, numbers: Tensor, scales: Tensor, mins: Tensor | None = None, table: str = ""
) -> Groups:
    """Return Groups of [rows, blocks, ...] of each."""
    least = None if mins is None else mins.flatten(1).contiguous()
    return Groups(bits, size, numbers.flatten(1).contiguous(), scales.flatten(1).contiguous(), least, table)


def _q4_0(raw: Tensor) -> Groups:
    """Unpack d, 16 bytes: d * (q - 8)."""
    return _groups(4, 32, _nibbles(raw[:, :, 2:]), _half(raw, 0))


def _q4_1(raw: Tensor) -> Groups:
    """Unpack d, m, 16 bytes: d * q + m."""
    return _groups(4, 32, _nibbles(raw[:, :, 4:]), _half(raw, 0), -_half(raw, 2))


def _q5_0(raw: Tensor) -> Groups:
    """Unpack d, 4 bytes of fifth bits, 16 bytes: d * (q - 16)."""
    numbers = _nibbles(raw[:, :, 6:]).flatten(2) | _fifth_bits(raw[:, :, 2:6])
    return _groups(6, 32, numbers + (32 - 16), _half(raw, 0))


def _q5_1(raw: Tensor) -> Groups:
    """Unpack d, m, 4 bytes of fifth bits, 16 bytes: d * q + m."""
    numbers = _nibbles(raw[:, :, 8:]).flatten(2) | _fifth_bits(raw[:, :, 4:8])
    return _groups(6, 32, numbers, _half(raw, 0), -_half(raw, 2))


def _mxfp4(raw: Tensor) -> Groups:
    """Unpack an exponent, 16 bytes: 2^(e - 127) * FLOAT4[q]. An exponent of 255 is no number."""
    return _groups(4, 32, _nibbles(raw[:, :, 1:]), powers(raw[:, :, :1]), table="float4")


def _q8_0(raw: Tensor) -> Groups:
    """Unpack d, 32 signed bytes: d * q."""
    return _groups(8, 32, raw[:, :, 2:] ^ 128, _half(raw, 0))


def _iq4_nl(raw: Tensor) -> Groups:
    """Unpack d, 16 bytes: d * IQ4[q]."""
    return _groups(4, 32, _nibbles(raw[:, :, 2:]), _half(raw, 0), table="iq4")


def _iq4_xs(raw: Tensor) -> Groups:
    """Unpack 8 groups of 32, d, high 2 and low 4 bits of their scales: d * (sc - 32) * IQ4[q]."""
    low = _nibbles(raw[:, :, 4:8]).mT.flatten(2)
    scales = (low | _bits(raw[:, :, 2:4], 2).mT.flatten(2) << 4).float() - 32
    return _groups(4, 32, _nibbles(raw[:, :, 8:].unflatten(2, (8, 16))), _half(raw, 0) * scales, table="iq4")


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return d * sc and dmin * m of 8 groups, [rows, blocks, 8] each: d, dmin, 12 bytes of 6-bit numbers."""
    low, least, high = raw[:, :, 4:8], raw[:, :, 8:12], raw[:, :, 12:16]
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), -1)
    mins = torch.cat((least & 63, high >> 4 | least >> 2 & 48), -1)
    return _half(raw, 0) * scales, _half(raw, 2) * mins


def _q2_k(raw: Tensor) -> Groups:
    """Unpack 16 groups of 16, scales and minima of 4 bits first: d * sc * q - dmin * m."""
    numbers = _bits(raw[:, :, 16:80].unflatten(2, (2, 32)), 2)
    scales, mins = raw[:, :, :16] & 15, raw[:, :, :16] >> 4
    return _groups(2, 16, numbers, _half(raw, 80) * scales, _half(raw, 82) * mins)


def _q3_k(raw: Tensor) -> Groups:
    """Unpack 16 groups of 16, high bits, low 2 bits, scales of 6 bits, d: d * (sc - 32) * (q - 4)."""
    low = _bits(raw[:, :, 32:96].unflatten(2, (2, 32)), 2).flatten(2, 3)
    numbers = low | _bits(raw[:, :, :32], 1) << 2
    scales = _nibbles(raw[:, :, 96:104]).flatten(2) | _bits(raw[:, :, 104:108], 2).flatten(2) << 4
    return _groups(4, 16, numbers + (8 - 4), _half(raw, 108) * (scales.float() - 32))


def _q4_k(raw: Tensor) -> Groups:
    """Unpack 8 groups of 32: d * sc * q - dmin * m."""
    numbers = _nibbles(raw[:, :, 16:].unflatten(2, (4, 32)))
    return _groups(4, 32, numbers, *_k_scales(raw))


def _q5_k(raw: Tensor) -> Groups:
    """Unpack 8 groups of 32, the fifth bits first: d * sc * q - dmin * m."""
    numbers = _nibbles(raw[:, :, 48:].unflatten(2, (4, 32))).flatten(2, 3)
    return _groups(6, 32, numbers | _bits(raw[:, :, 16:48], 1) << 4, *_k_scales(raw))


def _q6_k(raw: Tensor) -> Groups:
    """Unpack 16 groups of 16, low 4 bits, high 2 bits, signed scales, d: d * sc * (q - 32)."""
    low = _nibbles(raw[:, :, :128].unflatten(2, (2, 64))).reshape(*raw.shape[:2], 8, 32)
    high = _bits(raw[:, :, 128:192].unflatten(2, (2, 32)), 2).flatten(2, 3)
    scales = raw[:, :, 192:208].contiguous().view(torch.int8).float()
    return _groups(6, 16, low | high << 4, _half(raw, 208) * scales)


UNPACK: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "MXFP4": _mxfp4,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Type -> its blocks, [rows, blocks, bytes of a block] uint8, as Groups. All products are exact in float32."""
