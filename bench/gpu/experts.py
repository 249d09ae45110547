"""Mixtures of experts: a layer's experts alone, and steps of an engine with a model of that shape."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.engine.cases import Case, layer_matrices
from bench.gpu.context import Context
from bench.gpu.engine import config_of, started, timed
from bench.gpu.kernels import known_peaks, setup
from bench.kernels.case import run
from bench.kernels.experts import mixtures
from bench.kernels.shapes import QWEN_30B, SMALL_MIXTURE, TINY, Mixture, Model
from services.worker.engine import Engine

LAYERS = 6
"""Of the model's 48: a card has room for all, but to draw their weights takes a minute."""
MODEL = Model("Qwen3-30B-A3B", 2048, 32, 4, 128, 6144, 151936, LAYERS, 32768)
CASES = (
    Case("decode-1", 1, 512),
    Case("decode-8", 8, 512),
    Case("decode-64", 64, 512),
    Case("prefill-512", 0, 0, 512, 1),
)
QUICK_CASES = (Case("decode-2", 2, 20),)
STEPS, REFERENCE_STEPS = 60, 6


def experts(context: Context) -> Iterator[tuple[str, Any]]:
    """Yield `rows` of a layer's experts, and `steps` of an engine with our kernels and with the reference's."""
    made = setup(context)
    peaks = known_peaks(context, made)
    with torch.inference_mode():
        bench = made.bench(peaks)
        for row in run(bench, mixtures(context.quick), lambda name: print(name, file=sys.stderr, flush=True)):
            yield "rows", [row.as_dict()]
    del made, bench
    model, mixture, cases = (TINY, SMALL_MIXTURE, QUICK_CASES) if context.quick else (MODEL, QWEN_30B, CASES)
    ways = ((context.device, 3),) if context.quick else (("cuda", STEPS), ("reference", REFERENCE_STEPS))
    for kernels, steps in ways:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_with_experts(model, mixture)))
            engine = started(Path(folder), context, cases, steps, kernels=kernels)
        for case in cases:
            floor_us = peaks.floor_us(*work(engine, mixture, case, steps), engine.dtype)
            step = timed(engine, case, steps, 1 if engine.overlaps else 0)
            yield "steps", [{"kernels": kernels, "layers": model.layers, **step, "floor_us": floor_us}]
        del engine


def config_with_experts(model: Model, mixture: Mixture) -> dict[str, Any]:
    """Return the config.json of a Qwen3-MoE of that shape."""
    return {
        **config_of(replace(model, hidden=mixture.hidden)),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": mixture.intermediate,
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.top_k,
        "norm_topk_prob": True,
    }


def work(engine: Engine, mixture: Mixture, case: Case, steps: int) -> tuple[float, float]:
    """Return the bytes that an iteration must read, with even routing, and the operations of its matrices."""
    c, info, size = engine.config, engine.info(), engine.dtype.itemsize
    rows, sampled = case.decodes + case.prefill * case.prompts, case.sequences
    attention = sum(outputs * inputs for outputs, inputs in layer_matrices(c)[:2])
    expert, router = 3 * mixture.intermediate * mixture.hidden, mixture.experts * mixture.hidden
    touched = mixture.experts * (1 - (1 - mixture.top_k / mixture.experts) ** rows)
    head = c.vocab_size * c.hidden_size
    contexts = case.decodes * (case.context + (steps + 1) / 2) + case.prompts * case.prefill
    kv = contexts * info.block_bytes / info.block_size
    numbers = c.layers * (attention + router + touched * expert) + head
    used = c.layers * (attention + router + mixture.top_k * expert)
    return numbers * size + kv, 2.0 * (used * rows + head * sampled)
