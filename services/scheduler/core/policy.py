"""What a policy is: one choice of each of five parts. The parts live in parts/, their combinations in presets.py.

A part answers one question about arrays or about one sequence, holds no sequence itself, and never changes a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.table import SlotTable
from services.scheduler.core.types import Int32


class Order(Protocol):
    """Who is next?"""

    def place(self, sequence: Sequence) -> tuple[float, ...]:
        """Its place among the waiting of its class, smallest first; fixed while it waits."""

    def rank(self, sequence: Sequence, now_ns: int) -> tuple[float, ...]:
        """Its place among the heads of all classes, smallest first."""

    def sort(self, table: SlotTable, slots: Int32, now_ns: int) -> Int32:
        """The running `slots`, first ones first."""


class Memory(Protocol):
    """May it hold KV?"""

    def promise(self, replica: Replica, sequence: Sequence, pace: Pace) -> int:
        """Blocks to keep for `sequence` if it may enter now, at least those of its known tokens; -1 if it may not.

        That so many are free and promised to nobody is the caller's check. An empty replica must accept.
        """


class Tokens(Protocol):
    """How many tokens this iteration?"""

    def budget(self, replica: Replica, step_tokens: int) -> int:
        """At least 1; `step_tokens` is the operator's setting, 0 for none."""


class Batch(Protocol):
    """Who shares the iteration?"""

    def seats(self, sequences: int, most: int, microbatches: int) -> int:
        """Sequences in one step when `sequences` run; at most `most` may run, by the settings. At least 1."""

    def chunk(self, rest: int, left: int, first: bool) -> int:
        """Tokens to run of a prompt with `rest` to go when `left` are left of the budget; 0: not in this step.

        `first`: no other prompt has a chunk in this step.
        """


class Relief(Protocol):
    """No memory: who yields?"""

    def victim(self, table: SlotTable, slots: Int32) -> int:
        """One of `slots` (at least one)."""


@dataclass(slots=True, frozen=True)
class Pace:
    """What a memory estimate has to know of the running iteration."""

    budget: int  # tokens of a step
    lookahead: int


@dataclass(slots=True, frozen=True)
class Policy:
    """Five parts under a name."""

    name: str
    order: Order
    memory: Memory
    tokens: Tokens
    batch: Batch
    relief: Relief
