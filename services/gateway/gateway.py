"""Hold the parts of one gateway process: start, stop and drain them, and report whether they work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

from services.gateway.admission import Admission
from services.gateway.auth import Keyring
from services.gateway.batches.driver import BatchDriver
from services.gateway.cluster import Cluster
from services.gateway.delivery.background import BackgroundTasks, OrphanAdopter
from services.gateway.delivery.dispatcher import Dispatcher
from services.gateway.delivery.response_store import ResponseStore
from services.gateway.errors import handed_over
from services.gateway.metrics import Metrics
from services.gateway.processes import Siblings
from services.gateway.request import Limits
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
        """Raise ConfigurationError when a key is needed and there is none."""
        self.settings = settings
        self.model = model
        self.id = ids.process_id("gateway")
        self.metrics = Metrics(settings.served_model_name, settings.metrics_aliases)
        model.grammars.on_refused = lambda reason: self.metrics.refused_grammars.labels(reason).inc()
        self.tracing = Tracing(settings.otlp_endpoint, self.id) if settings.otlp_endpoint else None
        self.letters = DeadLetters(self.id, lambda kind: self.metrics.unreadable.labels(kind).inc())
        self.keyring = Keyring(settings, self.letters)
        fallback = Limits(max_model_len=model.max_model_len, max_choices=settings.max_choices)
        self.cluster = Cluster(settings, self.id, fallback, self.letters)
        self.dispatcher = Dispatcher(settings, self.id, self.cluster, self.metrics, self.letters)
        self.responses = ResponseStore(settings, self.dispatcher, self.letters)
        self.background = BackgroundTasks()
        self.admission = Admission(
            settings,
            model,
            self.keyring,
            self.cluster,
            self.dispatcher,
            self.background,
            self.metrics,
            self.tracing,
        )
        self.batches = BatchDriver(settings, self.keyring, self.metrics, self.dispatcher.cancel_for)
        self.adopter = OrphanAdopter(settings, self.id, self.background, self.admission.adopt, self.letters)
        self.siblings: Siblings | None = None  # the other processes behind the same ports
        self.started_s = int(time.time())
        self._watching: list[asyncio.Task[None]] = []
        self.metrics.active.set_function(lambda: len(self.dispatcher.streams))
        self.metrics.watch(self.cluster)

    def start(self) -> None:
        self.dispatcher.start()
        work = (self.cluster.run, self.keyring.run, self.adopter.run, self.batches.run)
        self._watching = [asyncio.create_task(each()) for each in work]

    async def stop(self) -> None:
        await self.batches.stop()
        await self.background.stop()
        await self.dispatcher.stop()
        watching, self._watching = self._watching, []
        await end(*watching)
        await self.keyring.close()
        await self.adopter.close()
        await self.batches.close()
        await self.responses.close()
        await self.cluster.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    @property
    def draining(self) -> bool:
        """Whether the process is about to end."""
        return self.admission.draining

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that run as long as the process; main.py ends the process when one of them has ended."""
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
        self.admission.draining = True
        await self.batches.stop()  # another gateway goes on with them at once
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
