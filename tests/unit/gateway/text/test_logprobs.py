"""Log-probabilities on their way to the client: OpenAI's forms, in step with the text, however rows were cut."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import queue_pb2
from services.gateway.delivery.stream import RequestStream, Row, rows_of
from services.gateway.errors import ApiError
from services.gateway.openai.answers import answer, answer_body
from services.gateway.openai.bodies import (
    ChatBody,
    CompletionBody,
    check_records,
    requested_choices,
    requested_logprobs,
)
from services.gateway.request import GenerationSpec
from services.gateway.text.logprobs import AT_ONCE as LOGPROBS_AT_ONCE
from shared.text.logprobs import MAX_LOGPROBS, TokenLogprobs, pack_record, record_bytes, split_records, unpack_records
from shared.wire.columns import pack
from tests.support.gateway.generations import CUTS, generation, model, rows, spec, stored, streamed

TEXT = "a naïve 🐙, quick fox."  # the octopus is several tokens


def asking(logprobs: int | None, **changes: Any) -> GenerationSpec:
    wanted = 1 if logprobs is None else logprobs + 1
    return spec(logprobs=logprobs, sampling=queue_pb2.Sampling(logprobs=wanted), **changes)


def record(index: int, token: int, most: int) -> bytes:
    """Of a token at an index: made up, but each its own; the sampled one is the second best of two or more."""
    others = [(token + step) % 400 for step in range(1, most)]
    ids = np.array(([others[0], token, *others[1:]] if most > 1 else [token])[:most], np.int32)
    values = -np.arange(most, dtype=np.float32) - np.float32(index / 16)
    return pack_record(float(values[1] if most > 1 else -index / 16), ids, values)


def row(request: GenerationSpec, first: int, tokens: list[int], finish: int = 0, choice: int = 0) -> Row:
    most = request.sampling.logprobs - 1
    records = b"".join(record(first + at, token, most) for at, token in enumerate(tokens))
    return Row(choice, tokens, finish, logprobs=records)


def choices_of(
    request: GenerationSpec, pieces: list[list[int]], had: str = ""
) -> tuple[list[dict[str, Any]], list[str]]:
    """The choices of all events, one delivery a piece, and the events' ids; from the event `had` on."""
    places = itertools.accumulate(map(len, pieces), initial=0)
    sent = [(row(request, first, piece), first) for piece, first in zip(pieces, places, strict=False)]
    sent[-1][0].finish = 2
    events = streamed(request, sent, had=had)[:-1]
    return [event.json["choices"][0] for event in events], [event.id for event in events]


def entries(events: list[dict[str, Any]]) -> list[Any]:
    """What all events tell of tokens, one entry each."""
    told: list[Any] = []
    for choice in events:
        logprobs = choice["logprobs"] or {"content": []}
        if "content" in logprobs:
            told += logprobs["content"]
        else:
            columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            told += zip(*(logprobs[name] for name in columns), strict=True)
    return told


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


def test_logprob_record_round_trips_and_drops_padding_ids() -> None:
    made = pack_record(-0.5, np.array([7, -1, 3]), np.array([-2.0, -np.inf, -2.0], np.float32))
    assert len(made) == record_bytes(4) == 28
    assert unpack_records(made * 2, 4) == [TokenLogprobs(-0.5, [(3, -2.0), (7, -2.0)])] * 2
    assert unpack_records(pack_record(-1.5, np.zeros(0), np.zeros(0)), 1) == [TokenLogprobs(-1.5, [])]
    assert len(pack_record(0, np.arange(MAX_LOGPROBS), np.zeros(MAX_LOGPROBS))) == record_bytes(MAX_LOGPROBS + 1)
    with pytest.raises(ValueError, match="log-probabilities: 5 bytes in 2 rows do not fit 3"):
        split_records(b"12345", np.array([1, 4], np.int32), 3)


def test_rows_of_a_batch_carry_the_logprobs_requested() -> None:
    batch = queue_pb2.TokenBatch(
        requests=["a", "b", "c"], choices=pack([0, 1, 0]), first=pack([4, 5, 6]), counts=pack([2, 1, 0]),
        tokens=pack([11, 12, 13]), finish=bytes([0, 2, 3]), logprobs=b"aaaaAAAA", logprob_sizes=pack([8, 0, 0]),
    )  # fmt: skip
    found = [(request, first, found.tokens, found.logprobs) for request, first, found in rows_of(batch)]
    assert found == [("a", 4, [11, 12], b"aaaaAAAA"), ("b", 5, [13], b""), ("c", 6, [], b"")]


