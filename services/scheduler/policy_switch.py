"""The policy of the core: from the settings at the start, later from the `policy` command, also after a restart.

The core changes its policy when no sequence runs, which may be long after the command. The service calls `look` after
every plan. Each command is answered by one event: policy_changed or policy_refused. A command with the name of the
policy in force changes nothing and cancels a pending change. The event that says that a policy has taken over is
written together with `policy:{shard}`, from which the next scheduler of the shard restores it. A start with another
--policy than before forgets it: the operator's newest word counts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from services.scheduler.core.policy.presets import parse
from services.scheduler.core.scheduler import Scheduler
from shared.dead_letters import DeadLetters
from shared.redis_client import Value
from shared.settings import SchedulerSettings

log = logging.getLogger("orcinus.scheduler")

AHEAD_NS = 5_000_000
"""Time of steps in flight below which a further one is planned (docs/protocol.md#steps)."""


def make_scheduler(settings: SchedulerSettings) -> Scheduler:
    """Return the core that the settings describe. Raises ValueError for an unknown policy."""
    return Scheduler(
        settings.policy,
        max_seqs=settings.max_seqs,
        microbatches=settings.microbatches,
        lookahead=settings.lookahead,
        ahead_ns=AHEAD_NS,
        step_tokens=settings.step_tokens,
        prefix_cache={"auto": None, "on": True, "off": False}[settings.prefix_cache],
    )


def decode_policy(stored: bytes) -> tuple[str, str]:
    """Return the policy of `policy:{shard}` and the one configured then. Raises ValueError, TypeError or KeyError."""
    record = json.loads(stored)
    name, configured = str(record["policy"]), str(record["configured"])
    parse(name)
    return name, configured


class PolicySwitch:
    """Carries out `policy` commands.

    event(kind, text, first=command, policy=name): appends to `events`, together with a write command. key: of
    `policy:{shard}`.
    """

    def __init__(
        self, core: Scheduler, event: Callable[..., None], key: str, letters: DeadLetters | None = None
    ) -> None:
        self._letters = letters or DeadLetters()
        self._core = core
        self._event = event
        self._key = key
        self._configured_policy = core.policy.name
        self._in_force = core.policy
        self._pending_policy = ""

    @property
    def name(self) -> str:
        """Return the name of the policy in force."""
        return self._in_force.name

    def restore(self, stored: bytes | None) -> None:
        """Request the policy of `policy:{shard}`, unless the scheduler is configured otherwise than when it was set."""
        if stored is None:
            return
        record = self._letters.read(self._key, stored, decode_policy)
        if record is None:
            return
        name, configured = record
        if configured != self._configured_policy:
            log.info("policy %s, set at run time, gives way to the configured %s", name, self._configured_policy)
            return
        log.info("policy %s was set at run time", name)
        self.request(name)

    def request(self, name: str) -> None:
        """Let `name` take over when no sequence runs. The last command counts."""
        try:
            self._core.switch(name)
        except ValueError as error:
            self._refuse(name, str(error))
            return
        if self._pending_policy and self._pending_policy != name:
            self._refuse(self._pending_policy, f"{name} was requested before it could take over")
        self._pending_policy = name if name != self.name else ""
        if not self._pending_policy:
            log.info("policy %s stays in force", name)
            self._event(
                "policy_changed", f"{name} is in force; no change is pending", first=self._record(), policy=name
            )
            return
        log.info("policy %s takes over from %s when nothing runs any more", name, self.name)

    def look(self) -> None:
        """Write the event when the requested policy has taken over."""
        if self._core.policy is self._in_force:
            return
        before, self._in_force, self._pending_policy = self.name, self._core.policy, ""
        log.info("policy %s has taken over from %s", self.name, before)
        text = f"{self.name} has taken over from {before}"
        self._event("policy_changed", text, first=self._record(), policy=self.name)

    def _record(self) -> list[Value]:
        """Return the command that remembers the policy in force if it was set at run time, else forgets it."""
        if self.name == self._configured_policy:
            return ["DEL", self._key]
        return ["SET", self._key, json.dumps({"policy": self.name, "configured": self._configured_policy})]

    def _refuse(self, name: str, why: str) -> None:
        log.warning("policy %s refused: %s", name, why)
        self._event("policy_refused", why, policy=name)
