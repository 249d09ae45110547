"""The iteration-level scheduler of one article, rule by rule and with its quirks, on a virtual clock.

The article (its class IterationLevelScheduler) schedules in five phases: evict what has ended, preempt, give chunks to
running prompts, admit into what they leave, and give the chunks again, now with the prompts that were admitted.
literature/cases.py drives it over a file of cases. docs/policies.md says which preset equals it, and how it differs.

Quirks that are kept:

1. A chunk is min(chunk size, rest, budget left), rounded down to a multiple of 64 from 64 on; below it stays as it is.
2. The last chunk of a prompt samples nothing; the first output comes from a decode.
3. Admission counts unrounded chunks, after the rounded ones of the running prompts. A sequence may enter without a
   chunk and runs from then on.
4. While a running sequence of class <= high has less than 15 ms of TBT slack, sequences of lower classes yield one by
   one until all have more than 30 ms. No time passes meanwhile, so that is all of them. They may enter again in the
   same step.
5. A preempted sequence keeps its outputs, and only its prompt is computed again.
6. Decodes are not bounded by the budget.

`Rules` corrects 2 and 5, without which tokens would be wrong: the preset `iteration-level` of the core is these rules
with both corrections.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

BLOCK_SIZE = 16
MULTIPLE = 64  # of a chunk, from this length on
HIGH, NORMAL = 1, 2
AT_RISK_MS, SAFE_MS = 15.0, 30.0  # TBT slack at which lower classes begin and cease to yield


class Arrival(NamedTuple):
    """A request as a case gives it."""

    arrival_ms: float
    prompt: int
    max_new: int
    priority: int
    ttft_ms: float
    tbt_ms: float

    @property
    def blocks(self) -> int:
        """Return the blocks of prompt and all outputs, which it holds while it runs."""
        return -(-(self.prompt + self.max_new) // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of the scheduler, and the virtual clock: a step of n tokens takes fixed_ms + n x token_ms.

    fifo: equal classes wait in order of arrival; else as a heap with the class as its only key leaves them. virtual:
    steps take time. steps: steps after which a run ends, empty ones included.
    """

    batch_tokens: int = 2048
    batch_requests: int = 128
    chunk: int = 256
    blocks: int = 20_000
    fixed_ms: float = 25.0
    token_ms: float = 0.05
    fifo: bool = True
    virtual: bool = True
    steps: int = 5_000


@dataclass(frozen=True, slots=True)
class Rules:
    """The two corrections of the article. samples: the last chunk samples an output. rebuilds: a preempted sequence
    computes prompt and outputs again."""

    samples: bool = False
    rebuilds: bool = False


EXACT = Rules()
CORRECTED = Rules(samples=True, rebuilds=True)


class Planned(NamedTuple):
    """Counts of one step. `tokens` are those that take time; `chunks` counts the parts of prompts."""

    decode: int
    tokens: int
    chunks: int
    waiting: int
    running: int
    preempted: int


class Program(Protocol):
    """A scheduler that literature/cases.py can drive."""

    def add(self, number: int, arrival: Arrival, now_ms: float) -> None:
        """Let request `number` wait from `now_ms` on."""

    def schedule(self, now_ms: float) -> Planned:
        """Plan a step."""

    def complete(self, now_ms: float) -> None:
        """End the step that was planned last."""


@dataclass(slots=True)
class _Sequence:
    key: tuple[float, ...]  # class, arrival
    number: int
    arrival: Arrival
    arrived_ms: float
    length: int  # outputs after which it ends
    to_prefill: int  # tokens
    prefilled: int = 0
    outputs: int = 0
    last_output_ms: float = 0.0

    def __lt__(self, other: _Sequence) -> bool:
        return self.key < other.key

    @property
    def rest(self) -> int:
        """Return the number of tokens that are still to be prefilled; 0 while it decodes."""
        return max(self.to_prefill - self.prefilled, 0)

    @property
    def ended(self) -> bool:
        return self.outputs >= self.length

    def tbt_slack_ms(self, now_ms: float) -> float:
        return self.arrival.tbt_ms - (now_ms - self.last_output_ms) if self.outputs else math.inf

    def ttft_slack_ms(self, now_ms: float) -> float:
        return self.arrival.ttft_ms - (now_ms - self.arrived_ms)


