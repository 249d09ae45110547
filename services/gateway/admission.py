"""Decide whether there is room for a request, and word the refusal.

Class `low` is shed first: bounds of queue and wait are a share of the settings by class. gateway.py calls `refuse_late`
before anything is written; enqueue.lua checks `Bounds`, since it alone sees every gateway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.gateway.auth import Caller
from services.gateway.cluster import RETRY_MOST_S, Forecast
from services.gateway.errors import ApiError, memory_low
from services.gateway.request import GenerationSpec
from shared.settings import GatewaySettings

CLASS_SHARES = {"realtime": 1.0, "high": 0.95, "normal": 0.8, "low": 0.5}
"""Share of ORCINUS_MAX_QUEUED_TOKENS and of ORCINUS_MAX_WAIT_S up to which a class is accepted."""
RETRY = "retry after the time in Retry-After"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits that enqueue.lua checks for one request. `late`: the refusal when its class waits too long, else None."""

    priority: str
    prompt_tokens: int
    class_tokens: int  # that may wait, of all classes together
    tenant_tokens: int  # of its tenant that may wait
    late: ApiError | None

    @classmethod
    def of(cls, settings: GatewaySettings, spec: GenerationSpec, caller: Caller, forecast: Forecast | None) -> Bounds:
        """Compute the bounds of a request. forecast: of its class, None when unknown."""
        class_tokens = int(CLASS_SHARES[spec.priority] * settings.max_queued_tokens)
        share = settings.tenant_queue_share if caller.has_others else 1.0
        late = overloaded(forecast, spec, settings.max_wait_s) if forecast else None
        return cls(spec.priority, spec.prompt_tokens, class_tokens, int(share * class_tokens), late)

    def refusal(self, answer: list[Any], retry_after_s: Callable[[float], float]) -> ApiError | None:
        """Return the error for the answer of enqueue.lua; None when the request was accepted. retry_after_s: maps
        waiting tokens to the seconds until they have run.
        """
        match answer[0]:
            case b"full":
                return self._full(answer[1], retry_after_s)
            case b"tenant":
                return self._tenant_full(answer[1], answer[2], retry_after_s)
            case b"late":
                return self.late
            case b"memory":
                return memory_low(answer[1] / answer[2])
            case b"rate":
                what = answer[2].decode()
                text = f"rate limit: the key has used up its {what}; {RETRY}"
                return ApiError(429, text, code="rate_limit_exceeded", retry_after_s=answer[1] / 1000)
        return None

    def _full(self, waiting: int, retry_after_s: Callable[[float], float]) -> ApiError:
        return ApiError(
            429,
            f"queue full for class {self.priority}: {waiting} of at most {self.class_tokens} prompt tokens are "
            f"waiting; {RETRY}",
            code="queue_full",
            retry_after_s=retry_after_s(self._excess(waiting, self.class_tokens)),
        )

    def _tenant_full(self, held: int, tenants: int, retry_after_s: Callable[[float], float]) -> ApiError:
        """Return the 429 for a tenant with too many waiting tokens. Waiting tenants share the workers, so its tokens
        drain slower.
        """
        return ApiError(
            429,
            f"queue full for this tenant in class {self.priority}: {held} of at most {self.tenant_tokens} prompt "
            f"tokens are waiting; {RETRY}, or send less at a time",
            code="tenant_queue_full",
            retry_after_s=retry_after_s(tenants * self._excess(held, self.tenant_tokens)),
        )

    def _excess(self, waiting: int, most: int) -> int:
        """Return the waiting tokens that have to run before this request is accepted. A request with none before it
        always is.
        """
        return min(waiting, waiting + self.prompt_tokens - most)


def overloaded(forecast: Forecast, spec: GenerationSpec, max_wait_s: float) -> ApiError | None:
    """Return the 429 for a request of a class that waits longer than allowed. Return None when the wait is allowed,
    when the request sets its own limit, and for a background request.
    """
    limit_ms = 1000 * max_wait_s * CLASS_SHARES[spec.priority]
    if not limit_ms or spec.ttft_slo_ms or spec.background or forecast.ttft_ms <= limit_ms:
        return None
    return ApiError(
        429,
        f"overloaded: the first token is predicted in {forecast.ttft_ms:.0f} ms, the limit of class {spec.priority} is "
        f"{limit_ms:.0f} ms ({forecast.why}); {RETRY}, or set ttft_slo_ms",
        code="overloaded",
        retry_after_s=rest_s(forecast, limit_ms),
    )


def refuse_late(forecast: Forecast, name: str, limit_ms: int, code: str) -> None:
    """Raise ApiError(429) when the first token would come after a limit that the request sets."""
    if not limit_ms or forecast.ttft_ms <= limit_ms:
        return
    raise ApiError(
        429,
        f"{name}: the first token is predicted in {forecast.ttft_ms:.0f} ms, later than {limit_ms} ms "
        f"({forecast.why}); {RETRY}, or send a longer {name}",
        param=name,
        code=code,
        retry_after_s=rest_s(forecast, limit_ms),
    )


def rest_s(forecast: Forecast, limit_ms: float) -> float:
    """Return the seconds after which the remaining wait is within the limit."""
    return min(RETRY_MOST_S, math.ceil((forecast.ttft_ms - limit_ms) / 1000))
