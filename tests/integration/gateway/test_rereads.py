"""Answers that are read again: their bytes are bounded until they are sent."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from services.gateway import admission
from services.gateway.app import public_app
from services.gateway.delivery.response_store import RUNNING
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway
from services.gateway.openai.responses import Responses
from tests.integration.gateway.conftest import asgi
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import STOP, ScriptedScheduler, answering
from tests.support.waiting import wait_until


async def slowly(app: Any, path: str, begun: asyncio.Event, read: asyncio.Event) -> int:
    """Ask as a client that reads its answer once `read` is set; return the status."""
    status = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        begun.set()
        await read.wait()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": [],
        "client": None, "server": None,
    }  # fmt: skip
    await app(scope, receive, send)
    return status


@pytest.mark.parametrize("kind", ["requests", "responses"])
async def test_answer_is_refused_while_too_many_bytes_are_on_their_way(
    local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    scheduler = ScriptedScheduler(redis_server.client, local_gateway.settings.keys).lead()
    post = {
        "requests": ("/v1/completions", {"prompt": "x"}),
        "responses": ("/v1/responses", {"input": "x"}),
    }
    client: httpx.AsyncClient = asgi(local_gateway)
    address, body = post[kind]
    with answering(scheduler, lambda _: [50, 51], STOP):
        made = (await client.post(address, json={"model": local_gateway.first.name, **body})).json()
    path = f"/v1/{kind}/{made['id']}"
    monkeypatch.setattr(admission, "REREAD_BYTES", 1)
    begun, read = asyncio.Event(), asyncio.Event()
    reading = asyncio.create_task(slowly(public_app(local_gateway), path, begun, read))
    async with asyncio.timeout(60):
        await begun.wait()
        refused = await client.get(path)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_answers"
        read.set()
        assert await reading == 200
        again = await client.get(path)
    assert again.status_code == 200, "alone an answer always has room"


@pytest.mark.parametrize("verb, path", [
    ("POST", ""), ("POST", "/input_tokens"), ("POST", "/{id}/cancel"), ("DELETE", "/{id}"),
])  # fmt: skip
async def test_conversation_is_not_read_while_too_many_bytes_are_on_their_way(
    local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, verb: str, path: str
) -> None:
    scheduler = ScriptedScheduler(redis_server.client, local_gateway.settings.keys).lead()
    client: httpx.AsyncClient = asgi(local_gateway)
    body = {"model": local_gateway.first.name, "input": "x"}
    with answering(scheduler, lambda _: [50, 51], STOP):
        made = (await client.post("/v1/responses", json=body)).json()
    further = body | {"previous_response_id": made["id"]}
    address = "/v1/responses" + path.format(id=made["id"])
    monkeypatch.setattr(admission, "REREAD_BYTES", 1)
    begun, read = asyncio.Event(), asyncio.Event()
    held = asyncio.create_task(slowly(public_app(local_gateway), f"/v1/responses/{made['id']}", begun, read))
    async with asyncio.timeout(60):
        await begun.wait()
        refused = await client.request(verb, address, json=further)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_answers")
        read.set()
        assert await held == 200
        with answering(scheduler, lambda _: [50, 51], STOP):
            for _ in range(1 if verb == "DELETE" else 2):  # each is released when it is sent
                assert (await client.request(verb, address, json=further)).status_code == 200


async def test_conversation_is_counted_until_the_answer_behind_it_is_sent(
    local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = ScriptedScheduler(redis_server.client, local_gateway.settings.keys).lead()
    client: httpx.AsyncClient = asgi(local_gateway)
    body = {"model": local_gateway.first.name, "input": "x"}
    with answering(scheduler, lambda _: [50, 51], STOP):
        made = (await client.post("/v1/responses", json=body)).json()
    monkeypatch.setattr(admission, "REREAD_BYTES", 1)
    further, queue = body | {"previous_response_id": made["id"]}, local_gateway.settings.keys.queue
    waiting = asyncio.create_task(client.post("/v1/responses", json=further))
    async with asyncio.timeout(60):
        await wait_until(lambda: redis_server.client.hget(queue, "requests") == b"1")
        refused = await client.post("/v1/responses", json=further)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_answers")
        with answering(scheduler, lambda _: [50, 51], STOP):
            assert (await waiting).status_code == 200


async def test_conversation_and_answer_of_a_request_sent_again_are_read_at_once(
    local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "REREAD_BYTES", 1)
    scheduler = ScriptedScheduler(redis_server.client, local_gateway.settings.keys).lead()
    client: httpx.AsyncClient = asgi(local_gateway)
    body = {"model": local_gateway.first.name, "input": "x"}
    with answering(scheduler, lambda _: [50, 51], STOP):
        made = (await client.post("/v1/responses", json=body)).json()
        further = body | {"previous_response_id": made["id"]}
        first, again = [
            await client.post("/v1/responses", json=further, headers={"Idempotency-Key": "k"}) for _ in range(2)
        ]
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json()["id"] == again.json()["id"]


async def test_request_sent_again_is_refused_while_too_many_bytes_are_on_their_way(
    local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = ScriptedScheduler(redis_server.client, local_gateway.settings.keys).lead()
    client: httpx.AsyncClient = asgi(local_gateway)
    body, headers = {"model": local_gateway.first.name, "prompt": "x"}, {"Idempotency-Key": "k"}
    with answering(scheduler, lambda _: [50, 51], STOP):
        made = (await client.post("/v1/completions", json=body, headers=headers)).json()
    monkeypatch.setattr(admission, "REREAD_BYTES", 1)
    begun, read = asyncio.Event(), asyncio.Event()
    path = f"/v1/requests/{made['id']}"
    reading = asyncio.create_task(slowly(public_app(local_gateway), path, begun, read))
    async with asyncio.timeout(60):
        await begun.wait()
        refused = await client.post("/v1/completions", json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_answers")
        read.set()
        assert await reading == 200
        for _ in range(2):  # each is released when it is sent
            again = await client.post("/v1/completions", json=body, headers=headers)
            assert (again.status_code, again.json()["choices"]) == (200, made["choices"])


async def test_response_alone_is_read_from_store_and_record_at_once(
    local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended(_responses: Responses, _id: str) -> None:
        """Leave the end of a response to its next reader."""

    monkeypatch.setattr(Responses, "ended", ended)
    monkeypatch.setattr(admission, "REREAD_BYTES", 1)
    scheduler = ScriptedScheduler(redis_server.client, local_gateway.settings.keys).lead()
    client: httpx.AsyncClient = asgi(local_gateway)
    body = {"model": local_gateway.first.name, "input": "x", "background": True}
    with answering(scheduler, lambda _: [50, 51], STOP):
        made = (await client.post("/v1/responses", json=body)).json()
        async with asyncio.timeout(60):
            while (found := await client.get(f"/v1/responses/{made['id']}")).json().get("status") in RUNNING:
                pass
    assert (found.status_code, found.json()["status"]) == (200, "completed")


async def test_stored_response_of_another_tenant_is_not_counted(
    local_gateway: Gateway, redis_server: RedisServer
) -> None:
    def refuse(size_bytes: int) -> None:
        raise ApiError(503, f"{size_bytes} bytes too many")

    scheduler = ScriptedScheduler(redis_server.client, local_gateway.settings.keys).lead()
    client: httpx.AsyncClient = asgi(local_gateway)
    with answering(scheduler, lambda _: [50, 51], STOP):
        made = (await client.post("/v1/responses", json={"model": local_gateway.first.name, "input": "x"})).json()
    store = local_gateway.first.responses
    tenant = (await local_gateway.dispatcher.raw_record(made["id"]))[b"tenant"].decode()
    assert await store.find(made["id"], "another", refuse) == (None, False)
    with pytest.raises(ApiError, match="bytes too many"):
        await store.find(made["id"], tenant, refuse)
