"""`orcinus drain NAME`: asks services to finish or hand over what they have and leave, and waits until they have.

Talks to Redis alone. A scheduler is told by its `control:{shard}`; workers and gateways look at `drain:{role}:{id}`
with each heartbeat. A scheduler is named by its shard.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from protos import queue_pb2
from services.cli.policy import redis_address
from services.launcher import redis_server
from shared.errors import ConfigurationError
from shared.keys import Keys
from shared.options import without_password
from shared.redis_client import LIVE_TTL_MS
from shared.settings import CommonSettings, LauncherSettings

ROLES = ("gateway", "scheduler", "worker")
POLL_S = 0.1
ORDER_MS = 60_000
"""How long an order lies for a service that does not look, because it hangs or is stopped."""


@dataclass(frozen=True, slots=True)
class Target:
    """A service that is there. `start` tells this start of it from the next one."""

    role: str
    id: str
    start: bytes


@dataclass(frozen=True, slots=True)
class Drained:
    """What became of it."""

    role: str
    id: str
    drained: bool
    text: str


def drain(
    name: str, settings: CommonSettings, launcher: LauncherSettings, timeout_s: float, say: Callable[[str], None]
) -> list[Drained]:
    """`name`: a role, for all services of it, or a worker's id, a shard, a gateway's id. `say` gets lines of progress.

    Raises ConfigurationError before anything is asked for: no such service, a silent Redis, a wait that is no time.
    """
    import redis

    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ConfigurationError(f"--timeout-s {timeout_s:g} must be a finite number of seconds above 0")
    url, access = redis_address(settings, launcher)
    redis_server.check_server(url, **access)
    asked: list[Target] = []
    try:
        with redis_server.client(url, timeout_s=5.0, **access) as client:
            asked = targets(client, settings.keys, name)
            return _drain(client, settings.keys, asked, timeout_s, say)
    except (redis.RedisError, OSError) as error:
        text = f"Redis at {without_password(url)} does not answer any more: {error}"
        return [Drained(target.role, target.id, False, text) for target in asked] or [Drained("", name, False, text)]


def targets(client: Any, keys: Keys, name: str) -> list[Target]:
    """The services that `name` means. Raises ConfigurationError when there is none."""
    found = list(_services(client, keys))
    named = [target for target in found if name in (target.role, target.id)]
    if not named:
        there = ", ".join(target.id for target in found) or "no service"
        raise ConfigurationError(f"nothing of model {keys.model} is called {name}; there is {there}")
    return named


def _services(client: Any, keys: Keys) -> Iterator[Target]:
    alive, lease = keys.alive("gateway", ""), keys.lease("")
    for gateway in _named(client, alive):
        yield Target("gateway", gateway, b"")
    for shard in _named(client, lease):
        yield Target("scheduler", shard, client.get(keys.shard_epoch(shard)) or b"")
    for worker in sorted(member.decode() for member in client.zrange(keys.workers, 0, -1)):
        if identity := client.hget(keys.worker(worker), "identity"):
            yield Target("worker", worker, identity)


def _named(client: Any, prefix: str) -> list[str]:
    pattern = prefix.replace("[", "\\[") + "*"
    return sorted(key.decode().removeprefix(prefix) for key in client.scan_iter(match=pattern, count=1000))


def _drain(client: Any, keys: Keys, asked: list[Target], timeout_s: float, say: Callable[[str], None]) -> list[Drained]:
    begin = time.monotonic()
    for target in asked:
        _order(client, keys, target)
    left = {target: "" for target in asked}
    done: list[Drained] = []
    while left:
        for target, said in list(left.items()):
            if _gone(client, keys, target):
                done.append(Drained(target.role, target.id, True, f"has left after {time.monotonic() - begin:.1f} s"))
                say(f"{target.role} {target.id} {done[-1].text}")
                del left[target]
            elif (now := _progress(client, keys, target)) != said:
                say(f"{target.role} {target.id} drains: {now}")
                left[target] = now
        if time.monotonic() - begin > timeout_s:
            break
        time.sleep(POLL_S)
    late = f"is still there after {timeout_s:g} s"
    return done + [Drained(target.role, target.id, False, f"{late}: {said}") for target, said in left.items()]


def _order(client: Any, keys: Keys, target: Target) -> None:
    if target.role == "scheduler":
        control = queue_pb2.Control(drain=queue_pb2.Control.Drain()).SerializeToString()
        client.xadd(keys.control(target.id), {"c": control}, maxlen=10_000, approximate=True)
        client.pexpire(keys.control(target.id), LIVE_TTL_MS)
    else:
        client.set(keys.drain(target.role, target.id), target.start or b"1", px=ORDER_MS)


def _gone(client: Any, keys: Keys, target: Target) -> bool:
    """Has this start of it ended, or (a scheduler) given its shard to another?"""
    if target.role == "gateway":
        return not client.exists(keys.alive("gateway", target.id))
    if target.role == "scheduler":
        return bool(client.get(keys.shard_epoch(target.id)) != target.start)
    return bool(client.hget(keys.worker(target.id), "identity") != target.start)


def _progress(client: Any, keys: Keys, target: Target) -> str:
    """What it still has to do, in a few words."""
    if target.role == "scheduler":
        running, waiting = (int(value or 0) for value in client.hmget(keys.stats(target.id), ["running", "waiting"]))
        return f"{running} sequences run, {waiting} wait"
    if target.role == "gateway":
        return f"{int(client.get(keys.alive('gateway', target.id)) or 0)} requests"
    return "it answers the steps that it has" if client.hget(keys.worker(target.id), "draining") else "not seen yet"
