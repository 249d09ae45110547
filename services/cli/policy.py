"""`orcinus policy [NAME]`: show the policy of a shard's scheduler, or request another and wait for the answer.

Uses Redis alone: `control:{shard}` in, `events` out. Without a Redis address it uses the stack that `orcinus up` runs
on this machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protos import queue_pb2
from services.cli.stack import reachable_redis
from services.cli.waiting import Waiting
from services.launcher import redis_server
from services.scheduler.core.policy.presets import PRESETS, parse
from shared.errors import ConfigurationError
from shared.keys import Keys
from shared.messages import hide_password
from shared.redis_client import LIVE_TTL_MS
from shared.settings import CommonSettings, LauncherSettings

BLOCK_MS = 500
KINDS = {"policy_changed": True, "policy_refused": False}


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of the command."""

    changed: bool
    text: str


@dataclass(frozen=True, slots=True)
class Policies:
    """The policy in force and all presets. policy: empty if no scheduler reports."""

    shard: str
    policy: str
    set_at_run_time: bool
    presets: list[str]

    def text(self) -> str:
        """Return lines for people."""
        how = "set at run time; it outlives restarts" if self.set_at_run_time else "as configured"
        lines = [f"{self.shard}: {self.policy} ({how})" if self.policy else f"{self.shard}: no scheduler reports"]
        lines += ["", "presets (* in force):", *(f"  {'*' if p == self.policy else ' '} {p}" for p in self.presets)]
        remedy = "change it: orcinus policy NAME; parts may be replaced: sarathi:order=fair"
        return "\n".join([*lines, "", remedy, "docs/policies.md says what each does"])


def show(settings: CommonSettings, launcher: LauncherSettings) -> Policies:
    """Return the policy in force and the presets. Raises ConfigurationError when Redis cannot be reached."""
    import redis

    url, access = reachable_redis(settings, launcher)
    keys, shard = settings.keys, settings.shard
    try:
        with redis_server.client(url, timeout_s=5.0, **access) as client:
            policy = client.hget(keys.stats(shard), "policy") if client.exists(keys.lease(shard)) else None
            stored = client.exists(keys.policy(shard))
    except (redis.RedisError, OSError) as error:
        raise ConfigurationError(f"Redis at {hide_password(url)}: stopped answering: {error}; try again") from error
    return Policies(shard, policy.decode() if policy else "", bool(policy and stored), list(PRESETS))


def switch(
    name: str, settings: CommonSettings, launcher: LauncherSettings, timeout_s: float, say: Callable[[str], None]
) -> Answer:
    """Send the command and wait for the answer. say: called with each line of progress.

    Raises ConfigurationError for an invalid timeout, an unknown policy and an unreachable Redis, before anything is
    sent.
    """
    import redis

    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ConfigurationError(f"--timeout-s {timeout_s:g}: out of range; give a finite number of seconds above 0")
    try:
        parse(name)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    url, access = reachable_redis(settings, launcher)
    try:
        with redis_server.client(url, timeout_s=5.0, **access) as client:
            return _switch(client, settings.keys, settings.shard, name, timeout_s, say)
    except (redis.RedisError, OSError) as error:
        return Answer(False, f"Redis at {hide_password(url)} stopped answering: {error}")


def _switch(client: Any, keys: Keys, shard: str, name: str, timeout_s: float, say: Callable[[str], None]) -> Answer:
    if not client.exists(keys.lease(shard)):
        return Answer(False, f"no scheduler leads {shard} of model {keys.model}")
    newest = client.xrevrange(keys.events, count=1)
    last = newest[0][0] if newest else b"0-0"
    control = queue_pb2.Control(policy=queue_pb2.Control.Policy(name=name))
    key = keys.control(shard)
    client.xadd(key, {"c": control.SerializeToString()}, maxlen=10_000, approximate=True)
    client.pexpire(key, LIVE_TTL_MS)
    deadline, waiting = time.monotonic() + timeout_s, Waiting(say)
    while (left_s := deadline - time.monotonic()) > 0:
        reply: Any = client.xread({keys.events: last}, block=max(1, min(BLOCK_MS, int(1000 * left_s))))
        for _, rows in reply or []:
            for entry, fields in rows:
                last, kind = entry, fields.get(b"kind", b"").decode()
                is_answer = (fields.get(b"shard"), fields.get(b"policy")) == (shard.encode(), name.encode())
                if kind in KINDS and is_answer:
                    return Answer(KINDS[kind], fields[b"text"].decode())
        policy, running = _in_force(client, keys, shard)
        waiting.look(
            f"{shard}: {policy} is in force; {name} takes over when the running sequences ({running}) have ended"
        )
    policy, running = _in_force(client, keys, shard)
    return Answer(
        False,
        f"{policy} is still in force after {timeout_s:g} s: the running sequences ({running}) end first. The change to "
        f"{name} stays pending and no sequence starts until then; `orcinus policy {policy}` undoes it",
    )


def _in_force(client: Any, keys: Keys, shard: str) -> tuple[str, str]:
    """Return the policy in force and the number of running sequences; "?" where no scheduler has reported it."""
    policy, running = client.hmget(keys.stats(shard), "policy", "running")
    return policy.decode() if policy else "?", running.decode() if running else "?"
