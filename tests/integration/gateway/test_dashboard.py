"""The live page's files and events over HTTP: one reader for all viewers, bounded, and what Redis says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.dashboard import routes
from services.gateway.dashboard.feed import MAX_VIEWERS
from shared.telemetry.stack_view import HISTORY
from tests.support import sse
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import PLAIN, RedisServer
from tests.support.stand_ins.written_stack import STATS, WrittenStack
from tests.support.waiting import until

GATEWAY: dict[str, Any] = {}


@pytest.fixture
def written(gateway: GatewayProcess, redis_server: RedisServer) -> WrittenStack:
    redis_server.client.flushall()
    return WrittenStack(redis_server.client, gateway.keys).lead()


@contextlib.contextmanager
def watching(gateway: GatewayProcess) -> Iterator[Iterator[tuple[str, Any]]]:
    """The events of one viewer as (name, value)."""
    with httpx.stream("GET", gateway.ops_url + routes.EVENTS, timeout=60, verify=PLAIN) as response:
        assert response.status_code == 200, response.read()
        yield ((event.kind, event.json) for event in sse.events(response.iter_lines()))


def test_files_of_the_page_are_on_the_ops_port_only(gateway: GatewayProcess) -> None:
    for path in routes.FILES:
        answer = httpx.get(gateway.ops_url + path, timeout=60, verify=PLAIN)
        assert answer.status_code == 200, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert gateway.get(path).status_code == (307 if path == "/dashboard" else 404), path


def test_viewer_gets_the_past_then_the_stack_each_second(gateway: GatewayProcess, written: WrittenStack) -> None:
    for number in range(70):  # more than is read at a time
        written.tell(tok_s=number)
    written.worker()
    written.event("worker_lost", "gone")
    written.iterations.add(1000, 5_000_000, 12, 340, 0)
    stats = written.tell(tok_s=77.5)
    with watching(gateway) as events:
        name, past = next(events)
        assert name == "past"
        assert set(past["shard-0"]) == set(HISTORY)
        assert past["shard-0"]["tok_s"] == [*range(70), 77.5]
        name, now = next(events)
        assert name == "now"
        shard = now["shards"]["shard-0"]
        assert shard["led"]
        assert {field: shard["stats"][field] for field in STATS} == {field: stats[field] for field in STATS}
        assert (shard["iterations"]["last"], shard["iterations"]["decode"]) == (1, [12])
        assert [(worker["id"], worker["alive"]) for worker in now["workers"]] == [("worker-0", True)]
        assert now["events"][0]["text"] == "gone"
        written.tell(tok_s=78.5)
        later = next(value for name, value in events if value["shards"]["shard-0"]["stats"]["tok_s"] == 78.5)
        assert later["time_ms"] > now["time_ms"]


def test_viewers_are_bounded_and_the_last_ends_the_reading(
    gateway: GatewayProcess, written: WrittenStack, redis_server: RedisServer
) -> None:
    written.tell()
    client: Any = redis_server.client
    with contextlib.ExitStack() as viewers:
        streams = [viewers.enter_context(watching(gateway)) for _ in range(MAX_VIEWERS)]
        for events in streams:
            assert next(events)[0] == "past"
        client.config_resetstat()
        seen = [next(streams[-1]) for _ in range(4)]
        reads = client.info("commandstats")["cmdstat_xrevrange"]["calls"]  # the feed alone gives this command
        assert reads < MAX_VIEWERS * len(seen) / 2, "once a frame, not once a viewer"
        refused = httpx.get(gateway.ops_url + routes.EVENTS, timeout=60, verify=PLAIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_viewers")
        during = len(client.client_list())
    until("the feed has ended", lambda: len(client.client_list()) < during)
    with watching(gateway) as events:
        assert next(events)[0] == "past"


def test_wrong_type_in_redis_is_shown_and_ends_nothing(
    gateway: GatewayProcess, written: WrittenStack, redis_server: RedisServer
) -> None:
    redis_server.client.set(gateway.keys.queue, "not a hash")
    written.tell()
    with watching(gateway) as events:
        _, first = next(events)
        assert "WRONGTYPE" in first["error"]
        redis_server.client.delete(gateway.keys.queue)
        assert next(value for name, value in events if name == "now" and "error" not in value)["shards"]


def test_open_page_does_not_delay_a_gateway_stop(tmp_path: Path, model: Path, redis_server: RedisServer) -> None:
    with running_gateway(tmp_path, model, redis_server) as stopping, watching(stopping) as events:
        next(events)
        assert stopping.stop() == 0
        assert all(name == "now" for name, _ in events), "and the stream has come to its end"
