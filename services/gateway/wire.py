"""From a checked request to the message that crosses Redis. Pure; no socket."""

from __future__ import annotations

import time
from typing import Any

from protos import queue_pb2
from services.gateway.validate import GenerationSpec
from shared.columns import pack
from shared.keys import CLASSES
from shared.redis_client import PROMPT_APART_BYTES


def to_request(spec: GenerationSpec, gateway: str, tenant: str, salt: bytes) -> tuple[queue_pb2.Request, bytes]:
    """The message for `requests:{class}` and, when they are big, its prompts for a key of their own."""
    prompts = queue_pb2.Prompts(tokens=[pack(prompt) for prompt in spec.prompts])
    apart = 4 * spec.prompt_tokens > PROMPT_APART_BYTES
    delivery = queue_pb2.Delivery(
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
    )
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
        delivery=delivery.SerializeToString(),
        traceparent=spec.traceparent,
        **fields,
    )
    return request, prompts.SerializeToString() if apart else b""
