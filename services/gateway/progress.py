"""Decide for /health/progress whether work moves, from the looks at Redis. Pure: time is an argument.

Work moves when a step was answered: the last step in a shard's statistics, or in the heartbeat of a scheduler or a
worker, is another one than before. A statistic that is not rewritten counts as it was written last, and a heartbeat
that expired is no movement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Observation:
    """One look: shards that are led, statistics by shard, heartbeats, requests that wait for their first step."""

    leases: frozenset[str] = frozenset()
    stats: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    steps: Mapping[str, str] = field(
        default_factory=dict
    )  # scheduler or worker -> last step, of heartbeats that are there
    queued_requests: float = 0.0


@dataclass(slots=True)
class _Track:
    """A part that may have work, and when its work last moved, or it last had none."""

    since: float
    works: bool = False
    mark: tuple[float, ...] = ()

    def look(self, works: bool, has_moved: bool, now: float) -> None:
        self.works = works
        if has_moved or not works:
            self.since = now


class Progress:
    """Follow each shard, and the requests of this gateway, for which any shard may move."""

    def __init__(self, now: float) -> None:
        self._shards: dict[str, _Track] = {}
        self._requests = _Track(now)
        self._steps: dict[str, str] = {}

    def look(self, observation: Observation | None, unfinished_count: int, now: float) -> None:
        """Take one look. observation: None while Redis is silent. unfinished_count: of its requests, those that run."""
        if observation is None:
            for track in self._shards.values():
                track.look(track.works, False, now)
            self._requests.look(self._requests.works or unfinished_count > 0, False, now)
            return
        has_moved = self._beats_moved(observation.steps)
        self._shards = {shard: self._shards.get(shard, _Track(now)) for shard in observation.stats}
        for shard, stats in observation.stats.items():
            track, mark = self._shards[shard], (stats.get("epoch", 0.0), stats.get("last_step", 0.0))
            # Other shards drain the work of a shard without a scheduler.
            counts = shard in observation.leases or not observation.leases
            works = counts and any(stats.get(name, 0.0) > 0 for name in ("running", "waiting", "in_flight"))
            track.look(works, mark != track.mark, now)
            has_moved |= mark != track.mark
            track.mark = mark
        # Parked requests that never ran are counted as queued; they wait until a client returns. Stranded ones are not:
        # they have run, and wait for a worker of their numerics or for their end.
        waiting_requests = observation.queued_requests - sum(
            stats.get("parked", 0.0) for stats in observation.stats.values()
        )
        led_stats = [
            stats for shard, stats in observation.stats.items() if shard in observation.leases or not observation.leases
        ]
        unfinished_count -= int(sum(stats.get("stranded", 0.0) for stats in led_stats))
        self._requests.look(unfinished_count > 0 or waiting_requests > 0, has_moved, now)

    def find_stall(self, now: float) -> tuple[float, str]:
        """Return for how many seconds work was there and did not move, and where; (0, '') when all is well."""
        stalls = [(now - track.since, f"shard {shard}") for shard, track in self._shards.items() if track.works]
        if self._requests.works:
            stalls.append((now - self._requests.since, "the queue"))
        return max(stalls, default=(0.0, ""))

    def _beats_moved(self, steps: Mapping[str, str]) -> bool:
        """Return whether any heartbeat names another step. One that begins anew, after a restart, has no step yet."""
        has_moved = any(step != self._steps.get(name, step) and step != "0" for name, step in steps.items())
        self._steps.update(steps)
        if len(self._steps) > 4 * len(steps) + 64:  # of processes that have ended
            self._steps = dict(steps)
        return has_moved
