"""Which sequence is preempted when memory is short or a latency limit is at risk, and how its KV is kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.scheduler.core.policy.base import Mode, Preemption, ReplicaView, Slo
from services.scheduler.core.table import SlotTable
from services.scheduler.core.types import Rows

Way = Callable[[ReplicaView, int], Mode]
SLO = Slo(risk_ns=15_000_000, safe_ns=30_000_000)  # services/simulator/policies/article.py


def recompute(replica: ReplicaView, row: int) -> Mode:
    """Return RECOMPUTE: the KV is dropped and computed again."""
    return Mode.RECOMPUTE


def swap(replica: ReplicaView, row: int) -> Mode:
    """Return SWAP: the KV is copied to the host tier while there is room."""
    return Mode.SWAP


def groups(replica: ReplicaView, row: int) -> Mode:
    """Return SWAP for a sequence of a request with several sequences, else RECOMPUTE.

    As in vLLM v0, where beams shared blocks that recomputing would have lost:
    https://github.com/vllm-project/vllm/blob/v0.6.0/vllm/core/scheduler.py
    """
    request = replica.table.request[row]
    return Mode.SWAP if len(request.prompts) * request.n > 1 else Mode.RECOMPUTE


def cheaper(replica: ReplicaView, row: int) -> Mode:
    """Return SWAP if copying the KV out and in is predicted to take less time than computing it again.

    Return RECOMPUTE while no step was measured.
    """
    tokens = int(replica.table.planned_tokens[row])
    copies_ns = 2 * replica.swap_ns_per_block * int(replica.table.held_blocks[row])
    again_ns = replica.model.predict(tokens, 0, tokens * (tokens + 1) / 2) - replica.model.predict(0)
    return Mode.SWAP if copies_ns < again_ns else Mode.RECOMPUTE


class Preempting(Preemption):
    """Base of the preemption policies: how a victim is preempted, and in which cases. Subclasses choose the victim.

    mode: how the KV of a victim is kept. stalls: a row without its next block sits the step out and keeps its blocks; a
    victim is preempted only when no row can run (ft-aimd). takes: a waiting sequence of class <= high may take slot and
    blocks from rows of lower classes. slo: preempt for TBT limits; None means never.
    """

    def __init__(
        self, mode: Way = recompute, *, stalls: bool = False, takes: bool = False, slo: Slo | None = None
    ) -> None:
        self._mode = mode
        self.stalls, self.takes, self.slo = stalls, takes, slo

    def mode(self, replica: ReplicaView, row: int) -> Mode:
        return self._mode(replica, row)


class Newest(Preempting):
    """The sequence that arrived last (vLLM, Sarathi)."""

    def choose(self, table: SlotTable, rows: Rows) -> int:
        return int(rows[np.lexsort((table.number[rows], table.arrival_ns[rows]))[-1]])


class LastStarted(Preempting):
    """The sequence that entered last (TensorRT-LLM's MAX_UTILIZATION)."""

    def choose(self, table: SlotTable, rows: Rows) -> int:
        return int(rows[np.lexsort((table.number[rows], table.generation[rows]))[-1]])


class LeastLost(Preempting):
    """In the lowest class the sequence with the fewest tokens to compute again; among equals the newest."""

    def choose(self, table: SlotTable, rows: Rows) -> int:
        keys = (-table.number[rows], table.planned_tokens[rows], -table.priority[rows])
        return int(rows[np.lexsort(keys)[0]])


class LeastOutput(Preempting):
    """The sequence with the fewest outputs; among equals the one with the longest prompt, then the newest (SGLang)."""

    def choose(self, table: SlotTable, rows: Rows) -> int:
        outputs = table.applied_tokens[rows] - table.prompt[rows]
        return int(rows[np.lexsort((-table.number[rows], -table.prompt[rows], outputs))[0]])
