"""Orders: which waiting sequence is next (a queue), and which running sequences come first (columns).

An order of the running sequences matters when a step has no room for all of them.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from services.scheduler.core.policy.base import Order, Queue
from services.scheduler.core.policy.fairness import SPARE, ByShare, Spare
from services.scheduler.core.policy.queues import (
    ByClass,
    ByPrefix,
    ByRatio,
    BySlack,
    Keyed,
    SwappedFirst,
    by_arrival,
)
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.table import Bool, Int64, SlotTable
from services.scheduler.core.types import CLASS_COUNT, Int32, NewRequest, Priority, Rows

AGE_NS = 10_000_000_000  # each such time of waiting lifts a sequence by one class
TTFT_NS = 2_000_000_000  # TTFT limit of a request that gives none
TBT_NS = 100_000_000  # TBT limit of a request that gives none
WEIGHT = 4  # a prompt's key is later by so many times its predicted prefill; the best of 0, 1 and 4 on both traces
USED = 0.85  # share of a TTFT limit that is planned with; under overload the rest absorbs forecast errors
LATE_SIZES = 64  # by class, sizes that are kept of sequences that became late
SHORTER = 4  # a prompt shorter than three of four of those is expected to be in time
EVER = 1 << 62
TOKEN_NS = 50_000  # predicted prefill time of a token: 20,000 tokens a second


class FirstCome(Order):
    """In order of arrival, whatever the class (Orca, Algorithm 1; Sarathi).

    With `swapped_first` swapped sequences go before all other waiting ones (vLLM).
    """

    def __init__(self, swapped_first: bool = False) -> None:
        self._swapped_first = swapped_first

    def queue(self) -> Queue:
        return SwappedFirst(by_arrival()) if self._swapped_first else by_arrival()

    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        return rows[np.lexsort((table.number[rows], table.arrival_ns[rows]))]


class ClassThenArrival(Order):
    """By class, then arrival; each `age_ns` waited lifts a sequence by one class, so that `low` never starves.

    With age_ns = 0 no sequence is lifted.
    """

    by_class = True

    def __init__(self, age_ns: int = AGE_NS) -> None:
        self.age_ns = age_ns

    def queue(self) -> Queue:
        return ByClass([by_arrival() for _ in range(CLASS_COUNT)], self.age_ns)

    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        lifted = _lifted_classes(table, rows, now_ns, self.age_ns)
        return rows[np.lexsort((table.number[rows], table.arrival_ns[rows], lifted))]


class ClassThenSlack(Order):
    """By class with ageing, then by TTFT limit plus a multiple of the predicted prefill; running decodes by TBT limit.

    The multiple (WEIGHT) lets short prompts pass long ones with a slightly earlier limit. A sequence that can no
    longer meet its TTFT limit waits for those that can (BySlack). Inside a class, a tenant that was served more than
    the other waiting tenants waits for them (ByShare).
    """

    by_class = True

    def __init__(self, age_ns: int = AGE_NS, ttft_ns: int = TTFT_NS, token_ns: int = TOKEN_NS) -> None:
        self.age_ns, self._ttft_ns, self._token_ns = age_ns, ttft_ns, token_ns
        self._shares: list[ByShare] = []  # by class
        self._late_sizes: list[deque[int]] = []  # by class, tokens of the sequences that became late last
        self._late_ns = [-EVER] * CLASS_COUNT  # by class, when the last one did
        self._spares = Spare(), Spare()  # for the classes before Priority.NORMAL, and for the rest

    @property
    def counts_tokens(self) -> bool:
        return any(share.several for share in self._shares)

    def queue(self) -> Queue:
        urgent, others = self._spares = Spare(), Spare()
        spares = [urgent if priority < Priority.NORMAL else others for priority in range(CLASS_COUNT)]
        self._late_sizes = [deque(maxlen=LATE_SIZES) for _ in range(CLASS_COUNT)]
        self._late_ns = [-EVER] * CLASS_COUNT
        self._shares = [
            ByShare(lambda: BySlack(self._start_by, self._key, became_late=self._became_late), spare)
            for spare in spares
        ]
        return ByClass(self._shares, self.age_ns)

    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        lifted = _lifted_classes(table, rows, now_ns, self.age_ns)
        start_by = _due(table, rows, self._ttft_ns, TBT_NS, self._token_ns)
        key = _due(table, rows, self._ttft_ns, TBT_NS, -WEIGHT * self._token_ns)
        late = (start_by < now_ns) & (table.applied_tokens[rows] <= table.prompt[rows])
        return rows[np.lexsort((table.number[rows], np.where(late, table.arrival_ns[rows], key), late, lifted))]

    def find_overtaken(self, table: SlotTable, rows: Rows, head: Sequence, now_ns: int) -> Bool:
        """A short prompt in time passes the rest of a long one of its class, by the key that orders both, and one of a
        better class that of class low.

        It does not pass one that ageing has lifted: so no stream of short prompts holds a long one up for longer.
        """
        priority, lifted = table.priority[rows], _lifted_classes(table, rows, now_ns, self.age_ns)
        passed: Bool = (lifted == Priority.LOW) & (head.priority < Priority.LOW)
        if self._start_by(head) >= now_ns:
            key = _due(table, rows, self._ttft_ns, TBT_NS, -WEIGHT * self._token_ns)
            passed |= (priority == head.priority) & (lifted == head.priority) & (key > self._key(head))
        return passed

    def count_served(self, tenants: Int32, classes: Int32, tokens: Int32) -> None:
        for priority, share in enumerate(self._shares):
            if share.several:
                mine = classes == priority
                share.count_served(tenants[mine], tokens[mine])

    def keep_slots(self, table: SlotTable, max_running: int, waiting: int) -> None:
        urgent, others = self._spares
        left = max_running - table.count - max_running // SPARE
        if waiting <= left or not self.counts_tokens:
            urgent.open()
            others.open()
            return
        active = table.active[: table.high]
        held = np.bincount(table.tenant[: table.high][active], minlength=max(s.waits.size for s in self._shares))
        present = held > 0
        for share in self._shares:
            present[: share.waits.size] |= share.waits
        tenants = max(int(np.count_nonzero(present)), 2)
        others.count(held, tenants, max_running, left)
        if (table.priority[: table.high][active] < Priority.NORMAL).all():
            urgent.count(held, tenants, max_running, left)
        else:
            urgent.open()  # they may take slots of lower classes

    def in_time_ns(self, request: NewRequest, tokens: int, now_ns: int) -> int:
        """Short prompts pass long ones: under overload a prompt as long as those that became late becomes late too."""
        within_ns = prefill_within(request, tokens, self._ttft_ns, self._token_ns)
        late = self._late_sizes[request.priority]
        if now_ns - self._late_ns[request.priority] < self._ttft_ns and tokens >= sorted(late)[len(late) // SHORTER]:
            return 0
        return within_ns

    def _became_late(self, sequence: Sequence, now_ns: int) -> None:
        self._late_sizes[sequence.priority].append(sequence.known_tokens)
        self._late_ns[sequence.priority] = now_ns

    def _start_by(self, sequence: Sequence) -> int:
        return start_by(sequence, self._ttft_ns, self._token_ns)

    def _key(self, sequence: Sequence) -> int:
        return start_by(sequence, self._ttft_ns, -WEIGHT * self._token_ns)


class LeastSlack(Order):
    """Highest 1 / max(deadline - estimated finish, 1) first, whatever the class; late ones are equal and go by arrival.

    The deadline of a waiting sequence is its TTFT limit. See docs/policies.md#parts-by-name.
    """

    def __init__(self, ttft_ns: int = TTFT_NS, token_ns: int = TOKEN_NS) -> None:
        self._ttft_ns, self._token_ns = ttft_ns, token_ns

    def queue(self) -> Queue:
        def slack(sequence: Sequence) -> int:
            return start_by(sequence, self._ttft_ns, self._token_ns)

        return BySlack(slack, slack, late_first=True)

    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        slack = np.maximum(_due(table, rows, self._ttft_ns, TBT_NS, self._token_ns) - now_ns, 1)
        return rows[np.lexsort((table.number[rows], table.arrival_ns[rows], slack))]


class LongestPrefix(FirstCome):
    """Most cached tokens first while at most 128 sequences wait, else by arrival (SGLang).

    Running sequences go by arrival.
    """

    prefixes = True

    def queue(self) -> Queue:
        return ByPrefix()


class ShortestPrompt(Order):
    """Fewest tokens to compute first; long prompts may starve."""

    def queue(self) -> Queue:
        return Keyed(lambda sequence: sequence.known_tokens)

    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        rest = table.known_tokens[rows] - table.planned_tokens[rows]
        return rows[np.lexsort((table.number[rows], table.arrival_ns[rows], rest))]


class ResponseRatio(Order):
    """Highest (waited + work) / work first: short prompts first, until a long one has waited long enough (HRRN)."""

    def __init__(self, token_ns: int = TOKEN_NS) -> None:
        self._token_ns = token_ns

    def queue(self) -> Queue:
        return ByRatio(self._token_ns)

    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        work = table.known_tokens[rows].astype(np.float64) * self._token_ns
        ratio = (now_ns - table.arrival_ns[rows] + work) / work
        return rows[np.lexsort((table.number[rows], table.arrival_ns[rows], -ratio))]


def start_by(sequence: Sequence, ttft_ns: int, token_ns: int) -> int:
    """Return the moment (ns) at which the prefill of a waiting sequence has to begin to meet its TTFT limit.

    ttft_ns: limit of a request that gives none. token_ns: predicted prefill time of a token.
    """
    record = sequence.record
    return record.arrived_ns + prefill_within(record.request, sequence.known_tokens, ttft_ns, token_ns)


def prefill_within(request: NewRequest, tokens: int, ttft_ns: int, token_ns: int) -> int:
    """Return the ns from a request's arrival to the moment of start_by(). A share of 1 - USED of the limit is left
    unused."""
    return int((request.ttft_slo_ns or ttft_ns) * USED) - tokens * token_ns


def _lifted_classes(table: SlotTable, rows: Rows, now_ns: int, age_ns: int) -> Int64:
    """Return [n] classes of running rows, each lifted by one for each `age_ns` since arrival; 0 lifts none."""
    priority = table.priority[rows].astype(np.int64)
    if not age_ns:
        return priority
    lifted: Int64 = priority - np.maximum(now_ns - table.arrival_ns[rows], 0) // age_ns
    return np.maximum(lifted, 0)


def _due(table: SlotTable, rows: Rows, ttft_ns: int, tbt_ns: int, token_ns: int) -> Int64:
    """Return [n] moments (ns) at which the next computation has to begin to meet a limit.

    For a row without an output the limit is TTFT, less the predicted prefill of what is left; else it is TBT.
    """
    ttft, tbt = table.ttft_slo_ns[rows], table.tbt_slo_ns[rows]
    first = table.arrival_ns[rows] + (np.where(ttft > 0, ttft, ttft_ns) * USED).astype(np.int64)
    first -= (table.known_tokens[rows] - table.planned_tokens[rows]).astype(np.int64) * token_ns
    following = table.last_token_ns[rows] + np.where(tbt > 0, tbt, tbt_ns)
    return np.where(table.applied_tokens[rows] > table.prompt[rows], following, first)
