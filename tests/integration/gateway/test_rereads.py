"""Answers that are read again: their bytes are bounded until they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from services.gateway.app import public_app
from services.gateway.delivery.response_store import RUNNING
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway
from services.gateway.openai.responses import Responses
from shared.keys import Keys
from shared.settings import GatewaySettings
from tests.integration.gateway.conftest import asgi, in_process
from tests.support.gateway import generations
from tests.support.kept_bytes import kept_bytes
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import STOP, ScriptedScheduler, answering
from tests.support.waiting import wait_until


@pytest.fixture
def scheduler(local_gateway: Gateway, redis_server: RedisServer) -> ScriptedScheduler:
    return ScriptedScheduler(redis_server.client, local_gateway.settings.keys).lead()


@asynccontextmanager
async def slow_reader(gateway: Gateway, path: str) -> AsyncIterator[None]:
    """Be a client that begins to get its answer, and reads it at the end of the block. Nothing else has room then."""
    gateway.first_model.rereads.most_bytes = 1
    begun, read = asyncio.Event(), asyncio.Event()
    status = 0

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        begun.set()
        await read.wait()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(b"host", b"localhost")], "client": None, "server": None,
    }  # fmt: skip
    async with asyncio.timeout(60):
        reading = asyncio.create_task(public_app(gateway)(scope, receive, send))
        await begun.wait()
        yield
        read.set()
        await reading
    assert status == 200


async def answer(scheduler: ScriptedScheduler, client: httpx.AsyncClient, path: str, body: Any, **more: Any) -> Any:
    """Return the answer of two tokens to a POST."""
    with answering(scheduler, lambda _: [50, 51], STOP):
        return (await client.post(path, json=body, **more)).json()


@pytest.mark.parametrize("kind", ["requests", "responses"])
async def test_answer_is_refused_while_too_many_bytes_are_on_their_way(
    local_gateway: Gateway, scheduler: ScriptedScheduler, kind: str
) -> None:
    post = {
        "requests": ("/v1/completions", {"prompt": "x"}),
        "responses": ("/v1/responses", {"input": "x"}),
    }
    client: httpx.AsyncClient = asgi(local_gateway)
    address, body = post[kind]
    made = await answer(scheduler, client, address, {"model": local_gateway.first_model.name, **body})
    path = f"/v1/{kind}/{made['id']}"
    async with slow_reader(local_gateway, path):
        refused = await client.get(path)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_answers"
    assert (await client.get(path)).status_code == 200, "alone an answer always has room"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
async def test_conversation_is_not_read_while_too_many_bytes_are_on_their_way(
    local_gateway: Gateway, scheduler: ScriptedScheduler, path: str
) -> None:
    client: httpx.AsyncClient = asgi(local_gateway)
    body = {"model": local_gateway.first_model.name, "input": "x"}
    made = await answer(scheduler, client, "/v1/responses", body)
    further = body | {"previous_response_id": made["id"]}
    async with slow_reader(local_gateway, f"/v1/responses/{made['id']}"):
        refused = await client.post(path, json=further)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (
            503, "too_many_answers", "previous_response_id",
        )  # fmt: skip
        assert error["message"].startswith("answers and conversations that are read again: too many bytes")
    with answering(scheduler, lambda _: [50, 51], STOP):
        for _ in range(2):  # each is released when it is sent
            assert (await client.post(path, json=further)).status_code == 200


async def test_refused_bytes_are_never_read_from_redis(
    local_gateway: Gateway, redis_server: RedisServer, scheduler: ScriptedScheduler
) -> None:
    def refuse(size_bytes: int) -> None:
        sizes.append(size_bytes)
        raise ApiError(503, "too many bytes")

    body, sizes = {"model": local_gateway.first_model.name, "input": "x"}, list[int]()
    made = await answer(scheduler, asgi(local_gateway), "/v1/responses", body)
    tenant = (await local_gateway.dispatcher.raw_record(made["id"]))[b"tenant"].decode()
    before = redis_server.client.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"]
    with pytest.raises(ApiError, match="too many bytes"):
        await local_gateway.first_model.responses.find(made["id"], tenant, refuse)
    assert redis_server.client.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"] == before
    assert sizes == [redis_server.client.strlen(local_gateway.settings.keys.response(made["id"]))]


@pytest.mark.parametrize("verb, path", [("DELETE", "/{id}"), ("POST", "/{id}/cancel")])
async def test_running_response_is_cancelled_while_too_much_is_read(
    local_gateway: Gateway, scheduler: ScriptedScheduler, verb: str, path: str
) -> None:
    client: httpx.AsyncClient = asgi(local_gateway)
    body = {"model": local_gateway.first_model.name, "input": "x"}
    ended = await answer(scheduler, client, "/v1/responses", body)
    running = (await client.post("/v1/responses", json=body | {"background": True})).json()
    async with slow_reader(local_gateway, f"/v1/responses/{ended['id']}"):
        response = await client.request(verb, "/v1/responses" + path.format(id=running["id"]))
        assert response.status_code == (200 if verb == "DELETE" else 503)
        assert (await local_gateway.dispatcher.raw_record(running["id"]))[b"cancelled"] == b"1"


KEYS = ["a" * 40, "b" * 40, "c" * 40]


@pytest.mark.parametrize("options", [{}, {"stream": True, "store": False}])
async def test_waiting_conversations_leave_room_for_answers_of_other_tenants(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    redis_server.client.flushall()
    (tmp_path / "keys").write_text("".join(f"{key}\n" for key in KEYS))
    settings = GatewaySettings(model=tmp_path / "m", redis_url=redis_server.url, api_key_file=tmp_path / "keys")
    scheduler = ScriptedScheduler(redis_server.client, settings.keys).lead()
    async with in_process(settings, generations.model()) as gateway, asyncio.timeout(60):
        client, body = asgi(gateway), {"model": gateway.first_model.name, "input": "x"}
        as_key = {key: {"Authorization": f"Bearer {key}"} for key in KEYS}
        made = [await answer(scheduler, client, "/v1/responses", body, headers=as_key[key]) for key in KEYS]
        monkeypatch.setattr(gateway.first_model.rereads, "most_bytes", 1)
        waiting: list[asyncio.Task[httpx.Response]] = []
        for key, before in zip(KEYS[:2], made, strict=False):
            further = {**body, **options, "previous_response_id": before["id"]}
            for _ in range(2):
                waiting.append(asyncio.create_task(client.post("/v1/responses", json=further, headers=as_key[key])))
                await wait_until(
                    lambda: (
                        any(task.done() for task in waiting)
                        or redis_server.client.hget(settings.keys.queue, "requests") == b"%d" % len(waiting)
                    )
                )
        assert not [task.result().text for task in waiting if task.done()]
        found = await client.get(f"/v1/requests/{made[2]['id']}", headers=as_key[KEYS[2]])
        assert found.status_code == 200
        with answering(scheduler, lambda _: [50, 51], STOP):
            assert [(await task).status_code for task in waiting] == [200] * 4


def held_bytes(redis_server: RedisServer, keys: Keys) -> int:
    """Return the bytes of requests that have not ended."""
    client: Any = redis_server.client
    return int(client.hget(keys.queue, "bytes")) - kept_bytes(client.xrange(keys.queue_kept))


async def test_conversation_that_waits_for_its_answer_counts_in_the_queue(
    local_gateway: Gateway, redis_server: RedisServer, scheduler: ScriptedScheduler
) -> None:
    keys, client = local_gateway.settings.keys, asgi(local_gateway)
    held = {}
    for store in (False, True):
        # A seed that is drawn does not always take as many bytes.
        body = {"model": local_gateway.first_model.name, "input": "x" * 50, "store": store, "seed": 7}
        waiting = asyncio.create_task(client.post("/v1/responses", json=body))
        async with asyncio.timeout(60):
            await wait_until(lambda: redis_server.client.hget(keys.queue, "requests") == b"1")
            held[store] = held_bytes(redis_server, keys)
            with answering(scheduler, lambda _: [50, 51], STOP):
                made = (await waiting).json()
    items = (await client.get(f"/v1/responses/{made['id']}/input_items")).json()["data"]
    assert held[True] - held[False] == len(orjson.dumps(items)) - len(b"[]") + len(b"true") - len(b"false")
    assert held_bytes(redis_server, keys) == 0


@pytest.mark.parametrize("options", [{}, {"stream": True}])
async def test_conversations_that_wait_to_be_stored_are_bounded(
    local_gateway: Gateway,
    redis_server: RedisServer,
    scheduler: ScriptedScheduler,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    keys, client = local_gateway.settings.keys, asgi(local_gateway)
    body = {"model": local_gateway.first_model.name, "input": "x"}
    ended = await answer(scheduler, client, "/v1/responses", body)
    monkeypatch.setattr(local_gateway.first_model.conversations, "most_bytes", 1)
    body, key = {**body, **options}, {"Idempotency-Key": "k"}
    waiting = [asyncio.create_task(client.post("/v1/responses", json=body, headers=key))]
    async with asyncio.timeout(60):
        await wait_until(lambda: redis_server.client.hget(keys.queue, "requests") == b"1")
        for headers in ({}, key):  # one that is sent again holds its conversation, too
            refused = await client.post("/v1/responses", json=body, headers=headers)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "too_many_answers")
            assert error["message"].startswith("conversations that wait to be stored: too many bytes are held")
            assert error["message"].endswith(", or with store false")
            assert refused.headers["retry-after"] == "1"
        path = f"/v1/responses/{ended['id']}"
        for method, at in ("GET", path), ("GET", path + "/input_items"), ("POST", path + "/cancel"), ("DELETE", path):
            assert (await client.request(method, at)).status_code == 200
        waiting.append(asyncio.create_task(client.post("/v1/responses", json={**body, "store": False})))
        await wait_until(lambda: waiting[1].done() or redis_server.client.hget(keys.queue, "requests") == b"2")
        with answering(scheduler, lambda _: [50, 51], STOP):
            assert [(await task).status_code for task in waiting] == [200, 200]
            for _ in range(2):  # each is released at its end
                assert (await client.post("/v1/responses", json=body)).status_code == 200


async def test_background_response_holds_no_conversation_once_it_is_stored(
    local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin(*args: Any, **options: Any) -> Any:
        held.append(local_gateway.first_model.conversations.held_bytes)
        return await begun(*args, **options)

    async def keep(*args: Any, **options: Any) -> Any:
        held.append(local_gateway.first_model.conversations.held_bytes)
        return await kept(*args, **options)

    ScriptedScheduler(redis_server.client, local_gateway.settings.keys).lead()
    held, begun, kept = list[int](), local_gateway.admission.begin_background, local_gateway.first_model.responses.keep
    monkeypatch.setattr(local_gateway.admission, "begin_background", begin)
    monkeypatch.setattr(local_gateway.first_model.responses, "keep", keep)
    body = {"model": local_gateway.first_model.name, "input": "x", "background": True}
    made = await asgi(local_gateway).post("/v1/responses", json=body)
    assert made.json()["store"] is True
    assert held[0] > 0 and held[1:] == [0]


async def test_conversation_and_answer_of_a_request_sent_again_are_read_at_once(
    local_gateway: Gateway, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_gateway.first_model.rereads, "most_bytes", 1)
    client: httpx.AsyncClient = asgi(local_gateway)
    body = {"model": local_gateway.first_model.name, "input": "x"}
    with answering(scheduler, lambda _: [50, 51], STOP):
        made = (await client.post("/v1/responses", json=body)).json()
        further = body | {"previous_response_id": made["id"]}
        first, again = [
            await client.post("/v1/responses", json=further, headers={"Idempotency-Key": "k"}) for _ in range(2)
        ]
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json()["id"] == again.json()["id"]


async def test_request_sent_again_is_refused_while_too_many_bytes_are_on_their_way(
    local_gateway: Gateway, scheduler: ScriptedScheduler
) -> None:
    client: httpx.AsyncClient = asgi(local_gateway)
    body, headers = {"model": local_gateway.first_model.name, "prompt": "x"}, {"Idempotency-Key": "k"}
    made = await answer(scheduler, client, "/v1/completions", body, headers=headers)
    async with slow_reader(local_gateway, f"/v1/requests/{made['id']}"):
        refused = await client.post("/v1/completions", json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_answers")
    for _ in range(2):  # each is released when it is sent
        again = await client.post("/v1/completions", json=body, headers=headers)
        assert (again.status_code, again.json()["choices"]) == (200, made["choices"])


async def test_response_alone_is_read_from_store_and_record_at_once(
    local_gateway: Gateway, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave(_responses: Responses, _id: str) -> None:
        """Leave the end of a response to its next reader."""

    monkeypatch.setattr(Responses, "store_end", leave)
    monkeypatch.setattr(local_gateway.first_model.rereads, "most_bytes", 1)
    client: httpx.AsyncClient = asgi(local_gateway)
    body = {"model": local_gateway.first_model.name, "input": "x", "background": True}
    with answering(scheduler, lambda _: [50, 51], STOP):
        made = (await client.post("/v1/responses", json=body)).json()
        async with asyncio.timeout(60):
            while (found := await client.get(f"/v1/responses/{made['id']}")).json().get("status") in RUNNING:
                pass
    assert (found.status_code, found.json()["status"]) == (200, "completed")


async def test_stored_response_of_another_tenant_is_not_counted(
    local_gateway: Gateway, scheduler: ScriptedScheduler
) -> None:
    def refuse(size_bytes: int) -> None:
        raise ApiError(503, f"{size_bytes} bytes too many")

    client: httpx.AsyncClient = asgi(local_gateway)
    made = await answer(scheduler, client, "/v1/responses", {"model": local_gateway.first_model.name, "input": "x"})
    store = local_gateway.first_model.responses
    tenant = (await local_gateway.dispatcher.raw_record(made["id"]))[b"tenant"].decode()
    assert await store.find(made["id"], "another", refuse) == (None, False)
    with pytest.raises(ApiError, match="bytes too many"):
        await store.find(made["id"], tenant, refuse)
