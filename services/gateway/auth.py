"""Identify callers by the keys of the settings and those of `orcinus keys`, which are in Redis.

The gateway has all records and looks once a second whether `keys:version` has changed, so a revoked key is refused
within two seconds, at every gateway; requests that run under it continue. A silent Redis leaves the records as they
were: it accepts no new work in any case.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.exceptions import ResponseError
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.errors import RETRY, ApiError, unavailable
from services.gateway.published import PublishedRecords
from services.gateway.request import ARRIVAL, Arrival
from shared.dead_letters import DeadLetters
from shared.keys import CLASSES, Keys
from shared.messages import quote
from shared.redis_client import WRONG_TYPE, connect
from shared.security import api_keys
from shared.security.api_keys import KeyRecord
from shared.settings import GatewaySettings

log = logging.getLogger("orcinus.gateway")

OPEN_PATHS = frozenset({"/health", "/ready", "/health/live", "/health/ready", "/health/progress"})
"""Paths of the public port that need no key."""
USED_EVERY_S = 60.0
"""How coarse `last used` is."""
ANONYMOUS = "anonymous"
DEFAULT_PRIORITY = "normal"


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits of one key; 0 means no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0

    @property
    def arguments(self) -> tuple[int, int, int]:
        """Return the limits in the order of enqueue.lua."""
        return self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests

    def headers(self, requests: int, tokens: int) -> dict[str, str]:
        """Return OpenAI's x-ratelimit-* of an accepted request, given what is left (-1: no limit)."""
        headers = {}
        limits = (("requests", self.requests_per_minute, requests), ("tokens", self.tokens_per_minute, tokens))
        for resource, limit, remaining in limits:
            if limit and remaining >= 0:
                headers[f"x-ratelimit-limit-{resource}"] = str(limit)
                headers[f"x-ratelimit-remaining-{resource}"] = str(remaining)
                headers[f"x-ratelimit-reset-{resource}"] = f"{60 * (limit - remaining) / limit:.3f}s"
        return headers


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant and the limits of the key that sent a request. `salt` keeps tenants from probing each other's prefix
    cache.
    """

    tenant: str
    salt: bytes = b""
    bucket: str = ANONYMOUS
    rates: Rates = Rates()
    max_priority: str = CLASSES[0]
    has_others: bool = False  # there are keys of other tenants
    is_admin: bool = True  # may change what is served: adapters; keys of `orcinus keys` need the scope admin
    is_operator: bool = True  # may see the work of all tenants; keys of `orcinus keys` need the scope ops
    models: frozenset[str] = frozenset()  # that the key is bound to; none means all

    def may_use(self, model: str) -> bool:
        """Return whether the key is for the model of this name, which is no alias."""
        return not self.models or model in self.models

    def priority(self, name: str) -> str:
        """Return the class of a request; name: of the class that it asks for, '' for none. Raise ApiError(403) above
        the key's limit.
        """
        priority = name or max(DEFAULT_PRIORITY, self.max_priority, key=CLASSES.index)
        if CLASSES.index(priority) < CLASSES.index(self.max_priority):
            raise ApiError(
                403,
                f"priority: this key allows at most {self.max_priority}; got {priority}",
                param="priority",
                code="priority_not_allowed",
            )
        return priority


class Keyring:
    """All keys of a gateway. Handlers call `identify`; `run` is a task of the gateway."""

    def __init__(
        self, settings: GatewaySettings, letters: DeadLetters | None = None, models: Iterable[str] = ()
    ) -> None:
        """models: names of all that the gateway serves; none means that of the settings alone.

        Raise ConfigurationError when a key is needed and there is none.
        """
        self._keys = settings.keys
        self._models = [Keys(name) for name in dict.fromkeys((settings.served_model_name, *models))]
        self._requires_key = settings.require_key
        self._configured_digests = [api_keys.digest(key) for key in settings.api_keys()]
        self._rates = Rates(settings.requests_per_minute, settings.tokens_per_minute, settings.concurrent_requests)
        self._redis: Redis = connect(settings, connections=1)
        self._letters = letters or DeadLetters()
        self._source = PublishedRecords("keys", self._redis, KeyRecord.decode, self._letters)
        self.has_looked = self._source.has_looked
        self._records: dict[str, KeyRecord] = {}
        self._had_records = False  # a record is or was there
        self._several = len(self._configured_digests) > 1  # tenants have keys
        self._version: list[bytes | None] = []
        self._secret = b""
        self._ahead_s = 0.0  # Redis's clock minus the clock here
        self._last_uses: dict[str, float] = {}  # key id -> when (Redis's clock), since it was last written
        self._written_at = -USED_EVERY_S
        self.has_read = False
        """Whether Redis was asked: before that its keys are unknown, and so is the secret of the salts."""

    @property
    def needs_key(self) -> bool:
        """Whether requests need a key. Once Redis had one, always: neither its removal nor lost data opens the gateway.

        `keys:version` tells it to gateways that start later.
        """
        return bool(self._configured_digests or self._requires_key or self._had_records)

    def is_open(self) -> bool:
        """Whether requests need no key; False until it is known."""
        return self.has_read and not self.needs_key

    def identify(self, authorization: str | None, api_key: str | None = None) -> Caller:
        """Return the caller that an Authorization header names, or without one an X-Api-Key.

        Raise ApiError(401), and 503 as long as Redis has not said whether there are keys.
        """
        if not self.needs_key:
            if not self.has_read:
                raise _unread()
            return Caller(ANONYMOUS, rates=self._rates)
        if not authorization and api_key:
            authorization = f"Bearer {api_key}"
        scheme, _, text = (authorization or "").partition(" ")
        if not authorization:
            raise _refusal("you didn't provide an API key")
        text = text.strip()
        caller = self._of_redis(text) or self._of_settings(text)
        if caller is None and not self.has_read:
            raise _unread()
        if caller is None or scheme.lower() != "bearer":
            raise _refusal("the API key is not valid")
        return caller

    def salt(self, tenant: str) -> bytes:
        """Return the cache salt of a tenant: the same at every gateway, empty until Redis was read."""
        return hmac.digest(self._secret, tenant.encode(), "sha256")[:16] if self._secret else b""

    async def run(self) -> None:
        """Read the keys from Redis once a second, until cancelled."""
        await self._source.follow(self._look)

    async def close(self) -> None:
        await self._redis.aclose()

    def caller(self, bucket: str) -> Caller | None:
        """Return the caller of a key by the id that `Caller.bucket` has, for work that goes on without a client; None
        for a key that is not there, as when Redis has lost its data. Raise ApiError(401) for one that was revoked or
        has expired.
        """
        if not self.needs_key:
            return Caller(ANONYMOUS, rates=self._rates) if bucket == ANONYMOUS else None
        record = self._records.get(bucket)
        if record is not None:
            if (state := record.state(time.time() + self._ahead_s)) != "active":
                raise _refusal(f"the API key is {state}", "send another key")
            return self._of_record(record)
        return self._of_digest(bucket) if bucket in (digest.hex()[:16] for digest in self._configured_digests) else None

    def _of_redis(self, text: str) -> Caller | None:
        """Return the caller of a key in Redis. The id is part of the key, so the work does not depend on the number of
        keys.
        """
        record = self._records.get(api_keys.id_of(text) or "")
        if record is None or not hmac.compare_digest(api_keys.digest(text).hex(), record.digest):
            return None
        now_s = time.time() + self._ahead_s
        if (state := record.state(now_s)) != "active":
            raise _refusal(f"the API key is {state}", "send another key")
        self._last_uses[record.id] = now_s
        return self._of_record(record)

    def _of_record(self, record: KeyRecord) -> Caller:
        rates = Rates(
            record.requests_per_minute or self._rates.requests_per_minute,
            record.tokens_per_minute or self._rates.tokens_per_minute,
            record.concurrent_requests or self._rates.concurrent_requests,
        )
        salt, is_admin, is_operator = self.salt(record.tenant), record.scope == "admin", bool(record.scope)
        models = frozenset(record.models.split(",")) if record.models else frozenset()
        return Caller(
            record.tenant, salt, record.id, rates, record.max_priority, self._several, is_admin, is_operator, models
        )

    def _of_settings(self, text: str) -> Caller | None:
        digest, matches = api_keys.digest(text), False
        for expected in self._configured_digests:  # all of them, so that the time says nothing
            matches |= hmac.compare_digest(digest, expected)
        return self._of_digest(digest.hex()[:16]) if matches else None

    def _of_digest(self, tenant: str) -> Caller:
        return Caller(tenant, self.salt(tenant), tenant, self._rates, has_others=self._several)

    async def _look(self) -> None:
        keys = self._keys
        names = [keys.keys_version, *(each.model_keys_version for each in self._models), keys.keys_salt]
        pipe: Any = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.get(name)
        pipe.time()
        *replies, time_or_error = await pipe.execute(raise_on_error=False)
        *version, secret = [self._value(name, reply) for name, reply in zip(names, replies, strict=True)]
        if isinstance(time_or_error, Exception):
            raise time_or_error
        seconds, micros = time_or_error
        self._ahead_s = seconds + micros / 1e6 - time.time()
        if not self.has_read or version != self._version:
            self._records, self._version = await self._read_all(), version
            self._had_records |= bool(self._records) or any(each is not None for each in version)
            tenants = {record.tenant for record in self._records.values() if not record.revoked_s}
            self._several = len(tenants) + len(set(self._configured_digests)) > 1
        if secret is None and self.needs_key:
            await self._redis.set(keys.keys_salt, secrets.token_bytes(32), nx=replies[-1] is None)
            secret = await self._redis.get(keys.keys_salt)
        self._secret = secret or b""
        self.has_read = True
        if self._last_uses and time.monotonic() - self._written_at >= USED_EVERY_S:
            last_uses, self._last_uses = self._last_uses, {}
            self._written_at = time.monotonic()
            await self._redis.hset(keys.keys_used, mapping={key: int(at) for key, at in last_uses.items()})

    async def _read_all(self) -> dict[str, KeyRecord]:
        """Return the keys of all models, and those that an older version kept for one of the gateway's models."""
        bound_records: dict[str, KeyRecord] = {}
        for each in self._models:
            old = await self._records_of(each.model_keys)
            bound_records |= {name: replace(record, models=each.model) for name, record in old.items()}
        return bound_records | await self._records_of(self._keys.api_keys)

    def _value(self, key: str, reply: Any) -> Any:
        """Return what a key holds. One of another type closes the gateway to callers without a key."""
        self._had_records |= isinstance(reply, ResponseError) and WRONG_TYPE in str(reply)
        return self._letters.read(key, reply, lambda value: value)

    async def _records_of(self, key: str) -> dict[str, KeyRecord]:
        records: dict[str, KeyRecord] = {}
        try:
            raw_records = await self._source.read(key)
        except ResponseError as error:
            if WRONG_TYPE not in str(error):
                raise
            self._value(key, error)
            return records
        for name, record in raw_records.items():
            if record is None:
                log.error("record of key %s is unreadable, so the key is refused", name)
            records[name] = record or KeyRecord(name, "", "", "", revoked_s=1)
        return records


