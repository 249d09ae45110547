"""Find what binds or foretells the output of a request: the fields that bring a grammar, tools, and the prediction.

Tools also decide what the chat template shows and how calls are read from the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llguidance import LLMatcher

from services.gateway.errors import invalid, untokenizable
from services.gateway.openai.bodies import (
    AllowedChoice,
    ChatBody,
    ChosenTool,
    GenerationBody,
    Prediction,
    ResponseFormat,
    StructuredBody,
    Tool,
    ToolChoice,
)
from services.gateway.request import CHANNELS, FRAMED, GenerationSpec, ToolUse
from services.gateway.text.grammar import choice_grammar, json_grammar, lark_text
from services.gateway.text.reasoning import budget_grammar, channel_budget_grammar
from services.gateway.text.tokenizer import ModelText
from services.gateway.text.tools.formats import calls_grammar, has_texts, marks_of, texts_of
from shared.messages import quote
from shared.text.tokenizer import TokenizerError
from shared.wire.columns import MAX_PREDICTION, pack

OUTPUT_FIELDS = StructuredBody.model_fields.keys() | {"tools", "tool_choice", "prediction"}
"""A body without any of them binds nothing, names no tool and predicts nothing."""


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The effect of a request's tools.

    use: how calls are read, None where no tool may be called. shown_tools: those for the template. grammar: of an
    answer that has to call, else empty. has_control: a call begins with a control token.
    """

    use: ToolUse | None = None
    shown_tools: tuple[dict[str, Any], ...] = ()
    grammar: str = ""
    has_control: bool = False


def plan_tools(body: ChatBody, model: ModelText) -> ToolPlan:
    """Return the effect of `tools` and `tool_choice`. Raise ApiError(400)."""
    tools, choice = body.tools or [], body.tool_choice or "auto"
    if not tools and choice not in ("none", "auto"):
        raise invalid("tool_choice", "tool_choice is only allowed when tools are given")
    if not tools or choice == "none":
        return ToolPlan()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", f"duplicate name in tools; got {quote(names)}")
    if model.tool_format == "none":
        raise invalid(
            "tools",
            "the chat template of this model has no tools; set the format of calls with --tool-parser",
            "tools_unavailable",
        )
    callable_, is_forced = _callable(tools, choice)
    parallel = body.parallel_tool_calls is not False
    functions = [tool.function for tool in callable_]
    texts = texts_of(functions) if has_texts(model.tool_format) else ()
    use = ToolUse(model.tool_format, tuple(function.name for function in functions), parallel, is_forced, texts)
    grammar = calls_grammar(use, functions, partial(_atom, model=model)) if is_forced else ""
    # With a named function the model sees all tools, also those that it may not call.
    offered = tools if isinstance(choice, ChosenTool) else callable_
    tool_bodies = tuple(tool.model_dump(exclude_none=True) for tool in offered)
    has_control = any(_control_id(mark, model) is not None for mark in marks_of(use.format))
    return ToolPlan(use, tool_bodies, grammar, has_control)


def binds_output(body: StructuredBody, tools: ToolPlan) -> bool:
    """Return whether a grammar is to bind the output from its first token."""
    form = body.response_format
    fields = StructuredBody.model_fields.keys() - {"response_format"}
    has_form = form is not None and form.type != "text"
    return bool(tools.grammar) or has_form or any(getattr(body, name) is not None for name in fields)


async def bind_output(
    spec: GenerationSpec, body: GenerationBody, model: ModelText, tools: ToolPlan, tenant: str
) -> None:
    """Set the grammar that binds the output, how tool calls are read from it, and its prediction. Raise ApiError."""
    spec.grammar_field, spec.sampling.grammar = await output_grammar(body, model, tools, tenant)
    spec.tools = tools.use
    if tools.has_control:
        spec.skip_special_tokens = False  # calls are found by it
    if body.prediction is not None:
        spec.prediction = await encode_prediction(body.prediction, model)


async def bind_thinking(spec: GenerationSpec, body: ChatBody, budget: int, model: ModelText, tenant: str) -> None:
    """Set the grammar that ends the thinking of a request when its budget is spent. Raise ApiError.

    Nothing is bound where the thinking cannot be longer: the answer does not think, or its tokens end before.
    """
    field = "thinking_token_budget"
    if spec.sampling.grammar:
        text = (
            f"{field} cannot be combined with structured output and forced calls, which leave no thinking; leave it out"
        )
        raise invalid(field, text)
    if spec.reasoning in ("", FRAMED) or spec.max_tokens <= budget:
        return
    grammar = await model.threads.run(thinking_grammar, budget, spec, model)  # its first call reads each token's bytes
    if not grammar:
        raise invalid(field, f"{field}: the marks of this model's thinking are not one token each; leave it out")
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise invalid(name, f"{name} cannot be combined with {field}; leave one of them out")
    await model.grammars.check(field, grammar, tenant)
    spec.grammar_field, spec.sampling.grammar = field, grammar


def thinking_grammar(budget: int, spec: GenerationSpec, model: ModelText) -> str:
    """Return the grammar of an answer with so many tokens of thinking; empty where the marks are no tokens."""
    if spec.reasoning == CHANNELS:
        ids = model.channel_ids
        return "" if ids is None else channel_budget_grammar(budget, ids, may_call=spec.tools is not None)
    marks = model.thinking_marks
    return "" if marks is None else budget_grammar(budget, spec.reasoning, marks, model.blank_ids)


