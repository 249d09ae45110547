"""The model families: how an architecture differs from Llama beyond the fields of its config.json.

A table: `config` reads the fields of a family from it, `weights` the names and the order of its tensors, `layers` the
parts of a layer. A new architecture is a row of FAMILIES. Source: the configuration and modeling files of transformers
5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""hidden_act of a config -> kernels.ops.ACTIVATIONS."""

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The checkpoint's names in a layer with a mixture of experts; expert n's matrices lie under `experts`.n.

    stacked: all experts lie in the tensors `experts`.gate_up_proj and `experts`.down_proj [experts, inputs, outputs],
    their biases in tensors of these names and _bias. The even outputs of the first are gate's, the odd ones up's.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate_up_proj: tuple[str, ...] = ("gate_proj", "up_proj")
    down_proj: str = "down_proj"
    shared: str | None = None  # an expert that every row has
    shared_gate: str | None = None
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """The checkpoint's names of tensors, without `.weight` and `.bias`; None means that there is no such tensor."""

    prefix: str = "model."  # of every name but lm_head; some checkpoints leave it out
    other_prefixes: tuple[str, ...] = ()  # that others have in its place
    embed_tokens: str = "embed_tokens"
    embed_norm: str | None = None
    position_embeddings: str | None = None
    layers: str = "layers"
    input_norm: str = "input_layernorm"
    qkv_proj: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # one name: one matrix
    q_norm: str | None = None
    k_norm: str | None = None
    sinks: str | None = None  # a number for each head, without .weight
    o_proj: str = "self_attn.o_proj"
    attention_norm: str | None = None  # of the attention's output, before it is added
    mlp_norm: str = "post_attention_layernorm"
    gate_up_proj: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # one name: one matrix
    down_proj: str = "mlp.down_proj"
    down_norm: str | None = None  # of the MLP's output, before it is added
    experts: ExpertNames | None = None  # in place of the MLP, where the family has a mixture of experts
    norm: str = "norm"
    lm_head: str = "lm_head"
    type_embeddings: str | None = None  # of encoders
    head: tuple[str, str] | None = None  # of encoders that score: its two layers


@dataclass(frozen=True, slots=True)
class Family:
    """How the decoders of one architecture differ from Llama's."""

    names: Names = field(default_factory=Names)
    field_names: Mapping[str, str] = field(default_factory=dict)  # field -> its name in this family's config.json
    defaults: Mapping[str, Any] = field(default_factory=dict)  # value of a field that is left out
    only: Mapping[str, Any] = field(default_factory=dict)  # fields with the one value that can be computed
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    positions: Literal["rope", "learned", "alibi"] = "rope"
    position_offset: int = 0  # row of the learned positions that position 0 has
    rope_types: tuple[str, ...] = ROPE_TYPES
    partial_rotary: bool = False  # partial_rotary_factor is heeded
    windows: Literal["none", "all", "upper", "pattern"] = "none"  # which layers a sliding_window is for
    local_rope: bool = False  # layers with a window have a separate rotary embedding
    softcaps: bool = False  # attn_logit_softcapping and final_logit_softcapping are heeded
    scale_field: str | None = None  # scores are divided by its root; None: head_dim's
    text_config: bool = False  # the fields of the decoder lie in text_config
    unread: tuple[str, ...] = ()  # what the names of tensors begin with that are no part of the decoder
    layer_norm: bool = False
    norm_offset: float = 0.0  # the norms multiply by their weight + this
    embedding_scale: bool = False  # embeddings are multiplied by sqrt(hidden_size)
    gated: bool = True
    mlp_ratio: int = 0  # intermediate_size, where none is given, in hidden sizes
    parallel_residual: str | bool = False  # attention and MLP read the same rows; a string names the field that says so
    biases: frozenset[str] = frozenset()  # of qkv_proj, o_proj, mlp, lm_head, router, experts
    bias_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # field -> the biases that it switches on
    transposed: bool = False  # matrices of the layers lie [inputs, outputs]
    normalize_experts: bool = False  # the weights of a row's experts add up to 1, whatever norm_topk_prob says
    is_encoder: bool = False  # attention both ways, norms behind the sums (models/encoder.py)
    scores: bool = False  # an encoder with a head of one label
    interleaved: bool = False  # the one qkv_proj matrix holds q, k, v of head 0, then of head 1, ...


