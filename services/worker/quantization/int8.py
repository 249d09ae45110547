"""Round weights to 8 bits while they are loaded: one scale per output row, max |w| / 127; activations stay exact.

A rank that holds some of the columns scales by the largest of these, so its numbers are not those of one process.
"""

from __future__ import annotations

import torch

from kernels.ops import AnyOps
from services.worker.quantization.base import LinearMethod

SCALE_BYTES = 4  # float32


class Int8(LinearMethod):
    """8 bits a number, from a checkpoint that is not quantized."""

    name = "int8"
    weight_format = "int8"  # kernels/cpu/src/formats/int8.h

    def weight_bytes(self, ops: AnyOps, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        return outputs * inputs + SCALE_BYTES * outputs
