"""Own the parts of one gateway process: admit requests, begin, resume and adopt them, drain."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Iterable
from typing import Any

from services.gateway.admission import refuse_late
from services.gateway.auth import Caller, Keyring
from services.gateway.cluster import MEMORY_MOST, Cluster
from services.gateway.delivery.background import BackgroundTasks, OrphanAdopter
from services.gateway.delivery.codec import from_delivery, to_delivery
from services.gateway.delivery.dispatcher import Dispatcher
from services.gateway.delivery.generation import Generation
from services.gateway.delivery.stream import Position, RequestStream
from services.gateway.errors import ApiError, handed_over, invalid, memory_low, taken_over, unavailable
from services.gateway.metrics import Metrics
from services.gateway.processes.siblings import Siblings
from services.gateway.request import GenerationSpec, Limits
from services.gateway.text.tokenizer import ModelText
from services.gateway.tracing import Tracing
from shared import ids
from shared.settings import GatewaySettings
from shared.tasks import end

log = logging.getLogger("orcinus.gateway")


class Gateway:
    """Holds all that lives as long as the process."""

    def __init__(self, settings: GatewaySettings, model: ModelText) -> None:
        """Raise ConfigurationError when a key is needed and there is none."""
        self.settings = settings
        self.model = model
        self.id = ids.process_id("gateway")
        self.metrics = Metrics(settings.served_model_name, settings.metrics_aliases)
        self.tracing = Tracing(settings.otlp_endpoint, self.id) if settings.otlp_endpoint else None
        self.keyring = Keyring(settings)
        fallback = Limits(max_model_len=model.max_model_len, max_choices=settings.max_choices)
        self.cluster = Cluster(settings, self.id, fallback)
        self.dispatcher = Dispatcher(settings, self.id, self.cluster, self.metrics)
        self.background = BackgroundTasks()
        self.adopter = OrphanAdopter(settings, self.id, self.background, self.adopt)
        self.siblings: Siblings | None = None  # the other processes behind the same ports
        self.draining = False
        self.started_s = int(time.time())
        self._watching: list[asyncio.Task[None]] = []
        self.metrics.active.set_function(lambda: len(self.dispatcher.streams))
        self.metrics.watch(self.cluster)

    def start(self) -> None:
        self.dispatcher.start()
        work = (self.cluster.run, self.keyring.run, self.adopter.run)
        self._watching = [asyncio.create_task(each()) for each in work]

    async def stop(self) -> None:
        await self.background.stop()
        await self.dispatcher.stop()
        watching, self._watching = self._watching, []
        await end(*watching)
        await self.keyring.close()
        await self.adopter.close()
        await self.cluster.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks that run as long as the process; main.py ends the process when one of them has ended."""
        return [*self.dispatcher.tasks, *self._watching]

    def dead_task(self) -> str:
        """Return the error of a task that ended and should not have; empty when all run."""
        for task in self.tasks:
            if task.done():
                return "it was cancelled" if task.cancelled() else repr(task.exception() or "it ended")
        return ""

    async def drain(self, seconds: float) -> None:
        """Let running requests end for `seconds`, then end their delivery: a stream can be continued at another
        gateway.
        """
        self.draining = True
        self._hand_over(self.background.kept)  # they have no client here: another gateway can read them as well
        end = time.monotonic() + seconds
        while self.dispatcher.streams and time.monotonic() < end:  # noqa: ASYNC110 - rare, and simpler than an event
            await asyncio.sleep(0.05)
        self._hand_over(self.dispatcher.streams)
        end = time.monotonic() + 5.0
        while self.dispatcher.streams and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def _hand_over(self, requests: Iterable[str]) -> None:
        for request_id in list(requests):
            if stream := self.dispatcher.streams.get(request_id):
                stream.fail(handed_over(request_id), cut=True)

    def state(self) -> dict[str, Any]:
        """Return this process's part of `/stats`."""
        return {
            "id": self.id,
            "model": self.settings.served_model_name,
            "active_requests": len(self.dispatcher.streams),
            "draining": self.draining,
            "not_ready": self.reason_not_ready() or None,
        }

    # Whether

    def reason_not_ready(self) -> str:
        """Return an empty text when new work would be served."""
        if self.draining:
            return "shutting down"
        if dead := self.dead_task():
            return f"a task of this gateway died: {dead}"
        return self.cluster.reason_not_ready() or ("" if self.keyring.read else "the keys have not been read yet")

    def reason_stalled(self) -> str:
        """Return an empty text while work, if there is any, moves."""
        return self.cluster.reason_stalled()

    def admit(self, spec: GenerationSpec) -> None:
        """Raise ApiError 429 or 503 when new work cannot be accepted. The enqueue script checks the bounds of the
        queue.
        """
        cluster = self.cluster
        self._refuse_while_draining()
        if cluster.redis_error or cluster.snapshot is None:
            raise unavailable(f"Redis does not answer: {cluster.redis_error}", "redis_unavailable", 2)
        if cluster.snapshot.memory_share > MEMORY_MOST:
            raise memory_low(cluster.snapshot.memory_share)
        if not cluster.snapshot.leases:
            raise unavailable("no scheduler is alive", "no_scheduler", 2)
        if not self.keyring.read:
            raise unavailable("the keys have not been read yet", "keys_unread", 2)
        forecast = cluster.forecast(spec.priority)
        if forecast is not None:
            refuse_late(forecast, "ttft_slo_ms", spec.ttft_slo_ms, "slo_unreachable")
            refuse_late(forecast, "deadline_ms", spec.deadline_ms, "deadline_unreachable")

    def _refuse_while_draining(self) -> None:
        if self.draining:
            raise unavailable("the gateway is shutting down", "shutting_down", 5)

    async def begin(self, spec: GenerationSpec, caller: Caller, started: float, last_event: str = "") -> Generation:
        """Admit and enqueue a request; continue one that an Idempotency-Key names and that was enqueued before.
        last_event: what the client has read of it. Raise ApiError; the Generation must be closed.
        """
        tenant = caller.tenant
        spec.priority = caller.priority(spec.priority)
        if last_event and spec.survives_client:  # it had a part: to begin anew would tell that twice
            return await self.resume(spec.id, tenant, started, last_event, same_as=spec)
        try:
            self.admit(spec)
        except ApiError:
            if not (spec.survives_client and await self.dispatcher.record(spec.id)):
                raise
            return await self.resume(spec.id, tenant, started, same_as=spec)  # an old request is no new work
        stream = self._open_stream(spec)
        generation = Generation(spec, self.model, stream, self.dispatcher, self.metrics, started)
        generation.span = self.tracing.begin(spec, started) if self.tracing is not None else None
        try:
            is_new = await self.dispatcher.enqueue(spec, stream, caller, to_delivery(spec, self.model))
        except ApiError:
            self.dispatcher.close(stream)
            raise
        except BaseException:
            generation.close()
            raise
        if not is_new and spec.survives_client:
            self.dispatcher.close(stream)
            return await self.resume(spec.id, tenant, started, same_as=spec)
        self.metrics.prompt_tokens.inc(spec.prompt_tokens)
        return generation

    def _open_stream(self, spec: GenerationSpec) -> RequestStream:
        bound = self.settings.client_buffer_events if spec.stream else 0
        return RequestStream(spec.id, spec.choices, bound, survives=spec.survives_client)

    async def begin_background(self, spec: GenerationSpec, caller: Caller, started: float) -> None:
        """Begin a request that runs without a client; spec.background is set. Raise ApiError."""
        self.background.keep(await self.begin(spec, caller, started))

    async def adopt(self, request_id: str, gateway: str) -> None:
        """Adopt a background request, if `gateway` was the last to read it. Raise ApiError."""
        record = await self.dispatcher.record(request_id)
        if record.get("gateway") == gateway:
            self.background.keep(
                await self.resume(request_id, record.get("tenant", ""), time.monotonic(), left_by=gateway)
            )

    async def resume(
        self,
        request_id: str,
        tenant: str,
        started: float,
        last_event: str = "",
        same_as: GenerationSpec | None = None,
        left_by: str = "",
    ) -> Generation:
        """Deliver a request that exists, wherever it was delivered before, from `last_event` on. same_as: the request
        that the client sent again. left_by: read it in the background, if that gateway was the last to do so. Raise
        ApiError; the Generation must be closed.
        """
        record = await self.dispatcher.raw_record(request_id)
        if b"delivery" not in record or record.get(b"tenant", b"").decode() != tenant:
            raise unknown_request(request_id)
        spec = from_delivery(request_id, record[b"delivery"], record.get(b"class", b"normal").decode())
        if same_as is not None and spec.body_sha256 != same_as.body_sha256:
            raise ApiError(
                409, "this Idempotency-Key was used for another body; send a new key", code="idempotency_key_reused"
            )
        position = Position.parse(last_event, request_id, spec.choices) if last_event else None
        spec.stream = not left_by and (same_as is None or same_as.stream)
        if spec.stream and spec.keep:
            raise invalid(
                "request_id",
                "request_id: a request with best_of cannot be streamed; the best choice is known at its end",
            )
        stream = self._open_stream(spec)
        left = functools.partial(self.background.left.add, request_id) if spec.background and not left_by else None
        generation = Generation(spec, self.model, stream, self.dispatcher, self.metrics, started, position, left)
        if left_by and request_id in self.dispatcher.streams:
            raise taken_over()  # a client here has it, or is about to
        self._refuse_while_draining()  # here: from now on `drain` knows the stream
        try:
            found = await self.dispatcher.adopt(stream, tenant, left_by)
        except BaseException:
            self.dispatcher.close(stream)
            raise
        if not found:  # it expired just now
            self.dispatcher.close(stream)
            raise unknown_request(request_id)
        self.metrics.resumed.inc()
        return generation


def unknown_request(request_id: str) -> ApiError:
    """Return the 404; the same for a request of another tenant."""
    return ApiError(404, f"request {request_id[:80]!r} not found", param="request_id", code="request_not_found")
