"""The HTTP servers of a gateway: one uvicorn for each port, over TLS when there is a certificate."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn

from services.gateway.http.protocol import Bounds, Protocol
from shared.processes.listeners import BACKLOG
from shared.security.tls import check_pair
from shared.settings import GatewaySettings, is_loopback

log = logging.getLogger("orcinus.gateway")

GRACE_S = 5
"""Time to write answers when delivery has ended."""
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2, the oldest that is spoken; those of TLS 1.3 are all good."""
HANDLES = 32
"""Of a listening socket. In a round of the event loop libuv accepts one connection for each handle."""


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: two servers share the process, and draining comes first."""

    def __init__(self, config: uvicorn.Config, bounds: Bounds) -> None:
        super().__init__(config)
        self._bounds = bounds

    def busy(self) -> int:
        """Return the number of open connections, without those between two requests."""
        return len(self.server_state.connections) - len(self._bounds.idle)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server(app: Any, settings: GatewaySettings) -> Server:
    """Return the server of one port. Raise ConfigurationError for a certificate that cannot be used."""
    if settings.tls_cert is not None and settings.tls_key is not None:
        check_pair(settings.tls_cert, settings.tls_key)
    bounds = Bounds.of(settings)
    config = uvicorn.Config(
        app,
        http=functools.partial(Protocol, bounds),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.idle_connection_s,
        timeout_graceful_shutdown=GRACE_S,
        backlog=BACKLOG,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ciphers=CIPHERS,
    )
    return Server(config, bounds)


def handles(listener: socket.socket, processes: int) -> list[socket.socket]:
    """Return the socket and copies of it: with one handle a gateway that is busy, so that its rounds are long, accepts
    more slowly than clients come, and the most urgent of them wait in the kernel's queue.

    processes: that share the socket, and with it the handles: none is to take all that come.
    """
    return [listener, *(listener.dup() for _ in range(HANDLES // processes - 1))]


def scheme(settings: GatewaySettings) -> str:
    """Return http or https."""
    return "https" if settings.tls_cert is not None else "http"


def warn_of_clear_text(settings: GatewaySettings) -> None:
    """Warn that keys and prompts cross a network unencrypted: that is for the operator to choose."""
    if settings.tls_cert is not None:
        return
    for host, port in ((settings.host, settings.port), (settings.ops_host, settings.ops_port)):
        if not is_loopback(host):
            log.warning("%s:%d is reachable from other machines without TLS; set --tls-cert and --tls-key", host, port)


def renew_certificates(servers: Sequence[uvicorn.Server], settings: GatewaySettings) -> None:
    """Read the files again, for connections that come from now on; keep the old certificate when they are bad."""
    if settings.tls_cert is None or settings.tls_key is None:
        return
    try:
        check_pair(settings.tls_cert, settings.tls_key)
        for one in servers:
            if isinstance(context := one.config.ssl, ssl.SSLContext):
                context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except Exception as error:  # whatever is wrong with the new files, the old certificate still serves
        log.error("certificate not reloaded: %s", error)
    else:
        log.info("certificate reloaded")
