"""Serve what retrieval asks: vectors (`/v1/embeddings`, `/v2/embed`), scores of pairs (`/v1/rerank`, `/v1/score`)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from protos import queue_pb2
from services.gateway.errors import ApiError, invalid, untokenizable
from services.gateway.gateway import Gateway
from services.gateway.openai.answers import ACCEPTED, GENERATION_ERRORS, serve
from services.gateway.openai.bodies import (
    EmbeddingsBody,
    PairTexts,
    PooledBody,
    RerankBody,
    ScoreBody,
    check_choices,
    check_length,
    check_task,
    read_in_turn,
    room_after,
    served_model,
)
from services.gateway.openai.completions import read_prompts
from services.gateway.openai.document import FOUND, PlainRoute, body_of
from services.gateway.request import SCORE, VECTOR, GenerationSpec, Limits
from services.gateway.text.pairs import Pair, Pairs
from services.gateway.text.tokenizer import ModelText
from shared import ids
from shared.messages import quote
from shared.text.tokenizer import TokenizerError
from shared.wire.columns import pack


class EmbedBody(PooledBody):
    """`POST /v2/embed`, in Cohere's form. input_type and user change nothing."""

    texts: PairTexts
    input_type: Literal["search_document", "search_query", "classification", "clustering"]
    embedding_types: list[Literal["float", "base64"]] | None = Field(None, min_length=1, max_length=2)
    output_dimension: int | None = Field(None, ge=1, lt=1 << 31)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    truncate: Literal["NONE", "START", "END"] | None = None

    # Known to Cohere: refused
    images: Any = None
    inputs: Any = None


BodyT = TypeVar("BodyT", bound=PooledBody)
SpecOf = Callable[[BodyT, ModelText, Limits], Awaitable[GenerationSpec]]

_RESPONSES = {200: FOUND, **ACCEPTED, **GENERATION_ERRORS}


def router(gateway: Gateway) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter(route_class=PlainRoute)

    async def answer(request: Request, kind: type[BodyT], spec_of: SpecOf[BodyT]) -> Response:
        arrived_at = time.monotonic()
        body = await read_in_turn(gateway, request, kind, arrived_at)
        model = await served_model(gateway, body.model, request.state.caller)
        spec = await spec_of(body, model.text, model.cluster.limits)
        del body  # the request may wait for long, with the spec alone
        return await serve(model, request, spec, arrived_at)

    @routes.post("/v1/embeddings", responses=_RESPONSES, openapi_extra=body_of(EmbeddingsBody))
    async def embeddings(request: Request) -> Response:
        """Return the vector of each text."""
        return await answer(request, EmbeddingsBody, embeddings_spec)

    @routes.post("/v2/embed", responses=_RESPONSES, openapi_extra=body_of(EmbedBody))
    async def embed(request: Request) -> Response:
        """Return the vector of each text, as Cohere's API does."""
        return await answer(request, EmbedBody, embed_spec)

    @routes.post("/rerank", responses=_RESPONSES, openapi_extra=body_of(RerankBody))
    @routes.post("/v2/rerank", responses=_RESPONSES, openapi_extra=body_of(RerankBody))
    @routes.post("/v1/rerank", responses=_RESPONSES, openapi_extra=body_of(RerankBody))
    async def rerank(request: Request) -> Response:
        """Return documents in the order of how well they answer a query."""
        return await answer(request, RerankBody, rerank_spec)

    @routes.post("/score", responses=_RESPONSES, openapi_extra=body_of(ScoreBody))
    @routes.post("/v1/score", responses=_RESPONSES, openapi_extra=body_of(ScoreBody))
    async def score(request: Request) -> Response:
        """Return the score of each pair of texts."""
        return await answer(request, ScoreBody, score_spec)

    return routes


async def embeddings_spec(body: EmbeddingsBody, model: ModelText, limits: Limits) -> GenerationSpec:
    """Return the request that a body describes. Raise ApiError."""
    check_task(model, "embeddings")
    special = body.add_special_tokens is not False
    prompts, _ = await read_prompts(body.input, "input", 1, special, model, limits)
    check_choices(len(prompts), 1, limits, "input")
    room_after(max(map(len, prompts)), limits, "input")
    spec = _vector_spec(body, "embeddings", prompts, model, body.dimensions, "dimensions")
    spec.base64 = body.encoding_format == "base64"
    return spec


