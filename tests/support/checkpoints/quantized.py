"""Quantized checkpoints in numpy, from the formats' specifications, and the weights that they mean.

Nothing here is the reader's: words are put together number by number, as the tools that write the formats do.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ, awq/modules/linear/gemm.py, order_map
Float = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint."""

    method: str
    bits: int = 4
    group: int = 0  # 0: all inputs
    symmetric: bool = False
    act_order: bool = False
    first_zeros: bool = True  # of GPTQ: zero points less one

    @property
    def scale_type(self) -> torch.dtype:
        return torch.bfloat16 if self.method == "compressed-tensors" and self.symmetric else torch.float16

    def config(self) -> dict[str, Any]:
        size = self.group or -1
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
        if self.method == "gptq":
            name = "gptq" if self.first_zeros else "gptq_v2"
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": size,
                "desc_act": self.act_order,
                "sym": self.symmetric,
                "checkpoint_format": name,
            }
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group or None,
            "actorder": "group" if self.act_order else None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }


@dataclass(frozen=True)
class Rounded:
    """A matrix in integers: numbers [outputs, inputs], scales and zeros [outputs, groups], group_of [inputs]."""

    numbers: Integers
    scales: Float  # in 16 bits of Format.scale_type
    zeros: Integers
    group_of: Integers

    @property
    def weight(self) -> Float:
        """Exact: 16-bit scales times small integers."""
        exact = (self.numbers - self.zeros[:, self.group_of]) * self.scales.astype(np.float64)[:, self.group_of]
        weight = exact.astype(np.float32)
        assert (weight == exact).all()
        return weight


