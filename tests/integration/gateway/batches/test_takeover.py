"""A gateway that drives a batch dies behind a loss of Redis; another one goes on, and no line is computed twice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gateway.batches.test_batches import begin, ended, line, rows
from tests.support.gateway.clients import openai_client
from tests.support.gateway.process import GatewayProcess
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler

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


def test_batch_goes_on_where_redis_lost_its_epoch_and_time(
    pair: list[GatewayProcess], redis_server: RedisServer
) -> None:
    """What lies on disk has an epoch that Redis, with its clock set back, would not reach for years."""
    one, two = pair
    client, keys = redis_server.client, one.keys
    client.set(keys.batch_epoch, 1 << 39)
    scheduler = ScriptedScheduler(client, keys).lead()
    one.start().wait_live().wait_ready()
    with openai_client(one, "x") as api:
        batch = begin(api, [line("a", one.name, max_tokens=4)])
        claimed = scheduler.claim()
    assert one.process is not None
    one.process.send_signal(signal.SIGKILL)
    one.process.wait(30)
    client.delete(keys.batch_epoch, keys.batch_lease(batch.id), keys.last_batch_epoch(batch.id))
    scheduler.serve(claimed, [50])
    two.start().wait_live().wait_ready()
    with openai_client(two, "x") as api:
        found = ended(api, batch)
        assert (found.status, [row["custom_id"] for row in rows(api, found.output_file_id)]) == ("completed", ["a"])
    client.delete(keys.batch_epoch)
