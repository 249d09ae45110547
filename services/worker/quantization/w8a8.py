"""W8A8 (compressed-tensors, `int-quantized`): `weight` in integers of 8 bits, `weight_scale` of outputs or a matrix.

Activations are rounded, too: `Groups` (kernels/ops.py) says how and in which order an output is computed. The integers
are held as they are; there is no unpacked form, which would have other tokens. A row is rounded by its largest number,
so ranks that hold some of the inputs are refused (`check_split`).
Source: compressed_tensors/compressors/naive_quantized of https://github.com/vllm-project/compressed-tensors, 0.20.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.ops import W8A8_INPUTS, AnyOps, Groups
from services.worker.checkpoint.source import Source, finite
from services.worker.quantization.base import Matrix
from services.worker.quantization.stored import SCALES, StoredMethod, read_whole, row_steps
from shared.errors import ModelError

SCALE_BYTES = 4  # float32


class W8A8(StoredMethod):
    def check_stored(self, source: Source, matrix: Matrix) -> None:
        if matrix.inputs > W8A8_INPUTS:
            raise ModelError(
                f"{source.model}: {matrix.name} has {matrix.inputs} inputs, W8A8 takes {W8A8_INPUTS} at most; "
                "choose the unquantized model"
            )
        source.check(f"{matrix.name}.weight", (matrix.outputs, matrix.inputs), ("I8",))
        source.check(*self.scale_of_outputs(source, matrix), SCALES)

    def read_stored(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor | Groups]:
        name, shape = self.scale_of_outputs(source, matrix)
        scales = finite(source, name, read_whole(source, name, shape or (1,)).float(), 128)
        scales = scales.reshape(-1, 1).expand(matrix.outputs, 1)
        for rows in row_steps(matrix.rows, matrix.inputs):
            some = source.read(f"{matrix.name}.weight", (matrix.outputs, matrix.inputs), rows.start, len(rows))
            numbers = some.view(torch.uint8).bitwise_xor_(128)  # 128 above
            yield Groups(8, matrix.inputs, numbers, scales[rows.start : rows.stop].contiguous(), rounds_rows=True)

    def weight_bytes(self, ops: AnyOps, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        return outputs * inputs + SCALE_BYTES * outputs

    def numerics(self, ops: AnyOps, dtype: torch.dtype) -> str:
        return " w8a8"
