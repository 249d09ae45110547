"""Follow the placer: which services of models sleep. While Redis does not answer nothing changes, and nothing waits."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from shared.keys import PLACER_KEYS
from shared.messages import quantity
from shared.placement import Placement, read_placements

LOOK_S = 0.2
MISMATCH_S = 10.0
"""Longer than a placer needs to replace what one of the time before, with another file, has written."""


class SleepingServices:
    """The services of models that take turns. Until the placer has spoken all of them sleep."""

    def __init__(self, client: Any, models: Mapping[str, str], most: int) -> None:
        """client: as of redis_server.client. models: the model of each service. most: models awake at a time."""
        self.names = frozenset(models)
        self.asleep = self.names
        self.is_read = False
        """Whether the placer has spoken."""
        self.problem = ""
        """Why the placer is not followed; empty while it is."""
        self._client = client
        self._models = dict(models)
        self._most = most
        self._next = 0.0
        self._reader: threading.Thread | None = None
        self._placements: dict[str, Placement] = {}
        self._mismatch_since: float | None = None

    @property
    def is_followed(self) -> bool:
        """Whether the placer has spoken, and what it says can be done."""
        return self.is_read and not self.problem

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
            self._note_mismatch(len(awake), now)
        if now >= self._next:
            self._next = now + LOOK_S
            self._reader = threading.Thread(target=self._read, name="placements", daemon=True)
            self._reader.start()

    def _note_mismatch(self, awake: int, now: float) -> None:
        if awake <= self._most:
            self.problem, self._mismatch_since = "", None
            return
        self._mismatch_since = now if self._mismatch_since is None else self._mismatch_since
        if now - self._mismatch_since >= MISMATCH_S:
            models = quantity(awake, "model")
            self.problem = f"placer: {models} awake, this file allows {self._most}; give all engines the same file"

    def _read(self) -> None:
        """Read the placements; none while Redis does not answer."""
        import redis

        try:
            self._placements = read_placements(self._client.hgetall(PLACER_KEYS.placements))
        except (redis.RedisError, OSError):
            self._placements = {}
