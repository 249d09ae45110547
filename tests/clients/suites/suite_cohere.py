"""Cohere's client, at a model that scores pairs and at one with vectors."""

from __future__ import annotations

import base64
from typing import Any

import cohere
import pytest

ASKED: dict[str, Any] = {"query": "the orca sings", "documents": ["a pod swims", "the orca sings", "xyz"], "top_n": 2}


@pytest.mark.parametrize("version", [cohere.Client, cohere.ClientV2])
def test_rerank_and_errors(server: Any, version: Any) -> None:
    plain = server.post("/v1/rerank", ASKED)
    client = version(api_key=server.key, base_url=server.url)
    answer = client.rerank(model=server.model, **ASKED)
    assert [result.index for result in answer.results] == [result["index"] for result in plain["results"]]
    scores = [result["relevance_score"] for result in plain["results"]]
    assert [result.relevance_score for result in answer.results] == pytest.approx(scores, abs=1e-6)
    assert len(scores) == 2 and answer.meta.tokens.input_tokens == plain["usage"]["total_tokens"]
    with pytest.raises(cohere.NotFoundError, match=f"'none' does not exist; this server has '{server.model}'"):
        client.rerank(model="none", **ASKED)
    with pytest.raises(cohere.BadRequestError, match="'top_n': Input should be greater than or equal to 1; got 0"):
        client.rerank(model=server.model, **ASKED | {"top_n": 0})
    with pytest.raises(cohere.UnauthorizedError, match="the API key is not valid; send it as"):
        version(api_key="wrong", base_url=server.url).rerank(model=server.model, **ASKED)


def test_embed_and_errors(server: Any) -> None:
    texts = ["the orca sings", "a pod swims"]
    plain = server.post("/v1/embeddings", {"input": texts})
    client = cohere.ClientV2(api_key=server.key, base_url=server.url)
    asked: dict[str, Any] = {"model": server.model, "texts": texts, "input_type": "search_document"}
    answer = client.embed(**asked, embedding_types=["float"])
    expected = [pytest.approx(one["embedding"], abs=1e-6) for one in plain["data"]]
    assert (answer.embeddings.float_, answer.texts) == (expected, texts)
    assert answer.meta.billed_units.input_tokens == plain["usage"]["prompt_tokens"]
    coded = client.embed(**asked, embedding_types=["base64"], output_dimension=8).embeddings.base64
    assert [len(base64.b64decode(one)) for one in coded] == [4 * 8] * 2
    both = client.embed(**asked, embedding_types=["float", "base64"], output_dimension=8).embeddings
    assert (both.base64, [len(one) for one in both.float_]) == (coded, [8] * 2)
    with pytest.raises(cohere.BadRequestError, match="Input should be 'float' or 'base64'; got 'int8'"):
        client.embed(**asked, embedding_types=["int8"])
    with pytest.raises(cohere.BadRequestError, match="makes vectors of texts only; send texts"):
        client.embed(**asked, images=["data:image/png;base64,"])
