"""Which kernels and which type a worker takes."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import matrices
from kernels.cpu.backend import CpuOps, Packed
from kernels.cpu.library import load
from kernels.cpu.matrices import MatrixKernels, TorchWeight
from kernels.reference.backend import ReferenceOps
from services.worker import backend
from services.worker.engine import Engine
from services.worker.models.config import DecoderConfig, load_config
from shared.errors import ConfigurationError
from shared.settings import DEMO_MODEL, WorkerSettings
from tests.engine.driver import Driver, make_engine
from tests.support.models import make_llama

AMX = frozenset({"avx512bw", "avx512_bf16", "amx_tile", "amx_bf16"})


@pytest.fixture
def compiled() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    load()


def config_of(dtype: torch.dtype, hidden_size: int = 4096) -> DecoderConfig:
    return dataclasses.replace(
        load_config(DEMO_MODEL), checkpoint_dtype=str(dtype).removeprefix("torch."), hidden_size=hidden_size
    )


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    flags: frozenset[str],
    dtype: torch.dtype = torch.bfloat16,
    hidden_size: int = 4096,
    alone: bool = True,
    **given: Any,
) -> tuple[str, torch.dtype]:
    """The path and the type on a CPU with these flags."""
    monkeypatch.setattr(backend, "cpu_flags", lambda: flags)
    ops, found = backend.choose(WorkerSettings(**given), config_of(dtype, hidden_size), alone)
    assert isinstance(ops, CpuOps)
    return ops.path, found


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("flags", [frozenset[str](), frozenset({"avx2", "fma"}), AMX - {"amx_tile", "amx_bf16"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_matrix_kernels_are_taken_without_amx(
    flags: frozenset[str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(monkeypatch, flags, dtype) == ("own", dtype)


@pytest.mark.usefixtures("compiled")
def test_torchs_matrices_serve_wide_bfloat16_models_with_amx(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen(monkeypatch, AMX) == ("torch", torch.bfloat16)
    assert "bfloat16 by torch matrix kernels (AMX: 1,024" in caplog.text
    assert chosen(monkeypatch, AMX, torch.float32) == ("own", torch.float32)
    assert chosen(monkeypatch, AMX, hidden_size=512) == ("own", torch.bfloat16)
    assert chosen(monkeypatch, AMX, alone=False) == ("own", torch.bfloat16)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("given", [{"deterministic": True}, {"quantize": "int8"}])
def test_our_matrix_kernels_are_taken_for_settings_that_need_them(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen(monkeypatch, AMX, **given) == ("own", torch.bfloat16)
    assert ("int8 weights" in caplog.text) == ("quantize" in given)


@pytest.mark.usefixtures("compiled")
def test_a_type_that_torch_cannot_pack_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "torch_multiplies", lambda dtype: False)
    with pytest.raises(ValueError, match="torch has no packed matrices of it on this CPU"):
        CpuOps(load(), 1, "torch").pack_linear([torch.ones(2, 2)], 2, 2, None)


@pytest.mark.parametrize("given", [{"deterministic": True}, {"quantize": "int8"}, {"kernels": "cpu"}])
def test_block_size_the_cpu_kernels_cannot_use_is_named(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigurationError, match=r"--(deterministic|quantize int8|kernels cpu).*--block-size 8"):
        backend.choose(WorkerSettings(block_size=8, **given), config_of(torch.float32))
    assert "reference" not in caplog.text


def test_the_reference_by_name_and_int8_exclude_each_other() -> None:
    settings = WorkerSettings(kernels="reference", quantize="int8")
    with pytest.raises(ConfigurationError, match="--quantize int8 needs the cpu kernels; give --kernels auto or cpu"):
        backend.choose(settings, config_of(torch.float32))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("tied", [False, True])
def test_torchs_matrices_give_transformers_tokens_and_share_tied_weights(
    tied: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backend, "matrix_kernels", lambda *_: MatrixKernels("torch", "for this test"))
    reference = make_llama(tmp_path / "tiny", seed=7, requests=1, output_tokens=16, tie_word_embeddings=tied)
    engine = make_engine(reference.path, block_size=16)
    decoder = engine.decoder
    assert isinstance(decoder.layers[0].attention.qkv_proj.weight, TorchWeight)
    assert isinstance(decoder.lm_head, Packed if tied else TorchWeight)
    assert (decoder.lm_head is decoder.embed_tokens) == tied
    driver = Driver(engine)
    driver.enter(0, reference.prompts[0])
    assert driver.run(0, 16, chunk=5) == reference.outputs[0]


@pytest.mark.usefixtures("compiled")
def test_experts_are_multiplied_by_our_kernels_where_torchs_would_be_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backend, "matrix_kernels", lambda *_: MatrixKernels("torch", "for this test"))
    reference = make_llama(tmp_path / "tiny", seed=7, requests=1, output_tokens=16, kind="mixtral")
    engine = make_engine(reference.path, block_size=16)
    assert isinstance(engine.decoder.layers[0].attention.qkv_proj.weight, Packed)
    driver = Driver(engine)
    driver.enter(0, reference.prompts[0])
    assert driver.run(0, 16, chunk=5) == reference.outputs[0]


@pytest.mark.parametrize("most", [1, 33, 1000, 3000])
def test_sizes_that_are_warmed_up_are_no_larger_than_step(compiled: None, most: int) -> None:
    for ops in (ReferenceOps(torch.device("cpu")), CpuOps(load(), 1, "torch")):
        sizes = ops.batch_sizes(torch.bfloat16, most)
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("tokens", [33, 1000])
def test_a_bfloat16_worker_starts_whatever_its_step_holds(tokens: int) -> None:
    settings = WorkerSettings(kernels="reference", dtype="bfloat16", max_step_tokens=tokens, max_seqs=4, threads=1)
    Engine(settings).warm_up()
