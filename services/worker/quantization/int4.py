"""Round weights to 4 bits while they are loaded: one scale per 32 inputs of an output, max |w| / 7.

Activations stay exact. A rank that holds columns from a multiple of 32 on has the numbers of one process; others group
the inputs differently.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.formats import INT4
from kernels.ops import AnyOps, Groups
from services.worker.checkpoint.source import Source
from services.worker.quantization.base import LinearMethod, Matrix

GROUP = INT4.group
SCALE_BYTES = 4  # float32


class Int4(LinearMethod):
    """4 bits a number, from a checkpoint that is not quantized."""

    name = "int4"

    def numerics(self, ops: AnyOps, dtype: torch.dtype) -> str:
        return ops.group_numerics(dtype)

    def read(self, source: Source, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor | Groups]:
        for piece in super().read(source, matrix, torch.float32):
            yield rounded(piece) if isinstance(piece, Tensor) else piece

    def weight_bytes(self, ops: AnyOps, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        return outputs * inputs // 2 + SCALE_BYTES * outputs * -(-inputs // GROUP)


def rounded(weight: Tensor) -> Groups:
    """Return [rows, inputs] float32 in 4 bits: round(w / scale) to nearest, ties to even, with scale = max |w| / 7."""
    rows, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % GROUP)).view(rows, -1, GROUP)
    scales = padded.abs().amax(-1) / 7
    steps = padded / torch.where(scales > 0, scales, 1)[:, :, None]
    numbers = steps.round_().clamp_(-7, 7).add_(8).to(torch.uint8).view(rows, -1)
    return Groups(INT4.bits, GROUP, numbers[:, :inputs].contiguous(), scales)
