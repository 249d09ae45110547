"""Bugs that are planted to see that the checker finds them: `python -m tests.simulation --mutants`.

The first four are those of the chaos runs, planted before there was a simulation. The product has none of them and no
switch for them.
"""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from services.gateway.delivery import dispatcher
from services.gateway.delivery.dispatcher import Dispatcher
from services.gateway.delivery.stream import Offer, RequestStream
from services.scheduler.core.kv.prefix_index import Hasher
from services.scheduler.core.kv.transfers import Transfers
from services.scheduler.core.placement.peers import Peers
from services.scheduler.core.results import Results
from services.scheduler.requests.claims import Claims
from services.scheduler.workers import wire
from shared import redis_client
from shared.lease import Lease
from shared.redis_client import source
from tests.chaos.harness.target.planted import BUGS

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


def _code(owner: Any, name: str, before: str, after: str) -> Plant:
    """Replace text in a function of a module or class."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        function = getattr(owner, name)
        found: dict[str, Any] = {}
        text = textwrap.dedent(inspect.getsource(function))
        assert before in text, f"{name}: {before!r} is not in it; plant the bug anew"
        exec(text.replace(before, after), function.__globals__, found)
        with patch.object(owner, name, found[name]):
            yield

    return plant


def _fence(name: str) -> Plant:
    return _script(name, "if redis.call('GET', KEYS[1]) ~= ARGV[1] then", "if false then")


def _takes_gaps(self: RequestStream, row: Any, first: int) -> Offer:
    return _OFFER(self, row, min(first, self.received_tokens[row.choice]) if 0 <= row.choice < self.choices else first)


def _keeps_repeats(self: RequestStream, row: Any, first: int) -> Offer:
    return _OFFER(self, row, max(first, self.received_tokens[row.choice]) if 0 <= row.choice < self.choices else first)


async def _takes_nothing_up(self: Claims) -> bool:
    return False


def _knows_no_parent(self: Hasher, tokens: Any, salt: bytes = b"", before: bytes = b"") -> Any:
    size = self.block_size
    return [_KEYS(self, tokens[at : at + size], salt)[0] for at in range(0, tokens.size - size + 1, size)]


_OFFER, _KEYS = RequestStream.offer, Hasher.keys

_ENDS_FIRST = """\
    for row in end_rows:
        stream.offer(row, stream.received_tokens[row.choice])
    for first, row in rows:"""

MUTANTS: dict[str, Plant] = {
    **{name.replace("_", "-"): plant for name, (_, plant) in BUGS.items()},
    "publish-unfenced": _fence("publish"),
    "claim-unfenced": _fence("claim"),
    "commands-unfenced": _fence("fenced"),
    "worker-taken-unfenced": _fence("take_worker"),
    "lease-without-token": _code(Lease, "take", "secrets.token_hex(16)", '"one"'),
    "epoch-given-twice": _script("lib", "redis.pcall('INCR', counter)", "whole(redis.pcall('GET', counter), 1)"),
    "epoch-of-worker-forgotten": _script("lib", "math.max(counted, now, least)", "math.max(counted, now)"),
    "lease-taken-twice": _script("lease", "if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end", ""),
    "started-counted-twice": _script("publish", "if record[2] and not record[1] then", "if record[2] then"),
    "bytes-not-counted-back": _script("lib", "count_bytes(queue, fields.tenant, -fields.bytes)", ""),
    "grammar-kept": _script(
        "lib", "redis.call('HDEL', grammars, 'requests:' .. grammar, 'text:' .. grammar, 'bytes:' .. grammar)", ""
    ),
    "grammar-dropped-early": _script("lib", "count(grammars, 'requests:' .. grammar, -1) > 0", "false"),
    "grammar-not-sent": _code(wire, "_enter", "sampling.grammar = enter.request.grammar", ""),
    "bucket-not-refunded": _script("publish", "count(bucket, 'running', -1)", ""),
    "entry-not-deleted": _script("lib", "redis.call('XDEL', stream, entry)", ""),
    "record-cut-too-short": _script("publish", "0, 4 * length - 1))", "0, 4 * length - 5))"),
    "gap-taken-as-next": _method(RequestStream, "offer", _takes_gaps),
    "repeat-taken-as-next": _method(RequestStream, "offer", _keeps_repeats),
    "stranded-not-taken-up": _method(Claims, "_has_stranded", _takes_nothing_up),
    "prefix-key-without-parent": _method(Hasher, "keys", _knows_no_parent),
    "claimed-by-two": _script(
        "claim", "redis.call('HSET', ARGV[i], 'shard', ARGV[2], 'epoch', string.match(ARGV[1], '^%d+'))", ""
    ),
    "hole-written": _script("publish", "local whole_record = have >= tonumber(offset)", "local whole_record = true"),
    "stale-lease-renewed": _script(
        "lease", "(holder or string.match(last, '^%S+')) ~= ARGV[3]", "holder and holder ~= ARGV[3]"
    ),
    "epoch-not-risen": _script("lib", "redis.call('SET', counter, epoch)", "redis.call('SET', counter, 0)"),
    "epoch-by-counter": _script("lib", "math.max(counted, now, least)", "math.max(counted, least)"),
    "lost-entry-counted-back": _script("drop", "if waits then", "do"),
    "job-without-wake": _code(Dispatcher, "_put", "self._has_more.set()", "pass"),
    "command-lost-in-outage": _code(Dispatcher, "_put_command", "self._retries.keep(command)", ""),
    "refill-not-copied": _code(dispatcher, "_read_missing", "list(stream.received_tokens)", "stream.received_tokens"),
    "refill-repeats": _code(dispatcher, "_read_missing", "4 * have, -1", "0, -1"),
    "read-before-it-is-copied": _code(
        Transfers, "is_saved", " and self.copied_out >= sequence.saved_kv.copied_blocks", ""
    ),
    "unmapped-peer-read": _code(
        Peers, "acknowledge", "(self.readable if number in mapped else self._refused_peers)", "self.readable"
    ),
    "blocks-of-peer-kept": _code(Transfers, "_complete", "load.tier.give(load.host)", "pass"),
    "load-of-lost-peer-goes-on": _code(Transfers, "abandon", "if not load.orphan]", "if False]"),
    "tier-of-another-run-read": _code(Results, "apply", "result.stale_peers.tolist()", "[]"),
    "ends-before-its-tokens": _code(Dispatcher, "_take_record", "    for first, row in rows:", _ENDS_FIRST),
}
"""By name."""
