"""Serve `/v1/embeddings`: the vector of each prompt, its last token's row of the last layer, of length 1."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from protos import queue_pb2
from services.gateway.errors import ApiError, invalid
from services.gateway.gateway import Gateway
from services.gateway.openai.answers import ACCEPTED, GENERATION_ERRORS, serve
from services.gateway.openai.bodies import EmbeddingsBody, check_choices, check_model, read_body, room_after
from services.gateway.openai.completions import read_prompts
from services.gateway.openai.document import FOUND, body_of
from services.gateway.request import GenerationSpec, Limits
from services.gateway.text.tokenizer import ModelText
from shared import ids

LAST_TOKEN = 1
"""The pooling of decoders (worker.proto, Enter.pooling)."""


def router(gateway: Gateway) -> APIRouter:
    """Return the route over one gateway."""
    routes = APIRouter()
    served = gateway.settings.served_model_name

    @routes.post(
        "/v1/embeddings",
        responses={200: FOUND, **ACCEPTED, **GENERATION_ERRORS},
        openapi_extra=body_of(EmbeddingsBody),
    )
    async def embeddings(request: Request) -> Response:
        """Return the vector of each text."""
        started = time.monotonic()
        body = await read_body(request, EmbeddingsBody)
        check_model(body.model, served)
        return await serve(
            gateway, request, await embeddings_spec(body, gateway.model, gateway.cluster.limits), started
        )

    return routes


async def embeddings_spec(body: EmbeddingsBody, model: ModelText, limits: Limits) -> GenerationSpec:
    """Return the request that a body describes. Raise ApiError."""
    special = body.add_special_tokens is not False
    prompts, _ = await read_prompts(body.input, "input", 1, special, model, limits)
    check_choices(len(prompts), 1, limits, "input")
    room_after(max(map(len, prompts)), limits, "input")
    size = model.vector_size
    if not size:
        text = "config.json of this model has no hidden_size, so it has no vectors; send the request to another model"
        raise ApiError(400, text, code="no_vectors")
    if body.dimensions is not None and body.dimensions > size:
        raise invalid("dimensions", f"dimensions must be at most {size}, as this model has; got {body.dimensions}")
    return GenerationSpec(
        id=ids.request_id("embeddings"),
        endpoint="embeddings",
        model=body.model,
        created=int(time.time()),
        prompts=prompts,
        n=1,
        max_tokens=1,  # a prompt is computed to its end with the token behind it
        sampling=queue_pb2.Sampling(top_p=1.0),
        speculate=False,
        priority=body.priority or "",
        ttft_slo_ms=body.ttft_slo_ms or 0,
        background=bool(body.background),
        pooling=LAST_TOKEN,
        vector_size=size,
        dimensions=body.dimensions or 0,
        base64=body.encoding_format == "base64",
    )
