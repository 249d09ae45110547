"""What `GET /v1/requests/{id}` tells: the state of a request and, when it has ended, its answer from the record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from services.gateway.delivery.codec import from_delivery
from services.gateway.delivery.dispatcher import Dispatcher
from services.gateway.delivery.generation import Generation
from services.gateway.delivery.stream import RequestStream
from services.gateway.metrics import Metrics
from services.gateway.openai.response import whole
from services.gateway.openai.validate import THREAD_TOKENS
from services.gateway.text.tokenizer import ModelText

_NAMES = {"1": "stop", "2": "length", "3": "cancelled", "4": "deadline", "5": "error"}
_TOLD = frozenset({"1", "2", "4"})
_UNCOUNTED = Metrics()
"""What is told again is no new token."""


def status(request_id: str, record: dict[bytes, bytes]) -> dict[str, Any]:
    """All but the answer, from `req:{id}`."""
    fields = {name.decode(): value.decode() for name, value in record.items() if name != b"delivery"}
    told: dict[str, Any] = {
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
        told["finish_reasons"] = [_NAMES.get(part) for part in fields.get("finish", "").split(",") if part]
        output = int(fields.get("output_tokens", 0))
        prompt = told["prompt_tokens"]
        told["usage"] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        told["error"] = fields.get("error") or None
    return told


async def result(
    request_id: str, record: dict[bytes, bytes], dispatcher: Dispatcher, model: ModelText
) -> dict[str, Any] | None:
    """The answer as the client would have got it in one piece, or would get it; None while there is none, and of a
    request that failed or was cancelled. Raises ApiError(503)."""
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
    """The commands of a generation that only tells again."""

    def stop_choice(self, request_id: str, choice: int, at_token: int, written: Callable[[], None]) -> None:
        written()

    def close(self, stream: RequestStream, cancel_reason: str = "") -> None: ...
