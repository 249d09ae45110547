"""Begin a Run: the versions that scheduler and worker tell each other, and the scheduler's right to the worker.

The lease in Redis holds the digest of a token that only its scheduler has. A worker compares Hello with that lease and
with its own record, in which `take_worker.lua` has written shard and epoch. So each epoch is one that Redis gave, and a
process that may only read Redis can begin no Run.
"""

from __future__ import annotations

import hashlib
import hmac

from protos import worker_pb2

VERSION = (1, 1)
"""Of worker.proto. The minor one grows with each release that changes the meaning of a message, the major one where the
builds before cannot be served."""
FIRST = (1, 0)
"""Of builds that name none."""


def version() -> worker_pb2.Version:
    """Return this build's version as it goes on the wire."""
    return worker_pb2.Version(major=VERSION[0], minor=VERSION[1])


def wrong_version(peer_version: worker_pb2.Version | None, peer: str, own_name: str) -> str:
    """Return why a peer is refused; empty where it is at most one minor version away.

    peer_version: None where the peer names none. peer, own_name: names of the peer and of this process.
    """
    major, minor = FIRST if peer_version is None else (peer_version.major, peer_version.minor)
    if major == VERSION[0] and abs(minor - VERSION[1]) <= 1:
        return ""
    older = peer if (major, minor) < VERSION else own_name
    return (
        f"version: {peer} speaks {major}.{minor} of worker.proto and {own_name} {VERSION[0]}.{VERSION[1]}, which may "
        f"be one minor version apart; update {older}"
    )


def digest_of(token: str) -> str:
    """Return what the lease holds of a token."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


def wrong_epoch(first: worker_pb2.Step, shard: bytes | None, run_epoch: bytes | None) -> str:
    """Return why the worker's record does not fit the first step of a Run; empty where it does.

    shard, run_epoch: fields of the record; None where Redis has none.
    """
    if shard == first.hello.shard.encode() and run_epoch == str(first.epoch).encode():
        return ""
    return (
        f"epoch: Redis has given this worker to no Run {first.epoch} of shard {first.hello.shard[:100]!r}; take the "
        f"worker again"
    )


def wrong_token(first: worker_pb2.Step, lease: bytes | None, is_known: bool = False) -> str:
    """Return why a scheduler may not begin its Run; empty where it may.

    lease: of the shard that the step names; None where Redis has none. is_known: whether the scheduler needs no token,
    as it runs as the worker's user on its host or has a certificate: one of version 1.0 has none.
    """
    hello = first.hello
    if not lease:
        return f"token: shard {hello.shard[:100]!r} has no lease now; retry once its scheduler has taken it"
    if is_known and not hello.token:
        return ""
    held = lease.partition(b":")[2]
    if not held or not hmac.compare_digest(held, digest_of(hello.token).encode()):
        return f"token: not that of the lease of shard {hello.shard[:100]!r}; update the scheduler, or restart it"
    return ""
