"""What a chaos run writes down: of each request what its client saw, and of the stack what it holds at rest.

Plain data, filled in by `client.py` and `rest.py`, judged by `checker.py`. Times are those of
time.monotonic().
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Plan = Literal["stay", "return", "leave", "cancel", "slow", "background"]
"""Of a client: reads to the end; hangs up and comes back; hangs up for good; asks for a cancel and reads on; reads so
slowly that it may be cut for it; has no connection at all, and asks now and then whether the answer is there."""

DONE, CUT, LEFT, REFUSED, GAVE_UP, SLOW = "done", "cut", "left", "refused", "gave_up", "slow_client"
LATER = "later"  # 503 or 429 that says when to come again
"""Ends of a connection beside the codes of error events: told to the end, broken off, hung up by the client, not taken
up (503, 429, or no answer to a request that has no name yet), the client's patience was over, and the gateway's with a
client that reads slowly."""


@dataclass(slots=True)
class Event:
    """One event of a stream, or one choice of a whole answer (position: None)."""

    at_s: float
    choice: int
    token_ids: list[int]
    text: str = ""
    finish: str = ""
    position: str | None = None  # what follows the request in the SSE id: `i0.i1...`


@dataclass(slots=True)
class Connection:
    """One HTTP exchange of a request's client."""

    gateway: int
    began_s: float
    last_event: str = ""  # the Last-Event-ID that was sent
    events: list[Event] = field(default_factory=list)
    usage: dict[str, int] | None = None
    end: str = ""
    text: str = ""  # of an error: its message
    status: int = 0  # of HTTP; 0: no answer
    accepted_drafts: int = 0  # as the usage says


@dataclass(slots=True)
class History:
    """One request as its client lived it, and its record in Redis after the end."""

    number: int
    template: str
    choices: int
    stream: bool
    plan: Plan
    key: str = ""  # Idempotency-Key
    request: str = ""  # its id, once a gateway said so
    connections: list[Connection] = field(default_factory=list)
    record: dict[str, str] = field(default_factory=dict)
    tenant: int = 0  # among those of the run

    @property
    def end(self) -> str:
        return self.connections[-1].end if self.connections else ""

    @property
    def accepted(self) -> bool:
        return bool(self.request)

    def events(self) -> list[Event]:
        """Of all connections. A whole answer counts only where it arrived."""
        return [event for connection in self.connections for event in connection.events]

    def forget_events(self) -> None:
        """Of a history that was judged and found right: a long run has millions."""
        for connection in self.connections:
            connection.events = []


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the undisturbed run of a template gave, by choice."""

    tokens: list[list[int]]
    texts: list[str]
    finishes: list[str]
    usage: dict[str, int]


@dataclass(slots=True)
class Rest:
    """What the stack holds when nothing runs. Blocks and slots are the scheduler's, keys and entries Redis's."""

    blocks_free: int  # free or cached
    blocks_total: int
    sequences: dict[str, int]  # running, waiting, swapped, parked, in_flight, and blocks that drain
    queue: dict[str, int]
    entries: dict[str, int]  # of each request stream
    pending: dict[str, int]
    lasting_keys: list[str]  # without a TTL
    fds: dict[str, int] = field(default_factory=dict)  # by service
    rss_mib: dict[str, float] = field(default_factory=dict)

    def quiet(self) -> bool:
        """Does nothing run or wait any more?"""
        return not any((*self.sequences.values(), *self.entries.values(), *self.queue.values()))


@dataclass(slots=True)
class Injected:
    """One fault: from when to when it lasted. ready_s: what was hurt answered again; over_s: the stack was whole again,
    as far as one can ask it. 0: not yet."""

    kind: str
    target: str
    at_s: float
    over_s: float = 0.0
    ready_s: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)
