"""The simulated Redis beside real servers: the same generated calls of the real scripts give the same answers and leave
the same keys.

Each call runs on both before the next one. Ids of entries and times of the clock differ between the two; both are named
by the order in which they appear.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import redis as redis_client

from shared.keys import CLASSES, GROUP, Keys
from shared.redis_client import KEPT_TTL_MS, LIVE_TTL_MS, STREAM_KEEP_MS, source
from tests.integration.redis.script_calls import server as server  # the fixture
from tests.simulation.redis_server import Server, Socket
from tests.support.stack import RedisServer

KEYS = Keys("tiny")
SHARDS = ("shard-0", "shard-1")
NAMES = [f"r{number}" for number in range(6)]
SCRIPTS = {name: source(name) for name in ("enqueue", "claim", "publish", "release", "control", "lease", "give", "drop",
                                           "fenced", "take_worker", "give_worker", "forget", "recount")}  # fmt: skip
ID = re.compile(rb"^\d{13}-\d+$")
CLOCK_MS = re.compile(rb"^1[789]\d{11}$")
CLOCK_CS = re.compile(rb"^1[789]\d{10}( \d+)?$")


class Both:
    """A real server and the simulated one."""

    def __init__(self, real: str) -> None:
        self.real = redis_client.Redis.from_url(real, protocol=2)
        self.replies: list[Any] = []
        self.data = Server()
        self.fake = Socket(self.data, self.replies.append)
        self.entries: list[tuple[bytes, bytes]] = []  # ids of the same entry at both
        self.numbers: list[int] = []  # of each entry; equal where ids are, as in two streams within a millisecond
        self.epochs: dict[str, tuple[int, int]] = {}

    def add_entry(self, real: bytes, fake: bytes) -> None:
        """Note an entry that both have added."""
        alike = {
            number
            for number, pair in zip(self.numbers, self.entries, strict=True)
            if pair[0] == real or pair[1] == fake
        }
        lowest = min(alike, default=len(self.entries))
        self.numbers = [lowest if number in alike else number for number in self.numbers] + [lowest]
        self.entries.append((real, fake))

    def run(self, side: int, *words: Any) -> Any:
        """Run a command at the real one (0) or the simulated one (1); return the reply as it came, also an error."""
        encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        if side == 1:
            self.fake.run_words(encoded)
            return self.replies.pop()
        connection = self.real.connection_pool.get_connection()
        try:
            connection.send_command(*encoded)
            return connection.read_response()
        except redis_client.ResponseError as error:
            return error
        finally:
            self.real.connection_pool.release(connection)

    def call(self, *words: Any) -> tuple[Any, Any]:
        """Run a command at both: a pair (at the real one, at the simulated one) stands for a word that differs."""
        found = [self.run(at, *(word[at] if isinstance(word, tuple) else word for word in words)) for at in range(2)]
        real, fake = self.named(found[0], 0), self.named(found[1], 1)
        assert real == fake, f"{words[:3]}: the real server answers {real}, the simulated one {fake}"
        return found[0], found[1]

    def script(self, name: str, keys: list[str], *args: Any) -> tuple[Any, Any]:
        return self.call("EVAL", SCRIPTS[name], len(keys), *keys, *args)

    def named(self, reply: Any, side: int) -> Any:
        """Return a reply with what depends on the clock replaced."""
        if isinstance(reply, (list, tuple)):
            return [self.named(item, side) for item in reply]
        if isinstance(reply, dict):
            return [self.named(item, side) for pair in reply.items() for item in pair]
        if isinstance(reply, Exception):
            return str(reply).split(" script: ")[0].removeprefix("ERR ")
        if isinstance(reply, str):
            reply = reply.encode()
        if isinstance(reply, bytes):
            for number, pair in zip(self.numbers, self.entries, strict=True):
                if pair[side] == reply:
                    return f"entry {number}"
            if CLOCK_MS.match(reply) or ID.match(reply):
                return "a time"
            if CLOCK_CS.match(reply):
                return "an epoch" + reply[12:].decode()
            return reply
        if isinstance(reply, int) and 170_000_000_000 <= reply < 200_000_000_000:
            return "an epoch"
        if isinstance(reply, int) and 1_700_000_000_000 <= reply < 2_000_000_000_000:
            return "a time"
        return reply

    def keyspace(self, side: int) -> dict[str, Any]:
        """Return what one of them holds, as named."""
        held: dict[str, Any] = {}
        for key in sorted(self.run(side, "KEYS", "*")):
            kind = self.run(side, "TYPE", key)
            kind = kind if isinstance(kind, bytes) else kind.encode()
            if kind == b"hash":
                flat = self.run(side, "HGETALL", key)
                value: Any = sorted((flat[i], self.named(flat[i + 1], side)) for i in range(0, len(flat), 2))
            elif kind == b"string":
                value = self.named(self.run(side, "GET", key), side)
            elif kind == b"set":
                value = sorted(self.run(side, "SMEMBERS", key))
            elif kind == b"stream":
                value = self.named(self.run(side, "XRANGE", key, "-", "+"), side)
            else:
                value = self.run(side, "ZRANGE", key, 0, -1)
            ttl = self.run(side, "PTTL", key)
            held[key.decode()] = (kind, value, -1 if ttl < 0 else round(ttl / 20_000))
        return held


def play(both: Both, seed: int, calls: int) -> None:
    """Make generated calls on both."""
    draw = random.Random(seed)
    for stream in KEYS.request_streams():
        both.call("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
    held: dict[str, tuple[str, tuple[bytes, bytes], str]] = {}  # request -> stream, entry, shard
    for _ in range(calls):
        name, shard = draw.choice(NAMES), draw.choice(SHARDS)
        epoch: Any = both.epochs.get(shard, (1, 1)) if draw.random() < 0.9 else 7
        lease = KEYS.lease(shard)
        kind = draw.choice(["enqueue", "enqueue", "lease", "claim", "publish", "publish", "control", "release", "give",
                            "drop", "recount", "fenced", "worker", "forget", "lapse"])  # fmt: skip
        if kind == "enqueue":
            keys = [KEYS.queue, KEYS.background, KEYS.background_of("g")]
            args: list[Any] = [LIVE_TTL_MS, "g", 0.75]
            for one in draw.sample(NAMES, draw.randrange(1, 4)):
                class_name = draw.choice(CLASSES)
                keys += [KEYS.req(one), KEYS.requests(class_name), KEYS.bucket("a"), KEYS.prompt(one)]
                args += [
                    draw.randbytes(draw.randrange(40)), draw.choice([b"", b"prompts"]), draw.randrange(1, 50), 120,
                    draw.randrange(1, 500), 0, 0, draw.choice([0, 2]), draw.choice(["alice", "bob"]), class_name,
                    b"\x00\xffdelivery", draw.choice(["", one]), draw.choice([60, 100]), draw.choice([0, 0, 1]),
                    draw.choice([0, 9000]), draw.choice([0, 5000]),
                    draw.choice([0, 0, 700]), draw.choice([0, 0, 600]),
                    *draw.choice([("", ""), ("sha256:1", b"text"), ("sha256:2", b"\x00\xffother text")]),
                ]  # fmt: skip
            for real, fake in zip(*both.script("enqueue", keys, *args), strict=True):
                if real[0] == b"ok":
                    both.add_entry(real[1], fake[1])
        elif kind == "lease":
            keys = [lease, KEYS.epoch, KEYS.shard_epoch(shard)]
            verb = draw.choice(["acquire", "acquire", "renew", "release"])
            real, fake = both.script("lease", keys, verb, 600_000, epoch, LIVE_TTL_MS)
            if verb == "acquire" and real:
                both.epochs[shard] = (real, fake)
        elif kind == "claim":
            streams = KEYS.request_streams()
            real, fake = both.call(
                "XREADGROUP", "GROUP", GROUP, shard, "COUNT", 2, "STREAMS", *streams, *[">"] * len(streams)
            )
            args = []
            for (stream, rows), (_, others) in zip(real or [], fake or [], strict=True):
                for (entry, _), (other, _) in zip(rows, others, strict=True):
                    here = [entry, stream]  # ids are unique in a stream alone
                    owner = next((n for n in NAMES if both.real.hmget(KEYS.req(n), "entry", "stream") == here), "gone")
                    held[owner] = (stream.decode(), (entry, other), shard)
                    args.append(KEYS.req(owner))
            if args:
                both.script("claim", [lease], epoch, shard, *args)
        elif kind == "publish":
            stream, entry, _ = held.get(name, (KEYS.requests("normal"), (b"1-1", b"1-1"), shard))
            first, count = draw.randrange(4), draw.randrange(4)
            tokens = draw.randbytes(4 * count)
            finish = draw.choice([0, 0, 1, 2])
            words: list[Any] = [epoch, KEYS.prefix, GROUP, LIVE_TTL_MS, KEPT_TTL_MS, STREAM_KEEP_MS]
            words += [draw.choice([0, 0, 1])]
            words += [1, draw.choice("gh"), draw.randbytes(9)]
            words += [1, name, 0, 4 * first, tokens, finish, first + count]
            words += [1, name] if draw.random() < 0.5 else [0]
            ends = draw.random() < 0.3
            words += [1, name, stream, entry, draw.choice("1234"), 10, draw.randrange(5), ""] if ends else [0]
            words += [1, name, 0, 8 * draw.randrange(3), draw.randbytes(8)]
            both.script("publish", [lease, KEYS.queue], *words)
        elif kind == "control":
            verb = draw.choice(["cancel", "stop", "adopt"])
            more: list[Any] = [0, draw.randrange(4)] if verb == "stop" else []
            gateway, tenant = draw.choice(["g", "h", ""]), draw.choice(["", "alice", "bob"])
            both.script("control", [KEYS.req(name)], KEYS.prefix, verb, b"command", gateway or "g", tenant, *more)
        elif name in held and kind == "release":
            stream, entry, _ = held[name]
            both.script("release", [lease, KEYS.queue], epoch, GROUP, KEYS.req(name), stream, entry, b"again")
            ids = both.real.hget(KEYS.req(name), "entry"), both.data.dbs[0].get(KEYS.req(name).encode())
            if ids[0] and ids[1] is not None:
                pair = ids[0], bytes(dict(ids[1].value.getall())[b"entry"])
                if pair not in both.entries:
                    both.add_entry(*pair)
        elif name in held and kind == "give":
            stream, entry, owner = held[name]
            other = SHARDS[1 - SHARDS.index(owner)]
            args = [both.epochs.get(owner, (1, 1)), GROUP, owner, other, KEYS.req(name), stream, entry]
            both.script("give", [KEYS.lease(owner), KEYS.queue], *args)
        elif name in held and kind == "drop" and draw.random() < 0.3:
            stream, entry, _ = held[name]
            both.script("drop", [lease, KEYS.queue], epoch, GROUP, stream, entry, "")
        elif kind == "recount":
            both.script("recount", [lease, KEYS.queue], epoch, draw.choice([1, 100]))
        elif kind == "fenced":
            both.script("fenced", [lease, KEYS.events], epoch, 4, "HSET", KEYS.stats(shard), "n", draw.randrange(9))
        elif kind == "worker":
            both.call("HSET", KEYS.worker("w"), "ready", draw.choice("011"))
            keys = [lease, KEYS.worker("w"), KEYS.epoch, KEYS.worker("w")]
            both.script("take_worker", keys, epoch, shard, KEYS.prefix, draw.choice([0, 0, 199_900_000_000]))
            both.script("give_worker", [lease, KEYS.worker("w")], epoch, shard, draw.choice([epoch, 3]))
        elif kind == "forget":
            gateway, several = draw.choice("gh"), draw.sample(NAMES, draw.randrange(1, 4))
            args = [gateway, *(word for one in several for word in (one, draw.randrange(-1, 3)))]
            both.script("forget", [KEYS.background_of(gateway), *map(KEYS.req, several)], *args)
        elif kind == "lapse" and draw.random() < 0.3:
            both.call("DEL", draw.choice([lease, KEYS.req(name), KEYS.bucket("a"), KEYS.queue]))
        assert both.keyspace(0) == both.keyspace(1), f"after {kind} of {name}"
        for stream in KEYS.request_streams():
            both.call("XPENDING", stream, GROUP)


@pytest.mark.parametrize("seed", range(6))
def test_scripts_answer_and_write_as_on_a_real_server(server: RedisServer, seed: int) -> None:
    server.client.flushall()
    play(Both(server.url), seed, 120)


def test_difference_between_the_servers_is_found(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that checks no epoch at one of the two."""
    server.client.flushall()
    both = Both(server.url)
    fenced = SCRIPTS["fenced"]
    begin, end = fenced.index(b"if redis.call('GET', KEYS[1])"), fenced.index(b"local at = 2")
    sloppy = fenced[:begin] + fenced[end:]
    run = both.fake.eval
    monkeypatch.setattr(both.fake, "eval", lambda text, *rest: run(sloppy if text == fenced else text, *rest))
    with pytest.raises(AssertionError, match="the real server answers"):
        play(both, 1, 400)
