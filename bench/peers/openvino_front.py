"""A thin HTTP front for OpenVINO GenAI's continuous batching, which has none on the package index. Run as a file in
the `openvino` environment:

    python openvino_front.py MODEL TOKENIZER.json PORT f32|default

The engine is theirs and runs in one thread; this file only carries tokens out, as cheaply as it can, so that the
figures are the engine's. Text is made of each token's bytes, one event a token.
"""

from __future__ import annotations

import asyncio
import codecs
import itertools
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found]  # installed in an environment of the peer's own
import openvino_genai  # type: ignore[import-not-found]
import orjson
import uvicorn
from tokenizers import Tokenizer

CACHE_GIB = 1
MAX_SEQUENCES = 64
PRECISION = {"f32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}, "default": {}}
EVENT_STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through the engine; `tokens` carries lists of ids, at the end None."""

    ids: list[int]
    config: Any
    tokens: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    handle: Any = None
    got: int = 0


class Engine(threading.Thread):
    """Owns the pipeline: takes jobs in, steps while there is one, hands tokens to the event loop."""

    def __init__(self, folder: str, precision: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        limits = openvino_genai.SchedulerConfig()
        limits.cache_size = CACHE_GIB
        limits.max_num_seqs = MAX_SEQUENCES
        limits.enable_prefix_caching = False
        self._pipe = openvino_genai.ContinuousBatchingPipeline(folder, limits, "CPU", PRECISION[precision])
        self._loop = loop
        self._ids = itertools.count()
        self._waiting: list[Job] = []
        self._changed = threading.Condition()

    def add(self, job: Job) -> None:
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    def run(self) -> None:
        running: list[Job] = []
        while True:
            with self._changed:
                while not self._waiting and not running:
                    self._changed.wait()
                arrived, self._waiting = self._waiting, []
            for job in arrived:
                ids = ov.Tensor(np.asarray([job.ids], dtype=np.int64))
                job.handle = self._pipe.add_request(next(self._ids), ids, job.config)
            running += arrived
            self._pipe.step()
            news = [(job, new_ids(job), finished(job)) for job in running]
            self._loop.call_soon_threadsafe(deliver, news)
            running = [job for job, _, ended in news if not ended]
            time.sleep(0)  # lets the event loop write; without it chunks leave in bursts


def new_ids(job: Job) -> list[int]:
    fresh: list[int] = []
    while job.handle.can_read():
        for output in job.handle.read().values():
            fresh += output.generated_ids
    job.got += len(fresh)
    return fresh


def finished(job: Job) -> bool:
    return bool(job.handle.get_status() != openvino_genai.GenerationStatus.RUNNING)


def deliver(news: list[tuple[Job, list[int], bool]]) -> None:
    for job, ids, ended in news:
        if ids:
            job.tokens.put_nowait(ids)
        if ended:
            job.tokens.put_nowait(None)


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes of every id by the table of byte-level vocabularies; control tokens have none."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in shown}
    hidden = (byte for byte in range(256) if byte not in shown)
    table.update({chr(256 + number): byte for number, byte in enumerate(hidden)})
    special = set(tokenizer.get_added_tokens_decoder())
    return [
        b"" if id_ in special else bytes(table[letter] for letter in tokenizer.id_to_token(id_) or "")
        for id_ in range(tokenizer.get_vocab_size())
    ]


class Front:
    """The ASGI application: /v1/models and /v1/completions, streaming or not."""

    def __init__(self, folder: str, tokenizer: Path, precision: str) -> None:
        self._folder, self._precision = folder, precision
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._bytes = token_bytes(self._tokenizer)
        self._engine: Engine | None = None

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._engine is None:
            self._engine = Engine(self._folder, self._precision, asyncio.get_running_loop())
            self._engine.start()
        if scope["path"] == "/v1/models":
            await answer(send, {"object": "list", "data": [{"id": "model", "object": "model"}]})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        fields = json.loads(body)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = fields["max_tokens"]
        config.ignore_eos = bool(fields.get("ignore_eos"))
        config.do_sample = False
        job = Job(self._tokenizer.encode(fields["prompt"]).ids, config)
        self._engine.add(job)
        await (self._stream(job, send) if fields.get("stream") else self._whole(job, send))

    async def _stream(self, job: Job, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while (ids := await job.tokens.get()) is not None:
            for id_ in ids:
                text = decoder.decode(self._bytes[id_])
                await write(send, {"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        await write(send, {"choices": [{"index": 0, "text": decoder.decode(b"", True), "finish_reason": "length"}]})
        await write(send, {"choices": [], "usage": usage(job)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _whole(self, job: Job, send: Send) -> None:
        found: list[int] = []
        while (ids := await job.tokens.get()) is not None:
            found += ids
        text = b"".join(self._bytes[id_] for id_ in found).decode("utf-8", "replace")
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        await answer(send, {"object": "text_completion", "choices": [choice], "usage": usage(job)})


def usage(job: Job) -> dict[str, int]:
    return {"prompt_tokens": len(job.ids), "completion_tokens": job.got, "total_tokens": len(job.ids) + job.got}


async def write(send: Send, event: Message) -> None:
    await send({"type": "http.response.body", "body": b"data: " + orjson.dumps(event) + b"\n\n", "more_body": True})


async def answer(send: Send, value: Message) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(value)})


if __name__ == "__main__":
    uvicorn.run(
        Front(sys.argv[1], Path(sys.argv[2]), sys.argv[4]),
        host="127.0.0.1",
        port=int(sys.argv[3]),
        loop="uvloop",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )
