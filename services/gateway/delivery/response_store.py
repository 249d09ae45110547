"""Store responses in Redis, so that later ones may refer to them by `previous_response_id`.

A stored response is its last state and all items of the conversation before its answer. Any gateway reads it, for
`response_retention_s`; `keep.lua` bounds the bytes of all and of a tenant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError
from redis.exceptions import RedisError, ResponseError

from services.gateway.delivery.dispatcher import Dispatcher
from shared.dead_letters import DeadLetters
from shared.redis_client import KEPT_TTL_MS, WRONG_TYPE, Scripts, Unreachable, Value, connect
from shared.settings import GatewaySettings

log = logging.getLogger("orcinus.gateway")

RUNNING = ("queued", "in_progress")
PATIENCE_S = 2.0
"""Time that the end of an answer waits for Redis to store it."""


class StoreOutcome(IntEnum):
    """What became of a response that was to be stored."""

    REFUSED = 0  # it is too large, its client has deleted it, or Redis does not take it
    NEW = 1
    PRESENT = 2  # it is there already, and was left as it is


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """What lies in Redis, as JSON."""

    tenant: str
    response: dict[str, Any]
    input: list[dict[str, Any]]
    """The items of the conversation before the answer, the oldest first."""

    @property
    def items(self) -> list[dict[str, Any]]:
        """Return the conversation with the answer."""
        return [*self.input, *self.response["output"]]

    @property
    def is_running(self) -> bool:
        """Return whether the answer is still to come, as far as the store knows."""
        return self.response["status"] in RUNNING


class _State(BaseModel):
    """What is read of a stored response here."""

    id: str
    status: str
    store: bool
    output: list[dict[str, Any]]


_STORED = TypeAdapter(StoredResponse)


def _parse(raw: bytes | ResponseError) -> StoredResponse:
    if isinstance(raw, ResponseError):
        raise raw
    try:
        response = _STORED.validate_json(raw)
        _State.model_validate(response.response, strict=True)
    except ValidationError as error:
        raise ValueError(str(error)[:200]) from None
    return response


def _owner(entry: bytes | None) -> str:
    """Return the tenant in an entry of `responses:sizes`: bytes and tenant."""
    return (entry or b"").decode().partition(" ")[2]


class ResponseStore:
    """The stored responses of all gateways."""

    def __init__(self, settings: GatewaySettings, dispatcher: Dispatcher, letters: DeadLetters | None = None) -> None:
        self._keys = settings.keys
        self._retention_ms = settings.response_retention_s * 1000
        self._bytes = settings.stored_response_bytes
        self._tenant_bytes = settings.tenant_response_bytes or self._bytes // 2
        self._ask = dispatcher.ask
        self._letters = letters or DeadLetters()
        self._redis: Any = connect(settings, connections=2)
        scripts = Scripts(self._redis)
        self._script = scripts.keep

    @property
    def stores(self) -> bool:
        """Return whether responses are stored at all."""
        return self._retention_ms > 0 and self._bytes > 0

    async def keep(
        self, tenant: str, conversation: bytes, response: dict[str, Any], only_new: bool = False
    ) -> StoreOutcome:
        """Store a response, or its next state. conversation: the items before its answer, JSON; only_new: leave one
        that is there.
        """
        if not self.stores:
            return StoreOutcome.REFUSED
        value = orjson.dumps({"tenant": tenant, "response": response, "input": orjson.Fragment(conversation)})
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._run(response["id"], tenant, value, self._retention_ms, only_new)
        except (*Unreachable, RedisError) as error:
            log.warning("response %s is not stored: %s", response["id"], error)
            return StoreOutcome.REFUSED

    async def find(
        self, response_id: str, tenant: str, hold: Callable[[int], None] | None = None
    ) -> tuple[StoredResponse | None, bool]:
        """Return a stored response of a tenant, and whether it was deleted. hold: called with its bytes before they are
        read, and may raise. Raise ApiError(503).
        """
        stored_bytes, is_deleted = await self.look(response_id, tenant)
        if not stored_bytes:
            return None, is_deleted
        if hold is not None:
            hold(stored_bytes)
        key = self._keys.response(response_id)

        async def read() -> bytes | None:
            value: bytes | None = await self._redis.get(key)
            return value

        raw = await self._ask(read)
        if not raw:  # it has gone just now
            return None, raw is not None
        response = self._letters.read(key, raw, _parse)
        return (response, False) if response is not None and response.tenant == tenant else (None, False)

    async def look(self, response_id: str, tenant: str) -> tuple[int, bool]:
        """Return the bytes of a stored response of a tenant, 0 where there is none, and whether it was deleted. Raise
        ApiError(503).
        """
        key, sizes = self._keys.response(response_id), f"{self._keys.responses}:sizes"

        async def read() -> list[Any]:
            pipe = self._redis.pipeline(transaction=False)
            pipe.exists(key).strlen(key).hget(sizes, response_id)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, RedisError) and WRONG_TYPE not in str(reply):
                    raise reply
            return replies

        exists, size, entry = await self._ask(read)
        stored_bytes = self._letters.read(key, size, int) or 0
        owner = self._letters.read(sizes, entry, _owner)
        is_deleted = bool(exists) and size == 0
        return (stored_bytes if owner == tenant else 0), is_deleted

    async def forget(self, response_id: str, tenant: str, hidden_ms: int = 2 * KEPT_TTL_MS) -> None:
        """Delete a response, and hide the record of its request for a while. Raise ApiError(503)."""
        await self._ask(lambda: self._run(response_id, tenant, b"", hidden_ms))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _run(
        self, response_id: str, tenant: str, value: bytes, kept_ms: int, only_new: bool = False
    ) -> StoreOutcome:
        keys = [self._keys.response(response_id), self._keys.responses]
        bounds = (self._bytes, self._tenant_bytes)
        arguments: list[Value] = [self._keys.response(""), tenant, response_id, value, kept_ms, *bounds, int(only_new)]
        return StoreOutcome(await self._script(keys, arguments))
