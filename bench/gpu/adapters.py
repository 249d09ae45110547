"""LoRA adapters beside a model of Llama-8B's shape: steps of the engine with none, one and eight, and the two kernels.

The model and the adapters have made-up numbers. The sequences of a step have the adapters in turn.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.engine.adapters import RANK, added_work, stored
from bench.engine.cases import Case, work
from bench.gpu.context import Context
from bench.gpu.engine import config_of, started, timed
from bench.gpu.kernels import Setup, known_peaks, setup
from bench.kernels import case as kernels_case
from bench.kernels.case import Bench, Maker, recorded
from bench.kernels.clock import Recorded, error_of
from bench.kernels.kv import some_rows
from bench.kernels.shapes import BLOCK_SIZE, LLAMA_8B, TINY, Model
from kernels.cuda.device import launch
from kernels.cuda.operations.adapters import CudaLowRankPairs, CudaRowsByAdapter
from kernels.ops import CacheShape, LowRankShape

COUNTS = (0, 1, 8)
STEPS = 30
CASES = (
    Case("decode-64", 64, 1024),
    Case("decode-8", 8, 1024),
    Case("mixed-32-512", 32, 1024, 512, 1),
    Case("prefill-512", 0, 0, 512, 1),
    Case("prefill-4096", 0, 0, 4096, 1),
)
QUICK_CASES = (Case("decode-2", 2, 20), Case("mixed-2-20", 2, 20, 20, 1))
ROWS = ((8, 8), (64, 8), (64, 1), (544, 8), (4096, 8), (4096, 1))
"""Rows that the kernels are timed with, and how many adapters these have."""
QUICK_ROWS = ((3, 2),)
DOWN, UP = "low_rank_down", "low_rank_up"


def adapters(context: Context) -> Iterator[tuple[str, Any]]:
    """Yield what `steps` and `kernels` do."""
    yield from steps(context)
    yield from kernels(context)


def steps(context: Context) -> Iterator[tuple[str, Any]]:
    """Yield `device`, `rank`, and `steps` with a row for each case and number of adapters."""
    peaks = known_peaks(context)
    yield "device", peaks.device
    model, cases, count = (TINY, QUICK_CASES, 3) if context.quick else (LLAMA_8B, CASES, STEPS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config_of(model)))
        engine = started(folder, context, cases, count, adapter_dir=folder)
        digests = stored(folder, engine.config, max(COUNTS))
        yield "rank", RANK
        for case in cases:
            read_bytes, operations = work(engine, case, count)
            for adapters in COUNTS if case.sequences > 1 else COUNTS[:2]:
                row = timed(engine, case, count, 1, digests[:adapters])
                more_bytes, more = added_work(engine, case, adapters)
                floor_us = peaks.floor_us(read_bytes + more_bytes, operations + more, engine.dtype)
                yield "steps", [row | {"adapters": adapters, "floor_us": floor_us, "adapter_bytes": more_bytes}]


def kernels(context: Context) -> Iterator[tuple[str, Any]]:
    """Yield `rows`: each kernel beside each packed matrix of a layer."""
    made = setup(context)
    with torch.inference_mode():
        bench = made.bench(known_peaks(context, made))
        for row in kernels_case.run(bench, makers(made, QUICK_ROWS if context.quick else ROWS), print):
            yield "rows", [row.as_dict()]


def makers(made: Setup, rows: tuple[tuple[int, int], ...]) -> list[Maker]:
    """Return the cases of both kernels."""
    matrices = matrices_of(made.plan.model)
    return [
        (f"{op} {name} {count} of {adapters}", partial(one_kernel, made, op, name, shape, count, adapters))
        for count, adapters in rows
        for name, shape in matrices.items()
        for op in (DOWN, UP)
    ]


def matrices_of(model: Model) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return inputs and outputs of each part of the packed matrices of a layer."""
    hidden, attention, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "qkv": (hidden, (attention, kv, kv)),
        "o": (attention, (hidden,)),
        "gate_up": (hidden, (model.intermediate,) * 2),
        "down": (model.intermediate, (hidden,)),
    }