def rounded(weight: Float, kind: Format, rng: np.random.Generator) -> Rounded:
    """Round to nearest within each group's range."""
    outputs, inputs = weight.shape
    size, most = kind.group or inputs, (1 << kind.bits) - 1
    group_of = np.arange(inputs) // size
    if kind.act_order:
        group_of = rng.permutation(group_of)
    groups = -(-inputs // size)
    scales, zeros = np.empty((outputs, groups), np.float32), np.empty((outputs, groups), np.int64)
    for group in range(groups):
        some = weight[:, group_of == group]
        if kind.symmetric:
            scales[:, group] = short(np.abs(some).max(1) / (most // 2), kind)
            zeros[:, group] = 1 << kind.bits - 1
        else:
            low, high = np.minimum(some.min(1), 0), np.maximum(some.max(1), 0)
            scales[:, group] = short((high - low) / most, kind)
            zeros[:, group] = np.clip(np.rint(-low / scales[:, group]), 1, most)
    numbers = np.rint(weight / scales[:, group_of]) + zeros[:, group_of]
    return Rounded(np.clip(numbers, 0, most).astype(np.int64), scales, zeros, group_of)


def short(scales: Float, kind: Format) -> Float:
    """Rounded to the type that the file has."""
    return torch.from_numpy(scales).to(kind.scale_type).float().numpy()


def words(values: Integers, bits: int, order: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """[rows, n] -> [rows, ceil(n * bits / 32)]: the i-th bits of a word hold its number order[i]."""
    many = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % many)))
    found = np.zeros((len(values), padded.shape[1] // many), np.uint64)
    for word in range(found.shape[1]):
        for i in range(many):
            place = order[i] if order else i
            found[:, word] |= padded[:, word * many + place].astype(np.uint64) << np.uint64(bits * i)
    return found.astype(np.uint32).view(np.int32)


def tensors(name: str, matrix: Rounded, kind: Format) -> dict[str, Tensor]:
    """What the checkpoint has of a matrix."""
    bits, numbers, zeros = kind.bits, matrix.numbers, matrix.zeros
    scales = torch.from_numpy(matrix.scales).to(kind.scale_type)
    found: dict[str, NDArray[Any]]
    if kind.method == "awq":
        found = {"qweight": words(numbers.T, 4, AWQ_ORDER), "qzeros": words(zeros.T, 4, AWQ_ORDER)}
    elif kind.method == "gptq":
        found = {"qweight": words(numbers, bits).T, "qzeros": words(zeros.T - kind.first_zeros, bits)}
        found["g_idx"] = matrix.group_of.astype(np.int32)
    else:
        found = {"weight_packed": words(numbers, bits), "weight_shape": np.array(numbers.shape, np.int64)}
        if not kind.symmetric:
            found["weight_zero_point"] = words(zeros.T, bits).T
        if kind.act_order:
            found["weight_g_idx"] = matrix.group_of.astype(np.int32)
    made = {part: torch.from_numpy(np.ascontiguousarray(values)) for part, values in found.items()}
    made["weight_scale" if kind.method == "compressed-tensors" else "scales"] = (
        scales if kind.method == "compressed-tensors" else scales.t().contiguous()
    )
    return {f"{name}.{part}": tensor for part, tensor in made.items()}


def write_quantized(plain: Path, target: Path, kind: Format, seed: int = 0) -> dict[str, Tensor]:
    """Write `plain`'s layers rounded to `target`, and into `plain` the weights that these mean; return them by name."""
    rng = np.random.default_rng(seed)
    shutil.copytree(plain, target)
    stored = load_file(plain / "model.safetensors")
    meant: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for name, weight in stored.items():
        if ".layers." in name and weight.ndim == 2 and not name.endswith("gate.weight"):  # a router stays plain
            matrix = rounded(weight.numpy(), kind, rng)
            written.update(tensors(name.removesuffix(".weight"), matrix, kind))
            meant[name] = torch.from_numpy(matrix.weight)
        else:
            written[name] = weight
    save_file({**stored, **meant}, plain / "model.safetensors", {"format": "pt"})
    save_file(written, target / "model.safetensors", {"format": "pt"})
    add_config(target, quantization_config=kind.config())
    return meant


def write_fp8(plain: Path, target: Path, method: str, block: tuple[int, int]) -> dict[str, Tensor]:
    """As write_quantized, in e4m3fn. block: outputs and inputs that share a scale, 0 for all."""
    shutil.copytree(plain, target)
    stored = load_file(plain / "model.safetensors")
    meant: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for name, weight in stored.items():
        if ".layers." not in name or weight.ndim != 2:
            written[name] = weight
            continue
        down, across = block[0] or weight.shape[0], block[1] or weight.shape[1]
        scales = torch.empty(-(-weight.shape[0] // down), -(-weight.shape[1] // across))
        numbers, exact = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                here = (slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across))
                scales[i, j] = weight[here].abs().max() / 448
                numbers[here] = (weight[here] / scales[i, j]).to(torch.float8_e4m3fn)
                exact[here] = numbers[here].float() * scales[i, j]
        written[name], meant[name] = numbers, exact
        suffix = "_scale_inv" if method == "fp8" and all(block) else "_scale"
        written[name + suffix] = scales if block[0] else scales.reshape(())
    save_file({**stored, **meant}, plain / "model.safetensors", {"format": "pt"})
    save_file(written, target / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": list(block) if block[0] else None}
    if method == "compressed-tensors":
        weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
        if all(block):
            weights |= {"strategy": "block", "block_structure": list(block)}
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
        config = {"quant_method": method, "format": "float-quantized", "config_groups": {"group_0": scheme}}
    add_config(target, quantization_config=config)
    return meant


def add_config(model: Path, **fields: Any) -> None:
    """Set fields of config.json."""
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # sizes of E2M1, OCP Microscaling Formats 1.0, table 5


def mxfp4(weight: Float) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Float]:
    """Round [..., outputs, inputs] to blocks of 32 inputs: blocks, scales and the weights that they mean.

    The scale is the power of two of the largest number less 2 (section 6.3); numbers go to the nearest.
    """
    cut = weight.reshape(*weight.shape[:-1], -1, 32).astype(np.float64)
    power = np.floor(np.log2(np.abs(cut).max(-1, keepdims=True))) - 2
    steps = cut / 2.0**power
    numbers = np.abs(np.abs(steps)[..., None] - FLOAT4).argmin(-1)
    meant = FLOAT4[numbers] * np.sign(steps) * 2.0**power
    codes = (numbers + 8 * (steps < 0)).astype(np.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, (power[..., 0] + 127).astype(np.uint8), meant.reshape(weight.shape).astype(np.float32)


def write_mxfp4(plain: Path, target: Path) -> dict[str, Tensor]:
    """Write `plain`, a gpt-oss, to `target` with its experts in MXFP4, and into `plain` the weights that these mean.

    Return these by name, [experts, inputs, outputs].
    """
    shutil.copytree(plain, target)
    stored = load_file(plain / "model.safetensors")
    meant, written = {}, {}
    for name, weight in stored.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, exact = mxfp4(np.ascontiguousarray(weight.numpy().swapaxes(1, 2)))
            written[f"{name}_blocks"], written[f"{name}_scales"] = torch.from_numpy(blocks), torch.from_numpy(scales)
            meant[name] = torch.from_numpy(np.ascontiguousarray(exact.swapaxes(1, 2)))
        else:
            written[name] = weight
    save_file({**stored, **meant}, plain / "model.safetensors", {"format": "pt"})
    save_file(written, target / "model.safetensors", {"format": "pt"})
    add_config(target, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return meant
