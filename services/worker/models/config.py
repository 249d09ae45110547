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

from services.worker.models.fields import Fields
from services.worker.models.registry import FAMILIES, Family
from services.worker.models.rope import Rope, ropes_from
from shared.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_LAYERS = 4096
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
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def load_config(model: Path) -> DecoderConfig:
    """Reads `model`/config.json. Raises ModelError naming the field, its value and what would work."""
    if not model.is_dir():
        raise ModelError(f"model directory {model} does not exist; set MODEL to a Hugging Face model directory")
    raw, where = read_json(model / "config.json"), str(model / "config.json")
    try:
        return parse_config(raw, where)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ModelError(f"{where} does not hold what a config holds: {type(error).__name__}: {error}") from error


def parse_config(raw: dict[str, Any], where: str) -> DecoderConfig:
    """The pure part of load_config; `where` names the file in errors."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(f"{where}: architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    raw = {**family.defaults, **{key: raw[own] for key, own in family.called.items() if own in raw}, **raw}
    read = Fields(raw, where, family.called)
    _refuse_unsupported(read, family)
    hidden = read.integer("hidden_size")
    heads = read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", heads)
    if raw.get("head_dim") is None and hidden % heads:
        raise ModelError(f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    head_dim = read.integer("head_dim", hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    layers = read.integer("num_hidden_layers", most=MOST_LAYERS)
    context = read.integer("max_position_embeddings", 2048)
    rope, local_rope = ropes_from(read, family, head_dim)
    switched = {part for key, parts in family.bias_fields.items() if read.flag(key) for part in parts}
    return DecoderConfig(
        architecture=name,
        family=family,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size", family.mlp_ratio * hidden or None),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("norm_eps", 0, 1),
        context=context,
        tied=read.flag("tie_word_embeddings"),
        parallel=read.flag(family.parallel) if isinstance(family.parallel, str) else family.parallel,
        biases=family.biases | switched,
        activation=_activation(read, family),
        scale=(read.integer(family.scale_field) if family.scale_field else head_dim) ** -0.5,
        windows=_windows(read, family, layers),
        rope=rope,
        local_rope=local_rope,
        checkpoint_dtype=_dtype(read),
    )


def _refuse_unsupported(read: Fields, family: Family) -> None:
    raw, where = read.raw, read.where
    if raw.get("quantization_config"):
        given = raw["quantization_config"]
        method = given.get("quant_method", "?") if isinstance(given, dict) else given
        raise ModelError(f"{where}: quantization_config ({method}) is not supported; use the unquantized checkpoint")
    for key, value in family.only.items():
        found = raw.get(key)
        if found is not None and found != value:
            raise ModelError(f"{where}: {key} {json.dumps(found)} is not supported; only {json.dumps(value)} is")
    embedded = raw.get("word_embed_proj_dim")
    if embedded is not None and embedded != raw.get("hidden_size"):
        raise ModelError(
            f"{where}: word_embed_proj_dim {embedded} is not supported; only hidden_size {raw.get('hidden_size')} is"
        )


def _activation(read: Fields, family: Family) -> str:
    known, value = family.activations, read.text("hidden_act", family.defaults.get("hidden_act", "silu"))
    if value not in known:
        called = family.called.get("hidden_act", "hidden_act")
        raise ModelError(f"{read.where}: {called} {value!r} is not supported; supported: {', '.join(known)}")
    return known[value]


def _windows(read: Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Which layers see the latest positions only, and how many. Qwen2 writes a window that it then switches off."""
    raw, where, way = read.raw, read.where, family.windows
    off = raw.get("sliding_window") is None or not read.flag("use_sliding_window", "use_sliding_window" not in raw)
    window = 0 if off else read.integer("sliding_window")
    kinds = raw.get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) >= layers and all(kind in LAYER_TYPES for kind in kinds)
    ):
        raise ModelError(f"{where}: layer_types {kinds} is not supported; {layers} of {', '.join(LAYER_TYPES)} are")
    if way == "none" and window:
        raise ModelError(
            f"{where}: sliding_window {window} is not supported for this architecture; "
            "use a checkpoint whose sliding_window is null"
        )
    if kinds is None or way in ("none", "all"):
        if way == "upper":
            first = read.integer("max_window_layers", least=0)
            here = [index >= first for index in range(layers)]
        elif way == "pattern":
            pattern = read.integer("sliding_window_pattern")
            here = [bool((index + 1) % pattern) for index in range(layers)]
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


def _dtype(read: Fields) -> torch.dtype:
    name = read.text("dtype", read.text("torch_dtype", "float32"))
    if name not in DTYPES:
        raise ModelError(f"{read.where}: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]
