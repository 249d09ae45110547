"""Follow the placer: which services of models sleep. While Redis does not answer nothing changes, and nothing waits."""

from __future__ import annotations

import threading
from collections.abc import Mapping
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
        self._reader: threading.Thread | None = None
        self._placements: dict[str, Placement] = {}

    def look(self, now: float) -> None:
        """Take what was read since the last call, and read again beside the caller, at most every LOOK_S.

        Pass over an answer with no model that is to be awake, or with too many.
        """
        if self._reader is not None:
            if self._reader.is_alive():
                return
            placements, self._reader = self._placements, None
            awake = {name for name in set(self._models.values()) if name in placements and placements[name].awake}
            if 0 < len(awake) <= self._most:
                self.asleep = frozenset(service for service, name in self._models.items() if name not in awake)
                self.is_read = True
        if now >= self._next:
            self._next = now + LOOK_S
            self._reader = threading.Thread(target=self._read, name="placements", daemon=True)
            self._reader.start()

    def _read(self) -> None:
        """Read the placements; none while Redis does not answer."""
        import redis

        try:
            self._placements = read_placements(self._client.hgetall(PLACER_KEYS.placements))
        except (redis.RedisError, OSError):
            self._placements = {}
