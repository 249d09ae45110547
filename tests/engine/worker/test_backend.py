"""Which kernels and which type a worker takes: what a stopwatch may decide, and what it may not."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import choice
from kernels.cpu.backend import CpuOps, Packed
from kernels.cpu.choice import SAMPLE_BYTES, Candidate, Timing, clearly_faster, sample_of
from kernels.cpu.library import load
from kernels.cpu.torch_linear import TorchWeight
from kernels.reference.backend import ReferenceOps
from services.worker import backend
from services.worker.engine import Engine
from services.worker.models.config import DecoderConfig, load_config
from shared.errors import ConfigurationError
from shared.settings import DEMO_MODEL, WorkerSettings
from tests.engine.driver import Driver, make_engine
from tests.support.models import make_llama

LLAMA_7B = [(3 * 4096, 4096), (4096, 4096), (2 * 11008, 4096), (4096, 11008)]


@pytest.fixture
def compiled() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    load()


def config_of(dtype: torch.dtype) -> DecoderConfig:
    return dataclasses.replace(load_config(DEMO_MODEL), checkpoint_dtype=dtype)


def timed(monkeypatch: pytest.MonkeyPatch, *passes: dict[str, float]) -> list[str]:
    """Candidates take these milliseconds in each pass; the ones that were asked for."""
    asked: list[str] = []

    def measure(candidates: list[Candidate], sample: Any) -> list[list[Timing]]:
        asked.extend(str(candidate) for candidate in candidates)
        return [[Timing(times[name], times[name]) for name in asked] for times in passes]

    monkeypatch.setattr(backend, "measure", measure)
    return asked


def chosen(settings: WorkerSettings, dtype: torch.dtype) -> tuple[str, torch.dtype]:
    ops, found = backend.choose(settings, config_of(dtype))
    assert isinstance(ops, CpuOps)
    return ops.path, found


OWN, TORCH = "bfloat16 by own kernels", "bfloat16 by torch kernels"
WIDE = "float32 by own kernels"


@pytest.mark.usefixtures("compiled")
def test_auto_is_the_checkpoints_type_however_fast_another_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = timed(monkeypatch, *[{OWN: 9.0, TORCH: 9.0, WIDE: 1.0}] * 2)
    with caplog.at_level(logging.INFO):
        assert chosen(WorkerSettings(), torch.bfloat16) == ("own", torch.bfloat16)
    assert asked == [OWN, TORCH, WIDE]
    assert "--dtype float32 takes it" in caplog.text
    assert "of the model's matrices" in caplog.text


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("second", [{OWN: 9.0, TORCH: 9.0, WIDE: 7.0}, {OWN: 1.0, TORCH: 9.0, WIDE: 9.0}])
def test_what_wins_in_one_pass_alone_is_neither_taken_nor_praised(
    second: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timed(monkeypatch, {OWN: 9.0, TORCH: 1.0, WIDE: 1.0}, second)
    with caplog.at_level(logging.INFO):
        assert chosen(WorkerSettings(), torch.bfloat16) == ("own", torch.bfloat16)
    assert "--dtype float32" not in caplog.text


@pytest.mark.usefixtures("compiled")
def test_torchs_matrices_are_taken_where_they_win_clearly_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, {OWN: 9.0, TORCH: 6.9, WIDE: 9.0}, {OWN: 4.0, TORCH: 3.0, WIDE: 9.0})
    assert chosen(WorkerSettings(), torch.bfloat16) == ("torch", torch.bfloat16)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("given", [{"deterministic": True}, {"quantize": "int8"}])
def test_what_only_our_kernels_can_do_is_not_left_to_a_measurement(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = timed(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert chosen(WorkerSettings(**given), torch.float32) == ("own", torch.float32)
    assert asked == []
    assert ("int8 weights" in caplog.text) == ("quantize" in given)


@pytest.mark.parametrize("given", [{"deterministic": True}, {"quantize": "int8"}, {"kernels": "cpu"}])
def test_blocks_of_another_size_are_named_to_those_who_need_the_cpu_kernels(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigurationError, match=r"--(deterministic|quantize int8|kernels cpu).*--block-size 8"):
        backend.choose(WorkerSettings(block_size=8, **given), config_of(torch.float32))
    assert "reference" not in caplog.text


def test_the_reference_by_name_and_int8_exclude_each_other() -> None:
    settings = WorkerSettings(kernels="reference", quantize="int8")
    with pytest.raises(ConfigurationError, match="--quantize int8 needs the cpu kernels; give --kernels auto or cpu"):
        backend.choose(settings, config_of(torch.float32))


def test_a_sample_is_small_whatever_the_models_shapes_are() -> None:
    small = [(128, 64), (64, 64)]
    assert sample_of(small, 3).shapes == (*small, *small, *small) and sample_of(small, 3).whole
    sample = sample_of(LLAMA_7B, 32)
    assert not sample.whole and SAMPLE_BYTES * 0.9 < sample.size_bytes <= SAMPLE_BYTES
    assert [inputs for _, inputs in sample.shapes] == [inputs for _, inputs in LLAMA_7B]
    assert sample_of([(1 << 24, 1 << 24)] * 4, 4096).size_bytes <= SAMPLE_BYTES


def test_candidates_take_turns_and_each_pass_keeps_the_best_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []

    def prepared(candidate: Candidate, sample: Any) -> Any:
        def run(rows: int) -> float:
            ran.append((candidate.path, rows))
            # The machine is busy during one turn of the second pass, whoever's it is.
            return 1000.0 if 24 <= len(ran) <= 26 else float(rows) * (1 + len(candidate.path))

        return run

    monkeypatch.setattr(choice, "_prepared", prepared)
    ops: Any = None
    found = choice.measure([Candidate(ops, path, torch.float32) for path in ("own", "torch")], sample_of([(8, 8)], 1))
    assert ran == [("own", 1), ("own", 32), ("torch", 1), ("torch", 32)] * (1 + choice.PASSES * choice.TURNS)
    assert found == [[Timing(4.0, 128.0), Timing(6.0, 192.0)]] * 2
    assert clearly_faster(found, 0, than=1) and not clearly_faster(found, 1, than=0)


@pytest.mark.usefixtures("compiled")
def test_both_paths_are_measured_in_both_types_with_rows_that_are_no_multiple_of_the_tile() -> None:
    candidates = [
        Candidate(CpuOps(load(), 1, path), path, dtype)
        for path in ("own", "torch")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    found = choice.measure(candidates, sample_of([(40, 24), (24, 40)], 2))
    assert [len(timings) for timings in found] == [4, 4]
    assert all(timing.one_ms > 0 and timing.many_ms > 0 for timings in found for timing in timings)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_by_torchs_matrices_gives_transformers_tokens_and_holds_a_tied_matrix_once(
    tied: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backend, "clearly_faster", lambda *_, **__: True)
    reference = make_llama(tmp_path / "tiny", seed=7, requests=1, output_tokens=16, tie_word_embeddings=tied)
    engine = make_engine(reference.path, block_size=16)
    decoder = engine._decoder
    assert isinstance(decoder.layers[0].attention.qkv_proj.weight, TorchWeight)
    assert isinstance(decoder.lm_head, Packed if tied else TorchWeight)
    assert (decoder.lm_head is decoder.embed_tokens) == tied
    driver = Driver(engine)
    driver.enter(0, reference.prompts[0])
    assert driver.run(0, 16, chunk=5) == reference.outputs[0]


@pytest.mark.parametrize("most", [1, 33, 1000, 3000])
def test_the_sizes_that_are_warmed_up_are_no_larger_than_a_step(compiled: None, most: int) -> None:
    for ops in (ReferenceOps(torch.device("cpu")), CpuOps(load(), 1, "torch")):
        sizes = ops.batch_sizes(torch.bfloat16, most)
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("tokens", [33, 1000])
def test_a_bfloat16_worker_starts_whatever_its_step_holds(tokens: int) -> None:
    settings = WorkerSettings(kernels="reference", dtype="bfloat16", max_step_tokens=tokens, max_seqs=4, threads=1)
    Engine(settings).warm_up()
