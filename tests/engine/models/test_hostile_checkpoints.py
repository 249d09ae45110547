"""Quantized checkpoints that attack: each is refused while it is read, by tensor and value, with what to do."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.ops import Groups
from services.worker.checkpoint.source import Checkpoint
from services.worker.models.config import load_config
from services.worker.models.gguf import GgufWeights
from services.worker.quantization import method_of
from services.worker.quantization.base import Matrix, Stack
from services.worker.quantization.gguf import UNPACK
from shared.errors import ModelError
from shared.models.gguf.reader import open_gguf
from tests.engine.driver import make_engine
from tests.support.checkpoints.gguf import write_model
from tests.support.checkpoints.models import make_llama
from tests.support.checkpoints.quantized import Format, add_config, write_mxfp4, write_quantized

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
NAME = "model.layers.0.self_attn.o_proj"  # 128 x 128
EXPERTS = "model.layers.0.mlp.experts.down_proj"
GPT_OSS = {"kind": "gpt_oss", "intermediate_size": 64, "sliding_window": 11}
KINDS = {
    "compressed": Format("compressed-tensors", group=32, act_order=True),
    "gptq": Format("gptq", group=32, act_order=True),
    "awq": Format("awq", group=32),
}
Spoil = Callable[[Tensor], Tensor]
Parts = dict[str, Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A good model of a kind."""
    directory, made = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def model(kind: str) -> Path:
        if kind not in made:
            plain, made[kind] = directory / f"plain-{kind}", directory / kind
            make_llama(plain, seed=3, requests=1, output_tokens=1, **(SIZES | (GPT_OSS if kind == "mxfp4" else {})))
            if kind == "mxfp4":
                write_mxfp4(plain, made[kind])
            elif kind == "fp8":
                write_fp8(plain, made[kind])
            else:
                write_quantized(plain, made[kind], KINDS[kind])
        return made[kind]

    return model


def write_fp8(plain: Path, target: Path) -> None:
    shutil.copytree(plain, target)
    tensors = load_file(plain / "model.safetensors")
    tensors[f"{NAME}.weight"] = tensors[f"{NAME}.weight"].to(torch.float8_e4m3fn)
    tensors[f"{NAME}.weight_scale_inv"] = torch.ones(2, 2)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    add_config(target, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]})


def read(model: Path) -> Tensor:
    """Read one matrix as the loader does, and return its weights."""
    config = load_config(model)
    matrix = Matrix(NAME, 128, 128, range(128), range(128))
    if (mixture := config.mixture) is not None:
        inputs = mixture.intermediate_size
        matrix = Matrix(EXPERTS, 128, inputs, range(128), range(inputs), stack=Stack(1, mixture.experts))
    pieces = method_of("none", config.stored).read(Checkpoint(model), matrix, torch.float32)
    return torch.cat([piece.plain() if isinstance(piece, Groups) else piece for piece in pieces])


