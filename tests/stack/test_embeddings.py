"""Vectors end to end: those of transformers with last-token pooling, in OpenAI's forms, across deaths of services."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.support.models import Reference, random_prompts
from tests.support.stack import Stack, running_stack
from tests.support.waiting import until

KEY = "sk-orcinus-test"
MODEL = {"output_tokens": 2, "seed": 20261127}
HIDDEN = 64
TEXTS = ["def orca(pod):", "a naïve whale 🐋", "x"]


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    settings = {"dtype": "float32", "drain_s": 0.5, "step_tokens": 16}
    with running_stack(directory, reference.path, key=KEY, **settings) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0)


def exact(reference: Reference, prompts: list[list[int]], dimensions: int = HIDDEN) -> np.ndarray:
    """[prompts, dimensions]: the last token's row behind the last norm, cut and normalised."""
    model: Any = reference.model
    with torch.inference_mode():
        rows = [model.model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    return torch.nn.functional.normalize(torch.stack(rows)[:, :dimensions], dim=-1).numpy()


def vectors(answer: dict[str, Any]) -> np.ndarray:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return np.array([one["embedding"] for one in answer["data"]], np.float32)


@pytest.mark.parametrize("dimensions", [HIDDEN, 24])
def test_vectors_of_the_openai_client_are_those_of_transformers(
    stack: Stack, client: openai.OpenAI, reference: Reference, dimensions: int
) -> None:
    prompts = [stack.post("/tokenize", {"prompt": text}).json()["tokens"] for text in TEXTS]
    expected = exact(reference, prompts, dimensions)
    for form in ("float", None):  # without a form the client asks for base64
        more = {} if form is None else {"encoding_format": form}
        if dimensions < HIDDEN:
            more["dimensions"] = dimensions
        for sent in (TEXTS, prompts):
            answer = client.embeddings.create(model=stack.name, input=sent, **more)
            told = np.array([one.embedding for one in answer.data], np.float32)
            np.testing.assert_allclose(told, expected, atol=1e-5)
            total = sum(map(len, prompts))
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.object) == (total, total, "list")
    np.testing.assert_allclose(np.linalg.norm(told, axis=1), 1, atol=1e-6)


def test_one_text_and_one_list_of_ids_are_one_input(stack: Stack, reference: Reference) -> None:
    ids = stack.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    for sent in (TEXTS[0], ids):
        answer = stack.post("/v1/embeddings", {"input": sent}).json()
        np.testing.assert_allclose(vectors(answer), exact(reference, [ids]), atol=1e-5)
    coded = stack.post("/v1/embeddings", {"input": ids, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == answer["data"][0]["embedding"]


def test_vectors_come_whole_when_scheduler_and_worker_die(stack: Stack, reference: Reference) -> None:
    prompts = random_prompts(60, (150, 240), 3)
    body = {"model": stack.name, "input": prompts}
    headers = {**stack.headers, "Idempotency-Key": "vectors"}

    def post() -> dict[str, Any]:
        answer = httpx.post(f"{stack.url}/v1/embeddings", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stored() -> int:
        return sum(1 for _ in stack.redis.client.scan_iter(f"{stack.keys.prefix}logprobs:*")) - before

    before = 0
    before = stored()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post)
        until("some vectors are there", lambda: stored() > 0, 60)
        stack.kill("scheduler")
        assert stored() < len(prompts), "the request was not over"
        stack.kill("worker")
        stack.start("worker")
        stack.start("scheduler")
        told = answer.result()
    np.testing.assert_allclose(vectors(told), exact(reference, prompts), atol=1e-5)
    assert post()["data"] == told["data"], "the record has what was answered"
    found = httpx.get(f"{stack.url}/v1/requests/{told['id']}", headers=stack.headers, timeout=60).json()
    assert found["result"]["data"] == told["data"]
    stream = httpx.get(f"{stack.url}/v1/requests/{told['id']}/stream", headers=stack.headers, timeout=60)
    assert stream.status_code == 400 and "cannot be streamed" in stream.text
    stack.settled_empty()


def test_vectors_are_made_in_the_background(stack: Stack, reference: Reference) -> None:
    answer = stack.post("/v1/embeddings", {"input": [5, 6, 7], "background": True})
    assert answer.status_code == 202
    address = f"{stack.url}{answer.headers['location']}"

    def state() -> dict[str, Any]:
        return httpx.get(address, headers=stack.headers, timeout=60).json()

    until("it has ended", lambda: state()["status"] == "finished", 60)
    np.testing.assert_allclose(vectors(state()["result"]), exact(reference, [[5, 6, 7]]), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "param", "problem"),
    [
        ({"input": ""}, "input", "input is empty"),
        ({"input": []}, "input", "input must be text, texts, token ids or lists of token ids"),
        ({"input": ["a", ""]}, "input", "input[1] is empty"),
        ({"input": [[1], [-1]]}, "input", "input[1][0] must be a token id from 0 to 319"),
        ({"input": [5] * 256}, "input", "input has 256 tokens; this server accepts at most 255"),
        ({"input": ["a"] * 129}, "input", "input has 129 items; this server's limit is 128"),
        ({"input": [[5]] * 129}, "input", "input has 129 items; this server's limit is 128"),
        ({"dimensions": 65}, "dimensions", "dimensions must be at most 64"),
        ({"dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"prompt": "x"}, "prompt", "Unrecognized"),
    ],
)
def test_wrong_fields_are_refused_by_name(stack: Stack, changes: dict[str, Any], param: str, problem: str) -> None:
    answer = stack.post("/v1/embeddings", {"input": "x", **changes})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert problem in error["message"]
