"""The simulated network: connections that delay, break and freeze as the seed says.

Messages of one direction of a connection keep their order, as TCP's do; those of two connections do not. A message that
was sent before its sender died or closed still arrives, unless the connection was reset.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from tests.simulation.clock import Loop, Process, current

_NOTHING = contextvars.Context()


class Endpoint:
    """One end of a connection. `received`: called with each message where no task reads."""

    def __init__(self, network: Network, owner: str) -> None:
        self.network = network
        self.owner = owner
        self.peer: Endpoint
        self.closed = False  # by this end
        self.broken = False  # the peer has closed, or the connection was reset
        self.reset = False
        self.inbox: deque[Any] = deque()
        self.lag_s = 0.0  # at most so much more for each message of this end
        self.received: Callable[[Any], None] | None = None
        self.lost: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._last_s = 0.0
        self._held: list[Any] = []  # by a cut

    def send(self, message: Any) -> None:
        """Send a message. Raises ConnectionResetError when this end knows that the connection is lost."""
        if self.closed or self.broken:
            raise ConnectionResetError("the connection is closed")
        self._transmit(message)

    def writelines(self, messages: Iterable[Any]) -> None:
        """Send several as one message, as a StreamWriter takes them."""
        self.send(list(messages))

    async def drain(self) -> None:
        """Let other tasks run."""
        await asyncio.sleep(0)

    def _transmit(self, message: Any) -> None:
        network = self.network
        if network.is_cut(self.owner, self.peer.owner):
            self._held.append(message)
            return
        delay_s = network.delay_s() + (self.lag_s * network.loop.random.random() if self.lag_s else 0.0)
        self._last_s = max(self._last_s, network.loop.time() + delay_s)
        network.loop.call_at(self._last_s, self._arrive, message, context=_NOTHING.copy())

    def release(self) -> None:
        """Send what a cut held."""
        held, self._held = self._held, []
        for message in held:
            self._transmit(message)

    def _arrive(self, message: Any) -> None:
        peer = self.peer
        if peer.closed or peer.broken or self.reset:
            return
        if message is _END:
            peer.fail()
        elif peer.received is not None:
            peer.received(message)
        else:
            peer.inbox.append(message)
            peer.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> Any:
        """Return the next message. Raises ConnectionResetError once the connection is lost."""
        while not self.inbox:
            if self.closed or self.broken:
                raise ConnectionResetError("the connection was closed")
            self._waiter = self.network.loop.create_future()
            await self._waiter
        return self.inbox.popleft()

    def fail(self) -> None:
        """Take the loss of the connection."""
        if not self.broken:
            self.broken = True
            self.wake()
            if self.lost is not None:
                self.lost()
            self.network.endpoints.pop(self, None)

    def close(self) -> None:
        """Close this end; the peer learns of it behind the messages that are under way."""
        if not self.closed:
            self.closed = True
            self.wake()
            self._transmit(_END)
            self.network.endpoints.pop(self, None)

    # As redis-py wants of a writer.
    def is_closing(self) -> bool:
        return self.closed

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""


_END = object()


class Network:
    """All connections, and what is cut off from what."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.slow = 1.0
        self.endpoints: dict[Endpoint, None] = {}
        self._listeners: dict[str, tuple[Process | None, Callable[[Endpoint], None]]] = {}
        self._cuts: set[frozenset[str]] = set()

    def delay_s(self) -> float:
        """Return the delay of a message: mostly a fraction of a millisecond, seldom much more."""
        drawn = self.loop.random.random()
        scale = 0.0005 if drawn < 0.9 else 0.01 if drawn < 0.99 else 0.1
        return self.slow * scale * self.loop.random.random()

    def listen(self, address: str, process: Process | None, accept: Callable[[Endpoint], None]) -> None:
        """Accept connections at an address, in the process that listens."""
        self._listeners[address] = (process, accept)

    def refuse(self, address: str) -> None:
        """Refuse connections to an address, and reset those that it has."""
        self._listeners.pop(address, None)
        for endpoint in [each for each in self.endpoints if each.owner == address]:
            self.reset(endpoint)

    def is_cut(self, one: str, other: str) -> bool:
        return bool(self._cuts) and frozenset((one, other)) in self._cuts

    def cut(self, one: str, other: str) -> None:
        """Hold every message between two processes."""
        self._cuts.add(frozenset((one, other)))

    def heal(self) -> None:
        """End all cuts; what they held arrives."""
        self._cuts.clear()
        for endpoint in list(self.endpoints):
            endpoint.release()
            endpoint.peer.release()

    async def connect(self, address: str) -> Endpoint:
        """Connect the calling process. Raises ConnectionRefusedError where no process listens; hangs where cut off."""
        process = current.get()
        owner = process.name if process else "-"
        listener, accept = self._listeners.get(address, (None, None))
        target = listener.name if listener else address
        while self.is_cut(owner, target):
            await asyncio.sleep(0.1)
        await asyncio.sleep(2 * self.delay_s())
        listener, accept = self._listeners.get(address, (None, None))
        if accept is None or (listener is not None and listener.dead):
            raise ConnectionRefusedError(f"no process listens at {address}")
        near, far = Endpoint(self, owner), Endpoint(self, target)
        near.peer, far.peer = far, near
        self.endpoints[near] = self.endpoints[far] = None
        if process is not None:
            process.on_kill.append(near.close)
        if listener is not None:
            listener.on_kill.append(far.close)
            listener.run(self.loop.call_soon, accept, far)
        else:
            accept(far)
        return near

    def reset(self, endpoint: Endpoint) -> None:
        """Break a connection: messages under way are lost, both ends learn of it."""
        for end in (endpoint, endpoint.peer):
            end.reset = True
            end.fail()
