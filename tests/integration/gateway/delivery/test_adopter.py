"""Adopters of orphans on a real Redis: which of two adopts those of a gateway that is gone, what is tried again, and
the requests that a gateway takes back because Redis has lost their ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import pytest

from services.gateway.admission import unknown_request
from services.gateway.delivery import background, dispatcher
from services.gateway.delivery.background import BackgroundTasks, OrphanAdopter
from services.gateway.delivery.stream import RequestStream
from services.gateway.errors import ApiError, broken_record, taken_over, unavailable, undecodable
from services.gateway.gateway import Gateway
from shared.settings import GatewaySettings
from shared.tasks import end
from shared.text.tokenizer import TokenizerError
from tests.integration.gateway.conftest import asgi
from tests.support.checkpoints.tokenizers import token_ids
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import LENGTH, Line, ScriptedScheduler
from tests.support.waiting import wait_until

IDS = [f"request-{number}" for number in range(20)]


def adopter(server: RedisServer, name: str, take_up: Callable[[str, str], Awaitable[None]]) -> OrphanAdopter:
    """Return an adopter of the gateway `name`. The record of each request that `take_up` adopts names that gateway,
    unless the request has ended.
    """
    server.client.flushall()
    settings = GatewaySettings(redis_url=server.url, api_keys=["k"])
    server.client.sadd(settings.keys.background, "gone")
    server.client.sadd(settings.keys.background_of("gone"), *IDS)
    for request_id in IDS:
        server.client.hset(settings.keys.req(request_id), mapping={"state": "running", "gateway": "gone"})

    async def adopt(request_id: str, gateway: str) -> None:
        await take_up(request_id, gateway)
        if server.client.hget(settings.keys.req(request_id), "state") == b"running":
            server.client.hset(settings.keys.req(request_id), "gateway", name)

    return OrphanAdopter(settings, name, BackgroundTasks(), adopt, ())


def left(server: RedisServer) -> set[str]:
    keys = GatewaySettings(redis_url=server.url, api_keys=["k"]).keys
    return {name.decode() for name in server.client.smembers(keys.background_of("gone"))}


async def test_each_orphan_is_adopted_once_when_two_gateways_look(redis_server: RedisServer) -> None:
    adopted: list[str] = []
    both = asyncio.Barrier(2)

    async def take_up(request_id: str, _gateway: str) -> None:
        adopted.append(request_id)
        await asyncio.sleep(0)

    async def look(one: OrphanAdopter) -> None:
        await both.wait()
        await one.adopt_from("gone")

    adopters = [adopter(redis_server, name, take_up) for name in ("one", "other")]
    await asyncio.gather(*map(look, adopters))
    assert sorted(adopted) == sorted(IDS)
    assert left(redis_server) == set()
    for each in adopters:
        await each.close()


@pytest.mark.parametrize("error", [
    unavailable("Redis does not answer", "redis_unavailable"), ApiError(429, "too many questions", code="overloaded"),
    taken_over(), broken_record(), ValueError("unreadable"),
])  # fmt: skip
async def test_orphan_that_cannot_be_adopted_stays_for_the_next_try(
    redis_server: RedisServer, error: Exception
) -> None:
    async def take_up(request_id: str, _gateway: str) -> None:
        if request_id == IDS[7]:
            raise error

    one = adopter(redis_server, "one", take_up)
    await one.adopt_from("gone")
    assert left(redis_server) == {IDS[7]}
    await one.close()


@pytest.mark.parametrize("fields", [{}, {"state": "running", "gateway": "other"}])
async def test_orphan_that_is_gone_or_read_elsewhere_is_forgotten(
    redis_server: RedisServer, fields: dict[str, str | int]
) -> None:
    keys = GatewaySettings(redis_url=redis_server.url, api_keys=["k"]).keys

    async def take_up(request_id: str, _gateway: str) -> None:
        redis_server.client.delete(keys.req(request_id))
        if fields:
            redis_server.client.hset(keys.req(request_id), mapping=fields)
        raise unknown_request(request_id)

    one = adopter(redis_server, "one", take_up)
    await one.adopt_from("gone")
    assert left(redis_server) == set()
    await one.close()


async def test_ended_orphans_are_forgotten_once_adopted(redis_server: RedisServer) -> None:
    keys = GatewaySettings(redis_url=redis_server.url, api_keys=["k"]).keys

    async def take_up(request_id: str, _gateway: str) -> None:
        redis_server.client.hset(keys.req(request_id), "state", "finished")

    one = adopter(redis_server, "one", take_up)
    await one.adopt_from("gone")
    assert left(redis_server) == set()
    await one.close()


class Own:
    """A gateway `one` with its adopter, and what Redis has of four requests that it has read to their ends: it has lost
    the end of the first. `adopted`: requests that it takes back.
    """

    def __init__(self, server: RedisServer, streams: Iterable[str] = (), error: Exception | None = None) -> None:
        self.client = server.client
        self.client.flushall()
        settings = GatewaySettings(redis_url=server.url, api_keys=["k"])
        self.keys, self.tasks, self.error = settings.keys, BackgroundTasks(), error
        self.adopted: list[tuple[str, str]] = []
        self.client.sadd(self.keys.background, "one")
        self.client.sadd(self.keys.background_of("one"), *IDS[:4])
        self.write(IDS[0], state="running")
        self.write(IDS[1], state="finished")
        self.write(IDS[2], state="running", gateway="other")
        self.tasks.end_counts |= dict.fromkeys(IDS[:4], 2)  # the record of the last has expired
        self.adopter = OrphanAdopter(settings, "one", self.tasks, self.take_up, streams)

    def write(self, name: str, **fields: str | int) -> None:
        """Write fields of a record."""
        self.client.hset(self.keys.req(name), mapping={"gateway": "one", **fields})

    @property
    def own(self) -> set[str]:
        return {name.decode() for name in self.client.smembers(self.keys.background_of("one"))}

    async def take_up(self, request_id: str, gateway: str) -> None:
        self.adopted.append((request_id, gateway))
        if self.error is not None:
            raise self.error


def looks(server: RedisServer) -> int:
    """Return how often adopters have looked at what may be orphans."""
    calls: int = server.client.info("commandstats").get("cmdstat_smembers", {}).get("calls", 0)
    return calls


@contextlib.asynccontextmanager
async def running(own: Own) -> AsyncIterator[None]:
    task = asyncio.create_task(own.adopter.run())
    try:
        yield
    finally:
        await end(task)
        await own.adopter.close()


async def look_often(server: RedisServer) -> None:
    """Wait for five looks."""
    before = looks(server)
    await wait_until(lambda: looks(server) >= before + 5)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gateways look without a pause."""
    monkeypatch.setattr(background, "EVERY_S", 0.01)


