"""What Redis's replies mean to the gateway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis

from services.gateway.errors import ApiError


def refused(answer: list[Any], most_tokens: int, retry_after_s: Callable[[float], float]) -> ApiError | None:
    """Why enqueue.lua did not take a request; retry_after_s: when so many waiting tokens will have run."""
    if answer[0] == b"full":
        return ApiError(
            429,
            f"the queue is full: {answer[1]} prompt tokens wait, at most {most_tokens} may",
            code="queue_full",
            retry_after_s=retry_after_s(float(answer[1])),
        )
    if answer[0] == b"rate":
        return ApiError(
            429,
            f"rate limit reached: {answer[2].decode()}",
            code="rate_limit_exceeded",
            retry_after_s=answer[1] / 1000,
        )
    return None


def taken_over() -> ApiError:
    """For the older of two connections that read one request."""
    return ApiError(409, "the request goes on over another connection", code="taken_over")


async def record_of(redis: Redis, key: str) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = await redis.hgetall(key)  # type: ignore[assignment]
    return found


def finishes(record: dict[bytes, bytes], choices: int) -> list[tuple[int, int]]:
    """(choice, finish) of the choices that a record says have ended; their `out` is whole."""
    if record.get(b"state") == b"finished":
        parts = record.get(b"finish", b"").split(b",")
        return [(choice, int(part)) for choice, part in enumerate(parts[:choices]) if part]
    found = [(choice, int(record.get(b"finish:%d" % choice, b"0"))) for choice in range(choices)]
    return [(choice, finish) for choice, finish in found if finish]


def entries_of(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of an XREAD of one stream, in either form in which redis-py gives them."""
    if not reply:
        return []
    streams = list(reply.values()) if isinstance(reply, dict) else [entries for _, entries in reply]
    found = streams[0]
    # RESP3 wraps each stream's entries in one more list.
    return found[0] if isinstance(reply, dict) and found and isinstance(found[0], list) else found
