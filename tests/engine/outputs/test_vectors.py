"""Vectors of pooled sequences equal transformers': the last token's row behind the last norm, of length 1.

Tolerance: 1e-5 for each number in float32. On the cpu kernels the bits are equal for all chunk sizes, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protos import worker_pb2
from services.scheduler.core.types import NewRequest
from services.worker.engine import Engine
from shared.wire.columns import pack, unpack_float
from tests.engine.driver import Driver, make_engine, requests_of
from tests.engine.ranks import Processes
from tests.support import in_process
from tests.support.checkpoints.models import Reference, one_thread
from tests.support.in_process import Recorded

TOLERANCE = 1e-5
SMALL: dict[str, Any] = {
    "max_seqs": 8, "max_step_tokens": 256, "max_input_tokens": 64, "max_output_tokens": 16, "block_size": 16,
    "kv_blocks": 40,
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(reference: Reference) -> np.ndarray:
    """[prompts, hidden]: last-token pooling, normalised."""
    model: Any = reference.model
    with torch.inference_mode(), one_thread():
        rows = [model.model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in reference.prompts]
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1).numpy()


def pooling(reference: Reference, every: int = 1) -> list[NewRequest]:
    """Each `every`-th is pooled, the others generate."""
    made = []
    for index, prompt in enumerate(reference.prompts):
        pooled = index % every == 0
        one = in_process.request(f"r{index}", prompt, 1 if pooled else 6, logprobs=0 if pooled else 2)
        one.payload.pooling = int(pooled)
        made.append(one)
    return made


def vectors(recorded: Recorded, count: int, every: int = 1) -> np.ndarray:
    assert not recorded.errors
    return np.stack([unpack_float(recorded.logprobs[f"r{index}", 0]) for index in range(0, count, every)])


def small(model: Path, kernels: str, **settings: Any) -> Engine:
    return make_engine(model, kernels=kernels, **(SMALL | settings))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_chunk_size_gives_transformers_vectors(reference: Reference, expected: np.ndarray, backend: str) -> None:
    engine, found = small(reference.path, backend), []
    for chunk in (1, 7, 64, 0):
        recorded, core = in_process.run(engine, pooling(reference), "orcinus", step_tokens=chunk, prefix_cache=True)
        told = vectors(recorded, len(reference.prompts))
        np.testing.assert_allclose(told, expected, atol=TOLERANCE)
        found.append(told.tobytes())
        assert core.stats()["prefix_hit_tokens"] > 0
    if backend == "cpu":
        assert len(set(found)) == 1


def test_pooled_sequences_share_steps_with_others(reference: Reference, expected: np.ndarray) -> None:
    engine = small(reference.path, "cpu")
    plain = requests_of(reference.prompts, 6, logprobs=2)
    alone, _ = in_process.run(engine, plain, "orcinus")
    recorded, _ = in_process.run(engine, pooling(reference, 2), "orcinus", lookahead=1, step_tokens=24)
    np.testing.assert_allclose(vectors(recorded, len(reference.prompts), 2), expected[::2], atol=TOLERANCE)
    for index in range(1, len(reference.prompts), 2):
        assert recorded.tokens[f"r{index}", 0] == alone.tokens[f"r{index}", 0]
        assert recorded.logprobs[f"r{index}", 0] == alone.logprobs[f"r{index}", 0]


def scored(reference: Reference) -> tuple[list[NewRequest], np.ndarray]:
    """Return requests, each third one for a score, a vector or tokens, and the scores by transformers' logits."""
    made, expected = [], []
    for index, prompt in enumerate(reference.prompts):
        kind, labels = (2, 1, 0)[index % 3], [7 + index, 90 - index]
        one = in_process.request(f"r{index}", prompt, 1 if kind else 6)
        one.payload.pooling, one.payload.label_ids = kind, pack(labels) if kind == 2 else b""
        made.append(one)
        logits = reference.logits(prompt)[-1]
        expected.append(float(logits[labels[0]] - logits[labels[1]]))
    return made, np.array(expected[::3])


def check_scores(recorded: Recorded, reference: Reference, expected: np.ndarray, vectors_of: np.ndarray) -> None:
    assert not recorded.errors
    count = len(reference.prompts)
    found = [unpack_float(recorded.logprobs[f"r{index}", 0]) for index in range(0, count, 3)]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4)  # logits spread over about 20
    beside = [unpack_float(recorded.logprobs[f"r{index}", 0]) for index in range(1, count, 3)]
    np.testing.assert_allclose(np.stack(beside), vectors_of[1::3], atol=TOLERANCE)
    for index in range(2, count, 3):
        assert [recorded.tokens[f"r{index}", 0]] == reference.run([reference.prompts[index]], 6)[0]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_scores_are_transformers_logits_beside_vectors_and_tokens(
    reference: Reference, expected: np.ndarray, backend: str
) -> None:
    engine = small(reference.path, backend)
    for chunk in (7, 0):
        made, scores = scored(reference)
        recorded, _ = in_process.run(engine, made, "orcinus", lookahead=1, step_tokens=chunk, prefix_cache=True)
        check_scores(recorded, reference, scores, expected)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_several_ranks_give_transformers_scores_and_vectors(
    processes: Processes, reference: Reference, expected: np.ndarray, tp: int, pp: int
) -> None:
    made, scores = scored(reference)
    with processes.replica(tp, pp, reference.path, kernels="cpu", **SMALL) as replica:
        recorded, _ = in_process.run(replica, made, "orcinus", lookahead=1, step_tokens=24)
    check_scores(recorded, reference, scores, expected)


def test_another_pooling_fails_the_sequence_alone(reference: Reference) -> None:
    driver = Driver(small(reference.path, "reference"))
    driver.enter(0, [1, 2, 3], pooling=3)
    driver.enter(1, [1, 2, 3])
    driver.enter(2, [1, 2, 3], pooling=2)
    driver.enter(3, [1, 2, 3], pooling=2, label_ids=pack([1, reference.vocab]))
    driver.enter(4, [1, 2, 3], pooling=1, label_ids=pack([1, 2]))
    result = driver.step(dict.fromkeys(range(5), 3))
    assert {error.slot: error.code for error in result.errors} == dict.fromkeys((0, 2, 3, 4), "invalid_pooling")
    assert len(driver.outputs[1]) == 1


def test_rows_that_are_not_finite_have_no_vector(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small(reference.path, "cpu")
    last_rows = engine.decoder.last_rows

    def not_finite(*given: Any) -> torch.Tensor:
        rows = last_rows(*given)
        rows[-1] = torch.nan
        return rows

    monkeypatch.setattr(engine.decoder, "last_rows", not_finite)
    recorded, _ = in_process.run(engine, pooling(reference)[:1], "orcinus")
    assert recorded.errors == ["nan_logits: the model gave logits that are not finite"]
    assert not recorded.logprobs.get(("r0", 0))


def test_describe_tells_the_size_of_vectors(reference: Reference) -> None:
    info: worker_pb2.WorkerInfo = small(reference.path, "reference").info()
    assert info.vector_size == 48
