"""Make the response of a request that does not stream, and the status of a request from its record.

A client that does not wait for its response cancels the request. `status` and `result` answer `GET /v1/requests/{id}`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from services.gateway.delivery.codec import from_delivery
from services.gateway.delivery.dispatcher import Dispatcher
from services.gateway.delivery.generation import Generation, Usage
from services.gateway.delivery.stream import RequestStream
from services.gateway.metrics import Metrics
from services.gateway.openai.sse import until_disconnect
from services.gateway.openai.validate import THREAD_TOKENS
from services.gateway.request import GenerationSpec
from services.gateway.text.logprobs import Logprobs
from services.gateway.text.tokenizer import ModelText
from services.gateway.text.tools.reader import CallPiece, merged
from shared.tasks import end


class ClientLeft(Exception):  # noqa: N818 - an event, not an error
    """The client has left before the answer."""


async def collect(generation: Generation, request: Request, fingerprint: str) -> dict[str, Any]:
    """Return the body of the answer. Raise ApiError, or ClientLeft after cancelling the request."""
    working = asyncio.create_task(whole(generation, fingerprint))
    leaving = asyncio.create_task(until_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        generation.close()
        await end(working, leaving)


async def whole(generation: Generation, fingerprint: str) -> dict[str, Any]:
    """Return the body of the answer, once the request has ended. Raise ApiError."""
    texts, ids, calls = await _run(generation)
    reasons = [choice.finish_reason or "stop" for choice in generation.choices]
    return answer(generation.spec, fingerprint, texts, ids, reasons, generation.usage, generation.logprobs, calls)


def answer(
    spec: GenerationSpec,
    fingerprint: str,
    texts: list[str],
    ids: list[list[int]],
    reasons: list[str],
    usage: Usage,
    logprobs: Logprobs | None = None,
    calls: list[list[CallPiece]] | None = None,
) -> dict[str, Any]:
    """Return OpenAI's completion or chat completion; with best_of, of the choices that are returned."""
    choices = []
    for number, index in enumerate(logprobs.kept() if logprobs is not None else range(len(texts))):
        text, entry = texts[index], None if logprobs is None else logprobs.take(index)
        choice: dict[str, Any] = {"index": number, "logprobs": entry, "finish_reason": reasons[index]}
        if spec.endpoint == "chat":
            choice["message"] = _message(text, [] if calls is None else calls[index])
        else:
            choice["text"] = spec.prompt_texts[index // spec.n] + text if spec.echo else text
        if spec.return_token_ids:
            choice["token_ids"] = ids[index]
        choices.append(choice)
    return {
        "id": spec.id,
        "object": "chat.completion" if spec.endpoint == "chat" else "text_completion",
        "created": spec.created,
        "model": spec.model,
        "system_fingerprint": fingerprint,
        "choices": choices,
        "usage": usage.body(),
    }


def _message(text: str, calls: list[CallPiece]) -> dict[str, Any]:
    """Of an assistant that may have called tools."""
    if not calls:
        return {"role": "assistant", "content": text, "refusal": None}
    bodies = [{key: value for key, value in call.body().items() if key != "index"} for call in merged(calls)]
    return {"role": "assistant", "content": text or None, "refusal": None, "tool_calls": bodies}


async def _run(generation: Generation) -> tuple[list[str], list[list[int]], list[list[CallPiece]]]:
    """By choice: text, token ids, tool calls."""
    texts: list[list[str]] = [[] for _ in generation.choices]
    ids: list[list[int]] = [[] for _ in generation.choices]
    calls: list[list[CallPiece]] = [[] for _ in generation.choices]
    while not generation.done:
        for delta in await generation.next():
            texts[delta.choice].append(delta.text)
            ids[delta.choice] += delta.token_ids
            calls[delta.choice] += delta.calls
    return ["".join(parts) for parts in texts], ids, calls


_NAMES = {"1": "stop", "2": "length", "3": "cancelled", "4": "deadline", "5": "error"}
_TOLD = frozenset({"1", "2", "4"})
_UNCOUNTED = Metrics()
"""Tokens that are returned again are not counted."""


def status(request_id: str, record: dict[bytes, bytes]) -> dict[str, Any]:
    """Return the state of a request from `req:{id}`, without its answer."""
    fields = {name.decode(): value.decode() for name, value in record.items() if name != b"delivery"}
    state: dict[str, Any] = {
        "id": request_id,
        "object": "request",
        "status": fields.get("state"),
        "background": "background" in fields,
        "priority": fields.get("class"),
        "prompt_tokens": int(fields.get("tokens", 0)),
        "enqueued_ms": int(fields.get("enqueued_ms", 0)),
        "started_ms": int(fields["started_ms"]) if "started_ms" in fields else None,
        "ended_ms": int(fields["ended_ms"]) if "ended_ms" in fields else None,
        "cancel_requested": "cancelled" in fields,
    }
    if fields.get("state") == "finished":
        state["finish_reasons"] = [_NAMES.get(part) for part in fields.get("finish", "").split(",") if part]
        output = int(fields.get("output_tokens", 0))
        prompt = state["prompt_tokens"]
        state["usage"] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        state["error"] = fields.get("error") or None
    return state


async def result(
    request_id: str, record: dict[bytes, bytes], dispatcher: Dispatcher, model: ModelText
) -> dict[str, Any] | None:
    """Return the answer in one piece, made from the record; None while there is none, and for a request that failed or
    was cancelled. Raise ApiError(503).
    """
    ends = record.get(b"finish", b"").decode().split(",")
    if record.get(b"state") != b"finished" or b"delivery" not in record or not _TOLD.issuperset(ends):
        return None
    spec = from_delivery(request_id, record[b"delivery"], record.get(b"class", b"normal").decode())
    stream = RequestStream(request_id, spec.choices)
    generation = Generation(spec, model, stream, _Silent(), _UNCOUNTED, time.monotonic())
    await dispatcher.read(stream)
    if not stream.done:  # it expired just now
        return None
    answer = whole(generation, model.fingerprint)
    if sum(stream.received) > THREAD_TOKENS:
        return await asyncio.to_thread(asyncio.run, answer)
    return await answer


class _Silent:
    """Commands of a generation that repeats a finished request: none is sent."""

    def stop_choice(self, request_id: str, choice: int, at_token: int, written: Callable[[], None]) -> None:
        written()

    def close(self, stream: RequestStream, cancel_reason: str = "") -> None: ...
