"""API keys as `orcinus keys` makes them and gateways check them: the text, its digest, and the record in Redis.

A key is `sk-orc-ID-SECRET`: ID finds the record, SECRET is 32 random bytes. Redis holds the digest of the whole text
and never the text. A plain SHA-256 is enough for it: 256 random bits cannot be searched.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import asdict, dataclass, fields

import orjson

from shared.keys import CLASSES

MOST_KEYS = 10_000
"""Every gateway holds all records in memory."""

_FORM = re.compile(r"sk-orc-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key. Limits of 0 are the gateway's own settings; times are seconds of Redis's clock, 0: never."""

    id: str
    digest: str  # hex
    name: str
    tenant: str
    max_priority: str = CLASSES[0]  # the most urgent class that it may ask for
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0
    created_s: int = 0
    expires_s: int = 0
    revoked_s: int = 0

    def encode(self) -> bytes:
        """As it lies in the hash `keys`."""
        return orjson.dumps(asdict(self))

    @classmethod
    def decode(cls, stored: bytes) -> KeyRecord:
        """Raises ValueError or TypeError for what is no record."""
        record = cls(**orjson.loads(stored))
        kinds = {"str": str, "int": int}
        if not all(type(getattr(record, field.name)) is kinds[str(field.type)] for field in fields(cls)):
            raise TypeError("a field is of the wrong type")
        if record.max_priority not in CLASSES:
            raise ValueError(f"there is no class {record.max_priority!r}")
        return record

    def state(self, now_s: float) -> str:
        """active | revoked | expired"""
        if self.revoked_s:
            return "revoked"
        return "expired" if self.expires_s and now_s >= self.expires_s else "active"


def new_key() -> tuple[str, str]:
    """A new key's id and text."""
    key_id = secrets.token_hex(6)
    return key_id, f"sk-orc-{key_id}-{secrets.token_urlsafe(32)}"


def id_of(text: str) -> str | None:
    """The id inside a key's text; None when it is no key of ours."""
    found = _FORM.fullmatch(text)
    return found[1] if found else None


def digest(text: str) -> bytes:
    """SHA-256; of any text that a client can send."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
