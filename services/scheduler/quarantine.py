"""Requests that get no step for a while: suspected of killing a worker, or without a gateway.

Bisection finds the request that kills workers: after a step in which a worker died, the requests of the step run in
halves until one is alone. Quarantine parks and resumes requests in the core: suspects, and those of a gateway that is
gone until another gateway adopts them or ABANDONED_S has passed (docs/protocol.md#faults). A request stays parked while
one of the two reasons holds. A request on trial always runs, because all the rest wait for it. There is no clock and no
Redis here: the service reports deaths, arrivals, tokens and ends.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish

log = logging.getLogger("orcinus.scheduler")

DEATHS = 2


@dataclass(slots=True)
class Actions:
    """What the caller has to do, in this order: park, resume, end as dead."""

    park: list[str] = field(default_factory=list)
    resume: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)


class Bisection:
    """Groups of suspects, one of them on trial, and bystanders, which wait until no request is suspected.

    A request that gets a token while it is on trial is cleared and runs on beside the groups that are tried after it.
    So a death counts against a request only if it was alone at the worker; otherwise its trial is repeated, and then it
    is alone, because all other requests of the lost worker are parked. A request is dead after DEATHS deaths alone,
    without a token of it in between.
    """

    def __init__(self) -> None:
        self._trial: set[str] = set()
        self._groups: deque[list[str]] = deque()
        self._bystanders: set[str] = set()
        self._alone: dict[str, int] = {}  # deaths with no other request at the worker

    def __bool__(self) -> bool:
        return bool(self._trial or self._groups)

    @property
    def trial(self) -> Set[str]:
        """Return the requests on trial; all other requests wait for them."""
        return self._trial

    @property
    def bystanders(self) -> set[str]:
        """Return the requests that are not suspected but must not run beside the trial."""
        return self._bystanders

    def on_death(self, in_step: Set[str], at_worker: Set[str], unfinished: Set[str]) -> Actions:
        """Take the death of a worker: return what to park, and what is dead.

        in_step: the requests of the step in which it died; empty if no request is at fault. at_worker: the requests of
        all unanswered steps. Both may contain ended requests. unfinished: all requests that have not ended.
        """
        here = in_step & unfinished
        suspects = sorted(here & self._trial or here)
        actions = Actions()
        if suspects:
            untried = sorted((self._trial & unfinished) - set(suspects))
            if untried:
                self._groups.append(untried)
            self._remove_from_groups(suspects)
            half = (len(suspects) + 1) // 2
            self._trial = set(suspects[:half])
            if suspects[half:]:
                self._groups.appendleft(suspects[half:])
            elif at_worker | in_step == self._trial:
                self._count(suspects[0], actions)
        if self:
            suspected = self._trial.union(*self._groups)
            self._bystanders = set(unfinished) - suspected - set(actions.dead)
            actions.park = sorted(unfinished - self._trial - set(actions.dead))
        return actions

    def on_arrival(self, name: str) -> Actions:
        """Take a new request: it waits with the bystanders while requests are suspected."""
        actions = Actions()
        if self:
            actions.park = [name]
            self._bystanders.add(name)
        return actions

    def on_progress(self, names: Set[str]) -> Actions:
        """Clear the requests that got a token: their step did not kill the worker."""
        actions = Actions()
        for name in names & self._trial:
            self._end(name, actions)
        return actions

    def forget(self, name: str) -> Actions:
        """Forget a request that has ended."""
        actions = Actions()
        self._bystanders.discard(name)
        self._end(name, actions)
        return actions

    def _remove_from_groups(self, suspects: list[str]) -> None:
        """Take the requests out of the groups: they are tried anew."""
        for group in self._groups:
            group[:] = [name for name in group if name not in suspects]

    def _count(self, name: str, actions: Actions) -> None:
        self._alone[name] = self._alone.get(name, 0) + 1
        if self._alone[name] == DEATHS:
            actions.dead = [name]
            self._end(name, actions)

    def _end(self, name: str, actions: Actions) -> None:
        """Clear a request; try the next group, and after the last group resume all."""
        suspected = bool(self)
        self._alone.pop(name, None)
        self._trial.discard(name)
        self._remove_from_groups([name])
        while not self._trial and self._groups:
            self._trial = set(self._groups.popleft())
            actions.resume += sorted(self._trial)
        if suspected and not self:
            actions.resume += sorted(self._bystanders)
            self._bystanders.clear()


ABANDONED_S = 300.0
GATEWAY_GONE_S = 2.0
"""Time for which a heartbeat must be missing: a Redis that was away has no heartbeats at first."""
NEVER_SEEN_S = 10.0
"""Time for which the heartbeat of a gateway must be missing that this scheduler has never seen."""
REPLICA_WAIT_S = 3.0
"""Time for which the trial waits for the worker that died; then another replica is emptied for it."""


class Quarantine:
    """Parks and resumes requests in the core."""

    def __init__(
        self, core: Scheduler, give_up: Callable[[str, str], None], abandon: Callable[[str, Finish, str], None]
    ) -> None:
        """give_up: ends a request that kills workers, with the reason; abandon: ends one without a gateway."""
        self._core = core
        self._give_up = give_up
        self._abandon = abandon
        self._bisection = Bisection()
        self._suspects: set[str] = set()
        self._broken_links: dict[str, tuple[str, Set[str], Set[str]]] = {}  # worker -> arguments of link_lost
        self._died_ns = 0  # time of the last known death of a worker
        self._gateways: dict[str, str] = {}  # request -> its gateway
        self._orphans: dict[str, float] = {}  # request -> start of the time without a gateway, s
        self._background: set[str] = set()
        self._seen_gateways: set[str] = set()
        self._missing_since: dict[str, float] = {}  # gateway -> time at which its heartbeat was first missing

    @property
    def has_suspects(self) -> bool:
        return bool(self._bisection)

    @property
    def suspects(self) -> int:
        """Return how many requests are parked until a worker tries them, or links again."""
        in_steps = (in_step for _, in_step, _ in self._broken_links.values())
        return len((self._suspects.union(*in_steps)) & self._gateways.keys())

    # Suspicion

    def link_lost(self, worker: str, identity: str, in_step: Set[str], at_worker: Set[str]) -> None:
        """Park the requests of the oldest step of a worker with a broken link: they might kill another worker.

        They stay parked until `on_link` or `find_dead` decides whether the worker died. in_step, at_worker: as in
        Bisection.on_death.
        """
        self._broken_links[worker] = (identity, in_step, at_worker)
        for name in in_step & self._gateways.keys():
            self._core.park(name)

    def on_link(self, worker: str, identity: str, now_ns: int) -> None:
        """Take a linked worker with a joined replica.

        A worker has a new identity after a death, so a worker with its old identity was not killed by a step.
        """
        if worker in self._broken_links:
            self._resolve(worker, identity != self._broken_links[worker][0], now_ns)
            self._core.assign_dock(now_ns)  # the replica that joined is empty

    def find_dead(self, silent: Callable[[str], bool], now_ns: int) -> None:
        """Count silent workers with broken links as dead.

        Without a replica for a trial no request becomes a suspect: another shard may take it.
        """
        for worker in [worker for worker in self._broken_links if self._core.alive and silent(worker)]:
            self._resolve(worker, True, now_ns)

    def _resolve(self, worker: str, died: bool, now_ns: int) -> None:
        _, in_step, at_worker = self._broken_links.pop(worker)
        self.on_death(in_step if died else set(), at_worker, now_ns)
        if died:  # another link that was broken by then says nothing new of these requests: they were not tried since
            for other, (identity, others_step, others) in self._broken_links.items():
                self._broken_links[other] = (identity, others_step - in_step, others)
        for name in sorted(in_step & self._gateways.keys()):
            self._resume(name, now_ns)

    def on_death(self, in_step: Set[str], at_worker: Set[str], now_ns: int) -> None:
        """Take the death of a worker; arguments as in Bisection.on_death."""
        if in_step:
            self._died_ns = now_ns
        self._apply(self._bisection.on_death(in_step, at_worker, set(self._gateways)), now_ns)

    @property
    def gateways(self) -> set[str]:
        """Return the gateways of all requests."""
        return set(self._gateways.values())

    def add(self, name: str, gateway: str, now_ns: int, delivered: bool = True, background: bool = False) -> None:
        """Take a new request. delivered: its gateway has a heartbeat; background: it waits for one without limit."""
        self._gateways[name] = gateway
        if background:
            self._background.add(name)
        if not delivered:
            self._orphans[name] = now_ns / 1e9
            self._core.park(name)
        self._apply(self._bisection.on_arrival(name), now_ns)

    def on_progress(self, names: Set[str], now_ns: int) -> None:
        """Take the requests that got a token."""
        self._apply(self._bisection.on_progress(names), now_ns)

    def remove(self, name: str, now_ns: int) -> None:
        """Forget a request that has ended or left the shard."""
        self._gateways.pop(name, None)
        self._orphans.pop(name, None)
        self._background.discard(name)
        self._suspects.discard(name)
        if self._bisection:
            self._apply(self._bisection.forget(name), now_ns)

    def _apply(self, actions: Actions, now_ns: int) -> None:
        no_replica = not self._core.alive  # otherwise bystanders continue at the other replicas
        for name in actions.park:
            if no_replica or name not in self._bisection.bystanders:
                self._suspects.add(name)
                self._core.park(name)
        for name in actions.resume:
            self._suspects.discard(name)
            self._resume(name, now_ns)
        for name in self._bisection.trial & self._orphans.keys():
            self._core.resume(name, now_ns)
        self._core.confine(self._bisection.trial)
        for name in actions.dead:
            self._give_up(name, "the worker died twice in a step in which this request was the one suspect")

    # Gateways

    def check_gateways(self, alive: Set[str], now_ns: int) -> None:
        """Park requests without their gateway, resume those with a gateway again, end those that waited too long.

        Called about once a second. alive: those of `gateways` that have a heartbeat.
        """
        now_s = now_ns / 1e9
        if self._bisection and now_s - self._died_ns / 1e9 >= REPLICA_WAIT_S:
            self._core.assign_dock(now_ns)
        gateways = self.gateways
        self._seen_gateways = (self._seen_gateways | alive) & gateways
        self._missing_since = {name: self._missing_since.get(name, now_s) for name in gateways - alive}
        gone = {name for name, since in self._missing_since.items() if now_s - since >= self._patience_s(name)}
        for name in [name for name in self._orphans if self._gateways[name] in alive]:
            self.on_adopt(name, self._gateways[name], now_ns)
        orphans = [name for name, gateway in self._gateways.items() if gateway in gone]
        if fresh := [name for name in orphans if name not in self._orphans]:
            log.warning("gateway %s gone: %d requests wait to be adopted", " and ".join(sorted(gone)), len(fresh))
        for name in orphans:
            self._orphans.setdefault(name, now_s)
            if name not in self._bisection.trial:
                self._core.park(name)  # again: parking may have failed the last time
        overdue = [name for name, since in self._orphans.items() if now_s - since > ABANDONED_S]
        for name in [name for name in overdue if name not in self._background]:
            self._abandon(name, Finish.CANCELLED, "its gateway is gone and no client resumed it")

    def _patience_s(self, gateway: str) -> float:
        return GATEWAY_GONE_S if gateway in self._seen_gateways else NEVER_SEEN_S

    def on_adopt(self, name: str, gateway: str, now_ns: int) -> None:
        """Take the gateway that delivers the request from now on."""
        if name in self._gateways:
            self._gateways[name] = gateway
        if self._orphans.pop(name, None) is not None:
            self._resume(name, now_ns)

    def _resume(self, name: str, now_ns: int) -> None:
        held = self._suspects | self._orphans.keys()
        if name not in held and not any(name in in_step for _, in_step, _ in self._broken_links.values()):
            self._core.resume(name, now_ns)
