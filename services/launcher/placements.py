"""Follow the placer: which services of models sleep. While Redis does not answer, nothing changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.keys import PLACER_KEYS
from shared.placement import read_placements

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

    def look(self, now: float) -> None:
        """Read which models are to be awake, at most every LOOK_S; pass over an answer with none, or with too many."""
        if now < self._next:
            return
        import redis

        self._next = now + LOOK_S
        try:
            placements = read_placements(self._client.hgetall(PLACER_KEYS.placements))
        except (redis.RedisError, OSError):
            return
        awake = {name for name in set(self._models.values()) if name in placements and placements[name].awake}
        if 0 < len(awake) <= self._most:
            self.asleep = frozenset(service for service, name in self._models.items() if name not in awake)
            self.is_read = True