@dataclass(slots=True)
class Article:
    """The article's scheduler under `rules`."""

    settings: Settings
    rules: Rules = EXACT
    sampled: list[int] = field(default_factory=list)  # requests that got an output in the step that ended last
    _waiting: list[_Sequence] = field(default_factory=list)  # a heap
    _running: list[_Sequence] = field(default_factory=list)  # in order of admission
    _free: int = 0  # blocks
    _decodes: list[_Sequence] = field(default_factory=list)  # of the step that was planned last
    _chunks: list[tuple[_Sequence, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = self.settings.blocks

    def add(self, number: int, arrival: Arrival, now_ms: float, length: int | None = None) -> None:
        """length: outputs after which the model stops by itself; None: it goes on to `max_new`."""
        key = (arrival.priority, now_ms, number) if self.settings.fifo else (arrival.priority,)
        length = arrival.max_new if length is None else length
        heapq.heappush(self._waiting, _Sequence(key, number, arrival, now_ms, length, arrival.prompt))

    def schedule(self, now_ms: float) -> Planned:
        for ended in [sequence for sequence in self._running if sequence.ended]:
            self._release(ended)
        preempted = self._preempt(now_ms)
        decoding = sum(not sequence.rest for sequence in self._running)
        budget = self.settings.batch_tokens - decoding
        self._admit(budget - sum(length for _, length in self._share(budget, now_ms)))
        self._chunks = self._share(budget, now_ms)
        self._decodes = [sequence for sequence in self._running if not sequence.rest]
        tokens = decoding + sum(length for _, length in self._chunks)
        counts = len(self._waiting), len(self._running), preempted
        return Planned(len(self._decodes), tokens, len(self._chunks), *counts)

    @property
    def free_blocks(self) -> int:
        return self._free

    def contexts(self) -> tuple[int, float]:
        """Return what the planned step reads of the KV: the sum of the decodes' contexts, and the prompts' pairs."""
        decodes = sum(sequence.arrival.prompt + max(sequence.outputs - 1, 0) for sequence in self._decodes)
        pairs = sum(length * (sequence.prefilled + (length + 1) / 2) for sequence, length in self._chunks)
        return decodes, pairs

    def complete(self, now_ms: float) -> None:
        sampled = self._decodes
        for sequence, length in self._chunks:
            sequence.prefilled += length
            if self.rules.samples and not sequence.rest:
                sampled.append(sequence)
        for sequence in sampled:
            sequence.outputs += 1
            sequence.last_output_ms = now_ms
        self.sampled = [sequence.number for sequence in sampled]

    def _release(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._free += sequence.arrival.blocks

    def _preempt(self, now_ms: float) -> int:
        """Preempt for TBT limits at risk; return the number of victims."""
        urgent = [sequence for sequence in self._running if sequence.arrival.priority <= HIGH]
        slack = min((sequence.tbt_slack_ms(now_ms) for sequence in urgent), default=math.inf)
        if slack >= AT_RISK_MS:
            return 0
        others = [sequence for sequence in self._running if sequence.arrival.priority >= NORMAL]
        others.sort(key=lambda sequence: (-sequence.arrival.priority, sequence.outputs))
        for victim in others:  # all of them: slack <= AT_RISK_MS < SAFE_MS, and nothing that happens here adds to it
            self._release(victim)
            victim.prefilled = 0
            if self.rules.rebuilds:
                victim.to_prefill = victim.arrival.prompt + victim.outputs
            heapq.heappush(self._waiting, victim)
        return len(others)

    def _admit(self, budget: int) -> None:
        """Admit waiting sequences in order, as far as budget, slots and blocks go."""
        while self._waiting and budget > 0 and len(self._running) < self.settings.batch_requests:
            head = self._waiting[0]
            if head.arrival.blocks > self._free:
                return
            self._running.append(heapq.heappop(self._waiting))
            self._free -= head.arrival.blocks
            budget -= min(self.settings.chunk, head.rest, budget)

    def _share(self, budget: int, now_ms: float) -> list[tuple[_Sequence, int]]:
        """Return the prompts that get a part of `budget`, by class and TTFT slack, and the lengths of their chunks."""
        prompts = [sequence for sequence in self._running if sequence.rest]
        prompts.sort(key=lambda sequence: (sequence.arrival.priority, sequence.ttft_slack_ms(now_ms)))
        chunks: list[tuple[_Sequence, int]] = []
        for sequence in prompts:
            if budget <= 0:
                break
            length = min(self.settings.chunk, sequence.rest, budget)
            if length >= MULTIPLE:
                length -= length % MULTIPLE
            chunks.append((sequence, length))
            budget -= length
        return chunks
