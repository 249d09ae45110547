"""The peak estimate with the lengths that requests turn out to have, instead of max_tokens: the memory of `orcinus`.

What was learned is thrown dice with: each sequence is taken to end at a quantile of its own of the lengths that are
possible after what it has produced, so that the ends in the forecast are spread as the real ones are. Source of the
idea: "Past-Future Scheduler" (LightLLM, ASPLOS '25); the dice are the golden ratio's multiples, the same in every run.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from services.scheduler.core.parts.memory import available, first_of_none, spared
from services.scheduler.core.parts.peak import Peak, ahead, free_to_yield, set_aside
from services.scheduler.core.policy import Entrants, Pace
from services.scheduler.core.queues import quarter_octave
from services.scheduler.core.table import Int64

if TYPE_CHECKING:
    from services.scheduler.core.replica import Replica

Floats = npt.NDArray[np.floating[Any]]
GOLDEN = 0.6180339887498949
ENOUGH = 32  # requests that a forecast needs
KEPT = 256  # latest ones that it is made of
GROUPS = 4 * 32  # quarter octaves of max_tokens
WIDE = 1 << 40  # more than any length


class Lengths:
    """Outputs of finished requests by quarter octave of their max_tokens, a sorted column of group * WIDE + output.

    A group is sorted anew at every 16th request of it, so learning costs microseconds a request.
    """

    def __init__(self) -> None:
        self._latest: dict[int, deque[int]] = {}
        self._fresh: dict[int, int] = {}
        self._sorted: dict[int, Int64] = {}
        self._column: Int64 = np.zeros(0, np.int64)
        self._end: Int64 = np.zeros(GROUPS, np.int64)  # of each group in the column

    def learn(self, output: int, limit: int) -> None:
        group = min(quarter_octave(limit), GROUPS - 1)
        self._latest.setdefault(group, deque(maxlen=KEPT)).append(output)
        self._fresh[group] = self._fresh.get(group, 0) + 1
        if self._fresh[group] < 16 or len(self._latest[group]) < ENOUGH:
            return
        self._fresh[group] = 0
        self._sorted[group] = np.sort(np.array(self._latest[group], np.int64)) + group * WIDE
        known = sorted(self._sorted)
        self._column = np.concatenate([self._sorted[g] for g in known])
        self._end = np.searchsorted(self._column, (np.arange(GROUPS) + 1) * WIDE)

    def expected(self, produced: Int64, limit: Int64, dice: Floats) -> Int64:
        """[n] outputs: of the lengths seen that are longer than `produced` the quantile dice [n] in [0, 1).

        `limit` where the group has no forecast, or none that is longer.
        """
        group = np.minimum(quarter_octaves(limit), GROUPS - 1)
        first = np.searchsorted(self._column, group * WIDE + produced, side="right")
        left = self._end[group] - first
        if not left.any():
            return limit
        at = np.minimum(first + (dice * left).astype(np.int64), self._column.size - 1)
        return np.where(left > 0, np.minimum(self._column[at] - group * WIDE, limit), limit)


class Expected:
    """The blocks of the known tokens, if the forecast's peak leaves a share of the pool free.

    That share grows with every preemption and falls slowly, so that a storm is damped: n preemptions in a step add n
    times `add` to it, and each step without one takes `add` / `decay` away.
    """

    learns = True

    def __init__(self, add: float = 0.01, decay: int = 200, least: float = 0.01, most: float = 0.5) -> None:
        self.spare = least  # share of the pool
        self.lengths = Lengths()  # of all replicas' requests
        self._add, self._decay, self._least, self._most = add, decay, least, most
        self._peak = Peak()

    def admit(self, replica: Replica, entrants: Entrants, pace: Pace) -> Int64:
        blocks, count = available(replica, entrants)
        if count:
            table, size = replica.table, replica.limits.block_size
            rows = free_to_yield(table)
            known = np.concatenate([table.known[rows], entrants.known])
            limit = np.concatenate([table.limit[rows] - 1, entrants.limit])
            prompt = np.concatenate([table.prompt[rows], entrants.prompt])
            end = self._ends(prompt, known, limit, np.concatenate([table.number[rows], np.arange(1, blocks.size + 1)]))
            rest = known - np.concatenate([table.planned[rows], entrants.cached])
            held, steps = ahead(known, rest, end, pace)
            room = int(replica.pool.total * (1.0 - self.spare)) - set_aside(table)
            if int((-(-(held + steps) // size)).sum()) > room:  # else they fit even if all were longest at once
                running = rows.size
                self._peak.run(held[:running], steps[:running], size, spared(replica))
                held, steps = held[running : running + count], steps[running : running + count]
                count = self._peak.fitting(held, steps, entrants.shared[:count], room)
        return blocks[: first_of_none(replica, count)]

    def another(self) -> Expected:
        other = Expected(self._add, self._decay, self._least, self._most)
        other.lengths = self.lengths
        return other

    def stepped(self, replica: Replica, preempted: int) -> None:
        change = self._add * preempted if preempted else -self._add / self._decay
        self.spare = min(max(self.spare + change, self._least), self._most)

    def finished(self, prompt: int, output: int, limit: int) -> None:
        self.lengths.learn(output, limit)

    def _ends(self, prompt: Int64, known: Int64, limit: Int64, number: Int64) -> Int64:
        """[n] tokens in KV when they end, by the forecast; `limit`: when they have all they asked for."""
        outputs = self.lengths.expected(known - prompt, limit + 1 - prompt, number * GOLDEN % 1.0)
        end: Int64 = np.maximum(prompt + outputs - 1, np.minimum(known, limit))
        return end


def quarter_octaves(tokens: Int64) -> Int64:
    """[n] quarter_octave() of each."""
    fraction, exponent = np.frexp(np.maximum(tokens, 1))
    return 4 * (exponent.astype(np.int64) - 1) + (fraction * 8.0).astype(np.int64) - 4
