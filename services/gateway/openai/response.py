"""The answer of a request that does not stream: everything at once, and a cancel when the client does not wait."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from services.gateway.delivery.generation import Generation, Usage
from services.gateway.openai.sse import until_disconnect
from services.gateway.openai.validate import GenerationSpec
from services.gateway.tasks import end
from services.gateway.text.logprobs import Logprobs
from services.gateway.text.tools.reader import CallPiece, merged


class ClientLeft(Exception):  # noqa: N818 - an event, not an error
    """Nobody is there to answer."""


async def collect(generation: Generation, request: Request, fingerprint: str) -> dict[str, Any]:
    """The body of the answer. Raises ApiError, or ClientLeft after cancelling the request."""
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
    """The body of the answer, once the request has ended. Raises ApiError."""
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
    """OpenAI's completion or chat completion; with best_of, of those choices that are told."""
    choices = []
    for told, index in enumerate(logprobs.kept() if logprobs is not None else range(len(texts))):
        text, own = texts[index], None if logprobs is None else logprobs.take(index)
        choice: dict[str, Any] = {"index": told, "logprobs": own, "finish_reason": reasons[index]}
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
