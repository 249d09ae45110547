"""MXFP4 (OCP Microscaling Formats 1.0), of gpt-oss's experts: floats of 4 bits and a power of two for each 32 inputs.

`NAME_blocks` [experts, outputs, inputs / 32, 16] has two numbers a byte, the lower bits first, `NAME_scales` [experts,
outputs, inputs / 32] the exponents, 127 above their values; 255 stands for NaN. A weight is FLOAT4[number] *
2^(scale - 127), exact in float32 and in bfloat16; scales that could give larger ones are refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.formats import FLOAT4
from kernels.ops import Groups
from services.worker.checkpoint.source import Source, as_piece, finite, powers
from services.worker.quantization.base import Matrix
from services.worker.quantization.stored import StoredMethod, row_steps
from shared.errors import ModelError

GROUP, BYTES = 32, 16  # inputs and bytes of a block
BYTE = ("U8",)
LARGEST = max(FLOAT4)


class Mxfp4(StoredMethod):
    def check_stored(self, source: Source, matrix: Matrix) -> None:
        name, outputs, inputs = matrix.name, matrix.outputs, matrix.inputs
        if matrix.stack is None:
            raise ModelError(f"{source.model}: {name}.weight is missing, MXFP4 holds experts alone; fetch it again")
        if inputs % GROUP:
            raise ModelError(
                f"{source.model}: {name} has {inputs} inputs, MXFP4 packs multiples of {GROUP}; choose another model"
            )
        shape = (matrix.stack.count, outputs, inputs // GROUP)
        source.check(f"{name}_blocks", (*shape, BYTES), BYTE)
        source.check(f"{name}_scales", shape, BYTE)

    def read_stored(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor | Groups]:
        stack, columns, groups = matrix.stack, matrix.columns, matrix.inputs // GROUP
        if stack is None:
            raise ValueError("MXFP4 holds experts alone")
        first, count = stack.index * matrix.outputs + matrix.rows.start, len(matrix.rows)
        rows = stack.count * matrix.outputs
        blocks = source.read(f"{matrix.name}_blocks", (rows, groups * BYTES), first, count)
        exponents = source.read(f"{matrix.name}_scales", (rows, groups), first, count)
        some = slice(columns.start // GROUP, -(-columns.stop // GROUP))
        for run in matrix.runs:
            for step in row_steps(range(len(run)), matrix.inputs):
                held, above = run[step.start : step.stop], matrix.rows.start
                at = slice(held.start - above, held.stop - above, held.step)
                numbers = torch.stack((blocks[at] & 15, blocks[at] >> 4), -1).flatten(1)
                scales = finite(source, f"{matrix.name}_scales", powers(exponents[at]), LARGEST)
                if columns.start % GROUP == 0:
                    cut = numbers[:, columns.start : columns.stop].contiguous()
                    yield Groups(4, GROUP, cut, scales[:, some].contiguous(), table="float4")
                else:
                    whole = Groups(4, GROUP, numbers, scales, table="float4").plain()
                    yield as_piece(whole[:, columns.start : columns.stop], dtype)