async def test_request_with_a_lost_end_is_read_again(redis_server: RedisServer, often: None) -> None:
    own = Own(redis_server)
    async with running(own):
        await wait_until(lambda: own.adopted)
    assert own.adopted[0] == (IDS[0], "one")
    assert own.own == {IDS[0]}


async def test_end_that_is_lost_after_its_removal_is_noticed(redis_server: RedisServer, often: None) -> None:
    own = Own(redis_server)
    own.write(IDS[0], state="finished")
    async with running(own):
        await wait_until(lambda: not (own.own or own.tasks.end_counts))
        assert not own.adopted
        own.write(IDS[0], state="running")
        own.client.sadd(own.keys.background_of("one"), IDS[0])
        await wait_until(lambda: own.adopted)
    assert own.adopted[0] == (IDS[0], "one")


@pytest.mark.parametrize("fields", [{"cancelled": 1}, {"stop:0": 3, "finish:1": 2}, {"stop:0": 3, "stop:1": 0}])
async def test_request_that_its_scheduler_has_yet_to_end_stays(
    redis_server: RedisServer, often: None, fields: dict[str, int]
) -> None:
    own = Own(redis_server)
    own.write(IDS[0], **fields)
    async with running(own):
        await look_often(redis_server)
        assert (own.adopted, own.own, set(own.tasks.end_counts)) == ([], {IDS[0]}, {IDS[0]})
        own.write(IDS[0], state="finished")
        await wait_until(lambda: not (own.own or own.tasks.end_counts))


