"""Answer a checked request in OpenAI's form: as server-sent events, as one body, or with the id to ask for it later.

`serve` is the common end of every endpoint that generates. What is constant in an event is built once per request; only
text and reasons are encoded per event. Every event has an id, `request:` and a Position: what a client that has read so
far has. The client may continue from there at any gateway. A client that leaves cancels its request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.admission import Hold
from services.gateway.auth import Caller
from services.gateway.delivery.stream import NOTHING, PREAMBLE, Delta, Generation, Position, Row, Usage
from services.gateway.errors import ApiError, invalid
from services.gateway.models import ServedModel
from services.gateway.openai.bodies import choose_adapter
from services.gateway.openai.document import errors
from services.gateway.openai.pooled import pooled_answer
from services.gateway.request import GenerationSpec
from services.gateway.text.logprobs import Logprobs, PromptLogprobs
from services.gateway.text.tools.reader import CallPiece, merge
from shared import ids
from shared.messages import quote
from shared.tasks import end

log = logging.getLogger("orcinus.gateway")

GENERATION_ERRORS = errors(403, 404, 409, 415, 429, 503)
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {
        "description": "with `background`: the request waits or runs; `location` says where to ask for it",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}
THREAD_PROMPT_TOKENS = 1024
"""The log-probabilities of more prompt tokens are written beside the event loop."""
_IDEMPOTENCY_KEY = re.compile(r"[ -~]{1,255}")


def json_response(value: object, status: int = 200) -> Response:
    """Return a JSON response, encoded by orjson."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def list_page(items: list[dict[str, Any]], limit: int, after: str, newest_first: bool) -> dict[str, Any]:
    """Return a list object of items, the oldest first, behind the one with the id `after`. Raise ApiError(400)."""
    ordered_items = items[::-1] if newest_first else items
    begin = 0
    if after:
        begin = next((index + 1 for index, item in enumerate(ordered_items) if item.get("id") == after), 0)
        if not begin:
            raise invalid("after", f"after {quote(after)} is not in this list; leave it out", "invalid_value")
    page = ordered_items[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0].get("id") if page else None,
        "last_id": page[-1].get("id") if page else None,
        "has_more": begin + limit < len(ordered_items),
    }


async def serve(model: ServedModel, request: Request, spec: GenerationSpec, arrived_at: float) -> Response:
    fingerprint = model.text.fingerprint
    if spec.max_tokens == 0:  # echo only: nothing is generated
        if refusal := choose_adapter(model, spec):
            raise refusal
        return _echo_only(spec, fingerprint)
    take_headers(model, request, spec)
    if spec.background:
        refusal = choose_adapter(model, spec)
        await model.admission.begin_background(spec, request.state.caller, arrived_at, refusal)
        return _accept(spec)
    last_event = request.headers.get("last-event-id", "") if spec.stream else ""
    generation, headers = await begin(model, request, spec, arrived_at, last_event)
    if spec.stream:
        return EventStream(generation, EventWriter(generation, fingerprint), model.settings.keepalive_s, headers)
    return await whole_response(collect(generation, request, answer_body(generation, fingerprint)), headers)


def take_headers(model: ServedModel, request: Request, spec: GenerationSpec) -> None:
    """Set what the spec has of the head: trace, content, the id that an Idempotency-Key names. Raise ApiError(400)."""
    spec.traceparent = request.headers.get("traceparent", "")[:256]
    spec.content = request.state.arrival.content
    request.state.spec = spec  # for the log
    key = request.headers.get("idempotency-key")
    if key is None:
        return
    if not _IDEMPOTENCY_KEY.fullmatch(key):
        raise invalid(
            "Idempotency-Key", f"Idempotency-Key must be 1 to 255 printable ASCII characters; got {quote(key)}"
        )
    kind = ids.kind_of(spec.id)
    spec.id = ids.named_request_id(kind, request.state.tenant, request.state.caller.salt, key, model.id_part)
    spec.body_sha256 = request.state.body_sha256


async def begin(
    model: ServedModel, request: Request, spec: GenerationSpec, arrived_at: float, last_event: str = ""
) -> tuple[Generation, dict[str, str]]:
    """Begin a request with a waiting client; return it and the headers of its answer. Raise ApiError; it must be
    closed.
    """
    caller: Caller = request.state.caller
    refusal = choose_adapter(model, spec)
    hold = holding_bytes(model, request)
    generation = await model.admission.begin(spec, caller, arrived_at, last_event, refusal, hold)
    request.state.generation = generation
    return generation, {"x-orcinus-request": spec.id, **caller.rates.headers(*generation.stream.allowance)}


