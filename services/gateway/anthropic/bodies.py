"""Read bodies of `/v1/messages` and turn them into a body of `/v1/chat/completions`, which is checked there.

Unknown fields are refused, as everywhere in this API. Fields that only steer Anthropic's service (cache_control,
context_management, service_tier) are accepted and change nothing. Blocks and tools that are not supported are refused
with their type.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from services.gateway.errors import NO_THREADS, ApiError, invalid
from services.gateway.openai.bodies import (
    INT64,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOPS,
    MAX_TOOLS,
    Body,
    ChatBody,
    ScheduledBody,
    Schema,
    StopString,
    ToolName,
    parse_body,
)
from services.gateway.openai.chat import without_billing
from shared.messages import quote

CacheControl = dict[str, Any] | None
MIN_BUDGET = 1024


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: list[Any] | None = Field(None, max_length=0)


class ToolUseBlock(Body):
    """A call of a tool, in a message of the assistant."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: ToolName
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None


class ThinkingBlock(Body):
    """The thinking before an answer. The signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


def _check_supported(*kinds: str) -> BeforeValidator:
    """Return the check that a block has one of the supported types."""

    def check(value: Any) -> Any:
        kind = getattr(value, "type", None) if not isinstance(value, dict) else value.get("type")
        if kind not in kinds:
            names = ", ".join(kinds)
            raise PydanticCustomError("block_type", "type must be one of {names}", {"names": names})
        return value

    return BeforeValidator(check)


def _kind(value: Any) -> str:
    kind: str = value["type"] if isinstance(value, dict) else value.type  # one of those that _supported allows
    return "".join(part.capitalize() for part in kind.split("_"))


# As in openai/bodies.py the tags are no lower-case words, because `_refusal` leaves out of a field's name what is none.
TextOnly = Annotated[TextBlock, _check_supported("text")]
Texts = str | Annotated[list[TextOnly], Field(max_length=MAX_PARTS, fail_fast=True)]


class ToolResultBlock(Body):
    """What a tool answered, in a message of the user."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None


Block = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ToolUseBlock, Tag("ToolUse")]
    | Annotated[ToolResultBlock, Tag("ToolResult")]
    | Annotated[ThinkingBlock, Tag("Thinking")],
    Discriminator(_kind),
    _check_supported("text", "tool_use", "tool_result", "thinking"),
]


class InputMessage(Body):
    """One message. Claude Code also sends messages of role `system`."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputTool(Body):
    """One of `tools`. What only steers Anthropic's service is not looked at."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[str] | None = Field(None, max_length=16)
    input_examples: list[dict[str, Any]] | None = Field(None, max_length=64)


class InputToolChoice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """`thinking`. It is returned as it is, or with display `omitted` without its text: summaries are not made."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=MIN_BUDGET, lt=1 << 31)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Body):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    """`metadata`."""

    user_id: str | None = Field(None, max_length=1024)


class CountBody(Body):
    """`POST /v1/messages/count_tokens`, and what it shares with `POST /v1/messages`."""

    model: str = Field(min_length=1, max_length=256)
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: Texts | None = None
    tools: list[InputTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: InputToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format

    # Of Anthropic's service: accepted, and nothing depends on them
    cache_control: CacheControl = None
    context_management: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None

    # Known to Anthropic: accepted only where they ask for nothing (openai/bodies.UNSUPPORTED)
    mcp_servers: Any = None


class MessagesBody(CountBody, ScheduledBody):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, lt=1 << 31)
    stop_sequences: list[StopString] | None = Field(None, max_length=MAX_STOPS)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Annotated[str, StringConstraints(max_length=64)] | None = None
    diagnostics: dict[str, Any] | None = None
    container: Any = None
    thread: dict[str, Any] | None = None

    # Not of Anthropic
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    ignore_eos: bool | None = None


class MessagesErrorDetails(BaseModel):
    """What Anthropic's clients act on by themselves."""

    error_code: str