def test_overlapping_row_keeps_the_logprobs_of_new_tokens() -> None:
    request = asking(2)
    stream = RequestStream(request.id, 1, record_bytes=request.record_bytes)
    stream.offer(row(request, 0, [9, 8]), 0)
    stream.offer(row(request, 1, [8, 7, 6]), 1)
    first, second = asyncio.run(stream.take())
    assert (second.tokens, second.logprobs) == ([7, 6], record(2, 7, 2) + record(3, 6, 2))
    assert len(first.logprobs) == 2 * request.record_bytes


@given(CUTS, st.lists(st.sampled_from([".", "fox", "e 🐙", ","]), max_size=2), st.sampled_from(["chat", "completions"]))
@settings(max_examples=40, deadline=None)
def test_events_carry_each_tokens_logprobs_once_and_resume_anywhere(
    cuts: list[int], stop: list[str], endpoint: str
) -> None:
    tokens = model().encode(TEXT)
    request = asking(3, stop=stop, endpoint=endpoint)
    whole, _ = choices_of(request, [tokens])
    events, ids = choices_of(request, rows(tokens, cuts))
    assert entries(events) == entries(whole)
    told, text = b"", ""
    for choice in events:
        found = choice["logprobs"] or {}
        told += b"".join(bytes(one["bytes"]) for one in found.get("content", []))
        text += text_of(choice)
        if endpoint == "chat":
            assert told.decode("utf-8", "ignore").startswith(text), "no text without the tokens that it is made of"
    for at, had in enumerate(ids):
        rest, _ = choices_of(request, [tokens], had)  # all at once, as the record gives it
        assert entries(events[: at + 1]) + entries(rest) == entries(events)
        assert "".join(map(text_of, events[: at + 1] + rest)) == text


def test_chat_logprobs_have_openais_form_with_bytes() -> None:
    tokens = model().encode(TEXT)
    request = asking(2, endpoint="chat")
    (choice,) = finished(request, [tokens])["choices"]
    told = choice["logprobs"]
    assert told["refusal"] is None and len(told["content"]) == len(tokens)
    assert b"".join(bytes(one["bytes"]) for one in told["content"]).decode() == TEXT
    for index, (token, one) in enumerate(zip(tokens, told["content"], strict=True)):
        other, own = one["top_logprobs"]
        assert own == {name: one[name] for name in ("token", "logprob", "bytes")}
        assert (one["logprob"], other["logprob"]) == (-1 - index / 16, -index / 16)
        assert one["token"] == bytes(one["bytes"]).decode("utf-8", "replace")
        assert bytes(one["bytes"]) == model().text.piece(token)
    assert any("\ufffd" in one["token"] for one in told["content"]), "the octopus is several tokens"


def test_completion_logprobs_have_openais_columns_and_text_offsets() -> None:
    tokens = model().encode(TEXT)
    (choice,) = finished(asking(1), [tokens])["choices"]
    told = choice["logprobs"]
    assert len(told["tokens"]) == len(tokens) and "bytes:\\x20\\xf0\\x9f" in told["tokens"]
    for at, (token, offset) in enumerate(zip(told["tokens"], told["text_offset"], strict=True)):
        assert offset == len(model().text.decode(tokens[:at]).rstrip("\ufffd"))
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert told["top_logprobs"][3] == {told["tokens"][3]: -3 / 16} and told["token_logprobs"][3] == -3 / 16
    (none,) = finished(asking(0), [tokens])["choices"]
    assert none["logprobs"]["top_logprobs"] == [{token: value} for token, value in zip(
        none["logprobs"]["tokens"], none["logprobs"]["token_logprobs"], strict=True)]  # fmt: skip


