"""What tests of operations share: backends, batches, sequences with K and V kept unpaged too for float64."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import kernels.cpu
import kernels.cuda.backend
import kernels.emulator.device
import kernels.reference  # noqa: F401 - all register themselves
from kernels import ops as kernel_ops
from kernels.cpu.backend import CpuOps
from kernels.cpu.build import BuildError
from kernels.cuda.backend import CudaOps
from kernels.cuda.calls import HEAD_DIMS
from kernels.ops import MAX_CODE, AnyOps, Attention, Batch, Cache, CacheShape, Int32, Norm
from tests.kernels.cpu_variants import is_one_named, library, names

Float64 = npt.NDArray[np.float64]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the largest number expected, or of 1 if that is more."""
BACKENDS = ["cpu"] if is_one_named() else [name for name in kernel_ops.names() if name != "cuda"]
"""Not `cuda`: these tests read results without waiting. bench.gpu.__main__ tests that backend on a GPU."""


HARD_VECTORS = torch.tensor(
    [
        [0, 0, 0, 0],
        [127, 0.5, 1.5, -2.5],  # ties
        [-127, 126.5, -0.5, 3.49],
        [1e-44, -1e-44, 0, 1e-45],  # the scale is 0
        [9e-43, -9e-43, 1e-43, 0],  # the scale is denormal, and a quotient above the largest code
        [3e38, -3e38, 1, 1e-30],
        [np.nan, 1, 2, 3],
        [-np.inf, 1, 2, 3],
        [1, np.inf, np.nan, 3],
        [-1, -2, -3, -4],
    ]
)
"""Of K and V in 8 bits. Three of them, 6 to 8, are not finite."""


def _types_of(backends: list[str]) -> pytest.MarkDecorator:
    cases = [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in backends
        for dtype in (torch.float16 if name == "emulator" else torch.float32, torch.bfloat16)
    ]
    return pytest.mark.parametrize(("ops", "dtype"), cases, indirect=["ops"])


