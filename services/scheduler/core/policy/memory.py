"""Memory policies: which waiting sequences may hold KV, and how many blocks are reserved when they enter.

`Peak` is LightLLM's estimate of the most blocks that all running sequences will hold at once. `Expected`, the memory
policy of `orcinus`, forecasts output lengths from finished requests instead of max_tokens ("Past-Future Scheduler",
ASPLOS '25).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.scheduler.core.policy.base import Candidates, Memory, Pace, ReplicaView
from services.scheduler.core.policy.queues import quarter_octave
from services.scheduler.core.table import Int64, SlotTable
from services.scheduler.core.types import Rows

NONE: Int64 = np.zeros(0, np.int64)


class Peak:
    """The most blocks that running sequences will hold at once, and which newcomers fit beside them.

    Sequence j holds l_j tokens and gets one more in each of s_j steps; then it ends. Blocks have B tokens. Memory is
    fullest when some sequence i ends: each j with s_j >= s_i then holds ceil((l_j + s_i) / B) blocks.

    With l = a*B + r, 1 <= r <= B, and s = b*B + q this is a_j + b_i + 1 + [r_j > B - q_i]. So, sorted by s, all sums
    are prefix sums: O(n*B) after a change, and O(log n) for the blocks of the running sequences when a newcomer ends.

    While every sequence runs at each step, l_j + s_i does not change. Then the sums are kept and only the clock
    `_drift` moves.
    """

    def __init__(self) -> None:
        self._held_tokens, self._steps = NONE, NONE  # arguments of run() when the sums were computed
        self._drift = 0  # steps since then
        self._block_size = 0
        self._ends = NONE  # [m] -s, ascending: the sequence that ends last is first
        self._blocks = NONE  # [m + 1] sum of a over the first i sequences
        self._above: npt.NDArray[np.int32] = np.zeros((1, 1), np.int32)  # [B + 1, m + 1] of the first i: r > x
        self._peaks = NONE  # [m] blocks of all sequences that are left when the i-th ends
        self._spared_blocks = 0  # blocks that are counted for several sequences

    def set_running(self, held: Int64, steps: Int64, block_size: int, spared: int = 0) -> None:
        """Set the running sequences: [m] tokens held and steps to come.

        spared: shared blocks, once for each sequence beyond the first that holds them.
        """
        self._spared_blocks = spared
        if held.size and held.size == self._held_tokens.size and block_size == self._block_size:
            drift = int(held[0] - self._held_tokens[0])
            if (held - drift == self._held_tokens).all() and (steps + drift == self._steps).all():
                self._drift = drift
                return
        self._held_tokens, self._steps, self._drift, self._block_size = held, steps, 0, block_size
        order = np.argsort(-steps, kind="stable")
        l, s = held[order], steps[order]  # noqa: E741
        a, r = np.divmod(l - 1, block_size)
        r += 1
        b, q = np.divmod(s, block_size)
        count = held.size
        self._ends = -s
        self._blocks = np.zeros(count + 1, np.int64)
        np.cumsum(a, out=self._blocks[1:])
        self._above = np.zeros((block_size + 1, count + 1), np.int32)
        np.cumsum(r > np.arange(block_size + 1)[:, None], axis=1, out=self._above[:, 1:])
        n = np.arange(1, count + 1)
        self._peaks = self._blocks[1:] + n * (b + 1) + self._above[block_size - q, n]

    @property
    def blocks(self) -> int:
        """The peak of the running sequences, in blocks."""
        return int(self._living_blocks().max()) if self._peaks.size else 0

    def count_fitting(self, held: Int64, steps: Int64, shared: Int64, room: int) -> int:
        """Return the largest k for which the first k of [n] newcomers can enter together within `room` blocks.

        held, steps: [n] as in run(). shared: [n] blocks of each that running sequences hold already; they are not
        counted again.
        """
        peaks, size = self._living_blocks(), self._block_size
        peak = int(peaks.max()) if peaks.size else 0
        if peak > room:
            return 0
        full = np.cumsum(-(-(held + steps) // size) - shared)
        if peak + int(full[-1]) <= room:
            return held.size
        held, steps = held - self._drift, steps + self._drift
        # At the ends of running sequences; only those at which the newcomers could exceed the room.
        near = peaks + int(full[-1]) > room
        ends = -self._ends[near]
        more = -(-(held[:, None] + ends) // size) - shared[:, None]
        more[steps[:, None] < ends] = 0
        over = (np.cumsum(more, axis=0) + peaks[near] > room).any(axis=1)
        # At the ends of the newcomers, all of them: the end of a later newcomer may be a peak of earlier ones, too.
        at_ends = -(-(held[:, None] + steps) // size) - shared[:, None]
        at_ends[steps[:, None] < steps] = 0
        sums = np.cumsum(at_ends, axis=0) + self._at(steps)
        over |= (sums > room).any(axis=1)
        return int(np.argmax(over)) if over.any() else held.size

    def _living_blocks(self) -> Int64:
        """Return [m] blocks of all sequences that are left when the i-th ends, shared blocks counted once.

        How many blocks are still shared then is estimated in proportion to the sequences that are left.
        """
        count = self._peaks.size
        if not self._spared_blocks or count < 2:
            return self._peaks
        return self._peaks - self._spared_blocks * np.arange(count) // (count - 1)

    def _at(self, steps: Int64) -> Int64:
        """Return [n] blocks of the running sequences `steps` [n] steps after the sums were computed."""
        living = np.searchsorted(self._ends, -steps, side="right")
        b, q = np.divmod(steps, self._block_size)
        blocks = self._blocks[living] + living * (b + 1) + self._above[self._block_size - q, living]
        if self._spared_blocks and self._peaks.size > 1:
            blocks -= self._spared_blocks * np.maximum(living - 1, 0) // (self._peaks.size - 1)
        return np.asarray(blocks, dtype=np.int64)


def ahead(known: Int64, rest: Int64, end: Int64, pace: Pace) -> tuple[Int64, Int64]:
    """Return tokens held and steps to come of [n] sequences that end with `end` tokens in KV.

    known: [n] known tokens. rest: [n] of these still to be computed. The blocks of a prompt are reserved when it
    enters, so they count as held at once. The steps of its chunks and the lookahead are added to the steps to come.
    """
    held = np.minimum(known, end)
    return held, end - held + np.maximum(rest - 1, 0) // pace.max_tokens + pace.lookahead


def free_to_yield(table: SlotTable) -> Rows:
    """Return the rows for which growth has to be estimated: a pinned row has all its blocks reserved already."""
    return np.flatnonzero(table.active[: table.high] & ~table.is_pinned[: table.high])


def set_aside(table: SlotTable) -> int:
    """Return the blocks that are reserved for pinned rows."""
    return int(table.reserved_blocks[: table.high][table.is_pinned[: table.high]].sum())


def at_limit(replica: ReplicaView, candidates: Candidates, pace: Pace) -> int:
    """Return an upper bound of the blocks of all running sequences and candidates, each at its limit."""
    table, size = replica.table, replica.limits.block_size
    sequences = table.count + candidates.known_tokens.size
    each = pace.lookahead + replica.limits.max_model_len // pace.max_tokens + size  # see ahead(); rounded up
    tokens = int(table.limit[: table.high].sum()) + int(candidates.limit.sum()) + sequences * each
    return tokens // size + 1


def of_candidates(candidates: Candidates, end: Int64, pace: Pace) -> tuple[Int64, Int64]:
    """Return ahead() for [n] candidates.

    The running sequences have their token of this step already, so a candidate counts with one token more.
    """
    return ahead(candidates.known_tokens + 1, candidates.known_tokens - candidates.cached_tokens, end, pace)


STALE = 8  # steps for which the limit counts as holding a sequence back, when no further candidate is judged


class Reserve(Memory):
    """Reserve the blocks of prompt + max_tokens at admission, so that a running sequence never lacks memory.

    KV of the last token is never computed, so it is not reserved. Sources: Orca, Algorithm 1; TGI; TensorRT-LLM's
    GUARANTEED_NO_EVICT.
    """

    def admit(self, replica: ReplicaView, candidates: Candidates, pace: Pace) -> Int64:
        return known_blocks(replica, np.maximum(candidates.limit, candidates.known_tokens))


class Watermark(Memory):
    """The blocks of the known tokens, if a share of the pool stays free for running sequences (vLLM, Sarathi: 1 %).

    With share 0 a sequence enters if it fits now (TensorRT-LLM's MAX_UTILIZATION, lmdeploy).
    """

    def __init__(self, share: float = 0.01) -> None:
        self._share = share

    def admit(self, replica: ReplicaView, candidates: Candidates, pace: Pace) -> Int64:
        blocks = known_blocks(replica, candidates.known_tokens)
        room = replica.available - int(self._share * replica.pool.total)
        count = int(np.count_nonzero(np.cumsum(blocks - candidates.shared_blocks) <= room))
        return blocks[: first_of_none(replica, count)]


class PeakEstimate(Memory):
    """The blocks of the known tokens, if the predicted peak of running and entering sequences fits (LightLLM).

    Each sequence is assumed to run to its limit, so the peak is never too low while all of them run at each step. Only
    the number of shared blocks is estimated (Peak).
    """

    def __init__(self) -> None:
        self._peak = Peak()

    def admit(self, replica: ReplicaView, candidates: Candidates, pace: Pace) -> Int64:
        return self.within(replica, candidates, pace, replica.pool.total)

    def within(self, replica: ReplicaView, candidates: Candidates, pace: Pace, room: int) -> Int64:
        """Return what admit() does when the peak may be `room` blocks."""
        blocks, count = available(replica, candidates)
        if count:
            table = replica.table
            rows = free_to_yield(table)
            known = table.known_tokens[rows].astype(np.int64)
            held, steps = ahead(known, known - table.planned_tokens[rows], table.limit[rows].astype(np.int64) - 1, pace)
            size, room = replica.limits.block_size, room - set_aside(table)
            new_held, new_steps = of_candidates(candidates, np.maximum(candidates.limit, candidates.known_tokens), pace)
            longest = int((-(-(held + steps) // size)).sum() + (-(-(new_held + new_steps) // size)).sum())
            if longest > room:  # else they fit even if all reach their longest at once
                self._peak.set_running(held, steps, size, spared_blocks(replica))
                count = self._peak.count_fitting(
                    new_held[:count], new_steps[:count], candidates.shared_blocks[:count], room
                )
        return blocks[: first_of_none(replica, count)]

    def for_replica(self) -> PeakEstimate:
        return PeakEstimate()


class FtAimd(Memory):
    """The peak estimate under a limit in tokens that moves like TCP's window: it starts at the capacity, grows by 100
    at each step while it holds a sequence back and less than 90 % of the pool is used, and falls by 1000 for each
    preempted sequence."""

    def __init__(self) -> None:
        self.limit = 0  # tokens; 0 means not set yet
        self._estimate = PeakEstimate()
        self._held_back = 0  # steps for which the limit still counts as holding a sequence back

    def admit(self, replica: ReplicaView, candidates: Candidates, pace: Pace) -> Int64:
        size = replica.limits.block_size
        self.limit = self.limit or replica.pool.total * size
        blocks = self._estimate.within(replica, candidates, pace, self.limit // size)
        self._held_back = STALE if blocks.size < available(replica, candidates)[1] else 0
        return blocks

    def for_replica(self) -> FtAimd:
        return FtAimd()

    def on_step(self, replica: ReplicaView, preempted: int) -> None:
        if preempted:
            self.limit = max(self.limit - 1000 * preempted, replica.limits.block_size)
        elif self._held_back and roomy(replica, 0.9):
            self.limit += 100
        self._held_back = max(self._held_back - 1, 0)


class Aimd(Memory):
    """The peak estimate under a limit in blocks that moves like TCP's window: it grows by `add` at each step while it
    holds a sequence back and less than `crowd` of the pool is used, and is multiplied by `factor` at a step that
    preempted."""

    def __init__(self, add: float = 4.0, factor: float = 0.9, crowd: float = 0.9) -> None:
        self.limit = 0.0  # blocks; 0 means not set yet
        self._add, self._factor, self._crowd = add, factor, crowd
        self._estimate = PeakEstimate()
        self._held_back = 0

    def admit(self, replica: ReplicaView, candidates: Candidates, pace: Pace) -> Int64:
        self.limit = self.limit or float(replica.pool.total)
        blocks = self._estimate.within(replica, candidates, pace, int(self.limit))
        self._held_back = STALE if blocks.size < available(replica, candidates)[1] else 0
        return blocks

    def for_replica(self) -> Aimd:
        return Aimd(self._add, self._factor, self._crowd)

    def on_step(self, replica: ReplicaView, preempted: int) -> None:
        if preempted:
            self.limit = max(self.limit * self._factor, 1.0)
        elif self._held_back and roomy(replica, self._crowd):
            self.limit += self._add
        self._held_back = max(self._held_back - 1, 0)


class Overcommit(Memory):
    """SGLang's new_token_ratio: a share of the tokens that running sequences may still produce (at most 4096 each) is
    reserved.

    The share falls by a 600th of its range with each step. After a preemption it is the share of their outputs that
    the running sequences have produced so far, with 20 more tokens each. It starts anew when nothing runs. Source:
    https://github.com/sgl-project/sglang, schedule_batch.py.
    """

    first_share, last_share = 0.7, 0.7 * 0.14  # largest and least share
    clip = 4096  # tokens

    def __init__(self) -> None:
        self.ratio = self.first_share

    def admit(self, replica: ReplicaView, candidates: Candidates, pace: Pace) -> Int64:
        table, size = replica.table, replica.limits.block_size
        if not table.count:
            self.ratio = self.first_share
        on = table.active[: table.high]
        left = np.minimum(table.limit[: table.high] - table.applied_tokens[: table.high], self.clip)
        reserved = float(left[on].sum()) * self.ratio
        growth = np.minimum(np.maximum(candidates.limit + 1 - candidates.known_tokens, 0), self.clip)
        need = np.cumsum(candidates.known_tokens - candidates.shared_blocks * size + growth) + size
        count = int(np.count_nonzero(need <= replica.available * size - reserved))
        return known_blocks(replica, candidates.known_tokens)[: first_of_none(replica, count)]

    def for_replica(self) -> Overcommit:
        return Overcommit()

    def on_step(self, replica: ReplicaView, preempted: int) -> None:
        if not preempted:
            self.ratio = max(self.ratio - (self.first_share - self.last_share) / 600, self.last_share)
            return
        table = replica.table
        on, prompt = table.active[: table.high], table.prompt[: table.high]
        produced = int((table.applied_tokens[: table.high] - prompt)[on].sum())
        limit = int((table.limit[: table.high] - prompt)[on].sum())
        self.ratio = min(1.0, (produced + 20 * table.count) / (limit + 1))


def known_blocks(replica: ReplicaView, tokens: Int64) -> Int64:
    """Return [n] blocks that `tokens` [n] need."""
    return -(-tokens // replica.limits.block_size)


def available(replica: ReplicaView, candidates: Candidates) -> tuple[Int64, int]:
    """Return [n] blocks of the known tokens, and how many of the first candidates fit in the blocks available now."""
    blocks = known_blocks(replica, candidates.known_tokens)
    return blocks, int(np.count_nonzero((blocks - candidates.shared_blocks).cumsum() <= replica.available))


def first_of_none(replica: ReplicaView, count: int) -> int:
    """Return `count`, but at least 1 where nothing runs: the first candidate enters whatever the estimate says.

    No running sequence could free memory for it later.
    """
    return count or int(not replica.table.count)


def spared_blocks(replica: ReplicaView) -> int:
    """Return the blocks that several rows hold, once for each row beyond the first."""
    return max(int(replica.table.held_blocks[: replica.table.high].sum()) - replica.pool.referenced, 0)


def roomy(replica: ReplicaView, share: float) -> bool:
    """Return whether less than `share` of the pool is used or reserved."""
    return replica.pool.total - replica.available < share * replica.pool.total


Floats = npt.NDArray[np.floating[Any]]
GOLDEN = 0.6180339887498949
ENOUGH = 32  # finished requests of a group that a forecast needs; else all groups count as one
FEW = 8  # finished requests that a forecast needs at all
KEPT = 256  # latest requests of a group that a forecast uses
GROUPS = 4 * 32  # groups of requests, four for each doubling of max_tokens
WIDE = 1 << 40  # more than any length; keeps the groups apart in one sorted column
MAX_LENGTH = (1 << 31) - 1  # tokens; a length in a snapshot is an int32
RECENT = (16, 64)  # latest lengths of a group that are compared with those before
FAR_OFF = 3.5  # standard errors by which their ranks may be off before the earlier lengths are dropped


class Lengths:
    """Output lengths of finished requests, grouped by their max_tokens: four groups for each doubling.

    A last group, POOLED, has the requests of all groups; it serves the groups that have too few of their own. Kept as
    one sorted column of group * WIDE + output. A group is sorted again at every 16th request of it, so learning takes
    microseconds a request. Where the latest lengths do not look like those before (`count_changed`), the earlier ones
    are dropped.
    """

    POOLED = GROUPS

    def __init__(self) -> None:
        self._latest: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=KEPT))  # group -> latest output lengths
        self._fresh: dict[int, int] = defaultdict(int)  # group -> requests since it was sorted
        self._sorted_lengths: dict[int, Int64] = {}  # group -> its part of the column
        self._column: Int64 = np.zeros(0, np.int64)
        self._end: Int64 = np.zeros(GROUPS + 1, np.int64)  # of each group in the column

    def learn(self, output: int, limit: int) -> None:
        """Add a finished request: `output` tokens of at most `limit`."""
        groups = (min(quarter_octave(limit), GROUPS - 1), self.POOLED)
        if any([self._add(group, output) for group in groups]):
            self._join()

    def snapshot(self) -> dict[int, list[int]]:
        """Return the latest lengths of each group, oldest first: at most GROUPS + 1 times KEPT numbers."""
        return {group: list(latest) for group, latest in self._latest.items()}

    def restore(self, snapshot: Mapping[int, list[int]]) -> None:
        """Take the groups of snapshot(), also some of them alone. Raises ValueError for what it cannot have made."""
        for group, lengths in snapshot.items():
            self.check(group, lengths)
        for group, lengths in snapshot.items():
            self._latest[group] = deque(lengths, maxlen=KEPT)
            self._fresh[group] = 0
            self._sorted_lengths.pop(group, None)
            if len(lengths) >= self._enough(group):
                self._sort(group)
        self._join()

    @classmethod
    def check(cls, group: int, lengths: Sequence[int]) -> None:
        """Raise ValueError unless `lengths` can be those of `group` in a snapshot."""
        if not 0 <= group <= cls.POOLED:
            raise ValueError(f"group {group}: not in 0..{cls.POOLED}")
        if not 1 <= len(lengths) <= KEPT:
            raise ValueError(f"group {group}: {len(lengths)} lengths, not 1..{KEPT}")
        shortest, longest = min(lengths), max(lengths)
        if shortest < 0 or longest > MAX_LENGTH:
            raise ValueError(f"group {group}: lengths of {shortest} to {longest} tokens, not 0..{MAX_LENGTH}")
        if group < GROUPS - 1 and quarter_octave(longest) > group:
            raise ValueError(f"group {group}: a length of {longest} tokens is above any max_tokens of the group")

    def _enough(self, group: int) -> int:
        """Return how many lengths a forecast from this group needs."""
        return FEW if group == self.POOLED else ENOUGH

    def _add(self, group: int, output: int) -> bool:
        """Add a length to a group; return whether the group was sorted again."""
        latest = self._latest[group]
        latest.append(output)
        self._fresh[group] += 1
        enough = self._enough(group)
        if len(latest) < enough or (len(latest) != enough and self._fresh[group] < 16):
            return False
        self._fresh[group] = 0
        if kept := count_changed(np.array(latest, np.int64)):
            self._latest[group] = deque(list(latest)[-kept:], maxlen=KEPT)
        self._sort(group)
        return True

    def _sort(self, group: int) -> None:
        self._sorted_lengths[group] = np.sort(np.array(self._latest[group], np.int64)) + group * WIDE

    def _join(self) -> None:
        """Make the column of the sorted groups."""
        if self._sorted_lengths:
            self._column = np.concatenate([self._sorted_lengths[group] for group in sorted(self._sorted_lengths)])
            self._end = np.searchsorted(self._column, (np.arange(GROUPS + 1) + 1) * WIDE)

    def forecast(self, produced: Int64, limit: Int64, dice: Floats) -> Int64:
        """Return [n] forecast output lengths: the quantile dice [n] of the lengths seen that exceed `produced` [n].

        dice is in [0, 1). A sequence longer than all that were seen is taken to become k times as long with the chance
        1 / k (Pareto), twice in the median. So the ends of several are spread: were all expected at twice the length,
        they would seem to need their most memory at once. While nothing is known the forecast is `produced` + 1: memory
        is then judged by what is used, as Watermark does.
        """
        if not self._column.size:
            return np.minimum(produced + 1, limit)
        column = np.minimum(quarter_octaves(limit), GROUPS - 1)
        begin = np.searchsorted(self._column, column * WIDE)
        group = np.where(self._end[column] > begin, column, self.POOLED)
        first = np.searchsorted(self._column, group * WIDE + produced, side="right")
        left = self._end[group] - first
        at = np.minimum(first + (dice * left).astype(np.int64), self._column.size - 1)
        beyond = np.minimum(produced / (1.0 - dice), limit).astype(np.int64)
        longer = np.where(left > 0, self._column[at] - group * WIDE, np.maximum(beyond, produced + 1))
        return np.minimum(longer, limit)


def count_changed(lengths: Int64) -> int:
    """Return how many of the latest of [n] lengths, oldest first, differ from those before; 0 if none do.

    Were all of one distribution, the share of the earlier lengths below a later one would be uniform in [0, 1], and so
    would be its distance from the middle. The mean of the first is off when lengths become longer or shorter, the mean
    of the second when their spread changes. Off by FAR_OFF standard errors of the rank-sum test (Mann and Whitney
    1947) counts as a change. Equal lengths stand for all ranks that they could have.
    """
    for recent in RECENT:
        before, new = np.sort(lengths[:-recent]), lengths[-recent:]
        size = before.size
        if size < recent:
            break
        low = np.searchsorted(before, new, side="left") / (size + 1)
        high = (np.searchsorted(before, new, side="right") + 1) / (size + 1)
        rank = float((low + high).mean()) / 2
        spread = float(((_folded_integral(high) - _folded_integral(low)) / (high - low)).mean())
        error = float(np.sqrt((recent + size + 1) / (12 * recent * size)))
        if max(abs(rank - 0.5), abs(spread - 0.5)) > FAR_OFF * error:
            return recent
    return 0


def _folded_integral(rank: Floats) -> Floats:
    """Return the integral of |2 u - 1| over u from 0 to `rank`."""
    return np.where(rank < 0.5, rank - rank**2, rank**2 - rank + 0.5)


class Expected(Memory):
    """The blocks of the known tokens, if the forecast's peak leaves a share of the pool free.

    The share grows with each preemption and falls slowly, which damps a storm of preemptions: a step with n preemptions
    adds n * `add`, and a step without one subtracts `add` / `decay`. It stays between `least` and `most`: what one
    storm adds is kept free for hundreds of steps after it.
    """

    def __init__(self, add: float = 0.01, decay: int = 200, least: float = 0.01, most: float = 0.1) -> None:
        self.spare = least  # share of the pool
        self.lengths = Lengths()  # shared by all replicas
        self._add, self._decay, self._min_spare, self._max_spare = add, decay, least, most
        self._peak = Peak()

    def admit(self, replica: ReplicaView, candidates: Candidates, pace: Pace) -> Int64:
        room = int(replica.pool.total * (1.0 - self.spare))
        if at_limit(replica, candidates, pace) <= room:
            return known_blocks(replica, candidates.known_tokens)
        blocks, count = available(replica, candidates)
        if count:
            table, size = replica.table, replica.limits.block_size
            rows = free_to_yield(table)
            known = np.concatenate([table.known_tokens[rows], candidates.known_tokens])
            limit = np.concatenate([table.limit[rows] - 1, candidates.limit])
            prompt = np.concatenate([table.prompt[rows], candidates.prompt])
            end = self._ends(prompt, known, limit, np.concatenate([table.number[rows], np.arange(1, blocks.size + 1)]))
            rest = known - np.concatenate([table.planned_tokens[rows], candidates.cached_tokens])
            held, steps = ahead(known, rest, end, pace)
            room -= set_aside(table)
            if int((-(-(held + steps) // size)).sum()) > room:  # else they fit even if all reach their longest at once
                running = rows.size
                self._peak.set_running(held[:running], steps[:running], size, spared_blocks(replica))
                held, steps = held[running : running + count], steps[running : running + count]
                count = self._peak.count_fitting(held, steps, candidates.shared_blocks[:count], room)
        return blocks[: first_of_none(replica, count)]

    def for_replica(self) -> Expected:
        other = Expected(self._add, self._decay, self._min_spare, self._max_spare)
        other.lengths = self.lengths
        return other

    def on_step(self, replica: ReplicaView, preempted: int) -> None:
        change = self._add * preempted if preempted else -self._add / self._decay
        self.spare = min(max(self.spare + change, self._min_spare), self._max_spare)

    def on_finish(self, prompt: int, output: int, limit: int) -> None:
        self.lengths.learn(output, limit)

    def snapshot(self) -> dict[int, list[int]]:
        return self.lengths.snapshot()

    def restore(self, snapshot: Mapping[int, list[int]]) -> None:
        self.lengths.restore(snapshot)

    def _ends(self, prompt: Int64, known: Int64, limit: Int64, number: Int64) -> Int64:
        """Return [n] tokens in KV at the forecast ends.

        limit: [n] tokens in KV after max_tokens. number: [n] seeds of the quantiles, fixed for a running sequence.
        """
        outputs = self.lengths.forecast(known - prompt, limit + 1 - prompt, number * GOLDEN % 1.0)
        end: Int64 = np.maximum(prompt + outputs - 1, np.minimum(known, limit))
        return end


def quarter_octaves(tokens: Int64) -> Int64:
    """Return [n] quarter_octave() of each of `tokens`, as columns."""
    fraction, exponent = np.frexp(np.maximum(tokens, 1))
    return 4 * (exponent.astype(np.int64) - 1) + (fraction * 8.0).astype(np.int64) - 4
