"""Iterations of sequences with LoRA adapters beside the same ones without: `orcinus bench engine --adapters`.

The adapters have made-up numbers and are beside all linear layers; the sequences have them in turn.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from bench.engine.cases import Case, Driver, run, work
from services.worker.adapters.peft import PREFIX, linear_layers
from services.worker.engine import Engine
from services.worker.models.config import DecoderConfig
from shared.models.adapters import CONFIG, STORE, WEIGHTS, digest_of

RANK = 16
ROUNDS = 6
"""In each the numbers of adapters follow one another, in the next backwards: what else the machine does hits all."""
CASES = (Case("decode-8", 8, 1), Case("decode-32", 32, 1))
"""Short contexts: a model of a billion parameters takes minutes for those of the other cases on a CPU."""


def stored(folder: Path, config: DecoderConfig, count: int) -> list[bytes]:
    """Write adapters beside all linear layers to the store of a folder; return their digests.

    They differ in their scale alone, so all have one file of numbers.
    """
    generator = torch.Generator().manual_seed(20261128)
    tensors = {}
    for name, (outputs, inputs) in linear_layers(config).items():
        for part, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
            drawn = torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.1 * shape[1] ** -0.5, generator=generator)
            tensors[f"{PREFIX}{name}.{part}.weight"] = drawn
    made = folder / STORE / "made"
    made.mkdir(parents=True)
    save_file(tensors, made / WEIGHTS)
    digests = []
    for number in range(1, count + 1):
        (made / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * number}))
        digests.append(digest_of(made))
        place = folder / STORE / digests[-1].hex()
        place.mkdir()
        os.link(made / WEIGHTS, place / WEIGHTS)
        (made / CONFIG).rename(place / CONFIG)
    return digests


def added_work(engine: Engine, case: Case, adapters: int) -> tuple[float, float]:
    """Return the bytes of the adapters of a step, each read once, and the operations of its rows."""
    sizes = linear_layers(engine.config).values()
    down, up = engine.dtype.itemsize, engine.ops.up_dtype(engine.dtype).itemsize
    used, rows = min(adapters, case.sequences), case.decodes + case.prefill * case.prompts
    operations = 2.0 * RANK * rows * sum(outputs + inputs for outputs, inputs in sizes)
    read = float(used * RANK * sum(up * outputs + down * inputs for outputs, inputs in sizes))
    return read, operations if adapters else 0.0


def beside(engine: Engine, case: Case, steps: int, digests: Sequence[bytes], counts: Sequence[int]) -> dict[str, Any]:
    """Return the JSON of one case: iterations without adapters, and with so many of the digests beside them.

    Ratios are medians over rounds, each of `steps` iterations; `bytes_ratio` is that of the bytes of weights and KV.
    """
    numbers = (0, *counts)
    wall: dict[int, list[float]] = {number: [] for number in numbers}
    cpu: dict[int, list[float]] = {number: [] for number in numbers}
    for turn in range(ROUNDS):
        for number in numbers if turn % 2 == 0 else reversed(numbers):
            driver = Driver(engine, case, steps + 1, digests[:number])
            run(engine, driver, 1, 0)
            begun = time.process_time_ns()
            results, _ = run(engine, driver, steps, 0)
            cpu[number].append((time.process_time_ns() - begun) / steps)
            wall[number].append(median(result.timings.forward_ns for result in results))
    engine.reset()
    base = work(engine, case, steps)[0]
    added = {number: added_work(engine, case, number)[0] for number in counts}
    return {
        "case": case.name,
        "forward_ms": median(wall[0]) / 1e6,
        "cpu_ms": median(cpu[0]) / 1e6,
        "read_mb": base / 1e6,
        "adapters": [
            {
                "adapters": number,
                "rank": RANK,
                "forward_ratio": median(a / b for a, b in zip(wall[number], wall[0], strict=True)),
                "cpu_ratio": median(a / b for a, b in zip(cpu[number], cpu[0], strict=True)),
                "bytes_ratio": 1 + added[number] / base,
            }
            for number in counts
        ],
    }
