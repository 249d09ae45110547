"""A gRPC worker without a model, in a thread: the next token is a function of the last one, so answers can be checked.

A test may change what it describes and what it answers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import redis

from protos import worker_pb2, worker_pb2_grpc
from services.worker.registration import TTL_MS
from shared.keys import Keys
from shared.wire.columns import pack, unpack

SLOTS, VOCABULARY = 16, 256


def following(token: int) -> int:
    """Return the token after `token`: a letter."""
    return 97 + (7 * token + 3) % 26


def answer(prompt: list[int], count: int) -> list[int]:
    """Return the tokens that follow a prompt."""
    tokens = [prompt[-1]]
    for _ in range(count):
        tokens.append(following(tokens[-1]))
    return tokens[1:]


class TokenWorker(worker_pb2_grpc.WorkerServicer):
    """Serves on a port of its own from `start` to `stop`. spoil: changes a Result before it is sent."""

    def __init__(self, name: str, keys: Keys, client: Any, **info: Any) -> None:
        self.name, self.keys, self.client = name, keys, client
        self.info: dict[str, Any] = {
            "id": name, "identity": name, "model": keys.model, "model_hash": "hash", "dtype": "float32",
            "backend": "reference", "layers": 2, "stages": 1, "max_seqs": SLOTS, "gpu_blocks": 512, "block_size": 16,
            "max_model_len": 1024, "max_step_tokens": 256, "max_input_tokens": 1023, "max_output_tokens": 1023,
            "vocab_size": VOCABULARY, "block_bytes": 1024, "largest_step_ms": 5, **info,
        }  # fmt: skip
        self.spoil: Callable[[worker_pb2.Result], None] = lambda _: None
        self.runs = 0
        self._left: int | None = None  # results until it holds the next one back; None: it does not
        self.entered: set[tuple[tuple[int, ...], str]] = set()  # prompts and their grammars, which it follows in no way
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._done: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def start(self) -> TokenWorker:
        self._thread.start()
        assert self._up.wait(60)
        return self

    def stop(self) -> None:
        if self._done is not None:
            self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(60)

    def hold_after(self, results: int | None) -> None:
        """Hold results back behind so many more; None lets them go."""
        self._left = results

    def register(self) -> None:
        """Write the record as a worker does every second."""
        seconds, micros = self.client.time()
        fields = {
            "address": self.address,
            "identity": self.info["identity"],
            "slots": self.info["max_seqs"],
            "ready": 1,
        }
        self.client.hset(self.keys.worker(self.name), mapping=fields)
        self.client.pexpire(self.keys.worker(self.name), TTL_MS)
        self.client.zadd(self.keys.workers, {self.name: int(seconds) * 1000 + int(micros) // 1000})

    async def _serve(self) -> None:
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        self._done = asyncio.Event()
        await server.start()
        self._up.set()
        while not self._done.is_set():
            try:
                await asyncio.to_thread(self.register)
            except redis.ResponseError:
                self.client.delete(self.keys.worker(self.name), self.keys.workers)  # as a worker does
            except redis.RedisError:
                pass
            try:
                await asyncio.wait_for(self._done.wait(), 0.5)
            except TimeoutError:
                continue
        await server.stop(0)

    async def Describe(  # noqa: N802 - the name in worker.proto
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(**self.info)

    async def Run(  # noqa: N802 - the name in worker.proto
        self, requests: AsyncIterator[worker_pb2.Step], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.Result]:
        self.runs += 1
        tokens: dict[int, list[int]] = {}
        async for step in requests:
            if step.HasField("hello"):
                continue
            for enter in step.enters:
                tokens[enter.slot] = unpack(enter.tokens).tolist()
                self.entered.add((tuple(tokens[enter.slot][: enter.prompt_tokens]), enter.sampling.grammar))
            sampled = []
            chunks = zip(*map(unpack, (step.chunk_slots, step.chunk_starts, step.chunk_lengths)), strict=True)
            for slot, start, length in chunks:
                if start + length == len(tokens[slot]):
                    tokens[slot].append(following(tokens[slot][-1]))
                    sampled.append(slot)
            result = worker_pb2.Result(epoch=step.epoch, id=step.id)
            result.slots, result.tokens = pack(sampled), pack([tokens[slot][-1] for slot in sampled])
            result.swap_out_acks, result.swap_in_acks = step.swap_out_gpu, step.swap_in_host
            result.timings.total_ns = 1_000_000
            self.spoil(result)
            while self._left == 0:
                await asyncio.sleep(0.005)
            if self._left is not None:
                self._left -= 1
            yield result
