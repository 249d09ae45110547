"""A gateway that drives a batch dies, is paused or drains; another one goes on, and no line is computed twice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.gateway.batches.test_batches import begin, ended, line, rows
from tests.support.gateway_process import GatewayProcess
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import Claimed, ScriptedScheduler, answering
from tests.support.waiting import until

LINES = 12
AT_A_TIME = 4


@pytest.fixture
def pair(tmp_path: Path, model: Path, redis_server: RedisServer) -> Iterator[list[GatewayProcess]]:
    """Two gateways over one folder, which the test starts."""
    settings: dict[str, Any] = {"files_dir": tmp_path / "files", "batch_requests": AT_A_TIME}
    made = [GatewayProcess(tmp_path, model, redis_server.url, **settings) for _ in range(2)]
    try:
        yield made
    finally:
        for each in made:
            if each.process is not None:
                each.process.send_signal(signal.SIGCONT)
                each.stop()


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, *(pytest.param(how, marks=pytest.mark.slow) for how in (signal.SIGSTOP, signal.SIGTERM))]
)
def test_batch_goes_on_at_another_gateway(
    pair: list[GatewayProcess], redis_server: RedisServer, how: signal.Signals
) -> None:
    one, two = pair
    scheduler = ScriptedScheduler(redis_server.client, one.keys).lead()
    for each in [each.start() for each in pair]:
        each.wait_live().wait_ready()
    with openai.OpenAI(base_url=one.url + "/v1", api_key="x", max_retries=0) as client:
        names = [f"line-{n:02}" for n in range(LINES)]
        batch = begin(client, [line(name, one.name, max_tokens=4) for name in names])
        running = [scheduler.claim() for _ in range(AT_A_TIME)]
    driving, other = (one, two) if drives(one) else (two, one)
    scheduler.serve(running[0], [50])
    running.append(scheduler.claim())  # the first line was counted, and another one sent
    assert driving.process is not None
    driving.process.send_signal(how)
    for each in running[1:]:
        scheduler.serve(each, [51])  # what the gateway that sent them may not read
    others: list[str] = []

    def answer(claimed: Claimed) -> list[int]:
        others.append(claimed.id)
        return [52]

    with openai.OpenAI(base_url=other.url + "/v1", api_key="x", max_retries=0) as client, answering(scheduler, answer):
        found = ended(client, batch)
        assert found.status == "completed", found
        assert [row["custom_id"] for row in rows(client, found.output_file_id)] == names
        assert len(others) == LINES - len(running)
        assert len({*others, *(each.id for each in running)}) == LINES
        if how is signal.SIGSTOP:
            driving.process.send_signal(signal.SIGCONT)
            until("the paused gateway has noticed", lambda: not drives(driving))
            assert client.batches.retrieve(batch.id) == found
            assert len(list(client.files.list())) == 2


def test_batch_goes_on_where_redis_lost_its_epoch_and_time(
    pair: list[GatewayProcess], redis_server: RedisServer
) -> None:
    """What lies on disk has an epoch that Redis, with its clock set back, would not reach for years."""
    one, two = pair
    client, keys = redis_server.client, one.keys
    client.set(keys.batch_epoch, 1 << 39)
    scheduler = ScriptedScheduler(client, keys).lead()
    one.start().wait_live().wait_ready()
    with openai.OpenAI(base_url=one.url + "/v1", api_key="x", max_retries=0) as api:
        batch = begin(api, [line("a", one.name, max_tokens=4)])
        claimed = scheduler.claim()
    assert one.process is not None
    one.process.send_signal(signal.SIGKILL)
    one.process.wait(30)
    client.delete(keys.batch_epoch, keys.batch_lease(batch.id), keys.last_batch_epoch(batch.id))
    scheduler.serve(claimed, [50])
    two.start().wait_live().wait_ready()
    with openai.OpenAI(base_url=two.url + "/v1", api_key="x", max_retries=0) as api:
        found = ended(api, batch)
        assert (found.status, [row["custom_id"] for row in rows(api, found.output_file_id)]) == ("completed", ["a"])
    client.delete(keys.batch_epoch)


def drives(gateway: GatewayProcess) -> bool:
    return gateway.metric("orcinus_gateway_driven_batches") == 1
