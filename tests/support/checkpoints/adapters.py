"""LoRA adapters in PEFT's form with random numbers, and transformers with one of them: the oracle of their tests.

The formula is PEFT's, by hand: unmerged y + (x @ A.T) @ B.T * scale, merged W + B @ A * scale.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shared.models.adapters import CONFIG, STORE, WEIGHTS, digest_of

PREFIX = "base_model.model."


@dataclass
class Lora:
    """A folder as PEFT saves it."""

    folder: Path
    digest: bytes = b""
    config: dict[str, Any] = field(default_factory=dict)


def make_lora(
    folder: Path, model: PreTrainedModel, seed: int, rank: int = 4, targets: Collection[str] = (), **config: Any
) -> Lora:
    """Write an adapter with random numbers, large enough to change tokens. targets: ends of names; empty: all."""
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "use_rslora": False} | config
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():  # linear layers but the head, as PEFT's target_modules all-linear
        if not isinstance(module, nn.Linear | Conv1D) or module is model.get_output_embeddings():
            continue
        if targets and not name.endswith(tuple(targets)):
            continue
        sizes = tuple(module.weight.shape)
        outputs, inputs = reversed(sizes) if isinstance(module, Conv1D) else sizes
        for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            drawn = torch.randn(shape, generator=generator) * (0.7 / math.sqrt(shape[1]))
            tensors[f"{PREFIX}{name}.{part}.weight"] = drawn
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(fields))
    return Lora(folder, digest_of(folder), fields)


def store(lora: Lora, adapter_dir: Path) -> bytes:
    """Copy the files to where workers read them; return the digest."""
    shutil.copytree(lora.folder, adapter_dir / STORE / lora.digest.hex(), dirs_exist_ok=True)
    return lora.digest


@contextlib.contextmanager
def unmerged(model: PreTrainedModel, lora: Lora) -> Iterator[None]:
    """The model with the adapter beside its linear layers."""

    def hook(down: Tensor, up: Tensor, scale: float) -> Any:
        return lambda module, inputs, out: out + (inputs[0] @ down.T) @ up.T * scale

    handles = [
        model.get_submodule(name).register_forward_hook(hook(down, up, scale))
        for name, (down, up, scale) in _parts(lora).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def merged(model: PreTrainedModel, lora: Lora) -> Iterator[None]:
    """The model with the adapter added to its weights."""
    before: list[tuple[nn.Parameter, Tensor]] = []
    with torch.no_grad():
        for name, (down, up, scale) in _parts(lora).items():
            module = model.get_submodule(name)
            weight = module.get_parameter("weight")
            before.append((weight, weight.clone()))
            added = up @ down * scale
            weight.add_(added.T if isinstance(module, Conv1D) else added)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, kept in before:
                weight.copy_(kept)


def _parts(lora: Lora) -> dict[str, tuple[Tensor, Tensor, float]]:
    tensors = load_file(lora.folder / WEIGHTS)
    found = {}
    for name, down in tensors.items():
        if name.endswith("lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            rank = down.shape[0]
            scale = lora.config["lora_alpha"] / (math.sqrt(rank) if lora.config["use_rslora"] else rank)
            found[module] = down, tensors[name.replace("lora_A", "lora_B")], scale
    return found
