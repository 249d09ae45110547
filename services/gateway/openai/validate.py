"""Turn a parsed body into a GenerationSpec that can be served: the last place where a request can be wrong.

Every refusal is an ApiError(400) that names the field, the value and what is allowed. Bad input never passes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import orjson

from protos import queue_pb2
from services.gateway.errors import ApiError, invalid, shown
from services.gateway.openai.bodies import INT64, ChatBody, ChatMessage, CompletionBody, GenerationBody
from services.gateway.openai.output import OUTPUT_FIELDS, ToolPlan, output_grammar, plan_tools
from services.gateway.request import GenerationSpec, Limits
from services.gateway.text.tokenizer import ModelText
from shared import ids
from shared.columns import pack, pack_float
from shared.logprobs import record_bytes

MOST_RECORD_BYTES = 64 << 20
"""What the log-probabilities of one request may take in Redis."""


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


def check_records(choices: int, max_tokens: int, wanted: int) -> None:
    """Raise ApiError for records (shared/logprobs.py) of so many choices that could take too much of Redis."""
    size = choices * max_tokens * record_bytes(wanted)
    if size > MOST_RECORD_BYTES:
        raise invalid(
            "logprobs",
            f"log-probabilities of {choices} choices x {max_tokens} tokens may take {size >> 20} MiB of Redis; "
            f"a request gets at most {MOST_RECORD_BYTES >> 20}: ask for fewer choices, tokens or most likely ones",
        )


THREAD_CHARS = 32 * 1024
"""Longer texts, all of a request together, are tokenized beside the event loop."""
THREAD_TOKENS = 8 * 1024
"""More ids are checked and turned into text beside the event loop."""
COPIED = GenerationBody.model_fields.keys() & {field.name for field in fields(GenerationSpec)} - {"n", "max_tokens"}
"""Fields that a body and the spec have under one name; the two left out depend on the model."""


def check_model(name: str | None, served: str) -> None:
    """Raise ApiError(404) naming what is served."""
    if name is not None and name != served:
        raise ApiError(
            404,
            f"The model {shown(name)} does not exist; this server has {served!r}",
            param="model",
            code="model_not_found",
        )


async def completion_spec(
    body: CompletionBody, model: ModelText, served: str, limits: Limits, request_id: str | None = None
) -> GenerationSpec:
    """Raise ApiError."""
    check_model(body.model, served)
    prompts, texts = await _prompts(body, model, limits)
    echo = bool(body.echo)
    if echo and body.logprobs is not None:
        raise invalid(
            "echo", "echo with logprobs is not supported: the prompt's are not computed", "unsupported_parameter"
        )
    if echo and not texts:
        texts = await decode(prompts, model, body.skip_special_tokens is not False)
    max_tokens = body.max_tokens
    if max_tokens == 0 and not echo:
        raise invalid("max_tokens", "max_tokens must be at least 1; 0 is for echo only; got 0")
    longest = max(map(len, prompts))
    room = _room(longest, limits, "prompt", needs=0 if max_tokens == 0 else 1)
    if max_tokens is None:
        max_tokens = min(16, room)
    _check_output(max_tokens, longest, room, limits, "max_tokens")
    spec = _spec(body, model, limits, "completions", prompts, texts if echo else [], max_tokens, echo, request_id)
    await _bind(spec, body, model, ToolPlan())
    return spec


async def chat_spec(
    body: ChatBody, model: ModelText, served: str, limits: Limits, request_id: str | None = None
) -> GenerationSpec:
    """Raise ApiError."""
    check_model(body.model, served)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; send only max_completion_tokens")
    name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens == 0:
        raise invalid("max_tokens", "max_tokens must be at least 1; got 0")
    tools = plan_tools(body, model) if body.model_fields_set & OUTPUT_FIELDS else ToolPlan()
    prompt = await encode_messages(body.messages, model, limits, tools=tools.shown)
    room = _room(len(prompt), limits, "messages")
    if max_tokens is None:
        max_tokens = room
    _check_output(max_tokens, len(prompt), room, limits, name)
    spec = _spec(body, model, limits, "chat", [prompt], [], max_tokens, False, request_id)
    await _bind(spec, body, model, tools)
    return spec


async def _bind(spec: GenerationSpec, body: GenerationBody, model: ModelText, tools: ToolPlan) -> None:
    """Set the grammar that binds the output, and how tool calls are read from it. Raise ApiError."""
    if not body.model_fields_set & OUTPUT_FIELDS:
        return
    spec.grammar_field, spec.sampling.grammar = await output_grammar(body, model, tools)
    spec.tools = tools.use
    if tools.has_control:
        spec.skip_special_tokens = False  # calls are found by it


async def encode_messages(
    messages: Sequence[ChatMessage],
    model: ModelText,
    limits: Limits,
    add_generation_prompt: bool = True,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Return token ids of a conversation. tools: those that the template is to show. Raise ApiError(400)."""
    plain = plain_messages(messages)
    size = sum(len(message["content"]) for message in plain)
    _check_hopeless(size // model.longest, limits, "messages")
    # Beside the event loop however short it is: another process renders it.
    return await asyncio.to_thread(model.encode_chat, plain, add_generation_prompt, tools)


def plain_messages(messages: Sequence[ChatMessage]) -> list[Mapping[str, Any]]:
    """As chat templates want them. Raise ApiError(400)."""
    return [_plain(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _plain(name: str, message: ChatMessage) -> dict[str, Any]:
    if message.function_call:
        raise invalid(
            f"{name}.function_call", "function_call is not supported; use tool_calls", "unsupported_parameter"
        )
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{name}.tool_calls", f"only an assistant's message has tool_calls; got role {message.role!r}")
    if message.content is None and not message.tool_calls:
        raise _missing(f"{name}.content")
    if message.role == "tool" and message.tool_call_id is None:
        raise _missing(f"{name}.tool_call_id")
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name:
        plain["name"] = message.name
    if message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _called(f"{name}.tool_calls[{at}]", call.function)}
            for at, call in enumerate(message.tool_calls)
        ]
    return plain


def _called(name: str, function: Any) -> dict[str, Any]:
    """Templates want arguments as an object."""
    try:
        arguments = orjson.loads(function.arguments or "{}")
    except orjson.JSONDecodeError as error:
        raise _bad_arguments(name, function.arguments) from error
    if not isinstance(arguments, dict):
        raise _bad_arguments(name, function.arguments)
    return {"name": function.name, "arguments": arguments}


def _bad_arguments(name: str, got: str) -> ApiError:
    field = f"{name}.function.arguments"
    return invalid(field, f"{field} must be the text of a JSON object; got {shown(got)}")


def _missing(field: str) -> ApiError:
    return invalid(field, f"you must provide the parameter {field}", "missing_required_parameter")


async def encode_text(text: str, model: ModelText, limits: Limits, add_special_tokens: bool = True) -> list[int]:
    """Return token ids of a raw prompt. Raise ApiError(400)."""
    return (await _encode([text], model, limits, add_special_tokens))[0]


async def _encode(texts: list[str], model: ModelText, limits: Limits, add_special_tokens: bool) -> list[list[int]]:
    for text in texts:
        _check_hopeless(len(text) // model.longest, limits, "prompt")

    def work() -> list[list[int]]:
        return [model.encode(text, add_special_tokens) for text in texts]

    return await asyncio.to_thread(work) if sum(map(len, texts)) > THREAD_CHARS else work()


async def decode(sequences: list[list[int]], model: ModelText, skip_special: bool) -> list[str]:
    """Return the text of each sequence of ids."""

    def work() -> list[str]:
        return [model.text.decode(sequence, skip_special) for sequence in sequences]

    return await asyncio.to_thread(work) if sum(map(len, sequences)) > THREAD_TOKENS else work()


async def _prompts(body: CompletionBody, model: ModelText, limits: Limits) -> tuple[list[list[int]], list[str]]:
    """Return token ids of every prompt and, when prompts were texts, the texts."""
    prompt = body.prompt
    if isinstance(prompt, str):
        texts = [prompt]
    elif isinstance(prompt, list) and prompt and all(isinstance(item, str) for item in prompt):
        texts = prompt
    else:
        size = sum(len(item) if isinstance(item, list) else 1 for item in prompt) if isinstance(prompt, list) else 0
        if size > THREAD_TOKENS:
            return await asyncio.to_thread(_token_prompts, prompt, model), []
        return _token_prompts(prompt, model), []
    _check_choices(len(texts), requested_choices(body)[0], limits)
    special = body.add_special_tokens is not False
    encoded = await _encode(texts, model, limits, special)
    for index, tokens in enumerate(encoded):
        if not tokens:
            name = "prompt" if len(texts) == 1 else f"prompt[{index}]"
            raise invalid("prompt", f"{name} is empty: it has no token; got {shown(texts[index])}")
    return encoded, texts


def _token_prompts(prompt: Any, model: ModelText) -> list[list[int]]:
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt", f"prompt must be text, texts, token ids or lists of token ids; got {shown(prompt)}")
    lists = prompt if all(isinstance(item, list) for item in prompt) else [prompt]
    for index, tokens in enumerate(lists):
        name = "prompt" if lists[0] is prompt else f"prompt[{index}]"
        if not tokens:
            raise invalid("prompt", f"{name} is empty")
        for at, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token < model.vocab_size:
                raise invalid(
                    "prompt",
                    f"{name}[{at}] must be a token id from 0 to {model.vocab_size - 1}; got {shown(token)}",
                )
    return lists


def _check_choices(prompts: int, n: int, limits: Limits) -> None:
    if prompts * n > limits.max_choices:
        raise invalid(
            "n",
            f"prompts x n = {prompts} x {n} = {prompts * n} is more than this server's limit of {limits.max_choices}",
        )


def _check_hopeless(least: int, limits: Limits, param: str) -> None:
    """Refuse texts so long that tokenizing them would be waste; the factor leaves room for normalizers."""
    if least > 4 * limits.max_model_len:
        raise invalid(
            param,
            f"This model's maximum context length is {limits.max_model_len} tokens, "
            f"however your {param} alone has more than {least // 4}. Please shorten it.",
            "context_length_exceeded",
        )


def _room(prompt_tokens: int, limits: Limits, param: str, needs: int = 1) -> int:
    """Return the tokens that can follow the prompt. Raise when the prompt leaves less than `needs`."""
    if limits.max_input_tokens and prompt_tokens > limits.max_input_tokens:
        raise invalid(
            param,
            f"{param} has {prompt_tokens} tokens; this server accepts at most {limits.max_input_tokens}",
            "context_length_exceeded",
        )
    room = limits.max_model_len - prompt_tokens
    if room < needs:
        raise invalid(
            param,
            f"This model's maximum context length is {limits.max_model_len} tokens, "
            f"however your {param} has {prompt_tokens} tokens. Please shorten it.",
            "context_length_exceeded",
        )
    return min(room, limits.max_output_tokens or room)


def _check_output(max_tokens: int, prompt_tokens: int, room: int, limits: Limits, param: str) -> None:
    if limits.max_output_tokens and max_tokens > limits.max_output_tokens:
        raise invalid(param, f"{param} must be at most {limits.max_output_tokens} on this server; got {max_tokens}")
    if max_tokens > room:
        raise invalid(
            param,
            f"This model's maximum context length is {limits.max_model_len} tokens, however you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt; {max_tokens} for the completion). "
            f"Please reduce the prompt or {param}.",
            "context_length_exceeded",
        )


def _spec(
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
    n, keep = requested_choices(body)
    logprobs = requested_logprobs(body)
    wanted = int(keep > 0) if logprobs is None else logprobs + 1
    _check_choices(len(prompts), n, limits)
    check_records(len(prompts) * n, max_tokens, wanted)
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
    given = {name: value for name in COPIED if (value := getattr(body, name)) is not None}
    return GenerationSpec(
        **given,
        id=request_id or ids.request_id(endpoint),
        endpoint=endpoint,
        created=int(time.time()),
        prompts=prompts,
        prompt_texts=prompt_texts,
        n=n,
        max_tokens=max_tokens,
        stop_ids=list(dict.fromkeys([*eos, *(body.stop_token_ids or [])])),
        sampling=_sampling(body, model, wanted),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        continuous_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        echo=echo,
        logprobs=logprobs,
        keep=keep,
    )


def _sampling(body: GenerationBody, model: ModelText, logprobs: int) -> queue_pb2.Sampling:
    bias: dict[int, float] = {}
    defaults = model.defaults
    for name, value in (body.logit_bias or {}).items():
        if not re.fullmatch(r"[0-9]{1,10}", name) or int(name) >= model.vocab_size:
            raise invalid(
                "logit_bias", f"logit_bias keys must be token ids from 0 to {model.vocab_size - 1}; got {shown(name)}"
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