def one_kernel(
    made: Setup, op: str, name: str, shape: tuple[int, tuple[int, ...]], count: int, adapters: int, bench: Bench
) -> kernels_case.Case:
    """Return a case of one kernel beside one packed matrix, with an adapter beside each of its parts."""
    ops, dtype, (inputs, outputs) = bench.clock.ops, bench.dtype, shape
    parts, width, used = len(outputs), sum(outputs), min(count, adapters)
    rows = ops.new_rows_by_adapter()
    if not isinstance(rows, CudaRowsByAdapter):
        raise TypeError(f"{ops.name}: no backend of the CUDA kernels")
    rows.reserve(count, adapters)
    rows.set(1 + np.arange(count, dtype=np.int32) % adapters)
    downs = [bench.clock.random(parts, RANK, inputs, dtype=dtype, seed=at) for at in range(used)]
    ups = [bench.clock.random(width, RANK, dtype=torch.float32, seed=at) for at in range(used)]
    x, base = (bench.clock.random(count, size, dtype=dtype) for size in (inputs, width))
    inner_bytes = 4.0 * count * parts * RANK
    which, moved = (DOWN, UP).index(op), (x.nbytes + inner_bytes, 2.0 * base.nbytes + inner_bytes)
    weight_bytes = (used * parts * RANK * inputs * dtype.itemsize, used * RANK * width * 4)
    amounts = (weight_bytes[which] + moved[which], 2.0 * count * RANK * (parts * inputs if op == DOWN else width))
    copies = max(2, min(32, bench.plan.rotated_bytes // 16 // int(amounts[0])))
    made_pairs = [new_pairs(bench, inputs, outputs, adapters, count) for _ in range(copies)]
    for at in range(used):
        made_pairs[0].set(at + 1, dict(enumerate(downs[at].cpu())), dict(enumerate(ups[at].cpu().split(outputs))))
    inner = made_pairs[0].inner
    bench.clock.compute(inner.normal_)
    for pairs in made_pairs[1:]:
        for target, source in zip(pairs.memory, made_pairs[0].memory, strict=True):
            bench.clock.compute(partial(target.copy_, source))
    given = (x, base)[which]

    def go(operand: Tensor, _prepared: Any, i: int) -> Tensor:
        left, right = (operand, base) if op == DOWN else (x, operand)
        call = made_pairs[i].products(left, right, rows)[which]
        launch(made.device.main, call, left, inner, right, rows.items, *made_pairs[i].memory)
        return inner if op == DOWN else operand

    def exact() -> Tensor:
        result = inner.double() if op == DOWN else base.double()
        for at in range(used):
            these = torch.arange(at, count, adapters, device=x.device)
            if op == DOWN:
                result[these] = torch.einsum("ni,pri->npr", x[these].double(), downs[at].double())
                continue
            ranks = inner[these].double()
            added = [ranks[:, part] @ up.double().t() for part, up in enumerate(ups[at].split(outputs))]
            result[these] += torch.cat(added, dim=-1)
        return result

    def error() -> float:
        found = go(bench.clock.compute(given.clone), None, 0)
        return bench.clock.compute(lambda: error_of(found, exact()))

    batch, blocks = some_rows(count)
    model = bench.plan.model
    cache = ops.new_cache(CacheShape(blocks, 0, 1, model.kv_heads, BLOCK_SIZE, model.head_dim, dtype))
    work = Recorded(go, batch, cache, copies, given)
    return recorded(bench, op, f"{name}, {count} of {used}: {width} x {RANK} x {inputs}", work, amounts, error, {})


def new_pairs(bench: Bench, inputs: int, outputs: tuple[int, ...], adapters: int, rows: int) -> CudaLowRankPairs:
    """Return room for adapters beside a packed matrix, each part of which has a down matrix of its own."""
    shape = LowRankShape(inputs, outputs, tuple(range(len(outputs))), bench.dtype)
    pairs = bench.clock.ops.new_low_rank_pairs(shape)
    if not isinstance(pairs, CudaLowRankPairs):
        raise TypeError(f"{bench.clock.ops.name}: no backend of the CUDA kernels")
    pairs.reserve(adapters, RANK, rows)
    return pairs
