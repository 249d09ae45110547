"""Identifiers: unguessable where a client can present them, unique where only services see them."""

from __future__ import annotations

import hmac
import os
import secrets
import socket

BEGINNINGS = {"completions": "cmpl-", "chat": "chatcmpl-", "responses": "resp_"}


def request_id(endpoint: str) -> str:
    """`cmpl-...` and the like, 120 random bits: whoever knows it may not guess another."""
    return BEGINNINGS[endpoint] + secrets.token_hex(15)


def kind_of(made: str) -> str:
    """The endpoint that a request id was made for."""
    return next(endpoint for endpoint, beginning in BEGINNINGS.items() if made.startswith(beginning))


def named_request_id(endpoint: str, tenant: str, secret: bytes, name: str) -> str:
    """The id of the request that a tenant calls `name`; as unguessable as the tenant's secret and the name together."""
    digest = hmac.digest(secret or tenant.encode(), f"{tenant}\n{endpoint}\n{name}".encode(), "sha256").hex()[:30]
    return BEGINNINGS[endpoint] + digest


def process_id(role: str) -> str:
    """Unique to this start of this process: role, host, pid and a nonce."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def identity() -> str:
    """New at each start of a worker; a scheduler that sees another one knows that KV is gone."""
    return secrets.token_hex(8)


def seed() -> int:
    """A sampling seed for a request that named none."""
    return secrets.randbits(63)
