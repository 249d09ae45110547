"""From the bytes of a request to a checked pydantic body. Knows types and ranges, not the model.

Every refusal is an ApiError(400) that names the field, what was sent and what is allowed.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from services.gateway.errors import ApiError, invalid, shown

MAX_JSON_DEPTH = 32
MAX_MEMBERS = 4096
"""Of one object. A check may find a fault in every member, and each costs the event loop two microseconds."""
MAX_CONTAINERS = 65_536
"""Objects and lists of a body."""

# Field -> the values that ask for nothing; any other value is refused until the feature is built.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_options": (),
}

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""Of JSON, also one that has no end: the pattern never fails behind a quote, so no byte is looked at twice."""
T = TypeVar("T", bound=BaseModel)


def parse_json(body: bytes, place: str = "the body", param: str | None = None) -> Any:
    """The JSON value of a body, or of what is called `place`. Raises ApiError(400)."""
    brackets = body.count(b"[") + body.count(b"{")
    # Counted before they are made: the garbage collector goes through all of them again and again.
    if brackets > MAX_CONTAINERS and (brackets := _brackets_outside_strings(body)) > MAX_CONTAINERS:
        text = f"{place} may have {MAX_CONTAINERS} JSON objects and lists; got {brackets}"
        raise invalid(param, text, "json_too_wide")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(param, f"{place} is not valid JSON in UTF-8: {error}", "invalid_json") from error
    # Small bodies cannot be out of bounds, and are not looked through.
    if brackets > MAX_JSON_DEPTH or body.count(b":") > MAX_MEMBERS:
        _check_shape(value, place, param)
    return value


def parse_body(body: bytes, kind: type[T]) -> T:
    """The checked body. Raises ApiError(400) for the first bad field."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise invalid(None, f"the body must be a JSON object, not {shown(value)}")
    try:
        parsed = kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from error
    for name, neutral in UNSUPPORTED.items():
        sent = getattr(parsed, name, None)
        if sent is None or any(type(sent) is type(value) and sent == value for value in neutral):
            continue
        raise invalid(name, f"{name} is not supported yet; got {shown(sent)}", "unsupported_parameter")
    return parsed


def _refusal(error: ValidationError) -> ApiError:
    """The first fault of a pydantic error as OpenAI would say it."""
    first, *others = error.errors(include_url=False, include_context=False)
    if first["type"] == "string_type" and isinstance(first["input"], list):
        # Text or a list of parts: a list was sent, so what is wrong is in it.
        own = first["loc"][:-1]
        first = next((other for other in others if own and other["loc"][: len(own)] == own), first)
    # Names of union members ("str", "list[TextPart]") are pydantic's, not the client's.
    location = [part for part in first["loc"] if isinstance(part, int) or re.fullmatch(r"[a-z_0-9]+", str(part))]
    location = [part for part in location if part not in ("str", "[key]")]
    param = ""
    for part in location:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    place = param
    if location and location[0] != "messages":  # the field is enough; the message says which of its items
        param = str(location[0])
    if first["type"] == "extra_forbidden":
        return invalid(place, f"Unrecognized request argument supplied: {place}", "unknown_parameter")
    if first["type"] == "missing":
        return invalid(place, f"you must provide the parameter {place}", "missing_required_parameter")
    return invalid(param, f"Invalid value for '{place}': {first['msg']}; got {shown(first['input'])}", "invalid_value")


def _brackets_outside_strings(body: bytes) -> int:
    plain = _STRING.sub(b"", body)
    return plain.count(b"[") + plain.count(b"{")


def _check_shape(value: Any, place: str, param: str | None) -> None:
    """Depth and width of a JSON value, without recursion. Raises ApiError(400)."""
    depth = 0
    level = [value]
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise invalid(param, f"{place} nests JSON deeper than {MAX_JSON_DEPTH} levels", "json_too_deep")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                if len(item) > MAX_MEMBERS:
                    text = f"a JSON object in {place} may have {MAX_MEMBERS} members; got {len(item)}"
                    raise invalid(param, text, "json_too_wide")
                below += [child for child in item.values() if isinstance(child, dict | list)]
            elif isinstance(item, list):
                below += [child for child in item if isinstance(child, dict | list)]
        level = below
