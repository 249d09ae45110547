"""Requests that are sent again: which gateway takes over, and what is cancelled. A real Redis."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import httpx
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from protos.queue_pb2 import Delivery
from services.gateway.auth import ANONYMOUS, Caller
from services.gateway.errors import ApiError, handed_over
from services.gateway.gateway import Gateway
from services.gateway.openai.bodies import CompletionBody, parse_body
from services.gateway.openai.completions import completion_spec
from services.gateway.request import VERSION, GenerationSpec
from shared import ids
from tests.integration.gateway.conftest import asgi
from tests.support import sse
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import Line, ScriptedScheduler
from tests.support.waiting import wait_until

NAMED = {"Idempotency-Key": "k"}


@pytest.fixture
def gateway(local_gateway: Gateway) -> Gateway:
    return local_gateway


@pytest.fixture
def scheduler(redis_server: RedisServer, gateway: Gateway) -> ScriptedScheduler:
    return ScriptedScheduler(redis_server.client, gateway.settings.keys)


async def named(gateway: Gateway, **fields: Any) -> GenerationSpec:
    """A request as its Idempotency-Key names it; other fields, another body."""
    name = gateway.settings.served_model_name
    raw = httpx.Request("POST", "http://x", json={"model": name, "prompt": "The", "stream": True, **fields}).content
    spec = await completion_spec(parse_body(raw, CompletionBody), gateway.first_model.text, gateway.cluster.limits)
    spec.id = ids.named_request_id("completions", ANONYMOUS, b"", "k")
    spec.body_sha256 = hashlib.sha256(raw).digest()
    return spec


async def begin(gateway: Gateway, spec: GenerationSpec, last_event: str = "") -> Any:
    return await gateway.admission.begin(spec, Caller(ANONYMOUS), 0.0, last_event)


async def test_gateway_that_drains_takes_nothing_over(gateway: Gateway) -> None:
    spec = await named(gateway)
    (await begin(gateway, spec)).close()
    gateway.admission.is_draining = True
    with pytest.raises(ApiError) as refused:
        await gateway.admission.resume(spec.id, ANONYMOUS, 0.0)
    assert refused.value.code == "shutting_down"
    assert not gateway.dispatcher.streams


async def test_orphan_adopter_yields_to_a_client_that_came_first(gateway: Gateway, redis_server: RedisServer) -> None:
    spec = await named(gateway)
    begun = await begin(gateway, spec)
    record = gateway.settings.keys.req(spec.id)
    redis_server.client.hset(record, "gateway", "gone")  # its client is here, and has not adopted it yet
    with pytest.raises(ApiError) as refused:
        await gateway.admission.adopt(spec.id, "gone")
    assert (refused.value.code, begun.stream.failure) == ("taken_over", None)
    begun.close()
    found = gateway.dispatcher.raw_record

    async def overtaken(request_id: str) -> dict[bytes, bytes]:
        answer = await found(request_id)
        redis_server.client.hset(record, "gateway", "another")  # a client has adopted it there
        return answer

    gateway.dispatcher.raw_record = overtaken  # type: ignore[method-assign]
    with pytest.raises(ApiError) as refused:
        await gateway.admission.resume(spec.id, ANONYMOUS, 0.0, left_by="gone")
    assert (refused.value.status, redis_server.client.hget(record, "gateway")) == (404, b"another")
    assert not gateway.dispatcher.streams


async def test_another_body_under_a_key_leaves_its_connection_alone(gateway: Gateway) -> None:
    first = await begin(gateway, await named(gateway))
    with pytest.raises(ApiError) as refused:
        await begin(gateway, await named(gateway, n=2))
    assert refused.value.code == "idempotency_key_reused"
    assert first.stream.failure is None
    assert gateway.dispatcher.streams == {first.spec.id: first.stream}
    again = await begin(gateway, await named(gateway))
    assert gateway.dispatcher.streams == {first.spec.id: again.stream}
    again.close()
    with pytest.raises(ApiError, match="another connection"):
        await first.next()
    first.close()  # late: the newer one is gone already
    assert "cancelled" not in await gateway.dispatcher.record(first.spec.id)


async def test_request_is_delivered_when_its_twin_was_refused(
    gateway: Gateway, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue, calls = gateway.dispatcher.scripts.enqueue, 0

    async def full_at_first(keys: Any, arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            return await enqueue(keys, arguments)
        return [
            [b"full", 1],
            *await enqueue(keys[:3] + keys[7:], arguments[:3] + arguments[23:]),
        ]  # the first of the call

    monkeypatch.setattr(gateway.dispatcher.scripts, "enqueue", full_at_first)
    specs = [await named(gateway), await named(gateway)]
    refused, second = await asyncio.gather(*(begin(gateway, spec) for spec in specs), return_exceptions=True)
    assert isinstance(refused, ApiError)
    assert not isinstance(second, BaseException)
    assert gateway.dispatcher.streams == {second.spec.id: second.stream}
    second.close()


async def test_named_request_survives_an_enqueue_without_answer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue = gateway.dispatcher.scripts.enqueue

    async def unheard(keys: Any, arguments: Any) -> Any:
        await enqueue(keys, arguments)
        raise RedisConnectionError("the answer was lost")

    spec = await named(gateway)
    with monkeypatch.context() as patch:
        patch.setattr(gateway.dispatcher.scripts, "enqueue", unheard)
        with pytest.raises(ApiError, match="does not answer"):
            await begin(gateway, spec)
    gateway.cluster.redis_error = ""
    assert "cancelled" not in await gateway.dispatcher.record(spec.id)
    (await begin(gateway, await named(gateway))).close()


async def test_existing_answer_is_delivered_while_new_work_is_refused(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    (await begin(gateway, await named(gateway))).close()

    def refuse(*_: object) -> None:
        raise ApiError(429, "it is late", code="deadline_unreachable")

    monkeypatch.setattr(gateway.admission, "admit", refuse)
    again = await begin(gateway, await named(gateway))
    assert gateway.dispatcher.streams == {again.spec.id: again.stream}
    again.close()
    other = await named(gateway)
    other.id = "cmpl-new"
    with pytest.raises(ApiError, match="it is late"):
        await begin(gateway, other)


async def test_resumed_stream_is_refused_when_its_request_was_forgotten(gateway: Gateway) -> None:
    spec = await named(gateway)
    with pytest.raises(ApiError) as refused:
        await begin(gateway, spec, f"{spec.id}:3")
    assert refused.value.code == "request_not_found"
    assert not await gateway.dispatcher.record(spec.id)


def told(answer: httpx.Response) -> str:
    """Return the text of a stream of a chat or of Messages, however its events cut it."""
    events = [event.json for event in sse.parse(answer.content) if event.data != "[DONE]"]
    pieces = [event.get("delta", {}).get("text", "") for event in events]
    pieces += [choice["delta"].get("content", "") for event in events for choice in event.get("choices", ())]
    return "".join(pieces)


async def test_record_of_another_version_is_refused_and_stays_for_other_gateways(
    gateway: Gateway, scheduler: ScriptedScheduler, redis_server: RedisServer
) -> None:
    scheduler.lead()
    name = gateway.settings.served_model_name
    body = {"model": name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    async with asgi(gateway) as client:
        for path in ("/v1/chat/completions", "/v1/messages"):
            asking = asyncio.create_task(client.post(path, json={**body, "stream": True}))
            claimed = await asyncio.to_thread(scheduler.claim)
            scheduler.serve(claimed, [50, 51, 52])
            first = await asking
            record, stream = gateway.settings.keys.req(claimed.id), f"/v1/requests/{claimed.id}/stream"
            stored = Delivery.FromString(redis_server.client.hget(record, "delivery"))
            assert stored.version == VERSION
            stored.version, stored.reasoning = VERSION + 1, "a state of later"
            redis_server.client.hset(record, "delivery", stored.SerializeToString())
            refused = [await client.get(asked) for asked in (stream, stream.removesuffix("/stream"))]
            assert [answer.status_code for answer in refused] == [503, 503]
            assert all(f"version {VERSION + 1}, but" in answer.text and "0 to 1" in answer.text for answer in refused)
            assert redis_server.client.hget(record, "delivery") == stored.SerializeToString()
            stored.version, stored.reasoning = 0, ""  # of a gateway from before there were versions
            redis_server.client.hset(record, "delivery", stored.SerializeToString())
            again = await client.get(stream)
            assert (again.status_code, told(again)) == (200, told(first)) and told(first)
    assert not gateway.letters.take(), "the record is not broken"


async def test_answer_without_stream_is_complete_despite_last_event_id(
    gateway: Gateway, scheduler: ScriptedScheduler
) -> None:
    scheduler.lead()
    body = {"model": gateway.settings.served_model_name, "prompt": "The", "return_token_ids": True}
    async with asgi(gateway) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=body, headers=NAMED))
        claimed = await asyncio.to_thread(scheduler.claim)
        scheduler.serve(claimed, [50, 51, 52])
        first = await asking
        headers = {**NAMED, "Last-Event-ID": f"{claimed.id}:1"}
        again = await client.post("/v1/completions", json=body, headers=headers)
    assert first.json()["choices"][0]["token_ids"] == [50, 51, 52]
    assert again.content == first.content


async def test_tokens_of_a_handed_over_request_stay_in_redis(
    gateway: Gateway, scheduler: ScriptedScheduler, redis_server: RedisServer
) -> None:
    scheduler.lead()
    running = await begin(gateway, await named(gateway))
    claimed = await asyncio.to_thread(scheduler.claim)
    scheduler.publish(Line(claimed.id, 0, [50]))
    await running.next()
    running.stream.fail(handed_over(claimed.id), is_cut=True)
    running.close()
    await gateway.dispatcher.stop()
    assert redis_server.client.xlen(gateway.settings.keys.tokens(gateway.id)) == 1


async def test_expired_record_is_not_kept_by_its_cached_tokens(
    gateway: Gateway, scheduler: ScriptedScheduler, redis_server: RedisServer
) -> None:
    spec = await named(gateway)
    begun = await begin(gateway, spec)
    key = gateway.settings.keys.req(spec.id)
    assert await asyncio.to_thread(scheduler.lead().claim)
    redis_server.client.delete(key)
    scheduler.publish(Line(spec.id, 0, [50], cached=3))
    await wait_until(lambda: redis_server.client.ttl(key) > 0)
    assert redis_server.client.hgetall(key) == {b"cached:0": b"3"}
    scheduler.publish(Line(spec.id, 9, [52]))  # a gap, so the record is read
    with pytest.raises(ApiError) as caught:
        while True:
            await begun.next(timeout_s=60)
    assert caught.value.code == "record_lost"
    begun.close()
