"""What the engine's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.ranks import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Ranks for replicas, one replica after another."""
    found = Processes()
    yield found
    found.stop()
