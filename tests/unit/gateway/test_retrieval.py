"""Pairs of texts become prompts in services/gateway/openai/retrieval.py."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from services.gateway.errors import ApiError
from services.gateway.openai.bodies import RerankBody, parse_body
from services.gateway.openai.pooled import pooled_answer
from services.gateway.openai.retrieval import EmbedBody, embed_spec, rerank_spec
from services.gateway.request import GenerationSpec, Limits
from services.gateway.text.pairs import Pair, Pairs
from services.gateway.text.tokenizer import ModelText
from shared.wire.columns import pack_float
from tests.support.checkpoints.tokenizers import write_model


class Words(Pairs):
    """One id for each word."""

    encoded = 0

    def encode(self, query: str, document: str, instruction: str) -> Pair:
        self.encoded += 1
        return Pair([1] * len((query + " " + document).split()))


async def test_no_pair_is_encoded_behind_one_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pairs = ModelText(write_model(tmp_path / "m")), Words()
    monkeypatch.setattr(model, "tasks", ("rerank",))
    monkeypatch.setattr(model, "pairs", pairs)
    documents = ["b c", "d e f g", *["h"] * 50]
    body = parse_body(json.dumps({"model": "m", "query": "a", "documents": documents}).encode(), RerankBody)
    with pytest.raises(ApiError, match=r"documents\[1\] with what it is compared to has 5 tokens; .* at most 4\."):
        await rerank_spec(body, model, Limits(max_model_len=5))
    assert pairs.encoded == 2


async def test_text_is_not_cut_where_its_ids_are_not_those_beside_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelText(write_model(tmp_path / "m"))
    monkeypatch.setattr(model, "tasks", ("embeddings",))
    monkeypatch.setattr(
        model, "encode", lambda text, add_special_tokens=True: [1, 5, 6, 7, 2] if add_special_tokens else [5, 9, 7]
    )
    asked = {"model": "m", "texts": ["abc"], "input_type": "clustering", "max_tokens": 4, "truncate": "END"}
    body = parse_body(json.dumps(asked).encode(), EmbedBody)
    with pytest.raises(ApiError, match=r"texts\[0\] has 5 tokens; at most 4 are allowed; .* send a shorter one"):
        await embed_spec(body, model, Limits(max_model_len=50))


@pytest.mark.parametrize("asked", [None, ["float"], ["base64"], ["float", "base64"], ["base64", "base64"]])
async def test_vectors_have_each_form_that_was_asked_for_at_another_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str] | None
) -> None:
    model = ModelText(write_model(tmp_path / "m"))
    monkeypatch.setattr(model, "tasks", ("embeddings",))
    monkeypatch.setattr(model, "vector_size", 2)
    body = {"model": "m", "texts": ["a", "b"], "input_type": "clustering", "embedding_types": asked}
    spec = await embed_spec(parse_body(json.dumps(body).encode(), EmbedBody), model, Limits(max_model_len=50))
    again = GenerationSpec.from_delivery(spec.id, spec.to_delivery(lambda prompt, skips: list(prompt)), "normal")
    vectors = [[0.5, -0.25], [1.0, 0.125]]
    forms = {"float": vectors, "base64": [base64.b64encode(pack_float(vector)).decode() for vector in vectors]}
    for each in (spec, again):
        answer = pooled_answer(each, [pack_float(vector) for vector in vectors])
        assert answer["embeddings"] == {name: forms[name] for name in asked or ["float"]}
