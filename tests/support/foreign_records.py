"""Records that no service wrote: real ones of a running stack, mutated. The seed decides all of them.

`python -m tests.support.foreign_records --seconds 600 --seed 7` runs a stack among them for long.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import redis

from tests.support.stack import RedisServer
from tests.support.stand_ins.token_stack import TokenStack

TEXTS = [
    b"", b"x", b"-1", b"0", b"1e308", b"nan", b"inf", b"1.5", b"9" * 30, str(1 << 62).encode(), str(1 << 31).encode(),
    b"\xff\xfe\x80", b"\x00", b"[" * 5000, b"{}", b"null", b'{"policy": 1}', b" 7 ", b"0x10", b"a" * 3000,
]  # fmt: skip
LEASES = ("lease:", "epoch", "queue")
"""A change of these takes the shard, or fills the queue: a counter with another number is believed."""
SECRETS = ("keys:salt",)
OF_REQUESTS = ("requests", "req", "prompt", "control")
"""A request without its key is gone: its client waits until the record expires. These are only mutated."""


def mutate(value: bytes, rng: random.Random) -> bytes:
    """Return `value` cut, longer, with other bits, or another text."""
    kind = rng.randrange(6)
    if kind == 0 or not value:
        return rng.choice(TEXTS)
    at = rng.randrange(len(value))
    if kind == 1:
        return value[:at]
    if kind == 2:
        return value + rng.randbytes(rng.randrange(1, 40))
    if kind == 3:
        return value[:at] + rng.randbytes(rng.randrange(1, 8)) + value[at:]
    changed = bytearray(value)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


class Attacker:
    """Changes one key at a time; `kinds` counts them."""

    def __init__(self, client: redis.Redis, prefix: str, seed: int) -> None:
        self._client: Any = client
        self._prefix = prefix
        self._rng = random.Random(seed)
        self.kinds: dict[str, int] = {}

    def attack(self) -> None:
        """Mutate a record, or put one of another type in its place."""
        client, rng = self._client, self._rng
        names = sorted(key for key in client.keys(self._prefix.replace("[", "\\[") + "*"))
        by_kind: dict[str, list[bytes]] = {}
        for name in names:
            rest = name.decode("utf-8", "replace").removeprefix(self._prefix)
            if not rest.startswith((*LEASES, *SECRETS)):
                by_kind.setdefault(rest.partition(":")[0], []).append(name)
        if not by_kind:
            return
        kind = rng.choice(sorted(by_kind))
        key = rng.choice(by_kind[kind])
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        try:
            if kind not in OF_REQUESTS and rng.random() < 0.05:
                client.delete(key)
                if rng.random() < 0.5:
                    client.set(key, rng.choice(TEXTS), ex=60)
                else:
                    client.hset(key, "x", rng.choice(TEXTS))
                return
            getattr(self, "_" + client.type(key).decode(), lambda _: None)(key)
        except (redis.ResponseError, IndexError):
            return  # gone, empty or of another type meanwhile

    def _string(self, key: bytes) -> None:
        self._client.set(key, mutate(self._client.get(key) or b"", self._rng), keepttl=True)

    def _hash(self, key: bytes) -> None:
        fields = self._client.hgetall(key)
        field = self._rng.choice(sorted(fields))
        name = field if self._rng.random() < 0.9 else mutate(field, self._rng)
        self._client.hset(key, name, mutate(fields[field], self._rng))

    def _stream(self, key: bytes) -> None:
        rows = self._client.xrevrange(key, count=3)
        if not rows:
            return
        fields = dict(self._rng.choice(rows)[1])
        field = self._rng.choice(sorted(fields))
        fields[field] = mutate(fields[field], self._rng)
        if self._rng.random() < 0.1:
            fields = {b"other": b"x"}
        self._client.xadd(key, fields)

    def _set(self, key: bytes) -> None:
        self._client.sadd(key, mutate(self._client.srandmember(key) or b"", self._rng))

    def _zset(self, key: bytes) -> None:
        self._client.zadd(key, {mutate(self._client.zrange(key, 0, 0)[0], self._rng): self._rng.choice([0, -1, 1e300])})


class Client(threading.Thread):
    """Sends requests until stopped; each has to end. A record of its own may be mutated, so an answer may be wrong."""

    def __init__(self, stack: TokenStack) -> None:
        super().__init__(daemon=True)
        self._stack = stack
        self.ended: dict[int, int] = {}
        self.hung = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                status = self._stack.ask(60.0).status_code
            except httpx.ReadTimeout:
                self.hung += 1
                return
            except httpx.TransportError:
                status = 0
            self.ended[status] = self.ended.get(status, 0) + 1
            self.stopped.wait(0.02)


def records(stack: TokenStack) -> str:
    """Return the records of requests that have not ended, for a failed run."""
    client: Any = stack.redis.client
    found = []
    for key in client.keys(stack.keys.req("*")):
        if client.type(key) == b"hash" and client.hget(key, "state") != b"finished":
            found.append({name: value for name, value in client.hgetall(key).items() if name != b"delivery"})
    pending = [client.xpending(stream, "schedulers") for stream in stack.keys.request_streams()]
    return f"a request never ended: {found} {pending}\n{stack.log()[-3000:]}"


def run(stack: TokenStack, seconds: float, seed: int, a_round: int = 60) -> dict[str, int]:
    """Attack in rounds: mutate beside load, kill the scheduler, then all has to be right again. Return the kinds."""
    attacker = Attacker(stack.redis.client, stack.keys.prefix, seed)
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        clients = [Client(stack) for _ in range(4)]
        for client in clients:
            client.start()
        for _ in range(a_round):
            attacker.attack()
            stack.check_alive()
        if rounds % 2 == 0:
            stack.kill_scheduler()
            stack.start_scheduler()
        for client in clients:
            client.stopped.set()
        for client in clients:
            client.join(90)
        assert not any(client.is_alive() or client.hung for client in clients), records(stack)
        stack.wait_answer()  # and the tokens are right
        rounds += 1
    return attacker.kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder) / "redis") as server,
        TokenStack(Path(folder) / "stack", server) as stack,
    ):
        stack.worker("worker-a").start()
        stack.wait_answer(60)
        print(run(stack, options.seconds, options.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
