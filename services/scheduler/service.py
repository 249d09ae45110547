"""The scheduler's process: one event loop around the core.

All tasks run on one thread, so the core is never entered twice: Claims brings requests in, Commands brings commands,
Shards looks at the other shards, Fleet holds the links to the workers and iterates, the publisher writes, and
`_report` writes statistics. Time enters the core here and in workers/, nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis

from protos import queue_pb2
from services.scheduler.core.types import Finish, Outcome
from services.scheduler.lengths import LengthRecord
from services.scheduler.metrics import Metrics
from services.scheduler.policy_switch import PolicySwitch, make_scheduler
from services.scheduler.quarantine import Quarantine
from services.scheduler.requests.claims import Claims, Holdings
from services.scheduler.requests.commands import Commands
from services.scheduler.requests.handover import RequestHandover
from services.scheduler.requests.intake import Claimed, Clock, Intake
from services.scheduler.requests.publisher import Publisher
from services.scheduler.shards import Shards
from services.scheduler.telemetry import Reports, Stats
from services.scheduler.workers.fleet import Fleet
from services.scheduler.workers.loop import WorkerContext
from services.scheduler.workers.registry import WorkerRegistry
from shared.dead_letters import DeadLetters, remove_foreign
from shared.errors import LeaseLostError
from shared.ids import process_id
from shared.keys import CLASSES
from shared.lease import Lease
from shared.redis_client import BLOCK_MS, Line, Scripts, Unavailable, connect, persist
from shared.settings import SchedulerSettings
from shared.tasks import end, first_of, within

log = logging.getLogger("orcinus.scheduler")


SHUTDOWN_S = 3.5
MIN_S = 0.3
"""Time for each part of the shutdown, also if the previous parts took all of SHUTDOWN_S."""


class Shutdown:
    """The end of the process: SHUTDOWN_S for all parts, from the first call on.

    Redis may be down or silent. The next scheduler needs none of this: leases and heartbeats expire.
    """

    def __init__(self, lease: Lease, reports: Reports, *clients: Redis) -> None:
        self._lease = lease
        self._reports = reports
        self._clients = clients
        self._by = 0.0  # monotonic s

    def remaining_s(self) -> float:
        """Return the time that is left, at least MIN_S."""
        now = time.monotonic()
        self._by = self._by or now + SHUTDOWN_S
        return max(self._by - now, MIN_S)

    async def release_lease(self) -> None:
        """Release the lease, once, so that a standby can take the shard."""
        if self._lease.epoch and not await within(self.remaining_s(), self._lease.release()):
            log.warning("lease not released: Redis does not answer; it expires")

    async def close(self) -> None:
        """Release the lease, delete the heartbeat, and close the connections."""
        await self.release_lease()
        await within(self.remaining_s(), self._reports.close())
        closed = asyncio.gather(*(client.aclose() for client in self._clients), return_exceptions=True)
        await within(self.remaining_s(), closed)


class Service:
    """One shard's scheduler."""

    def __init__(self, settings: SchedulerSettings, metrics: Metrics | None = None) -> None:
        self._settings = settings
        self.keys = settings.keys
        self._redis = connect(settings, connections=5)  # one of them the publisher's
        self._intake_reader = connect(settings, connections=1, socket_timeout_s=BLOCK_MS / 1000 + 4)
        self._control_reader = connect(settings, connections=1, socket_timeout_s=BLOCK_MS / 1000 + 4)
        self._stats = Stats(time.monotonic_ns(), metrics)
        self._scripts = Scripts(self._redis, self._stats.call, Line(self._redis))
        self.lease = Lease(self._scripts, self.keys, settings.shard, settings.lease_ms)
        name = process_id("scheduler")
        self._letters = DeadLetters(name, self._stats.unreadable)
        self._reports = Reports(self._redis, self.lease, self.keys, settings.shard, name)
        self._shutdown = Shutdown(self.lease, self._reports, self._redis, self._intake_reader, self._control_reader)
        self._clock = Clock()
        self._intake = Intake(
            self._intake_reader,
            self._redis,
            self._scripts,
            self.keys,
            settings.shard,
            self.lease,
            self._clock,
            self._letters,
        )
        self.core = make_scheduler(settings)
        self._policy = PolicySwitch(self.core, self._reports.event, self.keys.policy(settings.shard), self._letters)
        self._lengths = LengthRecord(
            self.core, self._redis, self.lease, self.keys.lengths(settings.shard), self._letters
        )
        self.holdings = Holdings()
        entries = self.holdings.entries
        self._publisher = Publisher(
            self._scripts, self.keys, self.lease, entries, self.forget, self.core.outputs, self._remove_foreign
        )
        self.commands = Commands(
            self._control_reader,
            self.keys.control(settings.shard),
            entries,
            self._command,
            self.lease,
            self._publisher,
            self._letters,
        )
        self._stop = asyncio.Event()
        self.quarantine = Quarantine(self.core, self._end_as_dead, self._end)
        self._shards = Shards(self._redis, self.keys, settings.shard, settings.lease_ms, self._letters)
        self.handover = RequestHandover(
            self._scripts,
            self.keys,
            settings.shard,
            self.lease,
            self.core,
            self._publisher,
            entries,
            self.forget,
            self._end,
        )
        self.claims = Claims(
            self._intake,
            self.holdings,
            self._shards,
            self.handover,
            self.commands,
            self.take_all,
            lambda: self.quarantine.has_suspects,
            lambda shard: Lease(self._scripts, self.keys, shard, settings.lease_ms),
            settings.claim_window,
        )
        workers = WorkerRegistry(
            self._redis,
            self._scripts,
            self.keys,
            settings.shard,
            self.lease,
            self._shards,
            settings.lease_ms,
            self._letters,
        )
        context = WorkerContext(
            self.core,
            self.quarantine,
            self._stats,
            self._reports,
            self._put,
            lambda: self._publisher.full,
            self._policy.look,
            lambda: self.fleet.wake_idle(),
        )
        self.fleet = Fleet(settings, workers, context, self.claims)

    async def run(self) -> int:
        """Serve the shard; return 0 after SIGTERM and 1 when another scheduler took it."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._stop.set)
        heartbeat = asyncio.create_task(self._reports.heartbeat())
        try:
            await first_of(self.lease.acquire(self._stop.is_set), self._stop.wait())
            return 0 if self._stop.is_set() else await self._hold()
        finally:
            await end(heartbeat)
            await self._shutdown.close()

    async def _hold(self) -> int:
        publisher = asyncio.create_task(self._publisher.run(self.fleet.resume_paused))
        keep = asyncio.create_task(self.lease.keep())  # at once: the rebuild may take longer than a lease
        try:
            await first_of(asyncio.shield(keep), self._prepare(), self._stop.wait())
            if not self._stop.is_set() and not keep.done():
                await first_of(
                    asyncio.shield(publisher),  # finish a write in progress, also at the end
                    keep,
                    self._run_claims(),
                    self._shards.run(self.claims.changed.set),
                    self.commands.run(),
                    self.fleet.run(),
                    self._report(),
                    self._stop.wait(),
                )
            if not self._stop.is_set():
                raise LeaseLostError("lease lost: another scheduler took the shard")
            self._put(self.core.checkpoint())
            await within(self._shutdown.remaining_s(), self._publisher.flush(publisher))
            await within(self._shutdown.remaining_s(), self._lengths.close())
            log.info("stopped; %d unfinished requests stay claimed for the next scheduler", self.core.unfinished_count)
            return 0
        except LeaseLostError as error:
            log.error("%s; stopping", error)
            return 1
        finally:
            await end(publisher, keep)
            await self._shutdown.release_lease()

    async def _prepare(self) -> None:
        await persist("look for keys of other types", self._repair, log, self._stop.is_set)
        await persist("prepare the request streams", self._intake.prepare, log, self._stop.is_set)
        await persist("read Redis's clock", lambda: self._clock.sync(self._redis), log, self._stop.is_set)
        await persist("read the policy that was set at run time", self._restore_policy, log, self._stop.is_set)
        await persist("read the lengths of finished requests", self._lengths.restore, log, self._stop.is_set)
        await persist("rebuild claimed requests", self.claims.rebuild, log, self._stop.is_set)

    async def _restore_policy(self) -> None:
        stored: Any = await self._redis.get(self.keys.policy(self._settings.shard))
        self._policy.restore(stored)

    # Requests in

    async def _run_claims(self) -> None:
        await self.claims.run()
        log.info("drained")
        self._reports.event("drained", f"{self._settings.shard} has no request left")
        self._stop.set()

    def take_all(self, claimed: list[Claimed]) -> None:
        now = time.monotonic_ns()
        first_tokens = self.core.first_tokens()
        for item in claimed:
            request = item.request
            if request.id in self.holdings.entries:
                continue  # delivered twice: it is in the core already
            self.holdings.add(request.id, item.entry)
            if request.outputs is None:  # else it began before a restart
                self._stats.arrives(request, first_tokens, now)
            self._put(self.core.add(request, now))
            if item.error:
                self._put(self.core.cancel(request.id, now, Finish.ERROR, item.error))
            elif item.is_cancelled:
                self._put(self.core.cancel(request.id, now))
            for choice, at in item.stops.items():
                if (
                    request.outputs and request.outputs[choice].size >= at
                ):  # else the end of the choice applies the stop
                    self._put(self.core.stop(request.id, choice, at, now))
            background = item.entry.request.background
            self.quarantine.add(request.id, request.gateway, now, item.is_delivered, background)
        if claimed:
            self.fleet.wake()

    def forget(self, request_id: str) -> None:
        self.holdings.drop(request_id)
        self._stats.forecasts.forget(request_id)
        self.claims.changed.set()
        has_suspects = self.quarantine.has_suspects
        self.quarantine.remove(request_id, time.monotonic_ns())
        if has_suspects:
            self.fleet.wake()

    def _command(self, control: queue_pb2.Control) -> None:
        now = time.monotonic_ns()
        kind = control.WhichOneof("command")
        if kind == "cancel":
            self._put(self.core.cancel(control.cancel.id, now))
        elif kind == "stop":
            self._put(self.core.stop(control.stop.id, control.stop.choice, control.stop.at_token, now))
        elif kind == "adopt":
            self.core.adopt(control.adopt.id, control.adopt.gateway)
            self.quarantine.on_adopt(control.adopt.id, control.adopt.gateway, now)
        elif kind == "drain":
            self.claims.drain()
        elif kind == "policy":
            self._policy.request(control.policy.name)
        else:
            log.warning("command %s dropped: unknown to this scheduler; update it", kind)
        self.fleet.wake()

    # Outcomes

    def _end_as_dead(self, request_id: str, text: str) -> None:
        log.error("request %s ended: %s", request_id, text)
        self._end(request_id, Finish.ERROR, text)
        self._reports.dead(request_id, text)

    def _end(self, request_id: str, finish: Finish, text: str) -> None:
        self._put(self.core.cancel(request_id, time.monotonic_ns(), finish, text))

    def _put(self, outcome: Outcome | None, step: int = 0) -> None:
        self._stats.outcome(outcome, time.monotonic_ns())
        self._publisher.put(outcome, step)

    # Reports

    async def _report(self) -> None:
        beat = self._settings.stats_ms / 1000
        while True:
            await asyncio.sleep(beat)
            try:
                await self._repair()
                await self._clock.sync(self._redis)
                replicas = self.fleet.replicas()
                self._stats.replicas(replicas)
                await self._reports.stats(self._snapshot(), self._stats.iterations.fields(), replicas)
                await self._lengths.write(time.monotonic())
                await self._intake.recount(time.monotonic())
                await self._reports.letters(self._letters.take())
                alive = await self._reports.gateways_alive(self.quarantine.gateways)
                self.quarantine.check_gateways(alive, time.monotonic_ns())
                self.fleet.wake()
            except Unavailable as error:
                log.warning("statistics not written: %s; retrying", error)
            if self.core.idle:
                self.core.check()

    async def _repair(self) -> None:
        """Delete keys of this shard that have another type than the services give them."""
        keys, shard = self.keys, self._settings.shard
        types = dict.fromkeys([*keys.request_streams(), keys.control(shard), keys.stats_history(shard)], "stream")
        types |= dict.fromkeys(
            [keys.events, keys.dead, keys.queue_kept, *map(keys.tokens, self.quarantine.gateways)], "stream"
        )
        hashes = [keys.queue, keys.queue_tenants, keys.queue_bytes, keys.queue_grammars]
        hashes += [keys.shards, keys.stats(shard)]
        types |= dict.fromkeys([*hashes, keys.iterations(shard), keys.replicas(shard), keys.lengths(shard)], "hash")
        strings = [keys.lease(shard), keys.epoch, keys.shard_epoch(shard), keys.policy(shard)]
        await self._remove_foreign(types | dict.fromkeys(strings, "string"))

    async def _remove_foreign(self, types: Mapping[str, str]) -> None:
        await remove_foreign(self._redis, self._letters, types)

    def _snapshot(self) -> dict[str, float | int | str]:
        fields = self._stats.snapshot(
            self.core.stats(),
            time.monotonic_ns(),
            int(time.time() * 1000),
            self.lease.epoch,
            self._policy.name,
            len(self.fleet.loops),
            [self.core.predicted_ttft_ns(number) for number in range(len(CLASSES))],
            self._shards.unclaimed_ms,
        )
        steps = {"last_step": self._reports.last_step, "in_flight": self.fleet.in_flight}
        held = {"suspects": self.quarantine.suspects, "stranded": len(self.core.stranded_requests())}
        more = {**held, "draining": int(self.claims.is_draining)}
        return fields | self.fleet.facts() | steps | more
