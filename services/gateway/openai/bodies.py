"""What clients may send, as pydantic models: OpenAI's fields and Orcinus' own.

Types and ranges are checked here; what depends on the model or the settings (context, vocabulary, choices) in
validate.py. Unknown fields are refused, so that a misspelt one is never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, WithJsonSchema

from services.gateway.openai.structured import MAX_TOOLS, Body, CalledTool, StructuredBody, Tool, ToolChoice
from shared.logprobs import MOST as MOST_LOGPROBS

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
