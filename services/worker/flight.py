"""A step between the moment it is given to the device and its Result. Made, filled and finished by the engine alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernels.ops import AnyOps, Int32, Int64, Pending, Sampled
from protos import worker_pb2
from services.worker.copies import Copies
from services.worker.slots import Chunks

NOBODY: Int32 = np.zeros(0, np.int32)


@dataclass(slots=True)
class Marks:
    """Points in the device's time (Ops.mark). before: the end of the flight before this one, None for a Run's first."""

    before: Any
    start: Any
    forwarded: Any = None
    ended: Any = None

    def timings(self, ops: AnyOps) -> worker_pb2.Timings:
        """Those of the device, once it has passed the end."""
        return worker_pb2.Timings(
            idle_ns=0 if self.before is None else max(0, ops.elapsed_ns(self.before, self.start)),
            forward_ns=ops.elapsed_ns(self.start, self.forwarded),
            sample_ns=ops.elapsed_ns(self.forwarded, self.ended),
            total_ns=ops.elapsed_ns(self.start, self.ended),
        )


@dataclass(slots=True, eq=False)
class Flight:
    """What `Engine.submit` hands to `Engine.finish`."""

    epoch: int
    id: int
    chunks: Chunks
    generations: Int64  # [C] of the chunks' slots: whose they were when this was submitted
    copies: Copies
    marks: Marks
    queued_ns: int
    errors: list[worker_pb2.SequenceError]  # of slots that had failed before and are in the step again
    failed: dict[int, tuple[str, str]] = field(default_factory=dict)  # slots that give no token; code and message
    places: Int32 = field(default_factory=lambda: NOBODY)  # [R] where in its sequence each sampled token belongs
    sampled: Pending[Sampled] | None = None

    @property
    def sampling(self) -> Int32:
        """[R] the slots that sample, in the order of the chunks."""
        return self.chunks.slots[self.chunks.samples]

    def generation(self, slot: int) -> int | None:
        """Of one of the chunks' slots; None for a slot that has no chunk here."""
        at = np.flatnonzero(self.chunks.slots == slot)
        return int(self.generations[at[0]]) if at.size else None