@pytest.mark.parametrize("fields, choices", [({"stop:0": 3}, 2), ({"stop:0": 3, "stop:1": 0}, 0)])
async def test_stop_string_of_another_choice_is_no_end(
    redis_server: RedisServer, often: None, fields: dict[str, int], choices: int
) -> None:
    own = Own(redis_server)
    own.write(IDS[0], **fields)
    own.tasks.end_counts[IDS[0]] = choices
    async with running(own):
        await wait_until(lambda: own.adopted)


async def test_request_with_a_reader_is_not_taken_back(redis_server: RedisServer, often: None) -> None:
    own = Own(redis_server, streams=[IDS[0]])
    async with running(own):
        await look_often(redis_server)
    assert not own.adopted


@pytest.mark.parametrize("error", [
    ApiError(503, "another build", code="record_version"), broken_record(), ValueError("unreadable"),
])  # fmt: skip
async def test_request_that_cannot_be_read_is_tried_rarely(
    redis_server: RedisServer, often: None, error: Exception
) -> None:
    own = Own(redis_server, error=error)
    own.tasks.readerless.add(IDS[0])
    async with running(own):
        await look_often(redis_server)
        assert own.adopted == [(IDS[0], "one")]
        assert not (own.tasks.readerless or own.tasks.end_counts), "its model can close"
    assert own.own == {IDS[0]}, "another gateway can adopt it"


async def begun(gateway: Gateway, server: RedisServer) -> str:
    """Begin a background request, and return its id."""
    ScriptedScheduler(server.client, gateway.settings.keys).lead()
    body = {"model": gateway.first_model.name, "prompt": "The", "max_tokens": 400, "background": True}
    async with asgi(gateway) as client:
        return str((await client.post("/v1/completions", json=body)).json()["id"])


