"""What is found in the headers of a checkpoint: which matrices are quantized, and which tensors are loaded."""

from __future__ import annotations

from pathlib import Path

from services.launcher.model_check import read_model
from shared.settings import WorkerSettings


def test_matrices_in_8_bits_are_found_in_the_headers(tmp_path: Path) -> None:
    from tests.support.checkpoints.models import make_llama  # most processes of a run need no transformers
    from tests.support.checkpoints.w8a8 import write_w8a8

    make_llama(tmp_path / "plain", requests=1, output_tokens=1)
    written = write_w8a8(tmp_path / "plain", tmp_path / "w8a8", ignore=("k_proj",))
    assert read_model(tmp_path / "w8a8").packed_bits == {f"{name}.weight": 8 for name in written}


def test_matrices_in_fp8_are_found_in_the_headers(tmp_path: Path) -> None:
    from tests.support.checkpoints.models import make_llama  # most processes of a run need no transformers
    from tests.support.checkpoints.quantized import write_fp8

    for block, bits in (((0, 0), 8.25), ((64, 32), 9), ((64, 48), 0)):
        make_llama(tmp_path / f"{block}-plain", requests=1, output_tokens=1)
        written = write_fp8(tmp_path / f"{block}-plain", tmp_path / f"{block}", "fp8", block)
        assert read_model(tmp_path / f"{block}").packed_bits == (dict.fromkeys(written, bits) if bits else {})


def test_size_of_a_model_with_images_is_that_of_its_text(tmp_path: Path) -> None:
    from tests.support.checkpoints.models import make_llama  # most processes of a run need no transformers

    whole, text = (
        make_llama(tmp_path / kind, requests=1, output_tokens=1, kind=kind).path
        for kind in ("gemma3_and_images", "gemma3")
    )
    worker = WorkerSettings(device="cpu", dtype="float32")
    assert read_model(whole).held_bytes(worker) == read_model(text).held_bytes(worker)
    assert read_model(whole).dtype == "float32" and (whole / "model.safetensors").stat().st_size > 200_000
