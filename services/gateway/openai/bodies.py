"""Parse request bodies: OpenAI's fields and Orcinus' own, as pydantic models, and `parse_body` from bytes to a model.

Types and ranges are checked here; what depends on the model or the settings (context, vocabulary, choices) in
validate.py. Unknown fields are refused, so that a misspelt one is never ignored. `parse_body` bounds depth and width of
a body around its decoding. Every refusal is an ApiError(400) that names the field, the value and what is allowed.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    WithJsonSchema,
)

from services.gateway.errors import ApiError, invalid, shown
from shared.logprobs import MOST as MOST_LOGPROBS

MAX_PATTERN_CHARS = 16 * 1024
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 1024
MAX_TOOLS = 128

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=MAX_PATTERN_CHARS)]
Choices = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_CHOICE_CHARS)]],
    Field(min_length=1, max_length=MAX_CHOICES),
]
Schema = dict[str, Any]


class Body(BaseModel):
    """Base: no unknown fields, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


class JsonSchema(Body):
    """`response_format.json_schema`. strict: a keyword that cannot be kept is an error; else it is ignored."""

    name: ToolName
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """`structured_outputs`, the form that vLLM has for the guided_* fields."""

    json_: Schema | str | None = Field(None, alias="json")
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, min_length=1)
    json_object: bool | None = None


class StructuredBody(Body):
    """What completions and chat share of it. At most one of them is given."""

    response_format: ResponseFormat | None = None
    guided_json: Schema | str | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, min_length=1, description="Lark, as llguidance takes it")
    structured_outputs: StructuredOutputs | None = None


class FunctionTool(Body):
    """`tools[i].function`. strict: as in JsonSchema, where the call is bound by its schema at all."""

    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Body):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionTool


class ChosenFunction(Body):
    """The function that a call must be of."""

    name: ToolName


class ChosenTool(Body):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Body):
    """`tool_choice.allowed_tools`: those of `tools` that may be called, or of which one has to be."""

    mode: Literal["auto", "required"]
    tools: list[ChosenTool] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


class AllowedChoice(Body):
    """`tool_choice` that narrows the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(value: Any) -> str:
    if isinstance(value, str):
        return "Word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "Allowed" if kind == "allowed_tools" else "Tool"


# The tags are no lower-case words, as what is said of a fault must not name them (bodies.py).
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Word")]
    | Annotated[ChosenTool, Tag("Tool")]
    | Annotated[AllowedChoice, Tag("Allowed")],
    Discriminator(_kind_of_choice),
]


class CalledFunction(Body):
    """What an assistant's message called; arguments are the text of a JSON object."""

    name: ToolName
    arguments: str


class CalledTool(Body):
    """One of `tool_calls` of an assistant's message."""

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 8
MAX_BIAS = 300
MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_DETOKENIZE = 1_000_000
INT64 = 1 << 63

Priority = Literal["realtime", "high", "normal", "low"]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    list[StopString],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {
                    "type": "array",
                    "maxItems": MAX_STOPS,
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                },
            ]
        }
    ),
]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "text, texts, token ids, or lists of token ids",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                },
            ],
        }
    ),
]


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(StructuredBody):
    """What completions and chat share."""

    model: str = Field(min_length=1, max_length=256)
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=1 << 16)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=MAX_BIAS)
    user: str | None = Field(None, max_length=1024)

    # Orcinus' own
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="0 and -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    min_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Priority | None = None
    ttft_slo_ms: int | None = Field(None, ge=1, lt=1 << 31)
    tbt_slo_ms: int | None = Field(None, ge=1, lt=1 << 31)
    deadline_ms: int | None = Field(None, ge=1, lt=1 << 31)
    background: bool | None = None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompt
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=1 << 16)

    # Known to OpenAI, not built yet: accepted only where they ask for nothing (bodies.UNSUPPORTED)
    suffix: Any = None


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)],
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_PARTS,
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ]
        }
    ),
]


class ChatMessage(Body):
    """One message. `developer` is rendered as `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None  # only where tool_calls stand for it
    name: str | None = Field(None, max_length=256)
    refusal: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    tool_calls: list[CalledTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_call_id: str | None = Field(None, min_length=1, max_length=256)
    function_call: Any = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    store: bool | None = None
    service_tier: str | None = Field(None, max_length=32)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = Field(None, max_length=1024)
    prompt_cache_retention: str | None = Field(None, max_length=32)
    safety_identifier: str | None = Field(None, max_length=1024)

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    # As in CompletionBody
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt, or messages."""

    model: str | None = Field(None, max_length=256)
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = Field(None, max_length=256)
    tokens: list[TokenId] = Field(max_length=MAX_DETOKENIZE, fail_fast=True)
    skip_special_tokens: bool | None = None


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is not a success."""

    error: ErrorObject


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
    """Return the JSON value of a body, or of what is called `place`. Raise ApiError(400)."""
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
    """Return the checked body. Raise ApiError(400) for the first bad field."""
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
    """Return the first fault of a pydantic error as OpenAI would say it."""
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
    """Check depth and width of a JSON value, without recursion. Raise ApiError(400)."""
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
