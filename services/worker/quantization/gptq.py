"""GPTQ (arXiv 2210.17323): `qweight` [inputs * bits / 32, outputs], `qzeros`, `scales`, `g_idx`.

weight = (q - zero) * scale. Words of 32 bits hold numbers along the inputs and zero points along the outputs, the
lowest bits first. The first format stores a zero point less one; a stored 15 is 16 then, as in ExLlama and vLLM.
`g_idx` names the group of each input; with act order (`desc_act`) the inputs of a group do not lie side by side.
Source: gptqmodel/nn_modules/qlinear of https://github.com/ModelCloud/GPTQModel.
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


class Gptq(StoredMethod):
    def check_stored(self, source: Source, matrix: Matrix) -> None:
        name, outputs, inputs, many = matrix.name, matrix.outputs, matrix.inputs, 32 // self.stored.bits
        if outputs % many or inputs % many:
            raise ModelError(
                f"{source.model}: {name} is {outputs} x {inputs}, GPTQ packs multiples of {many}; fetch it again"
            )
        groups = self.groups(inputs)
        source.check(f"{name}.qweight", (inputs // many, outputs), ("I32",))
        source.check(f"{name}.qzeros", (groups, outputs // many), ("I32",))
        source.check(f"{name}.scales", (groups, outputs), self.scales())
        if f"{name}.g_idx" in source or not self.stored.in_order:
            source.check(f"{name}.g_idx", (inputs,), ("I32", "I64"))

    def read_stored(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor | Groups]:
        name, outputs, inputs, columns = matrix.name, matrix.outputs, matrix.inputs, matrix.columns
        bits, many, groups = self.stored.bits, 32 // self.stored.bits, self.groups(inputs)
        group_of = None
        if f"{name}.g_idx" in source:
            group_of = group_order(source, f"{name}.g_idx", inputs, self.stored.group, groups)
        held = slice(matrix.rows.start, matrix.rows.stop)  # copies: parts of one matrix are held side by side
        scales = read_whole(source, f"{name}.scales", (groups, outputs))[:, held].float().t()
        scales = finite(source, f"{name}.scales", scales, self.largest)
        packed = unpacked(read_whole(source, f"{name}.qzeros", (groups, outputs // many)), bits)
        zeros = packed.t().float() + self.stored.zero_offset
        symmetric = bool(zeros.eq(1 << bits - 1).all())  # as with `sym`: no minima to hold
        zeros = zeros[held].clone()
        stored = read_whole(source, f"{name}.qweight", (inputs // many, outputs))[:, held].contiguous()
        for rows in row_steps(matrix.rows, inputs):
            some = slice(rows.start - held.start, rows.stop - held.start)
            yield self.piece(
                unpacked(stored[:, some].t(), bits)[:, columns.start : columns.stop],
                scales[some],
                None if symmetric else zeros[some],
                columns,
                dtype,
                None if group_of is None else group_of[columns.start : columns.stop],
            )
