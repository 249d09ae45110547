"""What the gateway hands to Redis when Redis, or the job itself, fails; and what runs beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import tempfile
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.gateway.cluster import Cluster
from services.gateway.delivery import dispatcher as dispatcher_module
from services.gateway.delivery.dispatcher import Command, Dispatcher, Retries
from services.gateway.errors import ApiError
from services.gateway.metrics import Metrics
from services.gateway.openai.bodies import CompletionBody, DetokenizeBody, parse_body
from services.gateway.openai.completions import completion_spec
from services.gateway.request import Limits
from services.gateway.text.tokenizer import ModelText
from shared.settings import GatewaySettings
from tests.support.stack import RedisServer
from tests.support.tokenizers import write_model
from tests.support.waiting import free_port

LIMITS = Limits(max_model_len=100_000)


@functools.cache
def model() -> ModelText:
    with tempfile.TemporaryDirectory() as directory:
        return ModelText(write_model(Path(directory) / "m"))


def dispatcher(url: str = "") -> tuple[Dispatcher, Cluster]:
    settings = GatewaySettings(model=Path("m"), redis_url=url or f"redis://127.0.0.1:{free_port()}/0")
    cluster = Cluster(settings, "gateway-1", LIMITS)
    cluster.redis_error = ""
    return Dispatcher(settings, "gateway-1", cluster, Metrics()), cluster


# Commands


@pytest.mark.parametrize(
    ("errors", "tries"),
    [
        ([RedisConnectionError("closed")], 2),
        ([RedisConnectionError("closed"), RedisConnectionError("refused")], 2),
        ([RedisTimeoutError("silent")], 1),
    ],
    ids=["closed", "away", "silent"],
)
def test_a_command_is_said_again_at_once_where_its_connection_was_closed(errors: list[Exception], tries: int) -> None:
    said: list[str] = []
    coming = iter(errors)

    async def send() -> None:
        said.append("stop")
        if error := next(coming, None):
            raise error

    ends_well = len(errors) < tries
    with contextlib.nullcontext() if ends_well else pytest.raises(type(errors[0])):
        asyncio.run(Command(("r", "stop 0"), send).try_send())
    assert len(said) == tries


# Jobs


@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError()], ids=repr)
def test_a_job_that_fails_ends_alone(error: BaseException) -> None:
    async def scenario() -> None:
        jobs, cluster = dispatcher()
        jobs.start()
        done = asyncio.Event()

        async def fails() -> None:
            raise error

        async def works() -> None:
            done.set()

        jobs.submit(fails)
        jobs.submit(works)
        await asyncio.wait_for(done.wait(), 10)
        assert not any(task.done() for task in jobs.tasks)
        cluster.redis_error = "away"
        await jobs.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ReadOnlyError("READONLY You can't write against a read only replica."), "redis_refused"),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots"), "redis_refused"),
        (ResponseError("OOM command not allowed when used memory > 'maxmemory'."), "redis_memory"),
        (ConnectionResetError("gone"), "redis_unavailable"),
    ],
)
def test_what_redis_refuses_is_503_with_a_time_to_wait(error: Exception, code: str) -> None:
    async def scenario() -> None:
        jobs, cluster = dispatcher()
        jobs.start()

        async def question() -> None:
            raise error

        with pytest.raises(ApiError) as caught:
            await asyncio.wait_for(jobs.ask(question), 10)
        assert (caught.value.status, caught.value.code) == (503, code)
        assert int(caught.value.headers["Retry-After"]) >= 1
        cluster.redis_error = "away"
        await jobs.stop()

    asyncio.run(scenario())


def test_workers_are_not_searched_at_every_look(tmp_path: Path) -> None:
    async def scenario(server: RedisServer) -> None:
        _, cluster = dispatcher(server.url)
        for _ in range(3):
            await cluster.look()
        await cluster.close()
        found: Any = server.client.info("commandstats")
        assert found["cmdstat_scan"]["calls"] == 1

    with RedisServer(tmp_path / "redis") as server:
        asyncio.run(scenario(server))


# Commands that wait


def command(request_id: str, kind: str = "cancel") -> Command:
    async def send() -> None:
        raise AssertionError("nobody sends in these tests")

    return Command((request_id, kind), send)


def test_commands_of_one_request_and_kind_are_one() -> None:
    waiting = Retries()
    last = command("a")
    for each in (command("a"), command("a", "stop 0"), command("a", "stop 1"), command("b"), last):
        waiting.keep(each)
    taken = waiting.take()
    assert [each.key for each in taken] == [("a", "stop 0"), ("a", "stop 1"), ("b", "cancel"), ("a", "cancel")]
    assert taken[-1] is last
    assert not len(waiting)


def test_the_oldest_is_dropped_and_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(dispatcher_module, "MOST_KEPT", 2)
    monkeypatch.setattr(logging.getLogger("orcinus"), "propagate", True)
    waiting = Retries()
    for name in "abc":
        waiting.keep(command(name))
    assert [each.key[0] for each in waiting.take()] == ["b", "c"]
    assert "dropping cancel of a" in caplog.text


def test_a_command_is_given_up_after_refusals_not_after_silence(caplog: pytest.LogCaptureFixture) -> None:
    waiting, one = Retries(), command("a")
    for _ in range(3 * dispatcher_module.MOST_REFUSALS):
        waiting.keep(one)  # Redis was away
    for _ in range(dispatcher_module.MOST_REFUSALS - 1):
        (taken,) = waiting.take()
        waiting.refused(taken, ReadOnlyError("READONLY"))
    (taken,) = waiting.take()
    waiting.refused(taken, ReadOnlyError("READONLY"))
    assert waiting.take() == []
    assert "giving up" in caplog.text


# Beside the event loop


def test_many_middling_texts_are_tokenized_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, encode = set(), model().encode

    def seen(text: str, add_special_tokens: bool = True) -> list[int]:
        threads.add(threading.current_thread())
        return encode(text, add_special_tokens)

    monkeypatch.setattr(model(), "encode", seen)
    texts = ["word " * 1000] * 20  # 5 kB each
    body = CompletionBody(model="m", prompt=texts, max_tokens=1)
    spec = asyncio.run(completion_spec(body, model(), "m", LIMITS))
    assert spec.prompts == [encode(texts[0])] * 20
    assert threading.main_thread() not in threads
    threads.clear()
    asyncio.run(completion_spec(CompletionBody(model="m", prompt=["a", "b"]), model(), "m", LIMITS))
    assert threads == {threading.main_thread()}


def test_the_echo_of_many_ids_is_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, decode = set(), model().text.decode

    def seen(ids: list[int], skip_special: bool = True) -> str:
        threads.add(threading.current_thread())
        return decode(ids, skip_special)

    monkeypatch.setattr(model().text, "decode", seen)
    prompts = [[50, 51, 52] * 400] * 10
    body = CompletionBody(model="m", prompt=prompts, max_tokens=1, echo=True)
    spec = asyncio.run(completion_spec(body, model(), "m", LIMITS))
    assert spec.prompt_texts == [decode(prompts[0])] * 10
    assert threads
    assert threading.main_thread() not in threads


def test_a_million_ids_can_be_detokenized_and_no_more() -> None:
    assert len(parse_body(orjson.dumps({"tokens": [1] * 1_000_000}), DetokenizeBody).tokens) == 1_000_000
    with pytest.raises(ApiError, match="1000000") as caught:
        parse_body(orjson.dumps({"tokens": [1] * 1_000_001}), DetokenizeBody)
    assert (caught.value.status, caught.value.param) == (400, "tokens")
