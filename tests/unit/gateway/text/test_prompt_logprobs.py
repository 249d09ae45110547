"""Log-probabilities of prompts as answers have them: OpenAI's columns of an echo, vLLM's list, and what is missing."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import orjson
import pytest

from protos import queue_pb2
from services.gateway.delivery.stream import Row
from services.gateway.errors import ApiError
from services.gateway.openai.answers import answer_body
from services.gateway.openai.bodies import CompletionBody, generation_spec
from services.gateway.request import GenerationSpec, Limits
from shared.text.logprobs import pack_prompt_records, prompt_record_bytes, unpack_prompt_records
from tests.support.gateway.generations import generation, model, spec, stored

TEXT = "whale 🐋!"  # the whale is several tokens
WANTED = 3


def asking(**changes: Any) -> GenerationSpec:
    prompt = model().encode(TEXT, False)
    fields = {"prompts": [prompt], "prompt_texts": [TEXT], "stream": False, "max_tokens": 2} | changes
    made = spec(**fields)
    made.sampling.prompt_logprobs = made.prompt_wanted
    return made


def record(tokens: list[int], wanted: int) -> bytes:
    """Of the tokens behind the first: token i has -i and rank i + 1; the likelier ones are the ids 7 and 9."""
    count, k = len(tokens) - 1, wanted - 1
    best = np.tile(np.array([-0.25, -0.5, -0.75], np.float32)[:k], (count, 1))
    ids = np.tile(np.array([7, 9, 11], np.int32)[:k], (count, 1))
    return pack_prompt_records(-np.arange(1, count + 1, dtype=np.float32), np.arange(2, count + 2, dtype=np.int32),
                               ids, best)  # fmt: skip


def answered(request: GenerationSpec, records: list[bytes] | None = None, finish: int = 2) -> dict[str, Any]:
    running, stream, commands = generation(request)
    commands.records = records or [record(prompt, request.prompt_wanted) for prompt in request.prompts]
    for choice in range(request.choices):
        stream.offer(Row(choice, [50], finish, logprobs=bytes(request.record_bytes)), 0)
    body: dict[str, Any] = orjson.loads(orjson.dumps(asyncio.run(answer_body(running, "fp"))))
    return body


def test_records_come_back_as_they_were_packed() -> None:
    made = record([1, 2, 3], 4)
    assert len(made) == 2 * prompt_record_bytes(4) == 64
    (first, one), (second, two) = unpack_prompt_records(made, 4)
    assert (first, one.sampled_logprob, second, two.sampled_logprob) == (2, -1.0, 3, -2.0)
    assert one.best == two.best == [(7, -0.25), (9, -0.5), (11, -0.75)]
    assert unpack_prompt_records(b"", 4) == []
    with pytest.raises(ValueError, match="cannot reshape"):
        unpack_prompt_records(made[:-1], 4)


def test_an_echo_has_columns_of_prompt_and_output() -> None:
    request = asking(echo=True, logprobs=2, sampling=queue_pb2.Sampling(logprobs=WANTED))
    (choice,) = answered(request)["choices"]
    told, prompt = choice["logprobs"], request.prompts[0]
    assert choice["text"].startswith(TEXT)
    assert [len(column) for column in told.values()] == [len(prompt) + 1] * 4
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert told["token_logprobs"][1 : len(prompt)] == [-1.0 * place for place in range(1, len(prompt))]
    assert told["text_offset"][len(prompt)] == len(TEXT)
    names = zip(told["tokens"], told["text_offset"], strict=True)
    assert all(name.startswith("bytes:") or TEXT[at:].startswith(name) for name, at in list(names)[: len(prompt)])
    top = told["top_logprobs"][1]
    assert list(top.values()) == [-0.25, -0.5, -1.0] and told["tokens"][1] in top


@pytest.mark.parametrize("most", [0, 2])
def test_prompt_logprobs_are_keyed_by_id_the_token_first(most: int) -> None:
    request = asking(prompt_logprobs=most, n=2)
    for choice in answered(request)["choices"]:
        assert choice["logprobs"] is None
        listed = choice["prompt_logprobs"]
        assert listed[0] is None and len(listed) == len(request.prompts[0])
        for place, (entry, token) in enumerate(zip(listed[1:], request.prompts[0][1:], strict=True), 1):
            assert list(entry) == [str(token), "7", "9"][: 1 + most]
            assert (entry[str(token)]["logprob"], entry[str(token)]["rank"]) == (-1.0 * place, place + 1)
            assert most == 0 or (entry["9"]["logprob"], entry["9"]["rank"]) == (-0.5, 2)


def test_both_fields_get_their_own_number_of_likely_tokens() -> None:
    request = asking(echo=True, logprobs=0, prompt_logprobs=2, sampling=queue_pb2.Sampling(logprobs=1))
    assert request.prompt_wanted == 3
    (choice,) = answered(request)["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1] * len(request.prompts[0])
    assert all(len(entry) == 3 for entry in choice["prompt_logprobs"][1:])


def test_only_the_prompt_is_told_where_no_output_is_wanted() -> None:
    request = asking(echo=True, logprobs=1, prompt_only=True, max_tokens=1, sampling=queue_pb2.Sampling(logprobs=2))
    answer = answered(request, finish=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(request.prompts[0])
    assert answer["usage"]["completion_tokens"] == 0


def test_a_chat_has_one_list_beside_its_choices() -> None:
    answer = answered(asking(endpoint="chat", prompt_logprobs=1, prompt_texts=[]))
    assert len(answer["prompt_logprobs"]) > 1 and "prompt_logprobs" not in answer["choices"][0]


def test_missing_records_are_an_error_unless_a_deadline_ended_the_prompt() -> None:
    request = asking(echo=True, logprobs=0, prompt_logprobs=0, sampling=queue_pb2.Sampling(logprobs=1))
    short = [record(request.prompts[0], 1)[:-8]]
    with pytest.raises(ApiError, match="not whole"):
        answered(request, short)
    (choice,) = answered(request, short, finish=4)["choices"]
    assert (choice["finish_reason"], choice["logprobs"], choice["prompt_logprobs"]) == ("deadline", None, None)


def test_another_gateway_has_prompts_and_numbers() -> None:
    request = asking(echo=True, logprobs=1, prompt_logprobs=4, prompt_only=True, prompts=[list(range(300))])
    again = stored(request)
    assert again.prompts == request.prompts
    assert (again.prompt_wanted, again.prompt_logprobs, again.logprobs, again.prompt_only) == (5, 4, 1, True)
    plain = stored(asking(prompts=[list(range(300))]))
    assert (plain.prompt_wanted, plain.prompt_logprobs, len(plain.prompts[0]) < 300) == (0, None, True)


def test_choices_of_a_prompt_share_its_columns() -> None:
    request = asking(echo=True, logprobs=1, n=3, sampling=queue_pb2.Sampling(logprobs=2))
    one, *others = answered(request)["choices"]
    assert len(one["logprobs"]["tokens"]) == len(request.prompts[0]) + 1
    assert [choice["logprobs"] for choice in others] == [one["logprobs"]] * 2


def bounded(tokens: int, endpoint: str = "completions", **fields: Any) -> GenerationSpec:
    """Return the request of one prompt with so many tokens. Raise ApiError."""
    body = CompletionBody(model="m", prompt="x", **fields)
    return generation_spec(body, model(), Limits(1 << 20), endpoint, [[5] * tokens], [], 1, bool(body.echo), None)


RECORDS = {
    "one choice": (49_932, {"prompt_logprobs": 20}),
    "each choice returns them": (390, {"prompt_logprobs": 20, "n": 128}),
    "echoed by each choice": (390, {"echo": True, "logprobs": 20, "n": 128}),
    "only the best is returned": (49_932, {"prompt_logprobs": 20, "best_of": 2}),
    "one list beside the choices of a chat": (49_932, {"endpoint": "chat", "prompt_logprobs": 20, "n": 128}),
}


@pytest.mark.parametrize(("tokens", "fields"), RECORDS.values(), ids=RECORDS)
def test_records_of_an_answer_are_bounded(tokens: int, fields: dict[str, Any]) -> None:
    assert bounded(tokens, **fields).sampling.prompt_logprobs == 21
    with pytest.raises(ApiError, match=r" prompt tokens, .* would take 8.0 MiB; an answer gets at most 8"):
        bounded(tokens + 1, **fields)


@pytest.mark.parametrize(("chars", "fits"), [(1 << 17, True), ((1 << 17) + 1, False)])
def test_echoed_text_of_an_answer_is_bounded(chars: int, fits: bool) -> None:
    body = CompletionBody(model="m", prompt="x", echo=True, n=128)
    args = (body, model(), Limits(1 << 20), "completions", [[5]], ["x" * chars], 0, True, None)
    if fits:
        assert generation_spec(*args).echo
        return
    with pytest.raises(ApiError, match=r"echo would return 16777344 characters of prompts, .* at most 16777216"):
        generation_spec(*args)