class RequireKey:
    """Require a key on every path but `open_paths`; a gateway without configured keys requires none."""

    def __init__(self, app: ASGIApp, keyring: Keyring, open_paths: Collection[str]) -> None:
        self._app = app
        self._keyring = keyring
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            caller = self._keyring.identify(headers.get("authorization"), headers.get("x-api-key"))
        except ApiError as error:
            await error.send(send, scope["path"])
            return
        scope["state"]["caller"] = caller
        scope["state"]["tenant"] = caller.tenant
        ARRIVAL.set(Arrival.of({}, b"", caller, time.monotonic()))
        await self._app(scope, receive, send)


class OwnOrigin:
    """On a port that needs no key, take from browsers only what pages of its own origin send.

    Answer 403 unless `Host` is an address, localhost or one of `names`, and to a request that may change something from
    a page of another origin, which a form or a body without a type needs no preflight for. A client without `Host`,
    `Origin` and `Sec-Fetch-Site` is no browser. With a key the key says so: no browser adds it by itself.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str], is_open: Callable[[], bool]) -> None:
        self._app = app
        self._names = frozenset(names)
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" and self._is_open() else None
        if refusal is not None:
            await refusal.send(send, scope["path"])
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host")
        if host is not None and not self._allows(host):
            text = "host not allowed without a key; use an IP address, localhost or a name in ORCINUS_OPS_NAMES"
            return ApiError(403, text, code="host_not_allowed")
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if scope["method"] not in SAFE_METHODS and self._is_foreign(host, origin, site):
            text = (
                f"origin not allowed without a key: {scope['method']} from a page of {quote(origin or site)}; send it "
                "from a page of this address or no page, or put the host of that page in ORCINUS_OPS_NAMES"
            )
            return ApiError(403, text, code="origin_not_allowed")
        return None

    def _is_foreign(self, host: str | None, origin: str | None, site: str | None) -> bool:
        """Return whether a page of another origin sends a request, as CrossOriginProtection of Go's net/http does."""
        page = ""
        if origin is not None:
            with contextlib.suppress(ValueError):
                page = urlsplit(origin.lower()).netloc
            if _without_port(page) in self._names:
                return False
        if site is not None:
            return site not in ("same-origin", "none")
        return origin is not None and page != (host or "").lower()

    def _allows(self, host: str) -> bool:
        name = _without_port(host.lower())
        if name == "localhost" or name in self._names:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Those that change nothing (RFC 9110, section 9.2.1)."""


def _without_port(host: str) -> str:
    if host.endswith("]"):
        return host
    head, colon, port = host.rpartition(":")
    return head if colon and port.isdecimal() else host


def require_operator(request: HTTPConnection) -> None:
    """Raise ApiError(403) for a key without the scope ops; on a port that needs no key all may look."""
    caller: Caller | None = getattr(request.state, "caller", None)
    if caller is not None and not caller.is_operator:
        remedy = "make one with `orcinus keys add NAME --scope ops`"
        text = f"{request.url.path[:200]}: this key lacks the scope ops; {remedy}"
        raise ApiError(403, text, code="scope_not_allowed")


def require_admin(request: HTTPConnection) -> None:
    """Raise ApiError(403) for a key without the scope admin."""
    caller: Caller = request.state.caller
    if not caller.is_admin:
        remedy = "make one with `orcinus keys add NAME --scope admin`"
        text = f"{request.url.path[:200]}: this key lacks the scope admin; {remedy}"
        raise ApiError(403, text, code="scope_not_allowed")


def _unread() -> ApiError:
    """Return the 503 for what may need a key of `orcinus keys`, while Redis has not told them."""
    return unavailable(f"the keys have not been read yet; {RETRY}", "keys_unread", 2)


def _refusal(reason: str, remedy: str = "send it as Authorization: Bearer KEY or as X-Api-Key: KEY") -> ApiError:
    return ApiError(
        401,
        f"{reason}; {remedy}",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
