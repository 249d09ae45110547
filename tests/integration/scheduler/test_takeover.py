"""What the next scheduler of a shard finds of a request that went from gateway to gateway. A real Redis."""

from __future__ import annotations

from pathlib import Path

from protos import queue_pb2
from services.scheduler.requests.intake import Claimed, Clock, Intake
from services.scheduler.shard.lease import Lease
from shared.columns import pack
from shared.redis_client import Scripts, connect
from shared.settings import SchedulerSettings
from tests.support.scripted_scheduler import Line, ScriptedScheduler
from tests.support.stack import RedisServer


async def test_tokens_that_only_a_gateways_stream_has_are_found_whoever_delivers_now(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        settings = SchedulerSettings(redis_url=server.url)
        keys, redis = settings.keys, connect(settings)
        scripts = Scripts(redis)
        prompts = queue_pb2.Prompts(tokens=[pack([5, 6])])
        request = queue_pb2.Request(id="r", tenant="t", gateway="a", prompts=prompts, n=1, max_tokens=20)
        redis_keys = [keys.req("r"), keys.requests("normal"), keys.queue, keys.bucket("t"), keys.prompt("r")]
        redis_keys += [keys.background, keys.background_of("a")]
        await scripts.enqueue(
            redis_keys,
            [request.SerializeToString(), b"", 2, 100, 22, 0, 0, 0, 60_000, "t", "a", "normal", b"", "", 0.75, 100, 0],
        )
        first = ScriptedScheduler(server.client, keys, settings.shard).lead()
        first.claim()
        first.publish(Line("r", 0, [50, 51]), gateway="a", started=["r"], checkpoints=[("r", 0, 0, [50, 51])])
        for gateway in "bacacd":  # b was sent what no checkpoint has; the scheduler hears of none behind it
            await scripts.control([keys.req("r")], [keys.prefix, "adopt", b"", gateway, "t"])
            if gateway == "b":
                first.publish(Line("r", 2, [52, 53]), gateway="b")
        first.resign()
        lease, clock = Lease(scripts, keys, settings.shard, settings.lease_ms), Clock()
        await lease.acquire(lambda: False)
        found: list[Claimed] = []
        intake = Intake(redis, redis, scripts, keys, settings.shard, lease, clock)
        assert await intake.pending([], found.extend) == 1
        assert found[0].request.gateway == "d"
        assert found[0].request.outputs is not None
        assert found[0].request.outputs[0].tolist() == [50, 51, 52, 53]
        assert await redis.hget(keys.req("r"), "former") == b" a b c "
        await redis.aclose()
