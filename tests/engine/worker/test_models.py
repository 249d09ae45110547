"""Configs, rotary tables and checkpoints: what transformers means by them, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import kernels.reference  # noqa: F401 - registers the backend
from kernels import ops as kernel_ops
from services.worker.checkpoint.source import Checkpoint
from services.worker.models.config import load_config, parse_config
from services.worker.models.decoder import Decoder
from services.worker.models.registry import FAMILIES
from services.worker.models.rope import inverse_frequencies, rotary_table
from shared.errors import ModelError
from shared.settings import ROOT
from tests.support.checkpoints.models import Reference

MODEL = {"seed": 1, "requests": 1, "output_tokens": 2}
RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 500000.0,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2,
        "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.25},
]  # fmt: skip


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s['rope_type']}-{len(s)}")
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_rope_variants_equal_transformers_in_both_config_forms(
    scaling: dict[str, Any], form: str, head_dim: int
) -> None:
    theta = RAW["rope_theta"]
    sizes = {"hidden_size": head_dim * 4, "num_attention_heads": 4, "max_position_embeddings": 512}
    config = LlamaConfig(**sizes, rope_parameters={"rope_theta": theta, **scaling})
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    raw = {**RAW, "hidden_size": head_dim * 4}
    if form == "rope_parameters":
        del raw["rope_theta"]
        raw[form] = {"rope_theta": theta, **scaling}
    else:
        raw[form] = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    rope = parse_config(raw, "config.json").rope
    assert rope is not None
    assert torch.allclose(inverse_frequencies(rope), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)
    table = rotary_table(rope, 300)
    angle = 299 * expected.double()
    assert torch.allclose(table[299, : head_dim // 2].double(), angle.cos() * factor, atol=1e-4)
    assert torch.allclose(table[299, head_dim // 2 :].double(), angle.sin() * factor, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["FalconForCausalLM"]}, ["FalconForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None}, ["None", "LlamaForCausalLM"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": -4}, ["hidden_size is -4"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": 15}, ["head_dim 15"]),
        ({"hidden_size": 66}, ["hidden_size 66", "num_attention_heads 4"]),
        ({"hidden_act": "quick_gelu"}, ["hidden_act 'quick_gelu'", "silu"]),
        ({"sliding_window": 4096}, ["sliding_window 4096", "null"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ["longrope", "llama3"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ({"rope_scaling": {"rope_type": "dynamic", "full_attention": {}}}, ["per layer type", "full_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"quantization_config": {"quant_method": "exl3"}}, ["exl3", "awq", "unquantized"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
        ({"torch_dtype": {"a": 1}}, ["torch_dtype is {'a': 1}", "a string"]),
        ({"hidden_act": ["silu"]}, ["hidden_act is ['silu']", "a string"]),
        ({"rope_scaling": ["linear", 2.0]}, ["rope_scaling is ['linear', 2.0]", "an object"]),
        ({"rope_scaling": {"rope_type": ["linear"]}}, ["rope_type is ['linear']", "a string"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor is 0", "0.001"]),
        ({"rope_scaling": {**SCALINGS[2], "high_freq_factor": 1.0}}, ["high_freq_factor 1.0", "low_freq_factor 1.0"]),
        ({"rope_scaling": {**SCALINGS[3], "truncate": "false"}}, ["truncate is 'false'", "true or false"]),
        ({"layer_types": [{}, []]}, ["layer_types [{}, []]"]),
        ({"architectures": [{}]}, ["architecture {}", "LlamaForCausalLM"]),
        ({"architectures": 3}, ["architecture 3", "LlamaForCausalLM"]),
        ({"rms_norm_eps": None}, ["norm_eps (rms_norm_eps) is missing"]),
        ({"rms_norm_eps": float("nan")}, ["norm_eps (rms_norm_eps) is nan", "from 0 to 1"]),
        ({"rms_norm_eps": -1}, ["norm_eps (rms_norm_eps) is -1"]),
        ({"quantization_config": "gptq"}, ["gptq", "unquantized"]),
        ({"rope_theta": "x"}, ["rope_theta is 'x'", "a number"]),
        ({"rope_theta": -5}, ["rope_theta is -5"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings is 'false'", "true or false"]),
        ({"num_hidden_layers": 10**10}, ["num_hidden_layers is 10000000000", "up to 4096"]),
        ({"max_position_embeddings": 10**11}, ["max_position_embeddings is 100000000000"]),
        ({"intermediate_size": True}, ["intermediate_size is True"]),
    ],
)
def test_config_that_cannot_be_served_names_field_and_its_value(change: dict[str, Any], words: list[str]) -> None:
    refused({**RAW, **change}, words)


def refused(raw: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        parse_config(raw, "config.json")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "change", "words"),
    [
        ("OPTForCausalLM", {"do_layer_norm_before": False}, ["do_layer_norm_before false", "only true"]),
        ("OPTForCausalLM", {"word_embed_proj_dim": 32}, ["word_embed_proj_dim 32", "hidden_size 64"]),
        ("OPTForCausalLM", {"_remove_final_layer_norm": True}, ["_remove_final_layer_norm true"]),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, ["post_layernorm true"]),
        ("BloomForCausalLM", {"hidden_act": "relu"}, ["hidden_act 'relu'", "gelu_pytorch_tanh"]),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx true"]),
        ("GPT2LMHeadModel", {"n_layer": 0}, ["num_hidden_layers (n_layer) is 0"]),
        ("PhiForCausalLM", {"qk_layernorm": True}, ["qk_layernorm true"]),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, ["longrope", "default"]),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["yarn", "default"]),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0}, ["attn_logit_softcapping is 0", "0.001"]),
        ("Gemma3ForConditionalGeneration", {"text_config": {"hidden_size": -1}}, ["text_config: hidden_size is -1"]),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping 50.0"]),
        (
            "Gemma3ForConditionalGeneration",
            {"text_config": {"final_logit_softcapping": 30.0}},
            ["final_logit_softcapping 30.0", "only null"],
        ),
        ("Gemma3ForConditionalGeneration", {"text_config": []}, ["text_config is []", "an object"]),
        ("GptOssForCausalLM", {"swiglu_limit": 6.0}, ["swiglu_limit 6.0", "only 7.0"]),
        ("GptOssForCausalLM", {"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, ["use_bidirectional_attention true"]),
        ("Qwen2ForCausalLM", {"is_causal": False}, ["is_causal false", "only true"]),
        ("Gemma2ForCausalLM", {"sliding_window_pattern": 3}, ["sliding_window_pattern 3", "only 2"]),
        ("GptOssForCausalLM", {"sliding_window_pattern": 3}, ["sliding_window_pattern 3", "only 2"]),
        ("LlavaForConditionalGeneration", {}, ["LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration"]),
        ("MistralForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, ["4096", "all alike"]),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, ["switched off"]),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"]}, ["layer_types ['full_attention']"]),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention", "linear_attention"]}, ["linear_attention"]),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": -1}, ["sliding_window is -1"]),
    ],
)
def test_unsupported_parts_of_a_family_are_refused_by_name(
    architecture: str, change: dict[str, Any], words: list[str]
) -> None:
    refused({**RAW, "architectures": [architecture], **change}, words)


@pytest.mark.parametrize("switch", [False, None])
def test_a_sliding_window_that_is_switched_off_is_no_obstacle(switch: bool | None) -> None:
    raw = {**RAW, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": switch}
    config = parse_config(raw, "config.json")
    assert config.biases == {"qkv_proj"} and config.windows == (0, 0)


def test_models_page_names_every_architecture_and_refused_field() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    for architecture, family in FAMILIES.items():
        assert f"| `{architecture}` |" in page
        for key in family.only:
            assert f"`{key}`" in page, (architecture, key)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_missing_field_has_the_default_of_transformers(architecture: str) -> None:
    made = config_class(architecture)().get_text_config()
    # No attributes there: OPT's epsilon, BLOOM's activation, Gemma 3's pattern; Qwen's window is switched off.
    nameless = {"OPTForCausalLM": "norm_eps", "BloomForCausalLM": "hidden_act", "Gemma3ForCausalLM": "_pattern"}
    for pattern in ("GptOssForCausalLM", "Gemma2ForCausalLM", "Gemma3ForConditionalGeneration"):
        nameless[pattern] = "_pattern"
    if architecture.startswith("Qwen"):
        made = config_class(architecture)(use_sliding_window=True)
    for key, value in {"tie_word_embeddings": False, **FAMILIES[architecture].defaults}.items():
        if key == "use_sliding_window" or key.endswith(nameless.get(architecture, "none")):
            continue
        if key in ("partial_rotary_factor", "rope_theta"):
            assert made.rope_parameters[key] == value
        elif key == "rope_parameters":
            assert made.rope_parameters == {**value, "rope_theta": FAMILIES[architecture].defaults["rope_theta"]}
        else:
            assert getattr(made, FAMILIES[architecture].field_names.get(key, key)) == value, key


def config_class(architecture: str) -> Any:
    return getattr(transformers, architecture).config_class


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [("Qwen2ForCausalLM", 5), ("Gemma3ForCausalLM", 9), ("Gemma2ForCausalLM", 5), ("GptOssForCausalLM", 5)],
)
def test_windows_of_layers_are_those_of_transformers(architecture: str, layers: int) -> None:
    fields = {"num_hidden_layers": layers, "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3}
    made = config_class(architecture)(**fields)
    expected = tuple(32 if kind == "sliding_attention" else 0 for kind in made.layer_types)
    assert len(set(expected)) == 2
    assert parse_config({**RAW, **fields, "architectures": [architecture]}, "").windows == expected


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [  # as older checkpoints spell them
        ("GPT2LMHeadModel", {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 99, "n_ctx": 99}),
        ("GPT2LMHeadModel", {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_inner": 100, "layer_norm_epsilon": 1e-3}),
        ("BloomForCausalLM", {"n_embed": 48, "n_layer": 3, "num_attention_heads": 6}),
        ("OPTForCausalLM", {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 3, "ffn_dim": 100}),
        ("GPTNeoXForCausalLM", {"rotary_pct": 0.5, "rotary_emb_base": 5000, "num_attention_heads": 4}),
        ("PhiForCausalLM", {"partial_rotary_factor": 0.4, "hidden_size": 80, "num_attention_heads": 4}),
        ("Phi3ForCausalLM", {"rope_scaling": None, "rope_theta": 7e4, "sliding_window": 2047, "hidden_size": 3072}),
        ("Gemma3ForCausalLM", {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": None}),
        ("Gemma3ForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "num_attention_heads": 4}),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 100, "hidden_activation": "gelu"}),
    ],
)
def test_old_spellings_of_fields_mean_the_same_as_in_transformers(architecture: str, fields: dict[str, Any]) -> None:
    made = config_class(architecture)(**fields)
    given = made.to_dict()
    rest = {key: given[key] for key in ("vocab_size", "intermediate_size", "num_hidden_layers") if key in given}
    sizes = {key: given[key] for key in ("hidden_size", "num_attention_heads") if key in given}
    raw = {**rest, **({} if "n_embed" in fields else sizes), **fields, "architectures": [architecture]}
    config, heads = parse_config(raw, ""), made.num_attention_heads
    assert (config.hidden_size, config.heads, config.layers) == (made.hidden_size, heads, made.num_hidden_layers)
    assert config.head_dim == (getattr(made, "head_dim", None) or made.hidden_size // heads)
    inner = getattr(made, FAMILIES[architecture].field_names.get("intermediate_size", "intermediate_size"), None)
    assert config.intermediate_size == (inner or 4 * made.hidden_size)
    assert config.context == getattr(made, "max_position_embeddings", 2048)
    assert config.scale == getattr(made, "query_pre_attn_scalar", config.head_dim) ** -0.5
    parameters = getattr(made, "rope_parameters", None)
    if parameters is None:
        assert config.rope is None
        return
    assert config.rope is not None
    if architecture == "Gemma3ForCausalLM":
        assert config.local_rope is not None
        assert config.local_rope.theta == parameters["sliding_attention"]["rope_theta"]
        assert config.local_rope.kind == parameters["sliding_attention"]["rope_type"] == "default"
        parameters = parameters["full_attention"]
    assert (config.rope.theta, config.rope.kind) == (parameters["rope_theta"], parameters["rope_type"])
    assert config.rope.rotary == int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
    assert config.rope.factor == parameters.get("factor", 1.0)


@pytest.mark.parametrize(
    ("architecture", "field", "ignored", "values"),
    [
        ("LlamaForCausalLM", "rms_norm_eps", "norm_eps", (1e-5, 0.3)),
        ("Gemma2ForCausalLM", "hidden_activation", "hidden_act", ("gelu_pytorch_tanh", "gelu")),
        ("GPTNeoXForCausalLM", "rotary_emb_base", "rope_theta", (300, 500)),
        ("OPTForCausalLM", "ffn_dim", "intermediate_size", (100, 200)),
    ],
)
def test_a_field_under_a_name_that_is_not_the_familys_is_ignored_as_in_transformers(
    architecture: str, field: str, ignored: str, values: tuple[Any, Any]
) -> None:
    raw = {key: value for key, value in RAW.items() if key not in (field, ignored)}
    raw |= {"architectures": [architecture], "ffn_dim": 96}
    for given in ({field: values[0]}, {}) if field != "ffn_dim" else ({field: values[0]},):
        alone = parse_config({**raw, **given}, "")
        assert parse_config({**raw, **given, ignored: values[1]}, "") == alone
        made, both = (config_class(architecture)(**given, **more) for more in ({}, {ignored: values[1]}))
        assert getattr(made, field, made.to_dict().get("rope_parameters")) == getattr(
            both, field, both.to_dict().get("rope_parameters")
        )


def test_old_and_new_names_of_the_dtype_are_read() -> None:
    assert parse_config({**RAW, "torch_dtype": "bfloat16"}, "").checkpoint_dtype == "bfloat16"
    assert parse_config({**RAW, "dtype": "float16"}, "").checkpoint_dtype == "float16"


def load(path: Path) -> Decoder:
    ops = kernel_ops.create("reference", torch.device("cpu"))
    return Decoder(load_config(path), Checkpoint(path), ops, torch.float32, 64)


def test_a_missing_directory_and_a_directory_without_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(ModelError, match=r"config\.json: not readable as JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json: not readable as JSON"):
        load(tmp_path)


JUNK: list[Any] = [None, True, -1, 0, 0.5, 1e308, float("nan"), 10**30, "x", "", [], [[]], {}, {"a": []}]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_whatever_field_holds_file_is_read_or_refused_by_name(architecture: str, tmp_path: Path) -> None:
    family = FAMILIES[architecture]
    others = ["architectures", "quantization_config", "rope_scaling", "rope_parameters", "layer_types", "torch_dtype"]
    others += ["dtype", "head_dim", "word_embed_proj_dim", "use_sliding_window", "sliding_window", "hidden_act"]
    others += ["mlp_only_layers"]
    for key in {*RAW, *family.field_names.values(), *family.defaults, *family.only, *family.bias_fields, *others}:
        for junk in JUNK:
            raw = {**RAW, "architectures": [architecture], "head_dim": 16, key: junk}
            (tmp_path / "config.json").write_text(json.dumps(raw))
            try:
                load_config(tmp_path)
            except ModelError as error:
                assert str(tmp_path) in str(error), (key, junk)
                assert "does not hold what" not in str(error), (key, junk)
    keys = ("rope_type", "factor", "rope_theta", "low_freq_factor", "beta_fast", "mscale", "full_attention")
    for key in keys if architecture in ("LlamaForCausalLM", "GptOssForCausalLM", "Gemma3ForCausalLM") else ():
        for junk in JUNK:
            for scaling in SCALINGS:
                raw = {**RAW, "architectures": [architecture], "rope_scaling": {**scaling, key: junk}}
                (tmp_path / "config.json").write_text(json.dumps(raw))
                try:
                    load_config(tmp_path)
                except ModelError as error:
                    assert "does not hold what" not in str(error), (key, junk)


def test_directory_without_weights_says_what_to_do_with_pickles(reference: Reference, tmp_path: Path) -> None:
    path = shutil.copytree(reference.path, tmp_path / "m")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights.*model\.safetensors"):
        load(path)
    (path / "pytest_model.bin").write_bytes(b"\x80")
    with pytest.raises(ModelError, match="convert its pickled"):
        load(path)


def test_a_missing_or_misshapen_or_quantised_tensor_is_named(reference: Reference, tmp_path: Path) -> None:
    path = shutil.copytree(reference.path, tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for broken, message in (
        (None, rf"{name} is missing from the checkpoint; fetch the model again"),
        (torch.zeros(3, 5), rf"{name} has shape \[3, 5\], config.json says \[96, 64\]; fetch"),
        (torch.zeros(96, 64, dtype=torch.int8), rf"{name} is I8"),
    ):
        changed = {key: value for key, value in tensors.items() if key != name}
        if broken is not None:
            changed[name] = broken
        save_file(changed, path / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            load(path)


def test_index_with_missing_shard_or_a_path_outside_is_refused(reference: Reference, tmp_path: Path) -> None:
    path = shutil.copytree(reference.path, tmp_path / "m")
    (path / "model.safetensors").rename(path / "a.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    with pytest.raises(ModelError, match=r"shard b\.safetensors .* is missing"):
        load(path)
    index.write_text(json.dumps({"weight_map": {"x": "../m/a.safetensors"}}))
    with pytest.raises(ModelError, match="is no file name"):
        load(path)


def test_tensor_in_two_shards_is_refused_with_both_of_them(reference: Reference, tmp_path: Path) -> None:
    path = shutil.copytree(reference.path, tmp_path / "m")
    (path / "model.safetensors").rename(path / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(64)}, path / "b.safetensors")
    weight_map = {"x": "a.safetensors", "model.norm.weight": "b.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is in two shards, a\.safetensors and b\.safetensors"):
        load(path)


def test_text_of_a_model_with_images_is_read_from_text_config() -> None:
    """As gemma-3-4b-it has it: fields that have their defaults are left out."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16", "vision_config": {}}
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = parse_config({**raw, "text_config": {**text, **scaling}}, "")
    assert (config.vocab_size, config.hidden_size, config.layers, config.heads) == (262208, 2560, 34, 8)
    assert config.checkpoint_dtype == "bfloat16" and config.tied and config.context == 131072
    assert config.rope is not None and (config.rope.kind, config.rope.factor) == ("linear", 8.0)
    assert config.windows[:6] == (1024,) * 5 + (0,)
