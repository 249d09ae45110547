"""Read config.json of a Hugging Face directory into one frozen DecoderConfig that describes the whole decoder.

A checkpoint that this worker cannot compute exactly as it is meant is refused here, before any weight is read. Each
field is read with a type and bounds (`fields`). The part that the architecture's name decides is in `registry`.
Imports no torch: `orcinus up` reads before anything starts.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.worker.checkpoint.stored import Stored, read_stored, stored_of_gguf
from services.worker.models.registry import FAMILIES, ExpertNames, Family
from shared.errors import ConfigurationError, ModelError
from shared.models.fields import Fields
from shared.models.gguf.config import biases_of, config_of, rope_factors
from shared.models.gguf.reader import GgufFile, is_gguf, open_gguf
from shared.models.model_files import AGAIN, read_json

DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 4096
MAX_EXPERTS = 1024
BESIDE_TEXT = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "compression_config")
"""Fields that hold for text_config unless they are in it."""
LAYER_TYPES = ("full_attention", "sliding_attention")
EITHER_NAME = {
    "hidden_size", "max_position_embeddings", "num_attention_heads", "num_experts", "num_hidden_layers",
}  # fmt: skip
"""Fields that a family with another name for them may have under either, by the attribute_map of transformers."""


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding. `factor`, `original_context` and what follows are read by the scaling variants only."""

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


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts in place of the MLP of some layers."""

    names: ExpertNames
    experts: int
    top_k: int  # of a row
    intermediate_size: int  # of each expert
    shared_size: int  # intermediate size of the expert that every row has; 0: there is none
    normalize: bool  # the weights of a row's experts add up to 1
    layers: frozenset[int]  # of the whole model


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
    parallel_residual: bool  # attention and MLP read the same rows and are added together
    biases: frozenset[str]  # of qkv_proj, o_proj, mlp, lm_head, router, experts
    activation: str  # of kernels.ops.GATED_ACTIVATIONS
    scale: float  # of attention scores
    score_softcap: float  # see kernels.ops.Attention.softcap
    logit_softcap: float  # logits become cap * tanh(logit / cap); 0: they stay
    windows: tuple[int, ...]  # positions that each layer sees, including the row's position; 0: all
    rope: Rope | None
    local_rope: Rope | None  # of the layers with a window; None: as the others
    checkpoint_dtype: str  # of DTYPES
    stored: Stored | None = None  # how a quantized checkpoint holds the layers' matrices
    mixture: Mixture | None = None
    token_types: int = 0  # of an encoder: rows of token_type_embeddings

    @property
    def gate_up_size(self) -> int:
        """Return the outputs of gate_up_proj: gate and up together where the MLP is gated."""
        return self.intermediate_size * (2 if self.family.gated else 1)

    def mixture_at(self, layer: int) -> Mixture | None:
        """Return the mixture of experts of layer `layer` of the whole model; None where it has an MLP."""
        return self.mixture if self.mixture is not None and layer in self.mixture.layers else None


def load_config(model: Path) -> DecoderConfig:
    """Read `model`/config.json, or a GGUF file. Raise ModelError naming the field, its value and what would work."""
    where = str(model)
    try:
        if is_gguf(model):
            return _of_gguf(open_gguf(model))
        if not model.is_dir():
            raise ModelError(f"model directory {model} does not exist; set MODEL to a Hugging Face model directory")
        where = str(model / "config.json")
        return parse_config(read_json(model / "config.json"), where)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ModelError(f"{where} does not hold what a config holds: {problem}; {AGAIN}") from error


def _of_gguf(file: GgufFile) -> DecoderConfig:
    config = parse_config(config_of(file), str(file.path))
    rope = config.rope
    if rope is not None:
        rope = replace(rope, divisors=tuple(rope_factors(file, rope.rotary)))
    # The file has Gemma's norms as they are multiplied, and each matrix as [outputs, inputs].
    family = replace(config.family, norm_offset=0.0, transposed=False, interleaved=False)
    mixture = config.mixture
    if mixture is not None and mixture.names.stacked:  # GgufWeights cuts the stacks into the experts' matrices
        names = replace(mixture.names, gate_up_proj=("gate_proj", "up_proj"), stacked=False)
        mixture = replace(mixture, names=names)
        family = replace(family, names=replace(family.names, experts=names), biases=frozenset({"router", "mlp"}))
    biases = family.biases | biases_of(file)  # no key says which there are
    return replace(config, family=family, rope=rope, biases=biases, stored=stored_of_gguf(file), mixture=mixture)


def parse_config(raw: dict[str, Any], where: str) -> DecoderConfig:
    """Return the pure part of load_config; `where` names the file in errors."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(f"{where}: architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if family.text_config:
        raw = {
            **{key: raw[key] for key in BESIDE_TEXT if key in raw},
            **Fields(raw, where, remedy=AGAIN).fields("text_config"),
        }
        where = f"{where}: text_config"
    renamed = {key: raw[name] for key, name in family.field_names.items() if name in raw}
    ignored = family.field_names.keys() - EITHER_NAME
    raw = {**family.defaults, **{key: value for key, value in raw.items() if key not in ignored}, **renamed}
    read = Fields(raw, where, family.field_names, AGAIN)
    _refuse_unsupported(read, family)
    hidden = read.integer("hidden_size")
    heads = read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", heads)
    if raw.get("head_dim") is None and hidden % heads:
        raise ModelError(f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}; {AGAIN}")
    head_dim = read.integer("head_dim", hidden // heads)
    if heads % kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}; {AGAIN}"
        )
    layers = read.integer("num_hidden_layers", most=MAX_LAYERS)
    context = read.integer("max_position_embeddings", 2048, least=1 + family.position_offset * family.is_encoder)
    if family.is_encoder:
        context -= family.position_offset  # max_position_embeddings counts the rows before position 0
    rope, local_rope = _ropes(read, family, head_dim)
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
        tied=family.is_encoder or read.flag("tie_word_embeddings"),
        parallel_residual=(
            read.flag(family.parallel_residual)
            if isinstance(family.parallel_residual, str)
            else family.parallel_residual
        ),
        biases=family.biases | switched,
        activation=_activation(read, family),
        scale=(read.integer(family.scale_field) if family.scale_field else head_dim) ** -0.5,
        score_softcap=_softcap(read, family, "attn_logit_softcapping"),
        logit_softcap=_softcap(read, family, "final_logit_softcapping"),
        windows=_windows(read, family, layers),
        rope=rope,
        local_rope=local_rope,
        checkpoint_dtype=_dtype(read),
        stored=read_stored(raw, where),
        mixture=None if family.names.experts is None else _mixture(read, family, family.names.experts, layers),
        token_types=read.integer("type_vocab_size", most=1024) if family.is_encoder else 0,
    )


