"""Quantized checkpoints against the weights that they mean: the same bits as they are read, and transformers' tokens.

The oracle is numpy's (q - zero) * scale of integers that are packed as each format's specification says; the words of
compressed-tensors are also compared with some that its own package (0.20) wrote.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.cpu.library import load
from kernels.cuda.backend import CudaOps
from kernels.cuda.backend import Packed as PlainOnDevice
from kernels.cuda.operations import quantized
from kernels.cuda.operations.quantized import Quantized
from kernels.ops import Groups
from services.worker.checkpoint.source import Checkpoint
from services.worker.checkpoint.stored import Stored
from services.worker.models.config import load_config
from services.worker.models.weights import WeightLoader, shard_of
from services.worker.parallel.state import ParallelState
from services.worker.quantization import method_of
from services.worker.quantization.base import Matrix
from services.worker.quantization.int4 import rounded as int4_rounded
from services.worker.quantization.stored import unpacked
from shared.errors import ConfigurationError, ModelError
from tests.engine.driver import assert_tokens, generated, make_engine
from tests.engine.emulated import GAP, emulated
from tests.kernels.cuda.programs import device_of
from tests.support.checkpoints.gguf import write_model
from tests.support.checkpoints.models import Reference, make_llama, random_prompts
from tests.support.checkpoints.quantized import Format, words, write_fp8, write_quantized
from tests.support.compiler import demand_compiler

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
EMULATED = {**SIZES, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "dtype": "float16"}
EXPERTS = {"kind": "qwen2_moe", "moe_intermediate_size": 64, "shared_expert_intermediate_size": 192}
CASES = (
    (Format("compressed-tensors", group=128, symmetric=True), "int4-128"),
    (Format("compressed-tensors", group=32), "int4-32-mins"),
    (Format("compressed-tensors", 8, symmetric=True), "int8-128"),
    (Format("compressed-tensors", 8, 64), "int8-32-mins"),
    (Format("compressed-tensors", group=16), ""),
    (Format("compressed-tensors", group=32, act_order=True), ""),
    (Format("awq", group=128), "int4-128-mins"),
    (Format("awq", group=64), "int4-32-mins"),
    (Format("gptq", group=128), "int4-128-mins"),
    (Format("gptq", group=32, symmetric=True), "int4-32"),
    (Format("gptq", group=64, act_order=True), ""),
    (Format("gptq", 8, first_zeros=False), "int8-128-mins"),
)
"""And the format that the matrices are held in; empty where no kernel has it."""
FP8 = (
    ("fp8", (0, 0), "float8-128"),
    ("fp8", (128, 128), "float8-128"),
    ("fp8", (64, 48), ""),
    ("compressed-tensors", (1, 0), "float8-128"),
    ("compressed-tensors", (64, 32), "float8-32"),
)
"""Method, outputs and inputs of a block, 0 for all, and the format that the matrices are read in."""
NAMES = [f"{kind.method}-{kind.bits}-{kind.group}{'-order' * kind.act_order}" for kind, _ in CASES]


def read(model: Path, name: str, weight: Tensor, rows: range, columns: range) -> list[Tensor | Groups]:
    """What the model's method yields of a matrix."""
    config = load_config(model)
    method = method_of("none", config.stored)
    matrix = Matrix(name.removesuffix(".weight"), *weight.shape, rows, columns)
    return list(method.read(Checkpoint(model), matrix, torch.float32))


def plain(pieces: list[Tensor | Groups]) -> Tensor:
    return torch.cat([piece.plain() if isinstance(piece, Groups) else piece for piece in pieces])


@pytest.mark.parametrize(("kind", "held"), CASES, ids=NAMES)
def test_quantized_weights_are_read_to_the_bit_and_give_their_tokens(tmp_path: Path, kind: Format, held: str) -> None:
    model = tmp_path / "quantized"
    make_llama(tmp_path / "plain", seed=5, requests=1, output_tokens=1, **SIZES)
    meant = write_quantized(tmp_path / "plain", model, kind)
    for name, weight in meant.items():
        outputs, inputs = weight.shape
        whole = read(model, name, weight, range(outputs), range(inputs))
        assert {piece.group_format if isinstance(piece, Groups) else "" for piece in whole} == {held}
        assert torch.equal(plain(whole), weight), name
        for rows, columns in (
            (range(3, 30), range(inputs)),
            (range(outputs), range(32, inputs)),
            (range(8), range(5, 77)),
        ):
            part = read(model, name, weight, rows, columns)
            assert torch.equal(plain(part), weight[rows.start : rows.stop, columns.start : columns.stop]), name
    kernels = ["reference"] if shutil.which("g++") is None else ["reference", "cpu"]
    assert_tokens(Reference(tmp_path / "plain"), model, *kernels)


