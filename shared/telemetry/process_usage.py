"""CPU and memory of this process, which each service publishes beside its other figures."""

from __future__ import annotations

import time

import psutil


class ProcessUsage:
    """Measures this process between two calls of `fields`."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._at, self._cpu_s = time.monotonic(), self._read_cpu_s()

    def fields(self) -> dict[str, float | int]:
        """Return `cpu_pct`, since the last call (100 is one core), and `rss_bytes`, now."""
        at, cpu_s = time.monotonic(), self._read_cpu_s()
        share = 100 * (cpu_s - self._cpu_s) / max(1e-3, at - self._at)
        self._at, self._cpu_s = at, cpu_s
        return {"cpu_pct": round(share, 1), "rss_bytes": int(self._process.memory_info().rss)}

    def _read_cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)
