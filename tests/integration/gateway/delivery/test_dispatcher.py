"""What the gateway hands to Redis when Redis, or the job itself, fails; and what runs beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from protos import queue_pb2
from services.gateway.cluster import MAX_SHARDS, Cluster
from services.gateway.delivery import dispatcher as dispatcher_module
from services.gateway.delivery import stream as stream_module
from services.gateway.delivery.dispatcher import Command, Dispatcher, Retries
from services.gateway.delivery.stream import RequestStream, Row, check_logprobs
from services.gateway.errors import ApiError
from services.gateway.metrics import Metrics
from services.gateway.openai.bodies import CompletionBody, DetokenizeBody, parse_body
from services.gateway.openai.completions import completion_spec, encode_text
from services.gateway.request import Limits
from services.gateway.text.tokenizer import ModelText
from shared.settings import GatewaySettings
from shared.text.logprobs import check_records, pack_record, record_bytes
from shared.wire.columns import pack
from tests.support.checkpoints.tokenizers import write_model
from tests.support.stack import RedisServer
from tests.support.waiting import free_port

LIMITS = Limits(max_model_len=100_000)
WAITING = 100
"""Rows of a client that reads nothing."""


@functools.cache
def model() -> ModelText:
    with tempfile.TemporaryDirectory() as directory:
        return ModelText(write_model(Path(directory) / "m"))


def settings(url: str = "") -> GatewaySettings:
    return GatewaySettings(model=Path("m"), redis_url=url or f"redis://127.0.0.1:{free_port()}/0")


@pytest.fixture
async def dispatcher() -> AsyncIterator[Dispatcher]:
    """One that runs, and takes its Redis, which is away, for one that answers."""
    cluster = Cluster(settings(), "gateway-1", LIMITS)
    cluster.redis_error = ""
    running = Dispatcher(settings(), "gateway-1", cluster, Metrics())
    running.start()
    yield running
    cluster.redis_error = "away"
    await running.stop()


@pytest.mark.parametrize(
    ("errors", "tries"),
    [
        ([RedisConnectionError("closed")], 2),
        ([RedisConnectionError("closed"), RedisConnectionError("refused")], 2),
        ([RedisTimeoutError("silent")], 1),
    ],
    ids=["closed", "away", "silent"],
)
async def test_command_is_repeated_at_once_when_its_connection_was_closed(errors: list[Exception], tries: int) -> None:
    sent: list[str] = []
    coming = iter(errors)

    async def send() -> None:
        sent.append("stop")
        if error := next(coming, None):
            raise error

    ends_well = len(errors) < tries
    with contextlib.nullcontext() if ends_well else pytest.raises(type(errors[0])):
        await Command(("r", "stop 0"), send).try_send()
    assert len(sent) == tries


@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError()], ids=repr)
async def test_job_that_fails_ends_alone(dispatcher: Dispatcher, error: BaseException) -> None:
    done = asyncio.Event()

    async def fails() -> None:
        raise error

    async def works() -> None:
        done.set()

    dispatcher.submit(fails)
    dispatcher.submit(works)
    await asyncio.wait_for(done.wait(), 60)
    assert not any(task.done() for task in dispatcher.tasks)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ReadOnlyError("READONLY You can't write against a read only replica."), "redis_refused"),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots"), "redis_refused"),
        (ResponseError("OOM command not allowed when used memory > 'maxmemory'."), "redis_memory"),
        (ConnectionResetError("gone"), "redis_unavailable"),
    ],
)
async def test_error_of_redis_is_503_with_a_retry_time(dispatcher: Dispatcher, error: Exception, code: str) -> None:
    async def question() -> None:
        raise error

    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(dispatcher.ask(question), 60)
    assert (caught.value.status, caught.value.code) == (503, code)
    assert int(caught.value.headers["Retry-After"]) >= 1


def test_logprobs_of_an_entry_are_checked_by_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of numpy for each row takes 3 % of the event loop at 64 streams."""
    widths: list[int] = []

    def noted(records: bytes, wanted: int, vocab_size: int) -> None:
        widths.append(wanted)
        check_records(records, wanted, vocab_size)

    monkeypatch.setattr(stream_module, "check_records", noted)

    def stream_of(wanted: int) -> RequestStream:
        return RequestStream("r", 1, record_bytes=record_bytes(wanted), logprob_count=wanted)

    def rows(token: int) -> list[tuple[RequestStream, Row]]:
        wide = pack_record(-0.5, np.array([token, 1]), np.array([-0.5, -1.0]))
        narrow = pack_record(-0.5, np.array([2]), np.array([-0.5]))
        made = [(wanted, record) for wanted, record in ((3, wide), (2, narrow), (0, b"")) for _ in range(64)]
        return [(stream_of(wanted), Row(0, [5], logprobs=record)) for wanted, record in made]

    check_logprobs(rows(9), 10)
    assert widths == [3, 2]
    with pytest.raises(ValueError, match="ids 1 to 10, and a vocabulary of 10"):
        check_logprobs(rows(10), 10)
    with pytest.raises(ValueError, match="0 bytes of log-probabilities for 1 tokens"):
        check_logprobs([*rows(9), (stream_of(2), Row(0, [5]))], 10)
    check_logprobs([(RequestStream("r", 1, record_bytes=8), Row(0, [5], logprobs=b"a vector"))], 10)