def _refuse_unsupported(read: Fields, family: Family) -> None:
    raw, where = read.raw, read.source
    for key, value in {**({} if family.is_encoder else {"is_causal": True}), **family.only}.items():
        setting = raw.get(key)
        if setting is not None and setting != value:
            raise ModelError(f"{where}: {key} {json.dumps(setting)} is not supported; only {json.dumps(value)} is")
    if family.scores:
        labels = len(read.fields("id2label")) or read.integer("num_labels", 2)
        if labels != 1:
            raise ModelError(f"{where}: {labels} labels are not supported; only a reranker with one label is")
    embedded = raw.get("word_embed_proj_dim")
    if embedded is not None and embedded != raw.get("hidden_size"):
        raise ModelError(
            f"{where}: word_embed_proj_dim {embedded} is not supported; only hidden_size {raw.get('hidden_size')} is"
        )


def _activation(read: Fields, family: Family) -> str:
    known, value = family.activations, read.text("hidden_act", family.defaults.get("hidden_act", "silu"))
    if value not in known:
        called = family.field_names.get("hidden_act", "hidden_act")
        raise ModelError(f"{read.source}: {called} {value!r} is not supported; supported: {', '.join(known)}")
    return known[value]


def _softcap(read: Fields, family: Family, key: str) -> float:
    """Return the bound of a softcap; 0 where there is none."""
    if not family.softcaps or read.raw.get(key) is None:
        return 0.0
    return read.number(key, 1e-3, 1e6)


