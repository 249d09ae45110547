"""Identifiers: unguessable if a client can present them, unique if only services see them."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from typing import NamedTuple


class Endpoint(NamedTuple):
    """An endpoint with requests in the queue."""

    id_prefix: str  # of the ids of its requests
    path: str


ENDPOINTS = {
    "completions": Endpoint("cmpl-", "/v1/completions"),
    "chat": Endpoint("chatcmpl-", "/v1/chat/completions"),
    "responses": Endpoint("resp_", "/v1/responses"),
    "messages": Endpoint("msg_", "/v1/messages"),
    "embeddings": Endpoint("embd-", "/v1/embeddings"),
    "embed": Endpoint("embed-", "/v2/embed"),
    "rerank": Endpoint("rerank-", "/v1/rerank"),
    "score": Endpoint("score-", "/v1/score"),
}
"""By the name in the record of a request. The tasks of a model (`ModelText.tasks`) are some of these names."""


def request_id(endpoint: str) -> str:
    """Return a new id such as `cmpl-...` with 120 random bits, so that no client can guess the id of another."""
    return ENDPOINTS[endpoint].id_prefix + secrets.token_hex(15)


def kind_of(request_id: str) -> str:
    """Return the endpoint of a request id."""
    return next(name for name, endpoint in ENDPOINTS.items() if request_id.startswith(endpoint.id_prefix))


def named_request_id(endpoint: str, tenant: str, secret: bytes, name: str, model: str = "") -> str:
    """Return the id of the request that a tenant calls `name`: a digest of its secret, the endpoint, the name and the
    model, which is empty for the first model of a gateway.
    """
    text = f"{tenant}\n{endpoint}\n{name}" + (f"\n{model}" if model else "")
    digest = hmac.digest(secret or tenant.encode(), text.encode(), "sha256").hex()[:30]
    return ENDPOINTS[endpoint].id_prefix + digest


def process_id(role: str) -> str:
    """Return an id that is unique to this start of this process: role, host, pid and a nonce."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def identity() -> str:
    """Return a new identity for a start of a worker. A different one tells a scheduler that the KV is lost."""
    return secrets.token_hex(8)


def seed() -> int:
    """Return a sampling seed for a request without one."""
    return secrets.randbits(63)
