"""Lines of batches in OpenAI's form: what a line asks for, and the line with its answer.

`orcinus batch` (services/cli/batch.py) and the gateways (services/gateway/batches/) read and write the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from shared.text import bounded_json

Url = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
URLS: tuple[str, ...] = get_args(Url)
FIELDS = {"custom_id", "method", "url", "body"}
MAX_ID_CHARS = 512
RETRIED = (408, 429, 502, 503, 504)
"""Statuses of a server that is busy or partly down: the line is sent again."""


class LineError(ValueError):
    """A line that is no request. code: as OpenAI's batches have it. param: the field."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def parse_line(text: bytes, endpoint: str = "") -> Line:
    """Return the request of a line. endpoint: allowed beside those of URLS. Raise LineError."""
    try:
        value = bounded_json.parse(text, "the line")
    except bounded_json.JsonError as error:
        code = "invalid_json_line" if error.code == "invalid_json" else error.code
        raise LineError(code, f"{error}; write one JSON object per line") from None
    if not isinstance(value, dict) or set(value) != FIELDS:
        fields = ", ".join(sorted(FIELDS))
        raise LineError("invalid_request", f"wrong fields; write an object of exactly {fields}")
    custom_id, url, body = value["custom_id"], value["url"], value["body"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        problem = f"custom_id is {str(custom_id)[:80]!r}; write a text of 1 to {MAX_ID_CHARS} characters"
        raise LineError("invalid_custom_id", problem, "custom_id")
    if value["method"] != "POST" or url not in (*URLS, endpoint):
        method = str(value["method"])[:80]
        raise LineError("invalid_url", f"{method!r} {str(url)[:80]!r}; use POST to one of {', '.join(URLS)}", "url")
    if not isinstance(body, dict) or body.get("stream") or body.get("background"):
        problem = "body is not an object, streams or runs in the background; write one without stream and background"
        raise LineError("invalid_request", problem, "body")
    return Line(custom_id, url, body)


def answer_line(row_id: str, custom_id: str, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Return the output line of a request that was answered."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": row_id, "custom_id": custom_id, "response": response, "error": None}
