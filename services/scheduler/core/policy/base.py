"""The five parts of a policy: order, memory, budget, batching and preemption.

A part answers one question about columns, holds no running sequence and never changes a table. A part that learns from
events implements the hooks (served, stepped, finished, joined). No two schedulers share a part. Each replica has its
own memory and budget parts (`for_replica`).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from services.scheduler.core.policy.step_time import StepTime, TokenTime
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.table import Bool, Int64, SlotTable
from services.scheduler.core.types import Int32, Limits, NewRequest, Rows


class Blocks(Protocol):
    """The part of a block pool that a policy may read, in blocks."""

    @property
    def total(self) -> int: ...

    @property
    def referenced(self) -> int: ...

    @property
    def draining(self) -> int: ...


class ReplicaView(Protocol):
    """The part of a replica that a policy may read."""

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
    """Waiting sequences in a policy's order. head() passes over a sequence that has left WAITING or was dropped."""

    def push(self, sequence: Sequence, now_ns: int) -> None:
        """Add `sequence`. A preempted one keeps its arrival."""

    def head(self, now_ns: int) -> Sequence | None:
        """Return the next sequence, or None if none may be next. Calls in a row at one `now_ns` return the same."""

    def pop(self, sequence: Sequence) -> None:
        """Remove the sequence that head() has just returned, because it is about to enter."""

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, is parked or is skipped."""

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all waiting sequences, each once, in any order."""


class Order(ABC):
    """Which waiting sequence is next, and in which order running sequences share a step."""

    by_class: bool = False  # waiting sequences of a better class go before all of worse classes, except for ageing
    age_ns: int = 0  # time of waiting that lifts a sequence by one class; 0 means never
    prefixes: bool = False  # reads `hits`: prefixes of all waiting sequences are looked up, up to LOOKED_AT of them

    @property
    def counts_tokens(self) -> bool:
        """Whether served() has to be called for the step that is planned; never by default."""
        return False

    @abstractmethod
    def queue(self) -> Queue:
        """Return an empty queue in this order. The other methods refer to the last queue returned."""

    @abstractmethod
    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        """Return running `rows` [n] in this order."""

    def find_overtaken(self, table: SlotTable, rows: Rows, head: Sequence, now_ns: int) -> Bool:
        """Return which of the running prompts `rows` [n] the waiting `head` goes before; none by default.

        The blocks of a running prompt are held already, so an order needs a reason to let it wait.
        """
        return np.zeros(rows.size, np.bool_)

    def in_time_ns(self, request: NewRequest, tokens: int, now_ns: int) -> int:
        """Return how many ns after its arrival a new request passes all that waits before it; 0 if it never does.

        tokens: of its prompt. The prefill is expected to begin by then.
        """
        return 0

    def count_served(self, tenants: Int32, classes: Int32, tokens: Int32) -> None:
        """Count the tokens [n] that a step gives to interned tenants [n] in classes [n]."""
        return

    def keep_slots(self, table: SlotTable, max_running: int, waiting: int) -> None:
        """Decide which slots some tenants must leave free in the next step. Called before a step while sequences wait.

        Because of them head() may return None although sequences wait. max_running: slots that may be in use.
        waiting: sequences that wait.
        """
        return


@dataclass(slots=True)
class Candidates:
    """The first waiting sequences, in order: [n] columns."""

    known_tokens: Int64  # known tokens: prompt and outputs
    limit: Int64  # most tokens that ever have KV: prompt and largest output, less the last token
    cached_tokens: Int64  # tokens with KV already
    shared_blocks: Int64  # blocks of `cached_tokens` that a running sequence holds: they cost no memory
    prompt: Int64  # tokens of the prompt; known - prompt are outputs from before


@dataclass(slots=True, frozen=True)
class Pace:
    """The pace of a replica, for memory estimates."""

    lookahead: int  # steps planned before the result of an earlier one is known
    max_tokens: int  # largest token budget of a step


class Memory(ABC):
    """Which waiting sequences may hold KV."""

    @abstractmethod
    def admit(self, replica: ReplicaView, candidates: Candidates, pace: Pace) -> Int64:
        """Return [k] blocks to reserve for the first k of [n] candidates, which may enter together.

        Each count includes shared blocks and covers at least the known tokens. The caller checks that the blocks are
        available. Where nothing runs, k is at least 1.
        """

    def for_replica(self) -> Self:
        """Return this part for a further replica. It shares what was learned of requests, not what was of memory."""
        return self

    def on_step(self, replica: ReplicaView, preempted: int) -> None:
        """Note that a step was planned and that `preempted` sequences were preempted for it."""
        return

    def on_finish(self, prompt: int, output: int, limit: int) -> None:
        """Note that a sequence ended by itself with `output` of at most `limit` output tokens."""
        return

    def snapshot(self) -> dict[int, list[int]]:
        """Return the output lengths from which this part forecasts, by group; empty if it makes no forecast."""
        return {}

    def restore(self, snapshot: Mapping[int, list[int]]) -> None:
        """Forecast from the output lengths of a snapshot(). Raises ValueError for what it cannot have made."""
        return


