"""A batch as the CUDA backend wants it: columns of int32 behind one another, one buffer, one copy, and its work items.

Columns of a constant size within a graph come first, the pages of all sequences last, so that only the used part is
copied.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from torch import Tensor, int32

from kernels.cuda.calls import PADDING
from kernels.cuda.device import Device, Event
from kernels.cuda.planner import Bounds, Plan, Planner, Room
from kernels.ops import Batch, Int32, Prepared

ALIGNMENT = 8  # numbers: 32 bytes, a work item
SMALLEST_BUFFER = 1 << 14


@dataclass(frozen=True, slots=True)
class Column:
    """Numbers with a name; behind them `room - len(values)` times `fill`."""

    name: str
    values: Int32
    room: int
    fill: int = 0


def row_columns(batch: Batch, block_size: int, padded: int = 0) -> list[Column]:
    """Return what the operations on rows read, for `padded` rows, samples and sequences where these are more."""
    slots = batch.write_blocks * np.int32(block_size) + batch.write_offsets
    sequences = max(padded, len(batch.context))
    return [
        Column("tokens", batch.tokens, max(padded, len(batch.tokens)), PADDING),
        Column("positions", batch.positions, max(padded, len(batch.positions))),
        Column("slots", slots, max(padded, len(slots)), -1),
        Column("sample_rows", batch.sample_rows, max(padded, len(batch.sample_rows)), -1),
        Column("context", batch.context, sequences),
        Column("query_start", batch.query_start, sequences + 1),
    ]


def plan_columns(plan: Plan, bounds: Bounds | None = None) -> list[Column]:
    """Return what attention and its merge read; with bounds, as much room as any plan within them needs."""
    decode, merged = plan.decode.ravel(), len(plan.rows)
    width = plan.decode.shape[1]
    if bounds is None:
        bounds = Bounds(len(plan.decode), len(plan.prefill), merged, plan.partial_rows)
    return [
        Column("decode_items", decode, bounds.decode * width, -1),
        Column("prefill_items", plan.prefill.ravel(), bounds.prefill * width, -1),
        Column("merge_starts", plan.starts, bounds.merged + 1),
        Column("merge_rows", plan.rows, bounds.merged, -1),
    ]


def page_columns(batch: Batch, block_size: int, padded: int = 0) -> list[Column]:
    """Return the pages of all sequences in turn and where each sequence's begin; the last columns of a buffer."""
    used = -(-batch.context // block_size)
    start = np.zeros(len(used) + 1, np.int32)
    np.cumsum(used, out=start[1:])
    width = batch.tables.shape[1]
    # Page i of sequence s is number s * width + i of the tables.
    skipped = np.arange(len(used), dtype=np.int32) * width - start[:-1]
    pages = batch.tables.ravel().take(np.arange(start[-1], dtype=np.int32) + np.repeat(skipped, used))
    return [
        Column("page_start", start, max(padded, len(used)) + 1),
        Column("pages", pages, len(pages)),
    ]


@dataclass(frozen=True, slots=True)
class Staged:
    """Columns in pinned memory, ready to be copied; `offsets` and `used` in numbers."""

    pinned: Tensor
    offsets: dict[str, int]
    used: int


@dataclass(frozen=True, slots=True)
class Columns:
    """Where kernels read them."""

    tensor: Tensor  # int32 on the device
    offsets: dict[str, int]

    def address(self, name: str) -> int:
        """Return the address of a column's first number."""
        return int(self.tensor.data_ptr()) + 4 * self.offsets[name]


class Staging:
    """Pinned buffers in rotation. One is written again only when the copy out of it is done, without waiting."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._transfers: deque[tuple[Event, Tensor]] = deque()

    def stage(self, columns: list[Column]) -> Staged:
        """Write the columns, in this order, to a buffer that no copy reads any more."""
        offsets, used = {}, 0
        for column in columns:
            offsets[column.name] = used
            used += -(-column.room // ALIGNMENT) * ALIGNMENT
        pinned = self._buffer(used)
        numbers: Int32 = pinned.numpy()
        for column in columns:
            start, count = offsets[column.name], len(column.values)
            numbers[start : start + count] = column.values
            if count < column.room:
                numbers[start + count : start + column.room] = column.fill
        return Staged(pinned, offsets, used)

    def send(self, staged: Staged, target: Tensor | None = None) -> Columns:
        """Begin the copy, to the first numbers of target or to memory taken for it. Once for each `stage`."""
        if target is None:
            target = self._device.empty((staged.used,), int32)
        self._device.main.copy(target[: staged.used], staged.pinned[: staged.used])
        self._transfers.append((self._device.main.record(), staged.pinned))
        return Columns(target, staged.offsets)

    def _buffer(self, numbers: int) -> Tensor:
        while self._transfers and self._transfers[0][0].done():
            _, pinned = self._transfers.popleft()
            if pinned.numel() >= numbers:
                return pinned  # a smaller one is let go
        return self._device.pinned((max(SMALLEST_BUFFER, 1 << (numbers - 1).bit_length()),), int32)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of the attention kernels, padding included, and the attention that it was planned for."""

    group: int
    window: int  # the widest that the plan covers; 0: any
    decode_items: int
    prefill_items: int
    merged: int
    partial_rows: int

    @classmethod
    def of(cls, planner: Planner, plan: Plan, bounds: Bounds | None = None) -> Work:
        """Return the layout of a plan; with bounds, of any plan within them."""
        if bounds is None:
            bounds = Bounds(len(plan.decode), len(plan.prefill), len(plan.rows), plan.partial_rows)
        return cls(planner.group, planner.window, bounds.decode, bounds.prefill, bounds.merged, bounds.partial_rows)

    def covers(self, group: int, window: int) -> bool:
        """Return whether attention with so many query heads to a KV head and that window can use the plan."""
        return self.group == group and (not self.window or 0 < window <= self.window)


class CudaPrepared(Prepared):
    """`rows` and `samples` are what operations compute: those of the batch, or of the graph that is being recorded.

    A batch for a graph goes to the memory that all graphs read, when the graph is to run and not before: another batch
    may be prepared in between.
    """

    __slots__ = ("_columns", "_plan", "_staged", "_staging", "batch", "graph", "rows", "samples", "work")

    def __init__(self, batch: Batch, staged: Staged, staging: Staging, work: Work | None, graph: Room | None) -> None:
        """Create the columns.

        graph: the room of the graph that is to compute it, for which the columns are padded.
        """
        self.batch, self.work, self.graph = batch, work, graph
        self.rows, self.samples = len(batch.tokens), len(batch.sample_rows)
        self._staged, self._staging = staged, staging
        self._columns: Columns | None = None
        self._plan: Columns | None = None

    @property
    def is_sent(self) -> bool:
        """Return whether its copy to the device has begun."""
        return self._columns is not None

    @property
    def numbers(self) -> int:
        """Return how long its columns are together."""
        return self._staged.used

    @property
    def columns(self) -> Columns:
        """Return the columns of the rows."""
        return self.send() if self._columns is None else self._columns

    @property
    def plan(self) -> Columns:
        """Return the plan of `work`."""
        return self.columns if self._plan is None else self._plan

    def send(self, target: Tensor | None = None) -> Columns:
        """Begin the copy, to `target` or to new memory."""
        self._columns = self._staging.send(self._staged, target)
        return self._columns

    def plan_anew(self, work: Work, staged: Staged) -> Work:
        """Take another plan than that of the columns, and return it."""
        self.work, self._plan = work, self._staging.send(staged)
        return work
