"""Turn the metadata of a GGUF file into what config.json of a Hugging Face directory says.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Standardized key-value pairs".
"""

from __future__ import annotations

from typing import Any

from shared.errors import ModelError
from shared.models.gguf.reader import FLOATS, GgufFile
from shared.models.gguf.tokenizer import end_ids, token_count

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""general.architecture -> the name in config.json."""
_ONLY: dict[str, tuple[float, ...]] = {
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attention.output_scale": (0,),
    "attention.scale": (0,), "attention.temperature_scale": (0,), "attn_logit_softcapping": (0,),
    "embedding_scale": (0,), "expert_count": (0,), "expert_gating_func": (0, 1), "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1), "expert_shared_count": (0,), "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,), "interleave_moe_layer_step": (0, 1), "leading_dense_block_count": (0,),
    "logit_scale": (0,), "moe_every_n_layers": (0, 1), "residual_scale": (0,), "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,), "router_logit_softcapping": (0,),
}  # fmt: skip
"""Key -> the values that can be computed. An expert_gating_func of 1 is the softmax."""
_ARCHITECTURE_KEYS = {
    "llama": ("expert_count",),
    "qwen2moe": ("expert_count", "expert_shared_count"),
    "qwen3moe": ("expert_count",),
    "gpt-oss": ("expert_count",),
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
}
"""Architecture -> the keys of _ONLY that are read for it."""
_NORMALIZES = {"llama": True, "qwen2moe": False, "qwen3moe": True, "gpt-oss": True}
"""Architectures with experts -> whether the weights of a row add up to 1 where the file does not say."""
_WINDOWS = {"llama": 0, "phi3": 0, "gpt-oss": 128, "gemma2": 4096, "gemma3": 0}
"""Architectures with windows -> the window where the file names none; 0: there is none."""
_BIASES = {
    "attn_q": "qkv_proj", "attn_k": "qkv_proj", "attn_v": "qkv_proj", "attn_qkv": "qkv_proj", "attn_output": "o_proj",
    "ffn_gate": "mlp", "ffn_up": "mlp", "ffn_down": "mlp", "ffn_gate_inp": "router", "ffn_gate_exps": "mlp",
    "ffn_up_exps": "mlp", "ffn_down_exps": "mlp", "output": "lm_head",
}  # fmt: skip
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The 27B models alone divide their scores by the root of hidden_size / heads; the file does not say so."""


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return config.json. Raise ModelError naming the key that is missing or refused."""
    name = file.text("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: general.architecture {name[:60]!r} is not supported, {', '.join(ARCHITECTURES)} are; choose "
            "another model, or one with safetensors"
        )
    for key, values in _ONLY.items():
        if key not in _ARCHITECTURE_KEYS.get(name, ()) and file.number(f"{name}.{key}", 0) not in values:
            raise ModelError(
                f"{file.path}: {name}.{key} {file.number(f'{name}.{key}'):g} is not supported; choose another model"
            )
    if not file.flag(f"{name}.attention.causal", True):
        raise ModelError(f"{file.path}: {name}.attention.causal false is not supported; choose another model")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing or no matrix; fetch it again")
    if token_count(file) > embedding.shape[0]:
        raise ModelError(
            f"{file.path}: {token_count(file)} tokens, and token_embd.weight has rows for {embedding.shape[0]}; "
            "convert the model again"
        )
    hidden_size, heads = file.integer(f"{name}.embedding_length"), file.integer(f"{name}.attention.head_count", least=1)
    head_dim = file.integer(f"{name}.attention.key_length", hidden_size // heads, least=1)
    if file.integer(f"{name}.attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: {name}.attention.value_length differs from key_length; choose another model")
    layers = file.integer(f"{name}.block_count")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name]],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.integer(f"{name}.context_length"),
        "rms_norm_eps": file.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
        "eos_token_id": end_ids(file),
        **_rope(file, name, head_dim),
        **_windows(file, name),
    }
    if name == "llama" and config["sliding_window"]:
        config["architectures"] = ["MistralForCausalLM"]
    if mixture := _mixture(file, name):
        config |= mixture
        if name == "llama":
            config["architectures"] = ["MixtralForCausalLM"]
    if name in _GEMMA_27B_LAYERS:
        config["query_pre_attn_scalar"] = hidden_size // heads if layers == _GEMMA_27B_LAYERS[name] else head_dim
    if name == "gemma2":
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if f"{name}.{cap}" in file:
                config[cap] = file.number(f"{name}.{cap}")
    return config


def biases_of(file: GgufFile) -> frozenset[str]:
    """Return the kinds of biases (services.worker.models.registry.Family.biases) that the file has."""
    return frozenset(bias_kind(name) for name in file.tensors if name.endswith(".bias")) - {""}


def bias_kind(name: str) -> str:
    """Return the kind of a bias of the file; empty for one of a norm or of an unknown tensor."""
    return _BIASES.get(name.removesuffix(".bias").rpartition(".")[2], "")


def rope_factors(file: GgufFile, rotary: int) -> list[float]:
    """Return what each frequency of the rotary embedding is divided by, [rotary / 2]; empty where it is not."""
    if "rope_freqs.weight" not in file.tensors:
        return []
    factors = file.floats("rope_freqs.weight", rotary // 2)
    if not all(1e-3 <= factor <= 1e6 for factor in factors):  # NaN is in no range
        raise ModelError(f"{file.path}: rope_freqs.weight has numbers outside 0.001 to 1e6; convert the model again")
    return factors


def _windows(file: GgufFile, name: str) -> dict[str, Any]:
    """Return sliding_window, and which layers have it where the file says so; empty for an architecture without."""
    if name not in _WINDOWS:
        return {}
    window = file.integer(f"{name}.attention.sliding_window", _WINDOWS[name])
    fields: dict[str, Any] = {"sliding_window": window or None}
    pattern = f"{name}.attention.sliding_window_pattern"
    if pattern not in file or name not in ("gemma2", "gemma3", "gpt-oss"):
        return fields
    if not file.count(pattern):
        return {**fields, "sliding_window_pattern": file.integer(pattern)}
    return {**fields, "layer_types": [f"{'sliding' if one else 'full'}_attention" for one in file.flags(pattern)]}


def _mixture(file: GgufFile, name: str) -> dict[str, Any]:
    """Return the fields of a mixture of experts in every layer; empty where the file has none."""
    if name not in _NORMALIZES or (name == "llama" and not file.integer(f"{name}.expert_count", 0)):
        return {}
    experts = file.integer(f"{name}.expert_count", least=1)
    top_k = file.integer(f"{name}.expert_used_count", least=1, most=experts)
    normalizes = file.flag(f"{name}.expert_weights_norm", _NORMALIZES[name])
    if not normalizes and name in ("llama", "gpt-oss"):
        raise ModelError(f"{file.path}: {name}.expert_weights_norm false is not supported; choose another model")
    inner = file.integer(f"{name}.feed_forward_length")
    each = inner // top_k if name.startswith("qwen") else inner  # where the file does not say
    each = file.integer(f"{name}.expert_feed_forward_length", each)
    fields = {
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": normalizes,
        "intermediate_size": each,
        "moe_intermediate_size": each,
    }
    if name == "qwen2moe":
        fields["shared_expert_intermediate_size"] = file.integer(f"{name}.expert_shared_feed_forward_length", inner)
    return fields


def _rope(file: GgufFile, name: str, head_dim: int) -> dict[str, Any]:
    """Return rope_theta, partial_rotary_factor and rope_scaling."""
    base = f"{name}.rope"
    fields: dict[str, Any] = {"rope_theta": file.number(f"{base}.freq_base", 1e6 if name == "gemma3" else 1e4)}
    if name == "gemma3":
        fields["rope_local_base_freq"] = file.number(f"{base}.freq_base_swa", 10000.0)
    elif (local := file.number(f"{base}.freq_base_swa", fields["rope_theta"])) != fields["rope_theta"]:
        raise ModelError(f"{file.path}: {base}.freq_base_swa {local:g} is not supported; choose another model")
    if (rotary := file.integer(f"{base}.dimension_count", head_dim)) != head_dim:
        fields["partial_rotary_factor"] = rotary / head_dim
    if any(key.startswith("rope_factors_") for key in file.tensors):
        raise ModelError(
            f"{file.path}: rope factors for long and short contexts are not supported; choose the model with the short "
            "context"
        )
    kind = file.text(f"{base}.scaling.type", "linear" if f"{base}.scale_linear" in file else "none")
    if kind == "none":
        return {**fields, "rope_scaling": {"rope_type": "default"}}
    factor = file.number(f"{base}.scaling.factor", file.number(f"{base}.scale_linear", 1.0))
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if f"{base}.scaling.original_context_length" in file:
        scaling["original_max_position_embeddings"] = file.integer(f"{base}.scaling.original_context_length")
    for key, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if f"{base}.scaling.{key}" in file:
            scaling[ours] = file.number(f"{base}.scaling.{key}")
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if file.number(f"{base}.scaling.{key}", 1.0) != 1.0:
            raise ModelError(f"{file.path}: {base}.scaling.{key} other than 1 is not supported; choose another model")
    if name == "gpt-oss":
        scaling["truncate"] = False  # as its config.json has it; no key says so
    return {**fields, "rope_scaling": scaling}


def _dtype(file: GgufFile) -> str:
    """Return the type that the worker computes in by default: that of most of the weights; float16 of packed ones."""
    sizes = dict.fromkeys(FLOATS, 0)
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type.name if tensor.type.name in FLOATS else "F16"] += tensor.size_bytes
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[max(sizes, key=lambda name: sizes[name])]
