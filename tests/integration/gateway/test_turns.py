"""A crowd of requests at one gateway: what is decided before a body is checked and turned into tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
from redis.exceptions import ResponseError
from starlette.types import Message

from services.gateway import admission, request
from services.gateway.admission import TURNS, Turns
from services.gateway.app import public_app
from services.gateway.auth import ANONYMOUS, Caller
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway
from services.gateway.openai import completions
from services.gateway.request import THREADS, Arrival
from shared.keys import GROUP, Keys
from tests.integration.gateway.conftest import asgi
from tests.support.gateway.process import GatewayProcess
from tests.support.stack import PLAIN, RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler
from tests.support.waiting import until, wait_until

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
LATE = {"prefill_tok_s": 100, "queued_tokens_normal": 4000, "predicted_ttft_ms_normal": 40_000}


def body(gateway: Gateway, priority: str, **more: Any) -> dict[str, Any]:
    name = gateway.settings.served_model_name
    return {"model": name, "prompt": [5] * 4, "max_tokens": 1, "priority": priority, "background": True, **more}


async def sent(gateway: Gateway, *bodies: dict[str, Any]) -> list[httpx.Response]:
    async with asgi(gateway) as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=each) for each in bodies))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the requests that have begun, in order."""
    found: list[str] = []

    async def noting(body: Any, *given: Any, **named: Any) -> Any:
        found.append(body.priority)
        return await real(body, *given, **named)

    real = completions.completion_spec
    monkeypatch.setattr(completions, "completion_spec", noting)
    return found


