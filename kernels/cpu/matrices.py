"""The matrix kernels for a model on this CPU: those of src/gemm.cpp ("own"), or torch's oneDNN.

Known before the start, from the table below.

The former give a row the same bits in any batch (src/ops.h). The sums of oneDNN depend on the number of rows, so it is
taken only where its instructions are out of their reach, and never for --deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.backend import batch_size


@dataclass(frozen=True, slots=True)
class MatrixKernels:
    """A row of the table: it holds for CPUs with these flags, this type and at least this hidden size."""

    path: str  # "own" or "torch"
    source: str  # of the figures behind the row
    flags: frozenset[str] = frozenset()  # of /proc/cpuinfo
    dtype: torch.dtype | None = None  # None: any
    hidden_size: int = 1


MATRIX_KERNELS = (
    MatrixKernels(
        "torch",
        "AMX: 1,024 bfloat16 operations a cycle and core, AVX-512: 64 in float32 (Intel); not measured here",
        frozenset({"amx_tile", "amx_bf16"}),
        torch.bfloat16,
        1024,  # at 512 a call of oneDNN takes twice as long as ours: docs/cpu.md, llama-30m, bfloat16, decode-1
    ),
    MatrixKernels("own", "faster than oneDNN for every shape measured with AVX2 and AVX-512 (docs/cpu.md)"),
)
"""The first row that holds is taken."""


def matrix_kernels(flags: frozenset[str], dtype: torch.dtype, hidden_size: int) -> MatrixKernels:
    """Return the row of MATRIX_KERNELS for a model of this type and size on a CPU with these flags."""
    return next(
        row
        for row in MATRIX_KERNELS
        if row.flags <= flags and row.dtype in (None, dtype) and row.hidden_size <= hidden_size
    )


def torch_multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has packed matrices of this type here: bfloat16 needs AVX-512 or AVX-NE-CONVERT."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.ones(1, 1, dtype=dtype))
    except RuntimeError:
        return False
    return True


class TorchWeight:
    """A weight [outputs, inputs] in oneDNN's blocked order, which no embedding can share."""

    def __init__(self, parts: Iterable[Tensor], outputs: int, inputs: int, bias: Tensor | None) -> None:
        """Raise ValueError when the parts are not `outputs` rows, or of a type that torch cannot pack on this CPU."""
        plain: Tensor | None = None
        first = 0
        for part in parts:
            if plain is None:
                plain = torch.empty((outputs, inputs), dtype=part.dtype)
            plain[first : first + part.shape[0]] = part
            first += part.shape[0]
        if plain is None or first != outputs:
            raise ValueError(f"{first} rows were given for a weight of {outputs}")
        if not torch_multiplies(plain.dtype):
            raise ValueError(f"{plain.dtype}: torch has no packed matrices of it on this CPU; use --kernels cpu")
        self.dtype = plain.dtype
        self._bias = None if bias is None else bias.to(plain.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(plain)

    def linear(self, x: Tensor) -> Tensor:
        """Multiply x [N, inputs] -> [N, outputs]."""
        rows = x.shape[0]
        if x.dtype != torch.float32 and (size := batch_size(rows)) != rows:
            padded = x.new_zeros(size, x.shape[1])
            padded[:rows] = x
            x = padded
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out[:rows]
