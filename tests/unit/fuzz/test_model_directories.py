"""JSON files of a model directory with values that no model has: each reader takes them or raises ModelError."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.text.tokenizer import ModelText
from services.launcher.model_check import expected_bytes, read_config, read_model
from services.worker.models.config import load_config
from services.worker.models.encoder import read_pooling
from shared.errors import ConfigurationError, ModelError
from shared.settings import WorkerSettings
from shared.text.end_of_text import end_ids
from tests.support.checkpoints.tokenizers import write_model
from tests.unit.fuzz.test_readers import VALUES

DECODER = {
    "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "intermediate_size": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "bos_token_id": 0,
    "tie_word_embeddings": True, "torch_dtype": "float32", "rope_scaling": None, "text_config": None,
    "quantization_config": None, "sliding_window": None, "layer_types": None, "sentence_transformers": None,
}  # fmt: skip
GENERATION = {
    "eos_token_id": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
}  # fmt: skip
FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "modules.json")
ARCHITECTURES = st.sampled_from(
    ["Gemma3ForConditionalGeneration", "MixtralForCausalLM", "BertForSequenceClassification", "BloomForCausalLM"]
)
ODD = VALUES | st.sampled_from([0, -1, 1.5, 1 << 40, True, "x", "", [1], {}, [[]], {"content": [1]}, [{"name": []}]])


@functools.cache
def written() -> dict[str, Any]:
    """Return the files of a small model, by name."""
    with TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        files = {path.name: path.read_bytes() for path in model.iterdir()}
    made: dict[str, Any] = {name: json.loads(files.get(name, b"{}")) for name in FILES}
    made["config.json"] |= DECODER
    made["generation_config.json"] = dict(GENERATION)
    return {**made, "tokenizer.json": files["tokenizer.json"]}


def put(folder: Path, changed: dict[str, Any]) -> Path:
    """Write the small model with some files, or fields of them, changed."""
    for name, value in written().items():
        given_value = changed.get(name, {})
        new = {**value, **given_value} if isinstance(value, dict) and isinstance(given_value, dict) else given_value
        content = value if isinstance(value, bytes) else json.dumps(new).encode("utf-8", "replace")
        (folder / name).write_bytes(content)
    return folder


def text(model: Path) -> None:
    ModelText(model).close()


def sizes(model: Path) -> None:
    expected_bytes(read_config(model), 1 << 20, WorkerSettings(model=model), load_config(model))
    read_model(model, "dummy")


READERS: list[Callable[[Path], object]] = [text, end_ids, load_config, sizes, read_pooling]


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(FILES))
    if draw(st.integers(0, 9)) == 0:
        return {name: draw(ODD)}
    known = st.sampled_from(sorted({*written()[name], "architectures", "chat_template", "model_type", "vocab_size"}))
    fields = draw(st.dictionaries(known, ODD, min_size=1, max_size=3))
    if name == "config.json" and draw(st.booleans()):
        fields["architectures"] = [draw(ARCHITECTURES)]
    return {name: fields}


@given(changes())
@example({"config.json": {"vocab_size": "x"}})
@example({"config.json": {"vocab_size": [1]}})
@example({"config.json": {"text_config": [1]}})
@example({"config.json": {"text_config": 5}})
@example({"config.json": {"model_type": [1], "max_position_embeddings": None}})
@example({"config.json": {"eos_token_id": "x"}})
@example({"config.json": {"eos_token_id": 1.5}})
@example({"config.json": {"hidden_size": 1 << 70}})
@example({"tokenizer_config.json": {"chat_template": [1]}})
@example({"tokenizer_config.json": {"chat_template": 5}})
@example({"tokenizer_config.json": {"chat_template": "{{ " + "(" * 5000}})
@example({"generation_config.json": {"eos_token_id": [[1]]}})
@example({"generation_config.json": [1]})
def test_value_that_no_model_has_is_taken_or_refused_with_a_sentence(changed: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        model = put(Path(folder), changed)
        for read in READERS:
            try:
                read(model)
            except (ModelError, ConfigurationError) as error:
                assert str(error) and "Traceback" not in str(error)


@pytest.mark.parametrize(
    ("name", "field", "value", "expected"),
    [
        ("config.json", "vocab_size", "x", "a positive integer up to 4194304"),
        ("config.json", "max_position_embeddings", "1", "a positive integer up to 16777216"),
        ("config.json", "text_config", [1], "an object"),
        ("generation_config.json", "eos_token_id", 1.5, "an id below 4194304 or a list of them"),
        ("tokenizer_config.json", "chat_template", 5, "a string or a list of objects with `name` and `template`"),
    ],
)
def test_refusal_names_file_field_value_and_remedy(
    tmp_path: Path, name: str, field: str, value: Any, expected: str
) -> None:
    with pytest.raises(ModelError) as refused:
        text(put(tmp_path, {name: {field: value}}))
    remedy = "fetch the file again, or choose another model"
    assert str(refused.value) == f"{tmp_path / name}: {field} is {value!r}, expected {expected}; {remedy}"


def test_template_file_is_bounded(tmp_path: Path) -> None:
    model = put(tmp_path, {})
    with (model / "chat_template.jinja").open("wb") as file:
        file.truncate(3 << 30)  # sparse
    with pytest.raises(ModelError, match=r"chat_template\.jinja: 3221225472 bytes, at most 1048576; "):
        text(model)
