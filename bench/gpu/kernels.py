"""Kernels on a GPU beside their floors and torch: attention, sampler, rows, copies, depths of rings."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.context import Context
from bench.kernels import attention as kernels_attention
from bench.kernels import kv as kernels_kv
from bench.kernels import rows as kernels_rows
from bench.kernels import sampling as kernels_sampling
from bench.kernels.backends import Peaks, device_peaks, opened, pinned_copy
from bench.kernels.case import Bench, Maker, run
from bench.kernels.clock import DeviceClock
from bench.kernels.shapes import GPU, QUICK, Plan
from kernels.cuda import calls, loader
from kernels.cuda.backend import CudaOps
from kernels.cuda.cache import CudaCache
from kernels.cuda.device import Device
from kernels.cuda.gpu import CudaDevice
from kernels.ops import Cache, CacheShape
from shared.errors import ConfigurationError

Rows = Iterator[tuple[str, Any]]
REPEATS = 9
SOURCE, HEADER = (loader.SOURCES / f"attention/attention_decode.{kind}" for kind in ("cu", "cuh"))
UNITS = (3, 4, 5, 6)  # depths of a ring that are tried
SHAPES = ((64, 1024), (8, 4096), (8, 32768))


@dataclass(frozen=True, slots=True)
class Setup:
    clock: DeviceClock
    device: Device
    plan: Plan

    def bench(self, peaks: Peaks, dtype: torch.dtype = torch.bfloat16) -> Bench:
        return Bench(self.clock, peaks, self.plan, dtype)


def setup(context: Context) -> Setup:
    """Return the backend. Raises ConfigurationError if the device is not available."""
    backend = opened(context.device, 2 if context.quick else REPEATS)
    if backend.device is None or not isinstance(backend.clock, DeviceClock):
        raise ConfigurationError(f"{context.device} is no device of the CUDA kernels")
    return Setup(backend.clock, backend.device, QUICK if context.quick else GPU)


def known_peaks(context: Context, made: Setup | None = None) -> Peaks:
    """Return the peaks that the probes measured in this run, or measure them. Raises ConfigurationError as `setup`."""
    if found := context.found("probes").get("peaks"):
        return Peaks(**found)
    made = made or setup(context)
    return device_peaks(made.clock, made.device)


def decode(context: Context) -> Rows:
    """Measure block-major KV, as workers have it, then layer-major at the same sizes."""

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
    return _timed(context, lambda made, plan: kernels_rows.rows(plan, made.clock.ops.group_formats))


def swap(context: Context) -> Rows:
    return _timed(context, lambda made, plan: kernels_kv.copies(plan, partial(pinned_copy, made.device)))


def _timed(context: Context, makers: Callable[[Setup, Plan], Sequence[Maker]]) -> Rows:
    made = setup(context)
    with torch.inference_mode():
        bench = made.bench(known_peaks(context, made))
        for row in run(bench, makers(made, made.plan), lambda name: print(name, file=sys.stderr, flush=True)):
            yield "rows", [row.as_dict()]


def rings(context: Context) -> Iterator[tuple[str, Any]]:
    """Yield `rows`: depths of the ring."""
    if context.device != "cuda":
        yield "skipped", "constants are chosen for a GPU"
        return
    made = setup(context)
    bench = made.bench(known_peaks(context, made))
    with torch.inference_mode():
        for units in UNITS:
            with _ring(made, units, bench.plan.model.head_dim):
                yield from _rows(made, bench, f"attention, ring of {units}")


def with_units(units: int, head_dim: int) -> str:
    """Return the source with its header inlined, with rings of this many units and the plain kernels of that head_dim.

    Raises ValueError where the two are not written as expected.
    """
    header = HEADER.read_text().replace("#pragma once\n", "")
    header, found = re.subn(
        r"^constexpr int UNITS = [^;]*;", f"constexpr int UNITS = {units};", header, flags=re.MULTILINE
    )
    text = SOURCE.read_text().replace(f'#include "{HEADER.name}"\n', header)
    kept = re.compile(rf"(?!KERNEL\()|KERNEL\(attention_decode_b?f16_d{head_dim},")
    lines = [line for line in text.splitlines() if kept.match(line)]
    if found != 1 or HEADER.name in text or not lines[-1].startswith("KERNEL("):
        raise ValueError(f"{SOURCE.name}: {found} definitions of UNITS, {lines[-1]!r}")
    return "\n".join([*lines, ""])


@contextmanager
def _ring(made: Setup, units: int, head_dim: int) -> Iterator[None]:
    """Let decode attention use rings of this many units inside the block."""
    if not isinstance(made.device, CudaDevice):
        raise TypeError(f"{made.device.name} is no GPU")
    programs, sizes = made.device.programs, calls.DECODE_RINGS
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / SOURCE.name
        source.write_text(with_units(units, head_dim))
        other = loader.Program(source)
    kept = {name: programs[name] for name in other.kernels}
    size = sizes[head_dim]
    try:
        programs.update(dict.fromkeys(other.kernels, other))
        sizes[head_dim] = (size[0], units)
        yield
    finally:
        programs.update(kept)
        sizes[head_dim] = size


def _rows(made: Setup, bench: Bench, op: str) -> Iterator[tuple[str, Any]]:
    clock = DeviceClock(CudaOps(made.device), made.device, made.clock.repeats)  # plans are kept by the backend
    makers: list[Maker] = [(f"{op} {b} x {n}", partial(kernels_attention.decode_alone, b, n, op=op)) for b, n in SHAPES]
    for row in run(replace(bench, clock=clock), makers, print):
        yield "rows", [row.as_dict()]
