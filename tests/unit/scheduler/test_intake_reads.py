"""How long a read of the request streams may wait, and what is refused of what it brings.

A class without room is not listened to, and may have some soon.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos import queue_pb2
from services.scheduler.core.types import NewRequest
from services.scheduler.requests.intake import FULL_MS, MAX_PREDICTION, MAX_TOKENS, Clock, Intake, decode
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


POOLED = {"pooling": 2, "segments": pack([1]), "label_ids": pack([1, 2])}
Sampling = queue_pb2.Sampling


def decoded(**changes: Any) -> NewRequest:
    wire = queue_pb2.Request(**{"id": "a", "n": 1, "max_tokens": 1} | changes)
    return decode(wire, queue_pb2.Prompts(tokens=[pack([5])]), 0, "g", Clock())


def test_request_at_the_bounds_is_taken() -> None:
    assert decoded(sampling=Sampling(logprobs=21)).payload.sampling.logprobs == 21
    assert decoded(sampling=Sampling(prompt_logprobs=21)).scored == [1]
    assert decoded(**POOLED).max_tokens == 1


def test_adapter_of_a_request_parts_its_prefixes_from_those_of_others() -> None:
    found = decoded(cache_salt=b"tenant", adapter=bytes(32))
    assert (found.adapter, found.salt) == (bytes(32), b"tenant" + bytes(32))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sampling": Sampling(logprobs=22)}, "^logprobs: 21 tokens besides the sampled one; ask for at most 20"),
        ({"sampling": Sampling(prompt_logprobs=22)}, "prompt_logprobs: 21 tokens"),
        ({"max_tokens": MAX_TOKENS + 1}, f"max_tokens={MAX_TOKENS + 1}, min_tokens=0: at most {MAX_TOKENS}"),
        ({"min_tokens": (1 << 32) - 1}, f"max_tokens=1, min_tokens=4294967295: at most {MAX_TOKENS}"),
        ({"adapter": b"short"}, "adapter: a digest of 5 bytes; 32 are needed, or none"),
        ({"prediction": pack([0] * (MAX_PREDICTION + 1))}, "prediction: "),
        ({"prediction": pack([3, -1])}, "prediction: "),
        (POOLED | {"pooling": 3}, "pooling 3"),
        (POOLED | {"max_tokens": 2}, "pooling 2, max_tokens=2"),
        (POOLED | {"sampling": Sampling(logprobs=1)}, "no logprobs"),
        (POOLED | {"sampling": Sampling(prompt_logprobs=1)}, "no logprobs"),
        (POOLED | {"segments": pack([1, 1])}, "segments: 2 for 1 prompts"),
        (POOLED | {"segments": pack([-1])}, "segments: 1 for 1 prompts, or one below 0"),
        (POOLED | {"label_ids": pack([1])}, "label ids: 4 bytes"),
    ],
)
def test_request_that_no_gateway_sends_is_unservable(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decoded(**changes)
