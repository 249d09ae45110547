"""Pairs of texts become prompts in services/gateway/openai/retrieval.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.gateway.errors import ApiError
from services.gateway.openai.bodies import RerankBody, parse_body
from services.gateway.openai.retrieval import rerank_spec
from services.gateway.request import Limits
from services.gateway.text.pairs import Pair, Pairs
from services.gateway.text.tokenizer import ModelText
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
