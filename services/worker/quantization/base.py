"""The strategy of a weight format: how a matrix is read from the checkpoint, split over ranks, packed and multiplied.

A format overrides what differs from plain floating-point weights. The kernels belong to the backends: a format names
the one that it wants (`kernels.ops.Ops.pack_linear`) and the backends that have it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.ops import AnyOps
from services.worker.models.checkpoint import Source, as_piece


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [outputs, inputs] of the checkpoint, and the part [rows, columns] of it that a rank holds."""

    name: str  # the tensor's, without `.weight`
    outputs: int
    inputs: int
    rows: range
    columns: range
    transposed: bool = False  # the checkpoint holds [inputs, outputs]


class LinearMethod(ABC):
    """How the linear layers of a model hold their weights."""

    name: ClassVar[str]
    """Value of --quantize."""
    backends: ClassVar[tuple[str, ...]] = ()
    """Kernel backends (`Ops.name`) that can multiply it; empty means all."""
    weight_format: ClassVar[str] = ""
    """Format of Ops.pack_linear that it is held in; empty means the model's type."""
    quant_methods: ClassVar[frozenset[str]] = frozenset()
    """`quant_method` of the quantized checkpoints that it reads; empty means plain checkpoints alone."""

    def check(self, source: Source, matrix: Matrix) -> None:
        """Raise ModelError when the checkpoint lacks the matrix or holds it in another shape. Read headers alone."""
        source.check(f"{matrix.name}.weight", _stored_shape(matrix))

    def read(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield [some of the rows, columns] of the rank's part in `dtype`, from the first row to the last.

        Pieces are read as they are asked for, so that the peak of memory is one of them. Raise ModelError.
        """
        name, rows, columns = f"{matrix.name}.weight", matrix.rows, matrix.columns
        if not matrix.transposed:
            yield from source.pieces(name, (matrix.outputs, matrix.inputs), dtype, rows, columns)
            return
        self.check(source, matrix)
        stored = as_piece(source.read(name, _stored_shape(matrix), columns.start, len(columns)), dtype)
        step = -(-len(rows) // 8)
        for first in range(rows.start, rows.stop, step):
            yield as_piece(stored[:, first : min(first + step, rows.stop)].t(), dtype)

    def pack(self, ops: AnyOps, pieces: Iterator[Tensor], outputs: int, inputs: int, bias: Tensor | None) -> Any:
        """Return the weight [outputs, inputs] as `multiply` takes it; see Ops.pack_linear."""
        return ops.pack_linear(pieces, outputs, inputs, bias, self.weight_format)

    def multiply(self, ops: AnyOps, x: Tensor, packed: Any) -> Tensor:
        """Return x @ weight.T + bias: x [N, inputs] -> [N, outputs]."""
        return ops.linear(x, packed)

    @abstractmethod
    def weight_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """Return the bytes that one multiplication has to read of a weight; `dtype` is the model's."""


def _stored_shape(matrix: Matrix) -> tuple[int, int]:
    return (matrix.inputs, matrix.outputs) if matrix.transposed else (matrix.outputs, matrix.inputs)
