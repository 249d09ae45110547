"""The kernels of adapters, emulated in three orders of threads, and what gives them rows and matrices.

What they compute, and that a row has the same bits in any batch, is in tests/kernels/test_ops.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.backend import CudaOps
from kernels.cuda.operations.adapters import items_of, most_items
from kernels.ops import LowRankPairs, LowRankShape, RowsByAdapter
from tests.kernels.cuda.programs import (
    ORDERS,
    SEEDS,
    TYPES,
    UNTOUCHED,
    assert_fences,
    device_of,
    fenced,
    int32,
    launch,
    numbers,
    untouched,
)
from tests.kernels.sequences import Float64, near, random, wide
from tests.support.compiler import needs_compiler

pytestmark = [needs_compiler, pytest.mark.sanitized]

dtypes = pytest.mark.parametrize("dtype", TYPES)


def rows_by_adapter(numbers_of_rows: list[int]) -> RowsByAdapter:
    rows = RowsByAdapter()
    rows.set(np.array(numbers_of_rows, np.int32))
    return rows


@dtypes
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 16), (1544, 40), (64, 1544)])
def test_kernels_read_and_write_what_their_items_say(order: int, inputs: int, outputs: int, dtype: str) -> None:
    """More items are launched than there are; ranks behind an adapter's are NaN, and so is all of an unused adapter."""
    kind, adapters, downs, rank = TYPES[dtype], 3, 2, 24
    of_rows = [1, 0, 3, 1, 3, 3] + [1] * 17
    ranks = [[8, 24], [0, 0], [0, 16]]
    x, out = numbers(len(of_rows), inputs, dtype=kind), numbers(len(of_rows), outputs, dtype=kind, seed=1)
    down = numbers(adapters, downs, rank, inputs, dtype=kind, seed=2, scale=inputs**-0.5)
    up = numbers(adapters, rank, outputs, seed=3)
    reads = [vector % 2 for vector in range(outputs // 8)]
    expected = wide(out)
    for row, number in enumerate(of_rows):
        for vector, read in enumerate(reads if number else []):
            used, columns = ranks[number - 1][read], slice(8 * vector, 8 * vector + 8)
            inner = wide(down[number - 1, read, :used]) @ wide(x[row])
            expected[row, columns] += inner @ wide(up[number - 1, :used, columns])
    for number, used in enumerate(ranks):
        for at in range(downs):
            down[number, at, used[at] :] = torch.nan
        up[number, max(used) :] = torch.nan
    inner_room = untouched(len(of_rows), downs, rank, dtype=torch.float32)
    items = int32(*items_of(rows_by_adapter(of_rows)).ravel().tolist())
    calls_of_both = calls.low_rank(
        dtype,
        9,
        inputs,
        outputs,
        downs,
        rank,
        x.data_ptr(),
        down.data_ptr(),
        inner_room.data_ptr(),
        up.data_ptr(),
        out.data_ptr(),
        items.ctypes.data,
        (of_ranks := int32(*np.ravel(ranks).tolist())).ctypes.data,
        (of_reads := int32(*reads)).ctypes.data,
    )
    for call in calls_of_both:
        launch(call, order)
    near(out, expected, 2e-5)
    assert_fences(x, out, down, up, inner_room)
    assert of_ranks.tolist() == np.ravel(ranks).tolist() and of_reads.tolist() == reads
    for row, number in enumerate(of_rows):
        for at, used in enumerate(ranks[number - 1] if number else (0, 0)):
            assert (inner_room[row, at, used:] == UNTOUCHED).all(), "ranks that are not there, and rows of the base"


def test_items_hold_every_row_once_beside_its_adapter() -> None:
    generator = np.random.default_rng(2)
    for rows, adapters in ((0, 3), (1, 1), (16, 1), (17, 1), (40, 40), (300, 5), (300, 200)):
        of_rows = generator.integers(0, adapters + 1, rows).tolist()
        items = items_of(rows_by_adapter(of_rows))
        assert items[0, 0] == len(items) - 1 <= most_items(rows, adapters)
        pairs = [(int(row), int(number)) for number, count, *members in items[1:] for row in members[:count]]
        assert sorted(pairs) == [(row, number) for row, number in enumerate(of_rows) if number]
        assert (items[1:, 1] >= 1).all() and (items[1:, 2:] < max(rows, 1)).all()
    assert most_items(64, 8) == 11 and most_items(4, 8) == 4 and most_items(2048, 8) == 135


SHAPE = LowRankShape(64, (24, 8), (0, 1), torch.bfloat16)


def add_pair(pairs: LowRankPairs, number: int, seed: int) -> Float64:
    """Return what it adds, [outputs, inputs]."""
    downs = {at: random((4 + at, 64), seed + at, torch.bfloat16) / 8 for at in range(2)}
    ups = {at: random((SHAPE.outputs[at], 4 + at), seed + 2 + at, torch.float32) for at in range(2)}
    pairs.set(number, downs, ups)
    return np.concatenate([wide(ups[at]) @ wide(downs[at]) for at in range(2)])


@pytest.mark.parametrize("order", SEEDS)
def test_work_that_is_put_off_sees_its_own_rows_and_matrices(order: int | None) -> None:
    """Each pass has other rows, some another adapter under the same number; nothing is waited for between them."""
    ops = CudaOps(device_of(order))
    pairs, rows = ops.new_low_rank_pairs(SHAPE), ops.new_rows_by_adapter()
    pairs.reserve(2, 8, 20)
    rows.reserve(20, 2)
    generator, expected, found = np.random.default_rng(4), [], []
    added = {1: add_pair(pairs, 1, 10), 2: add_pair(pairs, 2, 20)}
    for turn in range(8):
        if turn == 5:
            pairs.remove(1)
            del added[1]
        if turn == 6:
            added[1] = add_pair(pairs, 1, 30)
        x = random((20, 64), turn, torch.bfloat16)
        out = random((20, 32), 50 + turn, torch.bfloat16)
        of_rows = generator.integers(0, 3, 20)
        exact = wide(out)
        for row, number in enumerate(of_rows.tolist()):
            if number in added:
                exact[row] += added[number] @ wide(x[row])
        expected.append(exact)
        x_there, out_there = on_device(ops, x), on_device(ops, out)
        rows.set(of_rows.astype(np.int32))
        ops.add_low_rank(x_there, out_there, pairs, rows)
        found.append(out_there)
    ops.mark().wait()
    for one, exact in zip(found, expected, strict=True):
        near(one.cpu(), exact, 2e-5)


def test_products_take_no_memory_that_was_not_reserved() -> None:
    """Else a step too large for a recording would need what the KV pool has."""
    ops = CudaOps(device_of())
    pairs, rows = [ops.new_low_rank_pairs(SHAPE) for _ in range(2)], ops.new_rows_by_adapter()
    rows.reserve(300, 2)
    for one in pairs:
        one.reserve(2, 8, 300)
        add_pair(one, 1, 10)
    x, out = (on_device(ops, torch.zeros(300, width, dtype=torch.bfloat16)) for width in (64, 32))
    rows.set(np.ones(300, np.int32))
    ops.mark().wait()
    ops.gpu.peak_bytes(reset=True)
    taken = ops.gpu.peak_bytes()
    for one in pairs:
        ops.add_low_rank(x, out, one, rows)
    ops.mark().wait()
    assert ops.gpu.peak_bytes() == taken


def on_device(ops: CudaOps, x: Tensor) -> Tensor:
    there = ops.gpu.empty(tuple(x.shape), x.dtype)
    ops.gpu.main.run(lambda: there.copy_(x))
    return there


def test_what_has_no_room_is_refused() -> None:
    ops = CudaOps(device_of())
    pairs, rows = ops.new_low_rank_pairs(SHAPE), ops.new_rows_by_adapter()
    x, out = fenced(torch.zeros(1, 64, dtype=torch.bfloat16)), fenced(torch.zeros(1, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="no memory was reserved for the rows"):
        ops.add_low_rank(x, out, pairs, rows)
    rows.reserve(4, 2)
    with pytest.raises(ValueError, match="no memory was reserved for them"):
        ops.add_low_rank(x, out, pairs, rows)
    pairs.reserve(2, 4, 4)
    with pytest.raises(ValueError, match="adapter 3 of rank 5: there is room for 2 of rank 8"):
        add_pair(pairs, 3, 1)
    with pytest.raises(ValueError, match="adapters of 5 rows: there is room for 4"):
        ops.add_low_rank(x.expand(5, 64), out.expand(5, 32), pairs, rows)
    with pytest.raises(ValueError, match="a row of 20 numbers"):
        ops.new_low_rank_pairs(LowRankShape(64, (20, 4), (0, 1), torch.bfloat16)).reserve(1, 1, 1)
