"""Records that no service wrote: real ones of a running stack, mutated. The seed decides all of them.

`python -m tests.integration.faults.foreign_records --seconds 600 --seed 7` runs a stack among them for long.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import redis

from shared.keys import ALL_MODELS
from tests.integration.faults.broken_records import Borders
from tests.support.stack import RedisServer
from tests.support.stand_ins.token_stack import PROMPT, TOKENS, TokenStack
from tests.support.stand_ins.token_worker import answer
from tests.support.waiting import until

TEXTS = [
    b"", b"x", b"-1", b"0", b"1e308", b"nan", b"inf", b"1.5", b"9" * 30, str(1 << 62).encode(), str(1 << 31).encode(),
    b"\xff\xfe\x80", b"\x00", b"[" * 5000, b"{}", b"null", b'{"policy": 1}', b" 7 ", b"0x10", b"a" * 3000,
]  # fmt: skip
CONTENT = ("requests", "prompt", "req", "out", "tokens", "logprobs", "prompt_logprobs", "control")
"""Kinds that say what a request's answer is. They are spoilt so that no reader takes them: one that can be read is
believed, as Redis is trusted. A request without its key is gone: these are never taken away."""
LEASES = ("lease", "epoch")
"""Kinds that tell which scheduler leads: one that finds them changed ends, and another one starts."""
KEPT = "queue:kept"
"""What stands there is believed for five minutes. Other counts of the queue begin anew once it is empty."""
BOUND: dict[str, Any] = {"prompt": [5, 6, 97], "guided_choice": ["a" * 600, "b" * 600], "ignore_eos": False}
"""A request with a grammar that lies apart from it."""
NOT_TEXT = [text for text in TEXTS if not text.strip().isdigit()]
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "redis.md"
PLACES = {"class": "normal", "shard": "shard-0", "role": "worker", "tenant": "default", "choice": "0", "prompt": "0"}


def documented() -> list[str]:
    """Return the names of all keys that docs/redis.md lists, behind the prefix of a model or with that of all."""
    rows = re.findall(r"^\| (`[^|]+`) \| (?:string|hash|stream|set|sorted set)", DOCUMENT.read_text(), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


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


def spoil(value: bytes, rng: random.Random) -> bytes:
    """Return what no reader of messages, token ids or records takes for one."""
    return b"\xff" * rng.randrange(1, 4) + value[: rng.randrange(40)] + b"\xff" * (8 - rng.randrange(2))


class Attacker:
    """Changes one key at a time. Every documented one has its turn, also where none is there; `kinds` counts them."""

    def __init__(self, client: redis.Redis, prefix: str, seed: int) -> None:
        self._client: Any = client
        self._prefix = prefix
        self.rng = random.Random(seed)
        self._change = mutate
        self._turns: list[str] = []
        self.kinds: dict[str, int] = {}

    def attack(self) -> str:
        """Mutate a record, or put one of another type in its place. Return the name of its kind in the pages."""
        client, rng = self._client, self.rng
        if not self._turns:
            self._turns = documented()
            rng.shuffle(self._turns)
        name = self._turns.pop()
        kind = name.removeprefix(ALL_MODELS).partition(":")[0].partition("{")[0]
        key = self._found(name)
        self._change = spoil if kind in CONTENT else mutate
        self.kinds[name] = self.kinds.get(name, 0) + 1
        try:
            if kind not in CONTENT and (rng.random() < 0.05 or not client.exists(key)):
                client.delete(key)
                if rng.random() < 0.5:
                    client.set(key, rng.choice(TEXTS), ex=2 if kind in LEASES else 60)
                else:
                    client.hset(key, "x", rng.choice(TEXTS))
                    client.expire(key, 2 if kind in LEASES else 60)
            else:
                getattr(self, "_" + client.type(key).decode(), lambda _: None)(key)
        except (redis.ResponseError, IndexError):
            pass  # gone, empty or of another type meanwhile
        return kind

    def repair(self) -> None:
        """Delete what else would be believed for five minutes."""
        self._client.delete(self._prefix + KEPT)

    def _found(self, name: str) -> bytes:
        """Return a key of a documented name, one that is there if any is."""
        prefix = ALL_MODELS if name.startswith(ALL_MODELS) else self._prefix
        parts = re.split(r"\{([a-z_ ]+)\}", name.removeprefix(prefix))  # every second one is a place
        pattern = "".join(
            "[^:]+" if at % 2 else re.escape(part) for at, part in enumerate([prefix + parts[0], *parts[1:]])
        )
        there = [key for key in self._client.keys("orcinus:*") if re.fullmatch(pattern, key.decode("utf-8", "replace"))]
        there = [key for key in there if self._client.ttl(key) > 3600] or there  # of requests that have not ended
        if there:
            return bytes(self.rng.choice(sorted(there)))
        filled = "".join(PLACES.get(part, "x") if at % 2 else part for at, part in enumerate(parts))
        return (prefix + filled).encode()

    def _string(self, key: bytes) -> None:
        self._client.set(key, self._change(self._client.get(key) or b"", self.rng), keepttl=True)

    def _hash(self, key: bytes) -> None:
        fields = self._client.hgetall(key)
        field = self.rng.choice(sorted(fields))
        name = field if self.rng.random() < 0.9 else mutate(field, self.rng)
        self._client.hset(key, name, mutate(fields[field], self.rng))

    def _stream(self, key: bytes) -> None:
        rows = self._client.xrevrange(key, count=3)
        if not rows:
            return
        fields = dict(self.rng.choice(rows)[1])
        field = self.rng.choice(sorted(fields))
        # A bit of a batch of tokens says that a sequence has ended: gateways believe one that can be read.
        change = spoil if field == b"b" else mutate
        fields[field] = change(fields[field], self.rng)
        if self.rng.random() < 0.1:
            fields = {b"other": b"x"}
        self._client.xadd(key, fields)

    def _set(self, key: bytes) -> None:
        self._client.sadd(key, mutate(self._client.srandmember(key) or b"", self.rng))

    def _zset(self, key: bytes) -> None:
        self._client.zadd(key, {mutate(self._client.zrange(key, 0, 0)[0], self.rng): self.rng.choice([0, -1, 1e300])})


class Client(threading.Thread):
    """Sends requests until stopped; each has to end, right or with an error."""

    def __init__(self, stack: TokenStack) -> None:
        super().__init__(daemon=True)
        self._stack = stack
        self.ended: dict[int, int] = {}
        self.count = 0
        self.hung = 0
        self.wrong: list[str] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            status = 0
            try:
                is_bound = self.count % 2 == 0
                response = self._stack.ask(60.0, **BOUND) if is_bound else self._stack.ask(60.0)
                status = response.status_code
                prompt = BOUND["prompt"] if is_bound else PROMPT
                if status == 200 and response.json()["choices"][0]["token_ids"] != answer(prompt, TOKENS):
                    self.wrong.append(response.text)
            except httpx.ReadTimeout:
                self.hung += 1
                return
            except httpx.TransportError:
                pass
            self.ended[status] = self.ended.get(status, 0) + 1
            self.count += 1
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


def run(stack: TokenStack, seconds: float, seed: int, a_round: int = 60) -> tuple[dict[str, int], dict[int, int]]:
    """Attack in rounds: mutate beside load, kill the scheduler, then all has to be right again, and broken records are
    refused at each border.

    Return the attacks by documented key, and the answers by status.
    """
    attacker, borders = Attacker(stack.redis.client, stack.keys.prefix, seed), Borders(stack)
    end, rounds = time.monotonic() + seconds, 0
    answers: dict[int, int] = {}
    while time.monotonic() < end:
        clients = [Client(stack) for _ in range(4)]
        for client in clients:
            client.start()
        may_end = False
        for number in range(a_round):
            if number % 4 == 0:  # so that requests run meanwhile
                ended = sum(client.count for client in clients)
                until("a request ends", partial(_has_ended, stack, clients, ended, may_end), 90)
            may_end |= attacker.attack() in LEASES
            stack.check_alive(may_end)
        if rounds % 2 == 0 or may_end:
            stack.kill_scheduler()
            stack.start_scheduler()
        attacker.repair()
        for client in clients:
            client.stopped.set()
        for client in clients:
            client.join(90)
        assert not any(client.is_alive() or client.hung for client in clients), records(stack)
        assert not (wrong := [text for client in clients for text in client.wrong]), wrong[0]
        attacker.repair()  # what those counted that had begun before
        stack.wait_answer()  # and the tokens are right
        borders.check_each(attacker.rng)
        for client in clients:
            for status, count in client.ended.items():
                answers[status] = answers.get(status, 0) + count
        rounds += 1
    entered = {worker.name: worker.entered for worker in stack.workers}
    assert all(len(grammars_of(found, BOUND["prompt"])) <= 1 for found in entered.values()), "a grammar was changed"
    assert "" not in {text for found in entered.values() for text in grammars_of(found, BOUND["prompt"])}
    return attacker.kinds, answers


def grammars_of(entered: set[tuple[tuple[int, ...], str]], prompt: list[int]) -> set[str]:
    """Return the grammars with which a prompt came to a worker."""
    return {grammar for tokens, grammar in entered if tokens == tuple(prompt)}


def _has_ended(stack: TokenStack, clients: list[Client], before: int, leads_anew: bool) -> bool:
    """Return whether one more request than `before` has ended, or hangs."""
    stack.check_alive(leads_anew)
    return any(client.hung for client in clients) or sum(client.count for client in clients) > before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
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
