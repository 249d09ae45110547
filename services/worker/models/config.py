"""config.json of a Hugging Face directory -> one frozen DecoderConfig that describes the whole decoder.

What this worker cannot compute exactly as the checkpoint means it is refused here, before any weight is read. What the
architecture's name decides is in families.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.worker.models.families import FAMILIES, Family
from services.worker.models.rope import Rope, ropes_from
from shared.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder: attention with grouped KV heads and an MLP, layer after layer. `family` says how they are joined."""

    architecture: str
    family: Family
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
    parallel: bool  # attention and MLP read the same rows and are added together
    biases: frozenset[str]  # of qkv, out, mlp, head
    activation: str  # of kernels.ops.ACTIVATIONS
    scale: float  # of attention scores
    windows: tuple[int, ...]  # positions that each layer sees, the row's own included; 0: all
    rope: Rope | None
    local_rope: Rope | None  # of the layers with a window; None: as the others
    checkpoint_dtype: torch.dtype

    @property
    def up_size(self) -> int:
        """Outputs of the MLP's first matrix: gate and up together where it is gated."""
        return self.intermediate_size * (2 if self.family.gated else 1)


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
    if name not in FAMILIES:
        raise ModelError(f"{where}: architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    raw = {**family.defaults, **{key: raw[own] for key, own in family.called.items() if own in raw}, **raw}
    read = _Fields(raw, family, where)
    _refuse_unsupported(read)
    hidden = read.positive("hidden_size")
    heads = read.positive("num_attention_heads")
    kv_heads = read.positive("num_key_value_heads", heads)
    if raw.get("head_dim") is None and hidden % heads:
        raise ModelError(f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    head_dim = read.positive("head_dim", hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    layers = read.positive("num_hidden_layers")
    context = read.positive("max_position_embeddings", 2048)
    rope, local_rope = ropes_from(raw, family, head_dim, where)
    switched = {part for key, parts in family.bias_fields.items() if raw.get(key) for part in parts}
    return DecoderConfig(
        architecture=name,
        family=family,
        vocab_size=read.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.positive("intermediate_size", family.mlp_ratio * hidden or None),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw["norm_eps"]),
        context=context,
        tied=bool(raw.get("tie_word_embeddings", False)),
        parallel=bool(raw.get(family.parallel)) if isinstance(family.parallel, str) else family.parallel,
        biases=family.biases | switched,
        activation=_activation(read),
        scale=(read.positive(family.scale_field) if family.scale_field else head_dim) ** -0.5,
        windows=_windows(read, layers),
        rope=rope,
        local_rope=local_rope,
        checkpoint_dtype=_dtype(raw, where),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of config.json under their usual names, defaults filled in."""

    raw: dict[str, Any]
    family: Family
    where: str

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None:
            value = default
        own = self.family.called.get(key)
        called = f"{key} ({own})" if own else key
        if value is None:
            raise ModelError(f"{self.where}: {called} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.where}: {called} is {value!r}, expected a positive integer")
        return value


def _refuse_unsupported(read: _Fields) -> None:
    raw, where = read.raw, read.where
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "?")
        raise ModelError(f"{where}: quantization_config ({method}) is not supported; use the unquantized checkpoint")
    for key, value in read.family.only.items():
        found = raw.get(key)
        if found is not None and found != value:
            raise ModelError(f"{where}: {key} {json.dumps(found)} is not supported; only {json.dumps(value)} is")
    embedded = raw.get("word_embed_proj_dim")
    if embedded is not None and embedded != raw.get("hidden_size"):
        raise ModelError(
            f"{where}: word_embed_proj_dim {embedded} is not supported; only hidden_size {raw.get('hidden_size')} is"
        )


def _activation(read: _Fields) -> str:
    known, value = read.family.activations, read.raw.get("hidden_act", "silu")
    if value not in known:
        called = read.family.called.get("hidden_act", "hidden_act")
        raise ModelError(f"{read.where}: {called} {value!r} is not supported; supported: {', '.join(known)}")
    return known[value]


def _windows(read: _Fields, layers: int) -> tuple[int, ...]:
    """Which layers see the latest positions only, and how many. Qwen2 writes a window that it then switches off."""
    raw, where, way = read.raw, read.where, read.family.windows
    off = raw.get("sliding_window") is None or not raw.get("use_sliding_window", True)
    window = 0 if off else read.positive("sliding_window")
    kinds = raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) < layers or set(kinds) - set(LAYER_TYPES)):
        raise ModelError(f"{where}: layer_types {kinds} is not supported; {layers} of {', '.join(LAYER_TYPES)} are")
    if way == "none" and window:
        raise ModelError(
            f"{where}: sliding_window {window} is not supported for this architecture; "
            "use a checkpoint whose sliding_window is null"
        )
    if kinds is None or way in ("none", "all"):
        if way == "upper":
            here = [index >= raw["max_window_layers"] for index in range(layers)]
        elif way == "pattern":
            here = [bool((index + 1) % raw["sliding_window_pattern"]) for index in range(layers)]
        else:
            here = [bool(window)] * layers
        expected = [LAYER_TYPES[slides and window > 0] for slides in here]
        if kinds is not None and kinds[:layers] != expected:
            raise ModelError(
                f"{where}: layer_types {sorted(set(kinds))} with sliding_window {window or 'null'} are not supported "
                "for this architecture; only layers that are all alike are"
            )
        kinds = expected
    if "sliding_attention" in kinds and not window:
        raise ModelError(f"{where}: layer_types has sliding_attention, but sliding_window is null or switched off")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


def _dtype(raw: dict[str, Any], where: str) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ModelError(f"{where}: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]
