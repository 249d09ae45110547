"""Checkpoints in 8-bit floats (E4M3).

weight = q * scale in float32. A scale is for a matrix, for an output, or for a block of outputs and inputs. Its tensor
is `weight_scale`; of blocks also `weight_scale_inv`, by which numbers are multiplied, too. Activations stay exact;
scales for them are not read.

As Groups each output has its scale once for each group of inputs. Where blocks cannot be cut into the groups of kernels
the weights are unpacked into the model's type while they are read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.formats import FLOAT8
from kernels.ops import Groups
from services.worker.checkpoint.source import Source, as_piece, finite
from services.worker.quantization.base import Matrix
from services.worker.quantization.stored import SCALES, StoredMethod, read_whole, row_steps, unit_of

LARGEST = torch.finfo(torch.float8_e4m3fn).max
NAN = 127
"""Of a number's lower bits, those of NaN; E4M3FN has no infinity."""


class Fp8(StoredMethod):
    def check_stored(self, source: Source, matrix: Matrix) -> None:
        source.check(f"{matrix.name}.weight", (matrix.outputs, matrix.inputs), ("F8_E4M3",))
        name, shape = self._scale(source, matrix)
        source.check(name, shape, SCALES)

    def read_stored(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor | Groups]:
        columns, shape = matrix.columns, (matrix.outputs, matrix.inputs)
        name, scale_shape = self._scale(source, matrix)
        scales = finite(source, name, read_whole(source, name, scale_shape or (1,)).float(), LARGEST)
        scales = scales.reshape(scales.shape if scales.ndim == 2 else (1, 1))
        per_row, per_column = (given or size for given, size in zip(self.stored.block, shape, strict=True))
        unit = unit_of(self.stored.block[1], columns)
        at = torch.arange(columns.start, columns.stop, unit or 1) // per_column
        for rows in row_steps(matrix.rows, matrix.inputs):
            weight = f"{matrix.name}.weight"
            codes = source.read(weight, shape, rows.start, len(rows))
            held = codes.view(torch.uint8)
            if (held & NAN == NAN).any():
                finite(source, weight, codes.float())
            some = scales[torch.arange(rows.start, rows.stop) // per_row][:, at]
            if unit:
                cut = held[:, columns.start : columns.stop].contiguous()
                yield Groups(8, unit, cut, some.contiguous(), table=FLOAT8)
            else:
                yield as_piece(codes[:, columns.start : columns.stop].float() * some, dtype)

    def _scale(self, source: Source, matrix: Matrix) -> tuple[str, tuple[int, ...]]:
        """Return the name and the shape of a matrix's scales."""
        down, across = self.stored.block
        if not across:
            return self.scale_of_outputs(source, matrix)
        name = f"{matrix.name}.weight_scale"
        shape = (-(-matrix.outputs // down), -(-matrix.inputs // across))
        return name if name in source else f"{name}_inv", shape
