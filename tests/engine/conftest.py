"""What the engine's tests share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from services.worker import watchdog
from tests.engine.ranks import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Ranks for replicas, one replica after another."""
    found = Processes()
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def nothing_ends_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker inside the test's own process may want to end it. Then the run would end without a word; so its test
    fails instead, with the reason in its log."""
    statuses: list[int] = []

    def ended(status: int) -> None:
        statuses.append(status)
        threading.Event().wait()  # as little comes after it as after the real one

    monkeypatch.setattr(watchdog, "os", SimpleNamespace(_exit=ended))
    monkeypatch.setattr(watchdog, "_ending", threading.Lock())
    yield
    assert not statuses, "a worker of this test would have ended its process: see the log"
