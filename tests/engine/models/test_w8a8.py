"""W8A8 checkpoints against transformers with layers that compute the formula: the same tokens, however rows are cut."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.ops import W8A8_INPUTS, Groups
from services.worker.checkpoint.source import Checkpoint
from services.worker.models.config import load_config
from services.worker.models.weights import shard_of
from services.worker.parallel.state import ParallelState
from services.worker.quantization import method_of
from services.worker.quantization.base import Matrix
from shared.errors import ConfigurationError, ModelError
from tests.engine.driver import generated, make_engine
from tests.support.checkpoints.models import Reference, make_llama
from tests.support.checkpoints.w8a8 import replace_layers, write_w8a8
from tests.support.compiler import demand_compiler

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
EXPERTS = {"kind": "qwen2_moe", "moe_intermediate_size": 64, "shared_expert_intermediate_size": 192}
KERNELS = ["reference"] if shutil.which("g++") is None else ["reference", "cpu"]
TOKENS = 64


def write(tmp_path: Path) -> Path:
    make_llama(tmp_path / "plain", seed=5, requests=1, output_tokens=1, **SIZES)
    write_w8a8(tmp_path / "plain", tmp_path / "w8a8")
    return tmp_path / "w8a8"


@pytest.mark.parametrize(
    ("strategy", "ignore"),
    [("channel", ()), ("tensor", ()), ("channel", ("1.self_attn.k_proj", "0.mlp.down_proj"))],
    ids=["channel", "tensor", "ignore"],
)
def test_tokens_are_those_of_the_formula(tmp_path: Path, strategy: str, ignore: tuple[str, ...]) -> None:
    make_llama(tmp_path / "plain", seed=5, requests=1, output_tokens=1, **SIZES)
    written = write_w8a8(tmp_path / "plain", tmp_path / "w8a8", strategy, ignore)
    reference = Reference(tmp_path / "plain")
    plain = reference.run([[1, 2, 3]], TOKENS)[0]
    replace_layers(reference.model, written)
    assert reference.run([[1, 2, 3]], TOKENS)[0] != plain
    cases = reference.cases(3, (4, 40), TOKENS, seed=3)
    prompts, tokens = [case.prompt for case in cases], [case.tokens for case in cases]
    for name in KERNELS:
        for settings in ({}, {"max_step_tokens": 16, "threads": 2}):
            engine = make_engine(tmp_path / "w8a8", kernels=name, block_size=16, **settings)
            assert engine.info().numerics.endswith(" float32 none w8a8")
            assert generated(engine, prompts, TOKENS) == tokens, (name, settings)


def test_experts_of_both_kernels_give_the_same_tokens(tmp_path: Path) -> None:
    demand_compiler()
    make_llama(tmp_path / "plain", seed=5, requests=1, output_tokens=1, **SIZES, **EXPERTS)
    written = write_w8a8(tmp_path / "plain", tmp_path / "w8a8")
    assert sum(".experts." in name for name in written) == 2 * 6 * 3
    prompts = [case.prompt for case in Reference(tmp_path / "plain").cases(3, (4, 40), 1, seed=3)]
    first, second = (
        generated(make_engine(tmp_path / "w8a8", kernels=name, block_size=16), prompts, 24)
        for name in ("reference", "cpu")
    )
    assert first == second


def test_integers_and_scales_are_read_as_they_are(tmp_path: Path) -> None:
    model = write(tmp_path)
    method, stored = method_of("none", load_config(model).stored), load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    pieces = list(method.read(Checkpoint(model), Matrix(name, 128, 256, range(3, 100), range(256)), torch.float32))
    assert all(isinstance(piece, Groups) and piece.rounds_rows for piece in pieces)
    numbers = torch.cat([piece.numbers for piece in pieces if isinstance(piece, Groups)]).to(torch.int16) - 128
    assert torch.equal(numbers.to(torch.int8), stored[f"{name}.weight"][3:100])
    scales = torch.cat([piece.scales for piece in pieces if isinstance(piece, Groups)])
    assert torch.equal(scales, stored[f"{name}.weight_scale"][3:100].float())


def test_spoilt_tensors_are_refused_by_name(tmp_path: Path) -> None:
    model = write(tmp_path)
    method, good = method_of("none", load_config(model).stored), load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    matrix = Matrix(name, 128, 256, range(128), range(256))
    scales = good[f"{name}.weight_scale"]
    for part, spoilt, said in (
        ("weight", good[f"{name}.weight"].to(torch.uint8), "weight is U8, expected I8"),
        ("weight", good[f"{name}.weight"][1:].clone(), r"shape \[127, 256\]"),
        ("weight_scale", scales[:, 0].clone(), r"weight_scale has shape \[128\]"),
        ("weight_scale", scales * torch.inf, "weight_scale holds inf"),
        ("weight_scale", None, "weight_scale is missing"),
    ):
        tensors = {key: value for key, value in {**good, f"{name}.{part}": spoilt}.items() if value is not None}
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=said):
            list(method.read(Checkpoint(model), matrix, torch.float32))
    wide = Matrix(name, 128, W8A8_INPUTS + 1, range(128), range(W8A8_INPUTS + 1))
    with pytest.raises(ModelError, match="has 132105 inputs, W8A8 takes 132104 at most"):
        method.check(Checkpoint(model), wide)


def test_ranks_and_gpus_are_refused(tmp_path: Path) -> None:
    model = write(tmp_path)
    config = load_config(model)
    with pytest.raises(ConfigurationError, match=r"--tp 2: activations of a W8A8 checkpoint .* give --tp 1"):
        shard_of(config, ParallelState(tp=2))
    shard_of(config, ParallelState(pp=2))
    with pytest.raises(ConfigurationError, match=r"in w8a8, which reference and cpu kernels .* give --kernels cpu"):
        make_engine(model, kernels="emulator", dtype="bfloat16", block_size=16)
