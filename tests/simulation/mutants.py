"""Bugs that are planted to see that the checker finds them: `python -m tests.simulation --mutants`.

The first four are those of the chaos runs, planted before there was a simulation. The product has none of them and no
switch for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np

from services.gateway.delivery.background import OrphanAdopter
from services.gateway.delivery.stream import HeldFinishes, Offer, RequestStream
from services.scheduler.core.kv.prefix_index import Hasher
from services.scheduler.requests import intake, publisher
from services.scheduler.requests.claims import Claims
from services.scheduler.requests.commands import Commands
from services.scheduler.requests.handover import RequestHandover
from services.scheduler.workers.link import WorkerLink
from shared import redis_client
from shared.redis_client import Unavailable, source
from tests.chaos.harness.planted import BUGS

Plant = Callable[[], contextlib.AbstractContextManager[Any]]


def _script(name: str, before: str, after: str) -> Plant:
    """Replace text in a script, or in what all scripts begin with (`lib`)."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        def edited(asked: str) -> bytes:
            text = source(asked)
            if name not in (asked, "lib"):
                return text
            assert before.encode() in text, f"{name}.lua: {before!r} is not in it; plant the bug anew"
            return text.replace(before.encode(), after.encode())

        with patch.object(redis_client, "source", edited):
            yield

    return plant


def _method(owner: Any, name: str, replacement: Any) -> Plant:
    return lambda: patch.object(owner, name, replacement)


def _fence(name: str) -> Plant:
    return _script(name, "if redis.call('GET', KEYS[1]) ~= ARGV[1] then", "if false then")


def _takes_gaps(self: RequestStream, row: Any, first: int) -> Offer:
    return _OFFER(self, row, min(first, self.received[row.choice]) if 0 <= row.choice < self.choices else first)


def _keeps_repeats(self: RequestStream, row: Any, first: int) -> Offer:
    return _OFFER(self, row, max(first, self.received[row.choice]) if 0 <= row.choice < self.choices else first)


def _releases_at_once(self: HeldFinishes, choice: int) -> Callable[[], None]:
    release = _HOLD(self, choice)
    release()
    return release


async def _publishes_once(what: str, action: Any, log: Any, stopping: Any = None) -> Any:
    with contextlib.suppress(*Unavailable):
        return await action()


async def _takes_nothing_up(self: Claims) -> bool:
    return False


async def _adopts_nothing(self: OrphanAdopter, gateway: str) -> None:
    """Leave the requests of a dead gateway."""


def _knows_no_parent(self: Hasher, tokens: Any, salt: bytes = b"", before: int = 0) -> Any:
    size = self.block_size
    parts = [_KEYS(self, tokens[at : at + size], salt) for at in range(0, tokens.size - size + 1, size)]
    return np.concatenate(parts) if parts else _KEYS(self, tokens[:0])


def _reads_tails_with_holes(requests: Any, batches: Any) -> None:
    """Take the rows behind a gap, too."""
    by_id = {request.id: request for request in requests}
    for batch in batches:
        at = 0
        columns = (
            batch.requests,
            *(intake.unpack(getattr(batch, name)).tolist() for name in ("choices", "first", "counts")),
        )
        for name, choice, _, count in zip(*columns, strict=True):
            tokens = intake.unpack(batch.tokens)[at : at + count]
            at += count
            if (request := by_id.get(name)) is not None and request.outputs is not None:
                joined = np.concatenate([request.outputs[choice], tokens])
                request.outputs[choice] = joined[: request.max_tokens]


async def _gives_and_keeps(self: RequestHandover, limit: int = 1 << 30) -> int:
    entries = list(self._entries.values())[:limit]
    return await self.release(self._lease, entries)


def _drops_commands(self: Commands, payload: bytes) -> str:
    control = _TAKE_CONTROL(payload)
    kind = control.WhichOneof("command") or ""
    if kind in ("cancel", "stop", "adopt") and getattr(control, kind).id in self._held:
        self._execute(control)
    return kind


_OFFER, _HOLD, _KEYS = RequestStream.offer, HeldFinishes.hold, Hasher.keys
_TAKE_CONTROL = intake.queue_pb2.Control.FromString

MUTANTS: dict[str, Plant] = {
    **{name.replace("_", "-"): plant for name, (_, plant) in BUGS.items()},
    "publish-unfenced": _fence("publish"),
    "claim-unfenced": _fence("claim"),
    "release-unfenced": _fence("release"),
    "lease-taken-twice": _script("lease", "if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end", ""),
    "lease-renewed-after-loss": _script("lease", "if holder ~= ARGV[3] and (holder or", "if false and (holder or"),
    "request-released-twice": _script("release", " and record[2] == ARGV[i + 2] then", " then"),
    "request-given-from-anywhere": _script("give", "elseif record[2] == ARGV[3] and record[3] == entry then", "else"),
    "started-counted-twice": _script("publish", "if record[2] and not record[1] then", "if record[2] then"),
    "bytes-not-counted-back": _script("lib", "if bytes > 0 then count_bytes(queue, tenant, -bytes) end", ""),
    "bucket-not-refunded": _script("publish", "count(bucket, 'running', -1)", ""),
    "entry-not-deleted": _script("lib", "redis.call('XDEL', stream, entry)", ""),
    "record-cut-too-short": _script("publish", "0, 4 * length - 1))", "0, 4 * length - 5))"),
    "cancel-before-claim-ignored": _script("claim", "if record[2] then verdict = 1 end", ""),
    "late-stop-ignored": _script("publish", "if at and at >= 0 and", "if false and"),
    "gap-taken-as-next": _method(RequestStream, "offer", _takes_gaps),
    "repeat-taken-as-next": _method(RequestStream, "offer", _keeps_repeats),
    "end-told-before-written": _method(HeldFinishes, "hold", _releases_at_once),
    "publish-not-repeated": _method(publisher, "persist", _publishes_once),
    "stranded-not-taken-up": _method(Claims, "_stranded", _takes_nothing_up),
    "orphans-not-adopted": _method(OrphanAdopter, "adopt_from", _adopts_nothing),
    "prefix-key-without-parent": _method(Hasher, "keys", _knows_no_parent),
    "tails-with-holes": _method(intake, "extend", _reads_tails_with_holes),
    "handed-back-and-kept": _method(RequestHandover, "hand_back", _gives_and_keeps),
    "early-command-dropped": _method(Commands, "take", _drops_commands),
    "hung-worker-kept": _method(WorkerLink, "waited_s", lambda self: 0.0),
}
"""By name."""
