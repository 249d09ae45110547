"""Answers of `/v1/responses`: the response object, whole, and the typed events that tell one in pieces. Pure.

The events of a stream add up to the object that the whole answer would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.delivery.generation import Delta, Generation, Usage
from services.gateway.errors import ApiError, failed
from services.gateway.openai.responses_body import ResponsesBody
from services.gateway.text.tools.reader import CallPiece

INCOMPLETE = {"length": "max_output_tokens", "deadline": "deadline"}
"""Finish reasons that leave a response incomplete -> what `incomplete_details` calls them."""


def shell(body: ResponsesBody, response_id: str, created: int) -> dict[str, Any]:
    """A response before its first token: what it is to be."""
    text = body.text.model_dump(exclude_none=True) if body.text is not None else {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def finished(shell: dict[str, Any], output: list[dict[str, Any]], reason: str, usage: dict[str, int]) -> dict[str, Any]:
    """The response at its end. usage: as of chat."""
    incomplete = INCOMPLETE.get(reason)
    return shell | {
        "status": "incomplete" if incomplete else "completed",
        "incomplete_details": {"reason": incomplete} if incomplete else None,
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},  # what the prefix cache spared is not counted by request
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def of_chat(shell: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The whole response that says what a whole chat completion says."""
    choice = answer["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    calls = message.get("tool_calls") or []
    items = []
    if message["content"] or not calls:
        items.append(message_item(shell["id"], message["content"] or "", _status(reason)))
    for index, call in enumerate(calls):
        status = _call_status(reason, is_last=index == len(calls) - 1)
        items.append(call_item(shell["id"], index, call["id"], **call["function"], status=status))
    return finished(shell, items, reason, answer["usage"])


def of_record(state: dict[str, Any], model: str, answer: dict[str, Any] | None) -> dict[str, Any]:
    """A response as its record tells it; what was only said in its body is not known any more.

    state: as of `GET /v1/requests/{id}`. answer: the chat completion, of one that ended well.
    """
    body = ResponsesBody(model=model, input="", background=state["background"])
    begun = shell(body, state["id"], answer["created"] if answer else state["enqueued_ms"] // 1000)
    if answer is not None:
        return of_chat(begun, answer)
    if state["status"] != "finished":
        return begun | {"status": "in_progress" if state["status"] == "running" else "queued"}
    if state["error"] or "error" in state["finish_reasons"]:
        error = failed(state["error"] or "")
        told = {"code": error.code if error.status < 500 else "server_error", "message": error.message}
        return begun | {"status": "failed", "error": told}
    return begun | {"status": "cancelled"}


def text_part(text: str) -> dict[str, Any]:
    """The one part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message_item(response_id: str, text: str, status: str) -> dict[str, Any]:
    """The one message of a response; without its part while that is not begun."""
    content = [] if status == "in_progress" else [text_part(text)]
    item_id = "msg_" + response_id.removeprefix("resp_")
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def call_item(response_id: str, index: int, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    """A call of a function."""
    item_id = f"fc_{response_id.removeprefix('resp_')}_{index}"
    return {
        "id": item_id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
        "arguments": arguments,
    }  # fmt: skip


def _status(reason: str) -> str:
    return "incomplete" if reason in INCOMPLETE else "completed"


def _call_status(reason: str, is_last: bool) -> str:
    """Whole calls end with `tool_calls`: behind a `stop` the last one was cut."""
    return "incomplete" if reason == "stop" and is_last else _status(reason)


MESSAGE = -1
"""The key of the message among the items of a stream; calls have their index."""


@dataclass(slots=True)
class _Item:
    """One item of the output while it comes. pieces: of its text or arguments."""

    at: dict[str, Any]  # item_id and output_index
    begun: dict[str, Any]
    pieces: list[str]


class ResponseEvents:
    """Turns deltas into typed events; the writer of an EventStream (streams.py)."""

    def __init__(self, generation: Generation, shell: dict[str, Any]) -> None:
        self._generation = generation
        self._shell = shell
        self._number = 0
        self._items: dict[int, _Item] = {}

    def echo(self) -> bytes:
        """What comes before the first token."""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._shell) for kind in kinds)

    def events(self, deltas: list[Delta]) -> bytes:
        """Events of one delivery; empty when all its text is still held back."""
        parts = []
        for delta in deltas:
            if delta.text:
                parts.append(self._text(delta.text))
            parts += [self._call(piece) for piece in delta.calls]
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        """Each item as a whole, and the response with them."""
        reason = self._generation.choices[0].finish_reason or "stop"
        told = b"" if self._items else self._message()[1]
        output = []
        for key, item in self._items.items():
            status = _status(reason) if key == MESSAGE else _call_status(reason, is_last=key == max(self._items))
            done, event = self._done(key, item, status)
            output.append(done)
            told += event + self._event("response.output_item.done", output_index=item.at["output_index"], item=done)
        response = finished(self._shell, output, reason, usage.body())
        return told + self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> bytes:
        """An error after the first byte; the stream ends behind it."""
        said = {"code": error.code or "server_error", "message": error.message}
        told = self._event("error", **said, param=error.param)
        return told + self._event("response.failed", response=self._shell | {"status": "failed", "error": said})

    def _text(self, text: str) -> bytes:
        item, told = self._message()
        item.pieces.append(text)
        return told + self._event("response.output_text.delta", **item.at, content_index=0, delta=text, logprobs=[])

    def _message(self) -> tuple[_Item, bytes]:
        """The message and its one part, begun when they are first needed."""
        if MESSAGE in self._items:
            return self._items[MESSAGE], b""
        item, told = self._begin(MESSAGE, message_item(self._shell["id"], "", "in_progress"))
        return item, told + self._event("response.content_part.added", **item.at, content_index=0, part=text_part(""))

    def _call(self, piece: CallPiece) -> bytes:
        told = b""
        if piece.index not in self._items:
            begun = call_item(self._shell["id"], piece.index, piece.id, piece.name, "", "in_progress")
            told = self._begin(piece.index, begun)[1]
        item = self._items[piece.index]
        item.pieces.append(piece.arguments)
        if piece.arguments:
            told += self._event("response.function_call_arguments.delta", **item.at, delta=piece.arguments)
        return told

    def _begin(self, key: int, begun: dict[str, Any]) -> tuple[_Item, bytes]:
        item = _Item({"item_id": begun["id"], "output_index": len(self._items)}, begun, [])
        self._items[key] = item
        added = self._event("response.output_item.added", output_index=item.at["output_index"], item=begun)
        return item, added

    def _done(self, key: int, item: _Item, status: str) -> tuple[dict[str, Any], bytes]:
        """An item at its end, and the events that say what it holds."""
        whole = "".join(item.pieces)
        if key != MESSAGE:
            done = item.begun | {"status": status, "arguments": whole}
            name = done["name"]
            return done, self._event("response.function_call_arguments.done", **item.at, name=name, arguments=whole)
        done = message_item(self._shell["id"], whole, status)
        told = self._event("response.output_text.done", **item.at, content_index=0, text=whole, logprobs=[])
        return done, told + self._event("response.content_part.done", **item.at, content_index=0, part=text_part(whole))

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"
