"""Bounds of a request by its class and its tenant, and a Retry-After that holds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protos import queue_pb2
from services.gateway.admission import CLASS_SHARES, Bounds
from services.gateway.auth import Caller
from services.gateway.cluster import Forecast
from services.gateway.errors import ApiError
from services.gateway.request import GenerationSpec
from shared.keys import CLASSES
from shared.settings import DEMO_MODEL, GatewaySettings

RATE = 70.0  # tokens a second


def spec(priority: str = "normal", **changes: Any) -> GenerationSpec:
    values: dict[str, Any] = {
        "id": "r", "endpoint": "completions", "model": "m", "created": 0, "prompts": [[1] * 10], "prompt_texts": [],
        "n": 1, "max_tokens": 1, "min_tokens": 0, "stop": [], "stop_ids": [], "sampling": queue_pb2.Sampling(),
        "priority": priority, "stream": False, "include_usage": False, "echo": False, "return_token_ids": False,
        "include_stop_str_in_output": False, "skip_special_tokens": True,
    } | changes  # fmt: skip
    return GenerationSpec(**values)


def bounds(asked: GenerationSpec, wait_s: float = 0.0, others: bool = False, **settings: Any) -> Bounds:
    """Where the first token is predicted in `wait_s`."""
    values = {"max_queued_tokens": 1000, "max_wait_s": 60, **settings}
    forecast = Forecast(1000 * wait_s, 500, RATE) if wait_s else None
    return Bounds.of(GatewaySettings(model=DEMO_MODEL, **values), asked, Caller("t", has_others=others), forecast)


def retry_after_s(tokens: float) -> float:
    return max(1, math.ceil(tokens / RATE))


def refusal(found: Bounds, *answer: Any) -> ApiError:
    error = found.refusal(list(answer), retry_after_s)
    assert error is not None and error.status == 429
    return error


def test_less_urgent_classes_find_the_queue_full_and_the_wait_too_long_first() -> None:
    found = [bounds(spec(name)).class_tokens for name in CLASSES]
    assert found == [1000, 950, 800, 500]
    refused = {name for name in CLASSES if bounds(spec(name), wait_s=50).late}
    assert refused == {"normal", "low"}
    assert set(CLASS_SHARES) == set(CLASSES)


def test_a_tenant_has_a_share_of_the_queue_only_where_there_are_others() -> None:
    assert bounds(spec("low")).tenant_tokens == 500
    assert bounds(spec("low"), others=True).tenant_tokens == 250
    assert bounds(spec("realtime"), others=True, tenant_queue_share=0.2).tenant_tokens == 200


@pytest.mark.parametrize("own", [{"ttft_slo_ms": 1000}, {"background": True}])
def test_a_request_with_a_limit_of_its_own_or_nobody_who_waits_is_not_refused_for_a_long_wait(own: Any) -> None:
    assert bounds(spec(), wait_s=3600).late is not None
    assert bounds(spec(**own), wait_s=3600).late is None
    assert bounds(spec(), wait_s=3600, max_wait_s=0).late is None


@pytest.mark.parametrize("wait_s", [48.001, 50.5, 61.0])
def test_after_retry_after_the_wait_is_one_that_is_let_happen(wait_s: float) -> None:
    late = bounds(spec(), wait_s=wait_s).late
    assert late is not None and late.code == "overloaded"
    after = int(late.headers["Retry-After"])
    assert bounds(spec(), wait_s=wait_s - after).late is None
    assert bounds(spec(), wait_s=wait_s - after + 1).late is not None, "no later than needed"


@pytest.mark.parametrize("waiting", [791, 1500, 2000])
def test_after_retry_after_the_queue_has_room(waiting: int) -> None:
    found = bounds(spec())
    error = refusal(found, b"full", waiting)
    assert (error.code, "class normal" in error.message) == ("queue_full", True)
    left = waiting - RATE * int(error.headers["Retry-After"])
    assert left + 10 <= found.class_tokens < left + RATE + 10


def test_a_request_above_the_bound_may_come_when_nothing_waits() -> None:
    error = refusal(bounds(spec(prompts=[[1] * 5000])), b"full", 700)
    assert int(error.headers["Retry-After"]) == 10


def test_a_tenants_tokens_run_off_so_much_slower_as_there_are_tenants_that_wait() -> None:
    found = bounds(spec(), others=True)
    error = refusal(found, b"tenant", 740, 3)
    assert (error.code, found.tenant_tokens) == ("tenant_queue_full", 400)
    assert int(error.headers["Retry-After"]) == 15  # 350 tokens at a third of 70 a second


def test_what_was_taken_in_or_was_there_before_is_no_refusal() -> None:
    for answer in (b"ok", b"duplicate"):
        assert bounds(spec()).refusal([answer], retry_after_s) is None
