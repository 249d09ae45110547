"""The scheduler's process: one event loop around the core.

Tasks, all on one thread, so that the core is never entered twice: `Claims` brings requests in, `Commands` brings
commands, `Shards` looks at the others, `_serve` holds the link to the worker and iterates, the publisher writes,
`_report` tells how it goes. Time enters the core here and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time

import grpc

from protos import queue_pb2
from services.scheduler.claims import Claims, Holdings
from services.scheduler.commands import Commands
from services.scheduler.core.types import Finish, Outcome
from services.scheduler.handover import Handover
from services.scheduler.in_flight import InFlight
from services.scheduler.intake import Claimed, Clock, Intake
from services.scheduler.lease import Lease
from services.scheduler.leaving import Leaving
from services.scheduler.metrics import Metrics
from services.scheduler.parking import Parking
from services.scheduler.policies import PolicySwitch, make_core
from services.scheduler.publisher import Publisher
from services.scheduler.reports import Reports
from services.scheduler.shards import Shards
from services.scheduler.stats import Stats
from services.scheduler.tasks import end, first_of, within
from services.scheduler.wire import result_from_wire, step_to_wire
from services.scheduler.worker_link import (
    WATCH_S,
    StepTimeoutError,
    WorkerLink,
    WorkerLostError,
    brief,
    find_worker,
    of_a_step,
)
from shared.errors import LeaseLostError, ProtocolError
from shared.ids import process_id
from shared.keys import CLASSES
from shared.redis_client import BLOCK_MS, Scripts, Unavailable, backoff_s, connect, persist, temporary
from shared.settings import SchedulerSettings

log = logging.getLogger("orcinus.scheduler")

AVOID_S = 5.0
"""A worker whose link was lost is taken again at once only if there is no other."""


class Service:
    """One shard's scheduler."""

    def __init__(self, settings: SchedulerSettings, metrics: Metrics | None = None) -> None:
        self._settings = settings
        self._keys = settings.keys
        self._redis = connect(settings)
        self._intake_reader = connect(settings, connections=1, socket_timeout_s=BLOCK_MS / 1000 + 4)
        self._control_reader = connect(settings, connections=1, socket_timeout_s=BLOCK_MS / 1000 + 4)
        self._stats = Stats(time.monotonic_ns(), metrics)
        self._scripts = Scripts(self._redis, self._stats.call)
        self._lease = Lease(self._scripts, self._keys, settings.shard, settings.lease_ms)
        self._reports = Reports(self._redis, self._lease, self._keys, settings.shard, process_id("scheduler"))
        self._leaving = Leaving(self._lease, self._reports, self._redis, self._intake_reader, self._control_reader)
        self._clock = Clock()
        self._intake = Intake(
            self._intake_reader, self._redis, self._scripts, self._keys, settings.shard, self._lease, self._clock
        )
        self._core = make_core(settings)
        self._policy = PolicySwitch(self._core, self._reports.event)
        self._held = Holdings()
        entries = self._held.entries
        self._publisher = Publisher(self._scripts, self._keys, self._lease, entries, self._forget)
        self._commands = Commands(
            self._control_reader,
            self._keys.control(settings.shard),
            entries,
            self._command,
            self._lease,
            self._publisher,
        )
        self._wake = asyncio.Event()  # something to plan, or room to publish
        self._stop = asyncio.Event()
        self._link: WorkerLink | None = None
        self._taken = ""  # the last worker
        self._in_flight = InFlight()
        self._parking = Parking(self._core, self._give_up, self._abandon)
        self._shards = Shards(self._redis, self._keys, settings.shard, settings.lease_ms)
        self._claims = Claims(
            self._intake,
            self._held,
            self._shards,
            Handover(
                self._scripts,
                self._keys,
                settings.shard,
                self._lease,
                self._core,
                self._publisher,
                entries,
                self._forget,
            ),
            self._commands,
            self._take_all,
            lambda: self._parking.suspecting,
            lambda shard: Lease(self._scripts, self._keys, shard, settings.lease_ms),
            settings.claim_window,
        )
        self._failed: dict[str, float] = {}  # identity of a worker -> when its link was lost
        self._patience = 1  # doubled by each trip of the watchdog, until a step is answered

    async def run(self) -> int:
        """Serves the shard until SIGTERM (0) or until another scheduler takes it (1)."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._stop.set)
        heartbeat = asyncio.create_task(self._reports.heartbeat())
        try:
            await first_of(self._lease.acquire(self._stop.is_set), self._stop.wait())
            return 0 if self._stop.is_set() else await self._hold()
        finally:
            await end(heartbeat)
            await self._leaving.goodbye()

    async def _hold(self) -> int:
        publisher = asyncio.create_task(self._publisher.run(self._wake))
        keep = asyncio.create_task(self._lease.keep())  # from the beginning: to rebuild may take longer than a lease
        try:
            await first_of(asyncio.shield(keep), self._prepare(), self._stop.wait())
            if not self._stop.is_set() and not keep.done():
                await first_of(
                    asyncio.shield(publisher),  # a write under way is finished, also at the end
                    keep,
                    self._claim(),
                    self._shards.run(self._claims.changed.set),
                    self._commands.run(),
                    self._serve(),
                    self._report(),
                    self._stop.wait(),
                )
            if not self._stop.is_set():
                raise LeaseLostError("the shard was taken by another scheduler")
            self._put(self._core.checkpoint())
            await within(self._leaving.left_s(), self._publisher.flush(publisher))
            log.info("stopped; %d unfinished requests stay claimed for the next scheduler", self._core.unfinished)
            return 0
        except LeaseLostError as error:
            log.error("%s; leaving", error)
            return 1
        finally:
            await end(publisher, keep)
            await self._leaving.give_up()
            if self._link is not None:
                await self._link.close()

    async def _prepare(self) -> None:
        await persist("prepare the request streams", self._intake.prepare, log, self._stop.is_set)
        await persist("read Redis's clock", lambda: self._clock.sync(self._redis), log, self._stop.is_set)
        await persist("rebuild claimed requests", self._claims.rebuild, log, self._stop.is_set)

    # Requests in

    async def _claim(self) -> None:
        await self._claims.run()
        log.info("drained: nothing is left")
        self._reports.event("drained", f"{self._settings.shard} is empty")
        self._stop.set()

    def _take_all(self, claimed: list[Claimed]) -> None:
        now = time.monotonic_ns()
        for item in claimed:
            request = item.request
            if request.id in self._held.entries:
                continue  # delivered twice: it is in the core already
            self._held.add(request.id, item.entry)
            self._put(self._core.add(request, now))
            if item.error:
                self._put(self._core.cancel(request.id, now, Finish.ERROR, item.error))
            elif item.cancelled:
                self._put(self._core.cancel(request.id, now))
            for choice, at in item.stops.items():
                if request.outputs and request.outputs[choice].size >= at:  # else its end brings the stop about
                    self._put(self._core.stop(request.id, choice, at, now))
            background = item.entry.request.background
            self._parking.arrived(request.id, request.gateway, now, item.delivered, background)
        if claimed:
            self._wake.set()

    def _forget(self, request_id: str) -> None:
        self._held.drop(request_id)
        self._claims.changed.set()
        self._parking.ended(request_id, time.monotonic_ns())
        self._wake.set()

    def _command(self, control: queue_pb2.Control) -> None:
        now = time.monotonic_ns()
        kind = control.WhichOneof("command")
        if kind == "cancel":
            self._put(self._core.cancel(control.cancel.id, now))
        elif kind == "stop":
            self._put(self._core.stop(control.stop.id, control.stop.choice, control.stop.at_token, now))
        elif kind == "adopt":
            self._core.adopt(control.adopt.id, control.adopt.gateway)
            self._parking.adopted(control.adopt.id, control.adopt.gateway, now)
        elif kind == "drain":
            self._claims.drain()
        elif kind == "policy":
            self._policy.ask(control.policy.name)
        else:
            log.warning("command %s is not known to this scheduler and was dropped", kind)
        self._wake.set()

    # Iterations

    async def _serve(self) -> None:
        attempt = 0
        while True:
            link = await self._connect()
            try:
                limits = await link.open()
                replica = self._core.join(limits)
                self._parking.found(link.worker.identity, time.monotonic_ns())
                self._link = link
                self._claims.joined(limits.slots)
            except (grpc.aio.AioRpcError, ProtocolError, OSError) as error:
                log.warning("worker %s at %s does not answer: %s", link.worker.id, link.worker.address, brief(error))
                self._failed[link.worker.identity] = time.monotonic()
                await link.close()
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1
                continue
            before, reason = self._reports.answered, None
            try:
                await first_of(self._receive(link, replica), self._pump(link, replica), self._watch(link))
            except (grpc.aio.AioRpcError, ProtocolError, WorkerLostError, ValueError) as error:
                log.warning("worker %s is lost: %s", link.worker.id, brief(error))
                self._reports.event(
                    "worker_left" if link.leaving else "worker_lost", brief(error), worker=link.worker.id
                )
                reason = error
            finally:
                self._link = None
                self._claims.lost()
                self._lose(replica, link.worker.identity, reason)
                await link.close()
            self._failed[link.worker.identity] = time.monotonic()
            attempt = 0 if self._reports.answered > before else attempt + 1
            if attempt:
                await asyncio.sleep(backoff_s(attempt))

    async def _connect(self) -> WorkerLink:
        said = False
        while True:
            try:
                self._failed = {name: at for name, at in self._failed.items() if time.monotonic() - at < AVOID_S}
                shard, before = self._settings.shard, self._taken
                found = await find_worker(
                    self._redis, self._scripts, self._keys, shard, self._lease, self._failed, before
                )
            except Unavailable as error:
                if not temporary(error):
                    raise
                found = None
                log.warning("waiting for Redis to find a worker: %s", error)
            if found:
                self._taken = found.id
                return WorkerLink(found, self._settings)
            if not said:
                log.info("waiting for a ready worker of model %s", self._settings.served_model_name)
                said = True
            # Nothing runs, but deadlines pass, and what the lost worker left is to be written.
            self._put(self._core.plan(time.monotonic_ns())[1])
            self._policy.look()
            await asyncio.sleep(WATCH_S)

    async def _pump(self, link: WorkerLink, replica: int) -> None:
        """Plans and sends while there is something to plan, a place in flight, and room to publish."""
        while True:
            while not (self._publisher.full or link.leaving):
                begin = time.monotonic_ns()
                plan, outcome = self._core.plan(begin, replica)
                self._put(outcome)
                self._policy.look()
                if plan is None:
                    break
                self._in_flight.sent(plan)
                self._stats.step(plan.decode_tokens, plan.prefill_tokens, time.monotonic_ns() - begin)
                try:
                    await link.send(step_to_wire(plan, link.epoch))
                except (grpc.aio.AioRpcError, ProtocolError) as error:
                    # Results may have come before the end: _receive reads them, and then says why it ended. Else the
                    # watchdog does.
                    log.debug("step %d was not sent: %s", plan.id, brief(error))
                    await asyncio.Event().wait()
            await self._wake.wait()
            self._wake.clear()

    async def _receive(self, link: WorkerLink, replica: int) -> None:
        async for message in link.results():
            begin = time.monotonic_ns()
            outcome = self._core.apply(result_from_wire(message, replica), begin)
            plan = self._in_flight.answered(message.id)  # not before: an answer that is of no use is none
            self._reports.last_step = message.id
            self._reports.answered += 1
            self._patience = 1
            self._wake.set()
            took, spent_ns = message.timings, time.monotonic_ns() - begin
            self._stats.result(took.total_ns, took.idle_ns, plan.prefill_tokens, plan.decode_tokens, replica, spent_ns)
            if self._parking.suspecting:
                rows = zip(outcome.requests, outcome.counts.tolist(), strict=True)
                self._parking.progressed({request.id for request, count in rows if count}, begin)
            self._put(outcome, message.id)
        raise WorkerLostError("it drains, and has answered what it had" if link.leaving else "its stream ended")

    async def _watch(self, link: WorkerLink) -> None:
        """Ends the link when a step stays unanswered; wakes the loop for deadlines when nothing else does."""
        limit_s = max(self._settings.watchdog_s, 10 * link.info.largest_step_ms / 1000)
        try:
            await link.watch(self._patience * limit_s, lambda: self._wake.set() if self._core.unfinished else None)
        except StepTimeoutError:
            self._patience *= 2
            raise

    def _lose(self, replica: int, worker: str, reason: Exception | None) -> None:
        """Back to waiting with all. The requests of the oldest unanswered step are suspected, if a step may be why."""
        in_step = self._in_flight.oldest() if reason is not None and of_a_step(reason) else set()
        self._core.lose(replica, time.monotonic_ns())
        if isinstance(reason, grpc.aio.AioRpcError):
            self._parking.lost(worker, in_step, self._in_flight.all())
        else:
            self._parking.died(in_step, self._in_flight.all(), time.monotonic_ns())
        self._in_flight = InFlight()

    def _give_up(self, request_id: str, text: str) -> None:
        log.error("request %s ends: %s", request_id, text)
        self._abandon(request_id, Finish.ERROR, text)
        self._reports.dead(request_id, text)

    def _abandon(self, request_id: str, finish: Finish, text: str) -> None:
        self._put(self._core.cancel(request_id, time.monotonic_ns(), finish, text))

    def _put(self, outcome: Outcome | None, step: int = 0) -> None:
        self._stats.outcome(outcome, time.monotonic_ns())
        self._publisher.put(outcome, step)

    # Reports

    async def _report(self) -> None:
        beat = self._settings.stats_ms / 1000
        while True:
            await asyncio.sleep(beat)
            try:
                await self._clock.sync(self._redis)
                await self._reports.stats(self._snapshot(), self._stats.iterations.fields())
                alive = await self._reports.gateways_alive(self._parking.gateways)
                self._parking.look(alive, time.monotonic_ns())
                self._wake.set()
            except Unavailable as error:
                log.warning("stats were not written: %s", error)
            if self._core.idle:
                self._core.check()

    def _snapshot(self) -> dict[str, float | int | str]:
        fields = self._stats.snapshot(
            self._core.stats(),
            time.monotonic_ns(),
            int(time.time() * 1000),
            self._lease.epoch,
            self._policy.name,
            1 if self._link else 0,
            [self._core.predicted_ttft_ns(number) for number in range(len(CLASSES))],
            self._shards.unclaimed_ms,
        )
        if self._link:
            fields |= self._link.facts()
        steps = {"last_step": self._reports.last_step, "in_flight": len(self._in_flight)}
        return fields | steps | {"draining": int(self._claims.draining)}
