"""A process tells its launcher that it has begun: it has taken its settings, and Redis has answered it.

A lease in Redis does not show that: it may be that of another process.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

BEGUN_FILE = "BEGUN_FILE"
"""The environment variable with the file that the launcher waits for; unset where it waits for none."""

log = logging.getLogger("orcinus.begun")


def has_begun() -> None:
    """Write the file, where one is asked for."""
    if file := os.environ.get(BEGUN_FILE):
        try:
            Path(file).touch()
        except OSError as error:
            log.warning("%s: cannot be written: %s; the launcher waits for it", file, error.strerror)
