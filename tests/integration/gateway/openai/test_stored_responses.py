"""Stored responses: one goes on from another, they are deleted, and their bytes in Redis stay within a bound."""

from __future__ import annotations

from typing import Any

import openai
import orjson
import pytest

from services.gateway.delivery.response_store import ResponseStore, StoreOutcome
from services.gateway.gateway import Gateway
from shared.text import bounded_json
from tests.integration.conftest import OTHER, TEXT
from tests.integration.gateway.conftest import asgi
from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway.process import GatewayProcess
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import STOP, Line, ScriptedScheduler, answering
from tests.support.waiting import until


def respond(client: openai.OpenAI, gateway: GatewayProcess, text: str = "hi", **fields: Any) -> Any:
    return client.responses.create(model=gateway.name, input=text, max_output_tokens=100, **fields)


def texts_before(client: openai.OpenAI, response_id: str, **fields: Any) -> list[str]:
    """Return the text of each item before a response; the client turns the pages."""
    items: Any = client.responses.input_items.list(response_id, **fields)
    return [item.content[0].text for item in items]


def test_response_goes_on_from_an_earlier_one(
    client: openai.OpenAI, gateway: GatewayProcess, scheduler: ScriptedScheduler, answers: None
) -> None:
    first = respond(client, gateway, "one", instructions="only here")
    assert first.store is True
    second = respond(client, gateway, "two", previous_response_id=first.id)
    third = respond(client, gateway, "three", previous_response_id=second.id)
    assert second.previous_response_id == first.id
    told: Any = [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "two"}, {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "three"},
    ]  # fmt: skip
    chat = client.chat.completions.create(model=gateway.name, messages=told, max_tokens=100)
    assert chat.usage is not None and scheduler.claimed(third.id).prompts == scheduler.claimed(chat.id).prompts
    assert third.usage.input_tokens == chat.usage.prompt_tokens > second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("why", ["unknown", "not stored", "deleted", "of another key"])
def test_response_that_is_not_stored_cannot_be_gone_on_from(
    client: openai.OpenAI, gateway: GatewayProcess, answers: None, why: str
) -> None:
    name, asking = "resp_0", client
    if why != "unknown":
        name = respond(client, gateway, store=why != "not stored").id
    if why == "deleted":
        client.responses.delete(name)
    if why == "of another key":
        asking = client.with_options(api_key=OTHER)
    with pytest.raises(openai.BadRequestError) as refused:
        respond(asking, gateway, previous_response_id=name)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
    assert "send the conversation as input" in refused.value.message


@pytest.mark.parametrize(
    ("count", "size", "is_stored"), [(6, 10, True), (7, 10, False), (1, 20, True), (1, 120, False)]
)
async def test_long_conversation_is_not_stored(
    local_gateway: Gateway,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    size: int,
    is_stored: bool,
) -> None:
    """It is parsed on the event loop whenever it is read. An item has three objects and lists, one is around all."""
    monkeypatch.setattr(bounded_json, "MAX_CONTAINERS", 20)
    most_bytes = 1000 if count > 1 else 100
    scheduler = ScriptedScheduler(redis_server.client, local_gateway.settings.keys).lead()
    items = [{"role": "user", "content": "x" * size}] * count
    body = {"model": local_gateway.first_model.name, "input": items}
    async with asgi(local_gateway) as client:
        monkeypatch.setattr(local_gateway.settings, "max_body_bytes", most_bytes)  # of later applications
        with answering(scheduler, lambda _: [50, 51], STOP):
            made = (await client.post("/v1/responses", json=body)).json()
    assert made["store"] is is_stored
    assert redis_server.client.exists(local_gateway.settings.keys.response(made["id"])) == is_stored


def test_response_without_its_end_cannot_be_gone_on_from(
    client: openai.OpenAI, gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    begun = respond(client, gateway, background=True)
    claimed = scheduler.claim()
    with pytest.raises(openai.BadRequestError, match="its status is queued; wait for its end"):
        respond(client, gateway, previous_response_id=begun.id)
    scheduler.serve(claimed, token_ids(TEXT))


def test_deleted_response_is_gone_though_its_record_lives(
    client: openai.OpenAI, gateway: GatewayProcess, answers: None, redis_server: RedisServer
) -> None:
    made = respond(client, gateway)
    other = client.with_options(api_key=OTHER)
    with pytest.raises(openai.NotFoundError):
        other.responses.delete(made.id)
    client.responses.delete(made.id)
    assert redis_server.client.exists(gateway.keys.req(made.id))
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_deleting_a_running_response_cancels_it(
    client: openai.OpenAI, gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    begun = respond(client, gateway, background=True)
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, [50]), started=[claimed.id])
    client.responses.delete(begun.id)
    scheduler.wait_control("cancel", claimed.id)
    scheduler.end(claimed, [[50]], [3])
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_background_response_is_stored_at_its_end_without_a_reader(
    client: openai.OpenAI, gateway: GatewayProcess, scheduler: ScriptedScheduler, redis_server: RedisServer
) -> None:
    begun = respond(client, gateway, background=True, instructions="be brief")
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    claimed = scheduler.claim()
    assert claimed.id == begun.id
    tokens = token_ids(TEXT)
    scheduler.publish(Line(claimed.id, 0, tokens[:1]), started=[claimed.id])
    assert client.responses.retrieve(begun.id).status == "in_progress"
    scheduler.publish(Line(claimed.id, 0, tokens, finish=STOP))
    scheduler.end(claimed, [tokens], [STOP])
    usage = client.responses.retrieve(begun.id).usage
    assert usage is not None and usage.output_tokens == len(tokens)
    stored = gateway.keys.response(begun.id)
    until("the end is stored", lambda: b'"completed"' in (redis_server.client.get(stored) or b""))
    redis_server.client.delete(gateway.keys.req(begun.id))  # as five minutes later
    found = client.responses.retrieve(begun.id)
    assert (found.status, found.output_text, found.instructions, found.background) == (
        "completed", TEXT, "be brief", True,
    )  # fmt: skip


