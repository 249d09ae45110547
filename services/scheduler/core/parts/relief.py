"""No memory for the next token, or a limit at risk: who yields, and how?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.policy import How, Slo
from services.scheduler.core.table import SlotTable
from services.scheduler.core.types import Int32

if TYPE_CHECKING:
    from services.scheduler.core.replica import Replica

Way = Callable[["Replica", int], How]
SLO = Slo(risk_ns=15_000_000, safe_ns=30_000_000)  # services/simulator/literature/reference_scheduler.py


def recompute(replica: Replica, slot: int) -> How:
    """Its KV is given up and computed again."""
    return How.RECOMPUTE


def swap(replica: Replica, slot: int) -> How:
    """Its KV goes to the host tier, as long as there is room."""
    return How.SWAP


def groups(replica: Replica, slot: int) -> How:
    """A sequence of a request with several is swapped, a single one computed again (https://github.com/vllm-project/vllm/blob/v0.6.0/vllm/core/scheduler.py).

    There beams shared blocks that recomputing would have lost."""
    request = replica.table.request[slot]
    return How.SWAP if len(request.prompts) * request.n > 1 else How.RECOMPUTE


def cheaper(replica: Replica, slot: int) -> How:
    """Swapped if both copies are predicted to take less time than computing the tokens again; recomputed while nothing
    was measured."""
    tokens = int(replica.table.planned[slot])
    copies_ns = 2 * replica.swap_ns_per_block * int(replica.table.held[slot])
    again_ns = replica.model.predict(tokens, 0, tokens * (tokens + 1) / 2) - replica.model.predict(0)
    return How.SWAP if copies_ns < again_ns else How.RECOMPUTE


class Yielding:
    """What the choices of a victim have in common: his way out, and when anybody has to yield at all.

    stalls: who lacks his next block sits out with what he has, and one yields only when nobody can run (ft-aimd).
    takes: a waiting sequence of class <= high may take slot and blocks from running ones of lower classes.
    """

    def __init__(
        self, how: Way = recompute, *, stalls: bool = False, takes: bool = False, slo: Slo | None = None
    ) -> None:
        self.how = how
        self.stalls, self.takes, self.slo = stalls, takes, slo


class Newest(Yielding):
    """The one that arrived last (vLLM, Sarathi)."""

    def victim(self, table: SlotTable, slots: Int32) -> int:
        return int(slots[np.lexsort((table.number[slots], table.arrived[slots]))[-1]])


class LastStarted(Yielding):
    """The one that entered last (TensorRT-LLM's MAX_UTILIZATION)."""

    def victim(self, table: SlotTable, slots: Int32) -> int:
        return int(slots[np.lexsort((table.number[slots], table.since[slots]))[-1]])


class LeastLost(Yielding):
    """Of the lowest class the one with the fewest tokens to compute again; of equals the newest."""

    def victim(self, table: SlotTable, slots: Int32) -> int:
        keys = (-table.number[slots], table.planned[slots], -table.priority[slots])
        return int(slots[np.lexsort(keys)[0]])


class LeastOutput(Yielding):
    """The one with the fewest outputs, of equals that with the longest prompt, then the newest (SGLang)."""

    def victim(self, table: SlotTable, slots: Int32) -> int:
        outputs = table.applied[slots] - table.prompt[slots]
        return int(slots[np.lexsort((-table.number[slots], -table.prompt[slots], outputs))[0]])