@pytest.mark.parametrize("has_stalled", [False, True], ids=["alone", "beside a stalled client"])
async def test_entries_that_wait_are_delivered_in_few_turns_of_the_loop(tmp_path: Path, has_stalled: bool) -> None:
    """New requests make the turns long; entries that took one each fell behind the steps. A handler that reads keeps
    its bound all the same, and one that waits for its socket delays no other.
    """
    steps, turns, got = 60, 0, 0
    loop = asyncio.get_running_loop()

    def turn() -> None:
        nonlocal turns
        turns += 1
        ticking.append(loop.call_soon(turn))
        del ticking[:-1]

    with RedisServer(tmp_path / "redis") as server:
        chosen = settings(server.url)
        for step in range(steps):
            batch = queue_pb2.TokenBatch(
                requests=["r", "stalled"],
                choices=pack([0, 0]),
                first=pack([step, WAITING + step]),
                counts=pack([1, 1]),
                tokens=pack([7, 7]),
                finish=b"\0\0",
            )
            server.client.xadd(chosen.keys.tokens("gateway-1"), {"b": batch.SerializeToString()})
        cluster = Cluster(chosen, "gateway-1", LIMITS)
        reading = Dispatcher(chosen, "gateway-1", cluster, Metrics())
        reading.streams["r"] = stream = RequestStream("r", 1, max_rows=16)
        stalled = RequestStream("stalled", 1, max_rows=2 * WAITING)
        if has_stalled:
            reading.streams["stalled"] = stalled
            for index in range(WAITING):
                stalled.offer(Row(0, [7]), index)
        ticking: list[asyncio.Handle] = []
        reading.start()
        while got < steps:
            async with asyncio.timeout(60):
                got += len(await stream.take())
            if not ticking:
                turn()
        ticking.pop().cancel()
        await reading.stop()
        await cluster.close()
    assert stream.failure is None and stalled.failure is None
    assert turns < steps / 2


