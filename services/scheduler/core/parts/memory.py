"""May they hold KV, and how many blocks are kept for them from the start?

Expected lengths instead of max_tokens are in expected.py, the peak of all that run in peak.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.parts.peak import Peak, ahead, free_to_yield, of_entrants, set_aside
from services.scheduler.core.policy import Entrants, Pace
from services.scheduler.core.table import Int64

if TYPE_CHECKING:
    from services.scheduler.core.replica import Replica

STALE = 8  # steps after which nobody is known to be held back any more, if nobody was judged again


class Reserve:
    """The blocks of prompt + max_tokens at admission; nobody ever lacks memory (Orca, Algorithm 1; TGI; TensorRT-LLM's
    GUARANTEED_NO_EVICT). The last token's KV is never computed, so it is not reserved."""

    learns = False

    def admit(self, replica: Replica, entrants: Entrants, pace: Pace) -> Int64:
        return known_blocks(replica, np.maximum(entrants.limit, entrants.known))

    def another(self) -> Reserve:
        return self

    def stepped(self, replica: Replica, preempted: int) -> None:
        pass

    def finished(self, prompt: int, output: int, limit: int) -> None:
        pass


class Watermark:
    """The blocks of the known tokens, leaving a share of the pool free for those that run (vLLM, Sarathi: a hundredth).

    With share 0: whoever fits now enters (TensorRT-LLM's MAX_UTILIZATION, lmdeploy).
    """

    learns = False

    def __init__(self, share: float = 0.01) -> None:
        self._share = share

    def admit(self, replica: Replica, entrants: Entrants, pace: Pace) -> Int64:
        blocks = known_blocks(replica, entrants.known)
        room = replica.available - int(self._share * replica.pool.total)
        count = int(np.count_nonzero(np.cumsum(blocks - entrants.shared) <= room))
        return blocks[: first_of_none(replica, count)]

    def another(self) -> Watermark:
        return self

    def stepped(self, replica: Replica, preempted: int) -> None:
        pass

    def finished(self, prompt: int, output: int, limit: int) -> None:
        pass


