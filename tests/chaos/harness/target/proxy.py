"""A TCP proxy that hurts: between two services it adds latency, cuts, goes silent, or sends byte by byte.

Runs in the event loop of `orcinus chaos`. What it does wrong is a property of the whole proxy and may change any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

CHUNK_BYTES = 1 << 16
BYTE_BY_BYTE = 96
"""So many bytes of each chunk go alone: enough to break every length and header, cheap enough for two cores."""


class Proxy:
    """Forwards a loopback port to another."""

    def __init__(self, port: int, target: int) -> None:
        self.port, self.target = port, target
        self.latency_s = 0.0
        self.byte_by_byte = False
        self._flows = asyncio.Event()  # cleared: half-open, nothing is forwarded and no side is told
        self._flows.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self.cut()
            await self._server.wait_closed()

    def cut(self) -> None:
        """Resets every connection; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()

    def go_silent(self) -> None:
        """Half-open from now on: connections stand, new ones are taken, and not a byte arrives."""
        self._flows.clear()

    def heal(self) -> None:
        """Good again. Connections that were silent are dead: the peers of a half-open one never meet again."""
        self.latency_s, self.byte_by_byte = 0.0, False
        if not self._flows.is_set():
            self.cut()
            self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._flows.wait()
            further = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            further = None
        if further is None or writer.transport.is_closing():
            self._end(writer, *(further[1:] if further else ()))
            return
        self._writers.add(further[1])
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, further[1]))
                group.create_task(self._forward(further[0], writer))
        finally:
            self._end(writer, further[1])

    def _end(self, *writers: asyncio.StreamWriter) -> None:
        for writer in writers:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one of the two ends; then both do, once what was on its way has arrived."""
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self.latency_s:
                    await asyncio.sleep(self.latency_s)
                await self._flows.wait()
                await self._send(data, writer)
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    async def _send(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        alone = min(len(data), BYTE_BY_BYTE if self.byte_by_byte else 0)
        for piece in (*(data[index : index + 1] for index in range(alone)), data[alone:]):
            if writer.transport.is_closing():  # uvloop's writes to one that was cut raise what is no OSError
                raise ConnectionResetError
            writer.write(piece)
            await asyncio.sleep(0)  # the next byte is another segment
        await writer.drain()