def test_sampled_token_stands_beside_the_best_and_infinity_is_finite() -> None:
    request = asking(2)
    rounded = pack_record(-0.2500001, np.array([50, 60]), np.array([-0.25, -1.0], np.float32))
    (entry,) = finished(asking(2, endpoint="chat"), [[50]], rounded)["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -0.25
    made = pack_record(-np.inf, np.array([60, 9999]), np.array([-0.25, -1.0], np.float32))
    told = finished(request, [[50]], made)["choices"][0]["logprobs"]
    text = model().text
    assert told["token_logprobs"] == [-9999.0]
    assert told["top_logprobs"] == [
        {text.piece(60).decode(): -0.25, "token_id:9999": -1.0, text.piece(50).decode(): -9999.0}
    ]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_whole_answer_is_made_of_a_few_logprobs_a_turn(endpoint: str) -> None:
    request = asking(MAX_LOGPROBS, endpoint=endpoint, stream=False, n=2)
    tokens = [2 + at % 300 for at in range(3 * LOGPROBS_AT_ONCE // (MAX_LOGPROBS + 1) + 5)]

    async def read() -> tuple[dict[str, Any], int]:
        running, stream, _ = generation(request)
        for choice in range(2):
            stream.offer(row(request, 0, tokens, 2, choice), 0)
        working = asyncio.create_task(answer_body(running, "fp"))
        turns = 0
        while not working.done():
            turns += 1
            await asyncio.sleep(0)
        return orjson.loads(orjson.dumps(working.result())), turns

    body, turns = asyncio.run(read())
    for choice in body["choices"]:
        told = entries([choice])
        assert told == entries(choices_of(request, [[token] for token in tokens])[0])
    assert turns >= 2 * len(tokens) * (MAX_LOGPROBS + 1) // LOGPROBS_AT_ONCE


def test_best_of_returns_highest_means_and_counts_all_tokens() -> None:
    request = asking(None, n=4, keep=2, prompts=[[50], [51]], return_token_ids=True)
    outputs = [[9], [9, 8], [9, 8, 7], [9], [9, 8, 7, 6], [8], [7, 7], [6, 6, 6]]
    means = [-2.0, -1.0, -1.5, -1.0, -4.0, -3.0, -2.0, -2.5]
    body = finished(request, outputs, means=means)
    assert [choice["token_ids"] for choice in body["choices"]] == [[9, 8], [9], [7, 7], [6, 6, 6]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in body["choices"]] == [None] * 4
    assert body["usage"]["completion_tokens"] == sum(map(len, outputs))


def test_delivery_record_keeps_logprobs_and_best_of() -> None:
    request = asking(5, n=3, keep=2, continuous_usage=True)
    again = stored(request)
    assert (again.logprobs, again.keep, again.continuous_usage) == (5, 2, True)
    assert again.record_bytes == request.record_bytes == record_bytes(6)
    again = stored(asking(None, n=3, keep=2))
    assert (again.logprobs, again.record_bytes) == (None, 4)
    assert stored(spec()).record_bytes == 0


def test_continuous_usage_counts_tokens_so_far_in_every_event() -> None:
    sent = [(Row(0, [token]), first) for first, token in enumerate(model().encode("a fox"))]
    *events, _, _ = streamed(spec(include_usage=True, continuous_usage=True), sent)  # but the whole usage at the end
    seen = [event.json["usage"] for event in events]
    assert [usage["completion_tokens"] for usage in seen] == list(range(1, len(seen) + 1))
    assert all(usage["total_tokens"] == usage["completion_tokens"] + 1 for usage in seen)


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"model": "m", "prompt": "x", **fields})


@pytest.mark.parametrize(
    ("check", "body", "wanted"),
    [
        (requested_logprobs, chat(), None),
        (requested_logprobs, chat(top_logprobs=0), None),
        (requested_logprobs, chat(logprobs=True), 0),
        (requested_logprobs, chat(logprobs=True, top_logprobs=20), 20),
        (requested_logprobs, completion(), None),
        (requested_logprobs, completion(logprobs=0), 0),
        (requested_choices, completion(n=2), (2, 0)),
        (requested_choices, completion(n=2, best_of=2), (2, 0)),
        (requested_choices, completion(n=2, best_of=5), (5, 2)),  # of which two are kept
    ],
)
def test_requested_logprobs_and_choices_are_those_of_the_body(check: Any, body: Any, wanted: Any) -> None:
    assert check(body) == wanted


def test_logprobs_too_large_for_redis_are_refused_with_figures() -> None:
    check_records(100, 4000, 21)
    check_records(128, 32768, 1)
    with pytest.raises(ApiError) as refused:
        check_records(128, 4000, 21)
    assert refused.value.param == "logprobs" and "128 choices x 4000 tokens may take 80 MiB" in refused.value.message


def finished(
    request: GenerationSpec, outputs: list[list[int]], made: bytes = b"", means: list[float] | None = None
) -> dict[str, Any]:
    """The whole answer to outputs, one for each choice; `made`: the records instead of row()'s."""
    running, stream, _ = generation(request)
    for choice, tokens in enumerate(outputs):
        told = row(request, 0, tokens, 2, choice)
        told.logprobs = made or told.logprobs
        if means is not None:
            told.logprobs = np.full(len(tokens), means[choice], "<f4").tobytes()
        stream.offer(told, 0)

    deltas = sorted(asyncio.run(running.next(0)), key=lambda delta: delta.choice)
    texts, reasons = [delta.text for delta in deltas], ["length"] * len(outputs)
    made_of = answer(request, "fp", texts, outputs, reasons, running.usage, running.logprobs)
    body: dict[str, Any] = orjson.loads(orjson.dumps(made_of))
    return body
