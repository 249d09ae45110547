"""Read a LoRA adapter of the store and compare it with the base model.

The bytes that are parsed are those with the digest that a request names: the store may lie on a disk that others write.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from services.worker.models.adapters import Adapter, Pair
from services.worker.models.config import DecoderConfig
from services.worker.models.matrices import layer_matrices, layer_prefix
from shared.errors import ModelError
from shared.models.adapters import (
    CONFIG,
    CONFIG_BYTES,
    WEIGHTS,
    WEIGHTS_BYTES,
    check_dtypes,
    join_digests,
    parse_config,
    parse_shapes,
    read_file,
)

PREFIX = "base_model.model."
FLOATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def read_adapter(folder: Path, digest: bytes, config: DecoderConfig, max_rank: int) -> Adapter:
    """Return the adapter of these files. config: of the whole model. Raise ModelError naming what cannot be served."""
    stored = read_file(folder / CONFIG, CONFIG_BYTES)
    weights = read_file(folder / WEIGHTS, WEIGHTS_BYTES)
    if join_digests(hashlib.sha256(part).digest() for part in (stored, weights)) != digest:
        raise ModelError("its files are not those that were registered; load the adapter again")
    scales = parse_config(stored)
    try:
        tensors: dict[str, Tensor] = load(weights)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{WEIGHTS}: cannot be read ({error}); save the adapter again") from error
    modules = parse_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, max_rank)
    check_dtypes({name: FLOATS.get(tensor.dtype, str(tensor.dtype)) for name, tensor in tensors.items()})
    known = linear_layers(config)
    adapter: Adapter = {}
    for module, shape in modules.items():
        name = _base_name(config, module, known)
        if name is None:
            raise ModelError(f"{module}: no linear layer of {config.architecture} that takes adapters; leave it out")
        outputs, inputs = known[name]
        if (shape.outputs, shape.inputs) != (outputs, inputs):
            raise ModelError(
                f"{module}: the adapter is of [{shape.outputs}, {shape.inputs}], the base has [{outputs}, {inputs}]; "
                "it is of another base: load it for that one, or train one for this base"
            )
        down, up = (tensors[f"{PREFIX}{module}.{part}.weight"] for part in ("lora_A", "lora_B"))
        if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
            raise ModelError(f"{module}: a number that is not finite; save the adapter again")
        adapter[name] = Pair(down, up.float() * scales.scale(module, shape.rank))
    return adapter


def linear_layers(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the matrices that take adapters: all of the layers but those of single experts."""
    layers = {}
    for index in range(config.layers):
        prefix, mixture = layer_prefix(config, index), config.mixture_at(index)
        for name, outputs, inputs in layer_matrices(config, index):
            if mixture is None or not name.startswith(f"{mixture.names.experts}."):
                layers[f"{prefix}{name}"] = (outputs, inputs)
    return layers


def _base_name(config: DecoderConfig, module: str, known: dict[str, tuple[int, int]]) -> str | None:
    """Return the matrix that a module of the adapter is, whatever prefix its model had."""
    names = config.family.names
    for prefix in (names.prefix, *names.other_prefixes, ""):
        name = f"{names.prefix}{module.removeprefix(prefix)}"
        if module.startswith(prefix) and name in known:
            return name
    return None
