"""The simulated worker: the step protocol of worker.proto over the simulated network, with arithmetic for a model.

The KV of a position is a hash of the KV before it and of its token, kept in the blocks that the steps name. A token
follows from the KV of the last position, the seed and the position, so a wrong block, a lost copy or a sequence that
continues from other tokens gives other tokens. `Channel` takes the place of a gRPC channel in link.py.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from redis.exceptions import RedisError

from protos import worker_pb2
from services.worker.registration import TTL_MS, WORKERS_MS
from shared.ids import identity
from shared.keys import Keys
from shared.redis_client import connect
from shared.settings import SchedulerSettings
from shared.wire.columns import pack, unpack
from tests.simulation.clock import Loop, Process
from tests.simulation.network import Endpoint, Network

MODEL = "tiny"
BLOCK = 4
LATE = 0.03
"""Share of rows that sample no token at first, as one without its grammar's mask."""
SLOW_COPIES = 0.3
"""Share of steps with copies that are made only after a later step, if there is one."""
UNMAPPED = 0.2
"""Share of the host tiers of peers that cannot be mapped."""
OWN_TIER = -1
MASK = (1 << 64) - 1


def follow(before: int, token: int) -> int:
    """Return the KV of a position, by that of the position before."""
    mixed = (before * 6364136223846793005 + token * 1442695040888963407 + 12345) & MASK
    return mixed ^ (mixed >> 29)


def sample(kv: int, seed: int, position: int, letters: Sequence[int], eos: int) -> int:
    """Return the token behind a position: a letter, seldom the end."""
    drawn = follow(follow(kv, seed & MASK), position) >> 7
    return eos if drawn % 41 == 0 else letters[drawn % 1009 % len(letters)]


def grammar_of(seed: int) -> str:
    """Return the grammar of the requests with a seed, long enough to lie apart from them; empty for half of these."""
    kind = seed >> 61
    return f"grammar {kind} " * 120 if kind > 1 else ""


def continuation(prompt: Sequence[int], seed: int, count: int, letters: Sequence[int], eos: int) -> list[int]:
    """Return all tokens of a sequence, at most `count`, the end included."""
    kv = functools.reduce(follow, prompt, 0)
    tokens: list[int] = []
    while len(tokens) < count:
        token = sample(kv, seed, len(prompt) + len(tokens) - 1, letters, eos)
        tokens.append(token)
        if token == eos:
            break
        kv = follow(kv, token)
    return tokens


@dataclass(slots=True)
class _Slot:
    tokens: list[int]
    blocks: list[int]
    seed: int
    late: bool = False


Blocks = dict[int, list[int | None]]
"""KV of positions, by block."""


@dataclass(slots=True)
class Tier:
    """A host tier, which others read, and the epoch of the Run that has it."""

    blocks: Blocks = field(default_factory=dict)
    run: int = 0


@dataclass(slots=True)
class _Peer:
    """A peer of a Run: its number, host tier, and the Run of which the scheduler knows the blocks."""

    number: int
    tier: Tier
    run: int


@dataclass(slots=True)
class _Copies:
    """The copies that one step orders: (source, its block, target, its block) each."""

    copies: list[tuple[Blocks, int, Blocks, int]]
    peers: list[_Peer]  # that blocks come from
    out_gpu: bytes
    in_host: bytes


@dataclass(slots=True)
class _Run:
    """What a worker knows within one Run."""

    late: float
    host: Blocks
    slots: dict[int, _Slot] = field(default_factory=dict)
    kv: Blocks = field(default_factory=dict)
    peers: dict[int, _Peer] = field(default_factory=dict)  # with host tiers that are mapped, by number
    copies: deque[_Copies] = field(default_factory=deque)  # not made yet


