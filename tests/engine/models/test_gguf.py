"""GGUF files against the weights that they mean: the same bits as they are read, and transformers' tokens.

The oracle of weights is the `gguf` package's numpy, that of tokens is transformers on a directory with these weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from safetensors.torch import load_file

from kernels.cpu.library import load
from kernels.ops import Groups
from services.worker.models.config import load_config
from services.worker.models.gguf import GgufWeights
from services.worker.quantization import method_of
from services.worker.quantization.base import Matrix
from services.worker.quantization.gguf import UNPACK
from shared.errors import ConfigurationError, ModelError
from shared.models.gguf.reader import BLOCK_TYPES, open_gguf
from tests.engine.driver import assert_tokens, fingerprint_of, generated, make_engine
from tests.engine.models.test_quantized_checkpoints import plain
from tests.engine.test_tokens import all_logits, close
from tests.support.checkpoints.gguf import write_file, write_model, write_parts
from tests.support.checkpoints.models import Reference, make_llama, random_prompts
from tests.support.compiler import demand_compiler, needs_compiler

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8}
FORMATS = {
    "Q4_0": "int4-32", "Q4_1": "int4-32-mins", "Q5_0": "int6-32", "Q5_1": "int6-32-mins", "Q8_0": "int8-32",
    "Q4_K": "int4-32-mins", "Q5_K": "int6-32-mins", "Q6_K": "int6-16", "MXFP4": "float4-32",
    "Q2_K": "int2-16-mins", "Q3_K": "int4-16", "IQ4_NL": "iq4-32", "IQ4_XS": "iq4-32",
}  # fmt: skip
KERNELS = ["reference"] if shutil.which("g++") is None else ["reference", "cpu"]


@pytest.fixture(scope="module")
def origin(models: Callable[..., Reference]) -> Path:
    """The directory that files are written from."""
    return models(seed=5, requests=1, output_tokens=1, **SIZES).path


def q4_k_m(name: str) -> str:
    """The types of a file of the kind Q4_K_M."""
    sixth = ("blk.0.attn_v.weight", "blk.0.ffn_down.weight", "blk.0.ffn_down_exps.weight", "output.weight")
    return "Q6_K" if name in sixth else "Q4_K"


def mxfp4(name: str) -> str:
    """The types of a file of the kind MXFP4_MOE."""
    return "MXFP4" if name.endswith("exps.weight") else "Q8_0"


def q2_k(name: str) -> str:
    """The types of a file of the kind Q2_K."""
    if name == "output.weight":
        return "Q6_K"
    return "Q3_K" if "ffn_down" in name or "attn_output" in name else "Q4_K" if "attn_v" in name else "Q2_K"


def q3_k_m(name: str) -> str:
    """The types of a file of the kind Q3_K_M."""
    if name == "output.weight":
        return "Q6_K"
    first = "Q5_K" if name.startswith("blk.0.") else "Q4_K"
    return first if "attn_v" in name or "ffn_down" in name else "Q4_K" if "attn_output" in name else "Q3_K"


def iq4_xs(name: str) -> str:
    """The types of a file of the kind IQ4_XS; IQ4_NL is for rows of no multiple of 256, here for one matrix."""
    if name == "output.weight":
        return "Q6_K"
    return "Q5_K" if "attn_v" in name else "IQ4_NL" if "attn_output" in name else "IQ4_XS"


def mixed(name: str) -> str:
    """Types of which an expert's gate and up have two."""
    return "Q5_1" if "ffn_up" in name else q4_k_m(name)


@pytest.mark.parametrize("kind", UNPACK)
def test_blocks_are_the_numbers_that_gguf_reads(kind: str) -> None:
    type_ = next(one for one in BLOCK_TYPES.values() if one.name == kind)
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (64, 5 * type_.size_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        raw.reshape(64, 5, -1)[:, :, 0] %= 255  # 255 is no number, which ggml does not know
    meant = dequantize(raw, GGMLQuantizationType[kind])
    found = UNPACK[kind](torch.from_numpy(raw).view(64, 5, type_.size_bytes))
    assert found.group_format == FORMATS[kind]
    assert np.array_equal(found.plain().numpy(), meant, equal_nan=True)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *UNPACK])
