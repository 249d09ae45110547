"""W8A8 in numpy: activations of a row and weights of an output in integers of 8 bits, each with one scale.

compressed-tensors (0.20, quantization/lifecycle/forward_helpers.py) rounds x / scale to the nearest integer, ties to
even; scale = max |x| / 127 in float32 and the order of the products of scales are vLLM's (dynamic_scaled_int8_quant,
and ScaledEpilogue of cutlass_w8a8: scale of the row * (scale of the output * sum)).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints.quantized import add_config

Float32 = NDArray[np.float32]
Integers = NDArray[np.int64]


def codes(x: Float32) -> tuple[Integers, Float32]:
    """Return integers of x [rows, inputs], those of rows that are not finite 0, and scales [rows, 1], theirs NaN."""
    largest = np.abs(x).max(1, keepdims=True)
    scales = np.where(np.isfinite(largest), largest / np.float32(127), np.float32(np.nan)).astype(np.float32)
    steps = np.zeros(x.shape, np.float32)
    np.divide(x, scales, out=steps, where=scales > 0)
    return np.clip(np.rint(steps), -127, 127).astype(np.int64), scales


def product(x: Float32, numbers: Integers, scales: Float32, bias: Float32 | None) -> Float32:
    """Return [rows, outputs] of integer weights [outputs, inputs] and their scales [outputs]."""
    of_rows, scales_of_rows = codes(x)
    sums = of_rows.astype(np.float64) @ numbers.T.astype(np.float64)  # of integers, so exact
    assert np.abs(sums).max(initial=0) < 2**31
    with np.errstate(over="ignore"):
        found: Float32 = sums.astype(np.float32) * scales * scales_of_rows
    return found if bias is None else found + bias


class Linear(torch.nn.Module):
    """A layer of transformers that computes `product`."""

    def __init__(self, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.numbers, self.scales = numbers.numpy().astype(np.int64), scales.float().numpy()[:, 0]
        self.added = None if bias is None else bias.detach().numpy()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).numpy()
        products = torch.from_numpy(product(rows, self.numbers, self.scales, self.added))
        shaped: Tensor = products.unflatten(0, x.shape[:-1])
        return shaped


def replace_layers(model: torch.nn.Module, written: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Let the layers of a model compute with what write_w8a8 returned."""
    for name, (numbers, scales) in written.items():
        layer: Any = model.get_submodule(name)
        model.set_submodule(name, Linear(numbers, scales, layer.bias))


def write_w8a8(
    plain: Path, target: Path, strategy: str = "channel", ignore: tuple[str, ...] = ()
) -> dict[str, tuple[Tensor, Tensor]]:
    """Write `plain`'s layers to `target` in W8A8; return numbers and scales [outputs, 1] by the name of the layer.

    A scale is (largest - least number) / 255 of a range that is alike on both sides, as calculate_qparams of
    compressed-tensors has it, in bfloat16 for outputs and in float32 for a matrix.
    """
    shutil.copytree(plain, target)
    found, tensors = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if ".layers." not in name or weight.ndim != 2 or stem.endswith((*ignore, "gate")):
            tensors[name] = weight
            continue
        largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax().reshape(1)
        scales = largest / 127.5
        scales = scales.bfloat16() if strategy == "channel" else scales
        numbers = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
        tensors |= {name: numbers, f"{stem}.weight_scale": scales}
        found[stem] = numbers, scales.float().reshape(-1, 1).expand(len(weight), 1)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    add_config(target, quantization_config=config(strategy, ignore))
    return found


def config(strategy: str = "channel", ignore: tuple[str, ...] = ()) -> dict[str, object]:
    """Return what llm-compressor's preset W8A8 writes."""
    shared = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "group_size": None,
        "block_structure": None,
        "actorder": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**shared, "strategy": strategy, "dynamic": False, "observer": "minmax"},
                "input_activations": {**shared, "strategy": "token", "dynamic": True, "observer": None},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", *ignore],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
