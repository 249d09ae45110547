"""What Redis has of requests, as rows for their mailboxes (stream.py): what an iteration produced, and what the records
say of one, which are the tokens it lacks and the ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redis.asyncio import Redis

from protos import queue_pb2
from services.gateway.delivery.replies import finishes
from services.gateway.delivery.stream import RequestStream, Row
from shared.columns import unpack
from shared.keys import Keys
from shared.logprobs import split_records


def rows_of(batch: queue_pb2.TokenBatch) -> Iterator[tuple[str, int, Row]]:
    """Request, index of the first token, and row, of each row of a batch. Raises ValueError for one that is broken."""
    choices, first = unpack(batch.choices).tolist(), unpack(batch.first).tolist()
    counts, tokens = unpack(batch.counts).tolist(), unpack(batch.tokens).tolist()
    logprobs = split_records(batch.logprobs, unpack(batch.logprob_sizes), len(counts)).tolist()
    finish, offset = batch.finish, 0
    for index, request_id in enumerate(batch.requests):
        end = offset + counts[index]
        error = batch.errors.get(index, "")
        yield request_id, first[index], Row(choices[index], tokens[offset:end], finish[index], error, logprobs[index])
        offset = end


async def missing(redis: Redis, keys: Keys, stream: RequestStream) -> tuple[dict[bytes, bytes], list[tuple[int, Row]]]:
    """`req:{id}` (empty when it is gone), and from `out` what the mailbox has not: (index of the first token, row)."""
    pipe: Any = redis.pipeline(transaction=True)
    pipe.hgetall(keys.req(stream.request_id))
    before, size = list(stream.received), stream.record_bytes
    for choice, have in enumerate(before):
        pipe.getrange(keys.out(stream.request_id, choice), 4 * have, -1)
        if size:
            pipe.getrange(keys.logprobs(stream.request_id, choice), size * have, -1)
    record, *found = await pipe.execute()
    outputs, logprobs = (found[::2], found[1::2]) if size else (found, [b""] * len(found))
    rows = []
    for choice, output in enumerate(outputs):
        if tokens := unpack(output[: len(output) // 4 * 4]).tolist():
            rows.append((before[choice], Row(choice, tokens, logprobs=logprobs[choice][: size * len(tokens)])))
    return record, rows


def ends(record: dict[bytes, bytes], choices: int) -> list[Row]:
    """How the choices ended that have; `missing` gave all their tokens."""
    error = record.get(b"error", b"").decode("utf-8", "replace")
    return [Row(choice, [], finish, error) for choice, finish in finishes(record, choices)]


def fill(stream: RequestStream, record: dict[bytes, bytes], rows: list[tuple[int, Row]]) -> None:
    """Puts what `missing` gave into a mailbox that gets nothing else."""
    for first, row in rows:
        stream.offer(row, first)
    for row in ends(record, stream.choices):
        stream.offer(row, stream.received[row.choice])
