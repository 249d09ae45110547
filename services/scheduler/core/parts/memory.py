"""May a waiting sequence hold KV, and how many blocks are kept for it from the start?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.scheduler.core.policy import Pace
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence


def peak_blocks(held: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], block_size: int) -> int:
    """Most blocks held at once if every sequence gets one token a step until its own last one, exactly.

    held: [n] tokens now; steps: [n] steps to come. With steps descending, max_i sum_{j<=i} ceil((held_j + steps_i) / B)
    (LightLLM's peak in blocks; DESIGN.md, section 4). With held = a*B + r, 1 <= r <= B, and steps = b*B + q the term is
    a_j + b_i + 1 + [r_j > B - q_i], so the sums are prefix sums: O(n*B) instead of O(n^2).
    """
    if not held.size:
        return 0
    order = np.argsort(-steps, kind="stable")
    held, steps = np.maximum(held[order], 1), steps[order]
    a, r = np.divmod(held - 1, block_size)
    r += 1
    b, q = np.divmod(steps, block_size)
    count = np.arange(1, held.size + 1)
    # above[i, x]: how many of the first i + 1 have r > x
    above = np.cumsum(r[:, None] > np.arange(block_size + 1), axis=0)
    peaks = np.cumsum(a) + count * (b + 1) + above[np.arange(held.size), block_size - q]
    return int(peaks.max())


class Reserve:
    """The blocks of prompt + max_tokens at admission; nobody ever lacks memory (Orca, Algorithm 1).

    The last token's KV is never computed, so prompt + max_tokens - 1 tokens are reserved.
    """

    def promise(self, replica: Replica, sequence: Sequence, pace: Pace) -> int:
        return replica.blocks_for(sequence.longest(replica.limits) - 1)


class Watermark:
    """The blocks of the known tokens, leaving a hundredth of the pool free for those that run (vLLM, Sarathi)."""

    def __init__(self, share: float = 0.01) -> None:
        self._share = share

    def promise(self, replica: Replica, sequence: Sequence, pace: Pace) -> int:
        blocks = replica.blocks_for(sequence.known)
        keep = int(self._share * replica.pool.total) if replica.table.count else 0
        return blocks if blocks + keep <= replica.available else -1


class PeakEstimate:
    """The blocks of the known tokens, if the predicted peak of all that run and this one fits the pool (LightLLM).

    Every sequence is taken to run to its limit, so the estimate is never too low while all of them run at each step.
    """

    def promise(self, replica: Replica, sequence: Sequence, pace: Pace) -> int:
        table, limits = replica.table, replica.limits
        blocks = replica.blocks_for(sequence.known)
        if blocks > replica.available:
            return -1
        if not table.count:
            return blocks
        on = table.active[: table.high]
        pinned = table.pinned[: table.high]
        room = limits.blocks - int(table.promised[: table.high][pinned].sum())  # theirs is set aside
        rows = np.flatnonzero(on & ~pinned)
        limit = np.append(table.limit[rows], sequence.longest(limits)) - 1
        if int((-(-limit // limits.block_size)).sum()) <= room:
            return blocks  # all of them fit at full length
        known = np.append(table.known[rows], sequence.known)
        rest = np.append(table.known[rows] - table.planned[rows], sequence.known)
        held = np.minimum(known, limit)  # a prompt's blocks are promised, so they count at once
        steps = limit - held + (rest - 1) // pace.budget + pace.lookahead
        return blocks if peak_blocks(held.astype(np.int64), steps.astype(np.int64), limits.block_size) <= room else -1
