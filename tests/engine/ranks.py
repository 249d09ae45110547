"""Replicas of several ranks for tests, and what a test does to the masks of grammars at all of them.

A process is forked from a server that has imported torch once.
"""

from __future__ import annotations

import multiprocessing
import threading
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.engine import ranks
from bench.engine.ranks import TIMEOUT_S, Replica
from services.worker.engine import Engine
from tests.engine.driver import make_engine

_given = threading.Event()


class Processes(ranks.Processes):
    """Ranks with engines of tests."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        super().__init__(context)

    def replica(self, tp: int, pp: int, model: Path, **settings: Any) -> AbstractContextManager[Replica]:
        """Return a replica of small engines."""
        return self.replica_of(tp, pp, partial(make_engine, model, **settings))


def hold_masks(engine: Engine) -> None:
    """Let rows be late, and no mask come until they are given."""
    _given.clear()
    engine.takes_late = True
    _answer_masks(engine, None)


def give_masks(_: Engine) -> None:
    """Let the masks come that are held."""
    _given.set()


def few_masks(engine: Engine) -> None:
    """Let there be masks behind one draft at most."""
    _answer_masks(engine, 2)


def _answer_masks(engine: Engine, most: int | None) -> None:
    compute = engine.grammars.quick.process.masks

    def held(*question: Any) -> list[bytes]:
        assert most or _given.wait(TIMEOUT_S)
        return compute(*question)[:most]

    pytest.MonkeyPatch().setattr(engine.grammars.quick.process, "masks", held)
