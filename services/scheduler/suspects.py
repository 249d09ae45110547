"""Which request kills the worker? After a step that died, its requests run in halves until one is alone.

Pure: the service tells of deaths, tokens and ends, and parks and lets run what it is told to. A request is given up
only when it was the one suspect in the step at two deaths, without a token in between (PROTOCOL, section 4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

DEATHS = 2


@dataclass(slots=True)
class Verdict:
    """What the service has to do."""

    park: list[str] = field(default_factory=list)
    resume: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)


class Suspects:
    """Groups under suspicion: one is on trial, the others are parked until it is cleared or found out."""

    def __init__(self) -> None:
        self._trial: set[str] = set()
        self._parked: deque[list[str]] = deque()
        self._alone: dict[str, int] = {}  # deaths at which it was the one suspect

    def __bool__(self) -> bool:
        return bool(self._trial or self._parked)

    def died(self, in_step: Iterable[str]) -> Verdict:
        """The step with these requests died. While a group is on trial, only its members are suspected."""
        ids = sorted(in_step)
        suspects = [name for name in ids if name in self._trial] or ids
        verdict = Verdict()
        if not suspects:
            return verdict
        if len(suspects) > 1:
            half = len(suspects) // 2
            verdict.park = suspects[half:]
            self._parked.appendleft(suspects[half:])
            cleared = self._trial - set(suspects)
            self._trial = set(suspects[:half])
            # Those of the group that were not in the step are tried later, unharmed.
            if cleared:
                verdict.park += sorted(cleared)
                self._parked.append(sorted(cleared))
            return verdict
        name = suspects[0]
        self._alone[name] = self._alone.get(name, 0) + 1
        if self._alone[name] < DEATHS:
            self._trial = {name}
            return verdict
        verdict.dead = [name]
        self._end(name, verdict)
        return verdict

    def progressed(self, names: Set[str]) -> Verdict:
        """These got a token: what they did is not what kills."""
        verdict = Verdict()
        for name in names & (self._trial | self._alone.keys()):
            self._end(name, verdict)
        return verdict

    def ended(self, name: str) -> Verdict:
        """The request is over, for whatever reason."""
        verdict = Verdict()
        self._end(name, verdict)
        return verdict

    def _end(self, name: str, verdict: Verdict) -> None:
        self._alone.pop(name, None)
        self._trial.discard(name)
        for group in self._parked:
            if name in group:
                group.remove(name)
        while not self._trial and self._parked:
            self._trial = set(self._parked.popleft())
            verdict.resume += sorted(self._trial)
