"""Define the errors that a client can see, in OpenAI's shape: {"error": {message, type, param, code}}.

Under /v1/messages they have Anthropic's: {"type": "error", "error": {type, message}}. Handlers raise ApiError; the
exception handlers of app.py turn it into a response, the writer of a stream into an event when the first byte has left
already.
"""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.types import Send

from shared.errors import OrcinusError
from shared.messages import shorten
from shared.text.grammars import NOT_FOLLOWED
from shared.text.tokenizer import EncodersError, TokenizerError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
MESSAGES = "/v1/messages"
MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Of Anthropic's API; what is not here is an api_error from 500 on, an invalid_request_error below."""


MAX_MESSAGE = 2048
MAX_PARAM = 256
"""Characters of what an error says: names of fields come from clients, and may have megabytes."""

NO_THREADS = "thread_unsupported_request"
"""The code by which Anthropic's clients know that they have to send whole conversations."""


def is_messages(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


class ApiError(OrcinusError):
    """One answer that is not a success. `retry_after_s`, rounded up, becomes the Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.message = shorten(message, MAX_MESSAGE)
        super().__init__(self.message)
        self.status = status
        self.param = None if param is None else shorten(param, MAX_PARAM)
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})
        self.fits = 0.0
        """About the share that would fit of a text that is too long; 0 means unknown."""
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))

    def body(self) -> dict[str, Any]:
        """Return the error object of OpenAI's API."""
        error_type = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}

    def messages_body(self) -> dict[str, Any]:
        """Return the error object of Anthropic's API."""
        error_type = MESSAGES_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        details = {"details": {"error_code": self.code}} if self.code == NO_THREADS else {}
        return {"type": "error", "error": {"type": error_type, "message": self.message, **details}}

    def json(self, path: str = "") -> bytes:
        """Return the error object as JSON, in the shape of the API that has the path."""
        return orjson.dumps(self.messages_body() if is_messages(path) else self.body())

    async def send(self, send: Send, path: str = "") -> None:
        """Send the whole answer, from pure ASGI. path: of the request."""
        body = self.json(path)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """Return 400 for one field."""
    return ApiError(400, message, param=param, code=code)


def untokenizable(param: str, error: TokenizerError) -> ApiError:
    """Return 400 for text or ids of one field that the model's tokenizer cannot turn into the other; 503 where it was
    the machine that failed.
    """
    if isinstance(error, EncodersError):
        return unavailable(f"{param} cannot be tokenized now: {error}; {RETRY}", "tokenizer_unavailable")
    return invalid(
        param,
        f"{param} cannot be tokenized by this model's tokenizer: {error}; send another text, or a shorter one",
        "tokenizer_failed",
    )


def undecodable(error: TokenizerError) -> ApiError:
    """Return the error of a request with tokens that the model's tokenizer cannot turn into text."""
    message = f"answer: this model's tokenizer cannot decode its tokens ({error}); send another prompt"
    return ApiError(500, message, code="tokenizer_failed")


RETRY = "retry after the time in Retry-After"


def unavailable(message: str, code: str, retry_after_s: float = 1.0) -> ApiError:
    """Return a 503: nothing is wrong with the request, the client can retry."""
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)


def shutting_down() -> ApiError:
    """Return the 503 for new work of a gateway that is about to end."""
    return unavailable("the gateway is shutting down; send the request again", "shutting_down", 5)


def redis_silent(reason: object) -> ApiError:
    """Return a 503 for what needs Redis while it does not answer."""
    return unavailable(f"Redis does not answer: {reason}; {RETRY}", "redis_unavailable", 2)


def interruption_error() -> ApiError:
    """Return a 503 for a call to Redis that was cancelled."""
    return unavailable("Redis call interrupted; send the request again", "redis_unavailable", 2)


def worker_error(reason: str, grammar_field: str = "") -> ApiError:
    """Return the error of a request that ended with an error of a worker; a 400 for a fault of the request's grammar.

    grammar_field: the field that brought the grammar; empty when that was not recorded.
    """
    _, is_grammar, rest = reason.partition(NOT_FOLLOWED)  # the scheduler puts the worker's code before its words
    if is_grammar:
        text = NOT_FOLLOWED + rest
        if grammar_field:
            text += f"; send a simpler one in {grammar_field}"
        return ApiError(400, text, param=grammar_field or None, code="invalid_grammar")
    return ApiError(500, reason or "the generation failed", code="generation_failed")


def too_big(most_bytes: int, size: str) -> ApiError:
    """Return 413 for a body."""
    text = f"body too large: at most {most_bytes} bytes; got {size}; send less at once"
    return ApiError(413, text, code="body_too_large")


HANDED_OVER, TAKEN_OVER, SLOW_CLIENT = "handed_over", "taken_over", "slow_client"
UNAVAILABLE = "model_unavailable"
"""The code of a 404 for a model of `models.yaml` that has neither worker nor scheduler now."""


def handed_over(request_id: str) -> ApiError:
    """Return the 503 for a request that ends here and can be continued at another gateway."""
    where = f"GET /v1/requests/{request_id}/stream with Last-Event-ID at another gateway continues the stream"
    return unavailable(f"this gateway is shutting down; {where}", HANDED_OVER)


def taken_over() -> ApiError:
    """Return 409 for the older of two connections that read one request."""
    return ApiError(409, "request continued on another connection; read it there", code=TAKEN_OVER)


def memory_low(share: float) -> ApiError:
    """Return 503 for new work while Redis keeps the rest of its memory for what runs."""
    return unavailable(
        f"Redis uses {share:.0%} of its memory; the rest is for running requests; {RETRY}", "redis_memory", 5
    )


def slow_client(max_rows: int) -> ApiError:
    """Return 503 for a client that does not read what waits for it."""
    return ApiError(
        503,
        f"client reads too slowly: {max_rows} events are waiting; read faster, or ask without stream",
        code=SLOW_CLIENT,
    )


def other_tokens() -> ApiError:
    """Return the 500 for tokens that Redis lost and that came out otherwise when they were computed again."""
    text = "tokens in Redis: lost, and others came when they were computed again; send the request again"
    return ApiError(500, text, code="record_lost")


def broken_record() -> ApiError:
    """Return the error of a request with a record in Redis that is not whole or cannot be read."""
    return ApiError(500, "request record in Redis: not whole; send the request again", code="record_lost")


def other_version(version: int, oldest: int, newest: int) -> ApiError:
    """Return the 503 for a request that only a gateway of another build can go on with."""
    return unavailable(
        f"request record in Redis: version {version}, but this gateway reads {oldest} to {newest}; "
        "ask a gateway of the build that took the request, or send it again as a new one",
        "record_version",
    )