def test_repeated_background_call_of_one_name_leaves_what_is_stored(
    client: openai.OpenAI, gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    headers = {"Idempotency-Key": "stored-once"}
    begun = respond(client, gateway, background=True, extra_headers=headers)
    scheduler.serve(scheduler.claim(), token_ids(TEXT))
    until("the end is stored", lambda: client.responses.retrieve(begun.id).status == "incomplete")
    again = respond(client, gateway, background=True, extra_headers=headers)
    assert again.id == begun.id and again.store
    with pytest.raises(openai.ConflictError):
        respond(client, gateway, "another body", background=True, extra_headers=headers)
    assert texts_before(client, begun.id) == ["hi"]
    assert client.responses.retrieve(begun.id).output_text == TEXT


def test_items_before_a_response_come_in_pages(client: openai.OpenAI, gateway: GatewayProcess, answers: None) -> None:
    first = respond(client, gateway, "one")
    second = respond(client, gateway, "two", previous_response_id=first.id)
    page: Any = client.responses.input_items.list(second.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["two", TEXT]
    assert page.has_more
    assert texts_before(client, second.id, limit=2, order="asc") == ["one", TEXT, "two"]
    turns = [("user", "one"), ("assistant", "yes"), ("developer", ""), ("user", "two")]
    texts: Any = [{"id": None, "type": None, "role": role, "content": text} for role, text in turns]
    third = client.responses.create(model=gateway.name, input=texts)
    items: Any = client.responses.input_items.list(third.id, order="asc").data
    assert all(item.id and item.type == "message" for item in items)
    kinds = ["input_text", "output_text", "input_text", "input_text"]
    assert [(item.content[0].type, item.content[0].text) for item in items] == [
        (kind, text) for kind, (_, text) in zip(kinds, turns, strict=True)
    ]
    fourth: Any = client.responses.create(model=gateway.name, input="so", previous_response_id=third.id)
    said = [*texts, {"role": "assistant", "content": third.output_text}, {"role": "user", "content": "so"}]
    whole: Any = client.responses.create(model=gateway.name, input=said, store=False)
    assert fourth.usage.input_tokens == whole.usage.input_tokens
    answer = gateway.get(f"/v1/responses/{second.id}/input_items?after=nothing")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


STATELESS = b'{"tenant": "t", "response": {"id": "resp_1", "status": "completed", "output": []}, "input": []}'


@pytest.mark.parametrize("junk", [b"{", b'{"tenant": 1}', b"\xff", STATELESS, "a list"])
def test_broken_stored_response_is_set_aside(
    client: openai.OpenAI, gateway: GatewayProcess, answers: None, redis_server: RedisServer, junk: bytes | str
) -> None:
    made = respond(client, gateway)
    key = gateway.keys.response(made.id)
    redis_server.client.delete(key)
    if isinstance(junk, bytes):
        redis_server.client.set(key, junk)
    else:
        redis_server.client.rpush(key, junk)
    until("the record has the answer", lambda: client.responses.retrieve(made.id).output_text == TEXT)
    with pytest.raises(openai.BadRequestError):
        respond(client, gateway, previous_response_id=made.id)
    assert gateway.metric("orcinus_gateway_unreadable_records_total") >= 1


def test_response_that_redis_does_not_take_is_answered(
    client: openai.OpenAI, gateway: GatewayProcess, answers: None, redis_server: RedisServer
) -> None:
    index = gateway.keys.responses
    redis_server.client.delete(index)
    redis_server.client.set(index, "of another type")
    try:
        made = respond(client, gateway)
        assert (made.output_text, made.store) == (TEXT, False)
    finally:
        redis_server.client.delete(index)


@pytest.mark.parametrize(
    ("tenant_bytes", "left"), [(0, ["resp_2", "resp_3"]), (3000, ["resp_3"]), (9000, ["resp_1", "resp_2", "resp_3"])]
)
async def test_bytes_of_a_tenant_are_a_setting(local_gateway: Gateway, tenant_bytes: int, left: list[str]) -> None:
    bounds = {"stored_response_bytes": 10_000, "tenant_response_bytes": tenant_bytes}
    store = ResponseStore(local_gateway.settings.model_copy(update=bounds), local_gateway.models.first_model.dispatcher)
    names = ["resp_1", "resp_2", "resp_3"]
    for name in names:
        response = {"id": name, "status": "completed", "store": True, "output": []}
        assert await store.keep("a", orjson.dumps([{"text": "x" * 1900}]), response) is StoreOutcome.NEW
    assert [name for name in names if (await store.find(name, "a"))[0] is not None] == left
    await store.close()
