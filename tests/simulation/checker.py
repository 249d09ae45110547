"""The checker: what must be true of every run: after each command of Redis, at each client, and at the end.

It knows the tokens of every request beforehand: the simulated worker computes them from prompt, seed and position.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protos import queue_pb2
from shared.keys import GROUP, Keys
from shared.redis_client import source
from shared.wire.columns import unpack
from tests.simulation.clock import Loop, Process, current
from tests.simulation.redis_server import Node
from tests.simulation.worker import continuation

FENCED = ("claim", "publish", "release", "give", "drop", "recount", "fenced", "take_worker", "give_worker")
STOP, LENGTH, CANCELLED, ERROR = 1, 2, 3, 5


@dataclass
class Wanted:
    """One request: what it must produce, and what its client has."""

    name: str
    tokens: list[list[int]]  # by choice, without regard to stop strings
    lengths: list[int]  # by choice, with regard to them
    texts: list[str]  # that the client must see
    reasons: list[str]
    choices: int
    got: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    sent: bool = False
    accepted: bool = False  # the client knows that it runs
    complete: bool = False
    left: bool = False
    left_background: bool = False
    harmed: bool = False  # Redis lost writes since it was sent: it may end as an error, never with other text
    breaks: int = 0  # connections that the client lost: a gateway may have cancelled the request then

    def take(self, event: dict[str, Any], checker: Checker) -> None:
        """Take an event of the stream."""
        for choice in event["choices"]:
            number = choice["index"]
            if self.ended[number]:
                checker.violation(f"{self.name}: choice {number} got {choice} behind its end")
            self.got[number] += choice["text"]
            if not self.texts[number].startswith(self.got[number]):
                checker.violation(
                    f"{self.name}: client has {self.got[number]!r} of choice {number}, expected {self.texts[number]!r}"
                )
            if reason := choice["finish_reason"]:
                self.ended[number] = reason
                if (self.got[number], reason) != (self.texts[number], self.reasons[number]):
                    checker.violation(
                        f"{self.name}: choice {number} ended with {reason} and {self.got[number]!r}, expected "
                        f"{self.reasons[number]} and {self.texts[number]!r}"
                    )

    def end(self, checker: Checker) -> None:
        """Take the end of the stream."""
        self.complete = True
        if not all(self.ended):
            checker.violation(f"{self.name}: the stream ended with the reasons {self.ended}")


class Checker:
    """All that is known of a run, and what was wrong in it."""

    def __init__(self, loop: Loop, node: Node, keys: Keys, letters: Sequence[int], eos: int) -> None:
        self.violations: list[str] = []
        self.requests: dict[str, Wanted] = {}
        self._loop, self._keys, self._letters, self._eos = loop, keys, letters, eos
        self._scripts: dict[bytes, str] = {}  # by digest, as they were loaded: a planted bug may be in one
        lib = len(source("lib")) // 2
        self._heads = {source(name)[lib:].splitlines()[0]: name for name in (*FENCED, "lease", "control")}
        self._holders: dict[str, str] = {}  # key of a lease -> process that acquired it last
        self._acquired: Counter[str] = Counter()  # how often, by key of a lease
        self._call = node.local()
        self._data = node.data
        self._was_held = False
        self._epoch = 0  # the highest that a lease or a Run was given, and that Redis has not lost
        self._lost_epoch = 0  # the highest that it has lost
        self._asked: dict[tuple[str, str], Process] = {}  # commands of gateways that Redis has not carried out
        self._claimers: list[tuple[str, int, int, list[int], int, bytes | None]] = []
        self.published = 0
        node.before.append(self._before)
        node.after.append(self._after)

    def violation(self, text: str) -> None:
        """Note what is wrong; the run ends."""
        if text not in self.violations:
            self._loop.note(f"VIOLATION {text}")
            self.violations.append(text)
            self._loop.stop()

    def loss(self) -> Callable[[], None]:
        """Return what to call when Redis has lost everything since now."""
        holders, epoch = dict(self._holders), self._epoch

        def lose() -> None:
            self._holders = holders
            self._lost_epoch = max(self._lost_epoch, self._epoch)
            self._epoch = epoch
            for wanted in self.requests.values():
                wanted.harmed |= wanted.sent

        return lose

    def holder(self, lease: str) -> tuple[str, int]:
        """Return the process that acquired a lease last, or "", and how often it was acquired."""
        return self._holders.get(lease, ""), self._acquired[lease]

    def asked(self, request: str, kind: str) -> None:
        """Note a command that the running gateway was given: Redis has to carry it out while the gateway lives."""
        if process := current.get():
            self._asked[request, kind] = process

    def wanted(self, fields: dict[str, Any]) -> Wanted:
        """Return the expectation for a request, which is checked from now on."""
        prompt, tokens = fields["prompts"][0], []
        for choice in range(fields["n"]):
            seed = (fields["sampling"].seed + choice) & ((1 << 64) - 1)
            tokens.append(continuation(prompt, seed, fields["max_tokens"], self._letters, self._eos))
        lengths, texts, reasons = [], [], []
        for row in tokens:
            text = "".join(chr(97 + self._letters.index(token)) for token in row if token != self._eos)
            places = [(text.find(stop) + len(stop), text.find(stop)) for stop in fields["stop"] if stop in text]
            if places:
                behind, begin = min(places)
                lengths.append(behind)
                texts.append(text[:begin])
                reasons.append("stop")
            else:
                lengths.append(len(row))
                texts.append(text)
                reasons.append("stop" if row[-1] == self._eos else "length")
        wanted = Wanted(fields["id"], tokens, lengths, texts, reasons, fields["n"])
        wanted.got, wanted.ended = [""] * fields["n"], [""] * fields["n"]
        self.requests[wanted.name] = wanted
        return wanted

    def _name_of(self, words: Sequence[bytes]) -> str:
        return self._scripts.get(words[1], "") if words[0].upper() == b"EVALSHA" else ""

    def _before(self, owner: str, words: Sequence[bytes]) -> None:
        name = self._name_of(words)
        self._was_held = name == "lease" and bool(self._call("EXISTS", words[3]))
        if name == "publish":
            self._claimers = self._rows(words)

    def _rows(self, words: Sequence[bytes]) -> list[tuple[str, int, int, list[int], int, bytes | None]]:
        keys = int(words[2])
        args = words[3 + keys :]
        rows = []
        for entry in range(int(args[7])):
            batch = queue_pb2.TokenBatch.FromString(args[8 + 2 * entry + 1])
            counts, tokens, at = unpack(batch.counts).tolist(), unpack(batch.tokens).tolist(), 0
            for text in batch.errors.values():
                self._loop.note(f"error of a row: {text}")
            columns = zip(
                batch.requests, unpack(batch.choices).tolist(), unpack(batch.first).tolist(), counts, strict=True
            )
            for row, (name, choice, first, count) in enumerate(columns):
                state, shard = self._call("HMGET", self._keys.req(name), "state", "shard")
                claimer = shard if state not in (None, b"finished") else None
                rows.append((name, choice, first, tokens[at : at + count], batch.finish[row], claimer))
                at += count
        return rows

    def _after(self, owner: str, words: Sequence[bytes], reply: Any) -> None:
        self._loop.note(f"redis {owner}: {words[0].decode()} {self._name_of(words)}")
        if words[0] == b"SCRIPT" and words[1] == b"LOAD":
            lines = words[2].splitlines()
            self._scripts[hashlib.sha1(words[2]).hexdigest().encode()] = next(
                (self._heads[line] for line in lines if line in self._heads), ""
            )
        name = self._name_of(words)
        if not name or isinstance(reply, Exception):
            return
        lease = words[3].decode()
        if name == "lease" and words[6] == b"acquire" and reply:
            if self._was_held:
                self.violation(f"{owner} took {lease}, which {self._holders.get(lease)} held")
            self._holders[lease] = owner
            self._acquired[lease] += 1
        if reply and (name == "take_worker" or (name == "lease" and words[6] == b"acquire")):
            # A clock that was set back, before the loss or behind it, may not have reached what was lost.
            seconds, microseconds = map(int, self._call("TIME"))
            is_passed = 100 * seconds + microseconds // 10_000 > self._lost_epoch
            known = max(self._epoch, self._lost_epoch) if is_passed else self._epoch
            if reply <= known:
                self.violation(f"{owner} was given epoch {reply} by {name}, after epoch {known}")
            self._epoch = max(self._epoch, reply)
        if name == "control":
            request, kind = lease.rpartition(":")[2], words[5].decode()
            self._asked.pop((request, f"{kind} {words[9].decode()}" if kind == "stop" else kind), None)
        if name not in FENCED:
            return
        holder = self._holders.get(lease)
        if holder != owner:
            self.violation(f"{name} of {owner} was accepted under {lease}, which {holder} has taken")
        if name == "recount" and reply and not any(wanted.harmed for wanted in self.requests.values()):
            self.violation("the counts of the queue were not those of its entries")
        if name == "publish":
            shard = lease.rpartition(":")[2].encode()
            for request, choice, first, tokens, finish, claimer in self._claimers:
                self._check_row(request, choice, first, tokens, finish)
                harmed = request in self.requests and self.requests[request].harmed
                if claimer is not None and claimer != shard and not harmed:
                    self.violation(f"{shard.decode()} published {request}, which {claimer.decode()} has claimed")

    def _check_row(self, request: str, choice: int, first: int, tokens: list[int], finish: int) -> None:
        self.published += len(tokens)
        wanted = self.requests.get(request)
        if wanted is None:
            self.violation(f"tokens of {request}, which no client sent")
            return
        expected = wanted.tokens[choice][first : first + len(tokens)]
        if tokens != expected:
            self.violation(f"{request}: tokens {tokens} of choice {choice} from {first}, expected {expected}")
        if finish == ERROR and not wanted.harmed:
            self.violation(f"{request}: choice {choice} ended as an error")

    # The end

    def open(self) -> list[str]:
        """Return what has not ended yet."""
        left = [
            f"client of {name}"
            for name, wanted in self.requests.items()
            if not (wanted.complete or wanted.left or wanted.left_background)
        ]
        for name in self.requests:
            state = self._call("HGET", self._keys.req(name), "state")
            if state not in (None, b"finished"):
                left.append(f"record of {name}: {state.decode()}")
        left += [
            f"{kind} of {request}, given to {process.name}"
            for (request, kind), process in self._asked.items()
            if not process.dead
        ]
        left += self._blocks()
        # A gateway that matched no stop string of a background request before it died: another one does, later.
        left += [
            found
            for name, wanted in self.requests.items()
            if wanted.left_background
            for found in self._record(name, wanted)
        ]
        left += [
            f"{stream}: {count} entries"
            for stream in self._keys.request_streams()
            if (count := self._call("XLEN", stream))
        ]
        return left

    def _blocks(self) -> list[str]:
        """Return the shards with last statistics that count blocks in use, though nothing runs."""
        left = []
        for raw in self._call("KEYS", self._keys.lease("*")):
            shard = raw.decode().rpartition(":")[2]
            stats = dict(_pairs(self._call("HGETALL", self._keys.stats(shard))))
            counts = [
                int(stats.get(name, 0))
                for name in (b"blocks_total", b"blocks_free", b"blocks_cached", b"blocks_draining")
            ]
            if counts[0] != sum(counts[1:]):
                left.append(f"blocks of {shard}: {counts[0]} in all, {counts[1:]} free, cached and draining")
            total, free = (int(stats.get(name, 0)) for name in (b"host_blocks_total", b"host_blocks_free"))
            if total != free:
                left.append(f"host blocks of {shard}: {total} in all, {free} free")
        return left

    def check_end(self) -> None:
        """Check what is left when everything has ended."""
        for what in self.open():
            self.violation(f"not ended: {what}")
        if self.violations:
            return
        keys = self._keys
        for counter in self._data.below_zero:
            self.violation(f"{counter}: was below 0")
        kept: Counter[bytes] = Counter()  # by tenant, behind the ends of requests
        for _, row in self._call("XRANGE", keys.queue_kept, "-", "+"):
            kept[row[1]] += int(row[3])
        if (held := {tenant: int(value) for tenant, value in _pairs(self._call("HGETALL", keys.queue_bytes))}) != kept:
            self.violation(f"{keys.queue_bytes}: {held} at the end, and {dict(kept)} are kept")
        for name, value in _pairs(self._call("HGETALL", keys.queue)):
            if int(value) != (kept.total() if name == b"bytes" else 0):
                self.violation(f"queue: {name.decode()} is {int(value)} at the end")
        for key in (keys.queue_tenants, keys.queue_grammars, keys.dead):
            if self._call("EXISTS", key):
                self.violation(f"{key} is left at the end")
        for stream in keys.request_streams():
            if self._call("EXISTS", stream) and (pending := self._call("XPENDING", stream, GROUP)) and pending[0]:
                self.violation(f"{stream}: {pending[0]} pending at the end")
        running = self._call("HGET", keys.bucket("anonymous"), "running")
        if running is not None and int(running) != 0:
            self.violation(f"bucket: {int(running)} requests running at the end")
        for name, wanted in self.requests.items():
            for found in self._record(name, wanted):
                self.violation(found)

    def _record(self, name: str, wanted: Wanted) -> list[str]:
        """Return what is wrong with the record of a request that has ended."""
        record = dict(_pairs(self._call("HGETALL", self._keys.req(name))))
        if b"state" not in record:  # what the prefix cache had may be written behind a loss
            return [f"{name}: its record is gone"] if wanted.accepted and not wanted.harmed else []
        if record[b"state"] != b"finished":
            return [f"{name}: its record is {record[b'state'].decode()}"]
        wrong: list[str] = []
        finish = [int(part) for part in record[b"finish"].split(b",")]
        lengths = [int(part) for part in record[b"lengths"].split(b",")]
        for choice in range(wanted.choices):
            stored = unpack(self._call("GET", self._keys.out(name, choice)) or b"").tolist()
            if stored != wanted.tokens[choice][: lengths[choice]] or len(stored) != lengths[choice]:
                wrong.append(f"{name}: the record of choice {choice} holds {stored}, {lengths[choice]} tokens long")
            complete = wanted.complete or wanted.left_background
            code = STOP if wanted.reasons[choice] == "stop" else LENGTH
            if complete and not wanted.harmed and (finish[choice], lengths[choice]) != (code, wanted.lengths[choice]):
                wrong.append(
                    f"{name}: the record of choice {choice} ends with {finish[choice]} at {lengths[choice]}, expected "
                    f"{code} at {wanted.lengths[choice]}"
                )
            if finish[choice] == ERROR and not wanted.harmed:
                wrong.append(f"{name}: the record of choice {choice} ends with an error {record.get(b'error')!r}")
        return wrong


def _pairs(reply: Any) -> list[tuple[bytes, bytes]]:
    if isinstance(reply, dict):
        return list(reply.items())
    return list(zip(reply[::2], reply[1::2], strict=True))
