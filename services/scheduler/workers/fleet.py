"""The workers of this shard. Each has a task from its connection to its loss.

A new worker is used within a second, and the running workers are not interrupted. The sequences of a lost worker return
to the waiting queue of the core and continue at other workers.
"""

from __future__ import annotations

import asyncio
import logging
import time

import grpc

from services.scheduler.core.placement.disaggregation import unreadable
from services.scheduler.core.replica import Replica
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits
from services.scheduler.requests.claims import Claims
from services.scheduler.workers.contract import ContractError, check_same
from services.scheduler.workers.link import (
    WATCH_S,
    StaleEpochError,
    StepFailedError,
    StepTimeoutError,
    WorkerLink,
    WorkerLostError,
    brief,
    may_be_caused_by_step,
    refusal,
)
from services.scheduler.workers.loop import InFlight, WorkerContext, WorkerLoop
from services.scheduler.workers.registry import Registration, WorkerRegistry
from services.scheduler.workers.wire import identity_of
from shared.errors import ProtocolError
from shared.redis_client import Unavailable, backoff_s, temporary
from shared.settings import SchedulerSettings
from shared.tasks import end

log = logging.getLogger("orcinus.scheduler")


class UnreadableWarnings:
    """Warns of pairs of workers that cannot hand over KV, once while both are linked.

    Such a decode worker takes no sequences from that prefill worker.
    """

    def __init__(self) -> None:
        self._reports: list[tuple[Replica, Replica, str]] = []

    def look(self, core: Scheduler, names: dict[int, str]) -> None:
        """Log new pairs. names: the linked workers by replica number."""
        pairs = unreadable(core.alive)
        for pair in pairs:
            reader, owner, why = pair
            if pair not in self._reports:
                log.warning(
                    "decode worker %s cannot read what prefill worker %s hands over: %s",
                    names.get(reader.number, "?"),
                    names.get(owner.number, "?"),
                    why,
                )
        self._reports = pairs


LOOK_S = 0.5
"""Interval between two looks for further workers."""
AVOID_S = 5.0
"""Time for which a worker with a lost link is taken again only if there is no other."""
MAX_PATIENCE = 64
MAX_REFUSED_S = 300.0
"""Longest time for which a worker that broke the contract is left alone; AVOID_S at first, doubled each time."""


