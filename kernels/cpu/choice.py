"""Which type and whose matrix kernels are fastest for a model on this machine: measured, in a fraction of a second.

Each candidate runs the matrices of some layers, as many as fill SAMPLE_BYTES (a model does not fit into the caches, so
neither may the sample) as a compiled forward pass: at one row, where reading the weights bounds it, and at ROWS rows.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AnyOps, Batch

SAMPLE_BYTES = 64 << 20
ROWS = 32
REPEATS = 3
CLEARLY = 1.1
"""How much faster a candidate must be than one that is preferred for other reasons."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds for the sample's matrices, which are the same for all candidates."""

    dtype: torch.dtype
    path: str
    one_ms: float
    many_ms: float

    @property
    def cost(self) -> float:
        """What is compared: the geometric mean, so that neither case counts more."""
        return math.sqrt(self.one_ms * self.many_ms)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} by {self.path} kernels {self.one_ms:.2f} ms at 1 row, {self.many_ms:.2f} at {ROWS}"


def measure(
    make: Callable[[str], AnyOps],
    shapes: Sequence[tuple[int, int]],
    layers: int,
    dtypes: Iterable[torch.dtype],
    paths: Iterable[str],
) -> list[Timing]:
    """All candidates, dtypes first. `make` gives the operations of a path; shapes: [outputs, inputs] of one layer."""
    layer_bytes = 4 * sum(outputs * inputs for outputs, inputs in shapes)
    sample = [*shapes] * max(1, min(layers, SAMPLE_BYTES // layer_bytes))
    with torch.inference_mode():
        return [_measure(make(path), path, sample, dtype) for dtype, path in itertools.product(dtypes, paths)]


def pick(timings: Sequence[Timing]) -> Timing:
    """The first unless another is clearly faster."""
    best = min(timings, key=lambda timing: timing.cost)
    return timings[0] if timings[0].cost <= CLEARLY * best.cost else best


def _measure(ops: AnyOps, path: str, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Timing:
    generator = torch.Generator().manual_seed(20261120)
    source = torch.randn(max(o * i for o, i in shapes), generator=generator).to(dtype)
    tables = {i: ops.pack_embedding([source[:i].view(1, i)], 1, i) for _, i in shapes}
    weights = [(ops.pack_linear([source[: o * i].view(o, i)], o, i, None), i) for o, i in shapes]

    def forward(prepared: Any) -> Tensor:
        rows = {inputs: ops.embed(prepared, table) for inputs, table in tables.items()}
        for weight, inputs in weights:
            out = ops.linear(rows[inputs], weight)
        return out

    run = ops.compile(forward, None, ROWS, ROWS)

    def best_ms(count: int) -> float:
        zeros = np.zeros(count, np.int32)
        prepared = ops.prepare(Batch(zeros, zeros, zeros, zeros, zeros[:, None], zeros, zeros, zeros), None)
        took = []
        for _ in range(1 + REPEATS):  # the first one warms up
            begun = time.perf_counter()
            run(prepared)
            took.append(time.perf_counter() - begun)
        return min(took) * 1000

    return Timing(dtype, path, best_ms(1), best_ms(ROWS))