async def test_realtime_chat_is_encoded_before_a_crowd_of_low(
    local_gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, go = local_gateway.first_model.text, threading.Event()
    encode, run = model.chat.encode, model.threads.run
    encoded: list[str] = []
    asked: list[str] = []

    def blocked(messages: list[dict[str, Any]], *given: Any) -> Any:
        encoded.append(messages[0]["content"][:8])
        go.wait(300)
        return encode(messages, *given)

    async def noted(*given: Any) -> Any:
        asked.append("")
        return await run(*given)

    monkeypatch.setattr(model.chat, "encode", blocked)
    monkeypatch.setattr(model.threads, "run", noted)
    body = {"model": local_gateway.first_model.name, "max_tokens": 1, "background": True}
    low = {**body, "priority": "low", "messages": [{"role": "user", "content": "low     " + "x " * 20_000}]}
    urgent = {**body, "priority": "realtime", "messages": [{"role": "user", "content": "realtime"}]}
    tasks: list[asyncio.Task[httpx.Response]] = []

    def are_asked() -> bool:
        return len(asked) == len(tasks)

    async with asgi(local_gateway) as client, asyncio.timeout(120):
        try:
            for crowd in ([low] * 3 * THREADS, [urgent]):
                tasks += [asyncio.create_task(client.post("/v1/chat/completions", json=one)) for one in crowd]
                await wait_until(are_asked)
        finally:
            go.set()
        await asyncio.gather(*tasks)
    assert encoded.index("realtime") < 2 * THREADS, "those at work end first"
    assert len(encoded) == len(tasks)


@contextlib.asynccontextmanager
async def crowded_threads(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Let as much work wait for threads as class normal may."""
    monkeypatch.setattr(request, "THREADS", 1)
    go, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(300)

    async def hold() -> None:
        request.ARRIVAL.set(Arrival(ANONYMOUS, False, "normal", 0, 0, 0.0))
        await gateway.first_model.text.threads.run(work)

    most = int(request.CLASS_SHARES["normal"] * request.TURN_REQUESTS)
    held = [asyncio.create_task(hold()) for _ in range(1 + most)]
    await wait_until(begun.is_set)
    try:
        yield
    finally:
        go.set()
        await asyncio.gather(*held)


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize"],
)
async def test_chat_behind_a_crowd_of_chats_is_429(
    local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    ScriptedScheduler(redis_server.client, local_gateway.settings.keys).stats(prefill_tok_s=1, queued_tokens_normal=1)
    await wait_until(lambda: local_gateway.cluster.snapshot is not None and local_gateway.cluster.snapshot.drain_tok_s)
    waits = []
    async with crowded_threads(local_gateway, monkeypatch), asgi(local_gateway) as client, asyncio.timeout(60):
        for words in ("x", "y", "z"):
            message = {"role": "user", "content": words}
            body: dict[str, Any] = {"model": local_gateway.first_model.name, "messages": [message]}
            if path.startswith("/v1/responses"):
                body["input"] = body.pop("messages")
            elif "token" not in path:
                body["max_tokens"] = 1
            answer = await client.post(path, json=body)
            assert answer.status_code == 429, answer.text
            assert "are waiting for a thread for their texts" in answer.json()["error"]["message"]
            waits.append(int(answer.headers["retry-after"]))
    if "token" in path:  # no work for the queue
        assert waits == [1, 1, 1]
    else:
        assert waits == sorted(set(waits)), "each has its place behind the last"


def occupy(client: Any, keys: Keys) -> None:
    """Let another shard run a request: counts of a queue without any are not believed."""
    stream = keys.requests("low")
    with contextlib.suppress(ResponseError):
        client.xgroup_create(stream, GROUP, id="0", mkstream=True)
    client.xadd(stream, {"r": b""})
    client.xreadgroup(GROUP, "another", {stream: ">"})


async def fill(gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let as many tokens wait as class low may have, at a rate that has room for a request at once."""
    occupy(redis_server.client, gateway.settings.keys)
    redis_server.client.hset(gateway.settings.keys.queue, "tokens", 1_000_000)
    ScriptedScheduler(redis_server.client, gateway.settings.keys).stats(prefill_tok_s=1_000_000)
    await wait_until(lambda: gateway.cluster.snapshot is not None and gateway.cluster.snapshot.drain_tok_s)
    monkeypatch.setattr(admission, "AGAIN_S", 0.0)


async def test_copies_of_one_placed_body_have_one_place(
    local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(local_gateway, redis_server, monkeypatch)
    copy = body(local_gateway, "low")
    (first,) = await sent(local_gateway, copy)
    assert (first.status_code, first.headers["retry-after"]) == (429, "1")
    answers = await sent(local_gateway, *[copy] * 3)
    assert sorted(answer.status_code for answer in answers) == [202, 429, 429]


async def test_place_lets_its_request_in_once(
    local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(local_gateway, redis_server, monkeypatch)
    copy = body(local_gateway, "low")
    answers = [(await sent(local_gateway, copy))[0] for _ in range(3)]
    assert [answer.status_code for answer in answers] == [429, 202, 429]


async def test_requests_that_wait_for_their_turn_are_active(local_gateway: Gateway) -> None:
    arrival = Arrival.of({}, b"{}", Caller("t"), 0.0)
    waiting = [asyncio.create_task(local_gateway.turns.wait(arrival)) for _ in range(TURNS + 3)]
    await asyncio.sleep(0)
    (gauge,) = local_gateway.metrics.active.collect()
    assert gauge.samples[0].value == 3
    await asyncio.gather(*waiting)


async def test_named_request_in_a_crowd_may_come_again_as_soon_as_there_is_room(
    local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be queued already, so its work has no place behind that of others."""
    ScriptedScheduler(redis_server.client, local_gateway.settings.keys).stats(prefill_tok_s=1, queued_tokens_normal=1)
    await wait_until(lambda: local_gateway.cluster.snapshot is not None and local_gateway.cluster.snapshot.drain_tok_s)
    monkeypatch.setattr(request, "TURN_REQUESTS", 8)
    turns, found = Turns(0.5, 60.0), local_gateway.first_model.admission
    filling = [asyncio.create_task(turns.wait(Arrival.of({}, b"%d" % at, Caller("t"), 0.0))) for at in range(TURNS + 6)]
    await asyncio.sleep(0)
    now = time.monotonic()
    others = [Arrival.of({}, b"other %d" % at, Caller("t"), now) for at in range(3)]
    waits: list[int] = []
    for arrival in (*others, Arrival.of({}, b"named", Caller("t"), now, may_exist=True)):
        with pytest.raises(ApiError) as refused:
            await found.wait_for_turn(turns, arrival)
        assert refused.value.code == "queue_full"
        waits.append(int(refused.value.headers["Retry-After"]))
    await asyncio.gather(*filling)
    assert waits[:3] == sorted(waits[:3]) and waits[-1] == waits[0] < waits[2]


@pytest.mark.parametrize("path", PATHS)
async def test_limit_that_cannot_be_kept_is_429_before_the_body_is_checked(
    local_gateway: Gateway, redis_server: RedisServer, path: str
) -> None:
    ScriptedScheduler(redis_server.client, local_gateway.settings.keys).stats(**LATE)
    snapshot = local_gateway.cluster
    await wait_until(lambda: snapshot.snapshot is not None and "normal" in snapshot.snapshot.forecasts)
    async with asgi(local_gateway) as client:
        wrong = {"model": local_gateway.settings.served_model_name, "no_such_field": 1}
        refused = await client.post(path, json={**wrong, "deadline_ms": 1000})
        assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (429, True)
        assert "deadline_ms: the first token is predicted in" in refused.json()["error"]["message"]
        assert (await client.post(path, json={**wrong, "deadline_ms": 90_000})).status_code == 400
        late = {**wrong, "deadline_ms": 1000}
        returning = {"last-event-id": "3"}  # of a request that goes on without its client, or of none
        assert (await client.post(path, json=late, headers=returning)).status_code == 429
        assert (await client.post(path, json={**late, "background": True}, headers=returning)).status_code == 400


async def test_request_does_not_begin_when_its_client_left_before_its_turn(
    local_gateway: Gateway, begun: list[str]
) -> None:
    app = public_app(local_gateway)
    raw = orjson.dumps(body(local_gateway, "low", background=False))

    async def ask() -> None:
        messages: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Message:
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(_: Message) -> None: ...

        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/v1/completions",
            "raw_path": b"", "root_path": "", "query_string": b"", "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await app(scope, receive, send)

    await asyncio.gather(*(ask() for _ in range(3 * TURNS)))
    assert len(begun) == TURNS


async def test_crowd_is_refused_again_without_redis(
    local_gateway: Gateway, redis_server: RedisServer, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "AGAIN_S", 60.0)
    occupy(redis_server.client, local_gateway.settings.keys)
    redis_server.client.hset(local_gateway.settings.keys.queue, "tokens", 1_999_999)
    scheduler = ScriptedScheduler(redis_server.client, local_gateway.settings.keys)
    scheduler.stats(prefill_tok_s=100)
    await wait_until(lambda: local_gateway.cluster.snapshot is not None and local_gateway.cluster.snapshot.drain_tok_s)
    low = [body(local_gateway, "low", seed=number) for number in range(5 * TURNS)]
    first = await sent(local_gateway, low[0])
    answers = await sent(local_gateway, *low[1:])
    assert {answer.json()["error"]["code"] for answer in [*first, *answers]} == {"queue_full"}
    assert len({answer.json()["error"]["message"] for answer in [*first, *answers]}) == 1
    assert len(begun) == 1 + TURNS


def shard(gateway: GatewayProcess) -> dict[str, str]:
    """Return the stats that the gateway has read."""
    return dict(httpx.get(gateway.ops_url + "/stats", verify=PLAIN, timeout=60).json()["shards"].get("shard-0", {}))


def test_full_queue_is_429_until_retry_after(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, answers: None
) -> None:
    occupy(scheduler.client, gateway.keys)
    scheduler.client.hset(gateway.keys.queue, "tokens", 999)
    scheduler.stats(prefill_tok_s=70)
    until("the rate is known", lambda: shard(gateway).get("prefill_tok_s") == "70")

    def answered(waiting: int, priority: str) -> httpx.Response:
        scheduler.client.hset(gateway.keys.queue, "tokens", waiting)
        return gateway.post("/v1/completions", {"prompt": [5] * 10, "priority": priority})

    for priority in ("normal", "low"):
        full = answered(985, priority)
        error = full.json()["error"]
        assert (full.status_code, error["code"], f"class {priority}" in error["message"]) == (429, "queue_full", True)
        after = int(full.headers["retry-after"])
        assert answered(985 - 70 * (after - 1), priority).status_code == 429
        assert answered(985 - 70 * after, priority).status_code == 200
    assert answered(985, "realtime").status_code == 200
