"""Which of several ways to multiply is fastest for a model on this machine: measured at start, within a second or two.

A Sample stands for the model's matrices. The candidates take turns, so that a busy moment of the machine hits all of
them, in two passes, and only one that wins clearly in both counts as faster: a start must not hang on its moment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AnyOps, Batch

SAMPLE_BYTES = 64 << 20  # in float32; past the caches, as a model is
MOST_INPUTS = 1 << 14
TILE = 64  # rows of a matrix that are made up; the others repeat them
ROWS = 32
PASSES = 2
TURNS = 3
CLEARLY = 1.3
"""How much faster a candidate must be than the one that is taken else."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """`path`: whose matrix kernels `ops` uses."""

    ops: AnyOps
    path: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} by {self.path} kernels"


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds for the sample's matrices, the best of a pass's turns."""

    one_ms: float
    many_ms: float

    @property
    def cost(self) -> float:
        """What is compared: the geometric mean, so that neither case counts more."""
        return math.sqrt(self.one_ms * self.many_ms)

    def __str__(self) -> str:
        return f"{self.one_ms:.2f} ms at 1 row, {self.many_ms:.2f} at {ROWS}"


@dataclass(frozen=True, slots=True)
class Sample:
    """[outputs, inputs] of the matrices that are multiplied in place of the model's."""

    shapes: tuple[tuple[int, int], ...]
    whole: bool  # matrices of the model as they are; else narrower ones

    @property
    def size_bytes(self) -> int:
        return 4 * sum(outputs * inputs for outputs, inputs in self.shapes)

    def __str__(self) -> str:
        what = "of the model's matrices" if self.whole else "matrices like the model's, but narrower"
        return f"{len(self.shapes)} {what}, {self.size_bytes / 2**20:.0f} MiB in float32"


def sample_of(shapes: Sequence[tuple[int, int]], layers: int) -> Sample:
    """As many of the layers, each of these matrices, as SAMPLE_BYTES hold; of too large a layer, parts of each."""
    layer_bytes = 4 * sum(outputs * inputs for outputs, inputs in shapes)
    if layer_bytes <= SAMPLE_BYTES:
        return Sample((*shapes,) * min(layers, SAMPLE_BYTES // layer_bytes), True)
    narrow = [(outputs, min(inputs, MOST_INPUTS)) for outputs, inputs in shapes]
    share = SAMPLE_BYTES / (4 * sum(outputs * inputs for outputs, inputs in narrow))
    if share >= 1:
        return Sample(tuple(narrow), False)
    return Sample(tuple((max(TILE, int(outputs * share) // TILE * TILE), inputs) for outputs, inputs in narrow), False)


def measure(candidates: Sequence[Candidate], sample: Sample) -> list[list[Timing]]:
    """[PASSES][candidate]. All candidates hold their copy of the sample meanwhile."""
    with torch.inference_mode():
        runs = [_prepared(candidate, sample) for candidate in candidates]
        for run in runs:  # warms up
            run(1), run(ROWS)
        return [_pass(runs) for _ in range(PASSES)]


def clearly_faster(passes: Sequence[Sequence[Timing]], candidate: int, than: int) -> bool:
    """Did it win by CLEARLY in every pass?"""
    return all(timings[than].cost > CLEARLY * timings[candidate].cost for timings in passes)


def _pass(runs: Sequence[Callable[[int], float]]) -> list[Timing]:
    turns = [[(run(1), run(ROWS)) for run in runs] for _ in range(TURNS)]
    return [Timing(*(min(column) for column in zip(*own, strict=True))) for own in zip(*turns, strict=True)]


def _prepared(candidate: Candidate, sample: Sample) -> Callable[[int], float]:
    """Milliseconds of the sample's matrices at so many rows, as a compiled forward pass."""
    ops, dtype = candidate.ops, candidate.dtype
    generator = torch.Generator().manual_seed(20261120)
    widths = sorted({inputs for _, inputs in sample.shapes})
    tiles = {inputs: torch.randn(TILE, inputs, generator=generator).to(dtype) for inputs in widths}
    tables = {inputs: ops.pack_embedding([tile[:1]], 1, inputs) for inputs, tile in tiles.items()}
    weights = [
        (ops.pack_linear(_repeated(tiles[inputs], outputs), outputs, inputs, None), inputs)
        for outputs, inputs in sample.shapes
    ]

    def forward(prepared: Any) -> Tensor:
        rows = {inputs: ops.embed(prepared, table) for inputs, table in tables.items()}
        for weight, inputs in weights:
            out = ops.linear(rows[inputs], weight)
        return out

    compiled = ops.compile(forward, None, ROWS, ROWS)

    def run(count: int) -> float:
        zeros = np.zeros(count, np.int32)
        prepared = ops.prepare(Batch(zeros, zeros, zeros, zeros, zeros[:, None], zeros, zeros, zeros), None)
        begun = time.perf_counter()
        compiled(prepared)
        return (time.perf_counter() - begun) * 1000

    return run


def _repeated(tile: Tensor, outputs: int) -> Iterator[Tensor]:
    """A matrix of that many rows, a tile at a time."""
    for first in range(0, outputs, TILE):
        yield tile[: min(TILE, outputs - first)]
