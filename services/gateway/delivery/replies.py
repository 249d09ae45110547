"""What Redis's replies mean to the gateway."""

from __future__ import annotations

import logging
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.gateway.errors import unavailable
from shared.redis_client import Unreachable

log = logging.getLogger("orcinus.gateway")


def failed(error: Exception) -> Exception:
    """What the client hears when a question got no answer, or none of use; a bug of ours stays what it is."""
    if isinstance(error, Unreachable):
        return unavailable(f"Redis does not answer: {error}", "redis_unavailable", 2)
    if isinstance(error, RedisError) and "OOM" in str(error):
        return unavailable("Redis has no memory left for new requests", "redis_memory", 5)
    if isinstance(error, RedisError):
        log.error("Redis refused a request: %s", error)
        return unavailable(f"Redis refuses: {error}", "redis_refused", 5)
    log.error("a question to Redis failed", exc_info=error)
    return error


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
