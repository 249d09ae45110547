"""compressed-tensors (llm-compressor): `weight_packed`, `weight_scale`, and `weight_zero_point` where it is asymmetric.

weight = (q - zero) * scale. Numbers and zero points have 8 (or 128) added and lie in words of 32 bits, the lowest bits
first: numbers along the inputs, zero points along the outputs. `weight_g_idx`, if there, names the group of each input.
Source: compressed_tensors/compressors/pack_quantized of https://github.com/vllm-project/compressed-tensors, 0.20.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.ops import Groups
from services.worker.checkpoint.source import Source, finite
from services.worker.quantization.base import Matrix
from services.worker.quantization.stored import StoredMethod, group_order, read_whole, row_steps, unpacked
from shared.errors import ModelError


class CompressedTensors(StoredMethod):
    def check_stored(self, source: Source, matrix: Matrix) -> None:
        name, outputs, inputs = matrix.name, matrix.outputs, matrix.inputs
        groups = self.groups(inputs)
        source.check(f"{name}.weight_packed", (outputs, self._words(inputs)), ("I32",))
        source.check(f"{name}.weight_scale", (outputs, groups), self.scales())
        source.check(f"{name}.weight_shape", (2,), ("I32", "I64"))
        if self.stored.has_mins:
            source.check(f"{name}.weight_zero_point", (self._words(outputs), groups), ("I32",))
        if f"{name}.weight_g_idx" in source or not self.stored.in_order:
            source.check(f"{name}.weight_g_idx", (inputs,), ("I32", "I64"))

    def read_stored(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor | Groups]:
        name, inputs, columns, bits = matrix.name, matrix.inputs, matrix.columns, self.stored.bits
        groups, words = self.groups(inputs), self._words(inputs)
        shape = read_whole(source, f"{name}.weight_shape", (2,)).tolist()
        if shape != [matrix.outputs, inputs]:
            raise ModelError(
                f"{source.model}: tensor {name}.weight_shape says {shape[0]} x {shape[1]}, config.json says "
                f"{matrix.outputs} x {inputs}; fetch or convert the file again"
            )
        zeros = group_of = None
        if self.stored.has_mins:
            packed = read_whole(source, f"{name}.weight_zero_point", (self._words(matrix.outputs), groups))
            zeros = unpacked(packed.t(), bits).t().float()
        if f"{name}.weight_g_idx" in source:
            group_of = group_order(source, f"{name}.weight_g_idx", inputs, self.stored.group, groups)
        for rows in row_steps(matrix.rows, inputs):
            some = source.read(f"{name}.weight_packed", (matrix.outputs, words), rows.start, len(rows))
            scales = source.read(f"{name}.weight_scale", (matrix.outputs, groups), rows.start, len(rows)).float()
            scales = finite(source, f"{name}.weight_scale", scales, self.largest)
            yield self.piece(
                unpacked(some, bits)[:, columns.start : columns.stop],
                scales,
                None if zeros is None else zeros[rows.start : rows.stop],
                columns,
                dtype,
                None if group_of is None else group_of[columns.start : columns.stop],
            )

    def _words(self, numbers: int) -> int:
        return -(-numbers * self.stored.bits // 32)