def test_weights_are_read_to_the_bit_and_give_their_tokens(origin: Path, tmp_path: Path, kind: str) -> None:
    model, meant = tmp_path / "x.gguf", tmp_path / "meant"
    write_model(origin, model, lambda _: kind, meant)
    config = load_config(model)
    source, method = GgufWeights(config, model), method_of("none", config.stored)
    assert (config.stored.group_format if config.stored else None) == FORMATS.get(kind)
    for name, weight in load_file(meant / "model.safetensors").items():
        if ".layers." not in name or weight.ndim == 1:
            assert torch.equal(source.take(name, tuple(weight.shape), torch.float32), weight), name
            continue
        for rows, columns in (
            (range(len(weight)), range(weight.shape[1])),
            (range(35, 60), range(weight.shape[1])),
            (range(len(weight)), range(32, 200)),
            (range(8), range(5, 77)),
        ):
            matrix = Matrix(name.removesuffix(".weight"), weight.shape[0], weight.shape[1], rows, columns)
            pieces = list(method.read(source, matrix, torch.float32))
            if kind in FORMATS and not columns.start % 32:
                assert {piece.group_format for piece in pieces if isinstance(piece, Groups)} == {FORMATS[kind]}
            found = weight[rows.start : rows.stop, columns.start : columns.stop]
            assert torch.equal(plain(pieces), found), name
    assert not source.unread()
    assert_tokens(Reference(meant), model, *KERNELS)


YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False, "rope_theta": 1e4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "llama-biases-of-mlp": {"mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"kind": "mistral", "sliding_window": 13},
    "qwen2": {"kind": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"kind": "qwen3"},
    "gemma": {"kind": "gemma"},
    "gemma3": {
        "kind": "gemma3",
        "sliding_window": 11,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,  # as llama.cpp has it
    },
    "phi3": {"kind": "phi3", "sliding_window": 15},
    "gemma2": {
        "kind": "gemma2",
        "sliding_window": 11,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 12.0,
        "query_pre_attn_scalar": 32,
    },
    "llama-q2_k": {"types": q2_k},
    "qwen3-q3_k_m": {"kind": "qwen3", "types": q3_k_m},
    "gemma3-iq4_xs": {"kind": "gemma3", "query_pre_attn_scalar": 32, "types": iq4_xs},
    "mixtral": {"kind": "mixtral", "sliding_window": None},
    "mixtral-iq4_xs": {"kind": "mixtral", "sliding_window": None, "types": iq4_xs},
    "mixtral-q3_k_m-of-old": {"kind": "mixtral", "sliding_window": None, "types": q3_k_m, "stacks": False},
    "mixtral-window": {"kind": "mixtral", "sliding_window": 13, "types": mixed},
    "qwen2moe": {"kind": "qwen2_moe", "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512},
    "qwen3moe": {"kind": "qwen3_moe", "moe_intermediate_size": 256, "norm_topk_prob": True},
    "qwen3moe-12-experts": {
        "kind": "qwen3_moe",
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "num_local_experts": 12,
        "types": mxfp4,
    },
    "gpt-oss": {"kind": "gpt_oss", "sliding_window": 11, "types": mxfp4, "rope_parameters": YARN},
    "gpt-oss-plain-positions": {
        "kind": "gpt_oss",
        "attention_bias": False,
        "types": lambda name: "Q8_0",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    fields = {**SIZES, **FAMILIES[name]}
    types, stacks = fields.pop("types", q4_k_m), fields.pop("stacks", True)
    make_llama(tmp_path / "plain", seed=11, requests=1, output_tokens=1, **fields)
    model, meant = tmp_path / "x.gguf", tmp_path / "meant"
    write_model(tmp_path / "plain", model, types, meant, stacks=stacks)
    reference, prompt = Reference(meant), random_prompts(1, (40, 40), 3)[0]
    close(all_logits(make_engine(model, kernels="reference", block_size=16), prompt), reference.logits(prompt))
    assert_tokens(reference, model, *KERNELS, count=2, new_tokens=64)


@pytest.mark.parametrize("kind", ["F16", "Q4_K", "Q6_K", "MXFP4"])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ({"kind": "qwen3_moe", "num_local_experts": 12, "moe_intermediate_size": 512}, "qwen3moe"),
        ({"kind": "gpt_oss"}, "gpt-oss"),
    ],
)
def test_experts_are_cut_out_of_their_stack_to_the_bit(
    tmp_path: Path, family: dict[str, Any], name: str, kind: str
) -> None:
    make_llama(tmp_path / "plain", seed=11, requests=1, output_tokens=1, **SIZES, **family)
    write_model(tmp_path / "plain", tmp_path / "x.gguf", lambda _: kind)
    config = load_config(tmp_path / "x.gguf")
    source, method = GgufWeights(config, tmp_path / "x.gguf"), method_of("none", config.stored)
    stored = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "x.gguf").tensors}
    for part in ("gate", "up", "down"):
        stack = stored[f"blk.1.ffn_{part}_exps.weight"]
        meant = torch.from_numpy(dequantize(stack.data, stack.tensor_type).astype(np.float32))
        outputs, inputs = (256, 512) if part == "down" else (512, 256)
        assert meant.shape == (12 if name == "qwen3moe" else 6, outputs, inputs)
        for expert in (0, 3, len(meant) - 1):
            stem = f"model.layers.1.mlp.experts.{expert}.{part}_proj"
            for rows, columns in (
                (range(outputs), range(inputs)),
                (range(35, 60), range(64, 200)),
                (range(8), range(5, 77)),
            ):
                pieces = list(method.read(source, Matrix(stem, outputs, inputs, rows, columns), torch.float32))
                if kind in FORMATS and not columns.start % 32:
                    assert {piece.group_format for piece in pieces if isinstance(piece, Groups)} == {FORMATS[kind]}
                found = meant[expert, rows.start : rows.stop, columns.start : columns.stop]
                assert torch.equal(plain(pieces), found), stem
            if name == "gpt-oss":
                bias = torch.from_numpy(stored[f"blk.1.ffn_{part}_exps.bias"].data[expert].copy())
                assert torch.equal(source.take(f"{stem}.bias", (outputs,), torch.float32), bias), stem
    assert f"model.layers.1.mlp.experts.{len(meant)}.up_proj.weight" not in source


