"""`/v1/responses` through the official client: whole, streamed, in the background."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.integration.conftest import OTHER, TEXT
from tests.support.gateway.process import GatewayProcess
from tests.support.stand_ins.scripted_scheduler import ERROR, Line, ScriptedScheduler
from tests.support.waiting import until


def test_items_become_the_conversation_of_a_chat(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "one "}, {"type": "input_text", "text": "two"}]},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "three", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "four"},
    ]  # fmt: skip
    chat = [
        {"role": "system", "content": "zero"}, {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "three"}, {"role": "user", "content": "four"},
    ]  # fmt: skip
    prompts = []
    for path, body in (
        ("/v1/responses", {"input": items, "instructions": "zero", "max_output_tokens": 1}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 1}),
    ):
        gateway.post(path, {"background": True, **body}).raise_for_status()
        claimed = scheduler.claim()
        prompts.append(claimed.prompts)
        scheduler.serve(claimed, [50])
    assert prompts[0] == prompts[1]


def test_failure_after_the_first_token_is_two_events(
    client: openai.OpenAI, gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    stream = client.responses.create(model=gateway.name, input="hi", stream=True)
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, [50, 51]), started=[claimed.id])
    scheduler.publish(Line(claimed.id, 2, [], finish=ERROR, error="the worker died"))
    events: list[Any] = list(stream)
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2].message == events[-1].response.error.message == "the worker died"
    scheduler.end(claimed, [[50, 51]], [ERROR])


def test_background_response_can_be_cancelled(
    client: openai.OpenAI, gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    begun = client.responses.create(model=gateway.name, input="hi", background=True)
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, [50]), started=[claimed.id])
    assert client.responses.cancel(begun.id).status == "cancelled"
    scheduler.wait_control("cancel", claimed.id)
    scheduler.end(claimed, [[50]], [3])
    until("the record has it", lambda: client.responses.retrieve(begun.id).status == "cancelled")


def test_response_is_visible_to_its_key_only(client: openai.OpenAI, gateway: GatewayProcess, answers: None) -> None:
    made = client.responses.create(model=gateway.name, input="hi", max_output_tokens=100)
    completion = client.completions.create(model=gateway.name, prompt="hi", max_tokens=100)
    assert client.responses.retrieve(made.id).output_text == TEXT
    other = client.with_options(api_key=OTHER)
    for one, response_id in ((other, made.id), (client, "resp_unknown"), (client, completion.id)):
        with pytest.raises(openai.NotFoundError):
            one.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError):
            one.responses.cancel(response_id)


def test_named_response_runs_once(client: openai.OpenAI, gateway: GatewayProcess, answers: None) -> None:
    headers = {"Idempotency-Key": "named"}
    first, again = (
        client.responses.create(model=gateway.name, input="hi", max_output_tokens=100, extra_headers=headers)
        for _ in range(2)
    )
    assert first.id == again.id
    assert first.output_text == again.output_text == TEXT
    stranger = client.with_options(api_key=OTHER).responses.create(
        model=gateway.name, input="hi", max_output_tokens=100, extra_headers=headers
    )
    assert stranger.id != first.id


def test_input_tokens_are_those_of_the_response(client: openai.OpenAI, gateway: GatewayProcess, answers: None) -> None:
    asked: dict[str, Any] = {"model": gateway.name, "instructions": "be brief", "reasoning": {"effort": "low"}}
    create, count = client.responses.create, client.responses.input_tokens.count
    first = create(input="one", max_output_tokens=100, **asked)
    second = create(input="two", max_output_tokens=100, previous_response_id=first.id, **asked)
    counted = count(input="one", **asked)
    assert first.usage is not None and second.usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    assert count(input="two", previous_response_id=first.id, **asked).input_tokens == second.usage.input_tokens
    told: Any = [{"role": "user", "content": "one"}, {"role": "assistant", "content": TEXT}]
    rest = count(previous_response_id=first.id, **asked)
    assert rest == count(input=told, **asked) and rest.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="is not stored"):
        client.with_options(api_key=OTHER).responses.input_tokens.count(previous_response_id=first.id, **asked)


def test_conversation_that_is_too_long_loses_its_first_turns(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    turns = [
        {"role": role, "content": f"{number} " + "word " * 12}
        for number in range(8)
        for role in ("user", "assistant")
        if (number, role) != (7, "assistant")
    ]
    prompts = []
    for fields in ({"input": turns, "truncation": "auto"}, {"input": turns[-3:]}):
        gateway.post("/v1/responses", {"background": True, "max_output_tokens": 1, **fields}).raise_for_status()
        claimed = scheduler.claim()
        prompts.append(claimed.prompts[0])
        scheduler.serve(claimed, [50])
    behind = len(prompts[1])
    assert len(prompts[0]) < 512 and prompts[0][-behind:] == prompts[1]
    counted = gateway.post("/v1/responses/input_tokens", {"input": turns, "truncation": "auto"}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": len(prompts[0])}
    refused = gateway.post("/v1/responses", {"input": turns, "truncation": "disabled"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
