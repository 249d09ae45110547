"""Rotary position embedding and its scaling variants, computed as transformers computes them.

Sources: RoFormer (arXiv 2104.09864); linear: Chen et al. (arXiv 2306.15595); yarn: Peng et al. (arXiv 2309.00071);
llama3: the Llama 3.1 reference code. `dynamic` changes frequencies only beyond max_position_embeddings, which is where
this worker's context ends, so here it is the unscaled form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """`factor`, `original_context` and what follows are read by the scaling variants only."""

    kind: str
    theta: float
    rotary: int  # numbers of a head that turn, the first ones
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # cosines and sines are multiplied by it
    divisors: tuple[float, ...] = ()  # [rotary / 2], of the frequencies: what llama3 comes to, in a GGUF file

    def inverse_frequencies(self) -> Tensor:
        """Return [rotary / 2] float32."""
        exponents = torch.arange(0, self.rotary, 2, dtype=torch.int64).to(torch.float32) / self.rotary
        powers = self.theta**exponents
        if self.divisors:
            powers = powers * torch.tensor(self.divisors)
        if self.kind == "linear":
            return 1.0 / powers / self.factor
        if self.kind == "llama3":
            return self._llama3(1.0 / powers)
        if self.kind == "yarn":
            return self._yarn(powers)
        return 1.0 / powers

    def table(self, positions: int) -> Tensor:
        """Return [positions, rotary] float32: cosines, then sines."""
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), self.inverse_frequencies())
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.attention_factor

    def _llama3(self, inverse: Tensor) -> Tensor:
        wavelength = 2 * math.pi / inverse
        scaled = inverse / self.factor
        smooth = (self.original_context / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * scaled + smooth * inverse
        result = torch.where(wavelength > self.original_context / self.low_freq_factor, scaled, between)
        return torch.where(wavelength < self.original_context / self.high_freq_factor, inverse, result)

    def _yarn(self, powers: Tensor) -> Tensor:
        low, high = self._correction(self.beta_fast), self._correction(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary - 1)
        span = high - low if high != low else 0.001
        ramp = ((torch.arange(self.rotary // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
        return 1.0 / (self.factor * powers) * ramp + 1.0 / powers * (1 - ramp)

    def _correction(self, rotations: float) -> float:
        """Return the dimension that turns `rotations` times over the original context."""
        turns = self.original_context / (rotations * 2 * math.pi)
        return self.rotary * math.log(turns) / (2 * math.log(self.theta))
