"""GGUF: matrices in the types that the file has, each packed as the `Groups` that its type unpacks to.

`GGUF_FORMATS` of `models/stored.py` lists the format of each type, `models/gguf.py` has the formulas. Numbers and
products are the file's, so a multiplication in float32 has the bits of the unpacked weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kernels.ops import AnyOps, Groups
from services.worker.models.checkpoint import Source, as_piece
from services.worker.models.gguf import UNPACK, GgufWeights
from services.worker.quantization.base import Matrix
from services.worker.quantization.stored import StoredMethod, row_steps
from shared.errors import ModelError


class Gguf(StoredMethod):
    packs_tables = True

    def numerics(self, ops: AnyOps, dtype: torch.dtype) -> str:
        """Return what tells packed weights from unpacked ones; a file has several types, and bits are those of most."""
        return ops.group_numerics(dtype)

    def check_stored(self, source: Source, matrix: Matrix) -> None:
        source.check(f"{matrix.name}.weight", (matrix.outputs, matrix.inputs), UNPACK.keys())

    def read_stored(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor | Groups]:
        if not isinstance(source, GgufWeights):
            raise ModelError(f"{source.model}: no GGUF file; choose another model")
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
