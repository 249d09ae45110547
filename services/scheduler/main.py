"""Run the scheduler of one shard: `orcinus scheduler`."""

from __future__ import annotations

import uvloop

from services.scheduler.metrics import Metrics
from services.scheduler.service import Service
from services.scheduler.tracing import Spans
from shared.ids import process_id
from shared.processes.heap import settle
from shared.security.channels import channel_credentials
from shared.settings import SchedulerSettings
from shared.telemetry import logs
from shared.telemetry.metrics import serve as serve_metrics


def run(settings: SchedulerSettings) -> int:
    """Run until stopped; return 0 after SIGTERM or SIGINT, 1 when another scheduler took the shard.

    Raises ConfigurationError for certificates that cannot be used, and for traces without their SDK.
    """
    logs.setup("scheduler", settings.log_level, settings.log_json)
    channel_credentials(settings)  # read again for each channel; errors show now
    spans = Spans(settings, process_id("scheduler")) if settings.otlp_endpoint else None
    metrics = Metrics(settings.served_model_name, settings.metrics_aliases, spans.add if spans else None)
    serve_metrics(metrics.registry, settings.metrics_host, settings.scheduler_metrics_port, "--scheduler-metrics-port")

    async def serve() -> int:
        settle()
        return await Service(settings, metrics).run()

    try:
        return uvloop.run(serve())
    finally:
        if spans:
            spans.close()
