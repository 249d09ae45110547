"""Rotary position embedding and its scaling variants, computed as transformers computes them.

Sources: RoFormer (arXiv 2104.09864); linear: Chen et al. (arXiv 2306.15595); yarn: Peng et al. (arXiv 2309.00071);
llama3: the Llama 3.1 reference code. `dynamic` changes frequencies only beyond max_position_embeddings, which is where
this worker's context ends, so here it is the unscaled form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from services.worker.models.fields import Fields
from services.worker.models.registry import Family
from shared.errors import ModelError


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

    def inverse_frequencies(self) -> Tensor:
        """[rotary / 2] float32."""
        exponents = torch.arange(0, self.rotary, 2, dtype=torch.int64).to(torch.float32) / self.rotary
        powers = self.theta**exponents
        if self.kind == "linear":
            return 1.0 / powers / self.factor
        if self.kind == "llama3":
            return self._llama3(1.0 / powers)
        if self.kind == "yarn":
            return self._yarn(powers)
        return 1.0 / powers

    def table(self, positions: int) -> Tensor:
        """[positions, rotary] float32: cosines, then sines."""
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
        """The dimension that turns `rotations` times over the original context."""
        turns = self.original_context / (rotations * 2 * math.pi)
        return self.rotary * math.log(turns) / (2 * math.log(self.theta))


def ropes_from(read: Fields, family: Family, head_dim: int) -> tuple[Rope | None, Rope | None]:
    """The rotary embedding, and that of layers with a window where it is another. Raises ModelError.

    Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).
    """
    if family.positions != "rope":
        return None, None
    raw, scaling, settings = read.raw, read.fields("rope_scaling"), read.fields("rope_parameters")
    beside = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    if not family.local_rope:
        return _rope({**beside, **(scaling or settings)}, read, family, head_dim), None
    # The bases of Gemma 3's layers where none is given (transformers, models/gemma3/configuration_gemma3.py).
    kinds = Fields(settings, read.where)
    whole = {"rope_theta": raw.get("rope_theta") or 1e6, **kinds.fields("full_attention"), **scaling}
    local = {"rope_theta": raw.get("rope_local_base_freq") or 1e4, **kinds.fields("sliding_attention")}
    return _rope(whole, read, family, head_dim), _rope(local, read, family, head_dim)


def _rope(raw: dict[str, Any], whole: Fields, family: Family, head_dim: int) -> Rope:
    """Of `raw`, the settings; `whole` is all of config.json."""
    where, fields = whole.where, Fields(raw, whole.where)
    if any(isinstance(value, dict) for value in raw.values()):
        kinds = ", ".join(key for key, value in raw.items() if isinstance(value, dict))
        raise ModelError(f"{where}: rope settings per layer type ({kinds}) are not supported for this architecture")
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind not in family.rope_types:
        raise ModelError(
            f"{where}: rope_type {kind!r} is not supported for this architecture; "
            f"supported: {', '.join(family.rope_types)}"
        )
    partial = fields.number("partial_rotary_factor", 0, 1, 1.0)
    if partial != 1 and not family.partial_rotary:
        raise ModelError(
            f"{where}: partial_rotary_factor {partial} is not supported for this architecture; only 1.0 is"
        )
    rotary = int(head_dim * partial)
    if rotary % 2 or not 0 < rotary <= head_dim:
        raise ModelError(f"{where}: of head_dim {head_dim}, {rotary} numbers would turn; it must be an even number")
    rope = Rope(kind=kind, theta=fields.number("rope_theta", 2, 1e15, 10000.0), rotary=rotary)
    if kind in ("default", "dynamic"):
        return rope
    context = whole.integer("max_position_embeddings", 2048)
    original = whole.integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", context)
    )
    if raw.get("factor") is None and kind != "yarn":
        raise ModelError(f"{where}: rope_type {kind!r} needs a factor")
    factor = fields.number("factor", 1e-3, 1e6, context / original)
    if kind == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= raw.keys():
        raise ModelError(f"{where}: rope_type 'llama3' needs low_freq_factor and high_freq_factor")
    low = fields.number("low_freq_factor", 1e-3, 1e6, 1.0)
    high = fields.number("high_freq_factor", 1e-3, 1e6, 4.0)
    if kind == "llama3" and high <= low:
        raise ModelError(f"{where}: high_freq_factor {high} must be more than low_freq_factor {low}")
    return replace(
        rope,
        factor=factor,
        original_context=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=fields.number("beta_fast", 1e-3, 1e6, 32),
        beta_slow=fields.number("beta_slow", 1e-3, 1e6, 1),
        truncate=fields.flag("truncate", True),
        attention_factor=_yarn_attention_factor(fields, factor) if kind == "yarn" else 1.0,
    )


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    if fields.raw.get("attention_factor") is not None:
        return fields.number("attention_factor", 1e-3, 1e3)
    mscale, all_dim = (fields.number(key, 0, 1e3, 0.0) for key in ("mscale", "mscale_all_dim"))
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
