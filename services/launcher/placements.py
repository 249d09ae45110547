"""Follow the placer: which services of models sleep. While Redis does not answer nothing changes, and nothing waits."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from shared.keys import PLACER_KEYS
from shared.placement import Placement, read_placements

LOOK_S = 0.2


class SleepingServices:
    """The services of models that take turns. Until the placer has spoken all of them sleep."""

    def __init__(self, client: Any, models: Mapping[str, str], most: int) -> None:
        """client: as of redis_server.client. models: the model of each service. most: models awake at a time."""
        self.names = frozenset(models)
        self.asleep = self.names
        self.is_read = False
        """Whether the placer has spoken."""
        self._client = client
        self._models = dict(models)
        self._most = most
        self._next = 0.0
        self._reader = ThreadPoolExecutor(1, "placements")
        self._reading: Future[dict[str, Placement]] | None = None

    def look(self, now: float) -> None:
        """Take what was read since the last call, and read again beside the caller, at most every LOOK_S.

        Pass over an answer with no model that is to be awake, or with too many.
        """
        if self._reading is not None and self._reading.done():
            placements, self._reading = self._reading.result(), None
            awake = {name for name in set(self._models.values()) if name in placements and placements[name].awake}
            if 0 < len(awake) <= self._most:
                self.asleep = frozenset(service for service, name in self._models.items() if name not in awake)
                self.is_read = True
        if self._reading is None and now >= self._next:
            self._next = now + LOOK_S
            self._reading = self._reader.submit(self._read)

    def _read(self) -> dict[str, Placement]:
        """Return the placements; none while Redis does not answer."""
        import redis

        try:
            return read_placements(self._client.hgetall(PLACER_KEYS.placements))
        except (redis.RedisError, OSError):
            return {}
