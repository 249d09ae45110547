"""What the engine's tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker import watchdog
from tests.engine.ranks import Processes
from tests.support.checkpoints.models import Reference, make_llama


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Ranks for replicas, one replica after another."""
    found = Processes()
    yield found
    found.stop()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """Make a model, once for equal fields; a test leaves its directory as it is."""

    made: dict[str, Reference] = {}

    def make(**fields: Any) -> Reference:
        key = repr(sorted(fields.items()))
        if key not in made:
            made[key] = make_llama(tmp_path_factory.mktemp("model") / "tiny", **fields)
        return made[key]

    return make


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, models: Callable[..., Reference]) -> Reference:
    """Return the model that the module's MODEL describes, and what transformers answers for it."""
    return models(**request.module.MODEL)


@pytest.fixture(autouse=True)
def nothing_ends_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker inside the test's own process may want to end it. Then the run would end without a word; so its test
    fails instead, with the reason in its log."""
    statuses: list[int] = []

    def ended(status: int) -> None:
        statuses.append(status)
        threading.Event().wait()  # as little comes after it as after the real one

    monkeypatch.setattr(watchdog, "os", SimpleNamespace(_exit=ended))
    monkeypatch.setattr(watchdog, "ending", threading.Lock())
    yield
    assert not statuses, "a worker of this test would have ended its process: see the log"
