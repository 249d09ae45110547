"""A recorded forward pass is the same as its operations one by one, at any size, and says what it cannot do."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.backend import CpuOps, CpuPrepared
from kernels.cpu.cache import CpuCache
from kernels.cpu.library import load
from kernels.ops import Attention, Batch, CacheShape, Norm
from tests.kernels.cpu_variants import library, path
from tests.kernels.sequences import batch_of, coded

pytestmark = pytest.mark.sanitized

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, BLOCK = 97, 64, 4, 2, 16, 80, 3, 16
MAX_TOKENS, MAX_SAMPLES = 50, 12
FORK, CHILD_S = multiprocessing.get_context("fork"), 60
CORES_OF_THREADS = """
import json, os, sys, time, torch
from kernels.cpu.library import Library
from kernels.cpu.backend import CpuOps
from kernels.ops import Norm
cores = set(json.loads(sys.argv[2]))
ops, norm, used = CpuOps(Library(sys.argv[1], "given"), len(cores)), Norm(torch.ones(64), None, 1e-5), set()
until = time.monotonic() + 20
while used != cores and time.monotonic() < until:
    ops.norm(torch.ones((3, 64)), norm)
    used = set().union(*(os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")))
print(json.dumps(sorted(used)))
"""
"""Prints the cores of all threads of a process that the OpenMP runtime binds; they bind themselves as they start."""


class Model:
    """A small decoder written straight on the operations."""

    def __init__(self, ops: CpuOps, dtype: torch.dtype) -> None:
        self.ops = ops
        self._dtype = dtype
        self._random = torch.Generator().manual_seed(20261120)
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.tokens = ops.pack_embedding([self._matrix(VOCAB, HIDDEN)], VOCAB, HIDDEN)
        shapes = ((width, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER))
        self.layers = [[self._packed(*shape) for shape in shapes] for _ in range(LAYERS)]
        self.head = self._packed(VOCAB, HIDDEN)
        self.norm = Norm(torch.rand(HIDDEN, generator=self._random) + 0.5, None, 1e-5)
        angles = torch.rand(64, HEAD_DIM // 2, generator=self._random)
        self.attention = Attention(HEADS, HEAD_DIM**-0.5, torch.cat((angles.cos(), angles.sin()), -1))

    def _matrix(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random).to(self._dtype)

    def _packed(self, outputs: int, inputs: int) -> Any:
        weight = self._matrix(outputs, inputs) / inputs**0.5
        bias = torch.randn(outputs, generator=self._random)
        return self.ops.pack_linear([weight[:5], weight[5:]], outputs, inputs, bias)

    def forward(self, prepared: CpuPrepared, cache: CpuCache) -> Tensor:
        ops = self.ops
        residual = ops.embed(prepared, self.tokens)
        hidden = None
        for index, (qkv, out, up, down) in enumerate(self.layers):
            normed = ops.norm(residual, self.norm) if hidden is None else ops.add_norm(hidden, residual, self.norm)
            q = ops.rope_and_write(ops.linear(normed, qkv), self.attention, prepared, cache, index)
            attended = ops.attention(q, self.attention, prepared, cache, index)
            ops.add(ops.linear(attended, out), residual)
            hidden = ops.linear(ops.act_and_mul(ops.linear(ops.norm(residual, self.norm), up), "silu"), down)
            ops.activate(hidden, "gelu")
        assert hidden is not None
        ops.add(hidden, residual)
        return ops.logits(ops.norm(ops.select(residual, prepared), self.norm), self.head)


def make_cache(ops: CpuOps, dtype: torch.dtype) -> CpuCache:
    return ops.new_cache(CacheShape(40, 0, LAYERS, KV_HEADS, BLOCK, HEAD_DIM, dtype))


def recorded(ops: CpuOps, dtype: torch.dtype = torch.float32, tokens: int = MAX_TOKENS) -> tuple[Model, CpuCache, Any]:
    """A model, its cache and its compiled pass."""
    model, cache = Model(ops, dtype), make_cache(ops, dtype)
    return model, cache, ops.compile(lambda prepared: model.forward(prepared, cache), cache, tokens, MAX_SAMPLES)


@pytest.mark.parametrize(("kv_dtype", "error"), [("int8", 0.51 / 127), ("fp8", 2**-4)])
@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 1), (torch.bfloat16, 3)], ids=str)
def test_rope_writes_into_8_bit_pool_what_rounding_leaves(
    variant: str, dtype: torch.dtype, threads: int, kv_dtype: str, error: float
) -> None:
    """To the bit, but for K in bfloat16, which a plain pool rounds and the other one takes as it was before."""
    ops, head_dim = CpuOps(library(variant), threads), 20
    shape = CacheShape(3, 0, 2, KV_HEADS, BLOCK, head_dim, dtype)
    plain, held = ops.new_cache(shape), ops.new_cache(replace(shape, kv_dtype=kv_dtype))
    random = torch.Generator().manual_seed(1)
    angles = torch.rand(64, 8, generator=random)
    attention = Attention(HEADS, 1.0, torch.cat((angles.cos(), angles.sin()), -1))
    qkv = torch.randn((40, (HEADS + 2 * KV_HEADS) * head_dim), generator=random).to(dtype)
    batch = batch_of([[0] * 40], [0], np.array([[2, 0, 1]], np.int32))
    q = [ops.rope_and_write(qkv.clone(), attention, ops.prepare(batch, cache), cache, 1) for cache in (plain, held)]
    assert torch.equal(*q)
    for block in range(3):
        numbers = plain.read_block(block).float()
        expected = coded(numbers, kv_dtype)
        found = held.read_block(block).float()
        exact = found if dtype == torch.float32 else found[:, 1]
        assert torch.equal(exact, (expected if dtype == torch.float32 else expected[:, 1]).to(dtype).float())
        largest = numbers.abs().amax(-1, keepdim=True)
        assert ((found - numbers).abs() <= error * largest + 1.02 * 2**-7 * numbers.abs()).all()


def random_batch(rng: np.random.Generator, lengths: list[int]) -> Batch:
    """Prompts from position 0, each in blocks of its own; some of the sequences sample."""
    tables = rng.permutation(40)[: 2 * len(lengths)].reshape(len(lengths), 2).astype(np.int32)
    samples = rng.permutation(np.arange(len(lengths)) < rng.integers(1, len(lengths) + 1)).tolist()
    tokens = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    return batch_of(tokens, [0] * len(lengths), tables, samples)


@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 1), (torch.bfloat16, 3), (torch.float32, 2)], ids=str)
def test_a_recorded_pass_equals_its_operations_one_by_one(variant: str, dtype: torch.dtype, threads: int) -> None:
    ops = CpuOps(library(variant), threads)
    (model, cache, compiled), other = recorded(ops, dtype), make_cache(ops, dtype)
    rng = np.random.default_rng(20261121)
    for lengths in ([1], [7], [1, 1, 1], [17, 3, 1, 29], [4] * 12, [32, 18], [1]):
        batch = random_batch(rng, lengths)
        expected = model.forward(ops.prepare(batch, other), other)
        found = compiled(ops.prepare(batch, cache))
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
        for block in np.unique(batch.write_blocks):
            assert torch.equal(cache.read_block(int(block)), other.read_block(int(block)))


def test_callers_at_once_with_changing_threads_get_the_same_numbers(variant: str) -> None:
    one = CpuOps(library(variant), 1)
    model = Model(one, torch.bfloat16)
    x = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)

    def pair(ops: CpuOps) -> Tensor:
        return ops.logits(ops.norm(x, model.norm), model.head)

    def call(first: int) -> int:
        return sum(torch.equal(pair(CpuOps(library(variant), 1 + (first + i) % 5)), expected) for i in range(200))

    expected = pair(one)
    with ThreadPoolExecutor(2) as callers:
        assert list(callers.map(call, range(2))) == [200, 200]


def test_a_pass_ends_where_its_other_threads_never_come(variant: str) -> None:
    """As in a child: of the process's threads it has the one that forked."""
    ops = CpuOps(library(variant), 3)
    _, cache, compiled = recorded(ops)
    prepared = ops.prepare(random_batch(np.random.default_rng(20261127), [17, 3]), cache)
    expected = compiled(prepared).clone()
    results = FORK.SimpleQueue()
    child = FORK.Process(target=lambda: results.put(torch.equal(compiled(prepared), expected)), daemon=True)
    child.start()
    child.join(CHILD_S)
    child.kill()
    assert child.exitcode == 0
    assert results.get()


def test_threads_use_all_cores_where_openmp_binds_the_first(best_variant: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    binding = {"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"}
    program = [sys.executable, "-c", CORES_OF_THREADS, str(path(best_variant)), json.dumps(cores)]
    done = subprocess.run(program, env=os.environ | binding, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == cores


def test_exchanges_see_the_rows_of_each_step_between_operations(variant: str) -> None:
    """Also where one comes first, two meet, or the rows are those that sample; and they keep no buffer from others."""
    ops = CpuOps(library(variant), 2)
    model, cache = Model(ops, torch.float32), make_cache(ops, torch.float32)
    rows: list[int] = []

    def halve(x: Tensor) -> None:
        rows.append(len(x))
        x.mul_(0.5)

    def forward(prepared: CpuPrepared, exchange: Callable[..., None] = ops.exchange) -> Tensor:
        residual = ops.blank(prepared, HIDDEN, torch.float32)
        exchange(residual, lambda x: x.fill_(3.0))
        exchange(residual, halve)
        ops.add(ops.embed(prepared, model.tokens), residual)
        for _, _, up, down in model.layers:
            hidden = ops.linear(ops.act_and_mul(ops.linear(ops.norm(residual, model.norm), up), "silu"), down)
            exchange(hidden, halve)
            ops.add(hidden, residual)
        chosen = ops.select(residual, prepared)
        exchange(chosen, halve)
        return ops.logits(chosen, model.head)

    compiled = ops.compile(forward, cache, MAX_TOKENS, MAX_SAMPLES)
    assert not rows
    alone = ops.compile(lambda prepared: forward(prepared, lambda *_: None), cache, MAX_TOKENS, MAX_SAMPLES)
    assert compiled.workspace_bytes == alone.workspace_bytes
    rng = np.random.default_rng(20261124)
    for lengths in ([1], [17, 3, 1, 29], [4] * 12):
        prepared = ops.prepare(random_batch(rng, lengths), cache)
        expected = forward(prepared)
        seen = rows[:]
        assert seen == [sum(lengths)] * (1 + LAYERS) + [len(expected)]
        rows.clear()
        assert torch.equal(compiled(prepared), expected)
        assert rows == seen
        rows.clear()
        assert [name for name, _ in compiled.profile(prepared)].count("linear") == 2 * LAYERS + 1
        assert rows == seen
        rows.clear()


def test_buffers_are_used_again_and_a_step_larger_than_the_recording_is_refused(variant: str) -> None:
    ops = CpuOps(library(variant), 1)
    widest = 4 * MAX_TOKENS * 2 * INNER
    assert recorded(ops)[2].workspace_bytes < 6 * widest  # and not 9 buffers in each of the layers
    _, cache, compiled = recorded(ops, tokens=8)
    with pytest.raises(ValueError, match="a step of 9 tokens"):
        compiled(ops.prepare(random_batch(np.random.default_rng(20261122), [9]), cache))


def test_a_tensor_from_elsewhere_cannot_be_recorded(variant: str) -> None:
    ops = CpuOps(library(variant), 1)
    model, cache = Model(ops, torch.float32), make_cache(ops, torch.float32)
    elsewhere = torch.zeros(3, HIDDEN)
    with pytest.raises(ValueError, match="results of this backend's operations only"):
        ops.compile(lambda prepared: ops.linear(elsewhere, model.head), cache, MAX_TOKENS, MAX_SAMPLES)
    assert torch.equal(ops.linear(elsewhere, model.head), ops.linear(elsewhere, model.head))  # it works at once again


def test_a_profile_names_every_command(variant: str) -> None:
    ops = CpuOps(library(variant), 2)
    _, cache, compiled = recorded(ops)
    found = compiled.profile(ops.prepare(random_batch(np.random.default_rng(20261123), [5, 1]), cache))
    names = [name for name, _ in found]
    assert names[:4] == ["embed", "norm", "linear", "rope"]
    assert names.count("attention") == LAYERS
    assert names[-1] == "linear"
    assert all(took >= 0 for _, took in found)


def test_the_backend_runs_the_variant_that_is_named(request: pytest.FixtureRequest) -> None:
    name = request.config.getoption("--kernels-variant")
    if not name:
        pytest.skip("none is named")
    assert load().path == path(name)
