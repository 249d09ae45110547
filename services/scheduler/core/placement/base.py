"""The interface of placement: whether a waiting sequence may join the step that a replica plans.

A replica holds its rules in a list, which one constraint asks (constraints.py). To add a rule, such as a limit on the
adapters of a step, write one class and append it to that list.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from services.scheduler.core.sequence import Sequence

MAX_PASSED = 16  # later sequences that may enter before a skipped one that could enter as well
Step = TypeVar("Step")  # the step under construction: StepBuilder


class Verdict(enum.Enum):
    """The answer of a constraint for one waiting sequence."""

    OK = "ok"  # the sequence may join this step
    SKIP = "skip"  # not this sequence; the next one may
    STOP = "stop"  # no sequence may join any more


class Constraint(ABC, Generic[Step]):
    """A rule for joining a step. The first verdict that is not OK wins.

    elsewhere: whether SKIP means that the sequence has to enter on another replica or at another time. Otherwise the
    rule concerns this step alone, and the sequences that enter before a skipped one are counted: after MAX_PASSED of
    them no further sequence enters before it.
    """

    elsewhere: bool = False

    @abstractmethod
    def check(self, step: Step, sequence: Sequence) -> Verdict:
        """Return whether `sequence` may join `step`. Must not change either."""