@pytest.mark.parametrize("kind", ["F16", "Q3_K", "IQ4_XS"])
def test_old_experts_are_those_of_a_stack_to_the_bit(tmp_path: Path, kind: str) -> None:
    sizes = {**SIZES, "intermediate_size": 256, "num_local_experts": 12}
    make_llama(tmp_path / "plain", seed=11, requests=1, output_tokens=1, kind="mixtral", **sizes)
    sources = []
    for name in ("stacks", "old"):
        write_model(tmp_path / "plain", tmp_path / f"{name}.gguf", lambda _: kind, stacks=name == "stacks")
        sources.append(GgufWeights(load_config(tmp_path / f"{name}.gguf"), tmp_path / f"{name}.gguf"))
    stored = open_gguf(tmp_path / "old.gguf").tensors
    assert "blk.1.ffn_up.11.weight" in stored and not any("_exps" in name for name in stored)
    names = [f"model.layers.1.block_sparse_moe.experts.{at}.w{part}.weight" for at in range(12) for part in (1, 2, 3)]
    for name in names:
        stack, old = (source.take(name, (256, 256), torch.float32) for source in sources)
        assert torch.equal(stack, old), name
    assert len({source.take(names[0], (256, 256), torch.float32).sum().item() for source in sources}) == 1
    assert [names[0].replace(".0.", ".12.") in source for source in sources] == [False, False]
    assert not any(name in sources[1].unread() for name in names)


