"""Cohere's client, of both versions of its API, at a model that scores pairs."""

from __future__ import annotations

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
