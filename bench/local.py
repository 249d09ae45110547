"""Helpers of benches that start processes on this machine."""

from __future__ import annotations

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Return `count` different loopback ports on which nothing listened a moment ago."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