async def encode_prediction(prediction: Prediction, model: ModelText) -> bytes:
    """Return the token ids of a prediction, int32. Raise ApiError."""
    content = prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    tokens: list[int] = []
    if len(text) // model.longest <= MAX_PREDICTION:
        try:
            encode = partial(model.encode, text, False)
            tokens = encode() if model.is_quick(len(text)) else await model.threads.run(encode)
        except TokenizerError as error:
            raise untokenizable("prediction.content", error) from error
    least = max(len(tokens), len(text) // model.longest)
    if least > MAX_PREDICTION:
        raise invalid(
            "prediction.content",
            f"prediction.content has {least} tokens or more; this server takes {MAX_PREDICTION}: "
            f"send the part that the answer begins with",
        )
    return pack(tokens)


async def output_grammar(body: GenerationBody, model: ModelText, tools: ToolPlan, tenant: str) -> tuple[str, str]:
    """Return the field that binds the output, and its grammar, compiled once; empty where nothing binds it. Raise
    ApiError.
    """
    field, grammar = await body_grammar(body, model, tenant)
    if grammar and tools.use is not None:
        raise invalid("tools", "tools cannot be combined with structured output; send tool_choice none")
    if tools.grammar:
        await model.grammars.check("tools", tools.grammar, tenant)
        field, grammar = "tools", tools.grammar
    for name in ("ignore_eos", "min_tokens"):
        if grammar and getattr(body, name):
            text = f"{name} cannot be combined with structured output, which ends where it is complete; leave it out"
            raise invalid(name, text)
    return field, grammar


def _callable(tools: Sequence[Tool], choice: ToolChoice) -> tuple[list[Tool], bool]:
    """Return the tools that may be called, and whether one of them has to be. Raise ApiError(400)."""
    if isinstance(choice, str):
        return list(tools), choice == "required"
    chosen_tools = [choice] if isinstance(choice, ChosenTool) else choice.allowed_tools.tools
    by_name = {tool.function.name: tool for tool in tools}
    for name in (one.function.name for one in chosen_tools):
        if name not in by_name:
            raise invalid("tool_choice", f"tool_choice names a function that is not in tools; got {quote(name)}")
    names = {one.function.name for one in chosen_tools}
    allowed = [tool for name, tool in by_name.items() if name in names]
    return allowed, not isinstance(choice, AllowedChoice) or choice.allowed_tools.mode == "required"


def _atom(text: str, model: ModelText) -> str:
    """Return a literal of a Lark grammar: a control token, where the model has one of that name."""
    control_id = _control_id(text, model)
    return lark_text(text) if control_id is None else f"<[{control_id}]>"


def _control_id(mark: str, model: ModelText) -> int | None:
    id_ = model.tokenizer.token_to_id(mark) if mark else None
    return id_ if id_ in model.text.special else None


async def body_grammar(body: StructuredBody, model: ModelText, tenant: str) -> tuple[str, str]:
    """Return the field that binds the output of a request, and its grammar; empty without one. Raise ApiError."""
    if body.model_fields_set.isdisjoint(StructuredBody.model_fields):
        return "", ""
    if not (grammars := await model.threads.run(_field_grammars, body)):
        return "", ""
    if len(grammars) > 1:
        raise invalid(list(grammars)[1], f"only one of {', '.join(grammars)} can be given")
    ((field, grammar),) = grammars.items()
    await model.grammars.check(field, grammar, tenant)
    return field, grammar


def _field_grammars(body: StructuredBody) -> dict[str, str]:
    """Return the grammar of each field that binds the output; blocks. Raise ApiError."""
    return dict(_fields_with_grammar(body))


def _fields_with_grammar(body: StructuredBody) -> Iterable[tuple[str, str]]:
    if body.response_format is not None and body.response_format.type != "text":
        yield "response_format", _response_format(body.response_format)
    if body.guided_json is not None:
        yield "guided_json", json_grammar("guided_json", body.guided_json)
    if body.guided_regex is not None:
        yield "guided_regex", LLMatcher.grammar_from_regex(body.guided_regex)
    if body.guided_choice is not None:
        yield "guided_choice", choice_grammar(body.guided_choice)
    if body.guided_grammar is not None:
        yield "guided_grammar", LLMatcher.grammar_from_lark(body.guided_grammar)
    if (outputs := body.structured_outputs) is not None:
        field = "structured_outputs"
        if outputs.json_ is not None:
            yield f"{field}.json", json_grammar(f"{field}.json", outputs.json_)
        if outputs.regex is not None:
            yield f"{field}.regex", LLMatcher.grammar_from_regex(outputs.regex)
        if outputs.choice is not None:
            yield f"{field}.choice", choice_grammar(outputs.choice)
        if outputs.grammar is not None:
            yield f"{field}.grammar", LLMatcher.grammar_from_lark(outputs.grammar)
        if outputs.json_object:
            yield f"{field}.json_object", json_grammar(field, {"type": "object"})


def _response_format(response_format: ResponseFormat) -> str:
    if response_format.type == "json_object":
        return json_grammar("response_format", {"type": "object"})
    if response_format.json_schema is None:
        raise invalid("response_format", "response_format of type json_schema needs json_schema")
    schema = response_format.json_schema.schema_
    strict = bool(response_format.json_schema.strict)
    return json_grammar("response_format", {"type": "object"} if schema is None else schema, lenient=not strict)
