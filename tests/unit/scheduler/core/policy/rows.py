"""A replica's columns and sequences that wait without a core, for the tests of a policy's parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from services.scheduler.core.policy.base import Candidates, Queue
from services.scheduler.core.policy.step_time import StepTime, TokenTime
from services.scheduler.core.sequence import Record, Sequence
from services.scheduler.core.table import SlotTable
from services.scheduler.core.types import Int32, Limits, NewRequest, Priority


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class Rows:
    """What parts may read of a replica."""

    def __init__(self, blocks: int = 100, block_size: int = 4, slots: int = 32, step_max: int = 8192) -> None:
        self.number = 0
        self.limits = Limits(slots, blocks, block_size, 4000, step_max)
        self.table = SlotTable(self.limits)
        self.model, self.token_time = StepTime(), TokenTime()
        self.swap_ns_per_block = 1000.0
        self.draining = 0  # blocks that copies to the host tier free
        self.reserved = 0  # blocks, to rows that do not hold them yet

    @property
    def pool(self) -> SimpleNamespace:
        held = int(self.table.held_blocks.sum())
        return SimpleNamespace(total=self.limits.blocks, referenced=held, draining=self.draining)

    @property
    def available(self) -> int:
        return self.limits.blocks - int(self.table.held_blocks.sum()) - self.reserved

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def add(self, **columns: int) -> int:
        """A row that runs; `known_tokens` and `limit` at least. Its known tokens are planned but the last, and held."""
        table = self.table
        slot = table.count
        values = {"planned_tokens": columns["known_tokens"] - 1, "applied_tokens": columns["known_tokens"]}
        values |= {"prompt": columns["known_tokens"], "held_blocks": self.blocks_for(columns["known_tokens"])}
        values |= {"priority": 2, "number": slot} | columns
        for name, value in values.items():
            getattr(table, name)[slot] = value
        table.set_phase(np.array([slot]))
        table.active[slot] = True
        table.count += 1
        table.high = table.count
        table.roster += 1
        table.tbt_rows += int(table.tbt_slo_ns[slot]) > 0
        table.low_rows += values["priority"] == Priority.LOW
        return slot

    def limit_tbt(self, slot: int, limit_ns: int) -> None:
        """Give a row another TBT limit."""
        table = self.table
        table.tbt_slo_ns[slot] = limit_ns
        table.tbt_rows = int(np.count_nonzero(table.tbt_slo_ns))

    @property
    def slots(self) -> Int32:
        return np.arange(self.table.count, dtype=np.int32)


def entrants(*rows: tuple[int, int], cached: int = 0, shared: int = 0, **columns: Any) -> Candidates:
    """Of (known, limit) each, where limit is what is ever held in KV."""
    known, limit = np.array(rows, np.int64).reshape(-1, 2).T
    full = np.zeros_like(known)
    prompt = np.array(columns.get("prompt", known), np.int64)
    return Candidates(known, limit, full + cached, full + shared, prompt)


def waiting(
    number: int, arrived: int = 0, tokens: int = 10, priority: int = 2, ttft: int = 0, tenant: int = 0, outputs: int = 0
) -> Sequence:
    prompt = np.zeros(tokens, np.int32)
    request = NewRequest(f"r{number}", [prompt], 100, priority=priority, ttft_slo_ns=ttft)
    sequence = Sequence(Record(request, 0, tenant, arrived), 0, number, prompt)
    sequence.outputs = np.zeros(outputs, np.int32)
    return sequence


def drained(queue: Queue, now: int) -> list[Sequence]:
    served = []
    while (head := queue.head(now)) is not None:
        queue.pop(head)
        served.append(head)
    return served