async def test_workers_are_not_searched_at_every_look(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        cluster = Cluster(settings(server.url), "gateway-1", LIMITS)
        for _ in range(3):
            await cluster.look()
        await cluster.close()
        found: Any = server.client.info("commandstats")
    assert found["cmdstat_scan"]["calls"] == 1


async def test_shards_that_are_gone_are_forgotten_when_there_were_many(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        chosen = settings(server.url)
        names = [f"shard-{number}" for number in range(2 * MAX_SHARDS)]
        for name in names:
            server.client.set(chosen.keys.lease(name), 1)
        cluster = Cluster(chosen, "gateway-1", LIMITS)
        assert (await cluster.look()).leases == {*names}
        server.client.delete(*map(chosen.keys.lease, names))
        assert not (await cluster.look()).leases
        server.client.config_resetstat()
        await cluster.look()
        await cluster.close()
        found: Any = server.client.info("commandstats")
    assert found["cmdstat_exists"]["calls"] < MAX_SHARDS


async def test_question_is_answered_when_it_waits_at_the_stop_or_comes_later(dispatcher: Dispatcher) -> None:
    async def question() -> None: ...

    held = asyncio.Event()

    async def holds() -> None:
        held.set()
        await asyncio.Event().wait()

    dispatcher.submit(holds)
    await held.wait()
    waiting = asyncio.create_task(dispatcher.ask(question))
    await asyncio.sleep(0)
    await dispatcher.stop()
    for each in (waiting, dispatcher.ask(question)):
        async with asyncio.timeout(30):
            with pytest.raises(ApiError, match="it stops") as failed:
                await each
        assert (failed.value.status, failed.value.code) == (503, "redis_unavailable")


def command(request_id: str, kind: str = "cancel") -> Command:
    async def send() -> None:
        raise AssertionError("no test of the queue sends")

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


def test_oldest_command_is_dropped_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatcher_module, "MAX_KEPT", 2)
    monkeypatch.setattr(logging.getLogger("orcinus"), "propagate", True)
    waiting = Retries()
    for name in "abc":
        waiting.keep(command(name))
    assert [each.key[0] for each in waiting.take()] == ["b", "c"]
    assert "dropping cancel of a" in caplog.text


def test_command_is_given_up_after_refusals_not_after_silence(caplog: pytest.LogCaptureFixture) -> None:
    waiting, one = Retries(), command("a")
    for _ in range(3 * dispatcher_module.MAX_REFUSALS):
        waiting.keep(one)  # Redis was away
    for _ in range(dispatcher_module.MAX_REFUSALS):
        (taken,) = waiting.take()
        waiting.on_refusal(taken, ReadOnlyError("READONLY"))
    assert waiting.take() == []
    assert "giving up" in caplog.text


def noting(function: Callable[..., Any], threads: set[threading.Thread]) -> Callable[..., Any]:
    """Return the function, which notes the thread that it runs in."""

    def noted(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return function(*args)

    return noted


async def test_texts_are_tokenized_beside_the_event_loop_unless_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()
    encode = model().encode
    monkeypatch.setattr(model(), "encode", noting(encode, threads))
    texts = ["word " * 1000] * 20  # 5 kB each
    spec = await completion_spec(CompletionBody(model="m", prompt=texts, max_tokens=1), model(), LIMITS)
    assert spec.prompts == [encode(texts[0])] * 20
    await encode_text("x" * 3000, model(), LIMITS)
    assert threading.main_thread() not in threads
    threads.clear()
    await completion_spec(CompletionBody(model="m", prompt=["a", "b"]), model(), LIMITS)
    assert threads == {threading.main_thread()}


async def test_echo_of_many_ids_is_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()
    decode = model().text.decode
    monkeypatch.setattr(model().text, "decode", noting(decode, threads))
    prompts = [[50, 51, 52] * 400] * 10
    body = CompletionBody(model="m", prompt=prompts, max_tokens=1, echo=True)
    spec = await completion_spec(body, model(), LIMITS)
    assert spec.prompt_texts == [decode(prompts[0])] * 10
    assert threads and threading.main_thread() not in threads


def test_detokenize_takes_at_most_a_million_ids() -> None:
    assert len(parse_body(orjson.dumps({"tokens": [1] * 1_000_000}), DetokenizeBody).tokens) == 1_000_000
    with pytest.raises(ApiError, match="1000000") as caught:
        parse_body(orjson.dumps({"tokens": [1] * 1_000_001}), DetokenizeBody)
    assert (caught.value.status, caught.value.param) == (400, "tokens")
