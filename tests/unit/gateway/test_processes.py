"""Processes of a gateway: siblings, what they publish, and progress that each is told."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from typing import Any

import pytest
import uvloop
from prometheus_client.metrics_core import Sample
from prometheus_client.parser import text_string_to_metric_families

from services.gateway import published
from services.gateway.metrics import Metrics
from services.gateway.processes import LENGTH_BYTES, Place, Siblings, label, merge
from services.gateway.progress import Observation, Progress
from services.gateway.published import PublishedRecords
from shared.dead_letters import text
from shared.redis_client import connect
from shared.settings import GatewaySettings


def texts(*counts: int) -> list[bytes]:
    found = []
    for number, count in enumerate(counts):
        metrics = Metrics("m", aliases=True)
        for _ in range(count):
            metrics.answers.labels('/a "quoted" \n# HELP x y', "200").inc()
        metrics.on_delivery(10 * count, None)
        found.append(label(metrics.registry, str(number)))
    return found


def samples_of(text: bytes) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]


@pytest.mark.parametrize("counts", [(3,), (3, 4), (3, 0, 5)])
def test_merged_metrics_hold_each_sample_once_with_its_process(counts: tuple[int, ...]) -> None:
    parts = texts(*counts)
    names = [family.name for family in text_string_to_metric_families(merge(parts).decode())]
    assert len(set(names)) == len(names)
    samples = samples_of(merge(parts))
    assert {sample.labels["process"] for sample in samples} == {str(number) for number in range(len(counts))}
    single = [sample for part in parts for sample in samples_of(part)]
    key = lambda each: (each.name, sorted(each.labels.items()), each.value)  # noqa: E731
    assert sorted(map(key, samples)) == sorted(map(key, single))
    tokens = {
        each.labels["process"]: each.value for each in samples if each.name == "orcinus_gateway_output_tokens_total"
    }
    assert tokens == {str(number): 10.0 * count for number, count in enumerate(counts)}


def test_process_without_an_answer_is_left_out() -> None:
    first, _ = texts(1, 2)
    assert merge([first]) == merge([first, b""])


def test_answer_cut_by_a_kill_is_left_out() -> None:
    uvloop.run(asked_while_one_is_killed())  # as the gateway runs


async def asked_while_one_is_killed() -> None:
    registries = [Metrics("m", aliases=False).registry for _ in range(3)]
    group = secrets.token_hex(8)
    places = [Place(number, 3, group) for number in range(3)]
    first, second = (Siblings(places[number], registries[number], dict) for number in range(2))
    text = label(registries[2], "2")

    async def killed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write((len(text).to_bytes(LENGTH_BYTES) + text)[: len(text) // 2])
        await writer.drain()
        writer.close()

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(places[2].address(2))
    server = await asyncio.start_unix_server(killed, sock=listener)
    try:
        for each in (first, second):
            await each.start()
        assert {sample.labels["process"] for sample in samples_of(await first.metrics())} == {"0", "1"}
    finally:
        server.close()
        for each in (first, second):
            await each.stop()


async def test_first_of_several_failures_is_logged_until_redis_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(published, "EVERY_S", 0.0)
    answers = iter([ConnectionError("down"), ConnectionError("still down"), None, ConnectionError("down again")])
    redis = connect(GatewaySettings(), connections=1)
    names = PublishedRecords("names", redis, text)

    async def look() -> None:
        if (error := next(answers, asyncio.CancelledError())) is not None:
            raise error

    with caplog.at_level(logging.WARNING, "orcinus.gateway"), pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(names.follow(look), 60)
    await redis.aclose()
    assert [record.message for record in caplog.records] == [
        "names not read from Redis: down",
        "names not read from Redis: down again",
    ]


LED = frozenset({"shard-0"})
BUSY = {"epoch": 1.0, "last_step": 7.0, "running": 2.0}
IDLE = {"epoch": 1.0, "last_step": 7.0}


def stalled(looks: list[tuple[Observation | None, int]]) -> float:
    """After so many looks, a second apart; no time before the first."""
    progress = Progress(0.0)
    for second, (seen, unfinished) in enumerate(looks):
        progress.look(seen, unfinished, float(second))
    return progress.find_stall(len(looks) - 1.0)[0]


def shown(stats: dict[str, float] | None = None, leases: frozenset[str] = LED, **more: Any) -> Observation:
    return Observation(leases, {} if stats is None else {"shard-0": stats}, **more)


STALLED: dict[str, tuple[Observation | None, int]] = {
    "a worker hangs": (shown(BUSY), 0),
    "no worker runs a waiting request": (shown({**IDLE, "waiting": 1.0}), 0),
    "a step is not answered": (shown({**IDLE, "in_flight": 1.0}), 0),
    "a scheduler hangs": (shown(BUSY, leases=frozenset()), 0),
    "a scheduler hangs and its statistic says idle": (shown(IDLE, leases=frozenset()), 3),
    "the same, for another gateway's request": (shown(IDLE, leases=frozenset(), queued_requests=1.0), 0),
    "another request waits beside stranded ones": (shown({**IDLE, "waiting": 1.0, "stranded": 2.0}), 2),
    "no scheduler ever led": (shown(None), 1),
    "Redis is away": (None, 1),
}
WITHOUT_WORK: dict[str, tuple[Observation | None, int]] = {
    "idle": (shown(IDLE), 0),
    "nothing known": (shown(None), 0),
    "Redis is away": (None, 0),
    "parked until a client continues it": (shown({**IDLE, "parked": 2.0}, queued_requests=2.0), 0),
    "stranded until a worker of its numerics comes": (shown({**IDLE, "stranded": 2.0}), 2),
    "a shard that lost its work to others": (
        Observation(frozenset({"shard-1"}), {"shard-0": BUSY, "shard-1": IDLE}),
        0,
    ),
}


@pytest.mark.parametrize("look", STALLED.values(), ids=STALLED)
def test_stalled_work_raises_an_alarm(look: tuple[Observation | None, int]) -> None:
    assert stalled([look] * 41) >= 39


@pytest.mark.parametrize("look", WITHOUT_WORK.values(), ids=WITHOUT_WORK)
def test_no_alarm_without_work(look: tuple[Observation | None, int]) -> None:
    assert stalled([look] * 41) == 0


def test_step_or_heartbeat_with_another_step_now_and_then_is_progress() -> None:
    for shows in (
        lambda step: shown({**BUSY, "last_step": float(step)}),
        lambda step: shown(None, steps={"alive:worker:w": str(1 + step)}),
    ):
        assert stalled([(shows(second // 20), 1) for second in range(100)]) == 19


def test_heartbeat_that_expires_or_restarts_is_no_progress() -> None:
    beats: list[dict[str, str]] = [{"w": "9"}, *[{}, {"w": "0"}] * 20]
    assert stalled([(shown(None, steps=beat), 1) for beat in beats]) >= 39


def test_stalled_shard_is_named_beside_a_working_one() -> None:
    leases = frozenset({"shard-0", "shard-1"})
    progress = Progress(0.0)
    for second in range(41):
        stats = {"shard-0": BUSY, "shard-1": {**BUSY, "last_step": float(second)}}
        progress.look(Observation(leases, stats), 1, float(second))
    assert progress.find_stall(40.0) == (40.0, "shard shard-0")


def test_alarm_waits_when_work_comes_after_idle() -> None:
    assert stalled([(shown(IDLE), 0)] * 100 + [(shown({**IDLE, "running": 1.0}), 1)] * 3) <= 3