class MessagesErrorObject(BaseModel):
    """Anthropic's error object."""

    type: str
    message: str
    details: MessagesErrorDetails | None = None


class MessagesErrorAnswer(BaseModel):
    """Every answer under /v1/messages that is not a success."""

    type: Literal["error"]
    error: MessagesErrorObject


OF_CHAT = (
    "model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "min_p", "repetition_penalty",
    "ignore_eos", *ScheduledBody.model_fields,
)  # fmt: skip
"""Fields that mean the same in both."""


def chat_body(body: CountBody) -> ChatBody:
    """Return the same request to `/v1/chat/completions`. Raise ApiError(400) in the words of this endpoint."""
    if isinstance(body, MessagesBody) and body.thread is not None:
        text = f"thread: this server holds no conversations; send all messages, and no thread; got {quote(body.thread)}"
        raise invalid("thread", text, NO_THREADS)
    _check_thinking(body)
    messages, places = _messages(body)
    fields = {name: value for name in OF_CHAT if (value := getattr(body, name, None)) is not None}
    fields["messages"] = messages
    if messages[-1]["role"] == "assistant":
        fields |= {"continue_final_message": True}
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    form = _format(body)
    if form is not None:
        schema = {"name": "output", "schema": form.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    # Templates know it by either name; a grammar leaves no room for thinking.
    fields["chat_template_kwargs"] = dict.fromkeys(("enable_thinking", "thinking"), thinks and form is None)
    if form is None and body.thinking is not None and body.thinking.type == "enabled":
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if body.output_config is not None and (effort := body.output_config.effort) is not None:
        fields["reasoning_effort"] = "xhigh" if effort == "max" else effort
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    if isinstance(body, MessagesBody):
        if body.stop_sequences:
            fields["stop"] = body.stop_sequences
        if body.metadata is not None:
            fields["user"] = body.metadata.user_id
    try:
        return parse_body(orjson.dumps(fields), ChatBody)
    except ApiError as error:
        raise in_words_of_messages(error, places) from None


def in_words_of_messages(error: ApiError, places: Sequence[int]) -> ApiError:
    """Rewrite an error about the chat request in the names of `/v1/messages`. places: of each message of chat the
    index of the message that it came from, -1 for the system prompt.
    """

    def place(match: re.Match[str]) -> str:
        index = int(match[1])
        if index >= len(places):
            return match[0]  # text of the client, such as the name of a model
        return "system" if places[index] < 0 else f"messages[{places[index]}]"

    error.message = re.sub(r"\bmessages\[(\d{1,9})\]", place, error.message)
    for chat, replacement in (
        (r"(tools\[\d+\]|tool_choice)\.function\b", r"\1"),
        (r"(tools\[\d+\])\.parameters\b", r"\1.input_schema"),
        (r"'stop\b", "'stop_sequences"),
        (r"response_format", "output_config.format"),
        (r"reasoning_effort", "output_config.effort"),
        (r"(thinking_token_budget.*); leave it out", r"\1; send type adaptive"),  # type enabled needs a budget
        (r"thinking_token_budget", "thinking.budget_tokens"),
    ):
        error.message = re.sub(chat, replacement, error.message)
    return error


def places_of(body: CountBody) -> list[int]:
    """Return `places` of `in_words_of_messages`."""
    return _messages(body)[1]


def _check_thinking(body: CountBody) -> None:
    thinking, choice = body.thinking, body.tool_choice
    if thinking is None or thinking.type == "disabled":
        return
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        field = "thinking.budget_tokens"
        raise invalid(
            field, f"{field} is missing: type enabled needs it; send it, or type adaptive", "missing_required_parameter"
        )
    if isinstance(body, MessagesBody) and (budget := thinking.budget_tokens or 0) >= body.max_tokens:
        text = f"thinking.budget_tokens must be less than max_tokens, {body.max_tokens}; got {budget}"
        raise invalid("thinking.budget_tokens", text)
    if choice is not None and choice.type in ("any", "tool"):
        text = f"thinking cannot be combined with tool_choice of type {choice.type}; send auto, or thinking disabled"
        raise invalid("thinking", text)


def _format(body: CountBody) -> OutputFormat | None:
    newer = body.output_config.format if body.output_config is not None else None
    if newer is not None and body.output_format is not None:
        raise invalid(
            "output_format", "only one of output_config.format and output_format can be given; leave output_format out"
        )
    return newer or body.output_format


def _messages(body: CountBody) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the conversation, the system prompt first, and of each message where it came from. Turns of one role that
    follow each other are one. Raise ApiError(400).
    """
    groups: list[list[dict[str, Any]]] = []
    places: list[int] = []
    system = _join(body.system or "")
    if without_billing(system):
        groups.append([{"role": "system", "content": system}])
        places.append(-1)
    for index, message in enumerate(body.messages):
        for turn in _turns(message, f"messages[{index}]"):
            if groups and turn["role"] == groups[-1][0]["role"] and turn["role"] in ("user", "assistant"):
                groups[-1].append(turn)
            else:
                groups.append([turn])
                places.append(index)
    messages = [turns[0] if len(turns) == 1 else _merge(turns) for turns in groups]
    if messages[-1]["role"] == "assistant" and "tool_calls" in messages[-1]:
        text = "messages: the last one has tool_use without a tool_result behind it; send the results, or leave it out"
        raise invalid("messages", text)
    return messages, places


def _turns(message: InputMessage, where: str) -> list[dict[str, Any]]:
    """Return the messages of chat that one message is. Raise ApiError(400)."""
    blocks = message.content
    if isinstance(blocks, str):
        return [{"role": message.role, "content": blocks}]
    kinds_of_role = {
        "user": ("text", "tool_result"),
        "assistant": ("text", "tool_use", "thinking"),
        "system": ("text",),
    }
    for index, block in enumerate(blocks):
        if block.type not in kinds_of_role[message.role]:
            text = f"{where}.content[{index}]: a message of role {message.role} has no {block.type}"
            raise invalid(f"{where}.content", f"{text}; it has {', '.join(kinds_of_role[message.role])}")
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    if message.role == "assistant":
        return [_assistant(blocks, "".join(texts))]
    turns: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _join(block.content or "")}
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    if texts or not turns:
        turns.append({"role": message.role, "content": "\n".join(texts)})
    return turns


def _assistant(blocks: Sequence[Any], text: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        turn["reasoning_content"] = "".join(thoughts)
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": orjson.dumps(block.input).decode()},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return turn | {"tool_calls": calls} if calls else turn


def _merge(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return turns of one role as one. Linear in their length: they are joined once."""
    role, texts = turns[0]["role"], [turn["content"] for turn in turns]
    if role == "user":
        return {"role": role, "content": "\n".join(filter(None, texts))}
    message: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if thoughts := [turn["reasoning_content"] for turn in turns if "reasoning_content" in turn]:
        message["reasoning_content"] = "".join(thoughts)
    if calls := [call for turn in turns for call in turn.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return message


def _join(texts: str | list[TextBlock]) -> str:
    return texts if isinstance(texts, str) else "\n".join(block.text for block in texts)


def _tool(tool: InputTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    given: dict[str, Any] = {"description": tool.description, "strict": tool.strict}
    function |= {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: InputToolChoice) -> dict[str, Any]:
    """Return the fields of chat. Raise ApiError(400)."""
    if (choice.name is not None) != (choice.type == "tool"):
        text = (
            f"tool_choice.name belongs to type tool, and only to it; got type {choice.type}, "
            f"name {quote(choice.name)}; "
            f"{'send name' if choice.type == 'tool' else 'leave name out, or send type tool'}"
        )
        raise invalid("tool_choice", text)
    named: Any = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type)}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields
