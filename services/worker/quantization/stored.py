"""Common code of the formats of quantized checkpoints: matrices that stay plain, and integers in words of 32 bits.

`checkpoint/stored.py` says how a checkpoint stores its matrices; each format is a file beside this one. A weight is
(q - zero) * scale in float32, of the integers and the scale as the file has them: exact with a 16-bit scale, else
rounded once. Groups that no kernel has (other sizes, inputs out of order) are unpacked into the model's type.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from math import gcd

import torch
from torch import Tensor

from kernels.ops import AnyOps, Groups
from services.worker.checkpoint.source import FLOATS, Source, as_piece
from services.worker.checkpoint.stored import UNITS, Stored
from services.worker.quantization.base import LinearMethod, Matrix
from shared.errors import ModelError

PIECE_BYTES = 1 << 20  # of a matrix at a time, one byte a number
SCALES = frozenset({"F16", "BF16", "F32"})
EXACT_SCALES = frozenset({"F16", "BF16"})  # where there are zero points: Groups needs exact products


class StoredMethod(LinearMethod):
    """A quantized checkpoint; a matrix of which it has `.weight` in a float type is plain."""

    name = "none"

    def __init__(self, stored: Stored) -> None:
        self.stored = stored

    def check(self, source: Source, matrix: Matrix) -> None:
        if self._is_plain(source, matrix):
            super().check(source, matrix)
            return
        if matrix.transposed:
            raise ModelError(
                f"{source.model}: {matrix.name} lies transposed, quantized matrices of that form are not read; "
                "choose the unquantized model"
            )
        self.check_stored(source, matrix)

    def read(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor | Groups]:
        if self._is_plain(source, matrix):
            return super().read(source, matrix, dtype)
        self.check(source, matrix)
        return self.read_stored(source, matrix, dtype)

    def weight_bytes(self, ops: AnyOps, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """Return the bytes of a quantized matrix; the few that stay plain take more."""
        unit = self.stored.unit
        if not self.is_packed(ops):
            return outputs * inputs * dtype.itemsize
        scales = outputs * -(-inputs // unit) * (8 if self.stored.has_mins else 4)
        return outputs * inputs * self.stored.bits // 8 + scales

    def numerics(self, ops: AnyOps, dtype: torch.dtype) -> str:
        return ops.group_numerics(dtype) if self.is_packed(ops) else ""

    def is_packed(self, ops: AnyOps) -> bool:
        """Return whether the backend multiplies matrices as they are packed."""
        return self.stored.group_format in ops.group_formats

    @abstractmethod
    def check_stored(self, source: Source, matrix: Matrix) -> None:
        """Check the tensors of a quantized matrix, as `check`."""

    @abstractmethod
    def read_stored(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor | Groups]:
        """Read a quantized matrix, as `read`."""

    @property
    def largest(self) -> int:
        """Return the largest number, or zero point, that a scale multiplies."""
        return 1 << self.stored.bits

    def groups(self, inputs: int) -> int:
        """Return how many scales a row has."""
        return -(-inputs // self.stored.group) if self.stored.group else 1

    def scales(self) -> Collection[str]:
        """Return the types that scales may have."""
        return EXACT_SCALES if self.stored.has_mins else SCALES

    def scale_of_outputs(self, source: Source, matrix: Matrix) -> tuple[str, tuple[int, ...]]:
        """Return the name and the shape of a matrix's scales, one for each output or one for all."""
        name = f"{matrix.name}.weight_scale"
        if self.stored.block[0]:
            return name, (matrix.outputs, 1)
        return name, () if name in source and source.shape(name) == () else (1,)

    def piece(
        self,
        numbers: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        columns: range,
        dtype: torch.dtype,
        group_of: Tensor | None = None,
    ) -> Tensor | Groups:
        """Return some rows as the kernels take them.

        numbers: [rows, columns] uint8. scales, zeros: [rows, groups of a whole row] float32; without zeros the numbers
        are 8 (or 128) above their values. group_of: [columns], where the groups do not follow each other.
        """
        bits = self.stored.bits
        if group_of is None and (unit := unit_of(self.stored.group, columns)):
            at = self._group_of(torch.arange(columns.start, columns.stop, unit))
            some = scales[:, at].contiguous()
            return Groups(bits, unit, numbers.contiguous(), some, None if zeros is None else some * zeros[:, at])
        if group_of is None:
            group_of = self._group_of(torch.arange(columns.start, columns.stop))
        above = float(1 << bits - 1) if zeros is None else zeros[:, group_of]
        return as_piece((numbers.float() - above) * scales[:, group_of], dtype)

    def _group_of(self, inputs: Tensor) -> Tensor:
        return inputs // self.stored.group if self.stored.group else torch.zeros_like(inputs)

    @staticmethod
    def _is_plain(source: Source, matrix: Matrix) -> bool:
        return matrix.tensor in source and source.dtype(matrix.tensor) in FLOATS


def unit_of(group: int, columns: range) -> int:
    """Return the largest group of the kernels that these columns can be cut into; 0 where there is none.

    group: inputs that share a scale, 0 for all.
    """
    return next((unit for unit in UNITS if not group or gcd(columns.start, group) % unit == 0), 0)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return [rows, words] int32 as [rows, words * 32 / bits] uint8, the lowest bits of a word first."""
    # A copy, as a single column that counts as contiguous may have any stride.
    numbers = torch.empty(words.shape, dtype=words.dtype).copy_(words).view(torch.uint8)
    if bits == 8:
        return numbers
    return torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)


def read_whole(source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return all of a tensor that was checked, as it is stored."""
    return source.read(name, shape, 0, shape[0])


def row_steps(rows: range, inputs: int) -> Iterator[range]:
    """Yield the rows in pieces of about PIECE_BYTES numbers, each but the first from a multiple of 8 on."""
    step = max(8, PIECE_BYTES // inputs // 8 * 8)
    first = rows.start
    while first < rows.stop:
        last = min(rows.stop, first // 8 * 8 + step)
        yield range(first, last)
        first = last


def group_order(source: Source, name: str, inputs: int, group: int, groups: int) -> Tensor | None:
    """Return the group of each input, [inputs] int64, or None where they follow each other. Raise ModelError."""
    order = read_whole(source, name, (inputs,)).long()
    if (order == -1).all() or (group and torch.equal(order, torch.arange(inputs) // group)):
        return None
    if not group and not order.any():
        return None
    low, high = int(order.min()), int(order.max())
    if low < 0 or high >= groups:
        raise ModelError(
            f"{source.model}: tensor {name} names group {low if low < 0 else high}, there are {groups}; "
            "fetch or convert the file again"
        )
    return order
