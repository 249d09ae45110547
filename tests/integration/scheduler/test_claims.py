"""A lone shard claims all that wait, so that a flood of one tenant hides no other tenant from the policy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from protos import queue_pb2
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits, StepResult
from services.scheduler.requests.claims import Claims, Holdings
from services.scheduler.requests.intake import READ_COUNT, Claimed, Clock, Intake
from shared.columns import pack
from shared.lease import Lease
from shared.redis_client import Scripts, connect
from shared.settings import SchedulerSettings
from tests.support.stack import RedisServer

FLOOD, PROMPT, SLOTS = 2_000, 200, 4


async def claimed_of_a_flood(server: RedisServer) -> list[Claimed]:
    """Return 2,000 requests of `flood`, then one of `quiet`, as a lone shard with SLOTS slots claims them."""
    settings = SchedulerSettings(redis_url=server.url, lease_ms=60_000)
    keys, redis = settings.keys, connect(settings, socket_timeout_s=60.0)
    pipe = redis.pipeline(transaction=False)
    for number in range(FLOOD + 1):
        name, tenant = f"r{number}", "quiet" if number == FLOOD else "flood"
        prompts = queue_pb2.Prompts(tokens=[pack([5] * PROMPT)])
        request = queue_pb2.Request(id=name, tenant=tenant, gateway="g", prompts=prompts, n=1, max_tokens=1)
        setattr(request, "class", 2)
        pipe.xadd(keys.requests("normal"), {"r": request.SerializeToString()})
        record = {"state": "queued", "tenant": tenant, "gateway": "g", "class": "normal", "enqueued_ms": number + 1}
        pipe.hset(keys.req(name), mapping=record)
    await pipe.execute()
    scripts = Scripts(redis)
    lease = Lease(scripts, keys, settings.shard, settings.lease_ms)
    assert await lease.take()
    intake, held = Intake(redis, redis, scripts, keys, settings.shard, lease, Clock()), Holdings()
    await intake.prepare()
    absent: Any = None
    alone: Any = SimpleNamespace(others=())
    claims = Claims(intake, held, alone, absent, absent, absent, lambda: False, absent)
    claims.joined(SLOTS)
    found: list[Claimed] = []
    while len(found) <= FLOOD and (part := await intake.read(claims.room())):
        assert len(part) <= READ_COUNT, "running sequences have their steps meanwhile"
        for item in part:
            held.add(item.request.id, item.entry)
        found += part
    await redis.aclose()
    return found


def starts_before_quiet(claimed: list[Claimed]) -> int:
    """Return how many of the flood start before the last request does."""
    core = Scheduler("orcinus", prefix_cache=False)
    core.join(Limits(slots=SLOTS, blocks=256, block_size=16, max_model_len=1024, max_step_tokens=512))
    now_ns, started = 1_000_000_000, 0
    for item in claimed:
        core.add(item.request, now_ns)
    while True:
        now_ns += 10_000_000
        step, _ = core.plan(now_ns)
        assert step is not None
        for enter in step.enters:
            if enter.request.id == claimed[-1].request.id:
                return started
            started += 1
        slots = step.chunk_slots[step.samples]
        core.apply(StepResult(step.id, 0, slots, np.full(slots.size, 7, np.int32)), now_ns)


async def test_request_of_another_tenant_starts_soon_in_a_flood(redis_server: RedisServer) -> None:
    claimed = await claimed_of_a_flood(redis_server)
    assert len(claimed) == FLOOD + 1
    assert starts_before_quiet(claimed) < 40
