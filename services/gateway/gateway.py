"""Hold the parts of one gateway process: start, stop and drain them, and report whether they work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

from services.gateway.admission import Connections, Turns, bodies, conversations, rereads
from services.gateway.auth import Keyring
from services.gateway.batches.driver import BatchDriver
from services.gateway.errors import handed_over
from services.gateway.metrics import Metrics
from services.gateway.models import ModelTable, Parts, ServedModel, first_look
from services.gateway.processes import Siblings
from services.gateway.text.tokenizer import ModelText
from services.gateway.tracing import Tracing
from shared import ids
from shared.dead_letters import DeadLetters
from shared.settings import GatewaySettings
from shared.tasks import end

log = logging.getLogger("orcinus.gateway")


class Gateway:
    """Every part that lives as long as the process."""

    def __init__(self, settings: GatewaySettings, model: ModelText) -> None:
        """Raise ConfigurationError when a key is needed and there is none, and for a name that means two models."""
        self.settings = settings
        self.id = ids.process_id("gateway")
        self.metrics = Metrics(settings.served_model_name, settings.metrics_aliases)
        self.tracing = Tracing(settings.otlp_endpoint, self.id) if settings.otlp_endpoint else None
        self.letters = DeadLetters(self.id, lambda kind: self.metrics.unreadable.labels(kind).inc())
        entries = settings.models_file().models
        self.keyring = Keyring(settings, self.letters, [entry.name for entry in entries])
        self.connections = Connections()
        self.bodies = bodies(settings.max_body_bytes)
        self.turns = Turns(settings.tenant_queue_share, settings.max_wait_s)
        common = self.id, self.keyring, self.metrics, self.tracing, self.letters, self.connections
        parts = Parts(*common, rereads(), conversations())
        aliases = next((entry.aliases for entry in entries if entry.name == settings.served_model_name), ())
        self.first_model = ServedModel(settings, model, parts, aliases)
        self.models = ModelTable(self.first_model, parts, entries)
        self.cluster, self.dispatcher = self.first_model.cluster, self.first_model.dispatcher
        self.background, self.admission = self.first_model.background, self.first_model.admission
        self.batches = BatchDriver(settings, self.keyring, self.metrics, self.cancel_for)
        self.siblings: Siblings | None = None  # the other processes behind the same ports
        self.started_at = int(time.time())
        self._watchers: list[asyncio.Task[None]] = []
        self.metrics.active.set_function(lambda: self._active)
        self.metrics.watch(self.cluster, self.models.reason_not_ready)

    async def start(self) -> None:
        """Begin the tasks, and return when requests need not be refused for what Redis is about to say."""
        self.first_model.start()
        work = (self.keyring.run, self.batches.run, self.models.run)
        self._watchers = [asyncio.create_task(each()) for each in work]
        await first_look(self.cluster.has_looked, self.first_model.adapters.has_looked, self.keyring.has_looked)

    async def stop(self) -> None:
        await self.batches.stop()
        watching, self._watchers = self._watchers, []
        await end(*watching)
        await self.models.close()
        await self.first_model.stop()
        await self.keyring.close()
        await self.batches.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    async def cancel_for(self, request_id: str, tenant: str) -> str:
        """Cancel a request of a tenant, of whichever model. Return as `Dispatcher.cancel_for`. Raise ApiError(503)."""
        return await (await self.models.find_holder(request_id)).dispatcher.cancel_for(request_id, tenant)

    @property
    def is_draining(self) -> bool:
        """Whether the process is about to end."""
        return self.first_model.admission.is_draining

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that run as long as the process; main.py ends the process when one of them has ended."""
        return [*self.first_model.tasks, *self._watchers]

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
        self.models.is_draining = True
        for model in self.models.models():
            model.admission.is_draining = True
        await self.batches.stop()  # another gateway goes on with them at once
        for model in self.models.models():  # their background requests have no client: another gateway can read them
            self._hand_over(model, model.background.request_ids)
        end = time.monotonic() + seconds
        while self._streams and time.monotonic() < end:  # noqa: ASYNC110 - rare, and simpler than an event
            await asyncio.sleep(0.05)
        for model in self.models.models():
            self._hand_over(model, model.dispatcher.streams)
        end = time.monotonic() + 5.0
        while self._streams and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    @property
    def _active(self) -> int:
        """Return how many requests run, or wait for their turn or for their end."""
        return self._streams + len(self.turns)

    @property
    def _streams(self) -> int:
        """Return how many requests run here, of all models."""
        return sum(len(each.dispatcher.streams) for each in self.models.models())

    def _hand_over(self, model: ServedModel, requests: Iterable[str]) -> None:
        for request_id in list(requests):
            if stream := model.dispatcher.streams.get(request_id):
                stream.fail(handed_over(request_id), is_cut=True)

    def state(self) -> dict[str, Any]:
        """Return this process's part of `/stats`."""
        return {
            "id": self.id,
            "model": self.settings.served_model_name,
            "models": self.models.states(),
            "active_requests": self._active,
            "draining": self.is_draining,
            "not_ready": self.reason_not_ready() or None,
        }

    def reason_not_ready(self) -> str:
        """Return an empty text when new work would be served."""
        if self.is_draining:
            return "shutting down"
        if dead := self.dead_task():
            return f"a task of this gateway died: {dead}"
        return self.models.reason_not_ready() or ("" if self.keyring.has_read else "the keys have not been read yet")

    def reason_stalled(self) -> str:
        """Return an empty text while work, if there is any, moves."""
        return self.cluster.reason_stalled()
