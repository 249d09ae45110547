"""Log-probabilities of prompts end to end: transformers' log-likelihoods, in OpenAI's and vLLM's forms, across deaths.

Tolerance: 1e-3 in float32, of log-probabilities down to about -40.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.support.models import Reference
from tests.support.stack import Stack, running_stack
from tests.support.waiting import until

KEY = "sk-orcinus-test"
MODEL = {"output_tokens": 4, "seed": 20261127}
STEP_TOKENS = 16


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    settings = {"dtype": "float32", "drain_s": 0.5, "step_tokens": STEP_TOKENS}
    with running_stack(directory, reference.path, key=KEY, **settings) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0)


def exact(reference: Reference, prompt: list[int]) -> torch.Tensor:
    """[tokens - 1, vocab] float64: the log-probabilities of every id where each token behind the first stands."""
    return reference.logits(prompt).double().log_softmax(-1)[:-1]


def about(values: Any) -> Any:
    return pytest.approx(values, abs=1e-3)


def check_listed(told: list[Any], reference: Reference, prompt: list[int], most: int) -> None:
    """vLLM's `prompt_logprobs`."""
    assert told[0] is None and len(told) == len(prompt)
    for entry, token, row in zip(told[1:], prompt[1:], exact(reference, prompt), strict=True):
        assert next(iter(entry)) == str(token)
        assert entry[str(token)]["logprob"] == about(float(row[token]))
        best = sorted((one["logprob"] for one in entry.values() if one["rank"] <= most), reverse=True)
        assert best == about(row.topk(most).values.tolist())
        assert len(entry) == most + (entry[str(token)]["rank"] > most)


@pytest.mark.parametrize("max_tokens", [1, 0])
def test_requests_of_lm_evaluation_harness_get_transformers_log_likelihoods(
    stack: Stack, reference: Reference, max_tokens: int
) -> None:
    """What its local-completions sends: a batch of contexts with continuations as token ids."""
    prompts = [prompt + output for prompt, output in zip(reference.prompts, reference.outputs, strict=True)]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
    answer = stack.post("/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == max_tokens * len(prompts)
    for index, (choice, prompt, context) in enumerate(zip(answer["choices"], prompts, reference.prompts, strict=True)):
        told, rows = choice["logprobs"], exact(reference, prompt)
        assert choice["index"] == index and {len(column) for column in told.values()} == {len(prompt) + max_tokens}
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        expected = [float(row[token]) for row, token in zip(rows, prompt[1:], strict=True)]
        assert told["token_logprobs"][1 : len(prompt)] == about(expected)
        end = len(prompt)  # as it sums them up
        assert math.fsum(told["token_logprobs"][len(context) : end]) == about(math.fsum(expected[len(context) - 1 :]))
        for name, top in zip(told["tokens"][len(context) : end], told["top_logprobs"][len(context) : end], strict=True):
            assert max(top, key=top.get) == name, "the continuation is the greedy one"


def test_an_echoed_text_has_offsets_of_its_tokens(stack: Stack, client: openai.OpenAI, reference: Reference) -> None:
    text = "def orca(pod): naïve 🐋"
    answer = client.completions.create(model=stack.name, prompt=text, max_tokens=3, echo=True, logprobs=2,
                                       temperature=0, extra_body={"ignore_eos": True})  # fmt: skip
    (choice,), usage = answer.choices, answer.usage
    assert choice.text.startswith(text) and usage is not None and usage.completion_tokens == 3
    told = choice.logprobs
    assert told is not None and told.tokens and told.text_offset and told.token_logprobs and told.top_logprobs
    prompt = stack.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert len(told.tokens) == len(prompt) + 3
    assert told.text_offset[0] == 0 and told.text_offset == sorted(told.text_offset)
    assert told.text_offset[len(prompt)] == len(text)
    assert [text[at : at + 1] for at in told.text_offset[:8]] == told.tokens[:8] == list("def orca")
    alone = stack.post("/v1/completions", {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 2}).json()
    (only,) = alone["choices"]
    assert (only["text"], only["finish_reason"], alone["usage"]["completion_tokens"]) == (text, "length", 0)
    assert only["logprobs"]["token_logprobs"][1:] == about(told.token_logprobs[1 : len(prompt)])


def test_prompt_logprobs_have_vllms_form_in_completions_and_chats(stack: Stack, reference: Reference) -> None:
    prompts = reference.prompts[:2]
    body = {"prompt": prompts, "n": 2, "max_tokens": 4, "temperature": 0, "prompt_logprobs": 3}
    answer = stack.post("/v1/completions", body).json()
    for index, choice in enumerate(answer["choices"]):
        assert choice["logprobs"] is None
        check_listed(choice["prompt_logprobs"], reference, prompts[index // 2], 3)
    messages = [{"role": "user", "content": "which whale?"}]
    prompt = stack.post("/tokenize", {"messages": messages}).json()["tokens"]
    chat = stack.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "prompt_logprobs": 0}).json()
    check_listed(chat["prompt_logprobs"], reference, prompt, 0)
    assert "prompt_logprobs" not in chat["choices"][0]
    assert chat["prompt_logprobs"][1][str(prompt[1])]["decoded_token"]


def test_one_token_has_no_log_probability(stack: Stack) -> None:
    answer = stack.post("/v1/completions", {"prompt": [70], "max_tokens": 0, "prompt_logprobs": 5, "echo": True}).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["prompt_logprobs"]) == ("F", [None])


