"""Parts and presets that only the simulator knows: rules of the literature that the service does not offer.

Each follows its source word by word where the service's own part simplifies it, or would harm a real server. engine.py
reads names of policies with `parse`. docs/policies.md says of each how exact it is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from services.scheduler.core.policy import presets
from services.scheduler.core.policy.base import Batching, Budget, Candidates, Pace, Policy, Queue, ReplicaView
from services.scheduler.core.policy.batching import Static, WholePrefill, whole_lengths
from services.scheduler.core.policy.budget import ALIGN, TBT_NS, Unlimited, at_most
from services.scheduler.core.policy.memory import (
    Peak,
    PeakEstimate,
    Reserve,
    ahead,
    free_to_yield,
    of_candidates,
    roomy,
    set_aside,
    spared_blocks,
)
from services.scheduler.core.policy.order import FirstCome
from services.scheduler.core.policy.preemption import Newest, recompute, swap
from services.scheduler.core.policy.queues import Keyed
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.table import Int64, SlotTable
from services.scheduler.core.types import Rows
from services.simulator.policies.deadlines import deadline
from services.simulator.policies.replica import RULES

MS_NS = 1_000_000
GROUPED = 256  # sequences that are sorted by length together
LONGEST = 1 << 40  # more than any length; keeps the groups apart in one key
FIRST_TOKENS = 256  # prompt tokens beside decodes before a step was measured
ALPHA = 0.1
MARGIN_SHARE = 100  # one block in so many of the pool is kept free
RAISE, CUT, CROWD = 100, 1_000, 0.9  # tokens, tokens, share of the pool


class ExactAimd(PeakEstimate):
    """The peak estimate under a limit in tokens: +100 at each step at which running sequences and the next waiting one
    need more and less than 90 % of the pool is used, -1000 at each step that preempts, however many sequences.

    Both may happen at one step. The limit starts at the capacity and has no floor: where it is too low a sequence
    enters when nothing runs. Source: FasterTransformer with continuous batching.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit: int | None = None  # tokens; None before the first admission
        self._next: tuple[Candidates, Pace] | None = None  # the first that did not enter
        self._need = Peak()

    def admit(self, replica: ReplicaView, candidates: Candidates, pace: Pace) -> Int64:
        limit = self._limit(replica)
        blocks = self.within(replica, candidates, pace, limit // replica.limits.block_size)
        refused = slice(blocks.size, blocks.size + 1)
        columns = (getattr(candidates, column.name)[refused] for column in dataclasses.fields(Candidates))
        self._next = (Candidates(*columns), pace) if blocks.size < candidates.known_tokens.size else None
        return blocks

    def on_step(self, replica: ReplicaView, preempted: int) -> None:
        limit = self._limit(replica)
        if self._next is not None and roomy(replica, CROWD) and self._exceeds(replica, *self._next):
            limit += RAISE
        self.limit = limit - CUT * bool(preempted)

    def for_replica(self) -> ExactAimd:
        return ExactAimd()

    def _limit(self, replica: ReplicaView) -> int:
        return replica.pool.total * replica.limits.block_size if self.limit is None else self.limit

    def _exceeds(self, replica: ReplicaView, candidate: Candidates, pace: Pace) -> bool:
        """Return whether the peak of the running sequences and `candidate` exceeds the limit."""
        table, size = replica.table, replica.limits.block_size
        rows = free_to_yield(table)
        known = table.known_tokens[rows].astype(np.int64)
        held, steps = ahead(known, known - table.planned_tokens[rows], table.limit[rows].astype(np.int64) - 1, pace)
        self._need.set_running(held, steps, size, spared_blocks(replica))
        new_held, new_steps = of_candidates(candidate, np.maximum(candidate.limit, candidate.known_tokens), pace)
        room = self._limit(replica) // size - set_aside(table)
        return not self._need.count_fitting(new_held, new_steps, candidate.shared_blocks, room)


class TokenBudget(Budget):
    """As many tokens as the mean time per token allows under a fixed TBT limit (N ms, or 100), the prompts' part
    rounded down to a multiple of 64; 256 for prompts before a step was measured.

    The mean starts at 0, so it is too low at first.

    One addition: a step that decodes nothing has 64 tokens for prompts, or a few short steps, with a long time for each
    of their tokens, would end admission for ever. `ema` starts at the first measured time instead, and takes limits of
    requests into account. Source: class TokenBudgetScheduler of an article about iteration-level scheduling.
    """

    def __init__(self, tbt_ns: int = TBT_NS) -> None:
        self._tbt_ns = tbt_ns
        self._seen = 0  # steps measured when `_first` was read
        self._first = 0.0  # what the mean of the replica started at

    def max_tokens(self, replica: ReplicaView, step_tokens: int) -> int:
        if not self._seen and replica.model.observations:
            self._seen, self._first = replica.model.observations, replica.token_time.token_ns
        return at_most(replica, step_tokens)

    def budget(
        self, replica: ReplicaView, decodes: Rows, now_ns: int, step_tokens: int, depth: int = 0, waiting: int = 0,
        waiting_tokens: int = 0,
    ) -> int:  # fmt: skip
        most, count = at_most(replica, step_tokens), decodes.size
        mean_ns = self.mean_ns(replica)
        if mean_ns <= 0:
            prompts = FIRST_TOKENS
        else:
            prompts = max((min(int(self._tbt_ns / mean_ns), most) - count) // ALIGN * ALIGN, 0)
        return min(count + max(prompts, 0 if count else ALIGN), most)

    def mean_ns(self, replica: ReplicaView) -> float:
        """Return the mean time per token that started at 0: the replica's less the rest of its first value."""
        if not self._seen:
            return 0.0
        return float(replica.token_time.token_ns - (1 - ALPHA) ** replica.model.observations * self._first)

    def for_replica(self) -> TokenBudget:
        return TokenBudget(self._tbt_ns)


class ByCapacity(Batching):
    """Whole prompts, and decisions only where a request arrives or ends: one that arrives enters if there is room, else
    it waits; one that ends lets one of the waiting enter.

    A request that arrives while others wait goes behind them. Source: the request-level scheduler of an article about
    iteration-level scheduling.
    """

    def __init__(self) -> None:
        self._running: dict[int, int] = {}  # replica -> sequences after the last decision
        self._left: dict[int, int] = {}  # replica -> sequences that still waited then
        self._ends: dict[int, int] = {}  # replica -> ends that let none enter so far

    def max_new_seqs(self, replica: ReplicaView, waiting: int, max_running: int, oldest_ns: int, now_ns: int) -> int:
        number, count = replica.number, replica.table.count
        ended = max(self._running.get(number, 0) - count, 0)
        self._ends[number] = self._ends.get(number, 0) + ended if self._left.get(number, 0) else 0
        entering = self._ends[number] if self._left.get(number, 0) else waiting
        self._running[number], self._left[number] = count, waiting
        return min(max(entering, 0 if count else 1), waiting)

    def on_enter(self, replica: ReplicaView, sequences: int) -> None:
        number = replica.number
        self._running[number] += sequences
        self._ends[number] = max(self._ends[number] - sequences, 0)
        self._left[number] -= sequences

    def chunks(self, rest: Int64, before: Int64, left: int, first: bool, alone: bool = False) -> Int64:
        return whole_lengths(rest, left, first)


class Margin(Newest):
    """At each step, while fewer than N blocks (1 % of the pool, rounded up) are free: the sequences that arrived last,
    one after the other. Their KV is computed again.

    The last running sequence stays, or one that needs nearly all of the pool would never end. Source: the loop of an
    article about iteration-level scheduling, which names no N.
    """

    early = True

    def __init__(self, blocks: int = 0) -> None:
        super().__init__(recompute)
        self._blocks = blocks

    def early_victims(self, replica: ReplicaView, rows: Rows, head: Sequence | None, now_ns: int) -> list[int]:
        table = replica.table
        victims: list[int] = []
        margin = self._blocks or -(-replica.pool.total // MARGIN_SHARE)
        free = replica.available + replica.pool.draining
        while free < margin and rows.size and len(victims) < table.count - 1:
            victim = self.choose(table, rows)
            free += max(int(table.held_blocks[victim]), int(table.reserved_blocks[victim]))
            rows = rows[rows != victim]
            victims.append(victim)
        return victims


class Returns(Newest):
    """A running sequence without a block for its next token waits before all that have not entered, and keeps its
    blocks. Only where no sequence gets a block one, the last to arrive, is swapped to the host tier.

    The service's `+stalls` swaps also where some of them get a block. Source: FasterTransformer with continuous
    batching.
    """

    returns = True

    def __init__(self) -> None:
        super().__init__(swap, stalls=True)


class Grouped(FirstCome):
    """N sequences (256) that arrive one after the other go by length, so that a padded batch has similar lengths.

    Source: selective batching, as a summary of Orca describes it.
    """

    def __init__(self, together: int = GROUPED) -> None:
        super().__init__()
        self._together = together

    def queue(self) -> Queue:
        return Keyed(self._key)

    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        return rows[np.lexsort((table.number[rows], table.known_tokens[rows], table.number[rows] // self._together))]

    def _key(self, sequence: Sequence) -> int:
        return sequence.number // self._together * LONGEST + sequence.known_tokens


# fmt: off
PRESETS: dict[str, Callable[[], Policy]] = {
    "ft-aimd-exact": lambda: Policy(
        "ft-aimd-exact", FirstCome(), ExactAimd(), Unlimited(), WholePrefill(), Returns()),
    "token-budget": lambda: dataclasses.replace(presets.preset("sarathi"), name="token-budget", tokens=TokenBudget()),
    "request-capacity": lambda: Policy(
        "request-capacity", FirstCome(), Reserve(), Unlimited(), ByCapacity(), Newest()),
    "selective": lambda: Policy("selective", Grouped(), Reserve(), Unlimited(), Static(), Newest()),
    "deadline": deadline,
}
PARTS: dict[tuple[str, str], Callable[..., Any]] = {
    ("order", "grouped"): Grouped, ("memory", "aimd-exact"): ExactAimd,
    ("tokens", "token-budget"): lambda ms=TBT_NS // MS_NS: TokenBudget(ms * MS_NS), ("batch", "capacity"): ByCapacity,
    ("relief", "margin"): Margin, ("relief", "returns"): Returns,
}
# fmt: on
NUMBERED = {"grouped", "token-budget", "margin"}  # may be followed by a number, as in grouped-64


def parse(text: str) -> Policy:
    """Return the policy that `text` names: a preset, of the service or of the simulator, with parts of either replaced.

    Raises ValueError for an unknown word.
    """
    name, colon, rest = text.partition(":")
    words = rest.split(",") if colon else []
    ours = {i: part for i, word in enumerate(words) if (part := _part(text, word)) is not None}
    if name not in PRESETS and not ours:
        try:
            return presets.parse(text)
        except ValueError as error:
            raise ValueError(f"{error}; only simulated: {_names()}") from None
    _refuse_twice(text, words)
    given = [word for i, word in enumerate(words) if i not in ours]
    base = name if name not in PRESETS else "orca"
    policy = presets.parse(f"{base}:{','.join(given)}" if given else base)
    if name in PRESETS:
        replaced = {part: getattr(policy, part) for part in (word.partition("=")[0] for word in given)}
        policy = dataclasses.replace(PRESETS[name](), **replaced)
    return dataclasses.replace(policy, name=text, **dict(ours.values()))


def _part(text: str, word: str) -> tuple[str, Any] | None:
    """Return field and part of a word such as `order=grouped-64`; None where the simulator has none of that name."""
    field, _, choice = word.partition("=")
    name, number = choice, ""
    if (match := re.fullmatch(r"(.+?)-([0-9]+)", choice)) and match[1] in NUMBERED:
        name, number = match[1], match[2]
    if (field, name) not in PARTS:
        return None
    if not number:
        return field, PARTS[field, name]()
    if number[0] == "0" or len(number) > len(str(presets.MAX_NUMBER)) or int(number) > presets.MAX_NUMBER:
        raise ValueError(
            f"policy {text!r}: {field} {name} takes a number of 1 to {presets.MAX_NUMBER}, not {number[:40]}"
        )
    return field, PARTS[field, name](int(number))


def _refuse_twice(text: str, words: list[str]) -> None:
    fields = [word.partition("=")[0] for word in words]
    for field in fields:
        if fields.count(field) > 1:
            raise ValueError(f"policy {text!r} gives {field} twice")


def _names() -> str:
    return ", ".join([*PRESETS, *RULES, *(f"{part}={name}" for part, name in PARTS)])
