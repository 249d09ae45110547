"""No memory for the next token: who yields? All yield by recompute; swap comes with the host tier."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.table import SlotTable
from services.scheduler.core.types import Int32


class Newest:
    """The one that arrived last (vLLM, Sarathi)."""

    def victim(self, table: SlotTable, slots: Int32) -> int:
        return int(slots[np.lexsort((table.number[slots], table.arrived[slots]))[-1]])


class LeastLost:
    """Of the lowest class the one whose loss is least: the fewest tokens to compute again; of equals the newest."""

    def victim(self, table: SlotTable, slots: Int32) -> int:
        keys = (-table.number[slots], table.planned[slots], -table.priority[slots])
        return int(slots[np.lexsort(keys)[0]])
