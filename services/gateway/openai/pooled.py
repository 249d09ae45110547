"""Write answers that are numbers: vectors (/v1/embeddings, /v2/embed) and scores (/v1/rerank, /v1/score)."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

from services.gateway.errors import broken_record
from services.gateway.request import VECTOR, GenerationSpec
from shared.wire.columns import Float32, pack_float, unpack_float


def pooled_answer(spec: GenerationSpec, records: list[bytes]) -> dict[str, Any]:
    """Return the body of the answer. records: the record of each prompt, float32. Raise ApiError for a gap."""
    if any(len(record) != spec.record_bytes for record in records):
        raise broken_record()
    usage = {"prompt_tokens": spec.prompt_tokens, "total_tokens": spec.prompt_tokens}
    head = {"id": spec.id, "object": "list", "created": spec.created, "model": spec.model}
    if spec.endpoint == "embed":
        return {
            "id": spec.id,
            "response_type": "embeddings_by_type",
            "embeddings": _by_type(spec, [_vector(spec, record) for record in records]),
            "texts": spec.prompt_texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": spec.prompt_tokens}},
        }
    if spec.pooling == VECTOR:
        form = _base64 if spec.base64 else _floats
        return {
            **head,
            "data": [
                {"object": "embedding", "index": index, "embedding": form(_vector(spec, record))}
                for index, record in enumerate(records)
            ],
            "usage": usage,
        }
    logits = [float(unpack_float(record)[0]) for record in records]
    scores = logits if spec.raw_scores else [_sigmoid(logit) for logit in logits]
    if spec.endpoint == "score":
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
        return {**head, "data": data, "usage": usage}
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: spec.top_n or None]
    results = [{"index": index, "relevance_score": scores[index]} | _document(spec, index) for index in best]
    return {**head, "results": results, "meta": {"tokens": {"input_tokens": spec.prompt_tokens}}, "usage": usage}


def _by_type(spec: GenerationSpec, vectors: list[Float32]) -> dict[str, Any]:
    """Return the vectors in the forms that were asked for, by name."""
    vectors_by_type: dict[str, Any] = {}
    if spec.floats_too or not spec.base64:
        vectors_by_type["float"] = [_floats(numbers) for numbers in vectors]
    if spec.base64:
        vectors_by_type["base64"] = [_base64(numbers) for numbers in vectors]
    return vectors_by_type


def _vector(spec: GenerationSpec, record: bytes) -> Float32:
    """Return the numbers of a record, [dimensions] where the request asked for fewer."""
    numbers = unpack_float(record)
    if spec.dimensions:
        numbers = numbers[: spec.dimensions]
        numbers = (numbers / max(float(np.sqrt((numbers.astype(np.float64) ** 2).sum())), 1e-12)).astype(np.float32)
    return numbers


def _base64(numbers: Float32) -> str:
    return base64.b64encode(pack_float(numbers)).decode()


def _floats(numbers: Float32) -> list[float]:
    floats: list[float] = numbers.tolist()
    return floats


def _document(spec: GenerationSpec, index: int) -> dict[str, Any]:
    return {"document": {"text": spec.prompt_texts[index]}} if spec.echo else {}


def _sigmoid(logit: float) -> float:
    small = math.exp(-abs(logit))  # the other sign may be beyond all floats
    return (1.0 if logit >= 0 else small) / (1.0 + small)
