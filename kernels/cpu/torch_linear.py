"""Matrices through torch's oneDNN instead of our own kernel, for machines where the start-up measurement prefers it.

The weight lies in oneDNN's blocked order alone, so no embedding can share it. Its sums depend on the number of rows:
not for --deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.reference.backend import batch_size


class TorchWeight:
    """A weight [outputs, inputs] that oneDNN has reordered."""

    def __init__(self, parts: Iterable[Tensor], outputs: int, inputs: int, bias: Tensor | None) -> None:
        """Raises ValueError when the parts are not `outputs` rows."""
        plain: Tensor | None = None
        first = 0
        for part in parts:
            if plain is None:
                plain = torch.empty((outputs, inputs), dtype=part.dtype)
            plain[first : first + part.shape[0]] = part
            first += part.shape[0]
        if plain is None or first != outputs:
            raise ValueError(f"{first} rows were given for a weight of {outputs}")
        self.dtype = plain.dtype
        self._bias = None if bias is None else bias.to(plain.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(plain)

    def linear(self, x: Tensor) -> Tensor:
        """x [N, inputs] -> [N, outputs]."""
        rows = x.shape[0]
        if x.dtype != torch.float32 and (size := batch_size(rows)) != rows:
            padded = x.new_zeros(size, x.shape[1])
            padded[:rows] = x
            x = padded
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return found[:rows]
