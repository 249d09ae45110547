"""Serve `/v1/completions`: from raw prompts, as text or as token ids, to a request."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.gateway.errors import invalid, untokenizable
from services.gateway.gateway import Gateway
from services.gateway.openai.answers import ACCEPTED, GENERATION_ERRORS, serve
from services.gateway.openai.bodies import (
    CompletionBody,
    check_choices,
    check_length,
    check_output,
    check_task,
    generation_spec,
    read_in_turn,
    requested_choices,
    room_after,
    served_model,
)
from services.gateway.openai.document import PlainRoute, body_of, event_stream
from services.gateway.openai.output import OUTPUT_FIELDS, ToolPlan, bind_output
from services.gateway.request import GenerationSpec, Limits
from services.gateway.text.tokenizer import ModelText
from shared.messages import quote
from shared.text.tokenizer import TokenizerError

THREAD_TOKENS = 8 * 1024
"""More ids are checked and turned into text beside the event loop."""


def router(gateway: Gateway) -> APIRouter:
    """Return the route over one gateway."""
    routes = APIRouter(route_class=PlainRoute)

    @routes.post(
        "/v1/completions",
        responses={**event_stream("a completion, or its events"), **ACCEPTED, **GENERATION_ERRORS},
        openapi_extra=body_of(CompletionBody),
    )
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        arrived_at = time.monotonic()
        body = await read_in_turn(gateway, request, CompletionBody, arrived_at)
        model = await served_model(gateway, body.model, request.state.caller, lately=True)
        spec = await completion_spec(body, model.text, model.cluster.limits, tenant=request.state.tenant)
        del body  # the request may wait for long, with the spec alone
        return await serve(model, request, spec, arrived_at)

    return routes


async def completion_spec(
    body: CompletionBody, model: ModelText, limits: Limits, request_id: str | None = None, tenant: str = ""
) -> GenerationSpec:
    """Return the request that a body describes. request_id: None for a new one. tenant: for the turns of grammars.
    Raise ApiError.
    """
    check_task(model, "completions")
    special = body.add_special_tokens is not False
    prompts, texts = await read_prompts(body.prompt, "prompt", requested_choices(body)[0], special, model, limits)
    echo = bool(body.echo)
    is_scored = body.prompt_logprobs is not None or (echo and body.logprobs is not None)
    if echo and not texts:
        texts = await decode(prompts, model, body.skip_special_tokens is not False, "prompt")
    max_tokens = body.max_tokens
    if max_tokens == 0 and not (echo or is_scored):
        raise invalid("max_tokens", "max_tokens must be at least 1; 0 is for echo and prompt_logprobs only; got 0")
    prompt_only = max_tokens == 0 and is_scored
    if prompt_only:
        max_tokens = 1  # a prompt is computed to its end with the token behind it
    longest = max(map(len, prompts))
    room = room_after(longest, limits, "prompt", needs=0 if max_tokens == 0 else 1)
    if max_tokens is None:
        max_tokens = min(16, room)
    check_output(max_tokens, longest, room, limits, "max_tokens")
    spec = generation_spec(
        body, model, limits, "completions", prompts, texts if echo else [], max_tokens, echo, request_id
    )
    spec.prompt_only = prompt_only
    if body.model_fields_set & OUTPUT_FIELDS:
        await bind_output(spec, body, model, ToolPlan(), tenant)
    return spec


async def encode_text(text: str, model: ModelText, limits: Limits, add_special_tokens: bool = True) -> list[int]:
    """Return token ids of a raw prompt. Raise ApiError(400)."""
    return (await _encode([text], model, limits, add_special_tokens))[0]


async def _encode(
    texts: list[str], model: ModelText, limits: Limits, add_special_tokens: bool, field: str = "prompt"
) -> list[list[int]]:
    for text in texts:
        check_length(len(text) // model.longest, limits, field)

    def work() -> list[list[int]]:
        return [model.encode(text, add_special_tokens) for text in texts]

    try:
        return work() if model.is_quick(sum(map(len, texts))) else await model.threads.run(work)
    except TokenizerError as error:
        raise untokenizable(field, error) from error


async def decode(sequences: list[list[int]], model: ModelText, skip_special: bool, param: str) -> list[str]:
    """Return the text of each sequence of ids. Raise ApiError(400) that names the field `param`."""

    def work() -> list[str]:
        return [model.text.decode(sequence, skip_special) for sequence in sequences]

    try:
        return await model.threads.run(work) if sum(map(len, sequences)) > THREAD_TOKENS else work()
    except TokenizerError as error:
        raise untokenizable(param, error) from error


async def read_prompts(
    prompt: Any, field: str, n: int, add_special_tokens: bool, model: ModelText, limits: Limits
) -> tuple[list[list[int]], list[str]]:
    """Return token ids of every prompt in a field of a body and, when prompts were texts, the texts. n: the choices of
    each. Raise ApiError(400).
    """
    if isinstance(prompt, str):
        texts = [prompt]
    elif isinstance(prompt, list) and prompt and all(isinstance(item, str) for item in prompt):
        texts = prompt
    else:
        if not isinstance(prompt, list) or not prompt:
            raise invalid(field, f"{field} must be text, texts, token ids or lists of token ids; got {quote(prompt)}")
        lists = prompt if all(isinstance(item, list) for item in prompt) else [prompt]
        if sum(map(len, lists)) > THREAD_TOKENS:
            return await model.threads.run(_token_prompts, lists, prompt, field, model), []
        return _token_prompts(lists, prompt, field, model), []
    check_choices(len(texts), n, limits, "n" if field == "prompt" else field)
    prompt_ids = await _encode(texts, model, limits, add_special_tokens, field)
    for index, tokens in enumerate(prompt_ids):
        if not tokens:
            name = field if len(texts) == 1 else f"{field}[{index}]"
            raise invalid(field, f"{name} is empty: it has no token; got {quote(texts[index])}")
    return prompt_ids, texts


def _token_prompts(lists: list[list[int]], prompt: Any, field: str, model: ModelText) -> list[list[int]]:
    """Return the prompts, checked. prompt: as it came, for the names in errors."""
    for index, tokens in enumerate(lists):
        name = field if lists[0] is prompt else f"{field}[{index}]"
        if not tokens:
            raise invalid(field, f"{name} is empty; send at least one token id")
        if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < model.vocab_size:
            continue
        for at, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token < model.vocab_size:
                raise invalid(
                    field,
                    f"{name}[{at}] must be a token id from 0 to {model.vocab_size - 1}; got {quote(token)}",
                )
    return lists
