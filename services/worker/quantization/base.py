"""The strategy of a weight format: how a matrix is read from the checkpoint, split over ranks, packed and multiplied.

A format overrides what differs from plain floating-point weights. The kernels belong to the backends. A format names
its kernels (`kernels.ops.Ops.pack_linear`); `gpu_choice.KERNELS` lists its backends, unless all multiply it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.ops import AnyOps, Groups
from services.worker.checkpoint.source import Source, as_piece


@dataclass(frozen=True, slots=True)
class Stack:
    """Where a matrix lies in a tensor [count, inputs, outputs] that holds `count` of its shape."""

    index: int
    count: int
    interleaved: bool = False  # the even outputs are read first, then the odd ones


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [outputs, inputs] of the checkpoint, and the part [rows, columns] of it that a rank holds."""

    name: str  # the tensor's, without `.weight`; of a stack the whole name
    outputs: int
    inputs: int
    rows: range
    columns: range
    transposed: bool = False  # the checkpoint holds [inputs, outputs]
    stack: Stack | None = None

    @property
    def tensor(self) -> str:
        """Return the name of the tensor of a matrix that is not quantized."""
        return self.name if self.stack else f"{self.name}.weight"

    @property
    def runs(self) -> list[range]:
        """Return the outputs in the order in which they are read: those of one range, then those of the next."""
        return [self.rows[0::2], self.rows[1::2]] if self.stack and self.stack.interleaved else [self.rows]


class Part:
    """Rows of a matrix that are about to be packed."""

    def __init__(
        self, ops: AnyOps, rows: int, pieces: Iterator[Tensor | Groups], dtype: torch.dtype, keeps: bool = True
    ) -> None:
        """Look at the first piece. Groups that the backend cannot multiply are unpacked into `dtype`.

        keeps: whether those that it can multiply are not.
        """
        self.rows = rows
        first = next(pieces)
        self.group_format = first.group_format if isinstance(first, Groups) else ""
        self.is_unpacked = self.group_format not in ("", *(ops.group_formats if keeps else ()))
        """Whether Groups are unpacked."""
        self.pieces: Iterator[Tensor | Groups] = chain([first], pieces)
        if self.is_unpacked:
            self.group_format = ""
            if isinstance(first, Groups) and first.rounds_rows:
                raise ValueError(f"weights in {first.group_format}: the {ops.name} backend has no kernels for them")
            self.pieces = (as_piece(piece.plain(), dtype) for piece in self.pieces if isinstance(piece, Groups))


class LinearMethod(ABC):
    """How the linear layers of a model hold their weights."""

    name: ClassVar[str]
    """Value of --quantize."""
    weight_format: ClassVar[str] = ""
    """Format of Ops.pack_linear that it is held in; empty means the model's type."""

    packs_tables: ClassVar[bool] = False
    """Whether embedding and head may be packed, too."""

    def check(self, source: Source, matrix: Matrix) -> None:
        """Raise ModelError when the checkpoint lacks the matrix or holds it in another shape. Read headers alone."""
        source.check(matrix.tensor, _stored_shape(matrix))

    def read(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor | Groups]:
        """Yield [some of the rows, columns] of the rank's part, from the first row to the last.

        They are in `dtype`, or all are Groups of one format. Pieces are read as they are asked for, so that the
        peak of memory is one of them. Raise ModelError.
        """
        name, rows, columns = matrix.tensor, matrix.rows, matrix.columns
        if matrix.stack is None and not matrix.transposed:
            yield from source.pieces(name, (matrix.outputs, matrix.inputs), dtype, rows, columns)
            return
        self.check(source, matrix)
        above = matrix.stack.index * matrix.inputs if matrix.stack else 0  # rows of the matrices before
        shape = (matrix.inputs * (matrix.stack.count if matrix.stack else 1), matrix.outputs)
        stored = as_piece(source.read(name, shape, above + columns.start, len(columns)), dtype)
        step = -(-len(rows) // 8)
        for run in matrix.runs:
            for first in range(0, len(run), step):
                some = run[first : first + step]
                yield as_piece(stored[:, some.start : some.stop : some.step].t(), dtype)

    def pack(self, ops: AnyOps, parts: list[Part], inputs: int, bias: Tensor | None) -> Any:
        """Return the parts, one under the other, as `multiply` takes them; see Ops.pack_linear."""
        runs, first = [], 0
        for group_format, run in groupby(parts, lambda part: part.group_format):
            same = list(run)
            rows = sum(part.rows for part in same)
            some = None if bias is None else bias[first : first + rows]
            first += rows
            pieces: Iterator[Any] = (piece for part in same for piece in part.pieces)
            if group_format:
                runs.append(ops.pack_groups(pieces, rows, inputs, some))
            else:
                runs.append(ops.pack_linear(pieces, rows, inputs, some, self.weight_format))
        return runs[0] if len(runs) == 1 else ops.stack(runs)

    def numerics(self, ops: AnyOps, dtype: torch.dtype) -> str:
        """Return what `numerics` of an engine says of the checkpoint's own format; nothing where it decides no bit."""
        return ""

    def multiply(self, ops: AnyOps, x: Tensor, packed: Any) -> Tensor:
        """Return x @ weight.T + bias: x [N, inputs] -> [N, outputs]."""
        return ops.linear(x, packed)

    @abstractmethod
    def weight_bytes(self, ops: AnyOps, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """Return the bytes that one multiplication has to read of a weight; `dtype` is the model's."""


def _stored_shape(matrix: Matrix) -> tuple[int, ...]:
    if matrix.stack is not None:
        return (matrix.stack.count, matrix.inputs, matrix.outputs)
    return (matrix.inputs, matrix.outputs) if matrix.transposed else (matrix.outputs, matrix.inputs)
