"""Rotary position embedding and its scaling variants, computed as transformers computes them.

Sources: RoFormer (arXiv 2104.09864); linear: Chen et al. (arXiv 2306.15595); yarn: Peng et al. (arXiv 2309.00071);
llama3: the Llama 3.1 reference code. `dynamic` changes frequencies only beyond max_position_embeddings, which is where
this worker's context ends, so here it is the unscaled form.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.worker.models.config import Rope


def inverse_frequencies(rope: Rope) -> Tensor:
    """Return [rotary / 2] float32."""
    exponents = torch.arange(0, rope.rotary, 2, dtype=torch.int64).to(torch.float32) / rope.rotary
    powers = rope.theta**exponents
    if rope.divisors:
        powers = powers * torch.tensor(rope.divisors)
    if rope.kind == "linear":
        return 1.0 / powers / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / powers)
    if rope.kind == "yarn":
        return _yarn(rope, powers)
    return 1.0 / powers


def rotary_table(rope: Rope, positions: int) -> Tensor:
    """Return [positions, rotary] float32: cosines, then sines."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope))
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def _llama3(rope: Rope, inverse: Tensor) -> Tensor:
    wavelength = 2 * math.pi / inverse
    scaled = inverse / rope.factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * scaled + smooth * inverse
    result = torch.where(wavelength > rope.original_context / rope.low_freq_factor, scaled, between)
    return torch.where(wavelength < rope.original_context / rope.high_freq_factor, inverse, result)


def _yarn(rope: Rope, powers: Tensor) -> Tensor:
    low, high = _correction(rope, rope.beta_fast), _correction(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(rope.rotary // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return 1.0 / (rope.factor * powers) * ramp + 1.0 / powers * (1 - ramp)


def _correction(rope: Rope, rotations: float) -> float:
    """Return the dimension that turns `rotations` times over the original context."""
    turns = rope.original_context / (rotations * 2 * math.pi)
    return rope.rotary * math.log(turns) / (2 * math.log(rope.theta))
