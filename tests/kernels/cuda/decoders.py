"""Tiny decoders, their batches and what the reference answers for them: for tests of the CUDA backend as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cuda.backend import CudaOps
from kernels.cuda.device import Device
from kernels.ops import AnyOps, Batch, CacheShape, Int32
from kernels.reference import ReferenceOps
from services.worker.checkpoint.source import open_weights
from services.worker.models.config import load_config
from services.worker.models.decoder import Decoder
from tests.kernels.sequences import batch_of
from tests.support.checkpoints.models import VOCAB, make_llama

BLOCK = 16
_LLAMA = {"max_position_embeddings": 1024, "hidden_size": 128, "intermediate_size": 160, "head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen3": {"kind": "qwen3", **_LLAMA},
    "mistral-window": {"kind": "mistral", **_LLAMA, "sliding_window": 21},
    "mixtral": {"kind": "mixtral", **_LLAMA},
    "gpt2": {"kind": "gpt2", "n_embd": 128, "n_head": 2},
    "bloom": {"kind": "bloom", "hidden_size": 128, "n_head": 2},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model directories by family, made when they are asked for; weights in bfloat16."""
    made: dict[str, Path] = {}

    def path(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            fields = {"dtype": "bfloat16", **FAMILIES[family]}
            make_llama(made[family], seed=3, requests=1, prompt_tokens=(2, 2), output_tokens=1, **fields)
        return made[family]

    return path


def new_decoder(path: Path, ops: AnyOps, dtype: torch.dtype) -> Decoder:
    return Decoder(load_config(path), open_weights(path, "auto"), ops, dtype, 1024)


def shape_of(decoder: Decoder, blocks: int) -> CacheShape:
    config = decoder.config
    return CacheShape(blocks, 0, config.layers, config.kv_heads, BLOCK, config.head_dim, decoder.dtype)


def tables_of(sequences: int, blocks: int) -> Int32:
    """Shuffled blocks, as many for each."""
    order = np.random.default_rng(9).permutation(blocks).astype(np.int32)
    return order[: blocks // sequences * sequences].reshape(sequences, -1)


def reference_logits(path: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """[len(tokens), VOCAB]"""
    ops = ReferenceOps(torch.device("cpu"))
    decoder = new_decoder(path, ops, dtype)
    cache = ops.new_cache(shape_of(decoder, -(-len(tokens) // BLOCK)))
    batch = batch_of([tokens], [0], np.arange(cache.shape.blocks, dtype=np.int32)[None])
    batch = replace(batch, sample_rows=np.arange(len(tokens), dtype=np.int32))
    return decoder.forward(ops.prepare(batch, cache), cache)


class World:
    """A decoder with a cache, three sequences with computed prompts, and a batch in which they decode."""

    def __init__(self, path: Path, device: Device, compiles: bool, sequences: int = 3, tokens: int = 0) -> None:
        """tokens: of the first prompt, if not few."""
        self.ops = CudaOps(device)
        self.decoder = new_decoder(path, self.ops, torch.bfloat16)
        blocks = 20 + tokens // BLOCK
        self.cache = self.ops.new_cache(shape_of(self.decoder, blocks + 4))
        self.cache.pool.zero_()  # so that NaN from unwritten memory shows
        self.tables = tables_of(sequences, blocks)
        self.forward: Any = self.run
        if compiles:
            self.forward = self.ops.compile(self.run, self.cache, 64, 8)
        rng = np.random.default_rng(4)
        self.texts = [rng.integers(0, VOCAB, 3 + 4 * s).tolist() for s in range(sequences)]
        self.texts[0] += rng.integers(0, VOCAB, tokens).tolist()
        self.ends = [len(text) for text in self.texts]
        self.logits(batch_of(self.texts, [0] * sequences, self.tables))

    def run(self, prepared: Any) -> Tensor:
        return self.decoder.forward(prepared, self.cache)

    def decodes(self, sequences: int) -> Batch:
        tokens = [[7 * s + 1] for s in range(sequences)]
        return batch_of(tokens, self.ends[:sequences], self.tables[:sequences])

    def logits(self, batch: Batch) -> Tensor:
        found = self.forward(self.ops.prepare(batch, self.cache))
        self.ops.mark().wait()
        return found.clone().cpu()

    def pool(self) -> Tensor:
        return self.cache.pool.view(torch.int16).clone().cpu()
