"""The scheduler's process: one event loop around the core.

Tasks, all on one thread, so that the core is never entered twice: `_claim` brings requests in, `Commands` brings
commands, `_serve` holds the link to the worker and iterates, the publisher writes, `_report` tells how it goes. Time
enters the core here and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time

import grpc

from protos import queue_pb2
from services.scheduler.commands import Commands
from services.scheduler.core.core import Core
from services.scheduler.core.types import Finish, Limits, Outcome, StepPlan
from services.scheduler.intake import Claimed, Clock, Entry, Intake
from services.scheduler.lease import Lease
from services.scheduler.publisher import Publisher
from services.scheduler.reports import Reports
from services.scheduler.stats import Stats
from services.scheduler.tasks import first_of
from services.scheduler.wire import result_from_wire, step_to_wire
from services.scheduler.worker_link import WorkerLink, brief, find_worker
from shared.errors import LeaseLostError, ProtocolError
from shared.ids import process_id
from shared.keys import GROUP
from shared.redis_client import BLOCK_MS, Scripts, Unreachable, Value, backoff_s, connect, persist
from shared.settings import SchedulerSettings

log = logging.getLogger("orcinus.scheduler")

WATCH_S = 0.1
STRIKES = 3
"""A request that was in this many failed steps without a token in between ends with an error."""


class WorkerLostError(Exception):
    """The link to the worker is of no use any more."""


class Service:
    """One shard's scheduler."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._keys = settings.keys
        self._redis = connect(settings)
        self._intake_reader = connect(settings, connections=1, socket_timeout_s=BLOCK_MS / 1000 + 4)
        self._control_reader = connect(settings, connections=1, socket_timeout_s=BLOCK_MS / 1000 + 4)
        self._scripts = Scripts(self._redis)
        self._lease = Lease(self._scripts, self._keys, settings.shard, settings.lease_ms)
        self._reports = Reports(self._redis, self._keys, settings.shard, process_id("scheduler"))
        self._clock = Clock()
        self._intake = Intake(
            self._intake_reader, self._redis, self._scripts, self._keys, settings.shard, self._lease, self._clock
        )
        self._core = Core(
            settings.policy,
            max_seqs=settings.max_seqs,
            microbatches=settings.microbatches,
            lookahead=settings.lookahead,
            step_tokens=settings.step_tokens,
        )
        self._entries: dict[str, Entry] = {}
        self._commands = Commands(
            self._control_reader, self._keys.control(settings.shard), self._entries, self._command
        )
        self._publisher = Publisher(self._scripts, self._keys, self._lease, self._entries, self._forget)
        self._stats = Stats(time.monotonic_ns())
        self._wake = asyncio.Event()  # something to plan, or room to publish
        self._room = asyncio.Event()  # a request ended, or a worker joined
        self._stop = asyncio.Event()
        self._draining = False
        self._limits: Limits | None = None
        self._link: WorkerLink | None = None
        self._slot_request: dict[int, str] = {}
        self._plans: dict[int, StepPlan] = {}
        self._strikes: dict[str, int] = {}

    async def run(self) -> int:
        """Serves the shard until SIGTERM (0) or until another scheduler takes it (1)."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._stop.set)
        heartbeat = asyncio.create_task(self._reports.heartbeat())
        try:
            acquired = asyncio.create_task(self._lease.acquire(self._stop.is_set))
            await first_of(acquired, self._stop.wait())
            if self._stop.is_set():
                return 0
            return await self._hold()
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)
            await self._reports.forget()
            for client in (self._redis, self._intake_reader, self._control_reader):
                await client.aclose()

    async def _hold(self) -> int:
        publisher = asyncio.create_task(self._publisher.run(self._wake))
        try:
            await persist("prepare the request streams", self._intake.prepare, log, self._stop.is_set)
            await persist("read Redis's clock", lambda: self._clock.sync(self._redis), log, self._stop.is_set)
            await persist("rebuild claimed requests", self._rebuild, log, self._stop.is_set)
            await first_of(
                asyncio.shield(publisher),  # a write under way is finished, also at the end
                self._lease.keep(),
                self._claim(),
                self._commands.run(),
                self._serve(),
                self._report(),
                self._stop.wait(),
            )
            if not self._stop.is_set():
                raise LeaseLostError("the shard was taken by another scheduler")
            await self._publisher.flush()
            await self._lease.release()
            log.info("stopped; %d unfinished requests stay claimed for the next scheduler", self._core.unfinished)
            return 0
        except asyncio.CancelledError:
            return 0
        except LeaseLostError as error:
            log.error("%s; leaving", error)
            return 1
        finally:
            publisher.cancel()
            await asyncio.gather(publisher, return_exceptions=True)
            if self._link is not None:
                await self._link.close()

    # Requests in

    async def _rebuild(self) -> None:
        count = await self._intake.pending(self._entries, self._take_all)
        if count:
            log.info("took up %d claimed requests", count)

    async def _claim(self) -> None:
        attempt = 0
        while True:
            room = self._window() - self._core.unfinished
            if self._draining:
                # Here and not at the command: a read that was under way would claim again what is handed back.
                await self._hand_back()
                await self._stop.wait()
                return
            if room <= 0 or self._limits is None:
                self._room.clear()
                await self._room.wait()
                continue
            self._commands.claim_begins()
            try:
                if attempt:
                    await self._rebuild()  # what the call that failed may have claimed
                claimed = await self._intake.read(room)
                attempt = 0
            except Unreachable as error:
                if attempt == 0:
                    log.warning("waiting for Redis to claim requests: %s", error)
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1
                continue
            self._take_all(claimed)
            self._commands.claim_answered()

    def _window(self) -> int:
        slots = self._limits.slots if self._limits else 64
        return self._settings.claim_window or 4 * slots

    def _take_all(self, claimed: list[Claimed]) -> None:
        now = time.monotonic_ns()
        for item in claimed:
            request = item.request
            if request.id in self._entries:
                continue  # delivered twice: it is in the core already
            self._entries[request.id] = item.entry
            self._put(self._core.add(request, now))
            if item.error:
                self._put(self._core.cancel(request.id, now, Finish.ERROR, item.error))
            elif item.cancelled:
                self._put(self._core.cancel(request.id, now))
        if claimed:
            self._wake.set()

    def _forget(self, request_id: str) -> None:
        self._strikes.pop(request_id, None)
        self._entries.pop(request_id, None)
        self._room.set()

    async def _hand_back(self) -> None:
        """Draining: what never started goes back to the queue, for any shard."""
        args: list[Value] = [self._lease.epoch, GROUP]
        for request_id, entry in list(self._entries.items()):
            if self._core.release(request_id):
                raw = entry.request.SerializeToString()
                args += [self._keys.req(request_id), entry.stream, entry.id, raw]
                self._forget(request_id)

        async def write() -> int:
            return int(await self._lease.fenced(self._scripts.release, [], args))

        count = await persist("hand requests back", write, log, self._stop.is_set)
        log.info("draining: %d requests handed back, %d go on to their ends", count, self._core.unfinished)

    # Commands

    def _command(self, control: queue_pb2.Control) -> None:
        now = time.monotonic_ns()
        kind = control.WhichOneof("command")
        if kind == "cancel":
            self._put(self._core.cancel(control.cancel.id, now))
        elif kind == "stop":
            self._put(self._core.stop(control.stop.id, control.stop.choice, control.stop.at_token, now))
        elif kind == "adopt":
            self._core.adopt(control.adopt.id, control.adopt.gateway)
        elif kind == "drain":
            self._draining = True
            self._room.set()
        else:
            log.warning("command %s is not known to this scheduler and was dropped", kind)
        self._wake.set()

    # Iterations

    async def _serve(self) -> None:
        attempt = 0
        while True:
            link = await self._connect()
            try:
                self._limits = await link.open()
                replica = self._core.join(self._limits)
                log.info(
                    "worker %s at %s: %d slots, %d blocks of %d tokens",
                    link.worker.id,
                    link.worker.address,
                    self._limits.slots,
                    self._limits.blocks,
                    self._limits.block_size,
                )
                self._link = link
                self._room.set()
            except (grpc.aio.AioRpcError, OSError) as error:
                log.warning("worker %s at %s does not answer: %s", link.worker.id, link.worker.address, brief(error))
                await link.close()
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1
                continue
            attempt = 0
            try:
                await first_of(self._receive(link, replica), self._pump(link, replica), self._watch(link))
            except (grpc.aio.AioRpcError, ProtocolError, WorkerLostError, ValueError) as error:
                log.warning("worker %s is lost: %s", link.worker.id, brief(error))
                self._reports.event("worker_lost", brief(error), worker=link.worker.id)
            finally:
                self._link = None
                await link.close()
                self._lose(replica)

    async def _connect(self) -> WorkerLink:
        said = False
        while True:
            try:
                found = await find_worker(
                    self._redis,
                    self._scripts,
                    self._keys,
                    self._settings.shard,
                    self._lease,
                )
            except Unreachable as error:
                found = None
                log.warning("waiting for Redis to find a worker: %s", error)
            if found:
                return WorkerLink(found, self._lease.epoch, self._settings.shard)
            if not said:
                log.info("waiting for a ready worker of model %s", self._settings.served_model_name)
                said = True
            await asyncio.sleep(0.1)

    async def _pump(self, link: WorkerLink, replica: int) -> None:
        """Plans and sends while there is something to plan, a place in flight, and room to publish."""
        while True:
            while not self._publisher.full:
                begin = time.monotonic_ns()
                plan, outcome = self._core.plan(begin, replica)
                self._put(outcome)
                if plan is None:
                    break
                for enter in plan.enters:
                    self._slot_request[enter.slot] = enter.request.id
                self._plans[plan.id] = plan
                self._stats.step(plan.decode_tokens, plan.prefill_tokens)
                self._stats.scheduled(time.monotonic_ns() - begin)
                await link.send(step_to_wire(plan, self._lease.epoch))
            await self._wake.wait()
            self._wake.clear()

    async def _receive(self, link: WorkerLink, replica: int) -> None:
        async for message in link.results():
            if message.error:
                raise WorkerLostError(f"step {message.id} failed: {message.error}")
            begin = time.monotonic_ns()
            self._plans.pop(message.id, None)
            self._reports.last_step = message.id
            outcome = self._core.apply(result_from_wire(message, replica), begin)
            self._wake.set()
            self._stats.result(message.timings.total_ns, message.timings.idle_ns)
            self._stats.outcome(outcome, begin)
            self._stats.scheduled(time.monotonic_ns() - begin)
            if self._strikes:
                for request, count in zip(outcome.requests, outcome.counts, strict=True):
                    if count:
                        self._strikes.pop(request.id, None)
            self._put(outcome, message.id)
        raise WorkerLostError("its stream ended")

    async def _watch(self, link: WorkerLink) -> None:
        """Ends the link when a step stays unanswered; wakes the loop for deadlines when nothing else does."""
        while (waited := link.waited_s()) < self._settings.watchdog_s:
            if waited == 0 and self._core.unfinished:
                self._wake.set()
            await asyncio.sleep(WATCH_S)
        raise WorkerLostError(f"a step is unanswered for {waited:.1f} s")

    def _lose(self, replica: int) -> None:
        """Back to waiting with all; requests that were in the oldest unanswered step get a strike."""
        now = time.monotonic_ns()
        oldest = self._plans.get(min(self._plans, default=0))
        suspects = {self._slot_request.get(int(slot), "") for slot in oldest.chunk_slots} if oldest else set()
        self._core.lose(replica, now)
        self._plans.clear()
        self._slot_request.clear()
        for request_id in suspects & self._entries.keys():
            self._strikes[request_id] = self._strikes.get(request_id, 0) + 1
            if self._strikes[request_id] >= STRIKES:
                text = f"the request was in {STRIKES} steps that failed, without a token in between"
                log.error("request %s ends: %s", request_id, text)
                self._put(self._core.cancel(request_id, now, Finish.ERROR, text))
                self._reports.dead(request_id, text)

    def _put(self, outcome: Outcome | None, step: int = 0) -> None:
        self._publisher.put(outcome, step)

    # Reports

    async def _report(self) -> None:
        beat = self._settings.stats_ms / 1000
        while True:
            await asyncio.sleep(beat)
            try:
                await self._clock.sync(self._redis)
                await self._reports.stats(self._snapshot())
            except Unreachable as error:
                log.warning("stats were not written: %s", error)
            if self._core.idle:
                self._core.check()

    def _snapshot(self) -> dict[str, float | int | str]:
        fields = self._stats.snapshot(
            self._core.stats(),
            time.monotonic_ns(),
            int(time.time() * 1000),
            self._lease.epoch,
            self._settings.policy,
            1 if self._link else 0,
        )
        if self._link:
            info = self._link.info
            fields |= {
                "max_model_len": info.max_model_len,
                "max_input_tokens": info.max_input_tokens,
                "max_output_tokens": info.max_output_tokens,
                "backend": info.backend,
            }
        return fields | {"last_step": self._reports.last_step, "in_flight": len(self._plans)}
