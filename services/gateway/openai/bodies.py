"""Read request bodies: pydantic models of OpenAI's fields and ours, from bytes to a model, from a model to a request.

`parse_body` checks types and ranges and bounds depth and width of a body around its decoding; `read_in_turn` lets a
request wait between decoding and checks, which cost more than a refusal should. Unknown fields are refused, so that a
misspelt one is never ignored. `generation_spec` checks what depends on the model or the settings (context, vocabulary,
choices), the same for completions and chat. Every refusal is an ApiError(400) that names the field, the value and what
is allowed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import time
from typing import Annotated, Any, Literal, TypeVar

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
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from protos import queue_pb2
from services.gateway.auth import Caller
from services.gateway.errors import MAX_PARAM, ApiError, invalid
from services.gateway.gateway import Gateway
from services.gateway.models import ServedModel
from services.gateway.request import ARRIVAL, Arrival, GenerationSpec, Limits
from services.gateway.text.tokenizer import ModelText
from shared import ids
from shared.ids import ENDPOINTS
from shared.messages import quote, shorten
from shared.text import bounded_json
from shared.text.logprobs import MAX_LOGPROBS, prompt_record_bytes, record_bytes
from shared.wire.columns import pack, pack_float

MAX_PATTERN_CHARS = 16 * 1024
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 1024
MAX_TOOLS = 128

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=MAX_PATTERN_CHARS)]
Metadata = dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]]
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
    """The fields that bind the output, in completions and chat. At most one of them is given."""

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
    """The function that has to be called."""

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


# The tags are no lower-case words, because `_refusal` leaves out of a field's name what is none.
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Word")]
    | Annotated[ChosenTool, Tag("Tool")]
    | Annotated[AllowedChoice, Tag("Allowed")],
    Discriminator(_kind_of_choice),
]


class CalledFunction(Body):
    """A call in an assistant's message; arguments are the text of a JSON object."""

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
MAX_VARIABLES = 32
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


class Prediction(Body):
    """`prediction`: what the output probably is. What is right of it saves time; the rest changes nothing."""

    type: Literal["content"]
    content: Content


DRAFTERS = {"auto": True, "off": False, "suffix": True}
"""The names that `speculate` may have, and whether the request may have drafts."""


def _may_have_drafts(value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value in DRAFTERS:
        return DRAFTERS[value]
    raise PydanticCustomError("drafter", "is no drafter; use auto, off or suffix")


class ScheduledBody(Body):
    """The fields that say how a request is scheduled, in all that generate text. Not of OpenAI or Anthropic."""

    priority: Priority | None = None
    ttft_slo_ms: int | None = Field(None, ge=1, lt=1 << 31)
    tbt_slo_ms: int | None = Field(None, ge=1, lt=1 << 31)
    deadline_ms: int | None = Field(None, ge=1, lt=1 << 31)
    speculate: Annotated[
        bool | None,
        BeforeValidator(_may_have_drafts),
        WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": [*DRAFTERS], "type": "string"}, {"type": "null"}]}),
    ] = Field(None, description="false, off: guess no next tokens; no token depends on it")


class GenerationBody(StructuredBody, ScheduledBody):
    """The fields that completions and chat share."""

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

    # Not of OpenAI
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="0 and -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    min_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    background: bool | None = None
    prediction: Prediction | None = None  # of OpenAI's chat
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="of each prompt token and so many of the most likely ones"
    )


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompt
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=1 << 16)

    # Known to OpenAI, not built yet: accepted only where they ask for nothing (bodies.UNSUPPORTED)
    suffix: Any = None


