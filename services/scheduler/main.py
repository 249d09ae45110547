"""`orcinus scheduler`: runs one shard's scheduler until it is told to stop."""

from __future__ import annotations

import uvloop

from services.scheduler.core.presets import PRESETS
from services.scheduler.service import Service
from shared import logs
from shared.errors import ConfigurationError
from shared.settings import SchedulerSettings


def run(settings: SchedulerSettings) -> int:
    """Blocks. 0 after SIGTERM or SIGINT, 1 when another scheduler took the shard.

    Raises ConfigurationError for a policy that does not exist.
    """
    logs.setup("scheduler", settings.log_level, settings.log_json)
    if settings.policy not in PRESETS:
        raise ConfigurationError(f"no policy {settings.policy!r}; choose one of {', '.join(sorted(PRESETS))}")

    async def serve() -> int:
        return await Service(settings).run()

    return uvloop.run(serve())
