"""See whether a service works: by the traces that it leaves in Redis, or by its health address.

Before each start the probe reads the trace of the process before (a record that has not expired), and ignores that one.
"""

from __future__ import annotations

import http.client
import json
import select
import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shared.keys import PLACER, PLACER_KEYS
from shared.placement import read_placements

TIMEOUT_S = 1.0
SLOW_S = 0.2  # an error after so long is silence, whatever its type
ANSWER_S = 0.5
"""Time to wait for an answer at one look."""
ANSWER_BYTES = 64 << 10
SERVING = ("ready", "asleep")


class RedisProbe:
    """Ready when Redis answers: while it reads its file back it answers LOADING."""

    wait_reason = ""

    def __init__(self, client: Any) -> None:
        self._client = client

    def arm(self) -> None:
        return None

    def ready(self) -> bool:
        import redis

        try:
            return bool(self._client.ping())
        except (redis.RedisError, OSError):
            return False


class SharedClient:
    """A client of many probes. After a time-out it refuses at once for TIMEOUT_S: a silent Redis holds up the thread
    that probes, and signals with it, once and not as often as there are probes.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._silent_until = 0.0

    def get(self, key: str) -> Any:
        return self._ask(self._client.get, key)

    def hget(self, key: str, field: str) -> Any:
        return self._ask(self._client.hget, key, field)

    def hgetall(self, key: str) -> Any:
        return self._ask(self._client.hgetall, key)

    def _ask(self, command: Callable[..., Any], *words: str) -> Any:
        import redis

        begun = time.monotonic()
        if begun < self._silent_until:
            raise redis.TimeoutError("Redis was silent a moment ago")
        try:
            return command(*words)
        except redis.RedisError as error:  # a slow name service is another one
            if isinstance(error, redis.TimeoutError) or time.monotonic() - begun > SLOW_S:
                self._silent_until = time.monotonic() + TIMEOUT_S
            raise


class _TraceProbe:
    """Ready when a key of Redis has another value than before the start."""

    wait_reason = ""

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self._key = key
        self._old: bytes | None = None

    def arm(self) -> None:
        self._old = self._trace()

    def ready(self) -> bool:
        trace = self._trace()
        return trace is not None and trace != self._old

    def _read(self) -> bytes | None:
        raise NotImplementedError

    def _trace(self) -> bytes | None:
        import redis

        try:
            return self._read()
        except (redis.RedisError, OSError):
            return None


class WorkerProbe(_TraceProbe):
    """Ready when the worker has registered, after loading and warm-up. Each start has a new identity."""

    def _read(self) -> bytes | None:
        value: bytes | None = self._client.hget(self._key, "identity")
        return value


class SchedulerProbe(_TraceProbe):
    """Ready when the scheduler has the shard's lease. Each lease has a new epoch."""

    def _read(self) -> bytes | None:
        value: bytes | None = self._client.get(self._key)
        return value


class LedProbe(SchedulerProbe):
    """Ready once the scheduler that was started has begun, while it or another one has the shard's lease."""

    def __init__(self, client: Any, key: str, begun: Path) -> None:
        """begun: the file that the process writes (shared/processes/begun.py)."""
        super().__init__(client, key)
        self._begin_file = begun

    def arm(self) -> None:
        self._begin_file.unlink(missing_ok=True)

    def ready(self) -> bool:
        return self._begin_file.exists() and self._trace() is not None


class PlacedProbe(LedProbe):
    """Ready once the placer that was started has begun, while it or another one for these models leads."""

    def __init__(self, client: Any, models: Iterable[str], begun: Path) -> None:
        super().__init__(client, PLACER_KEYS.lease(PLACER), begun)
        self._models = set(models)

    def _read(self) -> bytes | None:
        placed = read_placements(self._client.hgetall(PLACER_KEYS.placements)).keys()
        return super()._read() if placed == self._models else None


class GatewayProbe:
    """Ready when /health/ready answers 200, over TLS with any certificate: the launcher started that process.

    The first time, each of several models that the answer names has to be ready too: the gateway is with one of them.

    The launcher holds the port, so a request waits in its queue while the gateway starts. Look for its answer at later
    calls.
    """

    def __init__(self, host: str, port: int, tls: bool = False, key: str | None = None) -> None:
        """key: one that is good for all models; a gateway that needs one names none without it."""
        wildcard = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}  # noqa: S104
        self._address = (wildcard.get(host, host.strip("[]")), port)
        self._tls = ssl._create_unverified_context() if tls else None  # noqa: S323
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._pending: http.client.HTTPConnection | None = None  # a request without its answer
        self.wait_reason = ""
        self._complete = False  # all models have been ready

    def arm(self) -> None:
        self.wait_reason = ""
        self._end()

    def ready(self) -> bool:
        try:
            if self._pending is None:
                self._pending = self._connection()
                self._pending.request("GET", "/health/ready", headers=self._headers)
            if not select.select([self._pending.sock], [], [], ANSWER_S)[0]:
                return False
            answer = self._pending.getresponse()
            is_ready = answer.status == 200
            if not self._complete:
                self.wait_reason = ", ".join(_late_models(answer.read(ANSWER_BYTES)))
                self._complete = is_ready = is_ready and not self.wait_reason
        except (OSError, http.client.HTTPException):
            is_ready = False
        self._end()
        return is_ready

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        return http.client.HTTPSConnection(*self._address, timeout=TIMEOUT_S, context=self._tls)

    def _end(self) -> None:
        if self._pending is not None:
            self._pending.close()
            self._pending = None


def _late_models(body: bytes) -> list[str]:
    """Return those of several models in an answer of /health/ready that neither are ready nor sleep, with states."""
    try:
        states = json.loads(body).get("models", {})
        return [f"{name} ({state})" for name, state in states.items() if len(states) > 1 and state not in SERVING]
    except (ValueError, AttributeError):
        return []
