"""`python -m bench.gpu.host`: how long Python takes for the forward pass of a step, on a device that does nothing.

What is timed is the host's part of `CudaOps`: metadata, launches, memory, calls of torch; neither the driver's, CuPy's
and torch's own time nor the device's, and of ranks nothing of NCCL. A model's widths change none of it, so the model is
small, with 32 layers. Needs no GPU and no compiler. bench/results/gpu-host.json has a result, docs/gpu.md its figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.engine import config_of
from bench.kernels.shapes import BLOCK_SIZE, TINY
from bench.result import provenance
from kernels.cuda.backend import CudaOps
from kernels.cuda.calls import Block, Call
from kernels.cuda.device import Device, Event, Stream
from kernels.cuda.residency import resident_of
from kernels.ops import Batch, CacheShape
from services.worker.checkpoint.source import open_weights
from services.worker.models.config import load_config
from services.worker.models.decoder import Decoder
from services.worker.parallel.state import ParallelState

LAYERS, STEPS, CONTEXT = 32, 300, 200
CASES = {"decode, 32 sequences": (32, 0), "mixed, 32 sequences and a chunk of 128": (32, 128)}
"""Sequences that decode, and rows of a chunk beside them."""
ROOM = 256  # rows of a step at most
TP = (1, 2)
"""Ranks, of which the first is measured."""


class Passed(Event):
    """An event that is passed as soon as it is recorded."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class IdleStream(Stream):
    """Counts what it is given and does none of it."""

    def __init__(self, counted: Counter[str]) -> None:
        self._counted = counted

    def launch(self, call: Call, *touched: Tensor) -> None:
        self._counted["launches"] += 1

    def run(self, work: Callable[[], object]) -> None:
        self._counted["calls of torch"] += 1

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._counted["copies"] += 1

    def record(self) -> Passed:
        return Passed()

    def wait_for(self, event: Event) -> None:
        pass


class IdleDevice(Device):
    """An H100 that is never busy; its memory is the host's."""

    name, torch_device, processors, has_wgmma = "idle", torch.device("cpu"), 132, True

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.main, self.copies = IdleStream(self.counted), IdleStream(self.counted)
        self._cuts: list[Callable[[], object]] | None = None  # of the recording that is made

    def resident(self, block: Block) -> int:
        return resident_of("sm_90", *block)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.counted["allocations"] += 1
        return torch.empty(shape, dtype=dtype)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def registered(self, memory: Tensor, read_only: bool = False) -> Tensor:
        return memory

    def elapsed_ns(self, start: Event, end: Event) -> int:
        return 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        cuts = self._cuts = []
        try:
            work()
        finally:
            self._cuts = None

        def replay() -> None:
            self.counted["graphs"] += 1
            for call in cuts:
                call()
                self.counted["graphs"] += 1

        return replay

    @property
    def is_recording(self) -> bool:
        return self._cuts is not None

    def cut(self, call: Callable[[], object]) -> None:
        if self._cuts is None:
            raise RuntimeError("cut: nothing is recorded; call it inside `capture`")
        self._cuts.append(call)

    def free_bytes(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def peak_bytes(self, reset: bool = False) -> int:
        return 0


class IdleRank(ParallelState):
    """The first of some ranks; counts what it should exchange."""

    def __init__(self, tp: int, counted: Counter[str]) -> None:
        super().__init__(tp)
        self._counted = counted

    def all_reduce(self, x: Tensor) -> None:
        self._counted["exchanges"] += 1


def measured(layers: int = LAYERS, steps: int = STEPS) -> list[dict[str, Any]]:
    """Return a row for each number of ranks and case, with operations one by one and with its graph: counts, and the
    median of the thread's time on a core, in us."""
    return [row for tp in TP for row in measured_of(tp, layers, steps)]


@torch.inference_mode()
def measured_of(tp: int, layers: int, steps: int) -> list[dict[str, Any]]:
    device, found = IdleDevice(), []
    ops, rank = CudaOps(device), IdleRank(tp, device.counted)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(replace(TINY, layers=layers))))
        config, weights = load_config(Path(folder)), open_weights(Path(folder), "dummy")
        decoder = Decoder(config, weights, ops, torch.bfloat16, ROOM, parallel=rank)
    config, blocks = decoder.config, -(-ROOM // BLOCK_SIZE)
    sequences = max(decodes + bool(rows) for decodes, rows in CASES.values())
    shape = CacheShape(sequences * blocks, 0, layers, config.kv_heads, BLOCK_SIZE, config.head_dim, torch.bfloat16)
    cache = ops.new_cache(shape)
    passes: dict[str, Any] = {"one by one": lambda prepared: decoder.forward(prepared, cache)}
    batches = {name: batch_of(*case, blocks) for name, case in CASES.items()}
    for how in ("one by one", "graph"):
        if how == "graph":
            passes[how] = ops.compile(passes["one by one"], cache, ROOM, sequences)
        for name, batch in batches.items():
            times = []
            for _ in range(steps):
                device.counted.clear()
                begun = time.thread_time_ns()
                passes[how](ops.prepare(batch, cache))
                times.append(time.thread_time_ns() - begun)
            found.append({"tp": tp, "case": name, "how": how, "us": median(times) / 1000, **device.counted})
    return found


def batch_of(decodes: int, rows: int, blocks: int) -> Batch:
    """Return decoding sequences of CONTEXT tokens and one prompt chunk. Each of them has its own `blocks`."""
    lengths = np.array([1] * decodes + [rows] * bool(rows), np.int32)
    context = np.full(len(lengths), CONTEXT, np.int32)
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tables = np.arange(len(lengths) * blocks, dtype=np.int32).reshape(-1, blocks)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(owner), dtype=np.int32) - query_start[owner] + (context - lengths)[owner]
    return Batch(
        tokens=np.zeros(len(owner), np.int32),
        positions=positions,
        query_start=query_start,
        context=context,
        tables=tables,
        write_blocks=tables[owner, positions // BLOCK_SIZE],
        write_offsets=positions % BLOCK_SIZE,
        sample_rows=query_start[1:] - 1,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.host", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="of which the median is given")
    given = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_args(given)
    facts = provenance(["python", "-m", "bench.gpu.host", *given], "numpy", "torch")
    print(json.dumps(facts | {"layers": LAYERS, "rows": measured(steps=options.steps)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
