"""The parts of the preset `iteration-level`: the rules of one article's scheduler, class IterationLevelScheduler.

docs/policies.md says what equals the article's program and what is corrected. The simulator has that program itself,
services/simulator/policies/article.py, and compares the two in every step.
"""

from __future__ import annotations

import numpy as np

from services.scheduler.core.policy.base import Batching, Candidates, Pace, Policy, ReplicaView
from services.scheduler.core.policy.budget import Fixed, at_most
from services.scheduler.core.policy.memory import Reserve, known_blocks
from services.scheduler.core.policy.order import TTFT_NS, ClassThenArrival
from services.scheduler.core.policy.preemption import SLO, LeastLost, recompute
from services.scheduler.core.table import Int64, SlotTable
from services.scheduler.core.types import Rows

MULTIPLE = 64  # of a chunk, from this length on


class ClassThenTtft(ClassThenArrival):
    """Waiting sequences by class, then arrival, without ageing; running ones by class, then TTFT limit."""

    def __init__(self) -> None:
        super().__init__(age_ns=0)

    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        ttft = table.ttft_slo_ns[rows]
        due = table.arrival_ns[rows] + np.where(ttft > 0, ttft, TTFT_NS)
        return rows[np.lexsort((table.number[rows], table.generation[rows], due, table.priority[rows]))]


class ReserveAll(Reserve):
    """Reserve the blocks of prompt + max_tokens at admission, also for the last, though its KV is never computed."""

    def admit(self, replica: ReplicaView, candidates: Candidates, pace: Pace) -> Int64:
        return np.minimum(known_blocks(replica, candidates.limit + 1), replica.pool.total)


class BesideDecodes(Fixed):
    """A fixed budget that decodes count against, but that does not bound them."""

    def max_tokens(self, replica: ReplicaView, step_tokens: int) -> int:
        return at_most(replica, max(super().max_tokens(replica, step_tokens), replica.limits.slots))


class Pooled(Batching):
    """One chunk for each prompt, at most `most` tokens, dealt out to running and entering prompts in one order.

    Sequences enter while the running prompts' chunks leave tokens of the budget. An entering sequence may get no chunk
    in its first step. One that was preempted may enter again in the same step.
    """

    pooled = True

    def __init__(self, most: int, slots: int) -> None:
        """most: largest chunk. slots: most sequences that run."""
        self._max_chunk, self._slots = most, slots

    def max_running(self, limit: int) -> int:
        return min(limit, self._slots)

    def max_step_seqs(self, sequences: int, max_running: int, microbatches: int) -> int:
        return max(-(-min(sequences, max_running) // microbatches), 1)

    def entry_tokens(self, rest: Int64, left: int) -> Int64:
        """Return [k] tokens that the first k of [n] prompts count when they enter: their chunks before rounding."""
        wanted = np.minimum(rest, self._max_chunk)
        before = np.cumsum(wanted) - wanted
        count = int(np.count_nonzero(before < left))
        counted: Int64 = np.minimum(wanted[:count], left - before[:count])
        return counted

    def chunks(self, rest: Int64, before: Int64, left: int, first: bool, alone: bool = False) -> Int64:
        """Return min(largest chunk, rest, tokens left) of each prompt, from 64 on rounded down to a multiple of 64."""
        lengths: list[int] = []
        for length in np.minimum(rest, self._max_chunk).tolist():
            if left <= 0:
                break
            chunk = min(length, left)
            if chunk >= MULTIPLE:
                chunk -= chunk % MULTIPLE
            lengths.append(chunk)
            left -= chunk
        return np.array(lengths, np.int64)


class AllYield(LeastLost):
    """While a running sequence of class <= high is at risk of missing its TBT limit, all of lower classes yield.

    At risk: less than `slo.risk_ns` of the limit is left since its last token; no step is predicted.
    """

    all_yield = True


def iteration_level(batch_tokens: int = 2048, batch_requests: int = 128, chunk: int = 256) -> Policy:
    """Return the preset `iteration-level`, with the figures of the article's example unless others are given."""
    batch = Pooled(chunk, batch_requests)
    relief = AllYield(recompute, slo=SLO)
    return Policy("iteration-level", ClassThenTtft(), ReserveAll(), BesideDecodes(batch_tokens), batch, relief)
