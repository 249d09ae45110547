"""Log-probabilities of outputs and prompts end to end: those of transformers, and the same after services died.

Tolerance: 1e-3 in float32, of log-probabilities down to about -40.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.support import sse
from tests.support.checkpoints.models import Reference
from tests.support.stack import Stack
from tests.support.waiting import until

KEY = "sk-orcinus-test"
EXTRA = {"ignore_eos": True, "return_token_ids": True}
DRAWN: dict[str, Any] = {
    "temperature": 1.3, "top_p": 0.95, "seed": 11, "presence_penalty": 0.7, "frequency_penalty": 0.4,
    "logit_bias": {"70": 3.5, "71": -100},
}  # fmt: skip
OWN = {"top_k": 60, "min_p": 0.001, "repetition_penalty": 1.15}
MODEL = {"output_tokens": 12, "seed": 20261127}
STACK = {"key": KEY, "dtype": "float32", "drain_s": 0.5, "step_tokens": 16}


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0)


def exact(reference: Reference, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab] float64: the log-probabilities of every id where each of the tokens stands."""
    return reference.logits(prompt + tokens).double().log_softmax(-1)[len(prompt) - 1 : -1]


def about(values: Any) -> Any:
    return pytest.approx(values, abs=1e-3)


def test_logprobs_of_completions_are_those_of_transformers(
    stack: Stack, client: openai.OpenAI, reference: Reference
) -> None:
    prompts = reference.prompts[:2]
    answer = client.completions.create(
        model=stack.name, prompt=prompts, max_tokens=12, temperature=0, logprobs=5, extra_body=EXTRA
    )
    for choice, prompt, output in zip(answer.choices, prompts, reference.outputs, strict=False):
        assert choice.token_ids == output  # type: ignore[attr-defined]
        told, expected = choice.logprobs, exact(reference, prompt, output)
        assert told is not None and told.tokens and told.top_logprobs and told.text_offset
        assert told.token_logprobs == about([float(row[token]) for row, token in zip(expected, output, strict=True)])
        for best, row, name in zip(told.top_logprobs, expected, told.tokens, strict=True):
            assert list(best.values()) == about(row.topk(5).values.tolist())
            assert next(iter(best)) == name, "greedy takes the most likely"
        assert told.text_offset[0] == 0 and sorted(told.text_offset) == told.text_offset


def test_best_of_returns_the_most_likely_choices_also_when_repeated(stack: Stack) -> None:
    asked = {"prompt": "fn", "max_tokens": 8, "temperature": 1.4, "seed": 3, **EXTRA}
    every = stack.post("/v1/completions", {**asked, "n": 5, "logprobs": 0}).json()["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) for choice in every]
    best = sorted(range(5), key=lambda index: -means[index])[:2]
    headers = {**stack.headers, "Idempotency-Key": "best"}
    body = {"model": stack.name, **asked, "n": 2, "best_of": 5}
    answers = [httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=60) for _ in range(2)]
    told, again = (answer.json() for answer in answers)
    for one in (told, again):  # a record does not say which tokens were guessed
        one["usage"].pop("completion_tokens_details", None)
    assert told == again
    assert [choice["token_ids"] for choice in told["choices"]] == [every[index]["token_ids"] for index in best]
    assert [(choice["index"], choice["logprobs"]) for choice in told["choices"]] == [(0, None), (1, None)]
    assert told["usage"]["completion_tokens"] == 40
    address = f"{stack.url}/v1/requests/{told['id']}/stream"
    assert httpx.get(address, headers=stack.headers, timeout=60).status_code == 400, "which is best shows at the end"


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Choices of a stream's events, each with the event's id."""
    for event in sse.events(lines):
        if event.data != sse.DONE:
            yield from ({**choice, "event": event.id} for choice in event.json["choices"])


def entries_of(choices: list[dict[str, Any]]) -> tuple[list[int], list[tuple[Any, ...]]]:
    """Token ids and an entry for each token."""
    ids = [token for choice in choices for token in choice["token_ids"]]
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    some = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return ids, [entry for one in some for entry in zip(*(one[name] for name in columns), strict=True)]


def test_logprobs_continue_equal_after_scheduler_and_gateway_die(stack: Stack) -> None:
    """The history of penalties is rebuilt; another gateway and the record have the same values."""
    body = {
        "model": stack.name, "prompt": "def orca(", "max_tokens": 200, "logprobs": 3, "stop": ["\u0001no\u0001"],
        "stream": True, **EXTRA, **OWN, **DRAWN,
    }  # fmt: skip
    undisturbed = stack.post("/v1/completions", {**body, "stream": False}).json()["choices"][0]
    url, options = f"{stack.url}/v1/completions", {"headers": stack.headers, "timeout": 60}
    with httpx.stream("POST", url, json=body, **options) as answer:  # type: ignore[arg-type]
        request = answer.headers["x-orcinus-request"]
        stream = events(answer.iter_lines())
        seen = list(itertools.islice(stream, 10))
        stack.kill("scheduler")
        stack.start("scheduler")
        seen += itertools.islice(stream, 60)
        stack.kill("gateway")
    stack.start("gateway")
    until("the gateway is back", stack.ready, 60)
    address = f"{stack.url}/v1/requests/{request}/stream"
    with httpx.stream(
        "GET", address, headers={**stack.headers, "Last-Event-ID": seen[-1]["event"]}, timeout=60
    ) as answer:
        seen += events(answer.iter_lines())
    ids, entries = entries_of(seen)
    assert ids == undisturbed["token_ids"] and len(entries) == len(ids) == 200
    _, expected = entries_of([undisturbed])
    assert [entry[0] for entry in entries] == [entry[0] for entry in expected]
    assert [entry[1] for entry in entries] == about([entry[1] for entry in expected])
    assert [entry[3] for entry in entries] == [entry[3] for entry in expected]
    with httpx.stream("GET", address, headers=stack.headers, timeout=60) as answer:
        assert entries_of(list(events(answer.iter_lines()))) == (ids, entries), "the record has what was sent"


# Of prompts


def check_listed(told: list[Any], reference: Reference, prompt: list[int], most: int) -> None:
    """vLLM's `prompt_logprobs`."""
    assert told[0] is None and len(told) == len(prompt)
    for entry, token, row in zip(told[1:], prompt[1:], exact(reference, prompt[:1], prompt[1:]), strict=True):
        assert next(iter(entry)) == str(token)
        assert entry[str(token)]["logprob"] == about(float(row[token]))
        best = sorted((one["logprob"] for one in entry.values() if one["rank"] <= most), reverse=True)
        assert best == about(row.topk(most).values.tolist())
        assert len(entry) == most + (entry[str(token)]["rank"] > most)


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
