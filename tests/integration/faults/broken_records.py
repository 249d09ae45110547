"""Records that a decoder can parse and no service writes, put where a service is about to read them.

Bits that are turned at random end in the first parser. Here one field of a real record is wrong, so that each check
behind the parser has its turn, and a service reads the record at once: an answer is asked for again, tokens have a gap,
an entry is claimed.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import httpx
import redis

from protos import queue_pb2
from shared.dead_letters import CONTENT_BYTES
from shared.wire.columns import pack
from tests.support.stack import PLAIN
from tests.support.stand_ins.token_stack import PROMPT, TOKENS, TokenStack
from tests.support.stand_ins.token_worker import SLOTS, answer
from tests.support.waiting import until

LONG = 200
"""Tokens of a request that runs while records are broken."""
HELD = 8
"""Steps behind which its worker waits meanwhile."""
OUTSIDE = 1 << 20
"""A token of no vocabulary here."""
WAIT_S = 30.0
NORMAL = "normal"

Batch = queue_pb2.TokenBatch
Request = queue_pb2.Request

OUTPUTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda out: b"",
    "a token less": lambda out: out[:-4],
    "a byte less": lambda out: out[:-1],
    "a token more": lambda out: out + out[:4],
    "outside the vocabulary": lambda out: out[:40] + pack([OUTSIDE]) + out[44:],
    "negative": lambda out: out[:-4] + pack([-1]),
}
"""What `out` of an answer becomes."""


def _set(**fields: Any) -> Callable[[Any], None]:
    """Return what sets fields of a message; of a message in it by `outer__inner`."""

    def change(message: Any) -> None:
        for name, value in fields.items():
            *outer, inner = name.split("__")
            for each in outer:
                message = getattr(message, each)
            if isinstance(value, list):
                del getattr(message, inner)[:]
                getattr(message, inner).extend(value)
            else:
                setattr(message, inner, value)

    return change


BATCHES: dict[str, Callable[[Batch], None]] = {
    "more choices than rows": _set(choices=pack([0, 0])),
    "no index": _set(first=b""),
    "half an index": _set(first=b"\0\0"),
    "no finish": _set(finish=b""),
    "unknown finish": _set(finish=b"\x06"),
    "negative choice": _set(choices=pack([-1])),
    "negative index": _set(first=pack([-1])),
    "negative count": _set(counts=pack([-1]), tokens=b""),
    "more tokens counted": _set(counts=pack([3])),
    "fewer tokens counted": _set(counts=pack([0])),
    "outside the vocabulary": _set(tokens=pack([OUTSIDE])),
    "negative token": _set(tokens=pack([-5])),
    "negative drafts": _set(drafts=pack([-1])),
    "drafts of two rows": _set(drafts=pack([1, 1])),
    "log-probabilities that were not asked for": _set(logprobs=b"\0" * 12, logprob_sizes=pack([12])),
    "another row of requests": lambda batch: batch.requests.append("x"),
}
"""What is wrong in an entry of `tokens:{gateway}`; all of them are set aside."""

REQUESTS: dict[str, Callable[[Request], object]] = {
    "no prompt": _set(prompts__tokens=[]),
    "empty prompt": _set(prompts__tokens=[b""]),
    "half a token": _set(prompts__tokens=[b"\1\0\0\0\1"]),
    "negative token": _set(prompts__tokens=[pack([97, -1])]),
    "a prompt that lies nowhere": _set(prompts_apart=True),
    "no sequence": _set(n=0),
    "too many sequences": _set(n=1 << 31),
    "no tokens": _set(max_tokens=0),
    "too many tokens": _set(max_tokens=(1 << 32) - 1),
    "too many at least": _set(min_tokens=(1 << 32) - 1),
    "unknown class": lambda request: request.MergeFromString(b"\x20\x63"),
    "too many stop tokens": _set(stop_token_ids=pack([1] * 100_000)),
    "half a stop token": _set(stop_token_ids=b"\1"),
    "negative prediction": _set(prediction=pack([-1])),
    "long prediction": _set(prediction=pack([97] * 8193)),
    "unknown pooling": _set(pooling=9),
    "pooling of several tokens": _set(pooling=1, max_tokens=2),
    "segments of other prompts": _set(segments=pack([1, 1])),
    "negative segment": _set(segments=pack([-1])),
    "one label": _set(label_ids=pack([1])),
    "short digest": _set(adapter=b"\1\2\3"),
    "too many log-probabilities": _set(sampling__logprobs=1 << 20),
    "too many of the prompt": _set(sampling__prompt_logprobs=1 << 20),
}
"""What is wrong in an entry of `requests:{class}`; the request of each ends with an error."""

CONTROLS: dict[str, Callable[[str], Mapping[bytes, bytes]]] = {
    "no message": lambda request: {b"x": b"y"},
    "nothing": lambda request: {b"c": b""},
    "not UTF-8": lambda request: {b"c": b"\x0a\x04\x0a\x02\xff\xfe"},
    "cut": lambda request: {b"c": b"\x0a\x7f\x0a"},
    "another type of field": lambda request: {b"c": b"\x08\x07"},
    "a stop of no choice": lambda request: _control(stop=queue_pb2.Control.Stop(id=request, choice=99, at_token=1)),
    "a stop behind the end": lambda request: _control(
        stop=queue_pb2.Control.Stop(id=request, choice=0, at_token=(1 << 32) - 1)
    ),
    "a cancel of no request": lambda request: _control(cancel=queue_pb2.Control.Cancel(id=request + "x")),
    "a policy of no name": lambda request: _control(policy=queue_pb2.Control.Policy(name="\0" * 99)),
}
"""Commands about a request that runs; none of them changes it."""
UNDECODABLE = ("not UTF-8", "cut")

RUNNING_OUTPUTS: dict[str, int | None] = {"nothing": None, "outside the vocabulary": OUTSIDE, "negative": -1}
"""A token among those of `out` that the gateway has not read from its stream; None: all are right."""

WORKERS: dict[str, Mapping[bytes, bytes]] = {
    "slots of no number": {b"slots": b"x"},
    "no slots": {b"slots": b"0"},
    "negative slots": {b"slots": b"-1"},
    "half a slot": {b"slots": b"1.5"},
    "too many slots": {b"slots": b"%d" % (1 << 40)},
    "a long number": {b"slots": b"1" * 400},
    "address not UTF-8": {b"address": b"\xff"},
    "long address": {b"address": b"a" * 4000},
    "identity not UTF-8": {b"identity": b"\xff\xfe"},
    "long identity": {b"identity": b"i" * 4000},
    "epoch of no number": {b"run": b"x"},
    "negative epoch": {b"run": b"-3"},
    "large epoch": {b"run": b"%d" % (1 << 60)},
    "shard not UTF-8": {b"shard": b"\xff"},
}
"""Fields of `worker:{id}`; all of them are set aside."""

BORDERS: dict[str, Mapping[str, Any]] = {
    "out": OUTPUTS, "running out": RUNNING_OUTPUTS, "tokens": BATCHES, "requests": REQUESTS, "control": CONTROLS,
    "worker": WORKERS,
}  # fmt: skip
"""By record, what is wrong with it."""


def _control(**command: Any) -> Mapping[bytes, bytes]:
    return {b"c": queue_pb2.Control(**command).SerializeToString()}


class Borders:
    """Puts broken records before the services of a stack with one worker, while no other request runs."""

    def __init__(self, stack: TokenStack) -> None:
        self._stack, self._keys = stack, stack.keys
        self._client: Any = stack.redis.client
        self._checks: dict[str, Callable[[list[str]], None]] = {
            "out": _each(self._out), "running out": _each(self._running_out), "tokens": self._tokens,
            "requests": _each(self._requests), "control": _each(self._control), "worker": self._workers,
        }  # fmt: skip

    def check(self, border: str, names: Iterable[str]) -> None:
        """Break records as BORDERS says. Raise AssertionError or TimeoutError unless each is set aside, or its request
        ends with an error; and where a service ends, or another request does not go on with the right tokens.
        """
        self._stack.wait_answer()
        self._checks[border](list(names))
        self._stack.check_alive()

    def check_each(self, rng: random.Random) -> None:
        """Break one record of each border, drawn at random."""
        for border, records in BORDERS.items():
            self.check(border, [rng.choice(sorted(records))])

    def _out(self, name: str) -> None:
        key = secrets.token_hex(8)
        request, out, whole = "", "", b""

        def is_refused() -> bool:
            """Ask for the answer again. The gateway may have its tokens for a moment yet, and behind a change of the
            salt the key names another request.
            """
            nonlocal request, out, whole
            if request:
                self._client.set(out, OUTPUTS[name](whole), keepttl=True)
            answer = self._stack.ask(key=key)
            if answer.status_code == 200:
                _check_right(answer, TOKENS)
                if request != (request := answer.headers["x-orcinus-request"]):
                    out = self._keys.out(request, 0)
                    whole = self._client.get(out)
            return bool(request) and answer.status_code == 500

        until(f"{name}: the answer is refused", is_refused, WAIT_S)
        self._client.set(out, whole, keepttl=True)
        _check_right(self._stack.ask(key=key), TOKENS)

    def _running_out(self, name: str) -> None:
        token = RUNNING_OUTPUTS[name]
        with self._running(may_fail=token is not None) as request:
            right, out = answer(PROMPT, LONG), self._keys.out(request, 0)
            told = [*right[:-2], right[-2] if token is None else token]
            with self._set_aside(out, name) if token is not None else nullcontext():
                self._client.set(out, pack(told), keepttl=True)
                batch = _batch(request, LONG - 1, right[-1])  # behind a gap
                self._client.xadd(self._keys.tokens(self._gateway_of(request)), {"b": batch.SerializeToString()})

    def _tokens(self, names: list[str]) -> None:
        with self._running() as request, ExitStack() as noted:
            stream = self._keys.tokens(self._gateway_of(request))
            for name in names:
                batch = _batch(request, 0, answer(PROMPT, 1)[0])
                BATCHES[name](batch)
                entry = {b"b": batch.SerializeToString()}
                noted.enter_context(self._set_aside(stream, name, repr(entry).encode()))
                self._client.xadd(stream, entry)

    def _requests(self, name: str) -> None:
        with self._running() as like:
            request_id = like[:-8] + secrets.token_hex(4)
            stream = self._keys.requests(NORMAL)
            (entry,) = [fields for _, fields in self._client.xrange(stream) if like.encode() in fields.get(b"r", b"")]
            wire = Request.FromString(entry[b"r"])
            wire.id = request_id
            REQUESTS[name](wire)
            record, copied = (
                self._client.hgetall(self._keys.req(like)),
                (b"tenant", b"gateway", b"class", b"enqueued_ms"),
            )
            fields = {field: record[field] for field in copied} | {b"state": b"queued", b"tokens": b"0"}
            self._client.hset(self._keys.req(request_id), mapping=fields)
            self._client.expire(self._keys.req(request_id), 60)
            self._client.xadd(stream, entry | {b"r": wire.SerializeToString(), b"bytes": b"0", b"kept": b"0"})
            until(f"{name}: the request ends", lambda: self._state(request_id) == b"finished", WAIT_S)
            finish, said = self._client.hmget(self._keys.req(request_id), "finish", "error")
            assert set(finish.split(b",")) == {b"5"} and b"cannot be served" in said, f"{name}: {finish} {said}"

    def _control(self, name: str) -> None:
        stream = self._keys.control("shard-0")
        is_noted = self._set_aside(stream, name) if name in UNDECODABLE else nullcontext()
        with self._running() as request, is_noted:
            self._client.xadd(stream, CONTROLS[name](request))
        with self._running(may_fail=True) as request:  # the next command is carried out
            url = f"{self._stack.gateway.url}/v1/requests/{request}"
            assert httpx.delete(url, headers=self._stack.gateway.headers(), verify=PLAIN).status_code == 200
            until(f"{name}: a cancelled request ends", lambda: self._state(request) == b"finished", WAIT_S)

    def _workers(self, names: list[str]) -> None:
        workers = {f"worker-{secrets.token_hex(4)}": name for name in names}  # each record is noted once
        with ExitStack() as noted:
            for worker, name in workers.items():
                key = self._keys.worker(worker)
                record = {
                    b"address": b"127.0.0.1:1",
                    b"identity": key.encode(),
                    b"slots": b"%d" % SLOTS,
                    b"ready": b"1",
                }
                noted.enter_context(self._set_aside(key, name))
                self._client.hset(key, mapping=record | dict(WORKERS[name]))
                self._client.expire(key, 60)
                self._client.zadd(self._keys.workers, {worker: self._client.time()[0] * 1000})
        self._client.delete(*map(self._keys.worker, workers))
        self._client.zrem(self._keys.workers, *workers)
        _check_right(self._stack.ask(), TOKENS)

    @contextmanager
    def _running(self, may_fail: bool = False) -> Iterator[str]:
        """Yield the id of a request that has some tokens and gets no more meanwhile. Its answer has to be right, or an
        error if it may fail.
        """
        (worker,) = self._stack.workers
        before = set(self._client.keys(self._keys.req("*")))
        with ThreadPoolExecutor(1) as pool:
            try:
                worker.hold_after(HELD)
                asked = pool.submit(self._stack.ask, 2 * WAIT_S, PROMPT, LONG)
                yield until("a request runs", lambda: self._found_running(before), WAIT_S)
            finally:
                worker.hold_after(None)
            response = asked.result()
        if response.status_code == 200 or not may_fail:
            _check_right(response, LONG)

    def _found_running(self, before: set[bytes]) -> str:
        """Return the id of a request that runs and has no record among those `before`; empty without one."""
        for key in set(self._client.keys(self._keys.req("*"))) - before:
            request_id = str(key.decode().removeprefix(self._keys.req("")))
            if self._state(request_id) == b"running":
                return request_id
        return ""

    def _state(self, request_id: str) -> bytes | None:
        state: bytes | None = self._client.hget(self._keys.req(request_id), "state")
        return state

    @contextmanager
    def _set_aside(self, key: str, name: str, content: bytes = b"") -> Iterator[None]:
        """Wait at the end until `dead` has a record of the key, with this content, that was not there before."""
        before = self._noted(key, content)
        yield
        until(f"{name}: a record of {key} is set aside", lambda: self._noted(key, content) - before, WAIT_S)

    def _noted(self, key: str, content: bytes) -> set[bytes]:
        """Return the ids of the rows of `dead` about a record."""
        with suppress(redis.ResponseError):  # it may have another type for a while
            rows = self._client.xrange(self._keys.dead)
            found = {id_: row.get(b"content", b"") for id_, row in rows if row.get(b"key") == key.encode()}
            return {id_ for id_, noted in found.items() if not content or noted == content[:CONTENT_BYTES]}
        return set()

    def _gateway_of(self, request_id: str) -> str:
        """Return the gateway that delivers a request."""
        return str(self._client.hget(self._keys.req(request_id), "gateway").decode())


def _each(check: Callable[[str], None]) -> Callable[[list[str]], None]:
    """Return what checks one after another."""

    def check_each(names: list[str]) -> None:
        for name in names:
            check(name)

    return check_each


def _batch(request: str, first: int, token: int) -> Batch:
    return Batch(
        requests=[request], choices=pack([0]), first=pack([first]), counts=pack([1]), tokens=pack([token]), finish=b"\0"
    )


def _check_right(response: httpx.Response, tokens: int) -> None:
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["token_ids"] == answer(PROMPT, tokens)
