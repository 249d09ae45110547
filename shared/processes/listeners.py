"""Open the listening sockets of a server, and hand them from a supervisor to the processes that serve them.

A supervisor that holds a listening socket keeps clients waiting in its queue while the process behind it starts again,
where a closed port refuses them. Several processes that got the same socket take connections from one queue, so one of
them may leave without a connection lost. A gRPC server takes no socket: its processes share a port by SO_REUSEPORT,
and their supervisor only reserves it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Mapping

from shared.errors import ConfigurationError

BACKLOG = 2048
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
SOCKETS = "SUPERVISOR_SOCKETS"
"""The environment variable that names the sockets of a supervisor: `port=5,ops port=6`, by file descriptor."""


def listen(host: str, port: int, name: str) -> socket.socket:
    """Return the supervisor's listening socket of this name, else a new one.

    Raise ConfigurationError that names the port and the remedy.
    """
    return _inherit(name) or _bind(host, port, name, listens=True)


def reserve(host: str, port: int, name: str) -> socket.socket:
    """Return a socket that accepts no connection and keeps its port for listeners with SO_REUSEPORT. That option alone
    would let a second gateway of the same user share the port unnoticed. Raise ConfigurationError.
    """
    reservation = _bind(host, port, name, listens=False)  # fails where any program listens, shared or not
    # A bind without SO_REUSEPORT conflicts with it from now on, one with it does not.
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return reservation


def handed_on(sockets: Mapping[str, socket.socket]) -> dict[str, str]:
    """Return the environment that names these sockets to a child, which must get their descriptors."""
    return {SOCKETS: ",".join(f"{name}={held.fileno()}" for name, held in sockets.items())}


def _inherit(name: str) -> socket.socket | None:
    named = dict(item.partition("=")[::2] for item in os.environ.get(SOCKETS, "").split(",") if item)
    descriptor = named.get(name, "")
    if not descriptor:
        return None
    try:
        inherited_socket = socket.socket(fileno=int(descriptor))
        listens = inherited_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{SOCKETS}: {name}={descriptor}: {error}; unset it to open the port anew") from error
    if not listens:
        inherited_socket.detach()
        raise ConfigurationError(f"{SOCKETS}: {name}={descriptor}: does not listen; unset it to open the port anew")
    inherited_socket.setblocking(False)
    return inherited_socket


def _bind(host: str, port: int, name: str, listens: bool) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}: {error}; give an address of this machine") from error
    family, kind, protocol, _, address = addresses[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        if listens:
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"{name} {port} on {host} is in use; stop what uses it or choose another"
            ) from error
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error}; give an address of this machine and a port that is allowed"
        ) from error
    listener.setblocking(False)
    return listener


def is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket runs as the user of this one."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(given)[1]) == os.geteuid()
