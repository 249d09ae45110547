"""A forward pass recorded at a few numbers of rows, so that an iteration is one launch.

A batch is padded up to the next of these numbers. A padded row has no token, no slot and no work item: the kernels
write only its rows of the graph's results, and no code reads these. Iterations in which all sequences decode have
graphs without the kernel for chunks. Those with more rows than any graph are computed by operations: the device then
takes longer than the host does for their launches, and padding would make it longer still.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor

from kernels.cuda.cache import CudaCache
from kernels.cuda.device import Device, borrowed
from kernels.cuda.metadata import CudaPrepared
from kernels.cuda.planner import Planner, Room
from kernels.ops import Batch

log = logging.getLogger("orcinus.kernels")


MIXED_ROWS = (16, 32, 64, 96, 128, 192, 256, 384, *range(512, 1024, 64), *range(1024, 2049, 128))
"""Of graphs for iterations with chunks."""

LAUNCHING = 120_000_000_000
"""Rows times numbers in a layer's matrices up to which a host takes longer to launch a layer's operations than an H100
to compute them: bench/results/gpu-graphs.json. A slower GPU has its limit earlier and pads some rows too many."""

LAUNCHING_ADAPTERS = 200_000_000_000
"""The same where a layer may have products of adapters, eight launches beside the eleven of a step with chunks. Passes
without adapters have graphs of the same rows then, since a batch is prepared for either."""

CHUNKS = 64
"""Sequences with several rows in one of them: the items of all that may come are launched."""


def sizes_up_to(most: int) -> list[int]:
    """Return the numbers of rows to record for decode: 1, 2, 4, 8, ...

    64 in steps of 8, ... 128 in steps of 16, and so on, and `most`.
    """
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 8 else max(8, (1 << size.bit_length() - 1) // 4)
    return [*sizes, most]


def rooms_up_to(tokens: int, samples: int, layer_numbers: int, adapters: bool = False) -> list[Room]:
    """Return what to record.

    tokens: rows of an iteration at most; samples: rows that sample at most; layer_numbers: in a layer's matrices;
    adapters: whether there may be any.
    """
    launching = LAUNCHING_ADAPTERS if adapters else LAUNCHING
    decode = [Room(rows, rows, 0) for rows in sizes_up_to(min(tokens, samples))]
    worth = [rows for rows in MIXED_ROWS if rows * layer_numbers <= launching] or [MIXED_ROWS[0]]
    most = min(tokens, worth[-1])  # a prompt's chunks fill the iteration, so `tokens` is the commonest number
    mixed = sorted({most, *(rows for rows in worth if rows < most)})
    return decode + [Room(rows, min(rows, samples), min(CHUNKS, rows // 2)) for rows in mixed if rows > 1]


class Graphs:
    """The result of CudaOps.compile: replay a graph for batches that were prepared for one, else run operations."""

    def __init__(
        self,
        device: Device,
        run: Callable[[Any], Tensor],
        rooms: list[Room],
        columns: Tensor,
        cache: CudaCache,
        planner: Planner,
        logits: Tensor,
        counts: list[int],
    ) -> None:
        """Record nothing yet.

        run: the forward pass, operation by operation; columns: int32 on the device, which all graphs read.

        cache: what run reads and writes; planner: of its attention; logits: [most samples, vocabulary], its results;
        counts: gets the rows of a batch, and those that sample, before its graph runs.
        """
        self.cache, self.planner, self.columns, self.logits = cache, planner, columns, logits
        self._rooms, self._counts = rooms, counts
        self._device, self._run = device, run
        self._decode = [room for room in rooms if not room.chunks]
        self._mixed = [room for room in rooms if room.chunks]
        self._replays: dict[Room, tuple[Callable[[], None], Tensor]] = {}

    def room_for(self, batch: Batch) -> Room | None:
        """Return the smallest room with a graph that holds a batch; None where none does."""
        rows, sequences, samples = len(batch.tokens), len(batch.context), len(batch.sample_rows)
        rooms = self._decode if rows == sequences else self._mixed
        at = bisect_left(rooms, rows, key=attrgetter("rows"))
        if batch.scored or at == len(rooms):
            return None
        room = rooms[at]
        chunks = int((batch.query_start[1:] - batch.query_start[:-1] > 1).sum()) if room.chunks else 0
        fits = chunks <= room.chunks and max(samples, sequences - chunks) <= room.decodes
        return room if fits else None

    def fits(self, cache: CudaCache, planner: Planner, rooms: list[Room], logits: tuple[int, int]) -> bool:
        """Return whether a batch that was prepared for these graphs can run in others with that, and the reverse."""
        return (
            self.cache is cache
            and self.planner.same_plans(planner)
            and self._rooms == rooms
            and self.logits.shape == logits
        )

    def record(self, padding: Callable[[Room], CudaPrepared]) -> None:
        """Record all graphs. padding: makes a batch of padded rows that was prepared for the graph of a room."""
        # The largest first: the others find room in what it took.
        rooms = sorted([*self._decode, *self._mixed], key=attrgetter("rows"), reverse=True)
        for done, room in enumerate(rooms):
            self._record(room, padding(room))
            if not done % 8:
                log.info("recorded the graph of %d rows, %d more to come", room.rows, len(rooms) - done - 1)

    def __call__(self, prepared: CudaPrepared) -> Tensor:
        """Return the forward pass. Its result holds until the next call."""
        if prepared.graph is None or prepared.is_sent:
            return self._run(prepared)
        prepared.send(self.columns)
        self._counts[:] = prepared.rows, prepared.samples
        replay, result = self._replays[prepared.graph]
        replay()
        return result[: prepared.samples]

    def _record(self, room: Room, prepared: CudaPrepared) -> None:
        prepared.send(self.columns)
        prepared.rows, prepared.samples = room.rows, room.decodes
        results = [self._run(prepared)]  # libraries load what they need, and take memory
        replay = self._device.capture(lambda: results.append(self._run(prepared)))
        # The rows that a stage sends on are its result; kept, each graph would have memory of its own for them.
        self._replays[room] = replay, borrowed(results[-1])