class WorkerProcess:
    """One start of a worker."""

    def __init__(
        self,
        loop: Loop,
        network: Network,
        process: Process,
        name: str,
        letters: Sequence[int],
        eos: int,
        violation: Callable[[str], None],
        role: str = "",
        tiers: dict[str, Tier] | None = None,
        saved: Callable[[WorkerProcess], None] = lambda _: None,
    ) -> None:
        """tiers: by name the host tiers of all workers of a host that share theirs; None: this one shares nothing.
        saved: called when it has said that KV is in its host tier."""
        self._loop, self._network, self.process, self.name = loop, network, process, name
        self._letters, self._eos, self._violation = letters, eos, violation
        self._tiers, self._host, self._saved = tiers, Tier(), saved
        self.identity = ""
        self.highest = 0
        self.leader = ""  # the scheduler of the current Run
        self.info: dict[str, Any] = {
            "id": name, "model": MODEL, "model_hash": "hash", "dtype": "float32", "backend": "reference", "layers": 2,
            "stages": 1, "max_seqs": 4, "gpu_blocks": 28, "host_blocks": 12, "block_size": BLOCK, "max_model_len": 128,
            "max_step_tokens": 16, "max_input_tokens": 127, "max_output_tokens": 127, "vocab_size": 512,
            "block_bytes": 64, "largest_step_ms": 5, "role": role,
        }  # fmt: skip
        self._run: asyncio.Task[None] | None = None
        self.step_s = 0.01

    async def main(self) -> None:
        self.identity = identity()
        if self._tiers is not None:
            self.info |= {"host_tier": f"folder/{self.identity}", "kv_format": "hashes"}
            self._tiers[self.info["host_tier"]] = self._host
        self._network.listen(self.name, self.process, self._accept)
        redis = connect(SchedulerSettings(served_model_name=MODEL, redis_url="redis://redis:6379/0?protocol=2"))
        keys = Keys(MODEL)
        while True:
            try:
                seconds, micros = await redis.time()
                now_ms = seconds * 1000 + micros // 1000
                pipe = redis.pipeline(transaction=False)
                fields = {"address": self.name, "identity": self.identity, "slots": self.info["max_seqs"], "ready": 1}
                pipe.hset(keys.worker(self.name), mapping=fields)
                pipe.pexpire(keys.worker(self.name), TTL_MS)
                pipe.set(keys.alive("worker", self.name), 1, px=TTL_MS)
                pipe.zadd(keys.workers, {self.name: now_ms})
                pipe.zremrangebyscore(keys.workers, "-inf", now_ms - WORKERS_MS)
                await pipe.execute()
            except (RedisError, OSError):
                await asyncio.sleep(0.2)
                continue
            await asyncio.sleep(1.0)

    async def take(self) -> None:
        """Begin a Run here, from the calling process, that is never used."""
        endpoint = await self._network.connect(self.name)
        endpoint.send("/Run")
        endpoint.send(worker_pb2.Step(epoch=self.highest + 1, hello=worker_pb2.Hello()).SerializeToString())

    def _accept(self, endpoint: Endpoint) -> None:
        self._loop.create_task(self._serve(endpoint))

    async def _serve(self, endpoint: Endpoint) -> None:
        try:
            method = await endpoint.receive()
            if method.endswith("/Describe"):
                await endpoint.receive()
                info = worker_pb2.WorkerInfo(**self.info, identity=self.identity, highest_epoch=self.highest)
                endpoint.send(info.SerializeToString())
                return
            step = worker_pb2.Step.FromString(await endpoint.receive())
            if not step.HasField("hello"):
                endpoint.send((grpc.StatusCode.INVALID_ARGUMENT, "no hello"))
                return
            if step.epoch < self.highest:
                endpoint.send((grpc.StatusCode.ABORTED, f"epoch {step.epoch} < {self.highest}"))
                return
            self.highest, self.leader = step.epoch, endpoint.peer.owner
            if self._run is not None:
                self._run.cancel()
            self._run = asyncio.current_task()
            await self._steps(endpoint, step.epoch, LATE if step.hello.takes_late else 0.0)
        except asyncio.CancelledError:
            if not endpoint.broken and not endpoint.closed:
                endpoint.send((grpc.StatusCode.ABORTED, "another Run took its place"))
        except ConnectionResetError:
            pass

    async def _steps(self, endpoint: Endpoint, epoch: int, late: float) -> None:
        self._host.run = epoch
        self._host.blocks.clear()  # no later reader may use it, so what it finds there is nothing
        run = _Run(late, self._host.blocks)
        while True:
            step = worker_pb2.Step.FromString(await endpoint.receive())
            if step.epoch != epoch:
                self._violation(f"worker {self.name}: a step of epoch {step.epoch} in the Run of {epoch}")
            await asyncio.sleep(self.step_s * self._loop.random.uniform(0.2, 1.5))
            result = self._execute(step, run, is_last=not endpoint.inbox)
            endpoint.send(result.SerializeToString())
            if result.swap_out_acks:
                self._saved(self)

    def _map(self, step: worker_pb2.Step, run: _Run) -> list[int]:
        """Map the host tiers of peers; return the numbers of those that can be read."""
        for peer in step.peers:
            run.peers.pop(peer.number, None)
            if peer.host_tier == self.info.get("host_tier"):
                self._violation(f"worker {self.name}: is told to be its own peer")
            tier = self._tiers.get(peer.host_tier) if self._tiers is not None else None
            if tier is not None and self._loop.random.random() >= UNMAPPED:
                run.peers[peer.number] = _Peer(peer.number, tier, peer.run)
            elif peer.host_tier:
                self._loop.note(f"{self.name} cannot map the host tier of peer {peer.number}")
        return [peer.number for peer in step.peers if peer.number in run.peers]

    def _order(self, step: worker_pb2.Step, run: _Run) -> None:
        """Order the copies of a step."""
        out_gpu, out_host = unpack(step.swap_out_gpu).tolist(), unpack(step.swap_out_host).tolist()
        in_host, in_gpu = unpack(step.swap_in_host).tolist(), unpack(step.swap_in_gpu).tolist()
        copies = [(run.kv, block, run.host, at) for block, at in zip(out_gpu, out_host, strict=True)]
        peers = unpack(step.swap_in_peers).tolist() or [OWN_TIER] * len(in_host)
        if theirs := sum(peer != OWN_TIER for peer in peers):
            self._loop.note(f"{self.name} copies {theirs} blocks of peers")
        for at, block, peer in zip(in_host, in_gpu, peers, strict=True):
            if peer != OWN_TIER and peer not in run.peers:
                self._violation(f"worker {self.name}: copies from peer {peer}, which it has not acknowledged")
                continue
            copies.append((run.host if peer == OWN_TIER else run.peers[peer].tier.blocks, at, run.kv, block))
        if copies:
            read = [run.peers[peer] for peer in sorted({*peers} - {OWN_TIER}) if peer in run.peers]
            run.copies.append(_Copies(copies, read, step.swap_out_gpu, step.swap_in_host))

    def _copy(self, run: _Run, result: worker_pb2.Result) -> None:
        """Make the copies that were ordered, and acknowledge them."""
        while run.copies:
            done = run.copies.popleft()
            for source, at, target, to in done.copies:
                target[to] = list(source.get(at, [None] * BLOCK))
            if stale := [peer.number for peer in done.peers if peer.run and peer.tier.run != peer.run]:
                self._loop.note(f"{self.name} has copied from peers {stale}, which other Runs have")
                result.stale_peers += pack(stale)
            result.swap_out_acks += done.out_gpu
            result.swap_in_acks += done.in_host

    def _execute(self, step: worker_pb2.Step, run: _Run, is_last: bool) -> worker_pb2.Result:
        """Execute a step; is_last: no further one is at hand."""
        slots, kv = run.slots, run.kv
        columns = {name: unpack(getattr(step, name)).tolist() for name in (
            "free_slots", "append_slots", "append_blocks", "chunk_slots", "chunk_starts", "chunk_lengths")}  # fmt: skip
        result = worker_pb2.Result(epoch=step.epoch, id=step.id, peer_acks=pack(self._map(step, run)))
        for slot in columns["free_slots"]:
            slots.pop(slot, None)
        self._order(step, run)
        slow = bool(run.copies) and not is_last and self._loop.random.random() < SLOW_COPIES
        if not slow:
            self._copy(run, result)
        for enter in step.enters:
            if enter.sampling.grammar != grammar_of(enter.sampling.seed):
                self._violation(f"worker {self.name}: slot {enter.slot} has grammar {enter.sampling.grammar[:80]!r}")
            slots[enter.slot] = _Slot(unpack(enter.tokens).tolist(), unpack(enter.blocks).tolist(), enter.sampling.seed)
        for slot, block in zip(columns["append_slots"], columns["append_blocks"], strict=True):
            slots[slot].blocks.append(block)
        sampled: list[tuple[int, int]] = []
        late_slots: list[int] = []
        for slot, start, length in zip(
            *(columns[f"chunk_{name}"] for name in ("slots", "starts", "lengths")), strict=True
        ):
            row = slots[slot]
            if row.late and start + length > len(row.tokens):  # sent before the scheduler knew
                late_slots.append(slot)
                continue
            row.late = False
            for position in range(start, start + length):
                before: int | None = 0
                if position:
                    before = kv.get(row.blocks[(position - 1) // BLOCK], [None] * BLOCK)[(position - 1) % BLOCK]
                if before is None:
                    self._violation(
                        f"worker {self.name}: slot {slot} reads KV of position {position - 1}, never written"
                    )
                    before = 0
                place = kv.setdefault(row.blocks[position // BLOCK], [None] * BLOCK)
                place[position % BLOCK] = follow(before, row.tokens[position])
            if start + length == len(row.tokens):
                if self._loop.random.random() < run.late:
                    row.late = True
                    late_slots.append(slot)
                    continue
                last = start + length - 1
                state = kv[row.blocks[last // BLOCK]][last % BLOCK]
                token = sample(state or 0, row.seed, last, self._letters, self._eos)
                row.tokens.append(token)
                sampled.append((slot, token))
        result.slots, result.tokens = pack([slot for slot, _ in sampled]), pack([token for _, token in sampled])
        result.late_slots = pack(late_slots)
        result.timings.total_ns = 1_000_000
        return result


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


@dataclass
class _Call:
    """A stream of steps and results, as link.py uses one."""

    network: Network
    address: str
    method: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    _endpoint: Endpoint | None = None
    _error: grpc.aio.AioRpcError | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def _open(self) -> Endpoint:
        async with self._opening:
            if self._error is not None:
                raise self._error
            if self._endpoint is None:
                try:
                    self._endpoint = await self.network.connect(self.address)
                    self._endpoint.send(self.method)
                except ConnectionError as error:
                    raise self._fail(grpc.StatusCode.UNAVAILABLE, str(error)) from error
            return self._endpoint

    def _fail(self, code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
        self._error = self._error or _error(code, details)
        return self._error

    async def write(self, message: Any) -> None:
        endpoint = await self._open()
        try:
            endpoint.send(self.encode(message))
        except ConnectionResetError:
            raise asyncio.InvalidStateError("RPC already finished") from None
        await asyncio.sleep(0)

    async def read(self) -> Any:
        endpoint = await self._open()
        try:
            message = await endpoint.receive()
        except ConnectionResetError as error:
            raise self._fail(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        if isinstance(message, tuple):
            raise self._fail(*message)
        return self.decode(message)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            yield await self.read()

    def cancel(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()


class Channel:
    """A gRPC channel to the worker at an address."""

    network: Network

    def __init__(self, address: str, credentials: Any = None, options: Any = None) -> None:
        self._address = address
        self._calls: list[_Call] = []

    def _call(self, method: str, encode: Any, decode: Any) -> _Call:
        call = _Call(self.network, self._address, method, encode, decode)
        self._calls.append(call)
        return call

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        async def ask(request: Any, timeout: float) -> Any:
            call = self._call(method, request_serializer, response_deserializer)
            try:
                async with asyncio.timeout(timeout):
                    await call.write(request)
                    return await call.read()
            except TimeoutError:
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from None
            except asyncio.InvalidStateError:
                raise _error(grpc.StatusCode.UNAVAILABLE, "the connection was closed") from None
            finally:
                call.cancel()

        return ask

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return lambda: self._call(method, request_serializer, response_deserializer)

    async def close(self, grace: float | None) -> None:
        for call in self._calls:
            call.cancel()
