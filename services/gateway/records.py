"""What Redis has recorded of a request, as rows for its mailbox (sink.py): the tokens it lacks, then the ends."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from services.gateway.replies import finishes
from services.gateway.sink import Row, Sink
from shared.columns import unpack
from shared.keys import Keys


async def missing(redis: Redis, keys: Keys, sink: Sink) -> tuple[dict[bytes, bytes], list[tuple[int, Row]]]:
    """`req:{id}` (empty when it is gone), and from `out` what the mailbox has not: (index of the first token, row)."""
    pipe: Any = redis.pipeline(transaction=True)
    pipe.hgetall(keys.req(sink.request_id))
    before = list(sink.received)
    for choice, have in enumerate(before):
        pipe.getrange(keys.out(sink.request_id, choice), 4 * have, -1)
    record, *outputs = await pipe.execute()
    rows = []
    for choice, output in enumerate(outputs):
        if tokens := unpack(output[: len(output) // 4 * 4]).tolist():
            rows.append((before[choice], Row(choice, tokens)))
    return record, rows


def ends(record: dict[bytes, bytes], choices: int) -> list[Row]:
    """How the choices ended that have; `missing` gave all their tokens."""
    error = record.get(b"error", b"").decode("utf-8", "replace")
    return [Row(choice, [], finish, error) for choice, finish in finishes(record, choices)]