def holding_bytes(model: ServedModel, request: Request) -> Hold:
    """Return what counts bytes that are read again for this request, until its answer is sent; lines of batches count
    nowhere.
    """
    state = request.state
    if not hasattr(state, "at_end"):
        return lambda size_bytes: None

    def hold(size_bytes: int) -> None:
        of_request = getattr(state, "reread_bytes", 0)
        state.at_end.append(model.rereads.hold(state.caller, size_bytes, of_request))
        state.reread_bytes = of_request + size_bytes

    return hold


def hold_conversation(model: ServedModel, request: Request, size_bytes: int) -> None:
    """Count a conversation that this request holds to store it with its answer, until that is sent; lines of batches
    count nowhere. Raise ApiError(429, 503).
    """
    if hasattr(request.state, "at_end"):
        request.state.at_end.append(model.conversations.hold(request.state.caller, size_bytes))


def release_bytes(request: Request) -> None:
    """Count what this request holds no longer: it is dropped before the answer is sent."""
    state = request.state
    while getattr(state, "at_end", None):
        state.at_end.pop()()
    state.reread_bytes = 0


async def whole_response(answer: Awaitable[dict[str, Any]], headers: dict[str, str]) -> Response:
    """Await the body of an answer and return the response; a client that has left gets an empty one. Raise ApiError."""
    try:
        response = json_response(await answer)
    except ClientLeft:
        return Response(status_code=499)  # no client reads it
    response.headers.update(headers)
    return response


def _accept(spec: GenerationSpec) -> Response:
    """Return the 202 of a background request; `GET /v1/requests/{id}` has its state."""
    state = {
        "id": spec.id,
        "object": "request",
        "status": "queued",
        "background": True,
        "created": spec.created,
        "model": spec.model,
        "priority": spec.priority,
        "prompt_tokens": spec.prompt_tokens,
    }
    response = json_response(state, 202)
    response.headers.update({"x-orcinus-request": spec.id, "location": f"/v1/requests/{spec.id}"})
    return response


def _echo_only(spec: GenerationSpec, fingerprint: str) -> Response:
    if spec.background:
        raise invalid("background", "max_tokens 0 leaves nothing to do in the background; got background true")
    if spec.stream:
        raise invalid("stream", "max_tokens 0 cannot be streamed; got stream true")
    empty = [""] * spec.choices
    usage = Usage(spec.prompt_tokens, 0)
    ids: list[list[int]] = [[] for _ in empty]
    return json_response(answer(spec, fingerprint, empty, ids, ["length"] * spec.choices, usage))


class ClientLeft(Exception):  # noqa: N818 - an event, not an error
    """The client has left before the answer."""


