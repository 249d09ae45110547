"""Open listening sockets: exclusive, shared by several processes, or only reserved."""

from __future__ import annotations

import errno
import socket

from shared.errors import ConfigurationError

BACKLOG = 2048


def listen(host: str, port: int, what: str, *, shared: bool = False) -> socket.socket:
    """Return a socket that listens. shared: beside those of other processes of this user that share it as well.

    Raise ConfigurationError that names the port and the remedy.
    """
    return _bound(host, port, what, shared, listening=True)


def reserve(host: str, port: int, what: str) -> socket.socket:
    """Return a socket that accepts no connection and keeps its port for `shared` listeners. SO_REUSEPORT alone would
    let a second gateway of the same user share the port unnoticed. Raise ConfigurationError.
    """
    held = _bound(host, port, what, False, listening=False)  # fails where any program listens, shared or not
    # A bind without SO_REUSEPORT conflicts with it from now on, one with it does not.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return held


def _bound(host: str, port: int, what: str, shared: bool, listening: bool) -> socket.socket:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}: {error}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(address)
        if listening:
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"{what} {port} on {host} is in use; stop what uses it or choose another"
            ) from error
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}") from error
    listener.setblocking(False)
    return listener
