"""The floor of a scheduling step: steady decode as a few vector operations, without any feature.

The cases of the scheduler bench run it beside the core and give their figures as ratios to it, since machines differ. A
slot table of arrays: no admission, no preemption, no host tier, one worker that answers in order. It stays as it is; a
faster floor would make figures of different commits incomparable.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
LONGEST_PROMPT = 400
BLOCKS_PER_SLOT = 140
GATEWAYS = 2
VOCAB = 30_000
SEED = 1

Int32 = npt.NDArray[np.int32]


class BlockPool:
    """A stack of free blocks, reference counts, and a lossy direct-mapped prefix index.

    The hash of a block finds its place in the index; parent and tokens, which are kept, would confirm a match.
    """

    def __init__(self, blocks: int) -> None:
        self._free = np.arange(blocks - 1, -1, -1, dtype=np.int32)
        self._top = blocks
        self._references = np.zeros(blocks, np.int32)
        self._tokens = np.zeros((blocks, BLOCK_SIZE), np.int32)
        self._parents = np.full(blocks, -1, np.int32)
        self._hashes = np.zeros(blocks, np.uint64)
        size = 1 << int(np.ceil(np.log2(blocks * 4)))
        self._index = np.full(size, -1, np.int32)
        self._shift = np.uint64(64 - int(np.log2(size)))
        random = np.random.default_rng(SEED)
        self._factors = random.integers(1, 2**63, BLOCK_SIZE, dtype=np.uint64) | np.uint64(1)
        self._parent_factor = np.uint64(random.integers(1, 2**63, dtype=np.uint64) | np.uint64(1))

    def take(self, count: int) -> Int32:
        """Return `count` free blocks, [count] int32."""
        self._top -= count
        blocks = self._free[self._top : self._top + count].copy()
        self._references[blocks] = 1
        return blocks

    def register(self, blocks: Int32, parents: Int32, tokens: Int32) -> None:
        """Enter full blocks, [n], with their parents, [n], and tokens, [n, BLOCK_SIZE], into the prefix index."""
        self._tokens[blocks] = tokens
        self._parents[blocks] = parents
        hashes = (tokens.astype(np.uint64) * self._factors).sum(axis=1, dtype=np.uint64)
        hashes += self._hashes[parents] * self._parent_factor
        self._hashes[blocks] = hashes
        self._index[hashes >> self._shift] = blocks


class Floor:
    """`running` sequences in steady decode, each in a slot of its own."""

    def __init__(self, running: int) -> None:
        """Start at prompts of 1 to LONGEST_PROMPT tokens; there is room for 1,600 steps."""
        random = np.random.default_rng(0)
        self._pool = BlockPool(running * BLOCKS_PER_SLOT + 64)
        self._active = np.ones(running, bool)
        self._planned = random.integers(1, LONGEST_PROMPT, running).astype(np.int32)  # planned tokens
        self._applied = self._planned.copy()  # tokens that are there
        self._limits = np.full(running, MAX_MODEL_LEN - 8, np.int32)
        self._stop_ids = np.full(running, -1, np.int32)
        self._gateways = random.integers(0, GATEWAYS, running).astype(np.int16)
        self._last_ns = np.zeros(running, np.int64)
        self._blocks = np.zeros((running, MAX_MODEL_LEN // BLOCK_SIZE + 1), np.int32)
        self._tokens = np.zeros((running, MAX_MODEL_LEN + 1), np.int32)
        for slot, length in enumerate(self._planned.tolist()):
            count = -(-length // BLOCK_SIZE)
            self._blocks[slot, :count] = self._pool.take(count)
        self._sampled = random.integers(3, VOCAB, (64, running)).astype(np.int32)
        self._steps = 0

    def step(self) -> tuple[int, int]:
        """Plan a step and apply its result; return what each took, in ns."""
        begin = time.perf_counter_ns()
        slots, _ = self._plan()
        planned = time.perf_counter_ns()
        self._apply(slots, self._sampled[self._steps & 63][slots], planned)
        self._steps += 1
        return planned - begin, time.perf_counter_ns() - planned

    def _plan(self) -> tuple[Int32, tuple[bytes, bytes, bytes]]:
        """Give each running slot its next token, and a block where a block boundary is crossed."""
        running = np.flatnonzero(self._active & (self._planned < self._limits))
        at = self._planned[running]
        edge = np.flatnonzero((at & (BLOCK_SIZE - 1)) == 0)
        growing = running[edge]
        new = self._pool.take(growing.size)
        self._blocks[growing, at[edge] >> 4] = new
        self._planned[running] = at + 1
        slots = running.astype(np.int32)
        return slots, (slots.tobytes(), growing.astype(np.int32).tobytes(), new.tobytes())

    def _apply(self, slots: Int32, sampled: Int32, now_ns: int) -> tuple[Int32, list[tuple[bytes, bytes]]]:
        """Append the sampled tokens; return the finished slots, and slots and tokens grouped by gateway."""
        length = self._applied[slots]
        self._tokens[slots, length] = sampled
        length = length + 1
        self._applied[slots] = length
        self._last_ns[slots] = now_ns
        full = np.flatnonzero((length & (BLOCK_SIZE - 1)) == 0)
        if full.size:
            owners, place = slots[full], (length[full] >> 4) - 1
            columns = (place * BLOCK_SIZE)[:, None] + np.arange(BLOCK_SIZE, dtype=np.int32)
            parents = self._blocks[owners, np.maximum(place - 1, 0)]
            self._pool.register(self._blocks[owners, place], parents, self._tokens[owners[:, None], columns])
        finished = slots[(sampled == self._stop_ids[slots]) | (length >= self._limits[slots])]
        gateways = self._gateways[slots]
        order = np.argsort(gateways, kind="stable")
        cuts = np.flatnonzero(np.diff(gateways[order])) + 1
        return finished, [(slots[rows].tobytes(), sampled[rows].tobytes()) for rows in np.split(order, cuts)]