class Budget(ABC):
    """How many tokens an iteration runs."""

    @abstractmethod
    def max_tokens(self, replica: ReplicaView, step_tokens: int) -> int:
        """Return the most tokens of a step, decodes included, at least 1.

        step_tokens: the operator's setting; 0 uses the policy's own budget.
        """

    @abstractmethod
    def budget(
        self, replica: ReplicaView, decodes: Rows, now_ns: int, step_tokens: int, depth: int = 0, waiting: int = 0,
        waiting_tokens: int = 0,
    ) -> int:  # fmt: skip
        """Return the tokens of a step that decodes the rows `decodes` and has prompts to add; at most max_tokens().

        A step may have no tokens for prompts, but not for ever. depth: most cached tokens before the first chunk of an
        entering prompt. waiting: sequences in the queue that would find room; waiting_tokens: of their prompts.
        """

    def low_decodes(self, replica: ReplicaView, others: Rows, low: Rows) -> int:
        """Return how many of the decodes `low`, of class low, may run beside those of better classes; all by default.

        others: the decodes of better classes. At least 1 where there are any.
        """
        return low.size

    def for_replica(self) -> Self:
        """Return this part for a further replica."""
        return self

    def on_step(self, replica: ReplicaView, decodes: int, tokens: int, entered: int) -> None:
        """Note a planned step. tokens: in all; decodes: sequences that decode; entered: sequences that enter."""
        return


class Batching(ABC):
    """Which sequences share an iteration."""

    is_padded: bool = False  # the engine pads all sequences of a batch to the longest (for the simulator)
    at_end: bool = False  # a batch is delivered when its last sequence has ended (for the simulator)
    pooled: bool = False  # prompts enter by entry_tokens(); then running and entered ones get their chunks in one order

    def max_running(self, limit: int) -> int:
        """Return how many sequences may run at once, at most `limit` (from the settings and the worker)."""
        return limit

    def max_step_seqs(self, sequences: int, max_running: int, microbatches: int) -> int:
        """Return how many sequences may be in one step, at least 1, when `sequences` run."""
        return -(-max_running // microbatches)

    def max_new_seqs(self, replica: ReplicaView, waiting: int, max_running: int, oldest_ns: int, now_ns: int) -> int:
        """Return how many of `waiting` sequences may enter in this step.

        oldest_ns: arrival of the first. The answer may grow with `now_ns` alone (a queue delay).
        """
        return waiting

    def on_enter(self, replica: ReplicaView, sequences: int) -> None:
        """Note that `sequences` sequences enter in this step."""
        return

    @abstractmethod
    def chunks(self, rest: Int64, before: Int64, left: int, first: bool, alone: bool = False) -> Int64:
        """Return [k] chunk lengths for the first k of [n] prompts: k <= n, each above 0, their sum at most `left`.

        rest: [n] tokens still to be computed. before: [n] tokens with KV already. left: tokens left of the budget.
        first: no other prompt has a chunk in this step. alone: also no sequence decodes, so that the first prompt must
        get a chunk.
        """

    def entry_tokens(self, rest: Int64, left: int) -> Int64:
        """Return [k] tokens that the first k of [n] prompts count when they enter a pooled batch."""
        return self.chunks(rest, rest, left, True)


class Mode(enum.IntEnum):
    """How the KV of a preempted sequence is kept."""

    RECOMPUTE = 0
    SWAP = 1


@dataclass(slots=True, frozen=True)
class Slo:
    """Thresholds of preemption for TBT limits.

    Preemption begins when a running sequence of class <= high has less slack than `risk_ns`. It goes on until all of
    them have more than `safe_ns` (hysteresis).
    """

    risk_ns: int
    safe_ns: int


class Preemption(ABC):
    """Which sequence is preempted, and how."""

    stalls: bool = False  # a row without its next block sits the step out; preempt only when no row can run
    returns: bool = False  # with stalls: such a row goes before all waiting ones; preempt only when none gets a block
    takes: bool = False  # a waiting sequence of class <= high may take slot and blocks from rows of lower classes
    slo: Slo | None = None
    all_yield: bool = False  # with slo: its risk is what is left since the last token, and all of lower classes yield
    early: bool = False  # early_victims() is called before each step

    def early_victims(self, replica: ReplicaView, rows: Rows, head: Sequence | None, now_ns: int) -> list[int]:
        """Return those of `rows` that are preempted before the step is planned, although none lacks a block yet.

        head: the first waiting sequence if it lacks a slot or memory, else None.
        """
        return []

    @abstractmethod
    def choose(self, table: SlotTable, rows: Rows) -> int:
        """Return the victim among `rows` (at least one)."""

    @abstractmethod
    def mode(self, replica: ReplicaView, row: int) -> Mode:
        """Return how `row` is preempted. SWAP becomes RECOMPUTE where the host tier has no room."""


@dataclass(slots=True, frozen=True)
class Policy:
    """Five parts under a name."""

    name: str
    order: Order
    memory: Memory
    tokens: Budget
    batch: Batching
    relief: Preemption
    prefix_cache: bool = False  # whether prefixes are kept and shared, unless a setting says otherwise
    lookahead: int = 0  # of the system that the preset models; the simulator's default

    def parts_of(self, replica: int) -> tuple[Memory, Budget]:
        """Return the memory and budget parts of a replica. Replica 0 uses the policy's own."""
        return (self.memory.for_replica(), self.tokens.for_replica()) if replica else (self.memory, self.tokens)
