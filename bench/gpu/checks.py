"""Checks of the kernels on the device: small cases of every kind against float64, test suites, sanitizers.

The cases are few and small enough to run under compute-sanitizer as well.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.gpu.context import Context
from bench.gpu.kernels import setup
from bench.kernels import experts as kernels_experts
from bench.kernels import rows as kernels_rows
from bench.kernels import sampling as kernels_sampling
from bench.kernels.attention import error_of_attention, queries
from bench.kernels.backends import Peaks, type_name
from bench.kernels.case import LIMITS, Bench, Maker
from bench.kernels.kv import Paged
from bench.kernels.shapes import QUICK, TINY
from bench.result import ROOT
from kernels.ops import Attention

HEADS = ((64, 8, 8), (64, 32, 1), (80, 4, 2), (96, 8, 2), (128, 32, 8), (128, 7, 1), (128, 16, 1), (256, 4, 2))
"""head_dim, query heads, KV heads."""
QUICK_HEADS = ((128, 7, 1),)

Sequences = tuple[str, tuple[int, ...], tuple[int, ...]]
"""What they are called, tokens of each context, the last of which are new."""

SEQUENCES: tuple[Sequences, ...] = (
    ("decode", (1, 15, 16, 17, 200, 1030), (1, 1, 1, 1, 1, 1)),
    ("prefill", (1, 33, 64, 130, 300), (1, 33, 5, 130, 65)),
    ("mixed", (500, 70, 90), (1, 70, 1)),
)
QUICK_SEQUENCES: tuple[Sequences, ...] = (("decode", (17, 70), (1, 1)), ("mixed", (20, 33), (1, 5)))

SANITIZED = {"memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "racecheck": {}}
"""Tools and what they need: without torch's cache every tensor has bounds of its own."""

NO_PEAKS = Peaks("", 1.0, 1.0, 1.0, {})
"""Checks time nothing. Under compute-sanitizer, to measure peaks takes minutes."""

FAILED_CODE = 99
SUITES = (
    "operations/test_rows",
    "operations/test_rope",
    "operations/test_adapters",
    "operations/test_quantized",
    "operations/test_experts",
    "operations/test_blocks",
    "operations/test_attention_decode",
    "operations/test_attention_prefill",
    "operations/test_sampling",
    "test_cache",
)
SUITE_S = 80


def checks(context: Context) -> Iterator[tuple[str, Any]]:
    """Yield `checks` (name, error, limit and verdict of each) and `wrong`, the number of failed ones."""
    made = setup(context)
    wrong = 0
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float16):
            bench = replace(made.bench(NO_PEAKS, dtype), plan=replace(QUICK, rows=(1, 5, 33)))
            heads, sequences = (QUICK_HEADS, QUICK_SEQUENCES) if context.quick else (HEADS, SEQUENCES)
            for name, limit, error in _errors(bench, heads, sequences):
                right = error <= limit
                wrong += not right
                known = error if math.isfinite(error) else None
                yield (
                    "checks",
                    [{"name": f"{name}, {type_name(dtype)}", "error": known, "limit": limit, "right": right}],
                )
    yield "wrong", wrong


def suites(context: Context) -> Iterator[tuple[str, Any]]:
    """Run the kernel tests, which use a GPU if there is one; needs pytest."""
    if importlib.util.find_spec("pytest") is None:
        yield "skipped", "pytest is not installed here"
        return
    for file in [] if context.quick else [f"tests/kernels/cuda/{name}.py" for name in SUITES]:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
        yield "suites", [_ran(file, command)]


def sanitizers(context: Context) -> Iterator[tuple[str, Any]]:
    """Run a small version of `checks` under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield "skipped", "compute-sanitizer is not on PATH"
        return
    for name, environment in SANITIZED.items():
        folder = context.out / name
        folder.mkdir(exist_ok=True)
        words = ["--part", "checks", "--device", context.device, "--quick", "--out", str(folder)]
        command = [tool, "--tool", name, "--error-exitcode", str(FAILED_CODE)]
        yield "sanitizers", [_ran(name, [*command, sys.executable, "-m", "bench.gpu", *words], environment)]


def _errors(
    bench: Bench, heads: Sequence[tuple[int, int, int]], sequences: Sequence[Sequences]
) -> Iterator[tuple[str, float, float]]:
    """Yield name, limit and error of each case; a raised error counts as infinite, with its text."""
    limit = LIMITS[bench.dtype]
    for head_dim, query, kv in heads:
        model = replace(TINY, head_dim=head_dim, heads=query, kv_heads=kv)
        small = replace(bench, plan=replace(bench.plan, model=model))
        for kind, contexts, rows in sequences:
            for how, attention in _kinds(small):
                name = f"attention {kind} d{head_dim} {query}/{kv} {how}"
                yield _error(name, limit, partial(_attention_error, small, contexts, rows, attention))
    makers: list[Maker] = [
        *kernels_rows.rows(bench.plan, bench.clock.ops.group_formats),
        *kernels_experts.mixtures(quick=True),
        *kernels_sampling.samplers(bench.plan),
    ]
    for name, make in makers:
        yield _error(name, limit if name.split()[0] != "sample" else 0.0, lambda make=make: make(bench).error())


def _error(name: str, limit: float, find: Any) -> tuple[str, float, float]:
    try:
        return name, limit, float(find())
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}"[:300], limit, float("inf")


def _kinds(bench: Bench) -> list[tuple[str, Attention]]:
    model = bench.plan.model
    plain = Attention(heads=model.heads, scale=model.head_dim**-0.5)
    slopes = bench.clock.random(model.heads, dtype=torch.float32).abs_()
    return [("plain", plain), ("window 40", replace(plain, window=40)), ("ALiBi", replace(plain, slopes=slopes))]


def _attention_error(bench: Bench, contexts: Sequence[int], rows: Sequence[int], attention: Attention) -> float:
    paged = Paged(bench, contexts, layers=2)
    return error_of_attention(bench, paged, queries(bench, paged, rows, attention), attention)


def _ran(name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the exit code of a command, or that it timed out, and the end of its output."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=SUITE_S,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return {"name": name, "exit": None, "said": f"longer than {SUITE_S} s: {said[-500:]}"}
    return {"name": name, "exit": done.returncode, "said": (done.stdout + done.stderr)[-500:]}
