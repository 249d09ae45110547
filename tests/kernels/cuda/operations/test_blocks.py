"""KV blocks gathered, scattered and copied by the CUDA kernel, emulated; and the arithmetic of launches."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda import calls
from tests.kernels.cuda.programs import ORDERS, UNTOUCHED, assert_fences, int32, launch, numbers, untouched
from tests.support.compiler import needs_compiler

FROM, TO = (6, 0, 3, 2), (1, 5, 0, 4)


@needs_compiler
@pytest.mark.sanitized
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [8, 136, 8192 + 8])
def test_blocks_are_gathered_scattered_and_copied(order: int, size: int) -> None:
    """size: 16-bit numbers of a block; whole blocks lie one after another."""
    pool, from_, to = numbers(7, size, dtype=torch.bfloat16), int32(*FROM), int32(*TO)
    before, room = pool.clone(), untouched(4, size, dtype=torch.bfloat16)
    step = (size * 2, size * 2)
    launch(calls.copy_blocks(4, pool.data_ptr(), room.data_ptr(), step, size * 2, from_=from_.ctypes.data), order)
    assert torch.equal(room, before[list(FROM)])
    launch(calls.copy_blocks(4, room.data_ptr(), pool.data_ptr(), step, size * 2, to=to.ctypes.data), order)
    assert torch.equal(pool[list(TO)], before[list(FROM)])
    assert torch.equal(pool[[2, 3, 6]], before[[2, 3, 6]])

    pairs = (int32(1, -1, 2), int32(6, 0, -1))
    after, addresses = pool.clone(), [pair.ctypes.data for pair in pairs]
    call = calls.copy_blocks(3, pool.data_ptr(), pool.data_ptr(), step, size * 2, from_=addresses[0], to=addresses[1])
    launch(call, order)
    after[6] = after[1]
    assert torch.equal(pool, after), "pairs with a number below zero are padding"
    assert_fences(pool, room)


@needs_compiler
@pytest.mark.sanitized
@pytest.mark.parametrize("order", ORDERS)
def test_a_block_in_parts_is_gathered_into_one_piece(order: int) -> None:
    pool = numbers(6, 7, 40, dtype=torch.bfloat16)  # [layers and K/V, blocks, slab]
    room, from_ = untouched(4, 6, 40, dtype=torch.bfloat16), int32(*FROM)
    call = calls.copy_blocks(
        4, pool.data_ptr(), room.data_ptr(), (80, 480), 80, parts=6, part_strides=(560, 80), from_=from_.ctypes.data
    )
    launch(call, order)
    assert torch.equal(room, pool[:, list(FROM)].transpose(0, 1))
    back, to = untouched(6, 7, 40, dtype=torch.bfloat16), int32(*FROM)
    call = calls.copy_blocks(
        4, room.data_ptr(), back.data_ptr(), (480, 80), 80, parts=6, part_strides=(80, 560), to=to.ctypes.data
    )
    launch(call, order)
    assert torch.equal(back[:, list(FROM)], pool[:, list(FROM)])
    assert (back[:, [1, 4, 5]] == UNTOUCHED).all()


def test_sizes_that_the_kernels_do_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="a row of 12 numbers; the CUDA kernels take multiples of 8"):
        calls.add("bf16", 1, 12, 0, 0)
    with pytest.raises(ValueError, match="a row of 32776 numbers; the norms take 32768 at most"):
        calls.norm("bf16", 1, 32776, 0, 0, 0, 1e-5)
    with pytest.raises(ValueError, match="0 rows"):
        calls.select(0, 8, 0, 0, 0)
    with pytest.raises(ValueError, match="copies go 16 bytes at a time"):
        calls.copy_blocks(1, 0, 0, (32, 24), 16)
    with pytest.raises(ValueError, match="65 rotary numbers in heads of 64"):
        calls.rope_and_write("bf16", 1, 1, 1, 64, 16, 0, 0, 0, 0, 0, 0, angles=1, rotary=65)
    with pytest.raises(ValueError, match="angles missing"):
        calls.rope_and_write("bf16", 1, 1, 1, 64, 16, 0, 0, 0, 0, 0, 0, rotary=64)
    with pytest.raises(ValueError, match="heads of 520 numbers; rope_and_write takes 512 at most"):
        calls.rope_and_write("bf16", 1, 1, 1, 520, 16, 0, 0, 0, 0, 0, 0)


def test_norm_of_many_rows_has_half_the_threads() -> None:
    few, many = (calls.norm("bf16", rows, 4096, 0, 0, 0, 1e-5) for rows in (511, 512))
    assert (few.block[0], many.block[0]) == (512, 256)


@pytest.mark.parametrize(
    ("rows", "vocab", "parts"),
    [(1, 128_256, 16), (8, 128_256, 16), (9, 128_256, 8), (64, 128_256, 2), (67, 128_256, 1), (256, 128_256, 1),
     (1, 5003, 2), (1, 97, 1)],
)  # fmt: skip
def test_rows_that_sample_are_split_over_the_processors(rows: int, vocab: int, parts: int) -> None:
    assert calls.sampler_parts(rows, vocab, 132) == parts


def test_threads_are_whole_warps_and_pieces_cover_a_row() -> None:
    for width in (8, 264, 2048, 2056, 28672):
        call = calls.add("bf16", 5, width, 0, 0)
        assert call.block[0] % 32 == 0 and call.grid[0] == 5
        assert (call.grid[1] - 1) * call.block[0] < width // 8 <= call.grid[1] * call.block[0]
