"""Run `orcinus gateway`: serve HTTP and gRPC until a signal or a drain command.

It listens before Redis is there (live, not ready), drains at the first SIGTERM or SIGINT or when `orcinus drain` asks
for it, and stops at once at the second signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
from dataclasses import asdict

import uvloop

from services.gateway.app import ops_app, public_app
from services.gateway.gateway import Gateway
from services.gateway.http.server import (
    GRACE_S,
    Server,
    handles,
    renew_certificates,
    scheme,
    server,
    warn_of_clear_text,
)
from services.gateway.kserve.front import GrpcFront
from services.gateway.processes import Place, Siblings
from services.gateway.text.tokenizer import ModelText
from shared.processes.heap import settle
from shared.processes.listeners import listen
from shared.processes.supervisor import beat
from shared.settings import GatewaySettings
from shared.tasks import end
from shared.telemetry import logs

log = logging.getLogger("orcinus.gateway")


def run(settings: GatewaySettings, place: Place | None = None) -> int:
    """Run a gateway until it is stopped; block meanwhile. Return 0 after a clean stop, 1 when a task of the gateway
    died. place: which of several processes this is. Raise ConfigurationError for a bad model, key, certificate or port.
    """
    logs.setup("gateway", settings.log_level, settings.log_json)
    model = ModelText(
        settings.model,
        settings.template_timeout_s,
        settings.tool_parser,
        settings.sampling_defaults,
        settings.reasoning_parser,
    )
    log.info("sampling defaults: %s", ", ".join(f"{name} {value:g}" for name, value in asdict(model.defaults).items()))
    if problem := model.try_template():
        log.warning("the chat template does not render a plain message: %s", problem)
    gateway = Gateway(settings, model)
    faulthandler.register(signal.SIGUSR1)  # writes the stacks of a process that hangs
    with contextlib.ExitStack() as sockets:
        public, ops = (
            sockets.enter_context(contextlib.closing(listen(host, port, what)))
            for host, port, what in (
                (settings.host, settings.port, "port"),
                (settings.ops_host, settings.ops_port, "ops port"),
            )
        )
        which = f" as process {place.number} of {place.count}" if place is not None else ""
        name, host, port = settings.served_model_name, settings.host, settings.port
        log.info("serving %s on %s://%s:%d%s", name, scheme(settings), host, port, which)
        if place is None or place.number == 0:
            warn_of_clear_text(settings)
        failure = uvloop.run(_serve(gateway, public, ops, place))
    model.close()  # the first one; the others were closed with the gateway
    if failure:
        # The supervisor of this process starts it again; without that task it would only look alive.
        log.critical("a task of this gateway died, so the process ends: %s", failure)
        return 1
    log.info("stopped")
    return 0


async def _serve(gateway: Gateway, public: socket.socket, ops: socket.socket, place: Place | None) -> str:
    """Serve until a signal or a drain command. Return the error of a task that died, else an empty text."""
    servers = [server(app, gateway.settings) for app in (public_app(gateway), ops_app(gateway))]
    gateway.connections.busy = servers[0].busy
    grpc_front = GrpcFront(gateway) if gateway.settings.grpc_port else None
    stop_event = asyncio.Event()
    hurry_event = asyncio.Event()

    def stop() -> None:
        (hurry_event if stop_event.is_set() else stop_event).set()

    def renew() -> None:
        renew_certificates(servers, gateway.settings)
        if grpc_front is not None:
            grpc_front.renew_certificate()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, stop)
    loop.add_signal_handler(signal.SIGHUP, renew)
    if place is not None:
        gateway.siblings = Siblings(place, gateway.metrics.registry, gateway.state)
        await gateway.siblings.start()
    stops = [asyncio.create_task(each.wait()) for each in (stop_event, gateway.cluster.drain_asked)]
    start_task = asyncio.create_task(gateway.start())
    await asyncio.wait({start_task, *stops}, return_when=asyncio.FIRST_COMPLETED)
    if start_task.done():
        start_task.result()
    await end(start_task)  # a stop does not wait for a Redis that is silent
    if grpc_front is not None:
        await grpc_front.start()
        log.info("serving gRPC on %s:%d", gateway.settings.host, gateway.settings.grpc_port)
    settle()
    leave_tasks: list[asyncio.Task[None]] = []
    server_tasks = [
        asyncio.create_task(one.serve(sockets=handles(listener, place.count if place is not None else 1)))
        for one, listener in zip(servers, (public, ops), strict=True)
    ]
    beat_tasks = [asyncio.create_task(beat())] if place is not None else []
    tasks = gateway.tasks
    await asyncio.wait({*stops, *server_tasks, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    failure = gateway.dead_task()
    if place is not None and gateway.cluster.drain_asked.is_set():
        leave_tasks = [asyncio.create_task(_leave(servers[0], grpc_front, gateway.settings.drain_s))]
    drain_task = asyncio.create_task(gateway.drain(0 if failure else gateway.settings.drain_s))
    hurry = asyncio.create_task(hurry_event.wait())
    await asyncio.wait({drain_task, hurry, *([] if failure else tasks)}, return_when=asyncio.FIRST_COMPLETED)
    failure = failure or gateway.dead_task()
    if not drain_task.done():
        await end(drain_task)
        await gateway.drain(0)
    for one in servers:
        one.should_exit = True
    await asyncio.gather(*server_tasks, *([grpc_front.stop(GRACE_S)] if grpc_front else []))
    await end(*stops, hurry, *leave_tasks)
    if gateway.siblings is not None:
        await gateway.siblings.stop()
    await gateway.stop()
    await end(*beat_tasks)
    return failure


async def _leave(public: Server, grpc_front: GrpcFront | None, drain_s: float) -> None:
    """Accept no new connection; the other processes behind the port get them from now on."""
    for each in public.servers:
        each.close()
    if grpc_front is not None:
        await grpc_front.stop(drain_s)
