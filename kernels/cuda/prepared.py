"""A batch as the CUDA backend wants it: its columns on the device, and how its attention is cut into work items."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.cuda.metadata import Columns, Staged, Staging
from kernels.cuda.planner import Bounds, Plan, Planner
from kernels.ops import Batch, Prepared


@dataclass(frozen=True, slots=True)
class Work:
    """What the attention kernels launch, padding included, and for which attention it was planned."""

    group: int
    window: int  # the widest that the plan covers; 0: any
    decode_items: int
    prefill_items: int
    merged: int
    partial_rows: int

    @classmethod
    def of(cls, planner: Planner, plan: Plan, bounds: Bounds | None = None) -> Work:
        """With bounds, as much as any plan within them."""
        if bounds is None:
            bounds = Bounds(len(plan.decode), len(plan.rows), plan.partial_rows)
        sizes = (bounds.items, len(plan.prefill), bounds.merged, bounds.partial_rows)
        return cls(planner.group, planner.window, *sizes)

    def covers(self, group: int, window: int) -> bool:
        """Whether attention with so many query heads to a KV head and that window can use the plan."""
        return self.group == group and (not self.window or 0 < window <= self.window)


class CudaPrepared(Prepared):
    """`rows` and `samples` are what operations compute: those of the batch, or of the graph that is being recorded.

    A batch for a graph goes to the memory that all graphs read, when the graph is to run and not before: another batch
    may be prepared in between.
    """

    __slots__ = ("_columns", "_plan", "_staged", "_staging", "batch", "graph", "rows", "samples", "work")

    def __init__(self, batch: Batch, staged: Staged, staging: Staging, work: Work | None, graph: int) -> None:
        """graph: rows of the graph that is to compute it, for which the columns are padded; 0: none."""
        self.batch, self.work, self.graph = batch, work, graph
        self.rows, self.samples = len(batch.tokens), len(batch.sample_rows)
        self._staged, self._staging = staged, staging
        self._columns: Columns | None = None
        self._plan: Columns | None = None

    @property
    def is_sent(self) -> bool:
        """Whether its copy to the device has begun."""
        return self._columns is not None

    @property
    def numbers(self) -> int:
        """How long its columns are together."""
        return self._staged.used

    @property
    def columns(self) -> Columns:
        """Of the rows."""
        return self.send() if self._columns is None else self._columns

    @property
    def plan(self) -> Columns:
        """Of `work`."""
        return self.columns if self._plan is None else self._plan

    def send(self, target: Tensor | None = None) -> Columns:
        """Begins the copy, to `target` or to memory of its own."""
        self._columns = self._staging.send(self._staged, target)
        return self._columns

    def plan_anew(self, work: Work, staged: Staged) -> Work:
        """Takes another plan than that of the columns, and returns it."""
        self.work, self._plan = work, self._staging.send(staged)
        return work
