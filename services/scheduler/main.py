"""`orcinus scheduler`: runs one shard's scheduler until it is told to stop."""

from __future__ import annotations

import uvloop

from services.scheduler.metrics import Metrics
from services.scheduler.service import Service
from shared import logs
from shared.channels import channel_credentials
from shared.metrics import serve as serve_metrics
from shared.settings import SchedulerSettings


def run(settings: SchedulerSettings) -> int:
    """Blocks. 0 after SIGTERM or SIGINT, 1 when another scheduler took the shard.

    Raises ConfigurationError for certificates that will not do.
    """
    logs.setup("scheduler", settings.log_level, settings.log_json)
    channel_credentials(settings)  # read at each dialling; what is wrong with them shows now
    metrics = Metrics(settings.served_model_name, settings.metrics_aliases)
    serve_metrics(metrics.registry, settings.metrics_host, settings.scheduler_metrics_port, "--scheduler-metrics-port")

    async def serve() -> int:
        return await Service(settings, metrics).run()

    return uvloop.run(serve())
