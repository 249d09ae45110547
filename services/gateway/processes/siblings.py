"""Exchange metrics and state among the processes behind one port: any of them answers /metrics and /stats for all.

Each listens on a unix socket in a folder that only their user may enter. Series keep their process apart by a label:
when one dies and starts again its counters begin at 0, which Prometheus understands of a series, and not of a sum.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from services.gateway.processes.parent import Place

log = logging.getLogger("orcinus.gateway")

ANSWER_S = 1.0
"""A process without an answer after so long is left out."""
LENGTH_BYTES = 8
"""An answer begins with its length: of one that was killed in the middle of it what came is cut, and left out."""
HELP = b"# HELP "


class Siblings:
    """Answers the other processes behind the port, and asks them."""

    def __init__(self, place: Place, registry: CollectorRegistry, state: Callable[[], dict[str, Any]]) -> None:
        """Answer for the metrics of `registry` and for the `state` of this process."""
        self._place = place
        self._registry = registry
        self._state = state
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Raise OSError."""
        own = self._place.folder / f"{self._place.number}.sock"
        own.unlink(missing_ok=True)  # of the process before
        self._server = await asyncio.start_unix_server(self._answer, own)

    async def stop(self) -> None:
        """No answer any more."""
        if self._server is not None:
            self._server.close()

    async def metrics(self) -> bytes:
        """Of all processes that answer, in Prometheus's format."""
        return merged(await self._ask(b"metrics"))

    async def states(self) -> list[dict[str, Any]]:
        """`Gateway.state` of all processes that answer, each with its number."""
        return [orjson.loads(answer) for answer in await self._ask(b"state")]

    def _own(self, what: bytes) -> bytes:
        if what == b"metrics":
            return labelled(self._registry, str(self._place.number))
        return orjson.dumps({"process": self._place.number, **self._state()})

    async def _ask(self, what: bytes) -> list[bytes]:
        own = self._place.number
        others = [number for number in range(self._place.count) if number != own]
        answers = dict(zip(others, await asyncio.gather(*(self._asked(each, what) for each in others)), strict=True))
        answers[own] = self._own(what)
        return [answers[number] for number in sorted(answers) if answers[number]]

    async def _asked(self, number: int, what: bytes) -> bytes:
        """Return the answer of one other process; empty when there is none."""
        writer = None
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._place.folder / f"{number}.sock")
                writer.write(what + b"\n")
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
                return await reader.readexactly(length)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.debug("process %d does not answer: %s", number, error)
            return b""
        finally:
            if writer is not None:
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError):  # the asking process has gone
            async with asyncio.timeout(ANSWER_S):
                answer = self._own((await reader.readline()).strip())
                writer.write(len(answer).to_bytes(LENGTH_BYTES) + answer)
                await writer.drain()
        writer.close()


class _Labelled(Collector):
    """A registry with the label `process` on every sample."""

    def __init__(self, registry: CollectorRegistry, process: str) -> None:
        self._registry = registry
        self._process = process

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            one = Metric(family.name, family.documentation, family.type)
            one.samples = [each._replace(labels={**each.labels, "process": self._process}) for each in family.samples]
            yield one


def labelled(registry: CollectorRegistry, process: str) -> bytes:
    """Return the registry's text, each sample with the label `process`."""
    own = CollectorRegistry()
    own.register(_Labelled(registry, process))
    return generate_latest(own)


def merged(texts: Iterable[bytes]) -> bytes:
    """Texts of several registries as one: the format wants the samples of a family together."""
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        for part in (b"\n" + text).split(b"\n" + HELP)[1:]:
            lines = part.rstrip(b"\n").split(b"\n")
            families.setdefault(b"\n".join(lines[:2]), []).extend(lines[2:])
    return b"".join(HELP + b"\n".join([head, *samples]) + b"\n" for head, samples in families.items())
