"""How long a read of the request streams may wait, and what is refused of what it brings.

A class without room is not listened to, and may have some soon.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos import queue_pb2
from services.scheduler.requests.intake import FULL_MS, MAX_PREDICTION, Clock, Intake, decode
from shared.columns import pack
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


def test_adapter_of_a_request_parts_its_prefixes_from_those_of_others() -> None:
    prompts = queue_pb2.Prompts(tokens=[pack([1])])
    wire = queue_pb2.Request(id="r", n=1, max_tokens=1, cache_salt=b"tenant", adapter=bytes(32))
    found = decode(wire, prompts, 0, "g", Clock())
    assert (found.adapter, found.salt) == (bytes(32), b"tenant" + bytes(32))
    wire.adapter = b"short"
    with pytest.raises(ValueError, match="adapter: a digest of 5 bytes; 32 are needed, or none"):
        decode(wire, prompts, 0, "g", Clock())


@pytest.mark.parametrize("prediction", [[0] * (MAX_PREDICTION + 1), [3, -1]])
def test_prediction_that_no_gateway_sends_is_refused(prediction: list[int]) -> None:
    wire = queue_pb2.Request(id="r", n=1, max_tokens=1, prediction=pack(prediction))
    with pytest.raises(ValueError, match="prediction: "):
        decode(wire, queue_pb2.Prompts(tokens=[pack([1])]), 0, "g", Clock())
