"""Replicas of several ranks of one process each: what an error leaves, and what memory."""

from __future__ import annotations

import weakref
from typing import ClassVar

import pytest

from bench.engine.ranks import Make
from services.worker.engine import Engine
from services.worker.parallel.state import ParallelState
from shared.errors import RankError
from tests.engine.ranks import Processes


class Heavy(Engine):
    """An engine in a circle of references, as real ones are, that has no room beside another one."""

    made: ClassVar[weakref.WeakSet[Heavy]] = weakref.WeakSet()

    def __init__(self, parallel: ParallelState) -> None:
        assert not self.made, "no room beside the engine before"
        self.itself = self
        self.made.add(self)


def fails_at_leader(parallel: ParallelState) -> Heavy:
    if parallel.is_leader:
        raise ValueError("no memory")
    parallel.texts("a rank that waits for the leader")
    raise AssertionError("the leader did not leave")


def fails_behind_leader(parallel: ParallelState) -> Heavy:
    if not parallel.is_leader:
        raise ValueError("no memory")
    parallel.texts("a leader that waits for a rank")
    raise AssertionError("the rank did not leave")


def test_engines_of_a_replica_are_gone_before_the_next_is_made(processes: Processes) -> None:
    for _ in range(2):
        with processes.replica_of(2, 1, Heavy):
            pass


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (fails_at_leader, ValueError, "no memory"),
        (fails_behind_leader, RankError, "rank 0: .*rank 1: ValueError: no mem"),
    ],
)
def test_processes_serve_another_replica_after_an_error(
    processes: Processes, make: Make, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text), processes.replica_of(2, 1, make):
        pass
    with processes.replica_of(2, 1, Heavy) as replica:
        assert isinstance(replica.engine, Heavy)
