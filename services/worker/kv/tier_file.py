"""The file of a host tier: its blocks, the epoch of the Run that has it, and a digest of each block that outlived its
worker. Its worker writes it, readers map it (`peers.py`).
"""

from __future__ import annotations

import itertools
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.ops import Int32

NUMBER_BYTES = 8
IS_KEPT = 1 << 32
"""A bit beside the checksum in each digest: a block that was not kept has 0."""
ALONE_BYTES = 16 << 20
"""Fewer bytes are summed by one thread."""

Digests = npt.NDArray[np.int64]


class Layout(NamedTuple):
    """Where the parts of a file end: the blocks, the epoch (an int64 behind `run`), a digest (int64) of each block."""

    blocks: int
    run: int
    epoch: int
    digests: int


def layout(blocks: int, block_bytes: int) -> Layout:
    """Return where each part of a file with this number of blocks lies."""
    size = blocks * block_bytes
    run = -(-size // NUMBER_BYTES) * NUMBER_BYTES
    return Layout(size, run, run + NUMBER_BYTES, run + NUMBER_BYTES * (1 + blocks))


def compute_digests(memory: npt.NDArray[np.uint8], blocks: Int32, threads: int = 1) -> Digests:
    """Return the digests of `blocks`: CRC-32 of the bytes, which begins at the number of the block.

    memory: [blocks, block_bytes]. It finds damage, and no forgery: a process that may write the file may write digests.
    """

    def digest(part: Int32) -> list[int]:
        return [IS_KEPT | zlib.crc32(memory[block], block) for block in part.tolist()]

    if threads == 1 or blocks.size * memory.shape[1] < ALONE_BYTES:
        return np.array(digest(blocks), np.int64)
    with ThreadPoolExecutor(threads) as pool:  # zlib works without the GIL
        return np.array([*itertools.chain.from_iterable(pool.map(digest, np.array_split(blocks, threads)))], np.int64)
