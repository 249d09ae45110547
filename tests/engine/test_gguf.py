"""GGUF files against the weights that they mean: the same bits as they are read, and transformers' tokens.

The oracle of weights is the `gguf` package's numpy, that of tokens is transformers on a directory with these weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from safetensors.torch import load_file
from torch import Tensor

from kernels.ops import Groups
from services.worker.models.config import load_config
from services.worker.models.gguf import UNPACK, GgufWeights
from services.worker.quantization import method_of
from services.worker.quantization.base import Matrix
from shared.gguf.reader import BLOCK_TYPES
from tests.engine.driver import make_engine
from tests.support import in_process
from tests.support.gguf import write_model
from tests.support.models import Reference, make_llama

TOKENS = 64
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8}
HELD = {
    "Q4_0": "int4-32", "Q4_1": "int4-32-mins", "Q5_0": "int8-32", "Q5_1": "int8-32-mins", "Q8_0": "int8-32",
    "Q4_K": "int4-32-mins", "Q5_K": "int8-32-mins", "Q6_K": "int8-16",
}  # fmt: skip
KERNELS = ["reference"] if shutil.which("g++") is None else ["reference", "cpu"]


def q4_k_m(name: str) -> str:
    """The types of a file of the kind Q4_K_M."""
    return "Q6_K" if name in ("blk.0.attn_v.weight", "blk.0.ffn_down.weight", "output.weight") else "Q4_K"


def tokens(model: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    engine = make_engine(model, **settings)
    made = [in_process.request(f"r{at}", prompt, TOKENS) for at, prompt in enumerate(prompts)]
    recorded = in_process.run(engine, made, "orcinus")[0]
    return [recorded.tokens[f"r{at}", 0] for at in range(len(prompts))]


def plain(pieces: list[Tensor | Groups]) -> Tensor:
    return torch.cat([piece.plain() if isinstance(piece, Groups) else piece for piece in pieces])


@pytest.mark.parametrize("kind", UNPACK)
def test_blocks_are_the_numbers_that_gguf_reads(kind: str) -> None:
    type_ = next(one for one in BLOCK_TYPES.values() if one.name == kind)
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (64, 5 * type_.size_bytes), dtype=np.uint8)
    meant = dequantize(raw, GGMLQuantizationType[kind])
    found = UNPACK[kind](torch.from_numpy(raw).view(64, 5, type_.size_bytes))
    assert found.weight_format == HELD[kind]
    assert np.array_equal(found.plain().numpy(), meant, equal_nan=True)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *UNPACK])
def test_weights_are_read_to_the_bit_and_give_their_tokens(tmp_path: Path, kind: str) -> None:
    make_llama(tmp_path / "plain", seed=5, requests=1, output_tokens=1, **SIZES)
    model, meant = tmp_path / "x.gguf", tmp_path / "meant"
    write_model(tmp_path / "plain", model, lambda _: kind, meant)
    config = load_config(model)
    source, method = GgufWeights(config, model), method_of("none", config.stored)
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
            if kind in HELD and not columns.start % 32:
                assert {piece.weight_format for piece in pieces if isinstance(piece, Groups)} == {HELD[kind]}
            found = weight[rows.start : rows.stop, columns.start : columns.stop]
            assert torch.equal(plain(pieces), found), name
    assert not source.unread()
    cases = Reference(meant).cases(3, (4, 40), TOKENS, seed=3)
    for name in KERNELS:
        answers = tokens(model, [case.prompt for case in cases], kernels=name, block_size=16)
        assert answers == [case.tokens for case in cases], name