async def collect(
    generation: Generation, request: Request, answer: Coroutine[Any, Any, dict[str, Any]]
) -> dict[str, Any]:
    """Return the body of the answer, which `answer` reads from the generation. Raise ApiError, or ClientLeft after
    cancelling the request.
    """
    answer_task = asyncio.create_task(answer)
    disconnect_task = asyncio.create_task(until_disconnect(request.receive))
    try:
        await asyncio.wait({answer_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not answer_task.done():
            raise ClientLeft
        return answer_task.result()
    finally:
        generation.close()
        await end(answer_task, disconnect_task)


async def answer_body(generation: Generation, fingerprint: str) -> dict[str, Any]:
    """Return the body of the answer, once the request has ended. Raise ApiError."""
    spec = generation.spec
    texts, ids, calls, thoughts = await _run(generation)
    if spec.pooling:
        return pooled_answer(spec, generation.vectors)
    reasons = [choice.finish_reason or "stop" for choice in generation.choices]
    prompts = await generation.prompt_logprobs()
    if generation.logprobs is not None:
        await generation.logprobs.write()
    if spec.prompt_only:
        texts, ids = [""] * spec.choices, [[]] * spec.choices
        reasons = [reason if reason == "deadline" else "length" for reason in reasons]

    def made() -> dict[str, Any]:
        usage, logprobs = generation.usage, generation.logprobs
        return answer(spec, fingerprint, texts, ids, reasons, usage, logprobs, calls, thoughts, prompts)

    if prompts is not None and spec.prompt_tokens > THREAD_PROMPT_TOKENS:
        return await asyncio.to_thread(made)
    return made()


def answer(
    spec: GenerationSpec,
    fingerprint: str,
    texts: list[str],
    ids: list[list[int]],
    reasons: list[str],
    usage: Usage,
    logprobs: Logprobs | None = None,
    calls: list[list[CallPiece]] | None = None,
    thoughts: list[str] | None = None,
    prompts: PromptLogprobs | None = None,
) -> dict[str, Any]:
    """Return OpenAI's completion or chat completion; with best_of, of the choices that are returned."""
    choices = []
    prompt_logprobs, echoes = _list_logprobs(spec, prompts), _echo_columns(spec, prompts)
    for number, index in enumerate(logprobs.choices_to_send() if logprobs is not None else range(len(texts))):
        text, entry = texts[index], None if logprobs is None else logprobs.take(index)
        choice: dict[str, Any] = {"index": number, "logprobs": entry, "finish_reason": reasons[index]}
        if spec.endpoint == "chat":
            choice["message"] = _message(text, calls[index] if calls else [], thoughts[index] if thoughts else "")
        else:
            choice["text"] = spec.prompt_texts[index // spec.n] + text if spec.echo else text
            if echoes is not None:
                choice["logprobs"] = _join(echoes[index // spec.n], None if spec.prompt_only else entry)
            if prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs[index // spec.n]
        if spec.return_token_ids:
            choice["token_ids"] = ids[index]
        choices.append(choice)
    body: dict[str, Any] = {
        "id": spec.id,
        "object": "chat.completion" if spec.endpoint == "chat" else "text_completion",
        "created": spec.created,
        "model": spec.model,
        "system_fingerprint": fingerprint,
        "choices": choices,
        "usage": usage.body(),
    }
    if prompt_logprobs is not None and spec.endpoint == "chat":
        body["prompt_logprobs"] = prompt_logprobs[0]
    return body


def _list_logprobs(
    spec: GenerationSpec, prompts: PromptLogprobs | None
) -> list[list[dict[str, Any] | None] | None] | None:
    """Return `prompt_logprobs` of each prompt, None of one that a deadline ended; None where they are not wanted."""
    if prompts is None or spec.prompt_logprobs is None:
        return None
    return [prompts.list_tokens(prompt) if prompts.has(prompt) else None for prompt in range(len(spec.prompts))]


def _echo_columns(spec: GenerationSpec, prompts: PromptLogprobs | None) -> list[dict[str, bytes] | None] | None:
    """Return the columns of `logprobs` of each echoed prompt, as JSON that all of its choices share; None of one that a
    deadline ended; None where they are not wanted.
    """
    if prompts is None or not spec.echo or spec.logprobs is None:
        return None
    return [
        {name: orjson.dumps(column) for name, column in prompts.echo(prompt).items()} if prompts.has(prompt) else None
        for prompt in range(len(spec.prompts))
    ]


def _join(echo: dict[str, bytes] | None, output: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `logprobs` of an echoed prompt and the output behind it."""
    if echo is None:
        return None
    if output is None:
        return {name: orjson.Fragment(column) for name, column in echo.items()}
    return {name: orjson.Fragment(column[:-1] + b"," + orjson.dumps(output[name])[1:]) for name, column in echo.items()}


def _message(text: str, calls: list[CallPiece], reasoning: str) -> dict[str, Any]:
    """Return the message of an assistant that may have thought and called tools."""
    content = None if (calls or reasoning) and not text else text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        bodies = [{key: value for key, value in call.body().items() if key != "index"} for call in merge(calls)]
        message["tool_calls"] = bodies
    return message


async def _run(generation: Generation) -> tuple[list[str], list[list[int]], list[list[CallPiece]], list[str]]:
    """Read a request to its end; return text, token ids, tool calls and thinking of each choice."""
    texts: list[list[str]] = [[] for _ in generation.choices]
    ids: list[list[int]] = [[] for _ in generation.choices]
    calls: list[list[CallPiece]] = [[] for _ in generation.choices]
    thoughts: list[list[str]] = [[] for _ in generation.choices]
    while not generation.is_done:
        for delta in await generation.next():
            texts[delta.choice].append(delta.text)
            ids[delta.choice] += delta.token_ids
            calls[delta.choice] += delta.calls
            thoughts[delta.choice].append(delta.reasoning)
    return ["".join(parts) for parts in texts], ids, calls, ["".join(parts) for parts in thoughts]


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
SLOW_FLUSH_S = 5.0
"""Time for a client that was cut for slowness to read the error event."""


class Writer(Protocol):
    """Make the events of one request. keep_alive: what is sent while there is nothing else."""

    keep_alive: bytes

    def echo(self) -> bytes:
        """Return what comes before the first token; may be empty."""
        ...

    def events(self, deltas: list[Delta]) -> bytes:
        """Return events of one delivery; empty when all its text is still held back."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return what comes behind the last token."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Return an error after the first byte; the stream ends behind it."""
        ...


class EventWriter:
    """Turn deltas into events in OpenAI's form."""

    keep_alive = KEEP_ALIVE

    def __init__(self, generation: Generation, fingerprint: str) -> None:
        spec = generation.spec
        self._generation = generation
        self._spec = spec
        self._chat = spec.endpoint == "chat"
        head = {
            "id": spec.id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": spec.created,
            "model": spec.model,
            "system_fingerprint": fingerprint,
        }
        self._id = b"id: " + spec.id.encode() + b":"
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if spec.include_usage else b"]}\n\n"
        self._position = Position(list(generation.position.last_indices), generation.position.usage)
        # Of nearly every event, all but its index and its text never changes.
        varies = spec.return_token_ids or spec.continuous_usage or spec.logprobs is not None
        self.is_plain = spec.choices == 1 and not varies
        self._text_head = self._head + b'{"index":0,' + (b'"delta":{"content":' if self._chat else b'"text":')
        self._behind = (b"}" if self._chat else b"") + b',"logprobs":null,"finish_reason":null}' + self._tail

    def echo(self) -> bytes:
        """Return the prompts, if the request has `echo`, before the first token of each choice."""
        parts = []
        for choice, last in enumerate(self._position.last_indices):
            if self._spec.echo and last == NOTHING:
                self._position.last_indices[choice] = PREAMBLE
                parts.append(self._event(choice, self._spec.prompt_texts[choice // self._spec.n], [], None))
        return b"".join(parts)

    def events(self, deltas: list[Delta]) -> bytes:
        """Return events of one delivery; empty when all its text is still held back."""
        last = self._position.last_indices  # moved before each event; its id includes it
        if self.is_plain and len(deltas) == 1 and (last[0] != NOTHING or not self._chat):
            delta = deltas[0]
            if delta.finish_reason is None and not (delta.calls or delta.reasoning):
                return self._text_event(delta.text)
        parts = []
        for delta in deltas:
            count = self._generation.choices[delta.choice].count
            if self._chat and last[delta.choice] == NOTHING:
                last[delta.choice] = PREAMBLE
                parts.append(self._raw(delta.choice, b'"delta":{"role":"assistant","content":""}', [], None))
            ids = delta.token_ids if self._spec.return_token_ids else []
            has_part = delta.calls or delta.reasoning
            if delta.text or has_part or (ids and delta.finish_reason is None):
                last[delta.choice] = count - 1 if delta.finish_reason is None else count
                logprobs = self._logprobs(delta.choice)
                if has_part:  # one event with the text; its id includes all
                    parts.append(self._raw(delta.choice, parts_delta(delta), ids, None, logprobs))
                else:
                    parts.append(self._event(delta.choice, delta.text, ids, None, logprobs))
                ids = []
            if delta.finish_reason is not None:
                last[delta.choice] = count + 1
                parts.append(self._event(delta.choice, "", ids, delta.finish_reason, self._logprobs(delta.choice)))
        return b"".join(parts)

    def _text_event(self, text: str) -> bytes:
        """`_event` of the only choice, for text alone."""
        if not text:
            return b""
        index = self._position.last_indices[0] = self._generation.choices[0].count - 1
        return b"%b%d\n%b%b%b" % (self._id, index, self._text_head, orjson.dumps(text), self._behind)

    def end(self, usage: Usage) -> bytes:
        """Return the usage, if the request wants it, and the end mark."""
        if not self._spec.include_usage or self._position.usage:
            return DONE
        self._position.usage = True
        return self._stamp() + self._head + b'],"usage":' + orjson.dumps(usage.body()) + b"}\n\n" + DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.json() + b"\n\n"

    def _logprobs(self, choice: int) -> bytes:
        """Return the log-probabilities of all tokens since the choice's last event, also of tokens with text held back
        then.
        """
        if self._spec.logprobs is None or self._generation.logprobs is None:
            return b"null"
        return orjson.dumps(self._generation.logprobs.take(choice))

    def _event(self, choice: int, text: str, ids: list[int], reason: str | None, logprobs: bytes = b"null") -> bytes:
        if not self._chat:
            return self._raw(choice, b'"text":' + orjson.dumps(text), ids, reason, logprobs)
        content = b'{"content":' + orjson.dumps(text) + b"}" if text or reason is None else b"{}"
        return self._raw(choice, b'"delta":' + content, ids, reason, logprobs)

    def _raw(self, choice: int, content: bytes, ids: list[int], reason: str | None, logprobs: bytes = b"null") -> bytes:
        tokens = b',"token_ids":' + orjson.dumps(ids) if self._spec.return_token_ids else b""
        finish = b"null" if reason is None else orjson.dumps(reason)
        return b'%b%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}%b' % (
            self._stamp(), self._head, choice, content, logprobs, finish, tokens, self._end_of_event(),
        )  # fmt: skip

    def _end_of_event(self) -> bytes:
        if self._spec.include_usage and self._spec.continuous_usage:
            return b'],"usage":' + orjson.dumps(self._generation.usage.body()) + b"}\n\n"
        return self._tail

    def _stamp(self) -> bytes:
        return self._id + str(self._position).encode() + b"\n"


class EventStream(Response):
    """Answer a streaming request. The writer is stopped when the client leaves or is cut.

    While the writer waits and the connection has room, the task that reads Redis writes each row. The writer writes
    ends, and events that have to wait for the client.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        writer: Writer,
        keepalive_s: float,
        headers: dict[str, str] | None = None,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """before_end: awaited behind the last token, before the writer's end."""
        self.status_code = 200
        self.background = None
        self._generation = generation
        self._writer = writer
        self._keepalive_s = keepalive_s
        self._before_end = before_end
        self._deliver: Callable[[Row], bool] | None = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        extensions = scope.get("extensions", {})
        if "orcinus.write" in extensions:
            self._has_room, self._put = extensions["orcinus.has_room"]["call"], extensions["orcinus.write"]["call"]
            self._deliver = self._at_once
        write_task = asyncio.create_task(self._write(send))
        disconnect_task = asyncio.create_task(until_disconnect(receive))
        cut_task = asyncio.create_task(generation.stream.is_cut.wait())
        try:
            await asyncio.wait({write_task, disconnect_task, cut_task}, return_when=asyncio.FIRST_COMPLETED)
            if cut_task.done() and not disconnect_task.done() and not write_task.done():
                await end(write_task)
                await self._cut(scope, send)
            elif write_task.done():
                write_task.result()
        finally:
            generation.close()
            await end(write_task, disconnect_task, cut_task)
            self._deliver = None  # a method of its own: a cycle

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._write_events(send)
        except ApiError as error:
            await _body(send, self._writer.error(error), is_last=True)
        except Exception:
            log.exception("a stream failed")
            await _body(send, self._writer.error(_internal_error()), is_last=True)

    async def _write_events(self, send: Send) -> None:
        generation, writer = self._generation, self._writer
        if echoed := writer.echo():
            await _body(send, echoed)
        events = b""
        while not generation.is_done:
            deltas = await self._next()
            events = writer.events(deltas) if deltas or generation.is_done else writer.keep_alive
            if events and not generation.is_done:
                await _body(send, events)
        if self._before_end is not None:
            await self._before_end()
        await _body(send, events + writer.end(generation.usage), is_last=True)

    async def _next(self) -> list[Delta]:
        """Return deltas for the writer; empty when nothing was written for `keepalive_s`, by either way."""
        generation, stream, begun = self._generation, self._generation.stream, time.monotonic()
        while True:
            heard_at = max(begun, stream.last_row_at)
            deltas = await generation.next(max(0.0, heard_at + self._keepalive_s - time.monotonic()), self._deliver)
            if deltas or generation.is_done or stream.last_row_at <= heard_at:
                return deltas

    def _at_once(self, row: Row) -> bool:
        """Write what a row adds; False where that would have to wait."""
        generation = self._generation
        if not self._has_room() or generation.holds_end:
            return False
        try:
            if events := self._writer.events(generation.apply([row])):
                self._put(events)
            if not generation.is_plain and generation.is_done:
                generation.stream.wake()
        except Exception:
            log.exception("a stream failed")
            generation.stream.fail(_internal_error())  # the writer sends it
        return True

    async def _cut(self, scope: Scope, send: Send) -> None:
        """Write the error event to a client that does not read, if it still fits, and drop the connection."""
        failure = self._generation.stream.failure or ApiError(503, "the stream was cut", code="cut")
        self._generation.failure = failure
        try:
            async with asyncio.timeout(SLOW_FLUSH_S):
                await _body(send, self._writer.error(failure), is_last=True)
        except TimeoutError:
            abort: Callable[[], None] | None = scope.get("extensions", {}).get("orcinus.abort", {}).get("call")
            if abort is not None:
                abort()


def _internal_error() -> ApiError:
    return ApiError(500, "internal error; see the log of the gateway", code="internal_error")


def parts_delta(delta: Delta) -> bytes:
    """Return the delta of a chunk that has thinking or tool calls."""
    body: dict[str, Any] = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
    if delta.text:
        body["content"] = delta.text
    if delta.calls:
        body["tool_calls"] = [call.body() for call in merge(delta.calls)]
    return b'"delta":' + orjson.dumps(body)


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            return


async def _body(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
