"""Row-wise operations in every instruction set, beyond test_ops.py: extreme numbers, threads, no stray write."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels.cpu.backend import CpuOps
from kernels.cpu.commands import FLOAT32, NormArgs
from kernels.cpu.program import Immediate
from kernels.ops import ACTIVATIONS, Norm
from tests.kernels.cpu_variants import library
from tests.kernels.sequences import FORMULAS, near, normed, random, wide

pytestmark = pytest.mark.sanitized


@pytest.fixture
def ops(float32_variant: str) -> CpuOps:
    return CpuOps(library(float32_variant), 1)


def test_layer_norm_keeps_its_digits_beside_a_large_mean(ops: CpuOps) -> None:
    x, norm = random((3, 768), 1, torch.float32) + 1000, Norm(torch.ones(768), None, 1e-5, True)
    near(ops.norm(x, norm), normed(wide(x), norm), 2e-4)


def test_row_is_same_alone_in_batch_and_with_any_threads(ops: CpuOps) -> None:
    x, norm = random((41, 515), 1, torch.float32), Norm(random((515,), 2, torch.float32), None, 1e-5, True)
    alone = torch.cat([ops.norm(row[None].clone(), norm) for row in x])
    for threads in (1, 2, 5):
        assert torch.equal(CpuOps(ops.library, threads).norm(x, norm), alone)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations_hold_few_units_in_last_place_over_all_magnitudes(ops: CpuOps, kind: str) -> None:
    # Every 4,003rd float32 of either sign up to 80.
    bits = np.arange(0, np.float32(80).view(np.uint32), 4003, dtype=np.uint32)
    x = torch.from_numpy(np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32))
    expected = FORMULAS[kind](wide(x))
    error = np.abs(wide(ops.activate(x[None], kind)[0]) - expected) / np.maximum(np.abs(expected), 1e-35)
    # exp multiplies the rounding of its argument, which grows to 80.
    limit = {"silu": 4e-7 + 6e-8 * 80, "gelu": 5e-6, "gelu_tanh": 1e-5}[kind]
    reached = np.abs(expected) > (1e-9 if kind == "gelu_tanh" else 1e-35)
    assert error[reached].max() < limit and error[np.abs(expected) > 0.01].max() < 1e-6


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_huge_and_broken_numbers(ops: CpuOps, kind: str) -> None:
    found = ops.activate(torch.tensor([[1e30, -1e30, 3e38, -200.0, math.nan, math.inf]]), kind)[0]
    assert found[[0, 2, 5]].tolist() == torch.tensor([1e30, 3e38, math.inf]).tolist()
    assert found[1] == 0 and found[3] == 0 and found[4].isnan()


def test_nothing_is_written_beyond_the_last_number(ops: CpuOps) -> None:
    for width in (1, 7, 33):
        x, weight = random((1, width), 1, torch.float32), random((width,), 2, torch.float32)
        out = torch.full((width + 64,), 7.0)
        args = NormArgs(x.data_ptr(), None, out.data_ptr(), weight.data_ptr(), None, width, FLOAT32, False, 1e-5)
        Immediate(ops.library, 1).now(1, args)
        assert (out[width:] == 7).all()
