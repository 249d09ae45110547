"""Weights in the model's type, as the checkpoint has them."""

from __future__ import annotations

import torch

from kernels.ops import AnyOps
from services.worker.quantization.base import LinearMethod


class Unquantized(LinearMethod):
    """The default."""

    name = "none"

    def weight_bytes(self, ops: AnyOps, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        return outputs * inputs * dtype.itemsize
