"""Decode attention with other constants than those that were chosen without a GPU: which would have been better?"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.context import Context
from bench.gpu.setup import Setup, known_peaks, setup
from bench.kernels import attention as kernels_attention
from bench.kernels.case import Bench, Maker, run
from bench.kernels.clock import DeviceClock
from kernels.cuda import attention_calls, loader, planner
from kernels.cuda.backend import CudaOps
from kernels.cuda.gpu import CudaDevice

SOURCE, HEADER = (loader.SOURCES / f"attention_decode.{kind}" for kind in ("cu", "cuh"))
UNITS = (3, 4, 5, 6)
ITEMS = (4, 6, 8, 12)
SHAPES = ((64, 1024), (8, 4096), (8, 32768))


def rings(context: Context) -> Iterator[tuple[str, Any]]:
    """`rows`: depths of the ring, then work items for each processor."""
    if context.device != "cuda":
        yield "skipped", "constants are chosen for a GPU"
        return
    made = setup(context)
    bench = made.bench(known_peaks(context, made))
    with torch.inference_mode():
        for units in UNITS:
            with _ring(made, units, bench.plan.model.head_dim):
                yield from _rows(made, bench, f"attention, ring of {units}")
        for items in ITEMS:
            kept, planner.DECODE_ITEMS_PER_PROCESSOR = planner.DECODE_ITEMS_PER_PROCESSOR, items
            try:
                yield from _rows(made, bench, f"attention, {items} items a processor")
            finally:
                planner.DECODE_ITEMS_PER_PROCESSOR = kept


def with_units(units: int, head_dim: int) -> str:
    """The source, its header within, with rings of so many units and with the kernels of that head_dim alone.

    Raises ValueError where the two are not written as expected.
    """
    header = HEADER.read_text().replace("#pragma once\n", "")
    header, found = re.subn(
        r"^constexpr int UNITS = [^;]*;", f"constexpr int UNITS = {units};", header, flags=re.MULTILINE
    )
    text = SOURCE.read_text().replace(f'#include "{HEADER.name}"\n', header)
    lines = [line for line in text.splitlines() if not line.startswith("KERNEL(") or f"_d{head_dim}," in line]
    if found != 1 or HEADER.name in text or not lines[-1].startswith("KERNEL("):
        raise ValueError(f"{SOURCE.name}: {found} definitions of UNITS, {lines[-1]!r}")
    return "\n".join([*lines, ""])


@contextmanager
def _ring(made: Setup, units: int, head_dim: int) -> Iterator[None]:
    """Inside, decode attention has rings of so many units."""
    if not isinstance(made.device, CudaDevice):
        raise TypeError(f"{made.device.name} is no GPU")
    programs, sizes = made.device.programs, attention_calls.DECODE_RINGS
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