class PeakEstimate:
    """The blocks of the known tokens, if the predicted peak of all that run and those who enter fits (LightLLM).

    Everybody is taken to run to his limit, so the estimate is never too low while all of them run at each step; what
    several hold together is an estimate (Peak).
    """

    learns = False

    def __init__(self) -> None:
        self._peak = Peak()

    def admit(self, replica: Replica, entrants: Entrants, pace: Pace) -> Int64:
        return self.within(replica, entrants, pace, replica.pool.total)

    def within(self, replica: Replica, entrants: Entrants, pace: Pace, room: int) -> Int64:
        """As admit(), with a peak of `room` blocks at most."""
        blocks, count = available(replica, entrants)
        if count:
            table = replica.table
            rows = free_to_yield(table)
            known = table.known[rows].astype(np.int64)
            held, steps = ahead(known, known - table.planned[rows], table.limit[rows].astype(np.int64) - 1, pace)
            size, room = replica.limits.block_size, room - set_aside(table)
            new_held, new_steps = of_entrants(entrants, np.maximum(entrants.limit, entrants.known), pace)
            most = int((-(-(held + steps) // size)).sum() + (-(-(new_held + new_steps) // size)).sum())
            if most > room:  # else they fit even if all were longest at once
                self._peak.run(held, steps, size, spared(replica))
                count = self._peak.fitting(new_held[:count], new_steps[:count], entrants.shared[:count], room)
        return blocks[: first_of_none(replica, count)]

    def another(self) -> PeakEstimate:
        return PeakEstimate()

    def stepped(self, replica: Replica, preempted: int) -> None:
        pass

    def finished(self, prompt: int, output: int, limit: int) -> None:
        pass


class FtAimd:
    """The peak estimate under a limit in tokens that moves like TCP's window: from the capacity on, += 100 at each step
    while it holds somebody back and under 90 % of the pages are used; -= 1000 at a swap."""

    learns = True

    def __init__(self) -> None:
        self.limit = 0  # tokens; 0: not set
        self._estimate = PeakEstimate()
        self._held_back = 0

    def admit(self, replica: Replica, entrants: Entrants, pace: Pace) -> Int64:
        size = replica.limits.block_size
        self.limit = self.limit or replica.pool.total * size
        blocks = self._estimate.within(replica, entrants, pace, self.limit // size)
        self._held_back = STALE if blocks.size < available(replica, entrants)[1] else 0
        return blocks

    def another(self) -> FtAimd:
        return FtAimd()

    def stepped(self, replica: Replica, preempted: int) -> None:
        if preempted:
            self.limit = max(self.limit - 1000 * preempted, replica.limits.block_size)
        elif self._held_back and roomy(replica, 0.9):
            self.limit += 100
        self._held_back = max(self._held_back - 1, 0)

    def finished(self, prompt: int, output: int, limit: int) -> None:
        pass


class Aimd:
    """The same in general, in blocks: += `add` at each step in which the limit holds somebody back while under `crowd`
    of the pool is used, *= `factor` at one that preempted."""

    learns = True

    def __init__(self, add: float = 4.0, factor: float = 0.9, crowd: float = 0.9) -> None:
        self.limit = 0.0  # blocks; 0: not set
        self._add, self._factor, self._crowd = add, factor, crowd
        self._estimate = PeakEstimate()
        self._held_back = 0

    def admit(self, replica: Replica, entrants: Entrants, pace: Pace) -> Int64:
        self.limit = self.limit or float(replica.pool.total)
        blocks = self._estimate.within(replica, entrants, pace, int(self.limit))
        self._held_back = STALE if blocks.size < available(replica, entrants)[1] else 0
        return blocks

    def another(self) -> Aimd:
        return Aimd(self._add, self._factor, self._crowd)

    def stepped(self, replica: Replica, preempted: int) -> None:
        if preempted:
            self.limit = max(self.limit * self._factor, 1.0)
        elif self._held_back and roomy(replica, self._crowd):
            self.limit += self._add
        self._held_back = max(self._held_back - 1, 0)

    def finished(self, prompt: int, output: int, limit: int) -> None:
        pass


class Overcommit:
    """SGLang's new_token_ratio: of what the running may still produce (4096 each at most) a share is reserved. It falls
    by a 600th of its range with each step; after a preemption it is what the batch has shown to need, with 20 steps of
    slack. An empty replica begins anew. Source: https://github.com/sgl-project/sglang, schedule_batch.py."""

    learns = True
    first, last = 0.7, 0.7 * 0.14
    clip = 4096

    def __init__(self) -> None:
        self.ratio = self.first

    def admit(self, replica: Replica, entrants: Entrants, pace: Pace) -> Int64:
        table, size = replica.table, replica.limits.block_size
        if not table.count:
            self.ratio = self.first
        on = table.active[: table.high]
        left = np.minimum(table.limit[: table.high] - table.applied[: table.high], self.clip)
        reserved = float(left[on].sum()) * self.ratio
        growth = np.minimum(np.maximum(entrants.limit + 1 - entrants.known, 0), self.clip)
        need = np.cumsum(entrants.known - entrants.shared * size + growth) + size
        count = int(np.count_nonzero(need <= replica.available * size - reserved))
        return known_blocks(replica, entrants.known)[: first_of_none(replica, count)]

    def another(self) -> Overcommit:
        return Overcommit()

    def stepped(self, replica: Replica, preempted: int) -> None:
        if not preempted:
            self.ratio = max(self.ratio - (self.first - self.last) / 600, self.last)
            return
        table = replica.table
        on, prompt = table.active[: table.high], table.prompt[: table.high]
        produced = int((table.applied[: table.high] - prompt)[on].sum())
        most = int((table.limit[: table.high] - prompt)[on].sum())
        self.ratio = min(1.0, (produced + 20 * table.count) / (most + 1))

    def finished(self, prompt: int, output: int, limit: int) -> None:
        pass


def known_blocks(replica: Replica, tokens: Int64) -> Int64:
    """[n] blocks of so many tokens."""
    return -(-tokens // replica.limits.block_size)


def available(replica: Replica, entrants: Entrants) -> tuple[Int64, int]:
    """[n] blocks of the known tokens, and for how many of the first there are so many now."""
    blocks = known_blocks(replica, entrants.known)
    return blocks, int(np.count_nonzero(np.cumsum(blocks - entrants.shared) <= replica.available))


def first_of_none(replica: Replica, count: int) -> int:
    """Where nothing runs, the first enters whatever an estimate says: nothing else could ever free memory."""
    return count or int(not replica.table.count)


def spared(replica: Replica) -> int:
    """Blocks that several rows hold, once for each row beyond the first."""
    return max(int(replica.table.held[: replica.table.high].sum()) - replica.pool.referenced, 0)


def roomy(replica: Replica, share: float) -> bool:
    """Is less than `share` of the pool used or promised?"""
    return replica.pool.total - replica.available < share * replica.pool.total