class TemplateBody(Body):
    """The fields that the chat template gets beside messages and tools."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[Annotated[str, StringConstraints(max_length=64)], Any] | None = Field(
        None, max_length=MAX_VARIABLES
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ChatMessage(Body):
    """One message. `developer` is rendered as `system`. reasoning: another name of reasoning_content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None  # only where tool_calls stand for it
    name: str | None = Field(None, max_length=256)
    refusal: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    tool_calls: list[CalledTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_call_id: str | None = Field(None, min_length=1, max_length=256)
    function_call: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatBody(GenerationBody, TemplateBody):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    metadata: Metadata | None = Field(None, max_length=16)
    store: bool | None = None
    service_tier: str | None = Field(None, max_length=32)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: int | None = Field(None, ge=1, lt=1 << 31)  # as vLLM calls it
    prompt_cache_key: str | None = Field(None, max_length=1024)
    prompt_cache_retention: str | None = Field(None, max_length=32)
    safety_identifier: str | None = Field(None, max_length=1024)

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    # As in CompletionBody
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None


class PooledBody(Body):
    """The fields that embeddings, rerank and score share; all but the first two are not of OpenAI."""

    model: str = Field(min_length=1, max_length=256)
    user: str | None = Field(None, max_length=1024)
    priority: Priority | None = None
    ttft_slo_ms: int | None = Field(None, ge=1, lt=1 << 31)
    background: bool | None = None


class EmbeddingsBody(PooledBody):
    """`POST /v1/embeddings`."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, lt=1 << 31)

    # Not of OpenAI
    add_special_tokens: bool | None = None


PairText = Annotated[str, StringConstraints(min_length=1)]
PairTexts = Annotated[list[PairText], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
Instruction = Annotated[str, StringConstraints(max_length=MAX_PATTERN_CHARS)]


class RerankDocument(Body):
    """One of `documents` as an object."""

    text: PairText


class RerankBody(PooledBody):
    """`POST /v1/rerank`, in Cohere's form. instruction: what a document is to do, for models that are told."""

    query: PairText
    documents: list[PairText | RerankDocument] = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)
    top_n: int | None = Field(None, ge=1, lt=1 << 31)
    return_documents: bool | None = None
    instruction: Instruction | None = None


class ScoreBody(PooledBody):
    """`POST /v1/score`, in vLLM's form."""

    text_1: PairText | PairTexts
    text_2: PairText | PairTexts
    instruction: Instruction | None = None


class TokenizeBody(TemplateBody):
    """`POST /tokenize`: a prompt, or messages."""

    model: str | None = Field(None, max_length=256)
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-][A-Za-z0-9._/-]{0,127}$")]


class LoadAdapterBody(Body):
    """`POST /v1/load_lora_adapter`, in vLLM's form."""

    lora_name: AdapterName
    lora_path: str = Field(min_length=1, max_length=4096, description="a folder as PEFT saves it, below --adapter-dir")
    model: str | None = Field(None, max_length=256, description="its base; the gateway's first model without it")
    load_inplace: bool | None = Field(None, description="let a name that is taken stand for this adapter from now on")


class UnloadAdapterBody(Body):
    """`POST /v1/unload_lora_adapter`, in vLLM's form."""

    lora_name: AdapterName
    lora_int_id: int | None = Field(None, description="has no effect")
    model: str | None = Field(None, max_length=256, description="its base; the gateway's first model without it")


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


# Field -> the values that ask for nothing; any other value is refused until the feature is built.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_options": (),
    "mcp_servers": ([],),
    "container": (),
}

T = TypeVar("T", bound=BaseModel)


def parse_json(body: bytes, place: str = "the body", param: str | None = None) -> Any:
    """Return the JSON value of a body, or of what is called `place`. Raise ApiError(400)."""
    try:
        return bounded_json.parse(body, place)
    except bounded_json.JsonError as error:
        raise invalid(param, str(error), error.code) from error


def parse_body(body: bytes, kind: type[T]) -> T:
    """Return the checked body. Raise ApiError(400) for the first bad field."""
    return check_body(parse_object(body), kind)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raise ApiError(400)."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise invalid(None, f"the body must be a JSON object, not {quote(value)}")
    return value


