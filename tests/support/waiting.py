"""Waiting for conditions with a deadline, the only way in which tests wait; and ports that stay a test's own."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import itertools
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")
PORTS = range(12_000, 32_000)
"""Below those that Linux gives to outgoing connections (32768 and up). One of them may take a port that a service
leaves for a moment, and a client that dials such a port again and again may reach itself."""
RARELY_S = 0.1
"""Between two looks at a condition that is waited for two seconds or longer."""
_FIRST = os.getpid() * 97 % len(PORTS)  # processes begin in different places
_candidates: Iterator[int] = itertools.cycle([*PORTS[_FIRST:], *PORTS[:_FIRST]])


def until(what: str, condition: Callable[[], T | None], seconds: float = 60.0, every: float = 0.02) -> T:
    """Return the first true value of condition(). Raise TimeoutError naming what was waited for.

    The condition is asked at first `every` so many seconds, and less often the longer it takes: what is waited for may
    need the processor. It is asked once more after the deadline: the time may have passed while this process stood
    still.
    """
    begun = time.monotonic()
    while True:
        waited = time.monotonic() - begun
        is_late = waited > seconds
        value = condition()
        if value:
            return value
        if is_late:
            raise TimeoutError(f"{what}: not within {seconds} s; last value {value!r}")
        time.sleep(max(every, min(waited / 20, RARELY_S)))


async def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait on the event loop until condition() is true; other tasks run meanwhile."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def free_port() -> int:
    """Return a loopback port without a listener, and that no other process of tests gets while this one lives."""
    for port in itertools.islice(_candidates, len(PORTS)):
        if _claim(port) and _is_free(port):
            return port
    raise RuntimeError(f"no free port in {PORTS}")


@functools.cache
def _claims() -> BinaryIO:
    """The file of bytes that stand for ports; it stays open, as closing it would give up the locks."""
    return (Path(tempfile.gettempdir()) / f"orcinus-test-ports-{os.getuid()}.lock").open("ab")


def _claim(port: int) -> bool:
    """Lock the port's byte until this process ends; False if another process has it."""
    try:
        fcntl.lockf(_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
