"""The products of adapters: which rows of an iteration have one, and the small matrices beside each linear layer.

A pass is computed with or without them (`AdapterRows.begin`): without, nothing of this is in a recorded program. Only
the thread that submits steps comes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import AnyOps, Int32, LowRankShape, RowsByAdapter


@dataclass(frozen=True, slots=True)
class Pair:
    """The product that an adapter adds to x @ weight.T of a matrix: (x @ down.T) @ up.T."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank] float32, with the scale of the adapter


Adapter = dict[str, Pair]
"""By the name of a matrix of the base, as `matrices` has it."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of a packed matrix that are rows of a matrix of the base."""

    name: str  # of the base's matrix
    rows: range


class AdapterRows:
    """The adapters of one model on one rank, by number, and the rows that they have in the iteration at hand."""

    def __init__(self, ops: AnyOps, dtype: torch.dtype) -> None:
        self.ops, self.dtype = ops, dtype
        self.matrices: list[LinearAdapters] = []
        self.computes = False
        """Whether the pass at hand has the products of adapters."""
        self._tokens, self._samples = ops.new_rows_by_adapter(), ops.new_rows_by_adapter()

    def begin(self, numbers: Int32 | None, sample_rows: Int32 | None = None) -> None:
        """Set the adapter of each row of the next pass, [N] with 0 for the base; None computes without adapters.

        sample_rows: [R] those that sample.
        """
        self.computes = numbers is not None
        if numbers is not None:
            self._tokens.set(numbers)
            self._samples.set(numbers[sample_rows] if sample_rows is not None else numbers[:0])

    def of(self, selected: bool) -> RowsByAdapter:
        """Return the adapters of all rows, or of those that sample."""
        return self._samples if selected else self._tokens

    def reserve(self, adapters: int, rank: int, rows: int) -> None:
        """Take memory for so many adapters of at most this rank, and for passes of at most so many rows."""
        for of_rows in (self._tokens, self._samples):
            of_rows.reserve(rows, adapters)
        for matrix in self.matrices:
            matrix.pairs.reserve(adapters, rank, rows)

    def load(self, number: int, adapter: Adapter) -> None:
        """Pack this rank's part of an adapter. It replaces the adapter that had the number."""
        for matrix in self.matrices:
            matrix.load(number, adapter)

    def unload(self, number: int) -> None:
        for matrix in self.matrices:
            matrix.pairs.remove(number)


class LinearAdapters:
    """The small matrices beside one packed matrix, of each adapter that changes it."""

    def __init__(self, rows: AdapterRows, parts: Sequence[Outputs], columns: range) -> None:
        """parts: the outputs, one under the other; columns: the inputs that this rank has."""
        self._rows, self._parts, self._columns = rows, tuple(parts), columns
        self._names = list(dict.fromkeys(part.name for part in parts))  # of the down matrices
        self.pairs = rows.ops.new_low_rank_pairs(
            LowRankShape(
                inputs=len(columns),
                outputs=tuple(len(part.rows) for part in parts),
                reads=tuple(self._names.index(part.name) for part in parts),
                dtype=rows.dtype,
            )
        )
        rows.matrices.append(self)

    def add(self, x: Tensor, out: Tensor, selected: bool) -> None:
        """Add the products of x [N, inputs] to out [N, outputs]. selected: rows are those that sample."""
        if self._rows.computes:
            self._rows.ops.add_low_rank(x, out, self.pairs, self._rows.of(selected))

    def load(self, number: int, adapter: Adapter) -> None:
        """Take the part of an adapter that this rank computes, in place of what had the number."""
        self.pairs.remove(number)
        downs = {
            at: adapter[name].down[:, self._columns.start : self._columns.stop].to(self._rows.dtype).contiguous()
            for at, name in enumerate(self._names)
            if name in adapter
        }
        if downs:
            ups = {
                at: adapter[part.name].up[part.rows.start : part.rows.stop]
                for at, part in enumerate(self._parts)
                if part.name in adapter
            }
            self.pairs.set(number, downs, ups)
