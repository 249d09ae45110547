"""From a checked request to the messages that cross Redis, and back for a gateway that goes on with it. Pure."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import orjson

from protos import queue_pb2
from services.gateway.openai.validate import GenerationSpec
from services.gateway.text.tokenizer import ModelText
from services.gateway.text.tools.reader import ToolUse
from shared.columns import pack, unpack
from shared.keys import CLASSES
from shared.redis_client import PROMPT_APART_BYTES


def to_request(spec: GenerationSpec, gateway: str, tenant: str, salt: bytes) -> tuple[queue_pb2.Request, bytes]:
    """The message for `requests:{class}` and, when they are big, its prompts for a key of their own."""
    prompts = queue_pb2.Prompts(tokens=[pack(prompt) for prompt in spec.prompts])
    apart = 4 * spec.prompt_tokens > PROMPT_APART_BYTES
    fields: dict[str, Any] = {"class": CLASSES.index(spec.priority)}  # a keyword of Python
    request = queue_pb2.Request(
        id=spec.id,
        tenant=tenant,
        gateway=gateway,
        prompts=None if apart else prompts,
        prompts_apart=apart,
        n=spec.n,
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        stop_token_ids=pack(spec.stop_ids),
        sampling=spec.sampling,
        ttft_slo_ms=spec.ttft_slo_ms,
        tbt_slo_ms=spec.tbt_slo_ms,
        deadline_ms=spec.deadline_ms,
        cache_salt=salt,
        created_ms=time.time_ns() // 1_000_000,
        traceparent=spec.traceparent,
        background=spec.background,
        **fields,
    )
    return request, prompts.SerializeToString() if apart else b""


def to_delivery(spec: GenerationSpec, model: ModelText) -> bytes:
    """All that another gateway needs to go on with the request; kept in its record."""
    return queue_pb2.Delivery(
        endpoint=spec.endpoint,
        model=spec.model,
        stop=spec.stop,
        echo=spec.echo,
        stream=spec.stream,
        include_usage=spec.include_usage,
        return_token_ids=spec.return_token_ids,
        created=spec.created,
        include_stop_str_in_output=spec.include_stop,
        skip_special_tokens=spec.skip_special,
        n=spec.n,
        min_tokens=spec.min_tokens,
        stop_ids=pack(spec.stop_ids),
        prompt_tokens=spec.prompt_tokens,
        prompt_tails=[pack(model.text.tail(prompt, spec.skip_special)) for prompt in spec.prompts],
        prompt_texts=spec.prompt_texts if spec.echo else [],
        body_sha256=spec.body_sha256,
        background=spec.background,
        logprobs=0 if spec.logprobs is None else spec.logprobs + 1,
        keep=spec.keep,
        continuous_usage=spec.continuous_usage,
        grammar_field=spec.grammar_field,
        tools_json=b"" if spec.tools is None else orjson.dumps(dataclasses.asdict(spec.tools)),
    ).SerializeToString()


def from_delivery(request_id: str, stored: bytes, priority: str) -> GenerationSpec:
    """What is needed to deliver the rest; it cannot be enqueued, as prompts and sampling are not there."""
    wire = queue_pb2.Delivery.FromString(stored)
    return GenerationSpec(
        id=request_id,
        endpoint=wire.endpoint,
        model=wire.model,
        created=wire.created,
        prompts=[unpack(tail).tolist() for tail in wire.prompt_tails],
        prompt_texts=list(wire.prompt_texts),
        n=wire.n,
        max_tokens=0,
        min_tokens=wire.min_tokens,
        stop=list(wire.stop),
        stop_ids=unpack(wire.stop_ids).tolist(),
        sampling=queue_pb2.Sampling(logprobs=wire.logprobs or int(wire.keep > 0)),
        priority=priority,
        stream=wire.stream,
        include_usage=wire.include_usage,
        echo=wire.echo,
        return_token_ids=wire.return_token_ids,
        include_stop=wire.include_stop_str_in_output,
        skip_special=wire.skip_special_tokens,
        prompt_tokens=wire.prompt_tokens,
        body_sha256=wire.body_sha256,
        background=wire.background,
        logprobs=wire.logprobs - 1 if wire.logprobs else None,
        keep=wire.keep,
        continuous_usage=wire.continuous_usage,
        grammar_field=wire.grammar_field,
        tools=_tools(wire.tools_json),
    )


def _tools(stored: bytes) -> ToolUse | None:
    if not stored:
        return None
    use = orjson.loads(stored)
    return ToolUse(use["format"], tuple(use["names"]), use["parallel"], use.get("forced", False))
