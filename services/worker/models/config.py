"""config.json of a Hugging Face directory -> one frozen DecoderConfig that describes the whole decoder.

What this worker cannot compute exactly as the checkpoint means it is refused here, before any weight is read.
A new architecture is a new line of ARCHITECTURES and, where it needs one, a new field.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.worker.models.rope import Rope, rope_from
from shared.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Family:
    """What the name of an architecture says beyond its fields."""

    qkv_bias: bool = False
    bias_fields: bool = False  # Llama: attention_bias and mlp_bias are fields of the config


ARCHITECTURES = {
    "LlamaForCausalLM": Family(bias_fields=True),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of RMSNorm, rotary attention with grouped KV heads, and a gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context: int  # positions that the model was made for
    tied: bool  # the output matrix is the embedding
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    rope: Rope
    checkpoint_dtype: torch.dtype


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model directory. Raises ModelError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: MODEL must name a Hugging Face model directory") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def load_config(model: Path) -> DecoderConfig:
    """Reads `model`/config.json. Raises ModelError naming the field, its value and what would work."""
    if not model.is_dir():
        raise ModelError(f"model directory {model} does not exist; set MODEL to a Hugging Face model directory")
    return parse_config(read_json(model / "config.json"), str(model / "config.json"))


def parse_config(raw: dict[str, Any], where: str) -> DecoderConfig:
    """The pure part of load_config; `where` names the file in errors."""
    names = raw.get("architectures") or []
    name = names[0] if names else None
    if name not in ARCHITECTURES:
        raise ModelError(f"{where}: architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    family = ARCHITECTURES[name]
    _refuse_unsupported(raw, where)
    hidden = _positive(raw, "hidden_size", where)
    heads = _positive(raw, "num_attention_heads", where)
    kv_heads = _positive(raw, "num_key_value_heads", where, heads)
    head_dim = _positive(raw, "head_dim", where, hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim {head_dim} is odd; rotary embedding needs an even one")
    attention_bias = family.bias_fields and bool(raw.get("attention_bias"))
    context = _positive(raw, "max_position_embeddings", where, 2048)
    return DecoderConfig(
        architecture=name,
        vocab_size=_positive(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size", where),
        layers=_positive(raw, "num_hidden_layers", where),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        context=context,
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family.bias_fields and bool(raw.get("mlp_bias")),
        rope=rope_from(raw, head_dim, context, where),
        checkpoint_dtype=_dtype(raw, where),
    )


def _refuse_unsupported(raw: dict[str, Any], where: str) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "?")
        raise ModelError(f"{where}: quantization_config ({method}) is not supported; use the unquantized checkpoint")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {activation!r} is not supported; only silu is")
    # Qwen2 writes a sliding_window that use_sliding_window then switches off.
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if window is not None:
        raise ModelError(
            f"{where}: sliding_window {window} is not supported; use a checkpoint whose sliding_window is null"
        )
    kinds = set(raw.get("layer_types") or []) - {"full_attention"}
    if kinds:
        raise ModelError(f"{where}: layer_types {sorted(kinds)} are not supported; only full_attention is")


def _positive(raw: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"{where}: {key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {key} is {value!r}, expected a positive integer")
    return value


def _dtype(raw: dict[str, Any], where: str) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ModelError(f"{where}: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]
