"""Serve `/tokenize`, `/detokenize` and `/tokenizer_info`: the tokenizer of a model."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from services.gateway.errors import invalid
from services.gateway.gateway import Gateway
from services.gateway.models import ServedModel
from services.gateway.openai.answers import json_response
from services.gateway.openai.bodies import DetokenizeBody, TemplateBody, TokenizeBody, read_body, served_model
from services.gateway.openai.chat import encoded_messages
from services.gateway.openai.completions import THREAD_TOKENS, decode, encode_text
from services.gateway.openai.document import FOUND, body_of, errors


def router(gateway: Gateway) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter()

    @routes.post(
        "/tokenize", responses={200: FOUND, **errors(403, 404, 415, 429, 503)}, openapi_extra=body_of(TokenizeBody)
    )
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt or of messages."""
        body = await read_body(request, TokenizeBody)
        model = await served_model(gateway, body.model, request.state.caller)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "send either prompt or messages")
        limits = model.cluster.limits
        if body.messages is not None:
            if body.add_special_tokens:
                raise invalid(
                    "add_special_tokens", "add_special_tokens is for prompt only; a chat template adds its own"
                )
            tokens = await model.text.threads.run(encoded_messages, body, body.messages, model.text, limits)
        else:
            for name in TemplateBody.model_fields:
                if getattr(body, name) is not None:
                    raise invalid(name, f"{name} is for messages only")
            tokens = await encode_text(body.prompt or "", model.text, limits, body.add_special_tokens is not False)
        answer = {"count": len(tokens), "max_model_len": _context(model), "tokens": tokens}
        if body.return_token_strs:
            is_long = len(tokens) > THREAD_TOKENS
            strings = model.text.tokens
            answer["token_strs"] = await model.text.threads.run(strings, tokens) if is_long else strings(tokens)
        return json_response(answer)

    @routes.post(
        "/detokenize", responses={200: FOUND, **errors(403, 404, 415, 429, 503)}, openapi_extra=body_of(DetokenizeBody)
    )
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        body = await read_body(request, DetokenizeBody)
        model = await served_model(gateway, body.model, request.state.caller)
        size = model.text.vocab_size
        if max(body.tokens, default=0) >= size:
            index = next(index for index, token in enumerate(body.tokens) if token >= size)
            raise invalid(
                "tokens", f"tokens[{index}] must be a token id from 0 to {size - 1}; got {body.tokens[index]}"
            )
        (text,) = await decode([body.tokens], model.text, bool(body.skip_special_tokens), "tokens")
        return json_response({"prompt": text})

    @routes.get("/tokenizer_info", responses={200: FOUND, **errors(403, 404, 503)})
    async def tokenizer_info(request: Request, model: Annotated[str | None, Query(max_length=256)] = None) -> Response:
        """Return the control tokens, the chat template and the context of a model, for clients that tokenize here."""
        served = await served_model(gateway, model, request.state.caller)
        return json_response({**served.text.info, "max_model_len": _context(served)})

    return routes


def _context(model: ServedModel) -> int:
    return model.cluster.limits.max_model_len - model.text.is_encoder  # what is pooled counts as a token