def check_body(value: dict[str, Any], kind: type[T]) -> T:
    """Return the body that an object describes. Raise ApiError(400) for the first bad field."""
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from error
    for name in UNSUPPORTED if not UNSUPPORTED.keys().isdisjoint(value) else ():
        sent = getattr(body, name, None)
        if sent is None or any(type(sent) is type(value) and sent == value for value in UNSUPPORTED[name]):
            continue
        raise invalid(name, f"{name} is not supported yet; leave it out; got {quote(sent)}", "unsupported_parameter")
    return body


async def read_body(request: Request, kind: type[T]) -> T:
    """Return the checked body of a request. Raise ApiError(400, 413, 415)."""
    raw = await _json_bytes(request)
    ARRIVAL.set(dataclasses.replace(ARRIVAL.get(), size_bytes=len(raw)))
    return parse_body(raw, kind)


async def read_in_turn(gateway: Gateway, request: Request, kind: type[T], arrived_at: float) -> T:
    """Return the checked body of a request that a model is to answer, in its turn. Raise as `read_body`, and
    ApiError(403, 429).

    arrived_at: time.monotonic() at its arrival.
    """
    raw = await _json_bytes(request)
    value, headers = parse_object(raw), request.headers
    if "idempotency-key" in headers:
        request.state.body_sha256 = hashlib.sha256(raw).digest()
    returns = "last-event-id" in headers and value.get("background") is True
    may_exist = "idempotency-key" in headers or returns
    arrival = Arrival.of(value, raw, request.state.caller, arrived_at, may_exist)
    request.state.arrival = arrival
    has_waited = await wait_for_turn(gateway, value.get("model"), request.state.caller, arrival)
    if has_waited and not (may_exist or arrival.background) and await request.is_disconnected():
        raise ClientDisconnect
    return check_body(value, kind)


async def wait_for_turn(gateway: Gateway, name: Any, caller: Caller, arrival: Arrival) -> bool:
    """Return when a request may begin: whether it had to wait. name: of the model in its body. Raise ApiError(429)."""
    ARRIVAL.set(arrival)
    models = gateway.models
    known = models.open.get(name) or models.with_adapter(name) if isinstance(name, str) else None
    model = models.first_model if name is None else known
    if model is None or not caller.may_use(model.name):  # its queue is not known, or none of the caller's business
        return await gateway.turns.wait(arrival)
    return await model.admission.wait_for_turn(gateway.turns, arrival)


async def _json_bytes(request: Request) -> bytes:
    """Return the bytes of a body, which the request does not keep: it may wait for long. Raise ApiError(413, 415)."""
    # Also without the header: a page of another site may send a body without one, and no preflight asks us before.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            415, f"content-type must be application/json; got {content_type!r}", code="unsupported_media_type"
        )
    body = bytearray()
    async for part in request.stream():
        body += part
    return bytes(body)


def _refusal(error: ValidationError) -> ApiError:
    """Return the first fault of a pydantic error in OpenAI's words."""
    first, *others = error.errors(include_url=False, include_context=False)
    while others and first["type"] == "string_type" and isinstance(first["input"], list):
        # Text or a list of parts: a list was sent, so what is wrong is in it.
        parent = first["loc"][:-1]
        within = [other for other in others if parent and other["loc"][: len(parent)] == parent]
        first, others = (within[0], within[1:]) if within else (first, [])
    # Names of union members ("str", "list[TextPart]") are pydantic's, not the client's.
    location = [part for part in first["loc"] if isinstance(part, int) or re.fullmatch(r"[a-z_0-9]+", str(part))]
    location = [part for part in location if part not in ("str", "[key]")]
    param = ""
    for part in location:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    place = shorten(param, MAX_PARAM)
    if location and location[0] != "messages":  # the field is enough; the message names the item
        param = str(location[0])
    if first["type"] == "extra_forbidden":
        return invalid(place, f"Unrecognized request argument supplied: {place}", "unknown_parameter")
    if first["type"] == "missing":
        return invalid(place, f"you must provide the parameter {place}", "missing_required_parameter")
    if first["type"] == "drafter":
        return invalid(param, f"{place}: {quote(first['input'])} {first['msg']}", "invalid_value")
    return invalid(param, f"Invalid value for '{place}': {first['msg']}; got {quote(first['input'])}", "invalid_value")


