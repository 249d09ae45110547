"""Translate between the gateway's objects and what crosses Redis: requests, deliveries, batches of tokens, records.

Pure: the dispatcher does the calls.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import Any

import orjson
from google.protobuf.message import Message
from redis.exceptions import RedisError

from protos import queue_pb2
from services.gateway.delivery.stream import RequestStream, Row
from services.gateway.errors import unavailable
from services.gateway.request import GenerationSpec, ToolUse
from services.gateway.text.tokenizer import ModelText
from shared.columns import pack, unpack
from shared.keys import CLASSES
from shared.logprobs import split_records
from shared.redis_client import PROMPT_APART_BYTES, Unreachable

log = logging.getLogger("orcinus.gateway")


_SPEC_FIELDS = {field.name for field in dataclasses.fields(GenerationSpec)}


def _common(message: type[Message], *coded: str) -> tuple[str, ...]:
    """Return the fields that a message and the spec have under one name, but those `coded` in another form."""
    return tuple(field.name for field in message.DESCRIPTOR.fields if field.name in _SPEC_FIELDS.difference(coded))


REQUEST_FIELDS = _common(queue_pb2.Request, "prompts")
DELIVERY_FIELDS = _common(queue_pb2.Delivery, "stop_ids", "prompt_texts", "logprobs")


def to_request(spec: GenerationSpec, gateway: str, tenant: str, salt: bytes) -> tuple[queue_pb2.Request, bytes]:
    """Return the message for `requests:{class}` and, when they are big, its prompts for a key of their own."""
    prompts = queue_pb2.Prompts(tokens=[pack(prompt) for prompt in spec.prompts])
    apart = 4 * spec.prompt_tokens > PROMPT_APART_BYTES
    fields: dict[str, Any] = {name: getattr(spec, name) for name in REQUEST_FIELDS}
    fields["class"] = CLASSES.index(spec.priority)
    request = queue_pb2.Request(
        **fields,
        tenant=tenant,
        gateway=gateway,
        prompts=None if apart else prompts,
        prompts_apart=apart,
        stop_token_ids=pack(spec.stop_ids),
        cache_salt=salt,
        created_ms=time.time_ns() // 1_000_000,
    )
    return request, prompts.SerializeToString() if apart else b""


def to_delivery(spec: GenerationSpec, model: ModelText) -> bytes:
    """Return all that another gateway needs to continue the request; kept in its record."""
    text = model.text
    return queue_pb2.Delivery(
        **{name: getattr(spec, name) for name in DELIVERY_FIELDS},
        stop_ids=pack(spec.stop_ids),
        prompt_tails=[pack(text.tail(prompt, spec.skip_special_tokens)) for prompt in spec.prompts],
        prompt_texts=spec.prompt_texts if spec.echo else [],
        logprobs=0 if spec.logprobs is None else spec.logprobs + 1,
        tools_json=b"" if spec.tools is None else orjson.dumps(dataclasses.asdict(spec.tools)),
    ).SerializeToString()


def from_delivery(request_id: str, stored: bytes, priority: str) -> GenerationSpec:
    """Return what is needed to deliver the rest. It cannot be enqueued: prompts and sampling are not stored."""
    wire = queue_pb2.Delivery.FromString(stored)
    fields: dict[str, Any] = {name: getattr(wire, name) for name in DELIVERY_FIELDS}
    fields["stop"] = list(wire.stop)
    return GenerationSpec(
        **fields,
        id=request_id,
        prompts=[unpack(tail).tolist() for tail in wire.prompt_tails],
        prompt_texts=list(wire.prompt_texts),
        max_tokens=0,
        stop_ids=unpack(wire.stop_ids).tolist(),
        sampling=queue_pb2.Sampling(logprobs=wire.logprobs or int(wire.keep > 0)),
        priority=priority,
        logprobs=wire.logprobs - 1 if wire.logprobs else None,
        tools=_tools(wire.tools_json),
    )


def _tools(stored: bytes) -> ToolUse | None:
    if not stored:
        return None
    use = orjson.loads(stored)
    return ToolUse(use["format"], tuple(use["names"]), use["parallel"], use.get("forced", False))


def failed(error: Exception) -> Exception:
    """Return the error that the client gets when a Redis call failed; any other exception is returned as it is."""
    if isinstance(error, Unreachable):
        return unavailable(f"Redis does not answer: {error}", "redis_unavailable", 2)
    if isinstance(error, RedisError) and "OOM" in str(error):
        return unavailable("Redis has no memory left for new requests; retry later", "redis_memory", 5)
    if isinstance(error, RedisError):
        log.error("Redis refused a request: %s", error)
        return unavailable(f"Redis refuses: {error}", "redis_refused", 5)
    log.error("a Redis call failed", exc_info=error)
    return error


def finishes(record: dict[bytes, bytes], choices: int) -> list[tuple[int, int]]:
    """Return (choice, finish) of the choices that have ended by their record; their `out` is complete."""
    if record.get(b"state") == b"finished":
        parts = record.get(b"finish", b"").split(b",")
        return [(choice, int(part)) for choice, part in enumerate(parts[:choices]) if part]
    found = [(choice, int(record.get(b"finish:%d" % choice, b"0"))) for choice in range(choices)]
    return [(choice, finish) for choice, finish in found if finish]


def entries_of(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return the entries of an XREAD of one stream, in either of redis-py's two forms."""
    if not reply:
        return []
    streams = list(reply.values()) if isinstance(reply, dict) else [entries for _, entries in reply]
    found = streams[0]
    # RESP3 wraps each stream's entries in one more list.
    return found[0] if isinstance(reply, dict) and found and isinstance(found[0], list) else found


def rows_of(batch: queue_pb2.TokenBatch) -> Iterator[tuple[str, int, Row]]:
    """Yield request, index of the first token, and row, for each row of a batch. Raise ValueError for a broken one."""
    choices, first = unpack(batch.choices).tolist(), unpack(batch.first).tolist()
    counts, tokens = unpack(batch.counts).tolist(), unpack(batch.tokens).tolist()
    logprobs = split_records(batch.logprobs, unpack(batch.logprob_sizes), len(counts)).tolist()
    finish, offset = batch.finish, 0
    for index, request_id in enumerate(batch.requests):
        end = offset + counts[index]
        error = batch.errors.get(index, "")
        yield request_id, first[index], Row(choices[index], tokens[offset:end], finish[index], error, logprobs[index])
        offset = end


def ends(record: dict[bytes, bytes], choices: int) -> list[Row]:
    """Return the ends of the finished choices; the dispatcher has read all their tokens."""
    error = record.get(b"error", b"").decode("utf-8", "replace")
    return [Row(choice, [], finish, error) for choice, finish in finishes(record, choices)]


def fill(stream: RequestStream, record: dict[bytes, bytes], rows: list[tuple[int, Row]]) -> None:
    """Put the rows of a record into a stream that gets nothing else."""
    for first, row in rows:
        stream.offer(row, first)
    for row in ends(record, stream.choices):
        stream.offer(row, stream.received[row.choice])
