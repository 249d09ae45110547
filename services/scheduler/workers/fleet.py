"""All workers of this shard: each that is ready and ours gets a task of its own, from dialling it until it is lost.

A new one that registers is used within a second; the others go on meanwhile. What one that is lost was doing waits
again in the core and goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time

import grpc

from services.scheduler.core.core import Core
from services.scheduler.core.peers import unread
from services.scheduler.core.replica import Replica
from services.scheduler.requests.claims import Claims
from services.scheduler.tasks import end
from services.scheduler.workers.link import (
    WATCH_S,
    StepTimeoutError,
    WorkerLink,
    WorkerLostError,
    brief,
    of_a_step,
)
from services.scheduler.workers.loop import InFlight, WorkerContext, WorkerLoop
from services.scheduler.workers.registry import Registration, WorkerRegistry
from shared.errors import ProtocolError
from shared.redis_client import Unavailable, backoff_s, temporary
from shared.settings import SchedulerSettings

log = logging.getLogger("orcinus.scheduler")


class UnreadableWarnings:
    """Warns of each pair once, as long as both are linked."""

    def __init__(self) -> None:
        self._said: list[tuple[Replica, Replica, str]] = []

    def look(self, core: Core, names: dict[int, str]) -> None:
        """names: the linked workers, by the number of their replica."""
        found = unread(core.alive)
        for pair in found:
            reader, owner, why = pair
            if pair not in self._said:
                log.warning(
                    "decode worker %s cannot read what prefill worker %s hands over: %s",
                    names.get(reader.number, "?"),
                    names.get(owner.number, "?"),
                    why,
                )
        self._said = found


LOOK_S = 0.5
"""Between two looks for further workers."""
AVOID_S = 5.0
"""A worker whose link was lost is taken again at once only if there is no other."""
MOST_PATIENCE = 64


class Fleet:
    """`run` until cancelled; then all links are closed and the core has lost all replicas."""

    def __init__(
        self, settings: SchedulerSettings, workers: WorkerRegistry, desk: WorkerContext, claims: Claims
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._desk = desk
        self._claims = claims
        self.drives: dict[str, WorkerLoop] = {}  # by worker id
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._taken = ""  # the last worker that was ours and is not linked
        self._failed: dict[str, float] = {}  # identity of a worker -> when its link was lost
        self._attempts: dict[str, int] = {}  # identity -> links in a row that brought no answer
        self._patience: dict[str, int] = {}  # worker id -> doubled by each trip of its watchdog, until it answers
        self._said = False
        self._unread = UnreadableWarnings()
        self._told = time.monotonic()  # when `replicas` was asked last

    def wake(self) -> None:
        """There may be something to plan for any of them."""
        for drive in self.drives.values():
            drive.wake.set()

    def room(self) -> None:
        """The publisher has written something: those who paused for it go on."""
        for drive in self.drives.values():
            if drive.paused:
                drive.wake.set()

    def passed_on(self) -> None:
        """Some wait although a replica has planned: one that stands idle may be for them."""
        for drive in self.drives.values():
            if not len(drive.in_flight):
                drive.wake.set()

    @property
    def in_flight(self) -> int:
        """Steps sent and not answered."""
        return sum(len(drive.in_flight) for drive in self.drives.values())

    def facts(self) -> dict[str, int | str]:
        """What the statistics tell of the workers: a request may be as long as the largest of them takes."""
        infos = [drive.link.info for drive in self.drives.values()]
        if not infos:
            return {}
        return {
            "block_size": infos[0].block_size,
            "max_model_len": max(info.max_model_len for info in infos),
            "max_input_tokens": max(info.max_input_tokens for info in infos),
            "max_output_tokens": max(info.max_output_tokens for info in infos),
            "backend": " ".join(sorted({info.backend for info in infos})),
        }

    def replicas(self) -> dict[str, dict[str, float | int | str]]:
        """Of each worker's replica its own figures, since the last call where they are of a time."""
        now = time.monotonic()
        seconds, self._told = now - self._told, now
        return {
            name: {
                "role": drive.link.info.role,
                "state": drive.state,
                "epoch": drive.link.epoch,
                **self._desk.core.replica_stats(drive.replica),
                **drive.pace.take(seconds),
            }
            for name, drive in self.drives.items()
        }

    async def run(self) -> None:
        """Raises LeaseLostError, and what no drive should raise."""
        try:
            while True:
                await self._look()
                self._unread.look(self._desk.core, {drive.replica: name for name, drive in self.drives.items()})
                if not self.drives:
                    # Nothing runs, but deadlines pass, and what a lost worker left is to be written.
                    self._desk.put(self._desk.core.plan(time.monotonic_ns())[1], 0)
                    self._desk.planned()
                await self._rest(LOOK_S if self.drives else WATCH_S)
        finally:
            await end(*self._tasks.values())

    async def _rest(self, seconds: float) -> None:
        """Until it is time to look again, or a link has ended."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(seconds)
        for name in [name for name, task in self._tasks.items() if task.done()]:
            self._tasks.pop(name).result()

    async def _look(self) -> None:
        """Takes every worker that this shard may have."""
        now = time.monotonic()
        self._failed = {name: at for name, at in self._failed.items() if now - at < AVOID_S}
        try:
            await self._workers.look()
            self._desk.parking.gone(self._workers.silent, time.monotonic_ns())
            while found := await self._workers.take(self._tasks, self._not_before(), self._failed, self._taken):
                self._taken = ""
                self._said = False
                self._tasks[found.id] = asyncio.create_task(self._lead(found))
            await self._let_go()
            await self._give()
        except Unavailable as error:
            if not temporary(error):
                raise
            if not self.drives:
                log.warning("waiting for Redis to find a worker: %s", error)
        if not self._tasks and not self._said:
            log.info("waiting for a ready worker of model %s", self._settings.served_model_name)
            self._said = True

    def _not_before(self) -> dict[str, float]:
        """When those whose links brought no answer are dialled again."""
        return {
            name: self._failed[name] + backoff_s(count - 1)
            for name, count in self._attempts.items()
            if count and name in self._failed
        }

    async def _let_go(self) -> None:
        """A worker whose link was lost may live and yet be nothing that this shard takes again: then others may, and
        nobody here waits to learn what became of it. Its record outlives it, so for AVOID_S it is left alone."""
        for worker in self._workers.beyond(self._tasks):
            if worker.identity in self._failed or self._workers.silent(worker.id):
                continue
            if self._desk.core.alive:
                self._desk.parking.found(worker.id, worker.identity, time.monotonic_ns())
            if worker.shard == self._settings.shard:
                await self._workers.give_back(worker)

    async def _give(self) -> None:
        """One worker to a shard that has none."""
        if any(drive.leaves for drive in self.drives.values()):
            return  # one at a time
        replicas = self._desk.core.replicas
        running = {name: replicas[drive.replica].table.count for name, drive in self.drives.items()}
        if name := self._workers.surplus(running):
            self.drives[name].leave()

    async def _lead(self, worker: Registration) -> None:
        """One Run at a worker."""
        link = WorkerLink(worker, self._settings)
        try:
            try:
                limits = await link.open()
            except (grpc.aio.AioRpcError, ProtocolError, OSError) as error:
                log.warning("worker %s at %s does not answer: %s", worker.id, worker.address, brief(error))
                self._ended(worker, 0)
                return
            drive = WorkerLoop(link, self._desk.core.join(limits), limits.slots, self._desk)
            self.drives[worker.id] = drive
            self._desk.parking.found(worker.id, worker.identity, time.monotonic_ns())
            self._count()
            self.wake()
            await self._drive(worker, drive)
            self._ended(worker, drive.answered)
        finally:
            await link.close()

    async def _drive(self, worker: Registration, drive: WorkerLoop) -> None:
        reason: Exception | None = None
        limit_s = max(self._settings.watchdog_s, 10 * drive.link.info.largest_step_ms / 1000)
        try:
            await drive.run(self._patience.get(worker.id, 1) * limit_s)
        except (grpc.aio.AioRpcError, ProtocolError, WorkerLostError, ValueError) as error:
            left = drive.link.leaving or drive.leaves
            if left:
                log.info("worker %s has left: %s", worker.id, brief(error))
            else:
                log.warning("worker %s is lost: %s", worker.id, brief(error))
            self._desk.reports.event("worker_left" if left else "worker_lost", brief(error), worker=worker.id)
            reason = error
        finally:
            del self.drives[worker.id]
            self._count()
            if drive.answered:
                self._patience.pop(worker.id, None)
            if isinstance(reason, StepTimeoutError):
                self._patience[worker.id] = min(2 * self._patience.get(worker.id, 1), MOST_PATIENCE)
            self.lose(worker, drive.replica, drive.in_flight, reason)
            self.wake()
        if drive.leaves:
            try:
                await self._workers.give_back(worker)
            except Unavailable as error:
                log.warning("worker %s is given to another shard when Redis is back: %s", worker.id, error)

    def _count(self) -> None:
        slots = sum(drive.slots for drive in self.drives.values())
        if slots:
            self._claims.joined(slots)
        else:
            self._claims.lost()

    def _ended(self, worker: Registration, answered: int) -> None:
        self._failed[worker.identity] = time.monotonic()
        self._attempts[worker.identity] = 0 if answered else self._attempts.get(worker.identity, 0) + 1
        known = {each.identity for each in self._workers.ready}
        self._attempts = {name: count for name, count in self._attempts.items() if name in known}
        self._taken = worker.id

    def lose(self, worker: Registration, replica: int, in_flight: InFlight, reason: Exception | None) -> None:
        """Back to waiting with all. The requests of the oldest unanswered step are suspected, if a step may be why."""
        parking, now_ns = self._desk.parking, time.monotonic_ns()
        in_step = in_flight.oldest() if reason is not None and of_a_step(reason) else set()
        self._desk.core.lose(replica, now_ns)
        if isinstance(reason, grpc.aio.AioRpcError):
            parking.lost(worker.id, worker.identity, in_step, in_flight.all())
        else:
            parking.died(in_step, in_flight.all(), now_ns)
