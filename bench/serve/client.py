"""Send one streaming completion and record the times of its tokens. Works with OpenAI-compatible servers.

The stream is parsed line by line as bytes come in, one JSON parse an event, nothing kept: the client must cost
little, or it measures itself. Called by `bench/serve/main.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson

from bench.serve.stats import Record
from shared.messages import quantity

WORDS = (
    *("time", "year", "work", "day", "world", "life", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story"),
    *("fact", "month", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head"),
)
GOOD_FINISHES = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send and how: base URL without a slash at its end, model id, prompts as text or as token ids."""

    url: str
    model: str
    text: bool
    first_id: int
    vocab_size: int
    temperature: float
    seed: int
    timeout_s: float


def body(target: Target, index: int, prompt_tokens: int, output_tokens: int) -> bytes:
    """Return the JSON of request `index`. Its prompt depends on the seed and the index alone.

    With token ids the prompt has exactly `prompt_tokens` tokens; as text it has that many common English words,
    and the server's usage says how many tokens they were.
    """
    rng = np.random.default_rng([target.seed, 0, index])
    fields: dict[str, Any] = {
        "model": target.model,
        "max_tokens": output_tokens,
        "temperature": target.temperature,
        "seed": target.seed + index,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if target.text:
        fields["prompt"] = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), size=prompt_tokens))
    else:
        fields["prompt"] = rng.integers(target.first_id, target.vocab_size, size=prompt_tokens).tolist()
        fields["return_token_ids"] = True
    return orjson.dumps(fields)


class SseLines:
    """Cuts a byte stream into the payloads of its `data:` lines; comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


async def payloads(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the payloads of a stream's `data:` lines to its end, without `[DONE]`."""
    lines = SseLines()
    async for chunk in content.iter_any():
        for payload in lines.feed(chunk):
            if payload != b"[DONE]":
                yield payload


def note_event(record: Record, payload: bytes, now_s: float) -> None:
    """Add one event to the record. Raises ValueError if it is not JSON of the expected shape."""
    event = orjson.loads(payload)
    if not isinstance(event, dict):
        raise ValueError("an event is not an object")
    if event.get("error"):
        error = event["error"]
        record.error = "stream_error"
        record.detail = str(error.get("message", error) if isinstance(error, dict) else error)
        return
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids")
        if ids or choice.get("text"):
            record.event_s.append(now_s)
            record.event_tokens.append(len(ids) if ids else 1)
        if choice.get("finish_reason"):
            record.finish = choice["finish_reason"]
    usage = event.get("usage")
    if usage:
        record.reported_tokens = usage.get("completion_tokens") or 0
        record.prompt_tokens = usage.get("prompt_tokens") or record.prompt_tokens


def judge(record: Record, done: bool, now_s: float) -> None:
    """Decide whether a stream without an exception ended as it should.

    Tokens that never became text (half a character, control tokens) count as delivered at the end.
    """
    if not record.event_s and record.reported_tokens:
        record.event_s.append(now_s)
        record.event_tokens.append(record.reported_tokens)
    if record.error:
        return
    if not done and not record.finish:
        record.error = "cut"
        record.detail = (
            f"the stream ended after {quantity(record.output_tokens, 'token')} with neither [DONE] nor a finish reason"
        )
    elif record.finish and record.finish not in GOOD_FINISHES:
        record.error = f"finish_{record.finish}"
    elif not record.event_s:
        record.error = "empty"
        record.detail = "the stream ended without a token"


async def send(session: aiohttp.ClientSession, target: Target, record: Record, payload: bytes) -> None:
    """Send one request and fill its record. Never raises for faults of the server or the network."""
    record.sent_s = time.perf_counter()
    try:
        async with (
            asyncio.timeout(target.timeout_s),
            session.post(f"{target.url}/v1/completions", data=payload) as reply,
        ):
            if reply.status != 200:
                record.error = f"http_{reply.status}"
                record.detail = (await reply.text())[:300]
                return
            lines, done = SseLines(), False
            async for chunk in reply.content.iter_any():
                now_s = time.perf_counter()
                for data in lines.feed(chunk):
                    if data == b"[DONE]":
                        done = True
                    else:
                        note_event(record, data, now_s)
            judge(record, done, time.perf_counter())
    except TimeoutError:
        record.error = "timeout"
        record.detail = f"no end after {target.timeout_s:g} s"
    except aiohttp.ClientConnectorError as error:
        record.error = "connect"
        record.detail = str(error)
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionError) as error:
        record.error = "cut"
        record.detail = str(error)
    except aiohttp.ClientError as error:
        record.error = "client"
        record.detail = str(error)
    except ValueError as error:
        record.error = "bad_event"
        record.detail = str(error)
    finally:
        record.end_s = time.perf_counter()
