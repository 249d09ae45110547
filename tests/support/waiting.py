"""Waiting for conditions with a deadline, the only way in which tests wait."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(what: str, condition: Callable[[], T], seconds: float = 30.0, every: float = 0.02) -> T:
    """The first true value of condition(). Raises TimeoutError naming what was waited for."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds} s; last value {value!r}")
        time.sleep(every)


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