MAX_RECORD_BYTES = 64 << 20
"""What the log-probabilities of one request may take in Redis."""
MAX_PROMPT_RECORD_BYTES = 8 << 20
"""What those of its prompts may take, in all choices that return them; as JSON they take up to nine times as much."""
MAX_ECHOED_CHARS = 16 << 20
"""Of the prompts that `echo` returns, in all choices."""


def requested_logprobs(body: GenerationBody) -> int | None:
    """Return how many most likely tokens go beside each sampled one, None for no log-probabilities. Raise ApiError."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if not isinstance(body, ChatBody):
        return None
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", f"top_logprobs needs logprobs to be true; got {body.top_logprobs} without it")
    return (body.top_logprobs or 0) if body.logprobs else None


def requested_choices(body: GenerationBody) -> tuple[int, int]:
    """Return how many choices of each prompt run, and how many of them, the best, are returned; 0 means all. Raise
    ApiError.
    """
    n = body.n or 1
    best_of = body.best_of if isinstance(body, CompletionBody) else None
    if best_of is None or best_of == n:
        return n, 0
    if best_of < n:
        raise invalid("best_of", f"best_of must be at least n, {n}; got {best_of}")
    if body.stream:
        raise invalid(
            "best_of", f"best_of above n cannot be streamed: the best choice is known at the end; got {best_of}"
        )
    return best_of, n


def check_records(choices: int, max_tokens: int, logprob_count: int) -> None:
    """Raise ApiError when the log probabilities of a request could take more than MAX_RECORD_BYTES in Redis."""
    size = choices * max_tokens * record_bytes(logprob_count)
    if size > MAX_RECORD_BYTES:
        raise invalid(
            "logprobs",
            f"log-probabilities of {choices} choices x {max_tokens} tokens may take {size >> 20} MiB of Redis; "
            f"a request gets at most {MAX_RECORD_BYTES >> 20}: ask for fewer choices, tokens or most likely ones",
        )


def check_prompt_records(spec: GenerationSpec) -> None:
    """Raise ApiError for log-probabilities of prompts that are streamed, or take too much."""
    if not (count := spec.prompt_wanted):
        return
    field = "echo" if spec.prompt_logprobs is None else "prompt_logprobs"
    if spec.stream:
        text = "stream cannot be combined with log-probabilities of the prompt, which come in one answer"
        raise invalid("stream", f"{text}; leave stream out, or {field}")
    tokens = spec.prompt_tokens * (1 if spec.endpoint == "chat" else spec.keep or spec.n)
    if (size := tokens * prompt_record_bytes(count)) > MAX_PROMPT_RECORD_BYTES:
        raise invalid(
            field,
            f"log-probabilities of {tokens} prompt tokens, counted in each choice, and {count - 1} others beside each "
            f"would take {size / 2**20:.1f} MiB; an answer gets at most {MAX_PROMPT_RECORD_BYTES >> 20}: send fewer "
            "or shorter prompts, or ask for fewer choices or most likely tokens",
        )


def check_echo(spec: GenerationSpec) -> None:
    """Raise ApiError for prompts that would be returned so often that the answer is too long."""
    if spec.echo and (chars := sum(map(len, spec.prompt_texts)) * (spec.keep or spec.n)) > MAX_ECHOED_CHARS:
        raise invalid(
            "echo",
            f"echo would return {chars} characters of prompts, counted in each choice; at most {MAX_ECHOED_CHARS} are "
            "returned: send fewer or shorter prompts, or ask for fewer choices",
        )


COPIED = GenerationBody.model_fields.keys() & {field.name for field in dataclasses.fields(GenerationSpec)} - {
    "n",
    "max_tokens",
    "prediction",
}
"""Fields that a body and the spec have under one name; those left out depend on the model."""


async def served_model(gateway: Gateway, name: str | None, caller: Caller, lately: bool = False) -> ServedModel:
    """Return the model that a name in a request means; without a name the gateway's first. Every route resolves here.

    lately: an adapter's name that was taken away will do, too; what is then begun asks `choose_adapter`.
    Raise ApiError: 404 for a name that no model here has, 403 for a model that the caller's key is not for.
    """
    models = gateway.models
    model = models.first_model if name is None else models.open.get(name) or models.with_adapter(name)
    if caller.models:
        wanted_name = model.name if model is not None else models.resolve(name or "")
        if wanted_name and wanted_name not in caller.models:
            names = ", ".join(sorted(caller.models))
            raise ApiError(
                403, f"model: this key is for {names}; got {quote(name or wanted_name)}", param="model",
                code="model_not_allowed",
            )  # fmt: skip
    if model is None:
        model = await models.open_model(name or "", caller)
        if not (lately or models.has(name or "") or name in model.adapters.records):
            raise models.unknown(name or "", caller)
    model.used_at = time.monotonic()
    return model


def choose_adapter(model: ServedModel, spec: GenerationSpec) -> ApiError | None:
    """Set the adapter that the name in a request stands for now. Return the refusal, a 404, for a name that no adapter
    has any more: only what an Idempotency-Key has begun goes on.
    """
    if spec.model == model.name or spec.model in model.aliases:
        return None
    if (digest := model.adapters.digest(spec.model)) is None:
        text = f"The model {quote(spec.model)} does not exist; this server has {model.name!r}"
        return ApiError(404, text, param="model", code="model_not_found")
    spec.adapter = digest
    return None


def check_task(model: ModelText, task: str) -> None:
    """Raise ApiError for what the model cannot do."""
    if task not in model.tasks:
        paths = ", ".join(ENDPOINTS[other].path for other in model.tasks)
        text = f"model: this model is for {', '.join(model.tasks)}, not for {task}; use {paths}, or another model"
        raise ApiError(400, text, param="model", code="unsupported_task")


def check_choices(prompts: int, n: int, limits: Limits, param: str = "n") -> None:
    if prompts > limits.max_choices and param != "n":
        raise invalid(
            param, f"{param} has {prompts} items; this server's limit is {limits.max_choices}; send them in parts"
        )
    if prompts * n > limits.max_choices:
        raise invalid(
            "n",
            f"prompts x n = {prompts} x {n} = {prompts * n} is more than this server's limit of {limits.max_choices}; "
            "send fewer at once",
        )


def check_length(least: int, limits: Limits, param: str) -> None:
    """Refuse texts so long that tokenizing them would be waste; the factor leaves room for normalizers."""
    if least > 4 * limits.max_model_len:
        raise invalid(
            param,
            f"This model's maximum context length is {limits.max_model_len} tokens, "
            f"however your {param} alone has more than {least // 4}. Please shorten it.",
            "context_length_exceeded",
        )


def _too_long(param: str, text: str, tokens: int, most: int) -> ApiError:
    """Return the 400 for a prompt of more tokens than `most`."""
    error = invalid(param, text, "context_length_exceeded")
    error.fits = max(1, most) / max(1, tokens)
    return error


def room_after(prompt_tokens: int, limits: Limits, param: str, needs: int = 1) -> int:
    """Return the tokens that can follow the prompt. Raise when the prompt leaves less than `needs`."""
    if limits.max_input_tokens and prompt_tokens > limits.max_input_tokens:
        text = f"{param} has {prompt_tokens} tokens; this server accepts at most {limits.max_input_tokens}"
        raise _too_long(param, text, prompt_tokens, limits.max_input_tokens)
    room = limits.max_model_len - prompt_tokens
    if room < needs:
        text = (
            f"This model's maximum context length is {limits.max_model_len} tokens, however your {param} has "
            f"{prompt_tokens} tokens{'' if room else ' and leaves no room for one more'}. Please shorten it."
        )
        raise _too_long(param, text, prompt_tokens, limits.max_model_len - needs)
    return min(room, limits.max_output_tokens or room)


def check_output(max_tokens: int, prompt_tokens: int, room: int, limits: Limits, param: str) -> None:
    if limits.max_output_tokens and max_tokens > limits.max_output_tokens:
        raise invalid(param, f"{param} must be at most {limits.max_output_tokens} on this server; got {max_tokens}")
    if max_tokens > room:
        text = (
            f"This model's maximum context length is {limits.max_model_len} tokens, however you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt; {max_tokens} for the completion). "
            f"Please reduce the prompt or {param}."
        )
        raise _too_long(param, text, prompt_tokens, limits.max_model_len - max_tokens)


def generation_spec(
    body: GenerationBody,
    model: ModelText,
    limits: Limits,
    endpoint: str,
    prompts: list[list[int]],
    prompt_texts: list[str],
    max_tokens: int,
    echo: bool,
    request_id: str | None,
) -> GenerationSpec:
    """Return the checked request that completions and chat make of their body. request_id: None for a new one. Raise
    ApiError(400).
    """
    n, keep = requested_choices(body)
    logprobs = requested_logprobs(body)
    logprob_count = int(keep > 0) if logprobs is None else logprobs + 1
    check_choices(len(prompts), n, limits)
    check_records(len(prompts) * n, max_tokens, logprob_count)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true")
    if body.background and body.stream:
        raise invalid(
            "background", "background cannot be combined with stream; read it with GET /v1/requests/{id}/stream"
        )
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens must be at most max_tokens, {max_tokens}; got {min_tokens}")
    for index, token in enumerate(body.stop_token_ids or []):
        if token >= model.vocab_size:
            raise invalid(
                "stop_token_ids",
                f"stop_token_ids[{index}] must be a token id from 0 to {model.vocab_size - 1}; got {token}",
            )
    eos = [] if body.ignore_eos else model.eos_ids
    body_fields = {name: value for name in COPIED if (value := getattr(body, name)) is not None}
    spec = GenerationSpec(
        **body_fields,
        id=request_id or ids.request_id(endpoint),
        endpoint=endpoint,
        created=int(time.time()),
        prompts=prompts,
        prompt_texts=prompt_texts,
        n=n,
        max_tokens=max_tokens,
        stop_ids=list(dict.fromkeys([*eos, *(body.stop_token_ids or [])])),
        sampling=_make_sampling(body, model, logprob_count),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        continuous_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        echo=echo,
        logprobs=logprobs,
        keep=keep,
    )
    check_prompt_records(spec)
    check_echo(spec)
    spec.sampling.prompt_logprobs = spec.prompt_wanted
    return spec


def _make_sampling(body: GenerationBody, model: ModelText, logprobs: int) -> queue_pb2.Sampling:
    bias: dict[int, float] = {}
    defaults = model.defaults
    for name, value in (body.logit_bias or {}).items():
        if not re.fullmatch(r"[0-9]{1,10}", name) or int(name) >= model.vocab_size:
            raise invalid(
                "logit_bias", f"logit_bias keys must be token ids from 0 to {model.vocab_size - 1}; got {quote(name)}"
            )
        bias[int(name)] = value
    return queue_pb2.Sampling(
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=defaults.top_k if body.top_k is None else max(0, body.top_k),
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        seed=ids.seed() if body.seed is None else body.seed % (2 * INT64),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or defaults.repetition_penalty,
        logprobs=logprobs,
        bias_ids=pack(list(bias)) if bias else b"",
        bias_values=pack_float(list(bias.values())) if bias else b"",
    )