class Fleet:
    """Links and loops of all workers. `run` until cancelled; then all links are closed and all replicas lost."""

    def __init__(
        self, settings: SchedulerSettings, workers: WorkerRegistry, context: WorkerContext, claims: Claims
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._context = context
        self._claims = claims
        self.loops: dict[str, WorkerLoop] = {}  # by worker id
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._taken_worker = ""  # the last worker of this shard that is not linked
        self.failures_s: dict[str, float] = {}  # identity of a worker -> when its link was lost
        self._attempts: dict[str, int] = {}  # identity -> links in a row without an answer
        self._patience: dict[str, int] = {}  # worker id -> factor of its step timeout, doubled by each timeout
        self._refusals: dict[str, tuple[int, float]] = {}  # identity that broke the contract -> how often, until when
        self._differing_workers: set[str] = set()  # those of them that only differ from workers that are linked
        self._waiting_logged = False
        self._unread = UnreadableWarnings()
        self._rated_at = time.monotonic()  # time of the last call of `replicas`

    def wake(self) -> None:
        """Wake all loops: there may be something to plan."""
        for loop in self.loops.values():
            loop.wake.set()

    def resume_paused(self) -> None:
        """Wake the loops that paused for the publisher."""
        for loop in self.loops.values():
            if loop.is_paused:
                loop.wake.set()

    def wake_idle(self) -> None:
        """Wake the loops without a step in flight: sequences wait although a replica has planned."""
        for loop in self.loops.values():
            if not len(loop.in_flight):
                loop.wake.set()

    @property
    def in_flight(self) -> int:
        """Return the number of steps in flight."""
        return sum(len(loop.in_flight) for loop in self.loops.values())

    def facts(self) -> dict[str, int | str]:
        """Return the sizes of the workers for the statistics, for lengths the largest one, and how many seem to
        hang."""
        infos = [loop.link.info for loop in self.loops.values()]
        if not infos:
            return {"workers_overdue": 0}  # as the hash keeps what was written before
        return {
            "numerics": "" if self._settings.mixed_numerics else identity_of(infos[0]),
            "block_size": infos[0].block_size,
            "max_model_len": max(info.max_model_len for info in infos),
            "max_input_tokens": max(info.max_input_tokens for info in infos),
            "max_output_tokens": max(info.max_output_tokens for info in infos),
            "backend": " ".join(sorted({info.backend for info in infos})),
            "workers_overdue": sum(loop.is_overdue for loop in self.loops.values()),
        }

    def replicas(self) -> dict[str, dict[str, float | int | str]]:
        """Return the figures of each replica by worker id; rates are those since the last call."""
        now = time.monotonic()
        seconds, self._rated_at = now - self._rated_at, now
        return {
            name: {
                "role": loop.link.info.role,
                "state": loop.state,
                "epoch": loop.link.epoch,
                **self._context.core.replica_stats(loop.replica),
                **loop.pace.take(seconds),
            }
            for name, loop in self.loops.items()
        }

    async def run(self) -> None:
        """Look for workers and lead them until cancelled. Raises LeaseLostError."""
        try:
            while True:
                await self.look()
                self._unread.look(self._context.core, {loop.replica: name for name, loop in self.loops.items()})
                if not self.loops:
                    # Nothing runs, but deadlines pass, and outcomes of a lost worker are to be written.
                    self._context.put(self._context.core.plan(time.monotonic_ns())[1], 0)
                    self._context.on_plan()
                await self._rest(LOOK_S if self.loops else WATCH_S)
        finally:
            await end(*self.tasks.values())

    async def _rest(self, seconds: float) -> None:
        """Wait until it is time to look again or a link has ended."""
        if self.tasks:
            await asyncio.wait(self.tasks.values(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(seconds)
        for name in [name for name, task in self.tasks.items() if task.done()]:
            self.tasks.pop(name).result()

    async def look(self) -> None:
        """Take every worker that this shard may have."""
        now = time.monotonic()
        self.failures_s = {name: at for name, at in self.failures_s.items() if now - at < AVOID_S}
        try:
            await self._workers.look()
            self._context.quarantine.find_dead(self._workers.silent, time.monotonic_ns())
            while worker := await self._workers.take(
                self.tasks, self.not_before(), self.failures_s, self._taken_worker
            ):
                self._taken_worker = ""
                self._waiting_logged = False
                self.tasks[worker.id] = asyncio.create_task(self.serve(worker))
            await self._let_go()
            await self._give()
        except Unavailable as error:
            if not temporary(error):
                raise
            if not self.loops:
                log.warning("no worker: Redis does not answer: %s; retrying", error)
        if not self.tasks and not self._waiting_logged:
            log.info("waiting for a ready worker of model %s", self._settings.served_model_name)
            self._waiting_logged = True

    def not_before(self) -> dict[str, float]:
        """Return the time of the next connection to each worker without an answer or refused, by identity."""
        later = {
            name: self.failures_s[name] + backoff_s(count - 1)
            for name, count in self._attempts.items()
            if count and name in self.failures_s
        }
        return later | {name: until for name, (_, until) in self._refusals.items()}

    def _refuse(self, worker: Registration, error: ContractError) -> None:
        """Report why a worker is refused, and leave it alone for longer each time.

        It broke the contract, refused the Run, or failed its first step.
        """
        count = self._refusals.get(worker.identity, (0, 0.0))[0] + 1
        ready = {each.identity for each in self._workers.ready}
        self._refusals = {name: value for name, value in self._refusals.items() if name in ready}
        wait_s = min(AVOID_S * 2 ** min(count - 1, 10), MAX_REFUSED_S)
        self._refusals[worker.identity] = (count, time.monotonic() + wait_s)
        log.error("worker %s refused for %.0f s: %s", worker.id, wait_s, error)
        self._context.reports.event("worker_refused", str(error), worker=worker.id)

    async def _let_go(self) -> None:
        """Give back lost workers that live and that this shard does not take again, so that other shards may.

        The record of a worker outlives it, so a worker is left alone for AVOID_S after its link was lost.
        """
        for worker in self._workers.unwanted_workers(self.tasks):
            if worker.identity in self.failures_s or self._workers.silent(worker.id):
                continue
            if self._context.core.alive:
                self._context.quarantine.on_link(worker.id, worker.identity, time.monotonic_ns())
            if worker.shard == self._settings.shard:
                await self._workers.give_back(worker)

    async def _give(self) -> None:
        """Give one worker to a shard that has none."""
        if any(loop.is_given_away for loop in self.loops.values()):
            return  # one at a time
        replicas = self._context.core.replicas
        running = {name: replicas[loop.replica].table.count for name, loop in self.loops.items()}
        if name := self._workers.to_give(running):
            self.loops[name].give_away()

    async def serve(self, worker: Registration) -> None:
        """Lead one Run: dial the worker, run its loop, and close the link."""
        link = WorkerLink(worker, self._settings, self._workers.token)
        try:
            try:
                limits = await link.open(self._context.core.needed_tiers)
                self._check_same(worker, link)
                replica = self._join(limits)
                self._workers.least_epochs.pop(worker.identity, None)  # the counter in Redis has it now
            except ContractError as error:
                self._refuse(worker, error)
                self._on_end(worker, 0)
                return
            except StaleEpochError as error:
                log.warning("worker %s: %s; taking it again with a higher one", worker.id, error)
                self._workers.least_epochs[worker.identity] = link.info.highest_epoch + 1
                self._on_end(worker, 0)
                return
            except (grpc.aio.AioRpcError, ProtocolError, OSError) as error:
                log.warning("worker %s at %s begins no Run: %s; retrying", worker.id, worker.address, brief(error))
                self._on_end(worker, 0)
                return
            loop = WorkerLoop(link, replica, limits.slots, self._context)
            self.loops[worker.id] = loop
            self._context.quarantine.on_link(worker.id, worker.identity, time.monotonic_ns())
            self._count()
            self.wake()
            await self._run(worker, loop)
            self._on_end(worker, loop.answered_steps)
        finally:
            await link.close()

    def _check_same(self, worker: Registration, link: WorkerLink) -> None:
        try:
            linked = [loop.link.info for loop in self.loops.values()]
            check_same(link.info, linked, self._settings.mixed_numerics)
        except ContractError:
            self._differing_workers.add(worker.identity)
            raise

    def _join(self, limits: Limits) -> int:
        """Return the number of a new replica. Raises ContractError where its tables do not fit into memory."""
        try:
            return self._context.core.join(limits)
        except MemoryError as error:
            raise ContractError(
                f"max_seqs: no memory for {limits.slots} sequences of {limits.max_model_len} tokens; lower "
                f"ORCINUS_MAX_SEQS of the worker, or give the scheduler more memory"
            ) from error

    async def _run(self, worker: Registration, loop: WorkerLoop) -> None:
        reason: Exception | None = None
        refused: ContractError | None = None
        limit_s = max(self._settings.watchdog_s, 10 * loop.link.info.largest_step_ms / 1000)
        try:
            await loop.run(limit_s, self._patience.get(worker.id, 1))
        except (grpc.aio.AioRpcError, ProtocolError, WorkerLostError, ValueError) as error:
            left = loop.link.drains or loop.is_given_away
            refused = self._refusal(loop, error)
            if refused is not None:
                self._refuse(worker, refused)
            elif left:
                log.info("worker %s left: %s", worker.id, brief(error))
            else:
                log.warning("worker %s lost: %s", worker.id, brief(error))
            if refused is None:
                self._context.reports.event("worker_left" if left else "worker_lost", brief(error), worker=worker.id)
            reason = error
        finally:
            del self.loops[worker.id]
            self._count()
            self._refusals = {
                name: value for name, value in self._refusals.items() if name not in self._differing_workers
            }
            self._differing_workers.clear()  # from the workers that are left they may not differ
            if loop.answered_steps:
                self._patience.pop(worker.id, None)
                if refused is None:
                    self._refusals.pop(worker.identity, None)
            if isinstance(reason, StepTimeoutError):
                self._patience[worker.id] = min(2 * self._patience.get(worker.id, 1), MAX_PATIENCE)
            self.lose(worker, loop.replica, loop.in_flight, reason)
            self.wake()
        if loop.is_given_away:
            try:
                await self._workers.give_back(worker)
            except Unavailable as error:
                log.warning("worker %s not given back yet: %s", worker.id, error)

    def _refusal(self, loop: WorkerLoop, error: Exception) -> ContractError | None:
        """Return why a worker is left alone from now on, longer each time; None where it is taken again soon."""
        if isinstance(error, ContractError):
            return error
        if loop.answered_steps:
            return None
        if isinstance(error, StepFailedError) and len(self.loops) > 1:
            # Every step may fail there, as on a broken device: let another worker try the suspects.
            return ContractError(str(error))
        return refusal(error)  # a worker of version 1.0 refuses a Run only here

    def _count(self) -> None:
        slots = sum(loop.slots for loop in self.loops.values())
        if slots:
            self._claims.set_slots(slots)
        else:
            self._claims.on_loss()

    def _on_end(self, worker: Registration, answered: int) -> None:
        self.failures_s[worker.identity] = time.monotonic()
        self._attempts[worker.identity] = 0 if answered else self._attempts.get(worker.identity, 0) + 1
        ready = {each.identity for each in self._workers.ready}
        self._attempts = {name: count for name, count in self._attempts.items() if name in ready}
        self._taken_worker = worker.id

    def lose(self, worker: Registration, replica: int, in_flight: InFlight, reason: Exception | None) -> None:
        """Requeue all sequences of a replica; suspect those of its oldest step if that step may be the cause."""
        quarantine, now_ns = self._context.quarantine, time.monotonic_ns()
        in_step = in_flight.oldest() if reason is not None and may_be_caused_by_step(reason) else set()
        self._context.core.lose(replica, now_ns)
        if isinstance(reason, grpc.aio.AioRpcError):
            quarantine.link_lost(worker.id, worker.identity, in_step, in_flight.all())
        else:
            quarantine.on_death(in_step, in_flight.all(), now_ns)
