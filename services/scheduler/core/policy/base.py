"""The five parts of a policy: order, memory, budget, batching and preemption.

A part answers one question about columns, holds no running sequence and never changes a table. A part that learns is
told what happened by the hooks. No two schedulers share a part, and each replica has a memory and a budget of its own
(`for_replica`).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

from services.scheduler.core.policy.step_time import StepTime, TokenTime
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.table import Int64, SlotTable
from services.scheduler.core.types import Int32, Limits, Rows


class Blocks(Protocol):
    """What a part may read of a block pool."""

    @property
    def total(self) -> int: ...

    @property
    def referenced(self) -> int: ...


class ReplicaView(Protocol):
    """What a part may read of a replica."""

    number: int
    limits: Limits
    table: SlotTable
    model: StepTime
    token_time: TokenTime

    @property
    def pool(self) -> Blocks: ...

    @property
    def available(self) -> int:
        """Blocks that are free or cached, and reserved for no row."""

    @property
    def swap_ns_per_block(self) -> float: ...

    def blocks_for(self, tokens: int) -> int: ...


class Queue(Protocol):
    """Waiting sequences in a policy's order. A sequence that has left WAITING or was dropped is passed over."""

    def push(self, sequence: Sequence, now_ns: int) -> None:
        """Add `sequence`; a preempted one keeps its arrival."""

    def head(self, now_ns: int) -> Sequence | None:
        """Return the next sequence, or None if none may be next; the same until something changes or time passes."""

    def pop(self, sequence: Sequence) -> None:
        """Remove the sequence that head() has just returned: it is about to enter."""

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, is parked or is skipped."""

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all waiting sequences, each once, in any order."""


class Order(ABC):
    """Which sequence is next."""

    by_class: bool = False  # a waiting sequence of a better class goes before all of worse ones, but for ageing
    age_ns: int = 0  # time of waiting that lifts a sequence by one class; 0 means never
    prefixes: bool = False  # goes by `hits`: those of all the waiting are looked up while they are few (LOOKED_AT)
    counts: bool = False  # wants served()

    @abstractmethod
    def queue(self) -> Queue:
        """Return an empty queue in this order; the other methods are about the last one."""

    @abstractmethod
    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        """Return running `rows` in this order."""

    def served(self, tenants: Int32, classes: Int32, tokens: Int32) -> None:
        """Count the tokens [n] that a step gives to interned tenants [n], each in a class [n]."""
        return

    def keep_slots(self, table: SlotTable, max_running: int, waiting: int) -> None:
        """Decide before a step, while sequences wait, whether some slots stay free for some of them; then head() may
        return None though sequences wait."""
        return


@dataclass(slots=True)
class Candidates:
    """The first of the waiting, in order: [n] columns."""

    known: Int64  # tokens known
    limit: Int64  # tokens of prompt and output at most, less one: whose KV is ever held
    cached: Int64  # tokens whose KV is there already
    shared: Int64  # blocks of `cached` that a running sequence holds: they cost nothing
    priority: Int32
    prompt: Int64  # tokens of the prompt: known - prompt were produced before


@dataclass(slots=True, frozen=True)
class Pace:
    """What a memory estimate has to know of the running iteration."""

    lookahead: int
    max_tokens: int  # of a step


class Memory(ABC):
    """Whether sequences may hold KV."""

    @abstractmethod
    def admit(self, replica: ReplicaView, candidates: Candidates, pace: Pace) -> Int64:
        """Return [k] blocks to reserve for each of the first k of [n] candidates that may enter together, shared ones
        included, at least those of its known tokens.

        The caller checks that so many are available. The first candidate is admitted where nothing runs.
        """

    def for_replica(self) -> Self:
        """Return the same part for a further replica: what it learns of memory is its own, of requests is shared."""
        return self

    def stepped(self, replica: ReplicaView, preempted: int) -> None:
        """Note that a step was planned, for which `preempted` sequences were preempted."""
        return

    def finished(self, prompt: int, output: int, limit: int) -> None:
        """Note that a sequence ended by itself with `output` tokens of at most `limit`."""
        return


