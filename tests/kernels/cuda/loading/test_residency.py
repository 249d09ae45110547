"""How many blocks a multiprocessor holds: against what a profiler said of an H100, and for cards that are not here."""

from __future__ import annotations

import pytest

from kernels.cuda import calls, residency


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "expected"),
    [
        (254, 128, 83_968, 2),  # attention_prefill_bf16_d128: registers and shared memory allow two
        (42, 256, 19_456, 5),  # attention_merge_bf16: registers allow five, shared memory eleven
        (32, 1024, 0, 2),
        (16, 32, 0, 32),
        (32, 32, 228 << 10, 0),
    ],
)
def test_blocks_of_an_h100_are_those_that_its_profiler_gives(
    registers: int, threads: int, shared: int, expected: int
) -> None:
    assert residency.resident("sm_90", registers, threads, shared) == expected


CARDS = {
    # architecture, blocks of the decode and the prefill kernel for heads of 128
    "A100": ("sm_80", 2, 2),
    "RTX 3090": ("sm_86", 1, 1),
    "L4": ("sm_89", 1, 1),
    "H100": ("sm_90", 3, 2),
    "B200": ("sm_100", 3, 2),
    "RTX 5090": ("sm_120", 1, 1),
    "one of which nothing is known": ("sm_130", 1, 1),
}


@pytest.mark.parametrize(("arch", "decode", "prefill"), CARDS.values(), ids=CARDS.keys())
def test_blocks_of_attention_that_a_card_holds(arch: str, decode: int, prefill: int) -> None:
    blocks = calls.decode_block(calls.BF16, 128), calls.prefill_block(calls.BF16, 128)
    assert [residency.resident_of(arch, *block) for block in blocks] == [decode, prefill]


@pytest.mark.parametrize("arch", sorted({arch for arch, *_ in CARDS.values()} - {"sm_130"}))
@pytest.mark.parametrize("head_dim", calls.HEAD_DIMS)
def test_attention_of_every_head_fits_on_every_card(arch: str, head_dim: int) -> None:
    limit = residency.MULTIPROCESSORS[arch].shared_kib_of_block << 10
    has_wgmma = arch == "sm_90"
    for block in (calls.decode_block(calls.BF16, head_dim), calls.prefill_block(calls.BF16, head_dim, has_wgmma)):
        assert block.shared <= limit, block.name
