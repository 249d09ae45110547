"""What a policy is: one choice of each of five parts. The parts live in parts/, their combinations in presets.py.

A part answers one question about columns, holds no sequence itself, and never changes a table. Those that learn (a
limit, a ratio, lengths) are told what happened by the hooks; no two cores share a part, and each replica has a memory
and a tokens part of its own (`another`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.scheduler.core.sequence import Sequence
from services.scheduler.core.table import Int64, SlotTable
from services.scheduler.core.types import Int32

if TYPE_CHECKING:
    from services.scheduler.core.replica import Replica


class Queue(Protocol):
    """The waiting in a policy's order. A sequence that has left WAITING (or is dropped) is passed over."""

    def push(self, sequence: Sequence, now_ns: int) -> None:
        """`sequence` waits from now on; a preempted one keeps its arrival."""

    def head(self, now_ns: int) -> Sequence | None:
        """Who is next, None if nobody may be; the same until something changes or time passes."""

    def pop(self, sequence: Sequence) -> None:
        """Takes out what head() has just returned."""

    def drop(self, sequence: Sequence) -> None:
        """`sequence` has ended or was set aside; its state says so already."""

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, each once, in any order."""


class Order(Protocol):
    """Who is next?"""

    swapped_first: bool  # the swapped stand before all that wait (vLLM); else all stand in one order

    def queue(self) -> Queue:
        """An empty queue in this order: the one that the other methods are about from now on."""

    def sort(self, table: SlotTable, slots: Int32, now_ns: int) -> Int32:
        """The running `slots`, first ones first."""

    def served(self, tenants: Int32, classes: Int32, tokens: Int32) -> None:
        """Interned tenants [n] were given so many tokens [n] in this step, each in a class [n] (for fairness)."""

    def spare(self, table: SlotTable, most: int, waiting: int) -> None:
        """Before each step while somebody waits: `most` may run at once, `waiting` wait. Slots may be kept for some of
        them (for fairness): then head() is None though others wait."""

    by_class: bool  # does a waiting sequence of a better class stand before all of worse ones (but for ageing)?
    age_ns: int  # of waiting lift a sequence by one class; 0: never
    counts: bool  # does served() want to be called?
    prefixes: bool  # does it go by `hits`? Then those of all the waiting are looked up while they are few (LOOKED_AT)


@dataclass(slots=True)
class Entrants:
    """The first of the waiting, in order: [n] columns."""

    known: Int64  # tokens known
    limit: Int64  # tokens of prompt and output at most, less one: whose KV is ever held
    cached: Int64  # tokens whose KV is there already
    shared: Int64  # blocks of `cached` that a running sequence holds: they cost nothing
    priority: Int32
    prompt: Int64  # tokens of the prompt: known - prompt were produced before


class Memory(Protocol):
    """May it hold KV?"""

    def admit(self, replica: Replica, entrants: Entrants, pace: Pace) -> Int64:
        """[k] blocks to keep for each of the first k of `entrants` that may enter together (k <= n), shared ones
        included, at least those of its known tokens.

        That so many are available is the caller's check (he takes fewer). An empty replica must accept the first.
        """

    def another(self) -> Memory:
        """The same part for a further replica: what it learns of memory is its own, what of requests is shared."""

    learns: bool  # do the hooks below want to be called?

    def stepped(self, replica: Replica, preempted: int) -> None:
        """A step was planned, and `preempted` sequences were preempted for it."""

    def finished(self, prompt: int, output: int, limit: int) -> None:
        """A sequence ended by itself with `output` tokens of at most `limit`."""


class Tokens(Protocol):
    """How many tokens this iteration?"""

    def most(self, replica: Replica, step_tokens: int) -> int:
        """Bound of a step, decodes included, at least 1; `step_tokens` is the operator's setting, 0 for none."""

    def budget(self, replica: Replica, decodes: Int32, now_ns: int, step_tokens: int, depth: int = 0) -> int:
        """Tokens of a step that runs the decodes of these slots and has prompts to add; at most most(). `depth`: most
        tokens that lie cached before the chunk of a prompt that enters.

        May leave nothing for prompts, but a policy must not do so for ever.
        """

    def another(self) -> Tokens:
        """The same part for a further replica."""


class Batch(Protocol):
    """Who shares the iteration?"""

    padded: bool  # the engine computes to the longest of the batch (for the simulator)
    at_end: bool  # what a batch produced is delivered when the last of it has ended (for the simulator)

    def slots(self, most: int) -> int:
        """Sequences that may run at once; `most` by the settings and the worker."""

    def seats(self, sequences: int, most: int, microbatches: int) -> int:
        """Sequences in one step when `sequences` run; at most `most` may run. At least 1."""

    def joins(self, replica: Replica, waiting: int, most: int, oldest_ns: int, now_ns: int) -> int:
        """How many of the waiting may join in this step, where at most `most` run; `oldest_ns`: arrival of the first.

        It may grow by the passing of time alone (a queue delay).
        """

    def joined(self, replica: Replica, sequences: int) -> None:
        """So many of the waiting have joined in this step."""

    def chunks(self, rest: Int64, before: Int64, left: int, first: bool, alone: bool = False) -> Int64:
        """[k] tokens for the first k prompts that get a chunk when [n] have `rest` to go behind `before` whose KV is
        there, and `left` of the budget is left; k <= n, all > 0, their sum <= left.

        `first`: no other prompt has a chunk in this step; `alone`: nor does anybody decode, so that the first must get
        something.
        """


class How(enum.IntEnum):
    """How a victim yields."""

    RECOMPUTE = 0
    SWAP = 1


@dataclass(slots=True, frozen=True)
class Slo:
    """Preemption for TBT limits: it begins when a running sequence of class <= high has less slack than `risk_ns`
    and goes on until all of them have more than `safe_ns` (hysteresis). See docs/policies.md#parts-by-name."""

    risk_ns: int
    safe_ns: int


class Relief(Protocol):
    """No memory, or an SLO at risk: who yields, and how?"""

    stalls: bool  # who lacks his next block sits out with what he has; one yields only when nobody can run
    takes: bool  # a waiting sequence of class <= high may take slot and blocks from running ones of lower classes
    slo: Slo | None

    def victim(self, table: SlotTable, slots: Int32) -> int:
        """One of `slots` (at least one)."""

    def how(self, replica: Replica, slot: int) -> How:
        """SWAP is done only if the host tier has room, else RECOMPUTE."""


@dataclass(slots=True, frozen=True)
class Pace:
    """What a memory estimate has to know of the running iteration."""

    lookahead: int
    most: int  # tokens of a step at most


@dataclass(slots=True, frozen=True)
class Policy:
    """Five parts under a name."""

    name: str
    order: Order
    memory: Memory
    tokens: Tokens
    batch: Batch
    relief: Relief
    prefix_cache: bool = False  # shares and keeps prefixes by default
    lookahead: int = 0  # what the system itself does; the simulator's default

    def parts_of(self, replica: int) -> tuple[Memory, Tokens]:
        """Those parts that each replica has for itself; the first has the policy's own."""
        return (self.memory.another(), self.tokens.another()) if replica else (self.memory, self.tokens)
