"""The worker's record and heartbeat in Redis (docs/redis.md#services), kept by one thread with a separate client.

The record is written once a second and outlives the worker by 5 s at most; the model's sorted set of workers, by which
schedulers find it, is written with it. The record's field `shard` belongs to the scheduler that took the
worker (compare-and-set) and is never written here.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from protos import worker_pb2
from shared.settings import WorkerSettings
from shared.telemetry.process_usage import ProcessUsage
from shared.wire.handshake import wrong_epoch, wrong_token

log = logging.getLogger("orcinus.worker")

TTL_MS = 5000
WORKERS_MS = 60_000  # a member of the sorted set that was not seen for so long goes
REFRESH_S = 1.0
OLD_RULES = "load the rules of deploy/redis/users.acl; restart Redis"
BACKOFF_S = (0.2, 5.0)  # first and longest pause after a failure


class Registration:
    """Keeps worker:{id}, alive:worker:{id} and its place in `workers` while it runs."""

    def __init__(
        self,
        settings: WorkerSettings,
        fields: dict[str, str],
        last_step_id: Callable[[], int],
        on_drain: Callable[[], None] = lambda: None,
        figures: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """Prepare the record.

        on_drain: is called at every heartbeat once `orcinus drain` has named this worker's start. figures: further
        fields, of each heartbeat.
        """
        self._figures = figures
        self._keys = settings.keys
        self._id = settings.worker_id
        self._workers = settings.keys.workers
        self._key = settings.keys.worker(settings.worker_id)
        self._drain = settings.keys.drain("worker", settings.worker_id)
        self._alive = settings.keys.alive("worker", settings.worker_id)
        self._fields = fields
        self._last_step_id = last_step_id
        self._on_drain = on_drain
        url = urlsplit(settings.redis_url)
        self._where = url.netloc.rpartition("@")[2]  # without what may be a password
        self._user = settings.redis_username or url.username or "default"
        options: dict[str, Any] = settings.redis_options()
        self._redis = redis.Redis.from_url(
            settings.redis_url,
            socket_timeout=2.0,
            socket_connect_timeout=2.0,
            retry=Retry(NoBackoff(), 0),
            **options,
        )
        self._is_denied = False  # the rules of Redis's user do not let this worker read a lease
        self._waits_for = ""  # why Redis does not take the record
        self._usage = ProcessUsage()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="registration", daemon=True)

    def refusal(self, first: worker_pb2.Step, is_known: bool) -> str:
        """Return why Redis does not let a Run begin with this step; empty where it does. For any thread.

        is_known: as of `wrong_token`.
        """
        try:
            with self._redis.pipeline(transaction=False) as pipe:
                pipe.hget(self._key, "shard")
                pipe.hget(self._key, "run")
                shard, run = pipe.execute()
            if wrong := wrong_epoch(first, shard, run):
                return wrong
            # Only now: until then the name is a peer's, of any length.
            lease: Any = self._redis.get(self._keys.lease(first.hello.shard))
        except redis.exceptions.NoPermissionError as error:
            if not self._is_denied:
                log.error("Redis at %s lets no Run begin: %s; %s", self._where, error, OLD_RULES)
            self._is_denied = True
            return f"lease: Redis does not let this worker read it ({error}); {OLD_RULES}"
        except (redis.RedisError, OSError) as error:
            return f"lease: Redis does not say which shard may begin a Run: {self._why(error)}; retry when it answers"
        self._is_denied = False
        return wrong_token(first, lease, is_known)

    def start(self) -> None:
        """Begin to register; a Redis that is not there is waited for."""
        self._thread.start()

    def stop(self) -> None:
        """Take the record away, so that no scheduler dials a worker that has left."""
        self._stop.set()
        self._thread.join()
        try:
            # Another start under the same id may have registered meanwhile: its record stays.
            if self._redis.hget(self._key, "identity") == self._fields["identity"].encode():
                with self._redis.pipeline(transaction=False) as pipe:
                    pipe.delete(self._key, self._alive)
                    pipe.zrem(self._workers, self._id)
                    pipe.execute()
        except redis.RedisError as error:
            if not self._waits_for:
                log.warning("could not remove %s: %s; it expires in %d s", self._key, error, TTL_MS // 1000)
        self._redis.close()

    def leave(self) -> None:
        """Say that the worker drains: no scheduler takes it any more."""
        self._fields |= {"ready": "0", "draining": "1"}
        try:
            self.refresh()
        except (redis.RedisError, OSError) as error:
            if self._waits_for:
                return  # no scheduler knows of this worker
            log.warning("could not say in %s that the worker drains: %s", self._key, error)

    def refresh(self) -> None:
        """Write the record, the heartbeat and the place among the workers once, and look whether an operator wants
        the worker to drain. Raise redis.RedisError."""
        # Redis's clock: a machine with a wrong clock would remove the others, or be removed.
        seconds, micros = self._redis.time()
        now_ms = seconds * 1000 + micros // 1000
        with self._redis.pipeline(transaction=False) as pipe:
            fields: dict[Any, Any] = {
                **self._fields,
                **self._usage.fields(),
                **self._figures(),
            }  # redis-py wants keys of all types that it takes
            pipe.hset(self._key, mapping=fields)
            pipe.pexpire(self._key, TTL_MS)
            pipe.set(self._alive, self._last_step_id(), px=TTL_MS)
            pipe.zadd(self._workers, {self._id: now_ms})
            pipe.zremrangebyscore(self._workers, "-inf", now_ms - WORKERS_MS)
            pipe.pexpire(self._workers, WORKERS_MS)
            pipe.get(self._drain)
            *_, drained = pipe.execute()
        if drained == self._fields["identity"].encode():  # this start of the worker, and not the one that follows
            self._on_drain()

    def _loop(self) -> None:
        pause, registered = BACKOFF_S[0], False
        while not self._stop.is_set():
            try:
                self.refresh()
            except (redis.RedisError, OSError) as error:
                if "WRONGTYPE" in str(error):
                    self._remove_foreign()
                if (why := self._why(error)) != self._waits_for:  # once: it may last
                    log.warning("waiting for Redis to register %s: %s", self._key, why)
                self._waits_for, registered = why, False
                # Jitter: after a restart of Redis not every worker comes back in the same moment.
                self._stop.wait(pause * random.uniform(0.5, 1.0))  # noqa: S311
                pause = min(pause * 2, BACKOFF_S[1])
                continue
            if not registered:
                log.info("registered as %s", self._key)
            self._waits_for = ""
            pause, registered = BACKOFF_S[0], True
            self._stop.wait(REFRESH_S)

    def _remove_foreign(self) -> None:
        """Delete the keys of this worker: one of them has a type that no worker gives it."""
        try:
            self._redis.delete(self._key, self._alive, self._workers)
        except (redis.RedisError, OSError) as error:
            log.warning("%s not deleted: %s; retrying", self._key, error)

    def _why(self, error: Exception) -> str:
        """Return what Redis said, and what the operator can do about a refused name or password."""
        if isinstance(error, redis.AuthenticationError):
            return (
                f"Redis at {self._where} refuses the user {self._user!r} ({error}); look at "
                "ORCINUS_REDIS_USERNAME and ORCINUS_REDIS_PASSWORD"
            )
        return str(error)