def at(value: float) -> Spoil:
    """Set the number in the middle."""

    def spoil(good: Tensor) -> Tensor:
        found = good.clone()
        found.view(-1)[found.numel() // 2] = value
        return found

    return spoil


def large(good: Tensor) -> Tensor:
    """Return scales that are finite, of weights that are not."""
    return torch.full_like(good, 3e38, dtype=torch.bfloat16)


def cut(good: Tensor) -> Tensor:
    return good[:-1].contiguous()


def flat(good: Tensor) -> Tensor:
    return good.reshape(-1).contiguous()


BIG = r"\d\.\d*e\+38"
SPOILT: dict[str, tuple[str, str, Spoil, str]] = {
    f"{kind} {part} {said}": (kind, part, spoil, said)
    for kind, part, spoil, said in (
        *((kind, scales, at(value), f"{scales} holds {value}")
          for kind, scales in (("compressed", "weight_scale"), ("gptq", "scales"), ("awq", "scales"))
          for value in (math.nan, math.inf, -math.inf)),
        *((kind, order, at(value), f"{order} names group {value}, there are 4")
          for kind, order in (("compressed", "weight_g_idx"), ("gptq", "g_idx"))
          for value in (4, -1, -(1 << 31), (1 << 31) - 1)),
        ("gptq", "g_idx", lambda good: good.long() + (1 << 62), "names group 46116860184273879"),
        ("gptq", "g_idx", lambda good: good.float(), "is F32, expected I32 or I64"),
        ("compressed", "weight_g_idx", cut, r"weight_g_idx has shape \[127\]"),
        ("compressed", "weight_packed", cut, r"weight_packed has shape \[127, 16\]"),
        ("compressed", "weight_packed", flat, r"weight_packed has shape \[2048\]"),
        ("compressed", "weight_packed", lambda good: good.short(), "is I16, expected I32"),
        ("compressed", "weight_scale", cut, r"weight_scale has shape \[127, 4\]"),
        ("compressed", "weight_zero_point", cut, r"weight_zero_point has shape \[15, 4\]"),
        ("compressed", "weight_shape", at(1 << 62), "weight_shape says 128 x 4611686018427387904"),
        ("compressed", "weight_shape", at(-1), "weight_shape says 128 x -1"),
        ("gptq", "qweight", cut, r"qweight has shape \[15, 128\]"),
        ("gptq", "qzeros", flat, r"qzeros has shape \[64\]"),
        ("gptq", "scales", cut, r"scales has shape \[3, 128\]"),
        ("awq", "qweight", flat, r"qweight has shape \[2048\]"),
        ("awq", "qzeros", cut, r"qzeros has shape \[3, 16\]"),
        ("awq", "scales", lambda good: good.double(), "is F64, expected BF16 or F16"),
        ("fp8", "weight", at(math.nan), r"o_proj\.weight holds nan"),
        ("fp8", "weight", at(math.copysign(math.nan, -1)), "nan, expected finite weights"),
        ("fp8", "weight_scale_inv", at(math.inf), "weight_scale_inv holds inf"),
        ("fp8", "weight_scale_inv", cut, r"weight_scale_inv has shape \[1, 2\]"),
        ("mxfp4", "scales", lambda good: good.fill_(255), "down_proj_scales holds nan"),
        ("mxfp4", "scales", lambda good: good.fill_(253), r"down_proj_scales holds 8\.50706e\+37"),
        *((kind, scales, large, rf"{scales} holds {BIG}")
          for kind, scales in (("compressed", "weight_scale"), ("gptq", "scales"), ("awq", "scales"),
                               ("fp8", "weight_scale_inv"))),
        ("mxfp4", "scales", cut, r"down_proj_scales has shape"),
        ("mxfp4", "blocks", flat, r"down_proj_blocks has shape"),
    )
}  # fmt: skip
REMEDIES = ("fetch", "convert", "use another checkpoint", "choose the unquantized model")


@pytest.mark.parametrize(("kind", "part", "spoil", "said"), SPOILT.values(), ids=SPOILT)
def test_tensor_that_attacks_is_refused_with_its_value(
    models: Callable[[str], Path], tmp_path: Path, kind: str, part: str, spoil: Spoil, said: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(models(kind), model)
    read(model)
    tensors = load_file(model / "model.safetensors")
    name = f"{EXPERTS}_{part}" if kind == "mxfp4" else f"{NAME}.{part}"
    tensors[name] = spoil(tensors[name].clone())
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=said) as refused:
        read(model)
    assert any(remedy in str(refused.value) for remedy in REMEDIES)


@pytest.mark.parametrize("kind", UNPACK)
def test_scale_of_a_gguf_file_that_is_no_number_is_refused(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 8}
    make_llama(tmp_path / "plain", seed=3, requests=1, output_tokens=1, **(SIZES | sizes))
    path = tmp_path / "model.gguf"
    write_model(tmp_path / "plain", path, lambda _: kind)
    config = load_config(path)
    place = open_gguf(path).tensors["blk.0.attn_output.weight"]
    raw = bytearray(path.read_bytes())
    scale = place.start + {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind, 0)  # of the first block, ggml-common.h
    bad = b"\xff" if kind == "MXFP4" else b"\x00\x7e"
    raw[scale : scale + len(bad)] = bad
    path.write_bytes(raw)
    matrix = Matrix(NAME, 256, 256, range(256), range(256))
    said = r"o_proj\.weight holds nan, expected finite weights; fetch"
    with pytest.raises(ModelError, match=said):
        list(method_of("none", config.stored).read(GgufWeights(config, path), matrix, torch.float32))
    with pytest.raises(ModelError, match=said):  # unpacked, as embedding and head in bfloat16
        GgufWeights(config, path).read(f"{NAME}.weight", (256, 256), 0, 256)


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.0.attn_q.bias", "blk.0.ffn_up_exps.bias"])
def test_vector_of_a_gguf_file_in_a_packed_type_is_refused(tmp_path: Path, name: str) -> None:
    make_llama(tmp_path / "plain", seed=3, requests=1, output_tokens=1, **(SIZES | GPT_OSS))
    path = tmp_path / "model.gguf"
    write_model(tmp_path / "plain", path, lambda _: "Q4_0")
    raw = bytearray(path.read_bytes())
    dimensions = raw.index(name.encode()) + len(name)
    type_ = dimensions + 4 + 8 * raw[dimensions]
    assert raw[type_] == 0  # F32
    raw[type_] = 2  # Q4_0
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=f"tensor {re.escape(name)} is Q4_0, expected .*; choose another file"):
        make_engine(path, kernels="reference", block_size=16)


def test_header_with_a_tensor_of_many_dimensions_is_refused(models: Callable[[str], Path], tmp_path: Path) -> None:
    rewritten(models("gptq"), tmp_path / "model", lambda entries: entries[f"{NAME}.qweight"].update(shape=[2] * 9))
    with pytest.raises(ModelError, match="a tensor of 9 dimensions, at most 8"):
        read(tmp_path / "model")


HOSTILE: tuple[Any, ...] = (
    0, -1, 1, 3, 1 << 31, 1 << 32, 1 << 63, 10**30, 1.5, "x", None, True, [], {}, [1 << 62, 1 << 62], [0, 128],
)  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "fp8", "mxfp4"])
def test_spoilt_header_is_refused_or_changes_nothing(models: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    rng, refused, good = random.Random(kind), 0, read(models(kind))
    wanted = EXPERTS if kind == "mxfp4" else NAME

    def spoil(entries: dict[str, Any]) -> None:
        entry = entries[rng.choice([name for name in entries if name.startswith(wanted)])]
        field = rng.choice(["dtype", "shape", "data_offsets"])
        if field == "dtype":
            entry[field] = rng.choice(["I64", "F8_E5M2", "U8", "F64", "F4", "", *HOSTILE])  # none of which has the size
        elif rng.random() < 0.3:
            entry[field] = rng.choice(HOSTILE)
        else:
            entry[field][rng.randrange(len(entry[field]))] = rng.choice(HOSTILE)

    for number in range(60):
        model = tmp_path / str(number)
        rewritten(models(kind), model, spoil)
        try:
            found = read(model)
        except ModelError:
            refused += 1
        else:
            torch.testing.assert_close(found, good, rtol=0, atol=0)
        shutil.rmtree(model)
    assert refused > 40


def rewritten(good: Path, model: Path, spoil: Callable[[dict[str, Any]], object]) -> None:
    """Copy a model with another header of its weights."""
    shutil.copytree(good, model)
    raw = (model / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + size])
    spoil(entries)
    header = json.dumps(entries).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
