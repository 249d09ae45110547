"""The core's policy: at the start from the settings, later by the `policy` command, with what `events` tell of it.

The core changes when nothing runs any more, which may be long after the command; the service calls `look` after every
plan. Each command gets one event in the end: policy_changed or policy_refused. The policy in force may be asked for
too: nothing changes then, and what was asked for before is undone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from services.scheduler.core.core import Core
from shared.settings import SchedulerSettings

log = logging.getLogger("orcinus.scheduler")


def make_core(settings: SchedulerSettings) -> Core:
    """The core that the settings ask for. Raises ValueError for a policy that does not exist."""
    return Core(
        settings.policy,
        max_seqs=settings.max_seqs,
        microbatches=settings.microbatches,
        lookahead=settings.lookahead,
        step_tokens=settings.step_tokens,
        prefix_cache={"auto": None, "on": True, "off": False}[settings.prefix_cache],
    )


class PolicySwitch:
    """`event(kind, text, policy=name)` tells the world."""

    def __init__(self, core: Core, event: Callable[..., None]) -> None:
        self._core = core
        self._event = event
        self._in_force = core.policy
        self._asked = ""

    @property
    def name(self) -> str:
        """Of the policy in force."""
        return self._in_force.name

    def ask(self, name: str) -> None:
        """`name` takes over when nothing runs any more; the last one asked for does, that in force at once."""
        try:
            self._core.switch(name)
        except ValueError as error:
            self._refuse(name, str(error))
            return
        if self._asked and self._asked != name:
            self._refuse(self._asked, f"{name} was asked for before it could take over")
        self._asked = name if name != self.name else ""
        if not self._asked:
            log.info("policy %s stays in force", name)
            self._event("policy_changed", f"{name} is in force; no change is pending", policy=name)
            return
        log.info("policy %s takes over from %s when nothing runs any more", name, self.name)

    def look(self) -> None:
        """Says so when the policy asked for has taken over."""
        if self._core.policy is self._in_force:
            return
        before, self._in_force, self._asked = self.name, self._core.policy, ""
        log.info("policy %s has taken over from %s", self.name, before)
        self._event("policy_changed", f"{self.name} has taken over from {before}", policy=self.name)

    def _refuse(self, name: str, why: str) -> None:
        log.warning("policy %s is refused: %s", name, why)
        self._event("policy_refused", why, policy=name)
