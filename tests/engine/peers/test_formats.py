"""What two workers must have in common before one takes up KV of the other: `WorkerInfo.kv_format`."""

from __future__ import annotations

from pathlib import Path

from services.worker.parallel.state import ParallelState
from tests.engine.driver import make_engine
from tests.support.checkpoints.models import Reference, make_llama

MODEL = {"seed": 11, "requests": 1, "output_tokens": 1}


def test_what_changes_the_bytes_of_a_block_changes_the_format(reference: Reference, tmp_path: Path) -> None:
    other = make_llama(tmp_path / "tuned", seed=12, requests=1, output_tokens=1)
    assert (other.path / "config.json").read_bytes() == (reference.path / "config.json").read_bytes()
    formats = [
        make_engine(model, **settings).info().kv_format
        for model, settings in (
            (reference.path, {"kernels": "cpu", "block_size": 16}),
            (other.path, {"kernels": "cpu", "block_size": 16}),
            (reference.path, {"kernels": "reference", "block_size": 16}),
            (reference.path, {"kernels": "cpu", "block_size": 32}),
            (reference.path, {"kernels": "cpu", "block_size": 16, "dtype": "bfloat16"}),
            (reference.path, {"kernels": "cpu", "block_size": 16, "quantize": "int8"}),
            (reference.path, {"kernels": "cpu", "block_size": 16, "deterministic": True}),
            (reference.path, {"kernels": "cpu", "block_size": 16, "kv_dtype": "int8"}),
            (reference.path, {"kernels": "cpu", "block_size": 16, "kv_dtype": "fp8"}),
        )
    ]
    assert len(set(formats)) == len(formats)


def test_computing_backend_is_part_of_the_format(reference: Reference) -> None:
    """Kernels that lay a block out alike, and ranks that hold a part of it."""
    engine = make_engine(reference.path, kernels="reference")
    cache, tier = engine.cache, engine._tier
    formats = [engine.info().kv_format, tier.describe(cache, "cuda", engine.model_hash)["kv_format"]]
    for parallel in (ParallelState(), ParallelState(tp=2), ParallelState(pp=2)):
        tier._parallel = parallel
        formats.append(tier.describe(cache, "reference", engine.model_hash)["kv_format"])
    assert formats[0] == formats[2] and len(set(formats)) == 4