def _windows(read: Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Return how many of the latest positions each layer sees; 0 means all.

    Qwen2 writes a window that it then switches off.
    """
    raw, where, way = read.raw, read.source, family.windows
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
            "use a checkpoint with sliding_window null"
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
        raise ModelError(
            f"{where}: layer_types has sliding_attention, but sliding_window is null or switched off; {AGAIN}"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


def _mixture(read: Fields, family: Family, names: ExpertNames, layers: int) -> Mixture:
    experts, top_k = read.integer("num_experts", most=MAX_EXPERTS), read.integer("num_experts_per_tok")
    if top_k > experts:
        raise ModelError(
            f"{read.source}: num_experts_per_tok {top_k} is more than {read.name('num_experts')} {experts}; {AGAIN}"
        )
    dense = read.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise ModelError(
            f"{read.source}: mlp_only_layers is {json.dumps(dense)[:60]}, expected a list of layers; {AGAIN}"
        )
    step = read.integer("decoder_sparse_step", 1)
    return Mixture(
        names=names,
        experts=experts,
        top_k=top_k,
        intermediate_size=read.integer("moe_intermediate_size"),
        shared_size=read.integer("shared_expert_intermediate_size") if names.shared else 0,
        normalize=family.normalize_experts or read.flag("norm_topk_prob"),
        layers=frozenset(index for index in range(layers) if (index + 1) % step == 0) - set(dense),
    )


def _dtype(read: Fields) -> str:
    name = read.text("dtype", read.text("torch_dtype", "float32"))
    if name not in DTYPES:
        raise ModelError(f"{read.source}: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


def _ropes(read: Fields, family: Family, head_dim: int) -> tuple[Rope | None, Rope | None]:
    """Return the rotary embedding, and that of layers with a window where it is another. Raise ModelError.

    Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).
    """
    if family.positions != "rope":
        return None, None
    raw, scaling, settings = read.raw, read.fields("rope_scaling"), read.fields("rope_parameters")
    beside = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    if not family.local_rope:
        return _rope({**beside, **(scaling or settings)}, read, family, head_dim), None
    # The bases of Gemma 3's layers where none is given (transformers, models/gemma3/configuration_gemma3.py).
    kinds = Fields(settings, read.source, remedy=AGAIN)
    whole = {"rope_theta": raw.get("rope_theta") or 1e6, **kinds.fields("full_attention"), **scaling}
    local = {"rope_theta": raw.get("rope_local_base_freq") or 1e4, **kinds.fields("sliding_attention")}
    return _rope(whole, read, family, head_dim), _rope(local, read, family, head_dim)


def _rope(raw: dict[str, Any], whole: Fields, family: Family, head_dim: int) -> Rope:
    """Return the rotary embedding that `raw` describes; `whole` is all of config.json."""
    where, fields = whole.source, Fields(raw, whole.source, remedy=AGAIN)
    if any(isinstance(value, dict) for value in raw.values()):
        kinds = ", ".join(key for key, value in raw.items() if isinstance(value, dict))
        raise ModelError(
            f"{where}: rope settings per layer type ({kinds}) are not supported for this architecture; "
            "choose another model"
        )
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
        raise ModelError(f"{where}: rope_type {kind!r} needs a factor; {AGAIN}")
    factor = fields.number("factor", 1e-3, 1e6, context / original)
    if kind == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= raw.keys():
        raise ModelError(f"{where}: rope_type 'llama3' needs low_freq_factor and high_freq_factor; {AGAIN}")
    low = fields.number("low_freq_factor", 1e-3, 1e6, 1.0)
    high = fields.number("high_freq_factor", 1e-3, 1e6, 4.0)
    if kind == "llama3" and high <= low:
        raise ModelError(f"{where}: high_freq_factor {high} must be more than low_freq_factor {low}; {AGAIN}")
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


def check_split(config: DecoderConfig, tp: int, pp: int) -> None:
    """Raise ConfigurationError for a model that cannot be split over `tp` ranks and `pp` stages."""
    if tp > 1 and config.stored is not None and config.stored.rounds_rows:
        raise ConfigurationError(
            f"--tp {tp}: activations of a W8A8 checkpoint are rounded by the largest number of a whole row, of which a "
            "rank has a part; give --tp 1 and perhaps --pp, or choose the unquantized model"
        )
    sizes = [("num_attention_heads", config.heads)]
    if config.mixture is None or len(config.mixture.layers) < config.layers:
        sizes.append(("intermediate_size", config.intermediate_size))
    if config.mixture is not None:
        field = "moe_intermediate_size"
        sizes.append((config.family.field_names.get(field, field), config.mixture.intermediate_size))
        sizes.append(("shared_expert_intermediate_size", config.mixture.shared_size))
    for name, value in sizes:
        if value % tp:
            raise ConfigurationError(f"--tp {tp} does not divide the model's {name} {value}; {_fewer(value, tp)}")
    if config.kv_heads % tp and tp % config.kv_heads:
        raise ConfigurationError(
            f"--tp {tp} neither divides the model's num_key_value_heads {config.kv_heads} nor is a multiple of it; "
            f"{_fewer(config.kv_heads, tp)}"
        )
    if pp > config.layers:
        raise ConfigurationError(f"--pp {pp} is more stages than the model's {config.layers} layers; lower it")


def rank_config(config: DecoderConfig, tp: int, pp: int) -> DecoderConfig:
    """Return the configuration with the heads and widths of each of `tp` ranks, and all layers.

    Raise ConfigurationError as `check_split`.
    """
    check_split(config, tp, pp)
    mixture = config.mixture
    return replace(
        config,
        heads=config.heads // tp,
        kv_heads=max(1, config.kv_heads // tp),
        intermediate_size=config.intermediate_size // tp,
        mixture=mixture
        and replace(mixture, intermediate_size=mixture.intermediate_size // tp, shared_size=mixture.shared_size // tp),
    )


def _fewer(value: int, tp: int) -> str:
    below = max(number for number in range(1, tp) if value % number == 0)
    return f"--tp {below} does"