class Budget(ABC):
    """How many tokens an iteration runs."""

    @abstractmethod
    def max_tokens(self, replica: ReplicaView, step_tokens: int) -> int:
        """Return the bound of a step, decodes included, at least 1. `step_tokens`: the operator's setting or 0."""

    @abstractmethod
    def budget(self, replica: ReplicaView, decodes: Rows, now_ns: int, step_tokens: int, depth: int = 0) -> int:
        """Return the tokens of a step that decodes these rows and has prompts to add; at most max_tokens().

        depth: most tokens that lie cached before the chunk of a prompt that enters. May leave nothing for prompts, but
        not for ever.
        """

    def for_replica(self) -> Self:
        """Return the same part for a further replica."""
        return self


class Batching(ABC):
    """Which sequences share an iteration."""

    padded: bool = False  # the engine computes to the longest of the batch (for the simulator)
    at_end: bool = False  # a batch is delivered when the last of it has ended (for the simulator)

    def max_running(self, limit: int) -> int:
        """Return how many sequences may run at once; `limit` by the settings and the worker."""
        return limit

    def max_step_seqs(self, sequences: int, max_running: int, microbatches: int) -> int:
        """Return how many sequences may be in one step, at least 1, when `sequences` run."""
        return -(-max_running // microbatches)

    def max_new_seqs(self, replica: ReplicaView, waiting: int, max_running: int, oldest_ns: int, now_ns: int) -> int:
        """Return how many of the waiting may enter in this step; `oldest_ns`: arrival of the first.

        It may grow by the passing of time alone (a queue delay).
        """
        return waiting

    def joined(self, replica: ReplicaView, sequences: int) -> None:
        """Note that so many have entered in this step."""
        return

    @abstractmethod
    def chunks(self, rest: Int64, before: Int64, left: int, first: bool, alone: bool = False) -> Int64:
        """Return [k] tokens for the first k prompts that get a chunk when [n] have `rest` to go behind `before` tokens
        whose KV is there, and `left` of the budget is left; k <= n, all > 0, their sum <= left.

        first: no other prompt has a chunk in this step; alone: nor does any sequence decode, so that the first must
        get some tokens.
        """


class Mode(enum.IntEnum):
    """How the KV of a preempted sequence is kept."""

    RECOMPUTE = 0
    SWAP = 1


@dataclass(slots=True, frozen=True)
class Slo:
    """Preemption for TBT limits: it begins when a running sequence of class <= high has less slack than `risk_ns` and
    goes on until all of them have more than `safe_ns` (hysteresis)."""

    risk_ns: int
    safe_ns: int


class Preemption(ABC):
    """Which sequence is preempted, and how."""

    stalls: bool = False  # a row without its next block sits the step out; one is preempted only when none can run
    takes: bool = False  # a waiting sequence of class <= high may take slot and blocks from rows of lower classes
    slo: Slo | None = None

    @abstractmethod
    def choose(self, table: SlotTable, rows: Rows) -> int:
        """Return the victim among `rows` (at least one)."""

    @abstractmethod
    def mode(self, replica: ReplicaView, row: int) -> Mode:
        """Return how it is preempted. SWAP is done only if the host tier has room, else RECOMPUTE."""


@dataclass(slots=True, frozen=True)
class Policy:
    """Five parts under a name."""

    name: str
    order: Order
    memory: Memory
    tokens: Budget
    batch: Batching
    relief: Preemption
    prefix_cache: bool = False  # shares and keeps prefixes by default
    lookahead: int = 0  # of the system itself; the simulator's default

    def parts_of(self, replica: int) -> tuple[Memory, Budget]:
        """Return the parts that each replica has for itself; the first replica has the policy's own."""
        return (self.memory.for_replica(), self.tokens.for_replica()) if replica else (self.memory, self.tokens)