@pytest.mark.parametrize(
    ("changes", "more", "said"),
    [
        ({"llama__expert_count": 3}, {}, r"tensor blk.0.ffn_\w+.3.weight is not supported for MixtralForCausalLM"),
        ({}, {"blk.1.ffn_up.3.weight": None}, "layers.1.block_sparse_moe.experts.3.w3.weight is missing"),
        ({}, {"blk.1.ffn_up.3.weight": np.ones((256, 128), np.float32)}, r"shape \[256, 128\], its metadata says"),
        ({}, {"blk.1.ffn_up.06.weight": np.ones((256, 256), np.float32)}, "blk.1.ffn_up.06.weight is not supported"),
        (
            {},
            {"blk.1.ffn_up_exps.weight": np.ones((4, 256, 256), np.float32)},
            "blk.1.ffn_up.0.weight and blk.1.ffn_up_exps.weight are both there; convert the model again",
        ),
    ],
)
def test_what_is_wrong_with_old_experts_is_named(
    tmp_path: Path, changes: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    sizes = {**SIZES, "intermediate_size": 256}
    make_llama(tmp_path / "plain", seed=11, requests=1, output_tokens=1, kind="mixtral", **sizes)
    write_model(tmp_path / "plain", tmp_path / "x.gguf", lambda _: "Q4_0", more=more, stacks=False, **changes)
    with pytest.raises(ModelError, match=said):
        make_engine(tmp_path / "x.gguf")


@pytest.mark.parametrize("first_has_tensors", [True, False])
def test_model_in_parts_is_that_in_one_file(origin: Path, tmp_path: Path, first_has_tensors: bool) -> None:
    write_model(origin, tmp_path / "x.gguf", q3_k_m, tmp_path / "meant", more={"rope_freqs.weight": np.ones(16, "f4")})
    parts = write_parts(tmp_path / "x.gguf", tmp_path / "x", 7, first_has_tensors)
    assert len(parts) >= 3 and parts[0].name.startswith("x-00001-of-0000")
    assert bool(GGUFReader(parts[0]).tensors) == first_has_tensors
    weights = GgufWeights(load_config(parts[0]), parts[0])
    for name, weight in load_file(tmp_path / "meant" / "model.safetensors").items():
        assert torch.equal(weights.take(name, tuple(weight.shape), torch.float32), weight), name
    assert not weights.unread()
    assert_tokens(Reference(tmp_path / "meant"), parts[0], *KERNELS)

    def fingerprint() -> str:
        return fingerprint_of(GgufWeights(load_config(parts[0]), parts[0]))

    before = fingerprint()
    assert before == fingerprint()
    for part in parts:  # the last number of a tensor, or of the metadata where there is none
        data = bytearray(part.read_bytes())
        end = max((one.data_offset + one.n_bytes for one in GGUFReader(part).tensors), default=len(data))
        data[end - 1] ^= 1
        if end < len(data) or GGUFReader(part).tensors:
            part.write_bytes(data)
            assert fingerprint() != before
            before = fingerprint()


@pytest.mark.parametrize(("name", "layers", "divisor"), [("gemma2", 46, 16), ("gemma2", 26, 32), ("gemma3", 62, 16)])
def test_scores_of_gemmas_27b_models_are_divided_by_another_root(
    tmp_path: Path, name: str, layers: int, divisor: int
) -> None:
    numbers = {
        "context_length": 64, "embedding_length": 128, "block_count": layers, "feed_forward_length": 64,
        "attention.head_count": 8, "attention.key_length": 32, "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    metadata = {"general.architecture": name, "tokenizer.ggml.tokens": ["a"]}
    metadata |= {f"{name}.{key}": value for key, value in numbers.items()}
    write_file(tmp_path / "x.gguf", metadata, {"token_embd.weight": ("F32", (1, 128), bytes(512))})
    config = load_config(tmp_path / "x.gguf")
    assert config.scale == divisor**-0.5
    assert config.windows[:2] == ((4096, 0) if name == "gemma2" else (0, 0))
    assert (config.score_softcap, config.logit_softcap) == ((50.0, 30.0) if name == "gemma2" else (0.0, 0.0))


def formats(model: Path, **settings: Any) -> list[str]:
    """The formats that embedding, head, q, k and v, and the first matrix of the MLP are held in."""
    decoder = make_engine(model, kernels="cpu", block_size=16, **settings).decoder
    layer, names = decoder.layers[0], {number: name for name, number in load().format_numbers.items()}
    packed = (decoder.embed_tokens, decoder.lm_head, layer.attention.qkv_proj.weight, layer.mlp.gate_up_proj.weight)
    found = []
    for one in packed:
        parts = getattr(one, "parts", (one,))
        found.append(
            "+".join(names[part.format_number] if hasattr(part, "format_number") else "plain" for part in parts)
        )
    return found


@needs_compiler
def test_types_of_a_file_are_held_as_groups_where_kernels_have_them(origin: Path, tmp_path: Path) -> None:
    write_model(origin, tmp_path / "x.gguf", q4_k_m)
    layers = ["int4-32-mins+int6-16", "int4-32-mins"]
    assert formats(tmp_path / "x.gguf") == ["int4-32-mins", "int6-16", *layers]
    assert formats(tmp_path / "x.gguf", dtype="bfloat16") == ["plain", "int6-16", *layers]
    for types, held in (
        (q2_k, ["int2-16-mins", "int6-16", "int2-16-mins+int4-32-mins", "int2-16-mins"]),
        (q3_k_m, ["int4-16", "int6-16", "int4-16+int6-32-mins", "int4-16"]),
        (iq4_xs, ["iq4-32", "int6-16", "iq4-32+int6-32-mins", "iq4-32"]),
    ):
        write_model(origin, tmp_path / "x.gguf", types)
        assert formats(tmp_path / "x.gguf") == held
    make_llama(tmp_path / "tied", seed=5, requests=1, output_tokens=1, tie_word_embeddings=True, **SIZES)
    write_model(tmp_path / "tied", tmp_path / "tied.gguf", q4_k_m)
    assert formats(tmp_path / "tied.gguf") == ["int4-32-mins", "int4-32-mins", *layers]
    assert formats(tmp_path / "tied.gguf", dtype="bfloat16") == ["bfloat16", "bfloat16", *layers]


def test_frequencies_of_llama_3_come_from_their_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 500000.0,
    }  # fmt: skip
    make_llama(tmp_path / "plain", seed=12, requests=1, output_tokens=1, **SIZES, rope_parameters=rope)
    model, meant = tmp_path / "x.gguf", tmp_path / "meant"
    reference = Reference(tmp_path / "plain")
    inverse = reference.model.model.rotary_emb.inv_freq
    factors = 500000.0 ** -(torch.arange(0, 32, 2) / 32) / inverse
    assert factors.max() == pytest.approx(8)
    write_model(tmp_path / "plain", model, lambda _: "Q8_0", meant, more={"rope_freqs.weight": factors.numpy()})
    assert_tokens(Reference(meant), model, "reference", count=2, lengths=(60, 90))
    write_model(tmp_path / "plain", tmp_path / "without.gguf", lambda _: "Q8_0")
    cases = Reference(meant).cases(2, (60, 90), 24, seed=3)
    engine = make_engine(tmp_path / "without.gguf", kernels="reference", block_size=16)
    assert generated(engine, [case.prompt for case in cases], 24) != [case.tokens for case in cases]


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
    ids=["linear", "yarn"],
)
def test_scaled_positions_are_those_of_transformers(
    tmp_path: Path, scaling: dict[str, Any], rope: dict[str, Any]
) -> None:
    given = {**rope, "rope_theta": 10000.0}
    make_llama(tmp_path / "plain", seed=13, kind="qwen2", requests=1, output_tokens=1, rope_parameters=given)
    metadata = {f"qwen2__rope__scaling__{key}": value for key, value in scaling.items()}
    write_model(tmp_path / "plain", tmp_path / "x.gguf", lambda _: "F32", **metadata)
    assert_tokens(Reference(tmp_path / "plain"), tmp_path / "x.gguf", "reference", count=2, lengths=(60, 90))


