"""Decode what other processes wrote; set aside what cannot be read, and go on with the rest.

Every record, message and reply that a service reads from Redis goes through `DeadLetters.read`. A record that its
decoder refuses is counted, logged, and kept as a row for the list `dead`, which the service appends with its next
write. The row names the key, the reason and the size, and holds the first bytes. A broken record that stays in its key
is read again and again, so it is noted once.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.exceptions import ResponseError, WatchError

from shared.redis_client import WRONG_TYPE, Value, temporary

log = logging.getLogger("orcinus")

T = TypeVar("T")
R = TypeVar("R")

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, DecodeError)
"""What a decoder raises for contents that no service writes."""

ROWS = 1000
"""Rows of `dead`."""
PENDING = 32
"""Rows that wait for the next write; further ones are only counted."""
REMEMBERED = 1024
"""Records that are known to be broken."""
KEY_CHARS = 200
TEXT_CHARS = 300
CONTENT_BYTES = 256


def text(raw: bytes, limit: int = 512) -> str:
    """Return a name or word. Raises ValueError for bytes that are not UTF-8, and for more than `limit` of them."""
    if len(raw) > limit:
        raise ValueError(f"{len(raw)} bytes, at most {limit}")
    return raw.decode()


def integer(raw: bytes | str | None, low: int = 0, high: int = (1 << 53) - 1, default: int = 0) -> int:
    """Return a whole number in decimal digits, `default` for a missing one.

    Raises ValueError for any other text and for a number outside [low, high].

    >>> integer(b"12"), integer(None, default=3)
    (12, 3)
    """
    if raw is None:
        return default
    if len(raw) > 20:
        raise ValueError(f"a number of {len(raw)} characters")
    number = int(raw)
    if not low <= number <= high:
        raise ValueError(f"{number} is not in {low}..{high}")
    return number


class DeadLetters:
    """What one service read and could not decode."""

    def __init__(self, member: str = "", count: Callable[[str], None] = lambda _: None) -> None:
        """member: the service, as it stands in the rows. count: called with the kind of key of each broken record."""
        self._member = member
        self._count = count
        self._known_places: OrderedDict[int, None] = OrderedDict()
        self._rows: list[dict[str, Value]] = []

    def read(self, key: str, raw: R, decode: Callable[[R], T]) -> T | None:
        """Return decode(raw); None for a record that cannot be read, which is set aside.

        raw: what Redis answered: bytes, a hash, or the error of a command on a key of another type. Raises any other
        error that Redis answered.
        """
        if isinstance(raw, Exception):
            if not isinstance(raw, ResponseError) or (temporary(raw) and WRONG_TYPE not in str(raw)):
                raise raw
            self.add(key, b"", str(raw))
            return None
        try:
            return decode(raw)
        except UNREADABLE as error:
            self.add(key, raw, f"{type(error).__name__}: {error}")
            return None

    def read_all(self, key: str, raws: Iterable[R], decode: Callable[[R], T]) -> list[T]:
        """Return those of `raws` that can be read."""
        values = (self.read(key, raw, decode) for raw in raws)
        return [value for value in values if value is not None]

    def add(self, key: str, raw: Any, reason: str) -> None:
        """Set aside a record of `key`, unless it is known."""
        content = raw if isinstance(raw, bytes) else repr(raw).encode("utf-8", "replace")
        place = hash((key, content))
        if place in self._known_places:
            self._known_places.move_to_end(place)
            return
        self._known_places[place] = None
        if len(self._known_places) > REMEMBERED:
            self._known_places.popitem(last=False)
        self._count(kind_of(key))
        text = printable(reason)
        log.error("record of %s set aside: %s", printable(key), text)
        if len(self._rows) < PENDING:
            row: dict[str, Value] = {"member": self._member, "key": printable(key, KEY_CHARS), "text": text}
            self._rows.append(row | {"bytes": len(content), "content": content[:CONTENT_BYTES]})

    def take(self) -> list[dict[str, Value]]:
        """Return the rows since the last call, for `dead`."""
        rows, self._rows = self._rows, []
        return rows


async def remove_foreign(redis: Redis, letters: DeadLetters, types: Mapping[str, str]) -> None:
    """Delete keys of another type than their writers give them: every command on them fails. types: by key."""
    pipe = redis.pipeline(transaction=False)
    for key in types:
        pipe.type(key)
    replies = await pipe.execute() if types else []
    for (key, expected_type), reply in zip(types.items(), replies, strict=True):
        if reply.decode() in (expected_type, "none"):
            continue
        connection: Any = redis.pipeline()
        async with connection:
            await connection.watch(key)  # another service may have deleted it since, and written to it
            kind = (await connection.type(key)).decode()
            if kind in (expected_type, "none"):
                continue
            connection.multi()
            connection.delete(key)
            with contextlib.suppress(WatchError):
                await connection.execute()
                letters.add(key, b"", f"a key of type {kind}, not {expected_type}; deleted")


def append(key: str, row: Mapping[str, Value], time_ms: int) -> list[Value]:
    """Return the command that appends a row to `dead`. key: of `dead`."""
    words: list[Value] = [word for item in ({"time_ms": time_ms} | dict(row)).items() for word in item]
    return ["XADD", key, "MAXLEN", "~", ROWS, "*", *words]


def kind_of(key: str) -> str:
    """Return the kind of a key, for a metric's label.

    >>> kind_of("orcinus:{demo}:tokens:gateway-1"), kind_of("Describe")
    ('tokens', 'Describe')
    """
    return key.rpartition("}:")[2].partition(":")[0][:40]


def printable(words: str, limit: int = TEXT_CHARS) -> str:
    """Return text for a log: printable, at most `limit` characters."""
    return "".join(char if char.isprintable() else "?" for char in words[:limit])
