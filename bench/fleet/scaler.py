"""The rule of deploy/kubernetes/overlays/autoscaling as Kubernetes' autoscaler applies it (autoscaling/v2): the
age of the queue as a ratio to what there is (Value), the sequences as so many a replica (AverageValue), the larger of
the two, slowed by windows and policies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TOLERANCE = 0.1  # a ratio so near to 1 changes nothing


@dataclass(frozen=True, slots=True)
class Rule:
    """Times in s. The defaults are those of the overlay (a test compares)."""

    least: int = 1
    most: int = 8
    polling_s: float = 15.0
    age_s: float = 2.0  # of the oldest request that waits
    sequences: float = 32.0  # that run or wait, for each replica
    up_window_s: float = 30.0
    up_factor: float = 1.0  # so much of what there is may come ...
    up_count: int = 2  # ... or so many
    up_period_s: float = 180.0
    down_window_s: float = 900.0
    down_count: int = 1
    down_period_s: float = 300.0
    startup_s: float = 180.0  # until a new replica serves: not the rule's, the world's


class Scaler:
    """Asked once a poll."""

    def __init__(self, rule: Rule, there: int) -> None:
        self.rule = rule
        self._asked: list[tuple[float, int]] = [(0.0, there)]  # what the metrics asked for, and when
        self._changes: list[tuple[float, int]] = []  # when replicas were added (+) or taken (-)

    def wanted(self, now_s: float, there: int, age_s: float, sequences: int) -> int:
        """How many there should be from now on."""
        rule = self.rule
        ratios = (age_s / rule.age_s, sequences / (rule.sequences * there))
        asked = max(there if abs(ratio - 1) <= TOLERANCE else math.ceil(there * ratio) for ratio in ratios)
        asked = min(max(asked, rule.least), rule.most)
        self._asked.append((now_s, asked))
        oldest = now_s - max(rule.up_window_s, rule.down_window_s)
        self._asked = [(at, count) for at, count in self._asked if at >= oldest]
        up = min(count for at, count in self._asked if at >= now_s - rule.up_window_s)
        down = max(count for at, count in self._asked if at >= now_s - rule.down_window_s)
        found = there
        if up > there:
            added = self._changed(now_s, rule.up_period_s, 1)
            before = there - added
            found = min(up, max(math.ceil(before * (1 + rule.up_factor)), before + rule.up_count))
            found = max(found, there)
        elif down < there:
            taken = self._changed(now_s, rule.down_period_s, -1)
            found = min(there, max(down, there - rule.down_count + taken))
        if found != there:
            self._changes.append((now_s, found - there))
        return found

    def _changed(self, now_s: float, period_s: float, sign: int) -> int:
        """Replicas added, or taken, within the period."""
        return sum(abs(by) for at, by in self._changes if at > now_s - period_s and by * sign > 0)