def test_plain_file_may_be_rounded_and_a_packed_one_may_not(origin: Path, tmp_path: Path) -> None:
    demand_compiler()
    write_model(origin, tmp_path / "f32.gguf", lambda _: "F32")
    int8 = {"kernels": "cpu", "quantize": "int8", "block_size": 16}
    rounded, same = (
        generated(make_engine(path, **int8), [[1, 2, 3, 4]], 24) for path in (origin, tmp_path / "f32.gguf")
    )
    assert rounded == same
    write_model(origin, tmp_path / "q8.gguf", lambda _: "Q8_0")
    with pytest.raises(ConfigurationError, match=r"quantized already \(gguf\)"):
        make_engine(tmp_path / "q8.gguf", block_size=16, quantize="int8")
    with pytest.raises(ConfigurationError, match=r"--load-format dummy: .* is a GGUF file"):
        make_engine(tmp_path / "q8.gguf", load_format="dummy")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general__architecture": "falcon"}, "general.architecture 'falcon' is not supported, llama, "),
        (
            {"llama__expert_count": 8, "llama__expert_used_count": 2},
            "tensor blk.0.ffn_down.weight is not supported for MixtralForCausalLM",
        ),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale 0.5 is not supported"),
        ({"llama__attention__causal": False}, "llama.attention.causal false is not supported"),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_ext_factor": 0.5},
            "llama.rope.scaling.yarn_ext_factor other than 1",
        ),
        ({"llama__attention__head_count": None}, "llama.attention.head_count is missing"),
        ({"llama__embedding_length": 128}, "token_embd.weight has shape \\[320, 256\\], its metadata says"),
        ({"llama__attention__value_length": 64}, "value_length differs from key_length"),
        ({"llama__block_count": 3}, "tensor model.layers.2.self_attn.q_proj.weight is missing"),
        (
            {"llama__attention__layer_norm_rms_epsilon": float("nan")},
            "layer_norm_rms_epsilon is nan, expected a number",
        ),
        ({"llama__rope__scaling__type": "longrope"}, "rope_type 'longrope' is not supported"),
        ({"llama__rope__dimension_count": 16}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_what_is_wrong_with_the_settings_is_named(
    origin: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_model(origin, tmp_path / "x.gguf", lambda _: "Q4_0", **changes)
    with pytest.raises(ModelError, match=said):
        make_engine(tmp_path / "x.gguf")


BIG = 1 << 31
PLAIN_STACK = np.ones((6, 256), np.float32)


@pytest.mark.parametrize(
    ("kind", "changes", "more", "said"),
    [
        ("qwen3_moe", {"qwen3moe__expert_count": None}, {}, "qwen3moe.expert_count is missing"),
        ("qwen3_moe", {"qwen3moe__expert_count": 0}, {}, "qwen3moe.expert_count is 0, expected an integer from 1"),
        ("qwen3_moe", {"qwen3moe__expert_count": 4}, {}, r"exps.weight has shape \[6, 256, 256\], .* says 4 experts"),
        ("qwen3_moe", {"qwen3moe__expert_count": BIG}, {}, f"num_local_experts\\) is {BIG}, expected .* up to 1024"),
        ("qwen3_moe", {"qwen3moe__expert_used_count": 7}, {}, "used_count is 7, expected an integer from 1 to 6"),
        ("qwen3_moe", {"qwen3moe__expert_used_count": None}, {}, "qwen3moe.expert_used_count is missing"),
        ("qwen3_moe", {"qwen3moe__expert_gating_func": 2}, {}, "qwen3moe.expert_gating_func 2 is not supported"),
        ("qwen3_moe", {"qwen3moe__expert_weights_scale": 2.5}, {}, "expert_weights_scale 2.5 is not supported"),
        ("qwen3_moe", {"qwen3moe__expert_group_count": 4}, {}, "qwen3moe.expert_group_count 4 is not supported"),
        ("qwen3_moe", {"qwen3moe__expert_shared_count": 1}, {}, "qwen3moe.expert_shared_count 1 is not supported"),
        (
            "qwen3_moe",
            {"qwen3moe__expert_feed_forward_length": 128},
            {},
            r"tensor blk.0.ffn_gate_exps.weight has shape \[256, 256\], its metadata says \[128, 256\]",
        ),
        ("qwen3_moe", {}, {"blk.1.ffn_up_exps.weight": None}, "layers.1.mlp.experts.0.up_proj.weight is missing"),
        ("qwen3_moe", {}, {"blk.1.ffn_gate_inp.weight": None}, "layers.1.mlp.gate.weight is missing"),
        (
            "qwen3_moe",
            {},
            {"blk.1.ffn_up_exps.weight": PLAIN_STACK},
            r"tensor blk.1.ffn_up_exps.weight has shape \[6, 256\], its metadata says 6 experts; convert",
        ),
        ("qwen3_moe", {}, {"blk.0.ffn_up.weight": PLAIN_STACK}, "blk.0.ffn_up.weight is not supported for Qwen3Moe"),
        ("qwen3_moe", {}, {"blk.0.ffn_up_shexp.weight": PLAIN_STACK}, "blk.0.ffn_up_shexp.weight is not supported"),
        ("mixtral", {"llama__expert_count": None}, {}, "exps.weight is not supported for LlamaForCausalLM"),
        ("mixtral", {"llama__expert_weights_norm": False}, {}, "llama.expert_weights_norm false is not supported"),
        ("gpt_oss", {}, {"blk.0.attn_sinks.weight": None}, "layers.0.self_attn.sinks is missing"),
        ("gpt_oss", {}, {"blk.1.ffn_up_exps.bias": None}, "layers.1.mlp.experts.0.up_proj.bias is missing"),
        ("gpt_oss", {}, {"blk.1.ffn_up_exps.bias": PLAIN_STACK[:4]}, r"shape \[4, 256\], its metadata says 6 experts"),
        ("gpt_oss", {"gpt___oss__attention__sliding_window_pattern": 3}, {}, "sliding_window_pattern 3 is not supp"),
        ("gpt_oss", {"gpt___oss__rope__freq_base_swa": 5.0}, {}, "gpt-oss.rope.freq_base_swa 5 is not supported"),
        ("gemma2", {"gemma2__final_logit_softcapping": 0.0}, {}, "final_logit_softcapping is 0.0, expected a number"),
        ("gemma2", {"gemma2__attention__scale": 0.5}, {}, "gemma2.attention.scale 0.5 is not supported"),
    ],
)
def test_what_is_wrong_with_experts_and_caps_is_named(
    tmp_path: Path, kind: str, changes: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    sizes = {**SIZES, "intermediate_size": 256, **({"moe_intermediate_size": 256} if kind == "qwen3_moe" else {})}
    make_llama(tmp_path / "plain", seed=11, requests=1, output_tokens=1, kind=kind, **sizes)
    write_model(tmp_path / "plain", tmp_path / "x.gguf", lambda _: "Q4_0", more=more, **changes)
    with pytest.raises(ModelError, match=said):
        make_engine(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q_norm.weight", "blk.1.ffn_up.scale", "blk.0.attn_norm.bias", "cls.output"]
)
def test_tensor_that_would_change_the_numbers_and_is_not_read_is_refused(
    origin: Path, tmp_path: Path, name: str
) -> None:
    write_model(origin, tmp_path / "x.gguf", lambda _: "Q4_0", more={name: np.ones(32, np.float32)})
    with pytest.raises(ModelError, match=f"tensor {name} is not supported for LlamaForCausalLM; choose another model"):
        make_engine(tmp_path / "x.gguf")


def test_tensors_for_images_are_left_alone(origin: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(origin, tmp_path / "x.gguf", lambda _: "Q4_0", more={"v.patch.weight": np.ones(32, np.float32)})
    make_engine(tmp_path / "x.gguf")
    assert "tensors of no use to LlamaForCausalLM: 1, the first is v.patch.weight" in caplog.text


def test_fingerprint_is_that_of_the_numbers_and_of_the_settings(origin: Path, tmp_path: Path) -> None:

    def digest(kind: str, **metadata: Any) -> str:
        write_model(origin, tmp_path / "x.gguf", lambda _: kind, **metadata)
        return fingerprint_of(GgufWeights(load_config(tmp_path / "x.gguf"), tmp_path / "x.gguf"))

    same = {digest("Q4_0"), digest("Q4_0")}
    assert len(same) == 1
    assert len(same | {digest("Q8_0"), digest("Q4_0", general__name="other")}) == 3
    data = bytearray((tmp_path / "x.gguf").read_bytes())
    data[-64] ^= 1
    (tmp_path / "x.gguf").write_bytes(data)
    assert fingerprint_of(GgufWeights(load_config(tmp_path / "x.gguf"), tmp_path / "x.gguf")) not in same
