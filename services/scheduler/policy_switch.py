"""The policy of the core: from the settings at the start, later from the `policy` command.

The core changes its policy when no sequence runs, which may be long after the command. The service calls `look` after
every plan. Each command is answered by one event: policy_changed or policy_refused. A command with the name of the
policy in force changes nothing and cancels a pending change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from services.scheduler.core.scheduler import Scheduler
from shared.settings import SchedulerSettings

log = logging.getLogger("orcinus.scheduler")


def make_scheduler(settings: SchedulerSettings) -> Scheduler:
    """Return the core that the settings describe. Raises ValueError for an unknown policy."""
    return Scheduler(
        settings.policy,
        max_seqs=settings.max_seqs,
        microbatches=settings.microbatches,
        lookahead=settings.lookahead,
        step_tokens=settings.step_tokens,
        prefix_cache={"auto": None, "on": True, "off": False}[settings.prefix_cache],
    )


class PolicySwitch:
    """Carries out `policy` commands. event(kind, text, policy=name): appends to `events`."""

    def __init__(self, core: Scheduler, event: Callable[..., None]) -> None:
        self._core = core
        self._event = event
        self._in_force = core.policy
        self._pending = ""

    @property
    def name(self) -> str:
        """Return the name of the policy in force."""
        return self._in_force.name

    def request(self, name: str) -> None:
        """Let `name` take over when no sequence runs. The last command counts."""
        try:
            self._core.switch(name)
        except ValueError as error:
            self._refuse(name, str(error))
            return
        if self._pending and self._pending != name:
            self._refuse(self._pending, f"{name} was requested before it could take over")
        self._pending = name if name != self.name else ""
        if not self._pending:
            log.info("policy %s stays in force", name)
            self._event("policy_changed", f"{name} is in force; no change is pending", policy=name)
            return
        log.info("policy %s takes over from %s when nothing runs any more", name, self.name)

    def look(self) -> None:
        """Write the event when the requested policy has taken over."""
        if self._core.policy is self._in_force:
            return
        before, self._in_force, self._pending = self.name, self._core.policy, ""
        log.info("policy %s has taken over from %s", self.name, before)
        self._event("policy_changed", f"{self.name} has taken over from {before}", policy=self.name)

    def _refuse(self, name: str, why: str) -> None:
        log.warning("policy %s refused: %s", name, why)
        self._event("policy_refused", why, policy=name)
