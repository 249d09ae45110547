"""Run several gateways behind one port: `orcinus gateway --processes N`.

The parent serves no request: it holds the listening sockets, passes signals on and restarts children that die. Each
child is a gateway with an id, a heartbeat and connections to Redis. It takes connections from the parent's sockets; the
kernel spreads those of the gRPC port by SO_REUSEPORT. Any child answers /metrics and /stats for all: each listens on an
abstract unix socket, which ends with its process. A label keeps the series of each process apart: after a restart its
counters begin at 0, and Prometheus handles such a reset in a series, but not in a sum over processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from shared.errors import ConfigurationError
from shared.processes.listeners import is_own, listen, reserve
from shared.processes.restarts import Backoff
from shared.processes.supervisor import Service, ServiceSpec, Supervisor, describe_exit
from shared.settings import GatewaySettings
from shared.telemetry import logs

log = logging.getLogger("orcinus.gateway")

PLACE = "GATEWAY_PLACE"
"""The environment variable that tells a child its place."""
STOP = (signal.SIGTERM, signal.SIGINT)
PASSED_ON = (signal.SIGHUP, signal.SIGUSR1)
RESTARTS = Backoff(factor=2.0, cap_s=5.0, settled_s=30.0)
LEVELS = {"warning": logging.WARNING, "error": logging.ERROR}
ANSWER_S = 1.0
"""The answer leaves out a process that is silent for so long."""
LENGTH_BYTES = 8
"""An answer begins with its length, so that the part that a killed process has sent is not taken for all of it."""
HELP = b"# HELP "


@dataclass(frozen=True, slots=True)
class Place:
    """Which of several processes a gateway is. `group` names those of one parent."""

    number: int
    count: int
    group: str

    @classmethod
    def from_environment(cls) -> Place | None:
        """Return the place of this process; None for a gateway that runs alone."""
        text = os.environ.get(PLACE)
        if text is None:
            return None
        number, count, group = text.split("/")
        return cls(int(number), int(count), group)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}/{self.group}"

    def address(self, number: int) -> str:
        """Return the address of the socket on which a process of the group listens."""
        return f"\0orcinus-gateway-{self.group}-{number}"


def run(settings: GatewaySettings) -> int:
    """Run the parent until all children have ended; block meanwhile. The command line of this process starts them.

    Return 0 after a clean stop or when all were drained, 1 when one could not be stopped cleanly or the first died
    before it served. Raise ConfigurationError for a port that is taken or a machine that cannot share one.
    """
    logs.setup("gateway", settings.log_level, settings.log_json)
    if not sys.platform.startswith("linux"):
        raise ConfigurationError(f"ORCINUS_PROCESSES={settings.processes}: only Linux spreads a port; use 1")
    with contextlib.ExitStack() as stack:
        sockets = {
            "port": stack.enter_context(listen(settings.host, settings.port, "port")),
            "ops port": stack.enter_context(listen(settings.ops_host, settings.ops_port, "ops port")),
        }
        if settings.grpc_port:
            stack.enter_context(reserve(settings.host, settings.grpc_port, "gRPC port"))
        return Processes(settings, sockets).run()


class Processes(Supervisor):
    """The parent of the gateways. The first one starts alone, so that wrong settings are reported once."""

    def __init__(self, settings: GatewaySettings, sockets: Mapping[str, socket.socket]) -> None:
        group, argv = secrets.token_hex(16), [sys.executable, *sys.orig_argv[1:]]
        specs = [
            ServiceSpec(
                f"process {number}",
                argv,
                {PLACE: str(Place(number, settings.processes, group))},
                after=("process 0",) if number else (),
                start_s=settings.process_start_s,
                sockets=sockets,
            )
            for number in range(settings.processes)
        ]
        super().__init__([Service(spec) for spec in specs], [*STOP, *PASSED_ON], RESTARTS)
        self._worst = 0

    def say(self, text: str, kind: str = "info") -> None:
        log.log(LEVELS.get(kind, logging.INFO), "%s", text)

    def on_signal(self, number: int) -> None:
        if number in STOP:
            self.is_stopping = True
            number = signal.SIGTERM
        for service in self.services:
            service.signal(number)

    def on_exit(self, service: Service, code: int, now: float) -> None:
        if self.is_stopping:
            service.state = "stopped"
            self._worst = max(self._worst, int(code not in (0, -signal.SIGTERM)))
        elif not any(each.ever_ready for each in self.services):
            self.end(code if code > 0 else 1)  # the child has logged the reason; no request was served
        elif code == 0:
            service.state = "stopped"
            running = sum(1 for each in self.services if each.process)
            self.say(f"{service.name} was drained and has ended; {running} remain")
        else:
            self.restart(service, f"died ({describe_exit(code)})", now)

    def on_tick(self, now: float) -> None:
        if any(service.process for service in self.services):
            return
        if self.is_stopping or all(service.state == "stopped" for service in self.services):
            self.say("all processes have ended")
            self.end(self._worst)

    def stop_all(self) -> None:
        """Kill the children that still run; there are some only after an error of the parent."""
        for service in self.services:
            service.signal(signal.SIGKILL)


class Siblings:
    """Answer the other processes behind the port, and ask them."""

    def __init__(self, place: Place, registry: CollectorRegistry, state: Callable[[], dict[str, Any]]) -> None:
        """Answer for the metrics of `registry` and for the `state` of this process."""
        self._place = place
        self._registry = registry
        self._state = state
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Raise OSError."""
        listener = _socket()
        listener.bind(self._place.address(self._place.number))
        self._server = await asyncio.start_unix_server(self._answer, sock=listener)

    async def stop(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()

    async def metrics(self) -> bytes:
        """Return the metrics of all processes that answer, in Prometheus's format."""
        return merge(await self._ask(b"metrics"))

    async def states(self) -> list[dict[str, Any]]:
        """Return `Gateway.state` of all processes that answer, each with its number."""
        return [orjson.loads(answer) for answer in await self._ask(b"state")]

    def _own_answer(self, question: bytes) -> bytes:
        if question == b"metrics":
            return label(self._registry, str(self._place.number))
        return orjson.dumps({"process": self._place.number, **self._state()})

    async def _ask(self, question: bytes) -> list[bytes]:
        here = self._place.number
        others = [number for number in range(self._place.count) if number != here]
        replies = await asyncio.gather(*(self._ask_one(number, question) for number in others))
        answers = dict(zip(others, replies, strict=True))
        answers[here] = self._own_answer(question)
        return [answers[number] for number in sorted(answers) if answers[number]]

    async def _ask_one(self, number: int, question: bytes) -> bytes:
        """Return the answer of one other process; empty when there is none."""
        writer, connection = None, _socket()
        try:
            async with asyncio.timeout(ANSWER_S):
                connection.connect(self._place.address(number))  # at once, or BlockingIOError
                reader, writer = await asyncio.open_unix_connection(sock=connection)
                if not is_own(writer.get_extra_info("socket")):
                    return b""
                writer.write(question + b"\n")
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
                return await reader.readexactly(length)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.debug("process %d does not answer: %s", number, error)
            return b""
        finally:
            (connection if writer is None else writer).close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError):  # the asking process has gone
            async with asyncio.timeout(ANSWER_S):
                if is_own(writer.get_extra_info("socket")):  # any user of the machine can reach an abstract socket
                    answer = self._own_answer((await reader.readline()).strip())
                    writer.write(len(answer).to_bytes(LENGTH_BYTES) + answer)
                    await writer.drain()
        writer.close()


def _socket() -> socket.socket:
    """Return a unix socket. uvloop takes no abstract address by name."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    return connection


class _LabelledRegistry(Collector):
    """A registry with the label `process` on every sample."""

    def __init__(self, registry: CollectorRegistry, process: str) -> None:
        self._registry = registry
        self._process = process

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            copy = Metric(family.name, family.documentation, family.type)
            labels = {"process": self._process}
            copy.samples = [sample._replace(labels={**sample.labels, **labels}) for sample in family.samples]
            yield copy


def label(registry: CollectorRegistry, process: str) -> bytes:
    """Return the registry's text, each sample with the label `process`."""
    wrapper = CollectorRegistry()
    wrapper.register(_LabelledRegistry(registry, process))
    return generate_latest(wrapper)


def merge(texts: Iterable[bytes]) -> bytes:
    """Return the texts of several registries as one: the format wants the samples of a family together."""
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        for part in (b"\n" + text).split(b"\n" + HELP)[1:]:
            lines = part.rstrip(b"\n").split(b"\n")
            families.setdefault(b"\n".join(lines[:2]), []).extend(lines[2:])
    return b"".join(HELP + b"\n".join([head, *samples]) + b"\n" for head, samples in families.items())
