"""What /health/ready names as the reason, from what the gateway saw of Redis."""

from __future__ import annotations

import time

from services.gateway.cluster import Cluster, Snapshot
from services.gateway.request import Limits
from shared.settings import GatewaySettings

FULL = "OOM command not allowed when used memory > 'maxmemory'."


async def test_refused_writes_are_the_reason_when_not_ready() -> None:
    cluster = Cluster(GatewaySettings(api_keys=["k"]), "gateway-1", Limits(max_model_len=100, max_choices=8))
    cluster.redis_error = ""
    cluster.snapshot = Snapshot(time.monotonic(), frozenset(), {}, {})
    assert cluster.reason_not_ready() == "no scheduler is alive"
    cluster.write_error = FULL
    assert cluster.reason_not_ready() == f"Redis refuses to write: {FULL}"
    await cluster.close()
