"""Answer in the form of Anthropic's Messages API: one message, or its events.

A message is a list of content blocks: thinking, text and calls of tools in the order in which the model wrote them,
which is a function of the text alone, however it was cut. The last event of what one delivery brings has an id,
`request:` and a Position, from which any gateway continues; events without an id belong to the next one that has one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from pydantic_core import from_json

from services.gateway.delivery.stream import NOTHING, PREAMBLE, Delta, Generation, Position, Usage
from services.gateway.errors import ApiError
from services.gateway.request import GenerationSpec

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "deadline": "deadline"}
"""Finish reason -> stop_reason; the deadline is ours."""


@dataclass(slots=True)
class Block:
    """One content block. id, name: of a call. pieces: of its text, its thinking or its arguments."""

    kind: str
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    def start_body(self, signature: str = "") -> dict[str, Any]:
        """Return the block without its content."""
        match self.kind:
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": signature}
            case "text":
                return {"type": "text", "text": ""}
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": {}}

    def body(self, signature: str) -> dict[str, Any]:
        """Return the whole block."""
        content = "".join(self.pieces)
        if self.kind == "tool_use":
            return self.start_body() | {"input": _arguments(content)}
        return self.start_body(signature) | {self.kind: content}

    def delta(self, piece: str) -> dict[str, Any]:
        """Return the delta that adds a piece."""
        match self.kind:
            case "thinking":
                return {"type": "thinking_delta", "thinking": piece}
            case "text":
                return {"type": "text_delta", "text": piece}
        return {"type": "input_json_delta", "partial_json": piece}


def _arguments(text: str) -> dict[str, Any]:
    """Return the input of a call. What was cut is completed; what is no object stays readable under one name."""
    try:
        arguments = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        arguments = None
    return _writable(arguments) if isinstance(arguments, dict) else {"arguments": text}


def _writable(value: Any) -> Any:
    """Return a value of JSON with integers of more than 64 bits as orjson can write them."""
    if isinstance(value, dict):
        return {key: _writable(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_writable(element) for element in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return orjson.Fragment(str(value))
    return value


class Blocks:
    """The content blocks of a message while it comes. hides_thinking: those of thinking have no text."""

    def __init__(self, hides_thinking: bool) -> None:
        self.blocks: list[Block] = []
        self._hides_thinking = hides_thinking

    def add(self, delta: Delta) -> Iterator[tuple[Block, bool, str]]:
        """Take a delta; yield each piece with its block, and whether it begins the block."""
        if delta.reasoning:
            yield self._piece("thinking", "" if self._hides_thinking else delta.reasoning)
        for part in delta.parts or [delta.text]:
            if isinstance(part, str):
                if part:
                    yield self._piece("text", part)
            elif part.name:
                self.blocks.append(Block("tool_use", part.id, part.name, [part.arguments]))
                yield self.blocks[-1], True, part.arguments
            else:
                self.blocks[-1].pieces.append(part.arguments)
                yield self.blocks[-1], False, part.arguments

    def _piece(self, kind: str, text: str) -> tuple[Block, bool, str]:
        begins = not self.blocks or self.blocks[-1].kind != kind
        if begins:
            self.blocks.append(Block(kind))
        self.blocks[-1].pieces.append(text)
        return self.blocks[-1], begins, text


def signature_of(spec: GenerationSpec) -> str:
    """Return what stands for the signature of thinking: clients send it back, and nothing is checked by it."""
    return hashlib.sha256(spec.id.encode()).hexdigest()[:32]


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return usage in Anthropic's form: input_tokens leaves out the tokens that came from the prefix cache."""
    details = (
        {} if usage.reasoning_tokens is None else {"output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}}
    )
    return details | {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def message(generation: Generation, content: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message with its content; without the end while that has not come."""
    spec = generation.spec
    return {
        "id": spec.id,
        "type": "message",
        "role": "assistant",
        "model": spec.model,
        "content": content,
        **_end(generation),
        "usage": usage_body(generation.usage),
    }


async def whole_message(generation: Generation) -> dict[str, Any]:
    """Return the message, once the request has ended. Raise ApiError."""
    blocks = Blocks(generation.spec.hides_thinking)
    while not generation.is_done:
        for delta in await generation.next():
            for _ in blocks.add(delta):
                pass
    signature = signature_of(generation.spec)
    return message(generation, [block.body(signature) for block in blocks.blocks])


def _end(generation: Generation) -> dict[str, str | None]:
    choice = generation.choices[0]
    if choice.finish_reason is None:
        return {"stop_reason": None, "stop_sequence": None}
    if choice.finish_reason == "stop" and choice.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
    return {"stop_reason": REASONS[choice.finish_reason], "stop_sequence": None}


class MessageEvents:
    """Turn deltas into typed events; the writer of an EventStream (openai/answers.py).

    message_start waits for the first tokens: only then it is known how many of the prompt's the prefix cache had.
    """

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._position = Position(list(generation.position.last_indices), generation.position.usage)
        self._blocks = Blocks(generation.spec.hides_thinking)
        self._signature = signature_of(generation.spec)
        generation.passed_over = self._pass_over

    def echo(self) -> bytes:
        """Return what comes before the first token: nothing."""
        return b""

    def events(self, deltas: list[Delta]) -> bytes:
        """Return events of one delivery; empty when all its text is still held back."""
        events = [*self._start(), *(event for delta in deltas for event in self._content(delta))]
        if not events:
            return b""
        if deltas and any(delta.text or delta.calls or delta.reasoning for delta in deltas):
            choice = self._generation.choices[0]
            self._position.last_indices[0] = choice.count - (choice.finish_reason is None)
        return self._encode(events)

    def end(self, usage: Usage) -> bytes:
        """Return the end of the last block, and of the message."""
        stop = _event({"type": "message_stop"})
        if self._position.usage:
            return stop
        events = [*self._start(), *self._stop_block()]
        end = {"type": "message_delta", "delta": _end(self._generation), "usage": usage_body(usage)}
        self._position = Position([self._generation.choices[0].count + 1], usage=True)
        return self._encode([*events, end]) + stop

    def error(self, error: ApiError) -> bytes:
        """Return an error after the first byte; the stream ends behind it."""
        return _event(error.messages_body())

    def _pass_over(self, delta: Delta) -> None:
        """Take what the client has read already."""
        for _ in self._blocks.add(delta):
            pass

    def _start(self) -> list[dict[str, Any]]:
        if self._position.last_indices[0] != NOTHING:
            return []
        self._position.last_indices[0] = PREAMBLE
        start = message(self._generation, []) | {"stop_reason": None, "stop_sequence": None}
        start["usage"] = usage_body(replace(self._generation.usage, completion_tokens=0, reasoning_tokens=None))
        return [{"type": "message_start", "message": start}]

    def _content(self, delta: Delta) -> Iterator[dict[str, Any]]:
        blocks = self._blocks.blocks
        open_block = blocks[-1] if blocks else None
        for block, begins, piece in self._blocks.add(delta):
            if begins:
                if open_block is not None:
                    yield from self._close(open_block, len(blocks) - 2)
                yield {"type": "content_block_start", "index": len(blocks) - 1, "content_block": block.start_body()}
                open_block = block
            if piece:
                yield {"type": "content_block_delta", "index": len(blocks) - 1, "delta": block.delta(piece)}

    def _stop_block(self) -> Iterator[dict[str, Any]]:
        if blocks := self._blocks.blocks:
            yield from self._close(blocks[-1], len(blocks) - 1)

    def _close(self, block: Block, index: int) -> Iterator[dict[str, Any]]:
        if block.kind == "thinking":
            signed = {"type": "signature_delta", "signature": self._signature}
            yield {"type": "content_block_delta", "index": index, "delta": signed}
        yield {"type": "content_block_stop", "index": index}

    def _encode(self, events: list[dict[str, Any]]) -> bytes:
        """Return events, the last one with its id."""
        *first, last = events
        stamp = f"id: {self._generation.spec.id}:{self._position}\n".encode()
        return b"".join(map(_event, first)) + stamp + _event(last)


def _event(body: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), orjson.dumps(body))
