"""How many blocks a multiprocessor holds: against what a profiler said of an H100, and for cards that are not here."""

from __future__ import annotations

import pytest

from kernels.cuda import calls, residency
from tests.kernels.cuda.programs import GPU


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


CARDS = {"A100": "sm_80", "L4": "sm_89", "RTX 3090": "sm_86", "H100": "sm_90", "B200": "sm_100", "RTX 5090": "sm_120"}


@pytest.mark.parametrize("arch", CARDS.values(), ids=CARDS.keys())
@pytest.mark.parametrize("head_dim", calls.HEAD_DIMS)
def test_attention_of_every_head_fits_on_every_card(arch: str, head_dim: int) -> None:
    measured = arch if arch in residency.recorded() else "sm_80"
    for block in (calls.decode_block(calls.BF16, head_dim), calls.prefill_block(calls.BF16, head_dim)):
        registers = residency.recorded()[measured][block.name]["registers"]
        assert residency.resident(arch, registers, block.threads, block.shared) >= 1, block.name


@pytest.mark.skipif(not GPU, reason="no GPU is here")
def test_driver_gives_as_many_blocks_as_the_arithmetic() -> None:
    from kernels.cuda.gpu import CudaDevice

    device = CudaDevice()
    for head_dim in calls.HEAD_DIMS:
        for block in (calls.decode_block(calls.F16, head_dim), calls.prefill_block(calls.F16, head_dim)):
            assert device.resident(block) == residency.resident_of("sm_90", *block), block.name
