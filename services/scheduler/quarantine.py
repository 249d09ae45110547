"""Requests that get no step for a while: under suspicion of killing the worker, or of a gateway that is gone.

The second are kept until adopted (docs/protocol.md#faults), for ABANDONED_S. A request is parked as long as one
of the two reasons holds; one on trial runs in any case, as all others wait for it. No clock and no Redis: the
service tells.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from services.scheduler.core.core import Core
from services.scheduler.core.types import Finish

log = logging.getLogger("orcinus.scheduler")

DEATHS = 2


@dataclass(slots=True)
class Verdict:
    """What the service has to do, in this order."""

    park: list[str] = field(default_factory=list)
    resume: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)


class Bisection:
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


ABANDONED_S = 300.0
GONE_S = 2.0
"""How long a heartbeat must be missing, after it ran out: a Redis that was away has none of anybody."""
NEVER_CAME_S = 10.0
"""The same for a gateway that this scheduler has never heard."""
DOCK_S = 3.0
"""So long those on trial wait for the worker that died to come back; then another one is emptied for them."""


class Quarantine:
    """Tells the core what to park and what to let run."""

    def __init__(
        self, core: Core, give_up: Callable[[str, str], None], abandon: Callable[[str, Finish, str], None]
    ) -> None:
        """give_up: of a request that kills workers, with the reason; abandon: of one that nobody delivers."""
        self._core = core
        self._give_up = give_up
        self._abandon = abandon
        self._suspects = Bisection()
        self._suspected: set[str] = set()
        self._broken: dict[str, tuple[str, Set[str], Set[str]]] = {}  # worker -> what `lost` was told
        self._died_ns = 0  # when a worker was last known to have died
        self._gateways: dict[str, str] = {}  # request -> who delivers it
        self._orphans: dict[str, float] = {}  # request -> since when nobody does
        self._background: set[str] = set()
        self._heard: set[str] = set()
        self._missing: dict[str, float] = {}  # gateway -> when it was first seen to be missing

    @property
    def suspecting(self) -> bool:
        return bool(self._suspects)

    # Suspicion

    def lost(self, worker: str, identity: str, in_step: Set[str], at_worker: Set[str]) -> None:
        """The link to a worker broke. Until `found` or `gone` tells whether it died its oldest step's requests wait, or
        they might kill another one. in_step and at_worker as in Bisection.died."""
        self._broken[worker] = (identity, in_step, at_worker)
        for name in in_step & self._gateways.keys():
            self._core.park(name)

    def found(self, worker: str, identity: str, now_ns: int) -> None:
        """This worker is linked, and its replica has joined. One with the identity that it had when it was lost has not
        died, so no step killed it."""
        if worker in self._broken:
            self._explained(worker, identity != self._broken[worker][0], now_ns)
            self._core.assign_dock(now_ns)  # the one that joined has nothing to do yet

    def gone(self, silent: Callable[[str], bool], now_ns: int) -> None:
        """Of those whose links broke the silent have died. While there is no replica to try anybody on, nobody is
        suspected: another shard may take them."""
        for worker in [worker for worker in self._broken if self._core.alive and silent(worker)]:
            self._explained(worker, True, now_ns)

    def _explained(self, worker: str, died: bool, now_ns: int) -> None:
        _, in_step, at_worker = self._broken.pop(worker)
        self.died(in_step if died else set(), at_worker, now_ns)
        for name in sorted(in_step & self._gateways.keys()):
            self._resume(name, now_ns)

    def died(self, in_step: Set[str], at_worker: Set[str], now_ns: int) -> None:
        """A worker is lost; see Bisection.died."""
        if in_step:
            self._died_ns = now_ns
        self._judge(self._suspects.died(in_step, at_worker, set(self._gateways)), now_ns)

    @property
    def gateways(self) -> set[str]:
        """Who delivers anything."""
        return set(self._gateways.values())

    def arrived(self, name: str, gateway: str, now_ns: int, delivered: bool = True, background: bool = False) -> None:
        """delivered: is the heartbeat of its gateway there? background: it waits for a gateway, however long."""
        self._gateways[name] = gateway
        if background:
            self._background.add(name)
        if not delivered:
            self._orphans[name] = now_ns / 1e9
            self._core.park(name)
        self._judge(self._suspects.arrived(name), now_ns)

    def progressed(self, names: Set[str], now_ns: int) -> None:
        self._judge(self._suspects.progressed(names), now_ns)

    def ended(self, name: str, now_ns: int) -> None:
        self._gateways.pop(name, None)
        self._orphans.pop(name, None)
        self._background.discard(name)
        self._suspected.discard(name)
        if self._suspects:
            self._judge(self._suspects.ended(name), now_ns)

    def _judge(self, verdict: Verdict, now_ns: int) -> None:
        alone = not self._core.alive  # else bystanders run on at the other workers
        for name in verdict.park:
            if alone or name not in self._suspects.bystanders:
                self._suspected.add(name)
                self._core.park(name)
        for name in verdict.resume:
            self._suspected.discard(name)
            self._resume(name, now_ns)
        for name in self._suspects.trial & self._orphans.keys():
            self._core.resume(name, now_ns)
        self._core.confine(self._suspects.trial)
        for name in verdict.dead:
            self._give_up(name, "the worker died twice in a step in which this request was the one suspect")

    # Gateways

    def look(self, alive: Set[str], now_ns: int) -> None:
        """About once a second. alive: those of `gateways` whose heartbeat is there."""
        now_s = now_ns / 1e9
        if self._suspects and now_s - self._died_ns / 1e9 >= DOCK_S:
            self._core.assign_dock(now_ns)
        known = self.gateways
        self._heard = (self._heard | alive) & known
        self._missing = {name: self._missing.get(name, now_s) for name in known - alive}
        gone = {name for name, since in self._missing.items() if now_s - since >= self._patience_s(name)}
        for name in [name for name in self._orphans if self._gateways[name] in alive]:
            self.adopted(name, self._gateways[name], now_ns)
        orphans = [name for name, gateway in self._gateways.items() if gateway in gone]
        if fresh := [name for name in orphans if name not in self._orphans]:
            log.warning("%s gone: %d requests wait to be adopted", " and ".join(sorted(gone)), len(fresh))
        for name in orphans:
            self._orphans.setdefault(name, now_s)
            if name not in self._suspects.trial:
                self._core.park(name)  # again: what could not be parked the last time
        overdue = [name for name, since in self._orphans.items() if now_s - since > ABANDONED_S]
        for name in [name for name in overdue if name not in self._background]:
            self._abandon(name, Finish.CANCELLED, "its gateway is gone and nobody has asked for it since")

    def _patience_s(self, gateway: str) -> float:
        return GONE_S if gateway in self._heard else NEVER_CAME_S

    def adopted(self, name: str, gateway: str, now_ns: int) -> None:
        """`gateway` delivers the request from now on."""
        if name in self._gateways:
            self._gateways[name] = gateway
        if self._orphans.pop(name, None) is not None:
            self._resume(name, now_ns)

    def _resume(self, name: str, now_ns: int) -> None:
        held = self._suspected | self._orphans.keys()
        if name not in held and not any(name in in_step for _, in_step, _ in self._broken.values()):
            self._core.resume(name, now_ns)
