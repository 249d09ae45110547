"""The one question of placement: may a waiting sequence join the step that a replica plans?

Every rule that bears on it is a Constraint; a replica holds them in a list (constraints.py). A further rule, such as a
limit on the adapters of a step, is one class that is appended to that list.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from services.scheduler.core.sequence import Sequence

MAX_PASSED = 16  # later sequences that may go before one that could enter, too
Step = TypeVar("Step")  # the step under construction: StepBuilder


class Verdict(enum.Enum):
    """The answer of a constraint for one waiting sequence."""

    OK = "ok"  # the sequence may join this step
    SKIP = "skip"  # not this sequence; the next one may
    STOP = "stop"  # no sequence may join any more


class Constraint(ABC, Generic[Step]):
    """A rule for joining a step. The first verdict that is not OK wins.

    elsewhere: SKIP means that other replicas or another time are for the sequence. Else the rule is about this step
    alone, and the sequences that enter in front of a skipped one are counted: after MAX_PASSED of them none enters
    before it does.
    """

    elsewhere: bool = False

    @abstractmethod
    def check(self, step: Step, sequence: Sequence) -> Verdict:
        """Return whether `sequence` may join `step`. Must not change either."""