def test_log_probabilities_stay_the_same_when_scheduler_and_worker_die_halfway(
    stack: Stack, reference: Reference
) -> None:
    prompts = [(prompt * 40)[:240] for prompt in reference.prompts]
    body = {"prompt": prompts, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "prompt_logprobs": 4,
            "logprobs": 1, "echo": True, "model": stack.name}  # fmt: skip
    undisturbed = stack.post("/v1/completions", body).json()
    keys, redis = stack.keys, stack.redis.client
    headers = {**stack.headers, "Idempotency-Key": "halfway"}

    def post() -> dict[str, Any]:
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def sizes() -> list[int]:
        names = [key for key in redis.scan_iter(f"{keys.prefix}prompt_logprobs:*") if name_of(key) not in before]
        return sorted(int(redis.strlen(key)) for key in names)

    def name_of(key: bytes) -> bytes:
        return key.rsplit(b":", 1)[0]

    before = {name_of(key) for key in redis.scan_iter(f"{keys.prefix}prompt_logprobs:*")}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post)
        until("some tokens are told", lambda: sum(sizes()) > 0, 60)
        stack.kill("scheduler")
        first = sizes()
        assert sum(first) < len(prompts) * 239 * 40, "the request was not over"
        stack.kill("worker")
        stack.start("worker")
        stack.start("scheduler")
        disturbed = answer.result()
    for told, expected, prompt in zip(disturbed["choices"], undisturbed["choices"], prompts, strict=True):
        check_listed(told["prompt_logprobs"], reference, prompt, 4)
        assert told["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
        assert told["logprobs"]["token_logprobs"][1:] == about(expected["logprobs"]["token_logprobs"][1:])
    assert [choice["prompt_logprobs"] for choice in post()["choices"]] == [
        choice["prompt_logprobs"] for choice in disturbed["choices"]
    ], "the record has what was answered"
    result = httpx.get(f"{stack.url}/v1/requests/{disturbed['id']}", headers=stack.headers, timeout=60).json()["result"]
    assert result["choices"] == disturbed["choices"]
    stream = httpx.get(f"{stack.url}/v1/requests/{disturbed['id']}/stream", headers=stack.headers, timeout=60)
    assert stream.status_code == 400 and "cannot be streamed" in stream.text
    stack.settled_empty()


@pytest.mark.parametrize(
    ("changes", "param", "problem"),
    [
        ({"echo": True, "logprobs": 1, "stream": True}, "stream", "one answer"),
        ({"prompt_logprobs": 1, "stream": True}, "stream", "one answer"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "echo and prompt_logprobs only"),
        ({"prompt": [[65] * 250] * 128, "prompt_logprobs": 20, "n": 1}, None, None),
    ],
)
def test_requests_that_cannot_be_served_are_refused_by_field(
    stack: Stack, changes: dict[str, Any], param: str | None, problem: str | None
) -> None:
    answer = stack.post("/v1/completions", {"prompt": "hi", "max_tokens": 1, **changes})
    if param is None or problem is None:
        assert answer.status_code == 200, "5.5 MB of records are fine"
        return
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], problem in error["message"]) == (param, True)
