"""Vectors and scores of encoders equal transformers': no number differs by more than 1e-5 in float32.

The scheduler never cuts their prompts, whatever its policy, step size or the order of arrival.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.scheduler.core.policy.presets import PRESETS
from services.scheduler.core.types import NewRequest
from services.worker.encoder_engine import EncoderEngine
from services.worker.engine import Engine
from shared.errors import ConfigurationError, ModelError, ProtocolError
from shared.wire.columns import pack, unpack_float
from tests.engine.driver import Driver, make_engine
from tests.support import in_process
from tests.support.checkpoints.encoders import CLS, KINDS, PAD, SEP, VOCAB, EncoderReference, make_encoder
from tests.support.checkpoints.models import random_prompts

TOLERANCE = 1e-5
SMALL: dict[str, Any] = {"max_seqs": 8, "max_step_tokens": 200, "block_size": 16}
VECTOR, SCORE = 1, 2
# Without the id of padding: RoBERTa does not count it in the positions, which is not built.
DRAWN = [*random_prompts(10, (1, 60), 1, VOCAB), *random_prompts(2, (128, 128), 2, VOCAB), [7]]
PROMPTS = [[7 if token == PAD else token for token in prompt] for prompt in DRAWN]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EncoderReference]:
    """Make an encoder, once for equal arguments."""
    known: dict[str, EncoderReference] = {}

    def make(*given: Any, **fields: Any) -> EncoderReference:
        key = repr((given, fields))
        if key not in known:
            known[key] = make_encoder(tmp_path_factory.mktemp("encoder"), *given, **fields)
        return known[key]

    return make


def requests_of(prompts: list[list[int]], pooling: int, segments: list[int] | None = None) -> list[NewRequest]:
    made = []
    for index, prompt in enumerate(prompts):
        one = in_process.request(f"r{index}", prompt, 1)
        one.payload.pooling = pooling
        one.payload.segments = pack([segments[index]]) if segments else b""
        made.append(one)
    return made


def told(engine: Engine, requests: list[NewRequest], policy: str = "orcinus", **options: Any) -> np.ndarray:
    recorded, core = in_process.run(engine, requests, policy, **options)
    assert not recorded.errors
    assert core.stats()["prefix_hit_tokens"] == 0
    return np.stack([unpack_float(recorded.logprobs[f"r{index}", 0]) for index in range(len(requests))])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", True), ("cls", False), ("", False)])
def test_vectors_are_those_of_transformers(
    made: Callable[..., EncoderReference], kind: str, pooling: str, normalize: bool, backend: str
) -> None:
    reference = made(kind, pooling, normalize)
    engine = make_engine(reference.path, kernels=backend, **SMALL)
    engine.warm_up()
    found = told(engine, requests_of(PROMPTS, VECTOR))
    np.testing.assert_allclose(found, reference.vectors(PROMPTS), atol=TOLERANCE)
    assert found.shape == (len(PROMPTS), engine.info().vector_size)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(made: Callable[..., EncoderReference], kind: str, backend: str) -> None:
    reference = made(kind, scores=True)
    engine = make_engine(reference.path, kernels=backend, **SMALL)
    engine.warm_up()
    segments = [0, *(len(prompt) // 2 for prompt in PROMPTS[1:])]
    found = told(engine, requests_of(PROMPTS, SCORE, segments))
    expected = reference.logits(list(zip(PROMPTS, segments, strict=True)))
    np.testing.assert_allclose(found[:, 0], expected, atol=TOLERANCE)
    assert expected.std() > 0.1, "the scores differ"


def test_no_policy_cuts_a_prompt(made: Callable[..., EncoderReference]) -> None:
    engine = make_engine(made("bert", "mean").path, kernels="cpu", **SMALL)
    alone = told(engine, requests_of(PROMPTS, VECTOR), max_seqs=1)
    for policy in PRESETS:
        for step_tokens, lookahead in ((0, 0), (16, 1)):
            beside = told(engine, requests_of(PROMPTS, VECTOR), policy, step_tokens=step_tokens, lookahead=lookahead)
            assert beside.tobytes() == alone.tobytes(), f"{policy}: a vector is the same bits in any company"


def test_sequences_without_its_pooling_fail_alone(made: Callable[..., EncoderReference]) -> None:
    driver = Driver(make_engine(made("bert", "mean").path, kernels="cpu", **SMALL))
    driver.enter(0, [CLS, 9, SEP])
    driver.enter(1, [CLS, 9, SEP], pooling=SCORE)
    driver.enter(2, [CLS, 9, SEP], pooling=VECTOR, label_ids=pack([1, 2]))
    driver.enter(3, [CLS, 9, SEP], pooling=VECTOR)
    result = driver.step(dict.fromkeys(range(4), 3))
    assert {error.slot: error.code for error in result.errors} == dict.fromkeys(range(3), "invalid_pooling")
    assert len(unpack_float(result.logprobs)) == 48


def test_a_part_of_a_prompt_breaks_the_contract(made: Callable[..., EncoderReference]) -> None:
    driver = Driver(make_engine(made("bert", "mean").path, kernels="cpu", **SMALL))
    driver.enter(0, [CLS, 9, SEP], pooling=VECTOR)
    with pytest.raises(ProtocolError, match="an encoder computes each sequence whole"):
        driver.step({0: 2})


def test_rows_that_are_not_finite_have_no_vector(
    made: Callable[..., EncoderReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(made("bert", "mean").path, kernels="cpu", **SMALL)
    assert isinstance(engine, EncoderEngine)
    pool = engine.encoder.pool

    def not_finite(*given: Any) -> np.ndarray:
        vectors = pool(*given)
        vectors[0, 3] = np.nan
        return vectors

    monkeypatch.setattr(engine.encoder, "pool", not_finite)
    recorded, _ = in_process.run(engine, requests_of(PROMPTS[:1], VECTOR), "orcinus")
    assert recorded.errors == ["nan_logits: the model gave logits that are not finite"]


def test_texts_are_as_long_as_a_step(made: Callable[..., EncoderReference]) -> None:
    bert, roberta = made("bert", "mean").path, made("roberta", "mean").path
    assert [make_engine(path, **SMALL).info().max_input_tokens for path in (bert, roberta)] == [128, 128]
    info = make_engine(bert, **(SMALL | {"max_step_tokens": 50})).info()
    assert (info.max_input_tokens, info.max_output_tokens, info.whole_prompts) == (50, 1, True)


def test_folder_of_adapters_is_for_the_other_models_of_a_stack(
    made: Callable[..., EncoderReference], tmp_path: Path
) -> None:
    model = made("bert", "mean")
    plain, beside = (make_engine(model.path, **(SMALL | more)) for more in ({}, {"adapter_dir": tmp_path}))
    assert beside.info().max_loras == 0
    found = [told(engine, requests_of(PROMPTS, VECTOR)).tobytes() for engine in (plain, beside)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_input_tokens": 129}, "--max-input-tokens 129: an encoder computes a text in one step, of at most 128"),
        ({"tp": 2}, "--tp 2: BertModel is an encoder"),
        ({"kv_dtype": "int8"}, "--kv-dtype int8: BertModel is an encoder"),
        ({"kernels": "emulator", "dtype": "bfloat16"}, "the model is an encoder, they have no kernels"),
    ],
)
def test_settings_that_an_encoder_cannot_have_are_refused(
    made: Callable[..., EncoderReference], settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        make_engine(made("bert", "mean").path, **(SMALL | settings))


def module(name: str, path: str = "1_Pooling") -> dict[str, str]:
    return {"type": f"sentence_transformers.models.{name}", "path": path}


@pytest.mark.parametrize(
    ("modules", "pooling", "problem"),
    [
        ({}, {}, "no JSON list"),
        ([module("Transformer"), module("Pooling"), module("Dense")], {}, "Dense'] are not supported"),
        ([module("Transformer"), module("Pooling", "../x")], {}, "path '../x' of Pooling is no folder"),
        (None, {"pooling_mode_max_tokens": True}, "pooling max_tokens is not supported"),
        (None, {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, "max_tokens, cls_token is not"),
        (None, {"pooling_mode_cls_token": 1}, "pooling_mode_cls_token is 1, expected true or false"),
        (None, {"pooling_mode": "lasttoken"}, "pooling lasttoken is not supported"),
    ],
)
def test_pooling_that_is_not_known_is_refused(tmp_path: Path, modules: Any, pooling: Any, problem: str) -> None:
    path = make_encoder(tmp_path / "m", "bert", "mean").path
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(ModelError) as raised:
        make_engine(path, **SMALL)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"scores": True, "num_labels": 3}, "3 labels are not supported; only a reranker with one label is"),
        ({"is_decoder": True}, "is_decoder true is not supported"),
    ],
)
def test_encoders_of_another_kind_are_refused(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    path = make_encoder(tmp_path / "m", "bert", **fields).path
    with pytest.raises(ModelError, match=problem):
        make_engine(path, **SMALL)


@pytest.mark.parametrize(
    ("backend", "settings", "least"),
    [
        ("reference", {"dtype": "bfloat16"}, 0.999),
        ("cpu", {"dtype": "bfloat16"}, 0.999),
        ("cpu", {"quantize": "int8"}, 0.999),
        ("cpu", {"quantize": "int4"}, 0.9),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_weights_keep_the_direction_of_vectors(
    made: Callable[..., EncoderReference], kind: str, settings: dict[str, str], least: float, backend: str
) -> None:
    """`least`: of the cosine to transformers' vector in float32."""
    reference = made(kind, "mean", True)
    engine = make_engine(reference.path, kernels=backend, **{**SMALL, **settings})
    engine.warm_up()
    found = told(engine, requests_of(PROMPTS, VECTOR))
    expected = reference.vectors(PROMPTS)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-3)
    assert ((found * expected).sum(1) > least).all()
    assert np.abs(found - expected).max() > 10 * TOLERANCE, "something is rounded"


def test_weights_that_the_reference_cannot_round_are_refused_by_name(made: Callable[..., EncoderReference]) -> None:
    with pytest.raises(ConfigurationError, match="int8"):
        make_engine(made("bert", "mean", True).path, kernels="reference", quantize="int8", **SMALL)
