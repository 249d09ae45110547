"""What is found out about a model before it is loaded: faults of its directory, and the bytes of its weights."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from kernels.formats import ROUNDINGS
from services.launcher.model_check import (
    ModelFacts,
    expected_bytes,
    model_problem,
    read_model,
    size_problem,
)
from services.worker.checkpoint.stored import Stored
from services.worker.models.config import load_config
from shared.settings import DEMO_MODEL, WorkerSettings
from tests.support.checkpoints.gguf import write_file


def _header(shape: str, size: int = 0) -> bytes:
    """Return the header of a safetensors file with one tensor of a number of bytes."""
    header = f'{{"x": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, {size}]}}}}'.encode()
    return len(header).to_bytes(8, "little") + header


_WHOLE = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}',
    "tokenizer.json": b"{}",
    "model.safetensors": _header("[4]", 16) + bytes(16),
}

_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
_BROKEN: dict[str, tuple[str, bytes | None, str]] = {
    "a pointer for the weights": ("model.safetensors", _POINTER, "a Git LFS pointer, not the file itself"),
    "a pointer for the tokenizer": ("tokenizer.json", _POINTER, "`git lfs pull`"),
    "a pointer for the config": ("config.json", _POINTER, "a Git LFS pointer"),
    "broken JSON": ("config.json", b'{"architectures": [', "not readable as JSON"),
    "no object": ("config.json", b"[]", "no JSON object"),
    "weights cut off": ("model.safetensors", _WHOLE["model.safetensors"][:-1], "cut off"),
    "broken tokenizer": ("tokenizer.json", b"{", "tokenizer.json: not readable as JSON"),
    "no tokenizer": ("tokenizer.json", b"", "missing; save the fast tokenizer"),
    "a FIFO for the tokenizer": ("tokenizer.json", None, "tokenizer.json: not a regular file"),
    "pickles": ("pytorch_model.bin", b"x", "pickled weights"),
    "no GGUF": ("x.gguf", b"x", "not a GGUF file, or cut off"),
    "an endless shape": ("model.safetensors", _header("[Infinity]"), "model.safetensors"),
    "a negative shape": ("model.safetensors", _header("[-5, 7]"), "model.safetensors"),
    "quantized": (
        "config.json", b'{"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "exl3"}}',
        "quantization_config (exl3) is not supported, compressed-tensors, awq, gptq, fp8, mxfp4 are",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), _BROKEN.values(), ids=_BROKEN)
def test_fault_of_a_model_directory_is_named(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    before: dict[str, bytes | None] = dict(_WHOLE)
    if name in ("pytorch_model.bin", "x.gguf"):
        del before["model.safetensors"]
    for file, written in (before | {name: content}).items():
        if written is None:
            os.mkfifo(tmp_path / file)  # which is not waited for
        elif written:
            (tmp_path / file).write_bytes(written)
    assert said in model_problem(tmp_path, "auto")


PLAIN = {"embed_tokens.weight": (10, 4), "layers.0.up.weight": (4, 4), "norm.weight": (4,)}
EXPERTS = {f"layers.0.mlp.experts.{at}.gate_proj.weight": (8, 4) for at in range(16)}
MIXTURE = {**EXPERTS, "layers.0.mlp.gate.weight": (16, 4)}
GPTQ = {"norm.weight": (64,), "up.qweight": (8, 64), "up.qzeros": (2, 8), "up.scales": (2, 64), "up.g_idx": (64,)}
AWQ = {"up.qweight": (128, 8), "up.qzeros": (2, 8), "up.scales": (2, 64)}
FP8 = {
    "norm.weight": (32,),
    "mlp.up.weight": (40, 128),
    "mlp.experts.0.up.weight": (8, 128),
    "up.weight_scale": (40, 1),
}
FP8_BITS = {"mlp.up.weight": 8.25, "mlp.experts.0.up.weight": 8.25}
W8A8 = {"norm.weight": (32,), "up.weight": (40, 8), "up.weight_scale": (40, 1)}
IN_ONE = {"experts.gate_up_proj": (4, 64, 96), "experts.gate_up_proj_bias": (4, 96), "mlp.router.weight": (4, 64)}
MXFP4 = {
    "experts.down_proj_blocks": (4, 8, 2, 16), "experts.down_proj_scales": (4, 8, 2), "experts.down_proj_bias": (4, 8),
    "q_proj.weight": (8, 64),
}  # fmt: skip
MXFP4_NUMBERS = 4 * 8 * 64


@pytest.mark.parametrize(
    ("facts", "settings", "size"),
    [
        (ModelFacts("bfloat16", PLAIN), {}, 2 * 60),
        (ModelFacts("float16", PLAIN), {}, 4 * 60),  # widened on a CPU
        (ModelFacts("float32", PLAIN), {"dtype": "bfloat16"}, 2 * 60),
        (ModelFacts("bfloat16", PLAIN), {"quantize": "int8"}, 2 * 44 + 16),
        (ModelFacts("bfloat16", PLAIN), {"quantize": "int4"}, 2 * 44 + 10),
        (ModelFacts("bfloat16", {"lm_head.weight": (10, 4)}), {"quantize": "int4"}, 2 * 40),  # the head keeps its type
        (ModelFacts("bfloat16", MIXTURE), {}, 2 * 16 * 32 + 2 * 64),
        (ModelFacts("bfloat16", MIXTURE), {"quantize": "int8"}, 16 * 32 + 2 * 64),  # the router keeps its type
        (ModelFacts("bfloat16", IN_ONE), {}, 2 * (4 * 64 * 96 + 4 * 96 + 4 * 64)),
        (ModelFacts("bfloat16", IN_ONE), {"quantize": "int4"}, 4 * 64 * 96 * 5 // 8 + 2 * (4 * 96 + 4 * 64)),
        (ModelFacts("bfloat16", GPTQ, Stored("gptq", 4, 32, has_mins=True, in_order=True)), {}, 128 + 2048 + 1024),
        (ModelFacts("bfloat16", GPTQ, Stored("gptq", 4, 32, has_mins=True, in_order=False)), {}, 128 + 8192),
        (ModelFacts("bfloat16", GPTQ, Stored("gptq", 4, 32, has_mins=True)), {"kernels": "reference"}, 128 + 8192),
        (ModelFacts("bfloat16", GPTQ, Stored("gptq", 4, 32, has_mins=True)), {"device": "cuda"}, 128 + 2048 + 1024),
        (
            ModelFacts("bfloat16", GPTQ, Stored("gptq", 4, 32, has_mins=True)),
            {"device": "cuda", "kernels": "reference"}, 128 + 8192,
        ),
        (
            ModelFacts(
                "bfloat16", {name.replace("up", "mlp.experts.0.up"): shape for name, shape in GPTQ.items()},
                Stored("gptq", 4, 32, has_mins=True),
            ),
            {"device": "cuda"}, 128 + 8192,
        ),
        (ModelFacts("bfloat16", AWQ, Stored("awq", 4, 64, has_mins=True)), {}, 64 * 128 // 2 + 64 * (128 // 32) * 8),
        (
            ModelFacts("bfloat16", {"blk.0.ffn_gate.weight": (4, 32), "blk.0.ffn_gate_inp.weight": (2, 32)}),
            {"quantize": "int8"}, 4 * 32 + 2 * 2 * 32,
        ),
        *(
            (ModelFacts("bfloat16", W8A8, Stored("w8a8", 8), {"up.weight": 8}), {"kernels": kernels}, 40 * 8 + 2 * 32)
            for kernels in ("auto", "reference")
        ),
        (ModelFacts("bfloat16", FP8, Stored("fp8", 8), FP8_BITS), {}, 2 * (48 * 128 + 32)),  # unpacked
        (ModelFacts("bfloat16", FP8, Stored("fp8", 8), FP8_BITS), {"device": "cuda"}, 40 * 132 + 2 * (8 * 128 + 32)),
        (
            ModelFacts("bfloat16", FP8, Stored("fp8", 8), FP8_BITS), {"device": "cuda", "kernels": "reference"},
            2 * (48 * 128 + 32),
        ),
        (ModelFacts("bfloat16", {"up.weight_packed": (40, 8)}, Stored("w8a8", 8)), {}, 40 * 8 * 4 * 2),  # refused later
        (ModelFacts("bfloat16", MXFP4, Stored("mxfp4", 4, 32)), {}, MXFP4_NUMBERS * 5 // 8 + 2 * (32 + 512)),
        (
            ModelFacts("bfloat16", MXFP4, Stored("mxfp4", 4, 32)), {"kernels": "reference"},
            2 * (MXFP4_NUMBERS + 32 + 512),
        ),
    ],
)  # fmt: skip
def test_size_is_that_of_the_weights_as_they_are_held(facts: ModelFacts, settings: dict[str, Any], size: int) -> None:
    assert facts.held_bytes(WorkerSettings(**({"device": "cpu"} | settings))) == size


@pytest.mark.parametrize("given", [{"dtype": "float32"}, {"score_softcap": 50.0}, {"intermediate_size": 520, "tp": 2}])
def test_size_on_a_gpu_is_unpacked_where_the_kernels_lack_the_model(given: dict[str, Any]) -> None:
    worker = WorkerSettings(device="cuda", **{name: given[name] for name in given if name in ("dtype", "tp")})
    config, held = load_config(DEMO_MODEL), 4 if worker.dtype == "float32" else 2
    config = replace(config, checkpoint_dtype="bfloat16", head_dim=64)
    lacking = replace(config, **{name: value for name, value in given.items() if name not in ("dtype", "tp")})
    facts = ModelFacts("bfloat16", FP8, Stored("fp8", 8), FP8_BITS)
    assert facts.held_bytes(WorkerSettings(device="cuda"), config) == 40 * 132 + 2 * (8 * 128 + 32)
    assert facts.held_bytes(worker, lacking) == held * (48 * 128 + 32)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    raw = {"dtype": "bfloat16", "quantization_config": quantization}
    assert expected_bytes(raw, 1000, WorkerSettings(device="cuda"), config) == 1000
    assert expected_bytes(raw, 1000, worker, lacking) == held * 1000


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ_4_BITS = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}


@pytest.mark.parametrize(
    ("config", "fetched", "settings", "size"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, 17 * 64, {}, 20 * 64),
        ({"quantization_config": {"quant_method": "mxfp4"}}, 17 * 64, {"kernels": "reference"}, 2 * 32 * 64),
        ({"num_experts": 8, "quantization_config": GPTQ_4_BITS}, 1000, {}, 1000),
        ({"num_experts": 8, "quantization_config": GPTQ_4_BITS}, 1000, {"device": "cuda"}, 4000),  # unpacked there
        ({"quantization_config": FP8_BLOCKS}, 1000, {}, 2000),  # unpacked but for a GPU
        ({"quantization_config": FP8_BLOCKS}, 1000, {"device": "cuda"}, 1000),
    ],
)
def test_size_is_expected_before_the_weights_are_fetched(
    config: dict[str, Any], fetched: int, settings: dict[str, Any], size: int
) -> None:
    worker = WorkerSettings(**({"device": "cpu"} | settings))
    assert expected_bytes({"dtype": "bfloat16"} | config, fetched, worker) == size


def test_size_of_a_gguf_file_is_that_of_its_types_as_they_are_held(tmp_path: Path) -> None:
    tables = {"token_embd.weight": ("Q8_0", (4, 32), bytes(4 * 34)), "output.weight": ("Q8_0", (4, 32), bytes(4 * 34))}
    layers = {
        "blk.0.attn_q.weight": ("Q4_K", (2, 256), bytes(2 * 144)),
        "blk.0.ffn_up.weight": ("F16", (2, 32), bytes(128)),
        "blk.0.ffn_gate_inp.weight": ("F32", (2, 32), bytes(256)),
        "blk.0.ffn_up_exps.weight": ("MXFP4", (2, 2, 32), bytes(4 * 17)),
        "blk.0.ffn_up.0.weight": ("Q4_K", (2, 256), bytes(2 * 144)),
        "blk.0.attn_k.weight": ("Q3_K", (1, 256), bytes(110)),
    }
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a"]}
    sizes = dict.fromkeys(("context_length", "embedding_length", "block_count", "feed_forward_length"), 32)
    numbers = {f"llama.{key}": value for key, value in sizes.items()} | {"llama.attention.head_count": 1}
    metadata = {
        "general.architecture": "llama", **numbers, "llama.attention.layer_norm_rms_epsilon": 1e-5, **vocabulary,
    }  # fmt: skip
    write_file(tmp_path / "x.gguf", metadata, {**tables, **layers})
    facts, packed, experts = read_model(tmp_path / "x.gguf"), 512 * 6 // 8, 128 * 5 // 8 + (512 + 256) * 6 // 8
    assert facts.held_bytes(WorkerSettings(device="cpu")) == packed + experts + 128 * 4 + 256 * 9 // 8
    assert facts.held_bytes(WorkerSettings(device="cpu", dtype="bfloat16")) == packed + experts + 256 * 2 + 128 * 9 // 8
    assert facts.held_bytes(WorkerSettings(device="cpu", tp=2)) == packed + experts + 384 * 4
    assert facts.held_bytes(WorkerSettings(device="cpu", kernels="reference")) == (512 + 384 + 128 + 768) * 4
    unpacked = 384 + 128 + 768  # tables, experts, and a type without kernels
    assert facts.held_bytes(WorkerSettings(device="cuda")) == packed + unpacked * 2


@pytest.mark.parametrize(
    ("is_quantized", "quantize", "remedies"),
    [
        (False, "none", "choose a smaller model, --quantize int8 or int4 or a machine"),
        (False, "int8", "choose a smaller model, --quantize int4 or a machine"),
        (True, "none", "choose a smaller model or a machine"),
    ],
)
def test_model_that_does_not_fit_gets_remedies_that_it_takes(is_quantized: bool, quantize: str, remedies: str) -> None:
    worker = WorkerSettings(device="cpu", quantize=quantize)
    assert remedies in size_problem("m", 1 << 60, worker, is_quantized=is_quantized)


def test_each_value_of_quantize_has_the_bits_of_its_weights() -> None:
    assert {"none", *ROUNDINGS} == set(get_args(WorkerSettings.model_fields["quantize"].annotation))
