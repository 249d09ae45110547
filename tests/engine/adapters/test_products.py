"""Rows with an adapter get the tokens of transformers with it, beside others; rows of the base keep their bits."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from protos import worker_pb2
from services.worker.engine import Engine
from services.worker.parallel.state import ParallelState
from shared.errors import ModelError, ProtocolError
from shared.models.adapters import STORE, WEIGHTS, read_file
from tests.engine.driver import Driver, make_engine
from tests.support.checkpoints.adapters import Lora, make_lora, merged, store, unmerged
from tests.support.checkpoints.models import MIN_GAP, Reference, make_llama

SEED = 20261126
NEW = 16
MODEL = {"requests": 4, "output_tokens": NEW, "seed": SEED}
FAMILIES = ["llama", "qwen2", "gpt2", "neox", "phi3", "opt", "mixtral", "qwen2_moe", "gemma2"]
ATTENTION = {"mixtral": ("q_proj", "o_proj"), "qwen2_moe": ("q_proj", "o_proj", "shared_expert.up_proj")}


def adapter(number: int, lora: Lora) -> worker_pb2.Adapter:
    return worker_pb2.Adapter(number=number, digest=lora.digest)


def tokens_of(reference: Reference, lora: Lora | None, prompt: list[int]) -> list[int]:
    """Greedy, unmerged and merged; the gap between the two best logits is asserted."""
    if lora is None:
        return reference.run([prompt], NEW)[0][0]
    with unmerged(reference.model, lora):
        (tokens,), (gap,) = reference.run([prompt], NEW)
    assert gap > MIN_GAP, "choose another seed"
    with merged(reference.model, lora):
        assert reference.run([prompt], NEW)[0] == [tokens]
    return tokens


def loras_of(reference: Reference, folder: Path, targets: Any = ()) -> list[Lora]:
    """Three adapters, of other ranks and scales, that change the tokens."""
    made = [
        make_lora(folder / "a", reference.model, SEED, rank=3, targets=targets),
        make_lora(folder / "b", reference.model, SEED + 1, rank=16, targets=targets, use_rslora=True, lora_alpha=6),
        make_lora(folder / "c", reference.model, SEED + 2, rank=1, targets=targets),
    ]
    for lora in made:
        store(lora, folder)
    return made


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_mixed_batch_has_the_tokens_of_each_adapter(kind: str, kernels: str, tmp_path: Path) -> None:
    reference = make_llama(tmp_path / "model", kind=kind, requests=4, output_tokens=NEW, seed=SEED)
    loras: list[Lora | None] = [None, *loras_of(reference, tmp_path, ATTENTION.get(kind, ()))]
    engine = make_engine(tmp_path / "model", kernels=kernels, adapter_dir=tmp_path, block_size=16)
    driver = Driver(engine)
    for slot, prompt in enumerate(reference.prompts):
        driver.enter(slot, prompt, adapter=slot)
    named = [adapter(number, lora) for number, lora in enumerate(loras) if lora is not None]
    result = driver.step({slot: 3 for slot in range(4)}, adapters=named)
    assert list(memoryview(result.adapter_acks).cast("i")) == [1, 2, 3]
    while min(map(len, driver.outputs.values())) < NEW:
        driver.step({slot: 7 for slot in range(4) if len(driver.outputs[slot]) < NEW})
    expected = [tokens_of(reference, lora, prompt) for lora, prompt in zip(loras, reference.prompts, strict=True)]
    assert list(driver.outputs.values()) == expected
    assert sum(a != b for a, b in zip(expected, reference.outputs, strict=True)) >= 2, "the adapters change too little"


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantize": "int8"}, {"quantize": "int4"}])
def test_rows_of_the_base_keep_their_bits_beside_adapters(
    reference: Reference, settings: dict[str, Any], tmp_path: Path
) -> None:
    """KV of each block, to the bit, and log-probabilities; rows with an adapter differ."""
    (lora, *_) = loras_of(reference, tmp_path)
    engine = make_engine(reference.path, kernels="cpu", adapter_dir=tmp_path, block_size=16, **settings)
    prompt = reference.prompts[0]

    def run(adapters: list[int]) -> tuple[list[torch.Tensor], Driver]:
        engine.reset()
        driver = Driver(engine)
        for slot, number in enumerate(adapters):
            driver.enter(slot, prompt, adapter=number, sampling=worker_pb2.Sampling(logprobs=3))
        named = [adapter(1, lora)] if any(adapters) else []
        for _ in range(6):
            driver.step({slot: 9 for slot in range(len(adapters))}, adapters=named)
            named = []
        return [engine.read_block(int(driver.blocks(slot)[0])) for slot in range(len(adapters))], driver

    (alone,), before = run([0])
    mixed, after = run([1, 0, 1])
    assert torch.equal(mixed[1], alone)
    assert after.logprobs[1] == before.logprobs[0]
    assert torch.equal(mixed[0], mixed[2]) and not torch.equal(mixed[0], alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapted_rows_keep_their_bits_in_any_batch(reference: Reference, dtype: str, tmp_path: Path) -> None:
    loras = loras_of(reference, tmp_path)
    found = []
    for adapters, threads in (([2], 1), ([1, 0, 2, 2, 3, 2], 1), ([1, 0, 2, 2, 3, 2], 3)):
        engine = make_engine(
            reference.path, kernels="cpu", adapter_dir=tmp_path, block_size=16, threads=threads, dtype=dtype
        )
        driver, last = Driver(engine), len(adapters) - 1
        for slot, number in enumerate(adapters):
            driver.enter(slot, reference.prompts[0], adapter=number)
        named = [adapter(number + 1, lora) for number, lora in enumerate(loras)]
        driver.step({slot: 4096 for slot in range(len(adapters))}, adapters=named)
        found.append(engine.read_block(int(driver.blocks(last)[0])))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_numerics_name_the_type_that_up_is_rounded_to(reference: Reference, tmp_path: Path) -> None:
    for dtype, more in (("float32", ""), ("bfloat16", " adapters bfloat16")):
        settings: dict[str, Any] = {"kernels": "cpu", "block_size": 16, "dtype": dtype}
        plain = make_engine(reference.path, **settings)
        adapted = make_engine(reference.path, **settings, adapter_dir=tmp_path)
        assert adapted.numerics == plain.numerics + more


def failing(engine: Engine, named: worker_pb2.Adapter, number: int = 1) -> str:
    driver = Driver(engine)
    driver.enter(0, [1, 2, 3], adapter=number)
    result = driver.step({0: 3}, adapters=[named])
    assert not result.slots
    (error,) = result.errors
    assert error.code == "adapter"
    return str(error.message)


def test_sequence_of_an_adapter_that_cannot_be_loaded_fails_alone(reference: Reference, tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other", requests=1, hidden_size=32, seed=SEED)
    foreign = make_lora(tmp_path / "foreign", other.model, SEED)
    store(foreign, tmp_path)
    engine = make_engine(reference.path, kernels="cpu", adapter_dir=tmp_path, block_size=16)
    assert "it is of another base" in failing(engine, adapter(1, foreign))
    engine.reset()
    missing = worker_pb2.Adapter(number=1, digest=bytes(32))
    assert failing(engine, missing).startswith("adapter_config.json: cannot be read")
    engine.reset()
    assert failing(engine, adapter(1, foreign), number=2) == "adapter 2 was not named"


def test_files_that_changed_since_their_registration_are_refused(reference: Reference, tmp_path: Path) -> None:
    lora = make_lora(tmp_path / "a", reference.model, SEED)
    store(lora, tmp_path)
    config = tmp_path / ".store" / lora.digest.hex() / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    engine = make_engine(reference.path, kernels="cpu", adapter_dir=tmp_path, block_size=16)
    assert "not those that were registered" in failing(engine, adapter(1, lora))


def test_file_of_the_store_that_is_no_regular_file_is_refused(reference: Reference, tmp_path: Path) -> None:
    lora = make_lora(tmp_path / "a", reference.model, SEED)
    store(lora, tmp_path)
    stored = tmp_path / STORE / lora.digest.hex() / WEIGHTS
    stored.unlink()
    engine = make_engine(reference.path, kernels="cpu", adapter_dir=tmp_path, block_size=16)
    os.mkfifo(stored)  # to open it would wait for a writer
    assert failing(engine, adapter(1, lora)) == f"{WEIGHTS}: not a regular file; save the adapter again"
    stored.unlink()
    stored.symlink_to(lora.folder / WEIGHTS)
    engine.reset()
    assert failing(engine, adapter(1, lora)).startswith(f"{WEIGHTS}: cannot be read")


def test_reading_a_file_takes_its_size_not_its_bound(tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS
    path.write_bytes(b"0123456789")
    tracemalloc.start()
    try:
        assert read_file(path, 4 << 30) == b"0123456789"
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20
    assert read_file(path, 10) == b"0123456789"
    with pytest.raises(ModelError, match="10 bytes, at most 9 are served; use a smaller adapter"):
        read_file(path, 9)


@pytest.mark.parametrize("problem", [MemoryError(), RuntimeError("not enough memory"), OSError("gone")])
def test_adapter_for_which_there_is_no_memory_fails_alone(
    reference: Reference, tmp_path: Path, problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lora, *_) = loras_of(reference, tmp_path)
    engine = make_engine(reference.path, kernels="cpu", adapter_dir=tmp_path, block_size=16, max_loras=1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.adapter_rows.matrices[-1], "load", Mock(side_effect=problem))
        assert "the adapter cannot be loaded" in failing(engine, adapter(1, lora))
    assert not any(matrix.pairs.by_number for matrix in engine.adapter_rows.matrices)
    engine.reset()
    driver = Driver(engine)
    driver.enter(0, reference.prompts[1], adapter=1)
    driver.step({0: 4096}, adapters=[adapter(1, lora)])
    assert driver.run(0, NEW) == tokens_of(reference, lora, reference.prompts[1])


@pytest.mark.parametrize(
    ("named", "why"),
    [
        (worker_pb2.Adapter(number=3, digest=bytes(32)), "adapters: number 3 is outside 1..2"),
        (worker_pb2.Adapter(number=0, digest=bytes(32)), "adapters: number 0 is outside 1..2"),
        (worker_pb2.Adapter(number=1, digest=b"short"), "adapters: a digest of 5 bytes"),
    ],
)
def test_worker_refuses_steps_with_wrong_adapters(
    reference: Reference, named: worker_pb2.Adapter, why: str, tmp_path: Path
) -> None:
    engine = make_engine(reference.path, kernels="cpu", adapter_dir=tmp_path, block_size=16, max_loras=2)
    with pytest.raises(ProtocolError, match=why):
        engine.execute(worker_pb2.Step(epoch=1, id=1, adapters=[named]))


def test_worker_holds_no_more_adapters_than_it_says(reference: Reference, tmp_path: Path) -> None:
    """A place that is taken again gives the new adapter's tokens; a Run that names an old one finds it packed."""
    loras = loras_of(reference, tmp_path)
    engine = make_engine(reference.path, kernels="cpu", adapter_dir=tmp_path, block_size=16, max_loras=2)
    for lora, number in zip([*loras, loras[1], loras[0]], (1, 2, 1, 2, 1), strict=True):
        engine.reset()
        driver = Driver(engine)
        driver.enter(0, reference.prompts[1], adapter=number)
        driver.step({0: 4096}, adapters=[adapter(number, lora)])
        assert driver.run(0, NEW) == tokens_of(reference, lora, reference.prompts[1])
    assert max(len(matrix.pairs.by_number) for matrix in engine.adapter_rows.matrices) == 2


def test_ranks_compare_their_settings_of_adapters(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(ParallelState, "demand_same", lambda self, text: texts.append(text))
    (tmp_path / "elsewhere").mkdir()
    for settings in (
        {"adapter_dir": tmp_path},
        {"adapter_dir": tmp_path / "elsewhere"},  # of another host
        {},
        {"adapter_dir": tmp_path, "max_loras": 2},
        {"adapter_dir": tmp_path, "max_lora_rank": 16},
    ):
        make_engine(reference.path, kernels="cpu", block_size=16, **settings)
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4