_RMS = {"norm_eps": "rms_norm_eps"}
_ATTENTION_BIAS = {"attention_bias": ("qkv_proj", "o_proj")}
_LLAMA = Family(field_names=_RMS, defaults={"norm_eps": 1e-6})
_QWEN = replace(
    _LLAMA,
    defaults={
        "norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    windows="upper",
)
_QWEN_MOE = {
    "norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
_GEMMA = replace(
    _LLAMA,
    defaults={
        "norm_eps": 1e-6,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    # Older configs write gelu and mean the tanh form (transformers, models/gemma/configuration_gemma.py).
    activations={**ACTIVATIONS, "gelu": "gelu_tanh"},
    only={"use_bidirectional_attention": False},
    norm_offset=1.0,
    embedding_scale=True,
    bias_fields=_ATTENTION_BIAS,
)
_FUSED_NAMES = Names(
    prefix="transformer.",
    layers="h",
    qkv_proj=("self_attention.query_key_value",),
    o_proj="self_attention.dense",
    gate_up_proj=("mlp.dense_h_to_4h",),
    down_proj="mlp.dense_4h_to_h",
    norm="ln_f",
)

_GEMMA2_NAMES = Names(
    attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    down_norm="post_feedforward_layernorm",
)
_GEMMA2 = replace(
    _GEMMA,
    names=_GEMMA2_NAMES,
    field_names={**_RMS, "hidden_act": "hidden_activation"},
    defaults={
        **_GEMMA.defaults,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    activations=ACTIVATIONS,
    only={**_GEMMA.only, "sliding_window_pattern": 2},  # transformers reads none
    windows="pattern",
    scale_field="query_pre_attn_scalar",
    softcaps=True,
)
_GEMMA3 = replace(
    _GEMMA2,
    names=replace(_GEMMA2_NAMES, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    defaults={
        **_GEMMA2.defaults,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    # transformers caps scores or does not, by the way in which it computes attention.
    only={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    local_rope=True,
)

_BERT_NAMES = Names(
    prefix="bert.",
    embed_tokens="embeddings.word_embeddings",
    embed_norm="embeddings.LayerNorm",
    position_embeddings="embeddings.position_embeddings",
    type_embeddings="embeddings.token_type_embeddings",
    layers="encoder.layer",
    qkv_proj=("attention.self.query", "attention.self.key", "attention.self.value"),
    o_proj="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    gate_up_proj=("intermediate.dense",),
    down_proj="output.dense",
    down_norm="output.LayerNorm",
    head=("bert.pooler.dense", "classifier"),
)
_BERT = Family(
    names=_BERT_NAMES,
    field_names={"norm_eps": "layer_norm_eps"},
    defaults={
        "norm_eps": 1e-12,
        "hidden_act": "gelu",
        "vocab_size": 30522,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
    },
    only={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    positions="learned",
    layer_norm=True,
    gated=False,
    biases=frozenset({"qkv_proj", "o_proj", "mlp"}),
    is_encoder=True,
)
_ROBERTA = replace(
    _BERT,
    names=replace(_BERT_NAMES, prefix="roberta.", head=("classifier.dense", "classifier.out_proj")),
    defaults={**_BERT.defaults, "vocab_size": 50265},
    only={**_BERT.only, "pad_token_id": 1},
    position_offset=2,  # the padding has id 1 and so row 1
)
_XLM_ROBERTA = replace(_ROBERTA, defaults=_BERT.defaults)

FAMILIES = {
    "BertModel": _BERT,
    "BertForSequenceClassification": replace(_BERT, scores=True),
    "RobertaModel": _ROBERTA,
    "RobertaForSequenceClassification": replace(_ROBERTA, scores=True),
    "XLMRobertaModel": _XLM_ROBERTA,
    "XLMRobertaForSequenceClassification": replace(_XLM_ROBERTA, scores=True),
    "LlamaForCausalLM": replace(_LLAMA, bias_fields={**_ATTENTION_BIAS, "mlp_bias": ("mlp",)}),
    "MistralForCausalLM": replace(
        _LLAMA,
        defaults={
            "norm_eps": 1e-6,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        windows="all",
    ),
    "Qwen2ForCausalLM": replace(_QWEN, biases=frozenset({"qkv_proj"})),
    "Qwen3ForCausalLM": replace(
        _QWEN,
        names=Names(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
        defaults={**_QWEN.defaults, "head_dim": 128},
        bias_fields=_ATTENTION_BIAS,
    ),
    "MixtralForCausalLM": replace(
        _LLAMA,
        names=Names(experts=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3"), "w2")),
        field_names={**_RMS, "num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        defaults={
            "norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        windows="all",
        normalize_experts=True,
    ),
    "Qwen2MoeForCausalLM": replace(
        _LLAMA,
        names=Names(experts=ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")),
        defaults={
            **_QWEN_MOE,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        bias_fields={"qkv_bias": ("qkv_proj",)},
    ),
    "Qwen3MoeForCausalLM": replace(
        _LLAMA,
        names=Names(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", experts=ExpertNames()),
        field_names={**_RMS, "num_experts": "num_local_experts"},
        defaults={
            **_QWEN_MOE,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        bias_fields=_ATTENTION_BIAS,
        windows="all",
    ),
    "GptOssForCausalLM": replace(
        _LLAMA,
        names=Names(
            sinks="self_attn.sinks",
            experts=ExpertNames("mlp.router", gate_up_proj=("gate_up_proj",), stacked=True),
        ),
        field_names={**_RMS, "num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        defaults={
            "norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
        },
        activations={"silu": "clamped_swiglu"},
        only={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "sliding_window_pattern": 2},
        windows="pattern",
        normalize_experts=True,
        biases=frozenset({"router", "experts"}),
        bias_fields=_ATTENTION_BIAS,
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(  # its text alone
        _GEMMA3,
        names=replace(_GEMMA3.names, prefix="language_model.model.", other_prefixes=("model.language_model.",)),
        defaults={
            **_GEMMA3.defaults,
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
        only={**_GEMMA3.only, "final_logit_softcapping": None},  # transformers caps the logits of the text model alone
        text_config=True,
        unread=tuple(
            f"{before}{part}." for before in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
        ),
    ),
    "GPT2LMHeadModel": Family(
        names=replace(
            _FUSED_NAMES,
            embed_tokens="wte",
            position_embeddings="wpe",
            input_norm="ln_1",
            qkv_proj=("attn.c_attn",),
            o_proj="attn.c_proj",
            mlp_norm="ln_2",
            gate_up_proj=("mlp.c_fc",),
            down_proj="mlp.c_proj",
        ),
        field_names={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "norm_eps": "layer_norm_epsilon",
        },
        defaults={
            "norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        positions="learned",
        layer_norm=True,
        gated=False,
        mlp_ratio=4,
        biases=frozenset({"qkv_proj", "o_proj", "mlp"}),
        transposed=True,
    ),
    "BloomForCausalLM": Family(
        names=replace(_FUSED_NAMES, embed_tokens="word_embeddings", embed_norm="word_embeddings_layernorm"),
        field_names={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "hidden_size": "n_embed",
            "max_position_embeddings": "seq_length",
            "norm_eps": "layer_norm_epsilon",
        },
        defaults={"norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        activations={"gelu_pytorch_tanh": "gelu_tanh"},  # transformers reads none
        only={"apply_residual_connection_post_layernorm": False},
        positions="alibi",
        layer_norm=True,
        gated=False,
        mlp_ratio=4,
        biases=frozenset({"qkv_proj", "o_proj", "mlp"}),
        interleaved=True,
    ),
    "OPTForCausalLM": Family(
        names=Names(
            embed_tokens="decoder.embed_tokens",
            position_embeddings="decoder.embed_positions",
            layers="decoder.layers",
            input_norm="self_attn_layer_norm",
            o_proj="self_attn.out_proj",
            mlp_norm="final_layer_norm",
            gate_up_proj=("fc1",),
            down_proj="fc2",
            norm="decoder.final_layer_norm",
        ),
        field_names={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        defaults={"norm_eps": 1e-5, "hidden_act": "relu", "enable_bias": True, "tie_word_embeddings": True},
        only={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
        positions="learned",
        position_offset=2,
        layer_norm=True,
        gated=False,
        bias_fields={"enable_bias": ("qkv_proj", "o_proj", "mlp")},
    ),
    "PhiForCausalLM": Family(
        names=Names(
            o_proj="self_attn.dense",
            mlp_norm="input_layernorm",
            gate_up_proj=("mlp.fc1",),
            down_proj="mlp.fc2",
            norm="final_layernorm",
        ),
        field_names={"norm_eps": "layer_norm_eps"},
        defaults={"norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        only={"qk_layernorm": False},
        partial_rotary=True,
        layer_norm=True,
        gated=False,
        parallel_residual=True,
        biases=frozenset({"qkv_proj", "o_proj", "mlp", "lm_head"}),
    ),
    "Phi3ForCausalLM": replace(
        _LLAMA,
        names=Names(qkv_proj=("self_attn.qkv_proj",), gate_up_proj=("mlp.gate_up_proj",)),
        defaults={"norm_eps": 1e-5, "max_position_embeddings": 4096},
        rope_types=("default",),
        partial_rotary=True,
        windows="all",
    ),
    "GPTNeoXForCausalLM": Family(
        names=replace(
            _FUSED_NAMES,
            prefix="gpt_neox.",
            embed_tokens="embed_in",
            layers="layers",
            qkv_proj=("attention.query_key_value",),
            o_proj="attention.dense",
            norm="final_layer_norm",
            lm_head="embed_out",
        ),
        field_names={
            "norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        defaults={
            "norm_eps": 1e-5,
            "hidden_act": "gelu",
            "partial_rotary_factor": 0.25,
            "attention_bias": True,
            "use_parallel_residual": True,
        },
        partial_rotary=True,
        layer_norm=True,
        gated=False,
        parallel_residual="use_parallel_residual",
        biases=frozenset({"mlp"}),
        bias_fields=_ATTENTION_BIAS,
        interleaved=True,
    ),
}