@pytest.mark.parametrize("error", [ValueError("unreadable"), undecodable(TokenizerError("no text"))])
async def test_request_is_read_again_rarely_after_its_reader_failed(
    often: None,
    local_gateway: Gateway,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    read: list[str] = []

    async def fail(stream: RequestStream, *_: Any) -> None:
        read.append(stream.request_id)
        raise error

    monkeypatch.setattr(RequestStream, "take", fail)
    request_id = await begun(local_gateway, redis_server)
    await look_often(redis_server)
    assert read == [request_id]
    assert request_id not in local_gateway.first_model.background.end_counts, "it goes on"
    record = redis_server.client.hgetall(local_gateway.settings.keys.req(request_id))
    assert record[b"state"] == b"queued" and b"cancelled" not in record


@pytest.mark.parametrize("field", ["finish:0", "cached:0"])
async def test_request_with_an_unreadable_record_goes_on_and_is_read_again_rarely(
    often: None, local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    model, keys = local_gateway.first_model, local_gateway.settings.keys
    request_id = await begun(local_gateway, redis_server)
    redis_server.client.hset(keys.req(request_id), field, "x")
    monkeypatch.setattr(dispatcher, "SILENT_S", 0.0)  # its record is read at once
    await wait_until(lambda: request_id in model.background.unreadable)
    await look_often(redis_server)
    assert (model.background.request_ids, request_id in model.background.end_counts) == ([], False)
    assert redis_server.client.hget(keys.req(request_id), "cancelled") is None


async def test_request_with_a_record_that_became_readable_is_read_to_its_end(
    often: None, local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, scheduler = local_gateway.settings.keys, ScriptedScheduler(redis_server.client, local_gateway.settings.keys)
    request_id = await begun(local_gateway, redis_server)
    claimed = await asyncio.to_thread(scheduler.lead().claim)
    redis_server.client.hset(keys.req(request_id), "finish:0", "x")
    monkeypatch.setattr(dispatcher, "SILENT_S", 0.0)
    await wait_until(lambda: request_id in local_gateway.first_model.background.unreadable)
    tokens = token_ids("a quick brown fox")
    scheduler.end(claimed, [tokens], [LENGTH])  # which another field tells
    local_gateway.first_model.background.unreadable.clear()  # as after a while
    await wait_until(lambda: not redis_server.client.exists(keys.background_of(local_gateway.id)))
    async with asgi(local_gateway) as client:
        found = (await client.get(f"/v1/requests/{request_id}")).json()
    assert (found["finish_reasons"], found["result"]["choices"][0]["text"]) == (["length"], "a quick brown fox")
    assert "cancel" not in [control.WhichOneof("command") for control in scheduler.controls()]


async def test_request_is_tried_again_where_redis_was_silent(redis_server: RedisServer, often: None) -> None:
    own = Own(redis_server, error=unavailable("Redis does not answer", "redis_unavailable"))
    async with running(own):
        await wait_until(lambda: len(own.adopted) > 2)


async def test_request_without_a_reader_is_found_among_many(redis_server: RedisServer, often: None) -> None:
    many = {f"read-{number}" for number in range(4 * background.BATCH)}
    own = Own(redis_server, streams=many)
    own.client.sadd(own.keys.background_of("one"), *many)
    del own.tasks.end_counts[IDS[0]]
    async with running(own):
        await wait_until(lambda: own.adopted)
    assert set(own.adopted) == {(IDS[0], "one")}
    assert own.own == many | {IDS[0]}


async def test_end_that_no_gateway_has_read_is_read(redis_server: RedisServer, often: None) -> None:
    own = Own(redis_server)
    own.write(IDS[0], state="finished")
    del own.tasks.end_counts[IDS[0]]  # as when a client has read it to its end
    async with running(own):
        await wait_until(lambda: own.adopted)
        own.tasks.end_counts[IDS[0]] = 2
        await wait_until(lambda: not own.own)


async def test_unread_requests_are_left_to_others_when_their_gateway_ends(redis_server: RedisServer) -> None:
    own = Own(redis_server)
    del own.tasks.end_counts[IDS[1]]  # handed over; it has ended since
    await own.adopter.close()
    assert (own.own, own.adopted) == (set(IDS[:2]), [])
    assert own.client.smembers(own.keys.background) == {b"one"}


async def test_stop_string_is_sent_once_while_the_scheduler_is_silent(
    often: None, local_gateway: Gateway, redis_server: RedisServer
) -> None:
    scheduler = ScriptedScheduler(redis_server.client, local_gateway.settings.keys).lead()
    body = {
        "model": local_gateway.first_model.name,
        "prompt": "The",
        "max_tokens": 400,
        "background": True,
        "stop": ["k br"],
    }
    async with asgi(local_gateway) as client:
        begun = (await client.post("/v1/completions", json=body)).json()
    claimed = await asyncio.to_thread(scheduler.claim)
    tokens = token_ids("a quick brown fox")
    scheduler.publish(Line(claimed.id, 0, tokens))
    read = local_gateway.first_model.background
    await wait_until(lambda: begun["id"] in read.end_counts)
    await look_often(redis_server)
    assert [control.WhichOneof("command") for control in scheduler.controls()] == ["stop"]
    scheduler.end(claimed, [tokens], [LENGTH])
    await wait_until(lambda: not read.end_counts)
    assert redis_server.client.hget(local_gateway.settings.keys.req(claimed.id), "finish") == b"1"
