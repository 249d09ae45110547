"""The kernels of mixtures of experts, emulated in three orders of threads, against float64.

What they compute together is in tests/kernels/test_ops.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.backend import CudaOps
from kernels.cuda.operations import experts
from kernels.cuda.planner import Room
from kernels.emulator import device as emulated
from kernels.emulator.device import EmulatedDevice
from kernels.emulator.program import Program
from kernels.ops import Int32, Routing
from tests.kernels.cuda.decoders import World
from tests.kernels.cuda.decoders import paths as paths  # the fixture
from tests.kernels.cuda.programs import (
    ORDERS,
    SEEDS,
    TYPES,
    UNTOUCHED,
    assert_fences,
    device_of,
    device_of_threads,
    int32,
    launch,
    numbers,
    untouched,
)
from tests.kernels.sequences import FORMULAS, Float64, batch_of, near, random, wide
from tests.support.compiler import needs_compiler

pytestmark = [needs_compiler, pytest.mark.sanitized]

dtypes = pytest.mark.parametrize("dtype", TYPES)
orders = pytest.mark.parametrize("order", ORDERS)


class Routed:
    """What `route` writes, with room for tiles that are not needed."""

    def __init__(self, order: int, logits: Tensor, top_k: int, normalize: bool, tile_rows: int, present: Any = None):
        rows, count = logits.shape
        pairs = rows * top_k
        self.weights = untouched(pairs, dtype=torch.float32)
        self.chosen, self.order, finished = int32(*[-7] * pairs), int32(*[-7] * pairs), int32(0)
        self.tiles = int32(*[-7] * (4 * calls.most_tiles(pairs, count, tile_rows))).reshape(-1, 4)
        addresses = (self.weights.data_ptr(), self.order.ctypes.data, self.tiles.ctypes.data, finished.ctypes.data)
        there = 0 if present is None else present.ctypes.data
        chosen = self.chosen.ctypes.data
        call = calls.route(rows, count, top_k, tile_rows, normalize, logits.data_ptr(), chosen, *addresses, there)
        launch(call, order)
        assert finished[0] == 0 and not self.weights.isnan().any()
        assert_fences(self.weights)


def sorted_pairs(chosen: Int32, count: int, tile_rows: int) -> tuple[Int32, Int32]:
    """Return the pairs by expert, and the tiles that they make."""
    order = np.argsort(chosen, kind="stable").astype(np.int32)
    order = order[(chosen < 0).sum() :]
    ends = np.cumsum(np.bincount(chosen[order], minlength=count))
    tiles: list[tuple[int, int, int, int]] = []
    for expert, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        first_tile = len(tiles)
        tiles += [(expert, first, end, first_tile)] * -(-(end - first) // tile_rows)
    return order, np.array(tiles, np.int32).reshape(-1, 4)


@orders
@pytest.mark.parametrize(
    ("rows", "count", "top_k", "normalize", "tile_rows"),
    [(1, 5, 5, False, 16), (33, 128, 8, True, 16), (70, 8, 2, True, 64), (40, 1024, 33, True, 16)],
)
def test_rows_are_given_to_experts_and_sorted_by_them(
    order: int, rows: int, count: int, top_k: int, normalize: bool, tile_rows: int
) -> None:
    """Every third row is not there; logits are few and equal."""
    logits = numbers(rows, count, scale=2).mul_(4).round_().div_(4)
    there = np.arange(rows) % 3 != 1
    found = Routed(order, logits, top_k, normalize, tile_rows, int32(*(there - 1).tolist()))
    best = np.argsort(-wide(logits), axis=1, kind="stable")[:, :top_k]
    shares = np.exp(wide(logits))
    shares = np.take_along_axis(shares, best, 1) / (1 if normalize else shares.sum(1, keepdims=True))
    if normalize:
        shares /= shares.sum(1, keepdims=True)
    chosen = np.where(there[:, None], best, -1).ravel()
    assert found.chosen.tolist() == chosen.tolist()
    near(found.weights, (shares * there[:, None]).ravel())
    expected_order, tiles = sorted_pairs(chosen, count, tile_rows)
    assert found.tiles[: len(tiles)].tolist() == tiles.tolist() and (found.tiles[len(tiles) :, 0] == -1).all()
    for first, end in {(first, end) for _, first, end, _ in tiles.tolist()}:
        assert sorted(found.order[first:end]) == expected_order[first:end].tolist()
    assert (found.order[len(expected_order) :] == -7).all()


@orders
@dtypes
@pytest.mark.parametrize("size", calls.EXPERTS_TILES)
@pytest.mark.parametrize(
    ("inputs", "outputs", "activation"), [(8, 72, "silu"), (264, 136, "gelu"), (456, 8, ""), (136, 136, "")]
)
def test_products_are_those_of_each_pairs_expert(
    order: int, inputs: int, outputs: int, activation: str, size: int, dtype: str
) -> None:
    """Four experts, one without rows, one with more than a tile; one row is not there. Tiles are more than needed."""
    kind, rows, top_k = TYPES[dtype], size + 3, 2
    chosen = np.stack([np.zeros(rows), 2 + np.arange(rows) % 2], 1).astype(np.int32).ravel()
    chosen[2:4] = -1
    places, tiles = sorted_pairs(chosen, 4, size)
    room = calls.most_tiles(rows * top_k, 4, size)
    of_tiles = np.concatenate([tiles, np.full((room - len(tiles), 4), -1, np.int32)])
    x = numbers(rows if activation else len(places), inputs, dtype=kind)
    matrices = numbers(4, outputs * (2 if activation else 1), inputs, dtype=kind, seed=1, scale=inputs**-0.5)
    out = untouched(rows * top_k, outputs, dtype=kind)
    call = calls.experts(
        dtype,
        size,
        room,
        inputs,
        outputs,
        top_k,
        x.data_ptr(),
        matrices.data_ptr(),
        out.data_ptr(),
        (of_places := int32(*places.tolist())).ctypes.data,
        (tile_array := int32(*of_tiles.ravel().tolist())).ctypes.data,
        activation,
    )
    launch(call, order)
    expected: Float64 = np.full(out.shape, UNTOUCHED)
    for place, pair in enumerate(places):
        row, to = (pair // top_k, place) if activation else (place, pair)
        product = wide(matrices[chosen[pair]]) @ wide(x[row])
        gate, up = np.split(product, 2) if activation else (product, product)
        expected[to] = FORMULAS[activation](gate) * up if activation else product
    near(out, expected, 4e-6, 4e-6)
    assert_fences(x, matrices, out)
    assert of_places.tolist() == places.tolist() and tile_array.tolist() == of_tiles.ravel().tolist()


@orders
@dtypes
@pytest.mark.parametrize("width", [8, 136, 2312])
def test_combine_weighs_and_rounds_once(order: int, width: int, dtype: str) -> None:
    kind = TYPES[dtype]
    x, weights = numbers(12, width, dtype=kind), numbers(12, seed=1).abs_()
    shared, gate, out = numbers(3, width, dtype=kind, seed=2), numbers(3, seed=3), untouched(3, width, dtype=kind)
    addresses = (x.data_ptr(), weights.data_ptr(), out.data_ptr())
    expected = (wide(x) * wide(weights)[:, None]).reshape(3, 4, width).sum(1)
    launch(calls.combine(dtype, 3, width, 4, *addresses), order)
    near(out, expected)
    launch(calls.combine(dtype, 3, width, 4, *addresses, shared.data_ptr(), gate.data_ptr()), order)
    near(out, expected + wide(shared) / (1 + np.exp(-wide(gate)))[:, None])
    assert_fences(x, weights, shared, gate, out)


class Layer:
    """Eight experts of hidden size 72 and intermediate size 40."""

    def __init__(self, ops: CudaOps) -> None:
        self.ops = ops
        gate_up, down = (
            [ops.pack_linear([random(shape, seed, torch.bfloat16) / 8], *shape, None) for seed in range(8)]
            for shape in ((80, 72), (72, 40))
        )
        self.packed = ops.pack_experts(gate_up, down)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        x, logits = (on_device(self.ops, one) for one in (x, logits))
        return self.ops.experts(x, logits, self.packed, Routing(3, True, "silu"))


def on_device(ops: CudaOps, x: Tensor) -> Tensor:
    there = ops.gpu.empty(tuple(x.shape), x.dtype)
    ops.gpu.main.run(lambda: there.copy_(x))
    return there


@orders
def test_bits_of_a_row_depend_neither_on_the_batch_nor_on_the_tile(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(CudaOps(device_of_threads(order)))
    x, logits = random((90, 72), 1, torch.bfloat16), random((90, 8), 2, torch.float32)
    found: dict[tuple[int, int], Tensor] = {}
    for size in calls.EXPERTS_TILES:
        monkeypatch.setattr(experts, "tile_rows", lambda *_, size=size: size)
        for rows in (1, 7, 90):
            found[size, rows] = layer(x[:rows], logits[:rows])
    layer.ops.mark().wait()
    for (_, rows), out in found.items():
        assert torch.equal(out, found[16, 90][:rows])


@pytest.mark.parametrize("order", SEEDS)
def test_work_that_is_put_off_finds_its_own_choice(order: int | None) -> None:
    layer, together = (Layer(CudaOps(device_of(seed))) for seed in (order, None))
    given = [(random((20, 72), seed, torch.bfloat16), random((20, 8), 50 + seed, torch.float32)) for seed in range(6)]
    found = [layer(*one) for one in given]
    layer.ops.mark().wait()
    for one, out in zip(given, found, strict=True):
        expected = together(*one)
        together.ops.mark().wait()
        assert torch.equal(out, expected)


class Watched:
    """A program that notes, of each `route`, which rows it gave to experts."""

    def __init__(self, program: Program, given: list[list[bool]]) -> None:
        self.program, self.given = program, given

    def launch(self, name: str, grid: Any, block: Any, shared: int, params: Any, **named: Any) -> None:
        self.program.launch(name, grid, block, shared, params, **named)
        if name == "route":
            pairs = (ctypes.c_int32 * int(params["rows"][0] * params["top_k"][0])).from_address(
                int(params["chosen"][0])
            )
            self.given.append([expert >= 0 for expert in pairs[:: int(params["top_k"][0])]])


def test_padding_of_a_recording_is_given_to_no_expert(paths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first layer it lies behind the rows of the step, in the last one behind those that sample."""
    given, program_of = list[list[bool]](), emulated.program_of
    monkeypatch.setattr(emulated, "program_of", lambda *named: Watched(program_of(*named), given))
    world = World(paths("mixtral"), EmulatedDevice(), True)
    batch = batch_of([[1], [2], [3]], world.ends, world.tables, [True, False, True])  # in the graph of four
    assert world.ops.prepare(batch, world.cache).graph == Room(4, 4, 0)
    given.clear()
    logits = world.forward(world.ops.prepare(batch, world.cache))
    world.ops.mark().wait()
    assert logits.data_ptr() == world.forward.logits.data_ptr(), "the routers' logits take no room of the head's"
    assert given == [[True, True, True, False], [True, True, False, False]]


def test_most_tiles_are_as_many_as_any_rows_make() -> None:
    generator = np.random.default_rng(1)
    for pairs, count, size in ((1, 8, 16), (40, 8, 16), (64, 128, 16), (700, 5, 64)):
        most = calls.most_tiles(pairs, count, size)
        for _ in range(20):
            chosen = generator.choice(count, pairs, p=generator.dirichlet(np.full(count, 0.3))).astype(np.int32)
            assert len(sorted_pairs(chosen, count, size)[1]) <= most
        spread = min(count, pairs)
        chosen = np.concatenate([np.arange(spread), np.full(pairs - spread, 0)]).astype(np.int32)
        assert len(sorted_pairs(chosen, count, size)[1]) == most


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    assert [experts.tile_rows(pairs, 128) for pairs in (8, 2048, 2049, 65536, 65537)] == [16, 16, 64, 64, 128]


def test_more_experts_than_a_block_has_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="3 of 1025 experts for a row; the CUDA kernels take 1024 at most"):
        calls.route(1, 1025, 3, 16, True, 0, 0, 0, 0, 0, 0)
