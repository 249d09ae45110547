"""`orcinus gateway`: serves HTTP until it is told to stop.

Listens before Redis is there (live, not ready), drains at the first SIGTERM or SIGINT or when `orcinus drain` asks for
it, stops at once at the second signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import logging
import signal
import socket

import uvloop

from services.gateway.app import ops_app, public_app
from services.gateway.front import BACKLOG, GRACE_S, renew_certificates, scheme, server, warn_of_clear_text
from services.gateway.gateway import Gateway
from services.gateway.grpc_front import GrpcFront
from services.gateway.tasks import end
from services.gateway.tokenizer import ModelText
from shared import logs
from shared.errors import ConfigurationError
from shared.settings import GatewaySettings

log = logging.getLogger("orcinus.gateway")


def run(settings: GatewaySettings) -> int:
    """Blocks. 0 after a clean stop, 1 when a task of the gateway died.

    Raises ConfigurationError for a model, a key, a certificate or a port that will not do.
    """
    logs.setup("gateway", settings.log_level, settings.log_json)
    model = ModelText(settings.model, settings.template_timeout_s, settings.tool_parser)
    if problem := model.try_template():
        log.warning("the chat template does not render a plain message: %s", problem)
    gateway = Gateway(settings, model)
    faulthandler.register(signal.SIGUSR1)  # what hangs can be asked where
    with contextlib.ExitStack() as sockets:
        public = sockets.enter_context(contextlib.closing(_listen(settings.host, settings.port, "port")))
        ops = sockets.enter_context(contextlib.closing(_listen(settings.ops_host, settings.ops_port, "ops port")))
        name, host, port = settings.served_model_name, settings.host, settings.port
        log.info("serving %s on %s://%s:%d", name, scheme(settings), host, port)
        warn_of_clear_text(settings)
        failure = uvloop.run(_serve(gateway, public, ops))
    model.close()
    if failure:
        # Whoever started this process starts it again; without that task it would only look alive.
        log.critical("a task of this gateway died, so the process ends: %s", failure)
        return 1
    log.info("stopped")
    return 0


async def _serve(gateway: Gateway, public: socket.socket, ops: socket.socket) -> str:
    """Until told to stop, or until a task died: then its error is returned."""
    servers = [server(app, gateway.settings) for app in (public_app(gateway), ops_app(gateway))]
    grpc_front = await _grpc_front(gateway)
    stopping = asyncio.Event()
    hurried = asyncio.Event()

    def stop() -> None:
        (hurried if stopping.is_set() else stopping).set()

    def renew() -> None:
        renew_certificates(servers, gateway.settings)
        if grpc_front is not None:
            grpc_front.renew_certificate()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, renew)
    gateway.start()
    serving = [
        asyncio.create_task(one.serve(sockets=[listener])) for one, listener in zip(servers, (public, ops), strict=True)
    ]
    asked = [asyncio.create_task(each.wait()) for each in (stopping, gateway.cluster.drain_asked)]
    tasks = gateway.tasks
    await asyncio.wait({*asked, *serving, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    failure = gateway.dead_task()
    draining = asyncio.create_task(gateway.drain(0 if failure else gateway.settings.drain_s))
    hurry = asyncio.create_task(hurried.wait())
    await asyncio.wait({draining, hurry, *([] if failure else tasks)}, return_when=asyncio.FIRST_COMPLETED)
    failure = failure or gateway.dead_task()
    if not draining.done():
        await end(draining)
        await gateway.drain(0)
    for one in servers:
        one.should_exit = True
    await asyncio.gather(*serving, *([grpc_front.stop(GRACE_S)] if grpc_front else []))
    await end(*asked, hurry)
    await gateway.stop()
    return failure


async def _grpc_front(gateway: Gateway) -> GrpcFront | None:
    """Listening, where a port is set. Raises ConfigurationError."""
    settings = gateway.settings
    if not settings.grpc_port:
        return None
    front = GrpcFront(gateway)
    await front.start()
    log.info("serving gRPC on %s:%d", settings.host, settings.grpc_port)
    return front


def _listen(host: str, port: int, what: str) -> socket.socket:
    """A bound socket. Raises ConfigurationError that says which port and what to do."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}: {error}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
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
