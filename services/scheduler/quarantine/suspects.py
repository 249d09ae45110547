"""Which request kills the worker? After a step that died, its requests run in halves until one is alone.

Pure: the service tells of deaths, arrivals, tokens and ends, and parks and lets run what it is told to. While anything
is suspected, all but the group on trial wait. A request is given up only when nothing else was with the worker at two
deaths, without a token of it in between (PROTOCOL, section 4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

DEATHS = 2


@dataclass(slots=True)
class Verdict:
    """What the service has to do, in this order."""

    park: list[str] = field(default_factory=list)
    resume: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)


class Suspects:
    """Groups under suspicion, of which one is on trial, and bystanders, who wait until nothing is suspected.

    One that gets a token while it is on trial is cleared and runs on beside the groups tried after it. So a death
    counts against a request only if nothing else was with the worker; otherwise its trial is repeated, and then it is
    alone, since whoever lost the worker waits and is parked.
    """

    def __init__(self) -> None:
        self._trial: set[str] = set()
        self._groups: deque[list[str]] = deque()
        self._aside: set[str] = set()
        self._alone: dict[str, int] = {}  # deaths at which nothing else was with the worker

    def __bool__(self) -> bool:
        return bool(self._trial or self._groups)

    @property
    def trial(self) -> Set[str]:
        """Those for whom all others wait."""
        return self._trial

    @property
    def bystanders(self) -> set[str]:
        """Those who are not suspected and only must not run beside the trial."""
        return self._aside

    def died(self, in_step: Set[str], at_worker: Set[str], unfinished: Set[str]) -> Verdict:
        """The worker is lost, and everybody waits.

        in_step: the requests of the step that it died in; empty if no request is to blame. at_worker: those of all
        unanswered steps. Both may name requests that have ended; `unfinished` are those that have not.
        """
        here = in_step & unfinished
        suspects = sorted(here & self._trial or here)
        verdict = Verdict()
        if suspects:
            untried = sorted((self._trial & unfinished) - set(suspects))
            if untried:
                self._groups.append(untried)
            self._take(suspects)
            half = (len(suspects) + 1) // 2
            self._trial = set(suspects[:half])
            if suspects[half:]:
                self._groups.appendleft(suspects[half:])
            elif at_worker | in_step == self._trial:
                self._count(suspects[0], verdict)
        if self:
            suspected = self._trial.union(*self._groups)
            self._aside = set(unfinished) - suspected - set(verdict.dead)
            verdict.park = sorted((unfinished - self._trial).difference(verdict.dead))
        return verdict

    def arrived(self, name: str) -> Verdict:
        """A new request waits with the bystanders."""
        verdict = Verdict()
        if self:
            verdict.park = [name]
            self._aside.add(name)
        return verdict

    def progressed(self, names: Set[str]) -> Verdict:
        """These got a token: what they did is not what kills."""
        verdict = Verdict()
        for name in names & self._trial:
            self._end(name, verdict)
        return verdict

    def ended(self, name: str) -> Verdict:
        """The request is over, for whatever reason."""
        verdict = Verdict()
        self._aside.discard(name)
        self._end(name, verdict)
        return verdict

    def _take(self, suspects: list[str]) -> None:
        """Out of the groups: they are tried anew."""
        for group in self._groups:
            group[:] = [name for name in group if name not in suspects]

    def _count(self, name: str, verdict: Verdict) -> None:
        self._alone[name] = self._alone.get(name, 0) + 1
        if self._alone[name] == DEATHS:
            verdict.dead = [name]
            self._end(name, verdict)

    def _end(self, name: str, verdict: Verdict) -> None:
        """No longer a suspect. The next group is tried; after the last one all run again."""
        suspected = bool(self)
        self._alone.pop(name, None)
        self._trial.discard(name)
        self._take([name])
        while not self._trial and self._groups:
            self._trial = set(self._groups.popleft())
            verdict.resume += sorted(self._trial)
        if suspected and not self:
            verdict.resume += sorted(self._aside)
            self._aside.clear()
