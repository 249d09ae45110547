"""What a process that is about to serve tells Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shared.processes.heap import importing, settle


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.unfreeze()
    gc.set_threshold(*before)


def test_what_lives_at_start_is_never_walked_again_and_full_collections_are_rare(
    thresholds: tuple[int, int, int],
) -> None:
    early: list[object] = [[]]
    settle()
    late: list[object] = [[]]
    watched = {id(each) for each in gc.get_objects()}
    assert id(early) not in watched and id(late) in watched
    young, middle, full = gc.get_threshold()
    assert young * middle * full == 1_000_000


@pytest.mark.usefixtures("thresholds")
def test_an_import_has_no_collections_also_one_that_fails() -> None:
    with pytest.raises(ModuleNotFoundError), importing():
        assert not gc.isenabled()
        raise ModuleNotFoundError
    assert gc.isenabled() and gc.get_freeze_count() > 0
