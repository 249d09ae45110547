"""The parts of `bench.gpu` that time kernels; each yields rows as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from bench.gpu.context import Context
from bench.gpu.setup import Setup, known_peaks, setup
from bench.kernels import attention as kernels_attention
from bench.kernels import blocks as kernels_blocks
from bench.kernels import rows as kernels_rows
from bench.kernels import sampling as kernels_sampling
from bench.kernels.backends import pinned_copy
from bench.kernels.case import Bench, Maker, run
from bench.kernels.shapes import Plan
from kernels.cuda.cache import CudaCache
from kernels.ops import Cache, CacheShape

Rows = Iterator[tuple[str, Any]]


def decode(context: Context) -> Rows:
    """Block-major KV, as workers have it, then layer-major at the same sizes."""

    def makers(made: Setup, plan: Plan) -> list[Maker]:
        def layer_major(_bench: Bench, shape: CacheShape) -> Cache:
            return CudaCache(shape, made.device, layer_major=True)

        op = "attention, layer-major"
        other = partial(kernels_attention.decode_alone, make_cache=layer_major, op=op)
        return [
            *kernels_attention.decodes(plan),
            *((f"{op} {b} x {n}", partial(other, b, n)) for b, n in plan.decodes),
        ]

    return _timed(context, makers)


def prefill(context: Context) -> Rows:
    return _timed(context, lambda _made, plan: kernels_attention.prompts(plan))


def sampler(context: Context) -> Rows:
    return _timed(context, lambda _made, plan: kernels_sampling.samplers(plan))


def rows(context: Context) -> Rows:
    return _timed(context, lambda _made, plan: kernels_rows.rows(plan))


def swap(context: Context) -> Rows:
    return _timed(context, lambda made, plan: kernels_blocks.copies(plan, partial(pinned_copy, made.device)))


def _timed(context: Context, makers: Callable[[Setup, Plan], Sequence[Maker]]) -> Rows:
    made = setup(context)
    with torch.inference_mode():
        bench = made.bench(known_peaks(context, made))
        for row in run(bench, makers(made, made.plan), lambda name: print(name, file=sys.stderr, flush=True)):
            yield "rows", [row.as_dict()]
