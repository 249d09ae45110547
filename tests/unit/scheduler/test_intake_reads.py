"""How long a read of the request streams may wait: a class without room is not listened to, and may have some soon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.scheduler.requests.intake import FULL_MS, Intake
from shared.keys import CLASSES, Keys
from shared.redis_client import BLOCK_MS


class Reader:
    """Notes what it was asked for; nothing has come."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []

    async def xreadgroup(self, group: str, consumer: str, streams: dict[str, str], count: int, block: int) -> list[Any]:
        self.asked.append((list(streams), block))
        return []


@pytest.mark.parametrize(
    ("room", "block"), [([1, 1, 1, 1], BLOCK_MS), ([1, 1, 0, 1], FULL_MS), ([0, 0, 3, 0], FULL_MS)]
)
async def test_a_read_that_leaves_a_class_out_ends_soon(room: list[int], block: int) -> None:
    reader, keys = Reader(), Keys("tiny")
    nothing = cast(Any, SimpleNamespace(register_script=lambda _: None, epoch=1))
    intake = Intake(cast(Any, reader), nothing, nothing, keys, "shard-0", nothing, nothing)
    assert await intake.read(room, one=True) == []
    open_ = [keys.requests(name) for name, left in zip(CLASSES, room, strict=True) if left]
    assert reader.asked == [(open_, block)]
