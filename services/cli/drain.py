"""`orcinus drain NAME`: order services to finish or hand over their requests and stop, and wait until they have.

Uses Redis only. A scheduler, named by its shard, reads the order from `control:{shard}`. Workers and gateways check
`drain:{role}:{id}` with each heartbeat.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from protos import queue_pb2
from services.cli.stack import reachable_redis
from services.cli.waiting import Waiting
from services.launcher import redis_server
from shared.errors import ConfigurationError
from shared.keys import PLACER_KEYS, Keys
from shared.messages import hide_password, quantity
from shared.placement import read_placements
from shared.redis_client import LIVE_TTL_MS
from shared.settings import CommonSettings, LauncherSettings

ROLES = ("gateway", "scheduler", "worker")
POLL_S = 0.1
ORDER_MS = 60_000
"""Lifetime of an order for a service that does not read it, because it hangs or is stopped."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running service. `start` distinguishes this start of it from the next one."""

    role: str
    id: str
    start: bytes
    keys: Keys
    shows_model: bool = False  # whether there are several models

    def __str__(self) -> str:
        return f"{self.role} {self.id}" + (f" of {self.keys.model}" if self.shows_model else "")

    def result(self, drained: bool, text: str) -> Drained:
        """Return the result for it."""
        return Drained(self.role, self.id, drained, text, self.keys.model)


@dataclass(frozen=True, slots=True)
class Drained:
    """The result for one service."""

    role: str
    id: str
    drained: bool
    text: str
    model: str = ""


def drain(
    name: str,
    settings: CommonSettings,
    launcher: LauncherSettings,
    timeout_s: float,
    say: Callable[[str], None],
    models: Sequence[str] = (),
) -> list[Drained]:
    """Drain the services that `name` selects and return a result for each.

    name: a role for all of its services, or the id of a worker or gateway, or a shard; an empty one is an error that
    names those that run. say: called with each line of progress. models: the models of these services; empty means that
    of the settings. Raises ConfigurationError, before the first order, for an unknown service, a silent Redis or a bad
    time.
    """
    import redis

    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ConfigurationError(f"--timeout-s {timeout_s:g}: out of range; give a finite number of seconds above 0")
    url, access = reachable_redis(settings, launcher)
    selected: list[Target] = []
    try:
        with redis_server.client(url, timeout_s=5.0, **access) as client:
            selected = targets(client, models or [settings.served_model_name], name)
            return _drain(client, selected, timeout_s, say)
    except (redis.RedisError, OSError) as error:
        text = f"Redis at {hide_password(url)} stopped answering: {error}"
        return [target.result(False, text) for target in selected] or [Drained("", name, False, text)]


def targets(client: Any, models: Sequence[str], name: str) -> list[Target]:
    """Return the services that `name` selects: a gateway once, whatever its models. Raises ConfigurationError if there
    is none.
    """
    services: dict[tuple[str, str, str], Target] = {}
    for model in models:
        for each in _services(client, Keys(model), len(models) > 1):
            services.setdefault((each.role, each.id, "" if each.role == "gateway" else model), each)
    selected = [target for target in services.values() if name in (target.role, target.id)]
    if not selected:
        if name:
            of = f"model {models[0]}" if len(models) == 1 else f"models {', '.join(models)}"
            problem = f"{name[:100]}: no such service for {of}"
        else:
            problem = f"NAME: missing; give {', '.join(ROLES[:-1])} or {ROLES[-1]} for all of them, or an id of one"
        raise ConfigurationError(f"{problem}; running: {_running(client, models, list(services.values()))}")
    return selected


def _running(client: Any, models: Sequence[str], services: Sequence[Target]) -> str:
    """Return the ids of `services`, each with its models where there are several, and the models that sleep."""
    models_of: dict[str, list[str]] = {}
    for target in services:
        models_of.setdefault(target.id, []).extend([target.keys.model] if target.shows_model else [])
    text = ", ".join(f"{id} ({', '.join(names)})" if names else id for id, names in models_of.items()) or "none"
    working = {target.keys.model for target in services if target.role == "worker"}
    placed = read_placements(client.hgetall(PLACER_KEYS.placements))
    sleeping = [model for model in models if model in placed and not placed[model].awake and model not in working]
    return text + (f"; asleep, without a worker until a request comes: {', '.join(sleeping)}" if sleeping else "")


def _services(client: Any, keys: Keys, shows_model: bool) -> Iterator[Target]:
    for gateway in _ids_below(client, keys.alive("gateway", "")):
        yield Target("gateway", gateway, b"", keys)
    for shard in _ids_below(client, keys.lease("")):
        yield Target("scheduler", shard, client.get(keys.shard_epoch(shard)) or b"", keys, shows_model)
    for worker in sorted(member.decode() for member in client.zrange(keys.workers, 0, -1)):
        if identity := client.hget(keys.worker(worker), "identity"):
            yield Target("worker", worker, identity, keys, shows_model)


def _ids_below(client: Any, prefix: str) -> list[str]:
    pattern = prefix.replace("[", "\\[") + "*"
    return sorted(key.decode().removeprefix(prefix) for key in client.scan_iter(match=pattern, count=1000))


def _drain(client: Any, selected: list[Target], timeout_s: float, say: Callable[[str], None]) -> list[Drained]:
    begin = time.monotonic()
    for target in selected:
        _order(client, target)
    left = {target: Waiting(say) for target in selected}
    states: dict[Target, str] = {}
    done: list[Drained] = []
    while left:
        for target, waiting in list(left.items()):
            if _has_left(client, target):
                done.append(target.result(True, f"has left after {time.monotonic() - begin:.1f} s"))
                say(f"{target} {done[-1].text}")
                del left[target]
                continue
            states[target] = _progress(client, target)
            waiting.look(f"{target} drains: {states[target]}")
        if time.monotonic() - begin > timeout_s:
            break
        time.sleep(POLL_S)
    late = f"has not left after {timeout_s:g} s"
    return done + [target.result(False, f"{late}: {states[target]}") for target in left]


def _order(client: Any, target: Target) -> None:
    keys = target.keys
    if target.role == "scheduler":
        control = queue_pb2.Control(drain=queue_pb2.Control.Drain()).SerializeToString()
        client.xadd(keys.control(target.id), {"c": control}, maxlen=10_000, approximate=True)
        client.pexpire(keys.control(target.id), LIVE_TTL_MS)
    else:
        client.set(keys.drain(target.role, target.id), target.start or b"1", px=ORDER_MS)


def _has_left(client: Any, target: Target) -> bool:
    """Return whether this start of the service has ended, or (for a scheduler) another one leads its shard."""
    keys = target.keys
    if target.role == "gateway":
        return not client.exists(keys.alive("gateway", target.id))
    if target.role == "scheduler":
        return bool(client.get(keys.shard_epoch(target.id)) != target.start)
    return bool(client.hget(keys.worker(target.id), "identity") != target.start)


def _progress(client: Any, target: Target) -> str:
    """Return the work that the service still has, as a short text."""
    keys = target.keys
    if target.role == "scheduler":
        running, waiting = (int(value or 0) for value in client.hmget(keys.stats(target.id), ["running", "waiting"]))
        return f"sequences: {running} running, {waiting} waiting"
    if target.role == "gateway":
        return quantity(int(client.get(keys.alive("gateway", target.id)) or 0), "request")
    return "it finishes its steps in flight" if client.hget(keys.worker(target.id), "draining") else "not seen yet"
