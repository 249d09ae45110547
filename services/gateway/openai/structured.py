"""The fields of a body that bind the output (response_format, guided_*) and those of tools, as pydantic models.

What depends on the model, grammars above all, is checked in grammars.py and tools.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

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