def test_numerics_say_how_groups_are_multiplied(tmp_path: Path) -> None:
    demand_compiler()
    make_llama(tmp_path / "plain", seed=5, requests=1, output_tokens=1, **SIZES)
    write_quantized(tmp_path / "plain", tmp_path / "awq", Format("awq", group=64))
    write_model(tmp_path / "plain", tmp_path / "x.gguf", lambda _: "Q8_0")
    order = f" {load().group_order}".rstrip()
    for model, quantize in (("plain", "int4"), ("awq", "none"), ("x.gguf", "none"), ("plain", "none")):
        for dtype in ("float32", "bfloat16"):
            engine = make_engine(tmp_path / model, kernels="cpu", dtype=dtype, quantize=quantize, block_size=16)
            in_groups = dtype == "bfloat16" and (model, quantize) != ("plain", "none")
            assert engine.info().numerics.endswith(f" {dtype} {quantize}{order if in_groups else ''}"), (model, dtype)


@pytest.mark.parametrize(
    "kind",
    [Format("awq", group=128), Format("gptq", group=32, symmetric=True), Format("gptq", group=64, act_order=True)],
    ids=["awq", "gptq", "gptq-order"],
)
def test_matrices_on_an_emulated_gpu_stay_packed_and_give_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Format
) -> None:
    """Prompts are chunks of more rows than are multiplied without unpacking; decode steps are recorded."""
    demand_compiler()
    make_llama(tmp_path / "plain", seed=9, requests=1, output_tokens=1, **EMULATED)
    write_quantized(tmp_path / "plain", tmp_path / "quantized", kind)
    reference, prompts = Reference(tmp_path / "plain"), random_prompts(12, (30, 80), 3)
    tokens, gaps = reference.run(prompts, 8)
    clear = [at for at, gap in enumerate(gaps) if gap > GAP]
    assert len(clear) >= 4
    engine = emulated(monkeypatch, tmp_path / "quantized", 1, max_step_tokens=96, max_input_tokens=88, kv_blocks=30)
    down = engine.decoder.layers[0].mlp.down_proj.weight
    assert isinstance(down, PlainOnDevice if kind.act_order else Quantized)
    assert engine.info().numerics == f"emulator float16 none{'' if kind.act_order else ' packed'}"
    engine.warm_up()
    engine.reset()
    assert generated(engine, [prompts[at] for at in clear], 8) == [tokens[at] for at in clear]


@pytest.mark.parametrize(
    "kind",
    [Format("awq", group=64), Format("compressed-tensors", 8, 32), Format("gptq", group=64, act_order=True)],
    ids=["awq", "compressed-tensors", "gptq-order"],
)
def test_experts_of_a_quantized_checkpoint_give_the_tokens_of_their_weights(tmp_path: Path, kind: Format) -> None:
    demand_compiler()
    make_llama(tmp_path / "plain", seed=5, requests=1, output_tokens=1, **SIZES, **EXPERTS)
    meant = write_quantized(tmp_path / "plain", tmp_path / "quantized", kind)
    assert sum(".experts." in name for name in meant) == 2 * 6 * 3
    assert_tokens(Reference(tmp_path / "plain"), tmp_path / "quantized", "cpu")


def test_experts_alone_are_unpacked_where_kernels_have_none_in_groups(tmp_path: Path) -> None:
    demand_compiler()
    make_llama(tmp_path / "plain", seed=5, requests=1, output_tokens=1, **SIZES, **EXPERTS)
    meant = write_quantized(tmp_path / "plain", tmp_path / "quantized", Format("awq", group=32))
    config = load_config(tmp_path / "quantized")
    assert config.mixture is not None
    names, source, method = config.mixture.names, Checkpoint(tmp_path / "quantized"), method_of("none", config.stored)
    shard, ops = shard_of(config, ParallelState()), CudaOps(device_of())
    loader = WeightLoader(config, shard, source, ops, torch.float16, 64, method)
    for mlp, inner, held in ((f"{names.experts}.3", 64, PlainOnDevice), (names.shared, 192, Quantized)):
        name = f"{loader.layer_prefix(0)}{mlp}.{names.down_proj}"
        packed = loader.row_parallel(name, inner, range(inner), "mlp")
        assert isinstance(packed, held)
        if isinstance(packed, PlainOnDevice):
            assert torch.equal(packed.weight.cpu(), meant[f"{name}.weight"].half())


def test_experts_that_are_rounded_at_load_give_the_tokens_of_their_weights(tmp_path: Path) -> None:
    demand_compiler()
    make_llama(tmp_path / "given", seed=5, requests=1, output_tokens=1, **SIZES, **EXPERTS)
    shutil.copytree(tmp_path / "given", tmp_path / "meant")
    stored = load_file(tmp_path / "given" / "model.safetensors")
    for name, weight in stored.items():
        if ".layers." in name and weight.ndim == 2 and not name.endswith("gate.weight"):
            blocks = weight.numpy().reshape(len(weight), -1, 32)
            scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(7)
            stored[name] = torch.from_numpy((np.rint(blocks / scales) * scales).reshape(weight.shape))
    save_file(stored, tmp_path / "meant" / "model.safetensors", {"format": "pt"})
    assert_tokens(Reference(tmp_path / "meant"), tmp_path / "given", "cpu", quantize="int4")


@pytest.mark.parametrize(
    ("bits", "numbers", "packed", "packed_down"),
    [
        (
            4,
            [
                [2, 0, 1, -5, 0, 0, -8, -3, 5, -5],
                [2, 3, 1, 1, 2, -3, -1, -2, -8, -4],
                [4, 5, -1, 6, 0, 2, -7, 2, -2, -6],
            ],
            [[1351104906, 61], [1733990842, 64], [-1582766116, 38]],
            [[3242, 3512, 1945, 3731, 2216, 2648, 368, 2661, 1549, 579]],
        ),
        (
            8,
            [[-126, 63, -68, 1, 51, -38], [29, -22, 24, 123, -66, -121], [-49, 48, -91, -108, -34, -79]],
            [[-2126725374, 23219], [-73897315, 1854], [338014287, 12638]],
            [[5217538, 11561663, 2463804, 1375105, 6176435, 3213146]],
        ),
    ],
)
def test_words_are_those_of_the_compressed_tensors_package(
    bits: int, numbers: list[list[int]], packed: list[list[int]], packed_down: list[list[int]]
) -> None:
    above = np.array(numbers) + (1 << bits - 1)
    for found, values in ((packed, above), (packed_down, above.T)):
        wanted = torch.tensor(found, dtype=torch.int32)
        wanted = wanted.t() if values is not above else wanted
        assert np.array_equal(words(values, bits), wanted.numpy())
        assert np.array_equal(unpacked(wanted, bits)[:, : values.shape[1]].numpy(), values)


def test_matrices_in_several_formats_are_stacked_and_plain_ones_stay(tmp_path: Path) -> None:
    demand_compiler()
    model = tmp_path / "quantized"
    make_llama(tmp_path / "plain", seed=6, requests=1, output_tokens=1, **SIZES)
    meant = write_quantized(tmp_path / "plain", model, Format("gptq", group=32, symmetric=True))
    kept = "model.layers.1.self_attn.k_proj"
    written = {
        name: tensor for name, tensor in load_file(model / "model.safetensors").items() if not name.startswith(kept)
    }
    save_file({**written, f"{kept}.weight": meant[f"{kept}.weight"]}, model / "model.safetensors", {"format": "pt"})
    assert_tokens(Reference(tmp_path / "plain"), model, "cpu", count=2)


def test_int4_of_a_plain_checkpoint_gives_the_tokens_of_rounded_weights(tmp_path: Path) -> None:
    demand_compiler()
    make_llama(tmp_path / "plain", seed=7, requests=1, output_tokens=1, **SIZES)
    reference = Reference(tmp_path / "plain")
    with torch.no_grad():
        for name, weight in reference.model.named_parameters():
            if ".layers." in name and weight.ndim == 2:
                exact = weight.numpy().reshape(len(weight), -1, 32)
                scale = np.abs(exact).max(2, keepdims=True) / np.float32(7)
                made = (np.clip(np.rint(exact / scale), -7, 7) * scale).reshape(weight.shape)
                assert np.array_equal(int4_rounded(weight).plain().numpy(), made)
                weight.copy_(torch.from_numpy(made))
    assert_tokens(reference, tmp_path / "plain", "cpu", quantize="int4")


@pytest.mark.parametrize(("method", "block", "held"), FP8, ids=str)
def test_fp8_weights_are_read_to_the_bit_and_give_their_tokens(
    tmp_path: Path, method: str, block: tuple[int, int], held: str
) -> None:
    make_llama(tmp_path / "plain", seed=8, requests=1, output_tokens=1, **SIZES)
    model = tmp_path / "quantized"
    meant = write_fp8(tmp_path / "plain", model, method, block)
    for name, weight in meant.items():
        outputs, inputs = weight.shape
        for columns, cut in ((range(inputs), held), (range(5, inputs), held if not block[1] else "")):
            part = read(model, name, weight, range(3, outputs), columns)
            assert {piece.group_format if isinstance(piece, Groups) else "" for piece in part} == {cut}
            assert torch.equal(plain(part), weight[3:, columns.start :]), name
    assert_tokens(Reference(tmp_path / "plain"), model, "reference", count=1)


@pytest.mark.parametrize(("method", "block", "held"), FP8, ids=str)
def test_fp8_on_an_emulated_gpu_stays_in_8_bits_and_gives_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, block: tuple[int, int], held: str
) -> None:
    demand_compiler()
    make_llama(tmp_path / "plain", seed=9, requests=1, output_tokens=1, **EMULATED)
    meant = write_fp8(tmp_path / "plain", tmp_path / "quantized", method, block)
    reference, prompts = Reference(tmp_path / "plain"), random_prompts(12, (30, 80), 3)
    tokens, gaps = reference.run(prompts, 8)
    clear = [at for at, gap in enumerate(gaps) if gap > GAP]
    assert len(clear) >= 4
    engine = emulated(monkeypatch, tmp_path / "quantized", 1, max_step_tokens=96, max_input_tokens=88, kv_blocks=30)
    down, ops = engine.decoder.layers[0].mlp.down_proj.weight, engine.ops
    assert isinstance(down, Quantized if held else PlainOnDevice)
    assert isinstance(ops, CudaOps)
    unpacked = down.weight if isinstance(down, PlainOnDevice) else quantized.unpacked(ops.gpu, down, torch.float16)
    ops.mark().wait()
    assert torch.equal(unpacked.cpu(), meant["model.layers.0.mlp.down_proj.weight"].half())
    assert engine.info().numerics == f"emulator float16 none{' packed' if held else ''}"
    engine.warm_up()
    engine.reset()
    assert generated(engine, [prompts[at] for at in clear], 8) == [tokens[at] for at in clear]


def test_a_zero_point_of_sixteen_is_one_more_than_fits_in_gptq(tmp_path: Path) -> None:
    make_llama(tmp_path / "plain", seed=9, requests=1, output_tokens=1, **SIZES)
    model = tmp_path / "quantized"
    write_quantized(tmp_path / "plain", model, Format("gptq", group=128))
    stored = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    stored[f"{name}.qzeros"].fill_(-1)  # 15 everywhere
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    words = stored[f"{name}.qweight"].numpy().view(np.uint32)
    numbers = np.stack([words >> 4 * i & 15 for i in range(8)], 1).reshape(128, 128).T.astype(np.float64)
    exact = (numbers - 16) * stored[f"{name}.scales"].double().numpy().T
    found = plain(read(model, f"{name}.weight", torch.empty(128, 128), range(128), range(128)))
    assert np.array_equal(found.double().numpy(), exact)


def test_groups_of_an_input_are_checked_and_shapes_are(tmp_path: Path) -> None:
    make_llama(tmp_path / "plain", seed=10, requests=1, output_tokens=1, **SIZES)
    model = tmp_path / "quantized"
    meant = write_quantized(tmp_path / "plain", model, Format("gptq", group=32, act_order=True))
    name = "model.layers.0.mlp.down_proj"
    weight = meant[f"{name}.weight"]
    good = load_file(model / "model.safetensors")
    for part, spoilt, said in (
        ("g_idx", good[f"{name}.g_idx"].clone().fill_(8), "names group 8, there are 8"),
        ("g_idx", good[f"{name}.g_idx"] - 2, "names group -2"),
        ("g_idx", good[f"{name}.g_idx"][1:].clone(), r"shape \[255\]"),
        ("qweight", good[f"{name}.qweight"][1:].clone(), r"shape \[31, 128\]"),
        ("qweight", good[f"{name}.qweight"].float(), "is F32, expected I32"),
        ("scales", good[f"{name}.scales"].float(), "is F32, expected BF16 or F16"),
        ("qzeros", good[f"{name}.qzeros"][:, 1:].contiguous(), r"shape \[8, 15\]"),
    ):
        save_file({**good, f"{name}.{part}": spoilt}, model / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=said):
            read(model, f"{name}.weight", weight, range(128), range(256))
    for part in ("qzeros", "g_idx"):  # without g_idx the inputs would lie in another order than desc_act says
        save_file({key: value for key, value in good.items() if key != f"{name}.{part}"}, model / "model.safetensors")
        with pytest.raises(ModelError, match=f"{name}.{part} is missing"):
            read(model, f"{name}.weight", weight, range(128), range(256))


def test_a_quantized_checkpoint_is_not_rounded_again() -> None:
    with pytest.raises(ConfigurationError, match="quantized already"):
        method_of("int8", Stored("awq", 4, 128, has_mins=True))
