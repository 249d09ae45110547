"""A lease that was given up stays given up. A real Redis."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.shard.lease import Lease
from shared.errors import LeaseLostError
from shared.redis_client import Scripts, connect
from shared.settings import SchedulerSettings
from tests.support.stack import RedisServer


async def test_a_write_that_is_late_does_not_take_back_a_lease_that_was_released(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        settings = SchedulerSettings(redis_url=server.url)
        redis = connect(settings)
        lease = Lease(Scripts(redis), settings.keys, settings.shard, settings.lease_ms)
        await lease.acquire(lambda: False)
        await lease.write(["SET", settings.keys.events, "told"])
        await lease.release()
        with pytest.raises(LeaseLostError):
            await lease.write(["SET", settings.keys.events, "late"])
        assert not await redis.exists(lease.key)
        assert await redis.get(settings.keys.events) == b"told"
        await redis.aclose()
