"""Who is next? Order of the waiting and of the running where not all of them can be served."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.sequence import Sequence
from services.scheduler.core.table import SlotTable
from services.scheduler.core.types import Int32


class FirstCome:
    """By arrival, whatever the class (Orca, Algorithm 1; Sarathi; vLLM's default)."""

    def place(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.record.arrived_ns, sequence.number)

    def rank(self, sequence: Sequence, now_ns: int) -> tuple[float, ...]:
        return (sequence.record.arrived_ns, sequence.number)

    def sort(self, table: SlotTable, slots: Int32, now_ns: int) -> Int32:
        return slots[np.lexsort((table.number[slots], table.arrived[slots]))]


class ClassThenArrival:
    """By class, then arrival; each `age_ns` waited lifts a sequence by one class, so that `low` never starves.

    Inside a class the order by arrival is the order by age, so only the heads of the four classes are compared.
    """

    def __init__(self, age_ns: int = 10_000_000_000) -> None:
        self._age_ns = age_ns

    def place(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.record.arrived_ns, sequence.number)

    def rank(self, sequence: Sequence, now_ns: int) -> tuple[float, ...]:
        record = sequence.record
        lifted = max(now_ns - record.arrived_ns, 0) // self._age_ns
        return (max(sequence.priority - lifted, 0), record.arrived_ns, sequence.number)

    def sort(self, table: SlotTable, slots: Int32, now_ns: int) -> Int32:
        arrived = table.arrived[slots]
        lifted = np.maximum(now_ns - arrived, 0) // self._age_ns
        rank = np.maximum(table.priority[slots] - lifted, 0)
        return slots[np.lexsort((table.number[slots], arrived, rank))]
