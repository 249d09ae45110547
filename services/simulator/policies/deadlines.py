"""Priority by deadline with preemption: 1 / max(deadline - estimated finish, 1), the higher first.

The preset `deadline` of parts.py. Its order and its preemption share one `Forecast`, so they belong together. A
sequence that is about to be late has the highest priority, also one that is too late already: the rule helps no
overloaded server. Source: a summary of Orca with figures (docs/policies.md#the-literature-item-by-item).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from services.scheduler.core.policy.base import Order, Policy, Queue, ReplicaView
from services.scheduler.core.policy.batching import WholePrefill
from services.scheduler.core.policy.budget import Unlimited
from services.scheduler.core.policy.memory import Expected, Lengths
from services.scheduler.core.policy.order import TTFT_NS
from services.scheduler.core.policy.preemption import Newest, swap
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.table import Int64, SlotTable
from services.scheduler.core.types import NewRequest, Rows

PROBE_TOKENS = 512  # prompt tokens by which the time of one is predicted
MEDIAN = 0.5


class Progress(NamedTuple):
    """How far a sequence is, and its deadline in ns."""

    deadline: int
    known: int  # tokens of prompt and outputs
    computed: int  # of these, with KV
    prompt: int
    limit: int  # outputs at most


class Forecast:
    """When sequences finish, by the lengths of finished requests and the predicted steps of the latest replica."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.token_ns = self.step_ns = 0.0  # time of a prompt token, and of a step that decodes what runs

    def measure(self, replica: ReplicaView) -> None:
        """Predict a step of `replica` as it is now."""
        table, model = replica.table, replica.model
        count, context = max(table.count, 1), int(table.planned_tokens[: table.high].sum())
        self.step_ns = model.predict(count, context)
        self.token_ns = (model.predict(count + PROBE_TOKENS, context) - self.step_ns) / PROBE_TOKENS

    def slack(self, sequences: Iterable[Progress], now_ns: int) -> Int64:
        """Return [n] max(deadline - estimated finish, 1) in ns: the less, the higher the priority.

        The finish is now, plus the tokens to compute, plus a step for each output to come. The output length is the
        median of the lengths seen that exceed the outputs so far.
        """
        deadline, known, computed, prompt, limit = np.array(list(sequences), np.int64).reshape(-1, 5).T
        outputs = known - prompt
        to_come = np.maximum(self.lengths.forecast(outputs, limit, np.full(limit.size, MEDIAN)) - outputs, 0)
        work = (known - computed) * self.token_ns + to_come * self.step_ns
        return np.maximum(deadline - now_ns - work.astype(np.int64), 1)

    def of_rows(self, table: SlotTable, rows: Rows, now_ns: int) -> Int64:
        """Return [n] slack() of running `rows`."""
        requests, arrived = table.request[rows].tolist(), table.arrival_ns[rows].tolist()
        columns = [column[rows].tolist() for column in (table.applied_tokens, table.planned_tokens, table.prompt)]
        return self.slack(
            (
                Progress(_deadline(request, since), known, min(computed, known), prompt, request.max_tokens)
                for request, since, known, computed, prompt in zip(requests, arrived, *columns, strict=True)
            ),
            now_ns,
        )

    def of_waiting(self, sequences: Iterable[Sequence], now_ns: int) -> Int64:
        """Return [n] slack() of waiting `sequences`."""
        return self.slack((_progress(sequence) for sequence in sequences), now_ns)


def _deadline(request: NewRequest, arrived_ns: int) -> int:
    """Return the moment (ns) at which a request has to end: its deadline, else its TTFT limit."""
    return request.deadline_ns or arrived_ns + (request.ttft_slo_ns or TTFT_NS)


def _progress(sequence: Sequence) -> Progress:
    request, prompt = sequence.record.request, sequence.prompt.size
    deadline = _deadline(request, sequence.record.arrived_ns)
    return Progress(deadline, sequence.known_tokens, sequence.computed_tokens, prompt, request.max_tokens)


class ByPriority:
    """Waiting sequences by their slack at the moment, the least first; equal ones by arrival."""

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        self._waiting: dict[Sequence, None] = {}
        self._ranked: list[Sequence] = []  # best last
        self._ranked_ns = -1  # when it was sorted; -1 if it has to be sorted again

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._waiting if sequence.state is State.WAITING)

    def push(self, sequence: Sequence, now_ns: int) -> None:
        self._waiting[sequence] = None
        self._ranked_ns = -1

    def head(self, now_ns: int) -> Sequence | None:
        if now_ns != self._ranked_ns:
            waiting = list(self)
            ties = np.array([(s.number, s.record.arrived_ns) for s in waiting], np.int64).reshape(-1, 2).T
            order = np.lexsort((*ties, self._forecast.of_waiting(waiting, now_ns)))
            self._ranked, self._ranked_ns = [waiting[i] for i in order[::-1].tolist()], now_ns
        while self._ranked and not (self._ranked[-1] in self._waiting and self._ranked[-1].state is State.WAITING):
            self._ranked.pop()
        return self._ranked[-1] if self._ranked else None

    def pop(self, sequence: Sequence) -> None:
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence, None)


class ByDeadline(Order):
    """Highest 1 / max(deadline - estimated finish, 1) first, whatever the class."""

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast

    def queue(self) -> Queue:
        return ByPriority(self._forecast)

    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        slack = self._forecast.of_rows(table, rows, now_ns)
        return rows[np.lexsort((table.number[rows], table.arrival_ns[rows], slack))]


class Outranked(Newest):
    """At each step the running sequence with the lowest priority, if the first waiting one has a higher one and was
    refused. Its KV goes to the host tier. None is preempted while copies to the host already free blocks.

    Where a running sequence lacks a block the one that arrived last is preempted.
    """

    early = True

    def __init__(self, forecast: Forecast) -> None:
        super().__init__(swap)
        self._forecast = forecast

    def early_victims(self, replica: ReplicaView, rows: Rows, head: Sequence | None, now_ns: int) -> list[int]:
        self._forecast.measure(replica)
        if head is None or not rows.size or replica.pool.draining:
            return []
        table = replica.table
        slack = self._forecast.of_rows(table, rows, now_ns)
        last = int(np.lexsort((table.number[rows], table.arrival_ns[rows], slack))[-1])
        higher = int(self._forecast.of_waiting([head], now_ns)[0]) < int(slack[last])
        return [int(rows[last])] if higher else []


def deadline() -> Policy:
    """Return the preset `deadline`: whole prompts as in Orca, with the priority of its summary."""
    memory = Expected()
    forecast = Forecast(memory.lengths)
    return Policy("deadline", ByDeadline(forecast), memory, Unlimited(), WholePrefill(), Outranked(forecast))