in_its_types = _types_of(BACKENDS)
"""For a test of `ops` and `dtype`."""
in_types_of_kernels = _types_of([name for name in BACKENDS if name != "reference"])
"""As in_its_types, without torch's operations, of which the sums of a row depend on the rows beside it."""
in_every_variant = _types_of([*(f"cpu-{name}" for name in names()), *(name for name in BACKENDS if name != "cpu")])
"""As in_its_types, the cpu backend in every instruction set."""
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a unit in the last place, relative."""
SMALLEST = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}
"""Half of the smallest number, which numbers near zero are off."""
FORMULAS: dict[str, Callable[[Any], Any]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}
"""Activations in float64."""


def normed(x: Float64, norm: Norm) -> Float64:
    if norm.layer_norm:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps) * wide(norm.weight)
    return x if norm.bias is None else x + wide(norm.bias)


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> AnyOps:
    """Every backend that this machine can run."""
    name, _, variant = request.param.partition("-")
    try:
        return CpuOps(library(variant), 1) if variant else kernel_ops.create(name, torch.device("cpu"))
    except BuildError:
        if shutil.which("g++"):  # kernels that do not compile are no reason to skip
            raise
        pytest.skip(f"{request.param}: no g++")


def wide(x: Tensor) -> Float64:
    return x.double().numpy()


def close(found: Tensor, expected: Float64, dtype: torch.dtype, extra: float = 0.0) -> None:
    assert found.shape == expected.shape
    error = np.abs(wide(found) - expected).max()
    assert error <= TOLERANCE[dtype] * max(1.0, np.abs(expected).max()) + extra, error


def near(found: Tensor, expected: Any, absolute: float = 1e-6, relative: float = 3e-6) -> None:
    """Equal up to `absolute`, `relative` and one rounding to the type that was stored."""
    limit = absolute + SMALLEST[found.dtype] + (relative + ROUNDING[found.dtype]) * np.abs(expected)
    error = np.abs(wide(found) - expected)
    assert (error <= limit).all(), f"{np.nanmax(error - limit)} too far, shape {tuple(found.shape)}"


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


def widths_of(ops: AnyOps, dtype: torch.dtype, widths: tuple[int, ...]) -> list[int]:
    """Those of these rows that the backend has, having seen it refuse the others."""
    refused = [width for width in widths if isinstance(ops, CudaOps) and width % 8]
    for width in refused:
        with pytest.raises(ValueError, match=str(width)):
            ops.activate(torch.zeros(1, width, dtype=dtype), "relu")
    return [width for width in widths if width not in refused]


def batch_of(
    tokens: list[list[int]], starts: list[int], tables: Int32, samples: list[bool] | None = None, block_size: int = 16
) -> Batch:
    """Rows tokens[s] of sequence s from position starts[s] on; all sequences sample unless `samples` says otherwise."""
    lengths = np.array([len(row) for row in tokens])
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    owner = np.repeat(np.arange(len(tokens)), lengths)
    positions = np.concatenate([np.arange(a, a + n, dtype=np.int32) for a, n in zip(starts, lengths, strict=True)])
    chosen = np.ones(len(tokens), np.bool_) if samples is None else np.array(samples)
    return Batch(
        tokens=np.array(list(chain.from_iterable(tokens)), np.int32),
        positions=positions,
        query_start=query_start,
        context=(np.array(starts) + lengths).astype(np.int32),
        tables=tables,
        write_blocks=tables[owner, positions // block_size],
        write_offsets=positions % block_size,
        sample_rows=query_start[1:][chosen] - 1,
    )


def chunk(tokens: list[int], sample_rows: list[int], first: int = 0) -> Batch:
    """One sequence's tokens from position `first` on, its blocks 0, 1, 2, ..."""
    tables = np.arange(-(-(first + len(tokens)) // 16), dtype=np.int32)[None]
    return replace(batch_of([tokens], [first], tables), sample_rows=np.array(sample_rows, np.int32))


Chunk = tuple[int, int, int]
"""Of a step: a sequence, its first position and its end."""


def attended(
    q: Float64,
    k: Float64,
    v: Float64,
    scale: float,
    slopes: Float64 | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Float64 | None = None,
    causal: bool = True,
) -> Float64:
    """Return what the last rows q [rows, heads, head_dim] make of k and v [positions, kv_heads, head_dim]."""
    group, end = q.shape[1] // k.shape[1], len(k)
    k, v = (x.repeat(group, axis=1).swapaxes(0, 1) for x in (k, v))
    distance = np.arange(end) - np.arange(end - len(q), end)[:, None]
    scores = q.swapaxes(0, 1) @ k.swapaxes(1, 2) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if slopes is not None:
        scores += slopes[:, None, None] * distance
    scores[:, (distance > 0) & causal | (distance <= -(window or 1 << 30))] = -np.inf
    most = scores.max(-1, keepdims=True)
    total = np.exp(scores - most).sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks[:, None, None] - most)
    found: Float64 = (np.exp(scores - most) / total @ v).swapaxes(0, 1)
    return found


def coded(x: Tensor, kv_dtype: str) -> Tensor:
    """Return the numbers [..., head_dim] that codes of `kv_dtype` and scales stand for, in float32."""
    scale = x.float().abs().amax(-1, keepdim=True) / MAX_CODE[kv_dtype]
    numbers = (x.float() / torch.where(scale > 0, scale, torch.inf)).clip(-MAX_CODE[kv_dtype], MAX_CODE[kv_dtype])
    codes = torch.round(numbers) if kv_dtype == "int8" else numbers.to(torch.float8_e4m3fn).float()
    return codes * scale


def e4m3_neighbours(count: int) -> Tensor:
    """Return all numbers of e4m3, ties of two and the float32 numbers beside ties, then zeros up to `count`."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    found = torch.cat([codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])])
    return torch.cat([found, -found, torch.zeros(count - 2 * len(found))])


def rounded(x: Tensor, kv_dtype: str) -> Tensor:
    """Return what attention reads of x [..., head_dim] in a pool of `kv_dtype`."""
    return x if kv_dtype == "auto" else coded(x, kv_dtype).to(x.dtype)


class Sequences:
    """Random sequences in a paged cache with shuffled blocks, in layer 1 of 3.

    What no row may see is NaN: blocks before they are written, and the block that tables name behind their ends.
    """

    def __init__(
        self,
        ops: AnyOps,
        dtype: torch.dtype,
        contexts: list[int],
        block_size: int,
        attention: Attention,
        head_dim: int = 64,
        kv_heads: int = 2,
        kv_dtype: str = "auto",
        spread: float = 1.0,
    ) -> None:
        """spread: of the queries."""
        self.ops, self.dtype, self.attention, self.kv_dtype = ops, dtype, attention, kv_dtype
        self.block_size, self._used = block_size, [-(-n // block_size) for n in contexts]
        shape = CacheShape(sum(self._used) + 3, 2, 3, kv_heads, block_size, head_dim, dtype, kv_dtype)
        self.cache = new_cache(ops, shape)
        heads = attention.heads
        self.queries = [spread * random((n, heads, head_dim), 170 + s, dtype) for s, n in enumerate(contexts)]
        self.keys = [random((n, kv_heads, head_dim), 10 + s, dtype) for s, n in enumerate(contexts)]
        self.values = [random((n, kv_heads, head_dim), 90 + s, dtype) for s, n in enumerate(contexts)]
        self.place(0)

    def place(self, seed: int) -> None:
        """Give the sequences other blocks, with nothing written."""
        shape = self.cache.shape
        order = np.random.default_rng(seed).permutation(shape.blocks).astype(np.int32)
        rows = shape.blocks * self.block_size
        nothing = torch.full((rows, shape.kv_heads, shape.head_dim), torch.nan, dtype=self.dtype)
        queries = torch.zeros(rows, self.attention.heads, shape.head_dim, dtype=self.dtype)
        self._write(self._prepare(order[None], [(0, 0, rows)]), queries, nothing, nothing)
        self.tables = np.full((len(self._used), max(self._used) + 1), order[-1], np.int32)
        first = 0
        for s, count in enumerate(self._used):
            self.tables[s, :count] = order[first : first + count]
            first += count

    def write(self) -> None:
        """Write all K and V."""
        self.run([(s, 0, len(keys)) for s, keys in enumerate(self.keys)])

    def run(self, chunks: list[Chunk]) -> Tensor:
        """Write K and V of these rows and attend; return [rows, heads * head_dim]."""
        prepared = self._prepare(self.tables[[s for s, _, _ in chunks]], chunks)
        parts = [torch.cat([x[s][a:b] for s, a, b in chunks]) for x in (self.queries, self.keys, self.values)]
        return self.ops.attention(self._write(prepared, *parts), self.attention, prepared, self.cache, 1)

    def check(self, chunks: list[Chunk]) -> None:
        """Run them and compare with float64."""
        found, attention = self.run(chunks), self.attention
        k, v = ([rounded(x, self.kv_dtype) for x in kind] for kind in (self.keys, self.values))
        slopes, sinks = (None if x is None else wide(x) for x in (attention.slopes, attention.sinks))
        rest = (attention.scale, slopes, attention.window, attention.softcap, sinks, attention.causal)
        expected = [attended(wide(self.queries[s][a:b]), wide(k[s][:b]), wide(v[s][:b]), *rest) for s, a, b in chunks]
        exact = np.concatenate(expected).reshape(found.shape)
        close(found, exact, self.dtype)
        if self.ops.name == "cpu":  # half a unit of the last place, and float32's own error where it is near a border
            limit = np.abs(exact) * (2.0**-8 if self.dtype == torch.bfloat16 else 0) + 2e-5
            assert (np.abs(wide(found) - exact) <= limit).all()

    def _prepare(self, tables: Int32, chunks: list[Chunk]) -> Any:
        tokens, starts = [[0] * (b - a) for _, a, b in chunks], [a for _, a, _ in chunks]
        return self.ops.prepare(batch_of(tokens, starts, tables, block_size=self.block_size), self.cache)

    def _write(self, prepared: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        qkv = torch.cat([queries.flatten(1), keys.flatten(1), values.flatten(1)], dim=1)
        return self.ops.rope_and_write(qkv, self.attention, prepared, self.cache, 1)
