"""A stack that exists in Redis alone: what scheduler and worker would write, with figures that a test knows."""

from __future__ import annotations

import json
import time
from typing import Any

from services.scheduler.telemetry import Iterations
from shared.keys import CLASSES, Keys

STATS: dict[str, Any] = {
    "v": 1, "epoch": 3, "policy": "sarathi", "iteration": 900, "last_step": 899, "in_flight": 2, "workers": 1,
    "running": 17, "waiting": 10, "swapped": 3, "parked": 1,
    "waiting_realtime": 1, "waiting_high": 2, "waiting_normal": 3, "waiting_low": 4,
    "blocks_total": 1000, "blocks_free": 150, "blocks_cached": 200, "blocks_draining": 50,
    "host_blocks_total": 400, "host_blocks_free": 300,
    "tok_s": 1234.5, "tokens_total": 98765, "ttft_ms_p50": 87.5, "ttft_ms_p99": 1530.0, "tbt_ms_p50": 12.25,
    "tbt_ms_p99": 48.0, "step_ms": 11.5, "device_idle_pct": 4.0, "schedule_us": 60.0, "queued_tokens": 4321,
    "finished": 412, "cancelled": 5, "failed": 2, "preemptions": 7, "recomputed_tokens": 640, "swapped_blocks": 96,
    "prefix_hit_tokens": 2048, "prefill_tok_s": 9000.0, "starts_s": 4.5, "block_size": 16,
    **{f"predicted_ttft_ms_{name}": 1000.0 * (number + 1) for number, name in enumerate(CLASSES)},
    "ttft_predicted_ms_p50": 5.0, "ttft_error_ms_p50": 82.5, "cpu_pct": 12.5, "rss_bytes": 64 << 20,
    **{f"ttft_predicted_ms_p50_{name}": 5.0 for name in CLASSES},
    **{f"ttft_ms_p50_{name}": 264.0 for name in CLASSES}, **{f"ttft_error_ms_p50_{name}": 259.0 for name in CLASSES},
    **{f"slo_violations_{name}": number for number, name in enumerate(CLASSES)},
}  # fmt: skip
WORKER = {
    "address": "127.0.0.1:9", "identity": "abc", "model": "tiny", "pid": "4711", "dtype": "float32", "device": "cpu",
    "backend": "reference", "role": "prefill", "ready": "1", "shard": "shard-0",
    "cpu_pct": "87.5", "rss_bytes": str(512 << 20), "late_rows": "0", "grammars_ended": "0",
}  # fmt: skip


REPLICA: dict[str, Any] = {
    "role": "", "state": "serving", "epoch": 5, "number": 0, "dock": 0, "slots": 64, "running": 16, "loading": 2,
    "in_flight": 2, "step_tokens": 40, "blocks_total": 1000, "blocks_free": 150, "blocks_cached": 200,
    "blocks_draining": 50, "host_blocks_total": 400, "host_blocks_free": 200, "host_blocks_cached": 100,
    "swapped_blocks": 96, "prefix_hit_tokens": 2048, "tok_s": 1234.5, "step_ms": 11.5, "idle_pct": 4.0,
}  # fmt: skip


class WrittenStack:
    """Writes as often as a test wants to; nothing expires meanwhile."""

    def __init__(self, client: Any, keys: Keys, shard: str = "shard-0") -> None:
        self._redis = client
        self._keys = keys
        self._shard = shard
        self.ahead_ms = 0  # by which statistics are ahead of the time, so that a slow reader does not find them old
        self.iterations = Iterations()

    def now_ms(self) -> int:
        seconds, micros = self._redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def lead(self) -> WrittenStack:
        self._redis.set(self._keys.lease(self._shard), 3)
        return self

    def leave(self) -> None:
        self._redis.delete(self._keys.lease(self._shard))

    def tell(self, **changes: Any) -> dict[str, Any]:
        """Statistics of now, with their history and the last iterations."""
        stats = {**STATS, "time_ms": self.now_ms() + self.ahead_ms, **changes}
        self._redis.hset(self._keys.stats(self._shard), mapping=stats)
        self._redis.xadd(self._keys.stats_history(self._shard), stats)
        self._redis.hset(self._keys.iterations(self._shard), mapping=self.iterations.fields())
        return stats

    def history(self, time_ms: int, **changes: Any) -> None:
        """Statistics of an earlier time, in the history alone; entries are in the order of time, so it begins anew."""
        key = self._keys.stats_history(self._shard)
        later = self._redis.xrange(key)
        self._redis.delete(key)
        self._redis.xadd(key, {**STATS, "time_ms": time_ms, **changes}, id=f"{time_ms}-0")
        for entry, fields in later:
            self._redis.xadd(key, fields, id=entry)

    def replica(self, name: str = "worker-0", **changes: Any) -> None:
        """The figures of one worker's replica."""
        self._redis.hset(self._keys.replicas(self._shard), name, json.dumps({**REPLICA, **changes}))

    def worker(self, name: str = "worker-0", **changes: str) -> None:
        self._redis.hset(self._keys.worker(name), mapping={**WORKER, **changes})
        self._redis.zadd(self._keys.workers, {name: self.now_ms()})
        self._redis.set(self._keys.alive("worker", name), 899)

    def event(self, kind: str, text: str) -> None:
        row = {"time_ms": int(time.time() * 1000), "shard": self._shard, "kind": kind, "text": text}
        self._redis.xadd(self._keys.events, row)
