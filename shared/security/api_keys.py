"""API keys, made by `orcinus keys` and checked by gateways: the text, its digest, and the record in Redis.

A key is `sk-orc-ID-SECRET`. ID selects the record; SECRET is 32 random bytes. Redis holds the digest of the text and
never the text. A plain SHA-256 is enough, because 256 random bits cannot be searched.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import asdict, dataclass, fields

import orjson

from shared.keys import CLASSES
from shared.models.hub import is_repository
from shared.models.models_file import MAX_MODELS

SCOPES = ("ops", "admin")
"""What a key may beyond requests: `ops` sees the live page, `admin` loads adapters, too."""
MAX_KEYS = 10_000
"""Bound on the keys in a Redis: every gateway holds all records in memory."""

_NAME = re.compile(r"[a-z0-9._-]{1,128}")
_FORM = re.compile(r"sk-orc-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key. A limit of 0 uses the gateway's setting. Times are seconds of Redis's clock; 0 means never."""

    id: str
    digest: str  # hex
    name: str
    tenant: str
    max_priority: str = CLASSES[0]  # the most urgent class that the key allows
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0
    created_s: int = 0
    expires_s: int = 0
    revoked_s: int = 0
    scope: str = ""  # one of SCOPES, or empty
    models: str = ""  # names of the models that the key is for, separated by commas; empty means all

    def encode(self) -> bytes:
        """Return the record as the hash `keys` stores it; without an empty scope or
        models, which older gateways do not know.
        """
        fields = asdict(self)
        return orjson.dumps({name: value for name, value in fields.items() if value or name not in ("scope", "models")})

    @classmethod
    def decode(cls, raw: bytes) -> KeyRecord:
        """Return the record in `raw`. Raises ValueError or TypeError if it is not a record."""
        record = cls(**orjson.loads(raw))
        kinds = {"str": str, "int": int}
        if not all(type(getattr(record, field.name)) is kinds[str(field.type)] for field in fields(cls)):
            raise TypeError("key record: a field has the wrong type")
        if record.max_priority not in CLASSES:
            raise ValueError(f"key record: no class {record.max_priority!r}")
        if record.models and not are_models(record.models):
            raise ValueError(f"key record: {record.models[:100]!r} names no models")
        if record.scope not in ("", *SCOPES):
            raise ValueError(f"key record: no scope {record.scope!r}")
        return record

    def state(self, now_s: float) -> str:
        """Return active, revoked or expired."""
        if self.revoked_s:
            return "revoked"
        return "expired" if self.expires_s and now_s >= self.expires_s else "active"


def are_models(text: str) -> bool:
    """Return whether a text is names of models, separated by commas."""
    names = text.split(",")
    return len(names) <= MAX_MODELS and all(is_repository(name) or _NAME.fullmatch(name) for name in names)


def new_key() -> tuple[str, str]:
    """Return the id and the text of a new key."""
    key_id = secrets.token_hex(6)
    return key_id, f"sk-orc-{key_id}-{secrets.token_urlsafe(32)}"


def id_of(text: str) -> str | None:
    """Return the id in a key's text; None if the text is not a key of `orcinus keys`."""
    match = _FORM.fullmatch(text)
    return match[1] if match else None


def digest(text: str) -> bytes:
    """Return the SHA-256 of any text that a client can send."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def describe_refusal(reason: str, has_key: bool) -> str:
    """Return the line of a client that a server refused (401): the server's reason, and the options of our commands."""
    problem = reason.partition("; send ")[0]  # a header is of no use to a command
    printable = "".join(char if char.isprintable() else "?" for char in problem[:200])
    another = "set ORCINUS_API_KEY to another, or give it as --api-key"
    return f"{printable}; {another if has_key else 'set ORCINUS_API_KEY, or give --api-key'}"
