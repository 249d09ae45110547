"""What tests of operations share: backends, batches, sequences with K and V kept unpaged too for float64."""

from __future__ import annotations

import shutil

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import kernels.cpu
import kernels.cuda.backend
import kernels.reference  # noqa: F401 - all register themselves
from kernels import ops as kernel_ops
from kernels.cpu.build import BuildError
from kernels.cuda.backend import CudaOps
from kernels.cuda.calls import HEAD_DIMS
from kernels.ops import AnyOps, Attention, Batch, Cache, CacheShape

Float64 = npt.NDArray[np.float64]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the largest number expected, or of 1 if that is more."""
BACKENDS = [name for name in kernel_ops.names() if name != "cuda"]
"""Not `cuda`: these tests read results without waiting. bench.gpu.__main__ tests that backend on a GPU."""

in_its_types = pytest.mark.parametrize(
    ("ops", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in BACKENDS
        for dtype in (torch.float16 if name == "emulator" else torch.float32, torch.bfloat16)
    ],
    indirect=["ops"],
)
"""For a test of `ops` and `dtype`."""


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> AnyOps:
    """Every backend that this machine can run."""
    try:
        return kernel_ops.create(request.param, torch.device("cpu"))
    except BuildError:
        if shutil.which("g++"):  # kernels that do not compile are no reason to skip
            raise
        pytest.skip(f"{request.param}: no g++")


def close(found: Tensor, expected: Float64, dtype: torch.dtype, extra: float = 0.0) -> None:
    assert found.shape == expected.shape
    error = np.abs(found.double().numpy() - expected).max()
    assert error <= TOLERANCE[dtype] * max(1.0, np.abs(expected).max()) + extra, error


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def new_cache(ops: AnyOps, shape: CacheShape) -> Cache:
    """Skips the test where the backend has no blocks or heads of this size, having seen it refuse them."""
    wrong, size = None, shape.block_size
    if isinstance(ops, CudaOps):
        if shape.head_dim not in HEAD_DIMS:
            wrong = f"heads of {shape.head_dim}"
        elif size not in (16, 32, 64):
            wrong = f"block size {size}"
    elif ops.name == "cpu" and size % 16:
        wrong = f"block size {size}"
    if wrong is None:
        return ops.new_cache(shape)
    with pytest.raises(ValueError, match=wrong):
        ops.new_cache(shape)
    pytest.skip(f"{ops.name}: {wrong}")


def demand_width(ops: AnyOps, width: int, dtype: torch.dtype) -> None:
    """Skips the test where the backend has no rows of this width, having seen it refuse one."""
    if isinstance(ops, CudaOps) and width % 8:
        with pytest.raises(ValueError, match=str(width)):
            ops.activate(torch.zeros(1, width, dtype=dtype), "relu")
        pytest.skip(f"{ops.name}: rows of {width}")


def chunk(tokens: list[int], block_size: int, sample_rows: list[int], first: int = 0) -> Batch:
    """One sequence's tokens from position `first` on, its blocks 0, 1, 2, ..."""
    positions = np.arange(first, first + len(tokens), dtype=np.int32)
    end = first + len(tokens)
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=positions,
        query_start=np.array([0, len(tokens)], np.int32),
        context=np.array([end], np.int32),
        tables=np.arange(-(-end // block_size), dtype=np.int32)[None],
        write_blocks=positions // block_size,
        write_offsets=positions % block_size,
        sample_rows=np.array(sample_rows, np.int32),
    )


class Sequences:
    """Random sequences in a paged cache with shuffled blocks, in layer 1 of 3, two KV heads."""

    def __init__(
        self,
        ops: AnyOps,
        dtype: torch.dtype,
        contexts: list[int],
        block_size: int,
        attention: Attention,
        head_dim: int = 64,
    ) -> None:
        self.ops, self.dtype, self.attention = ops, dtype, attention
        self.block_size, self.head_dim = block_size, head_dim
        used = [-(-n // block_size) for n in contexts]
        self.cache = new_cache(ops, CacheShape(sum(used) + 3, 2, 3, 2, block_size, head_dim, dtype))
        order = np.random.default_rng(0).permutation(sum(used) + 3).astype(np.int32)
        self.tables = np.zeros((len(contexts), max(used)), np.int32)
        first = 0
        for s, count in enumerate(used):
            self.tables[s, :count] = order[first : first + count]
            first += count
        self.keys = [random((n, 2, head_dim), 10 + s, dtype) for s, n in enumerate(contexts)]
        self.values = [random((n, 2, head_dim), 90 + s, dtype) for s, n in enumerate(contexts)]

    def run(self, seed: int, which: list[int], starts: list[int], ends: list[int]) -> Tensor:
        """Writes K and V of these ranges and attends with random queries."""
        prepared = self.ops.prepare(self._batch(which, starts, ends), self.cache)
        spans = list(zip(which, starts, ends, strict=True))
        keys = torch.cat([self.keys[s][a:b] for s, a, b in spans])
        values = torch.cat([self.values[s][a:b] for s, a, b in spans])
        queries = self._queries(seed, len(keys))
        qkv = torch.cat([queries.flatten(1), keys.flatten(1), values.flatten(1)], dim=1)
        q = self.ops.rope_and_write(qkv, self.attention, prepared, self.cache, 1)
        return self.ops.attention(q, self.attention, prepared, self.cache, 1)

    def check(self, seed: int, which: list[int], starts: list[int], ends: list[int]) -> None:
        """Runs it and compares with float64."""
        found = self.run(seed, which, starts, ends)
        close(found, self._expected(seed, which, starts, ends), self.dtype)

    def _queries(self, seed: int, rows: int) -> Tensor:
        return random((rows, self.attention.heads, self.head_dim), seed, self.dtype)

    def _batch(self, which: list[int], starts: list[int], ends: list[int]) -> Batch:
        lengths = np.array(ends) - starts
        positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(starts, ends, strict=True)])
        owner = np.repeat(which, lengths)
        query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return Batch(
            tokens=np.zeros(len(positions), np.int32),
            positions=positions,
            query_start=query_start,
            context=np.array(ends, np.int32),
            tables=self.tables[which],
            write_blocks=self.tables[owner, positions // self.block_size],
            write_offsets=positions % self.block_size,
            sample_rows=query_start[1:] - 1,
        )

    def _expected(self, seed: int, which: list[int], starts: list[int], ends: list[int]) -> Float64:
        attention, group, out = self.attention, self.attention.heads // 2, []
        lengths = np.array(ends) - starts
        queries = np.split(self._queries(seed, int(lengths.sum())).double().numpy(), np.cumsum(lengths)[:-1])
        for s, a, b, q in zip(which, starts, ends, queries, strict=True):
            keys = self.keys[s][:b].double().numpy().repeat(group, axis=1)
            values = self.values[s][:b].double().numpy().repeat(group, axis=1)
            distance = np.arange(b) - np.arange(a, b)[:, None]
            scores = np.einsum("rhd,khd->hrk", q, keys) * attention.scale
            if attention.softcap:
                scores = attention.softcap * np.tanh(scores / attention.softcap)
            if attention.slopes is not None:
                scores += attention.slopes.double().numpy()[:, None, None] * distance
            hidden = (distance > 0) & attention.causal | (distance <= -(attention.window or 1 << 30))
            scores[:, hidden] = -np.inf
            most = scores.max(-1, keepdims=True)
            weights = np.exp(scores - most)
            sinks = -np.inf if attention.sinks is None else attention.sinks.double().numpy()[:, None, None]
            weights /= weights.sum(-1, keepdims=True) + np.exp(sinks - most)
            out.append(np.einsum("hrk,khd->rhd", weights, values).reshape(b - a, -1))
        return np.concatenate(out)
