"""Weights in the model's type, as the checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.ops import AnyOps
from services.worker.quantization.base import LinearMethod


class Unquantized(LinearMethod):
    """The default."""

    name = "none"

    def pack(self, ops: AnyOps, pieces: Iterator[Tensor], outputs: int, inputs: int, bias: Tensor | None) -> Any:
        return ops.pack_linear(pieces, outputs, inputs, bias)

    def weight_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        return outputs * inputs * dtype.itemsize