async def embed_spec(body: EmbedBody, model: ModelText, limits: Limits) -> GenerationSpec:
    """Return the request that a body describes. Raise ApiError."""
    for name in ("images", "inputs"):
        if getattr(body, name) is not None:
            raise invalid(name, f"{name}: this server makes vectors of texts only; send texts", "unsupported_parameter")
    check_task(model, "embeddings")
    check_choices(len(body.texts), 1, limits, "texts")
    most = min(limits.max_model_len - 1, limits.max_input_tokens or limits.max_model_len)
    most = min(most, body.max_tokens or most)

    def work() -> list[list[int]]:
        return [_truncate(model, text, f"texts[{index}]", most, body.truncate) for index, text in enumerate(body.texts)]

    if body.truncate == "NONE":
        for text in body.texts:
            check_length(len(text) // model.longest, limits, "texts")
    try:
        prompts = work() if model.is_quick(2 * sum(map(len, body.texts))) else await model.threads.run(work)
    except TokenizerError as error:
        raise untokenizable("texts", error) from error
    spec = _vector_spec(body, "embed", prompts, model, body.output_dimension, "output_dimension")
    spec.base64 = "base64" in (body.embedding_types or ())
    spec.floats_too = spec.base64 and "float" in (body.embedding_types or ())
    spec.echo, spec.prompt_texts = True, body.texts
    return spec


def _truncate(model: ModelText, text: str, name: str, max_tokens: int, side: str | None) -> list[int]:
    """Return at most so many tokens of a text, with the tokenizer's around it. side: that is cut. Raise ApiError."""
    ids = model.encode(text)
    if not ids:
        raise invalid("texts", f"{name} is empty: it has no token; got {quote(text)}")
    if len(ids) <= max_tokens:
        return ids
    plain = model.encode(text, add_special_tokens=False)
    added_tokens = len(ids) - len(plain)
    if side == "NONE" or max_tokens <= added_tokens:
        remedy = (
            "send a shorter one, or truncate END"
            if max_tokens > added_tokens
            else f"max_tokens must be above {added_tokens}"
        )
        raise invalid(
            "texts",
            f"{name} has {len(ids)} tokens; at most {max_tokens} are allowed; {remedy}",
            "context_length_exceeded",
        )
    begin = next((at for at in range(added_tokens + 1) if ids[at : at + len(plain)] == plain), None)
    if begin is None:
        why = "this model's tokenizer shows no place to cut; send a shorter one"
        raise invalid(
            "texts", f"{name} has {len(ids)} tokens; at most {max_tokens} are allowed; {why}", "context_length_exceeded"
        )
    kept = plain[added_tokens - max_tokens :] if side == "START" else plain[: max_tokens - added_tokens]
    return ids[:begin] + kept + ids[begin + len(plain) :]


async def rerank_spec(body: RerankBody, model: ModelText, limits: Limits) -> GenerationSpec:
    """Return the request that a body describes. Raise ApiError."""
    pairs = _pairs_of(model, "rerank", body.instruction)
    check_choices(len(body.documents), 1, limits, "documents")
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    made = await _encode(pairs, [(body.query, text) for text in texts], body.instruction, model, limits, "documents")
    spec = _score_spec(body, "rerank", pairs, made)
    spec.top_n = body.top_n or 0
    if body.return_documents:
        spec.echo, spec.prompt_texts = True, texts
    return spec


async def score_spec(body: ScoreBody, model: ModelText, limits: Limits) -> GenerationSpec:
    """Return the request that a body describes. Raise ApiError."""
    pairs = _pairs_of(model, "score", body.instruction)
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) not in (1, len(second)):
        raise invalid(
            "text_1",
            f"text_1 has {len(first)} items and text_2 {len(second)}; send one text_1 for all, or one for each text_2",
        )
    check_choices(len(second), 1, limits, "text_2")
    texts = list(zip(first * (len(second) // len(first)), second, strict=True))
    made = await _encode(pairs, texts, body.instruction, model, limits, "text_2")
    return _score_spec(body, "score", pairs, made)


def _pairs_of(model: ModelText, task: str, instruction: str | None) -> Pairs:
    check_task(model, task)
    if model.pairs is None:
        raise RuntimeError(f"a model for {task} has pairs")
    if instruction and not model.pairs.label_ids:
        raise invalid("instruction", "instruction: this model is an encoder and takes none; leave it out")
    return model.pairs


async def _encode(
    pairs: Pairs,
    texts: Sequence[tuple[str, str]],
    instruction: str | None,
    model: ModelText,
    limits: Limits,
    field: str,
) -> list[Pair]:
    """Return the prompt of each pair. field: of the second texts. Raise ApiError(400)."""
    for both in texts:
        check_length(sum(map(len, both)) // model.longest, limits, field)

    most = min(limits.max_model_len - 1, limits.max_input_tokens or limits.max_model_len)

    def work() -> list[Pair]:
        pair_ids = []
        for index, (first, second) in enumerate(texts):
            pair = pairs.encode(first, second, instruction or "")
            if len(pair.ids) > most:  # the rest is not encoded: one long query meets each of the documents
                raise invalid(
                    field,
                    f"{field}[{index}] with what it is compared to has {len(pair.ids)} tokens; this server accepts at "
                    f"most {most}. Please shorten it.",
                    "context_length_exceeded",
                )
            pair_ids.append(pair)
        return pair_ids

    try:
        quick = model.is_quick(sum(len(first) + len(second) for first, second in texts))
        return work() if quick else await model.threads.run(work)
    except TokenizerError as error:
        raise untokenizable(field, error) from error


def _score_spec(body: PooledBody, endpoint: str, pairs: Pairs, pair_ids: Sequence[Pair]) -> GenerationSpec:
    spec = _spec(body, endpoint, [pair.ids for pair in pair_ids], SCORE, 1)
    spec.label_ids = pack(pairs.label_ids)
    spec.raw_scores = pairs.raw
    if any(pair.segment for pair in pair_ids):
        spec.segments = pack([pair.segment for pair in pair_ids])
    return spec


def _vector_spec(
    body: PooledBody, endpoint: str, prompts: list[list[int]], model: ModelText, dimensions: int | None, field: str
) -> GenerationSpec:
    """field: that has the dimensions. Raise ApiError(400)."""
    size = model.vector_size
    if not size:
        text = "config.json of this model has no hidden_size, so it has no vectors; send the request to another model"
        raise ApiError(400, text, code="no_vectors")
    if dimensions is not None and dimensions > size:
        raise invalid(field, f"{field} must be at most {size}, as this model has; got {dimensions}")
    spec = _spec(body, endpoint, prompts, VECTOR, size)
    spec.dimensions = dimensions or 0
    return spec


def _spec(body: PooledBody, endpoint: str, prompts: list[list[int]], pooling: int, size: int) -> GenerationSpec:
    """Return a request for a record of `size` numbers of each prompt."""
    return GenerationSpec(
        id=ids.request_id(endpoint),
        endpoint=endpoint,
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
        pooling=pooling,
        vector_size=size,
    )
