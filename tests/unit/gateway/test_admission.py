"""Bounds of a request by its class and its tenant, and a Retry-After that holds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protos import queue_pb2
from services.gateway import admission
from services.gateway.admission import (
    HORIZON_S,
    MANY_REREADS,
    Bounds,
    HeldBytes,
    Places,
    RecentAdmissions,
    refuse_late,
    refuse_limits,
)
from services.gateway.auth import Caller
from services.gateway.cluster import Forecast, Snapshot
from services.gateway.delivery.dispatcher import Entry, entry_of
from services.gateway.errors import ApiError
from services.gateway.kserve.tensors import body_of
from services.gateway.request import CLASS_SHARES, GenerationSpec, content_of
from shared.keys import CLASSES, Keys, grammar_name
from shared.redis_client import GRAMMAR_APART_BYTES
from shared.settings import DEMO_MODEL, GatewaySettings
from tests.support.gateway import generations

RATE = 70.0  # tokens a second


def spec(priority: str = "normal", **changes: Any) -> GenerationSpec:
    return generations.spec(**{"prompts": [[1] * 10], "max_tokens": 1, "priority": priority, **changes})


def bounds(
    asked: GenerationSpec, wait_s: float = 0.0, others: bool = False, redis_bytes: int = 0, **settings: Any
) -> Bounds:
    """Where the first token is predicted in `wait_s`."""
    values = {"max_queued_tokens": 1000, "max_wait_s": 60, **settings}
    forecast = Forecast(1000 * wait_s, 500, RATE) if wait_s else None
    caller = Caller("t", has_others=others)
    return Bounds.of(GatewaySettings(model=DEMO_MODEL, **values), asked, caller, forecast, redis_bytes)


def retry_after_s(tokens: float) -> float:
    return max(1, math.ceil(tokens / RATE))


def refusal(found: Bounds, *answer: Any) -> ApiError:
    error = found.refusal(list(answer), retry_after_s)
    assert error is not None and error.status == 429
    return error


def test_less_urgent_classes_are_refused_first() -> None:
    found = [bounds(spec(name)).class_tokens for name in CLASSES]
    assert found == [1000, 950, 800, 500]
    refused = {name for name in CLASSES if bounds(spec(name), wait_s=50).late}
    assert refused == {"normal", "low"}
    assert set(CLASS_SHARES) == set(CLASSES)


def test_tenant_share_of_tokens_and_bytes_applies_beside_other_tenants() -> None:
    assert bounds(spec("low")).tenant_tokens == 500
    assert bounds(spec("low"), others=True).tenant_tokens == 250
    assert bounds(spec("realtime"), others=True, tenant_queue_share=0.2).tenant_tokens == 200
    assert bounds(spec("low"), max_queued_bytes=1000).tenant_bytes == 500
    assert bounds(spec("low"), others=True, max_queued_bytes=1000).tenant_bytes == 250
    assert bounds(spec("low"), others=True, max_queued_bytes=1).tenant_bytes == 1, "0 would be no bound"


def test_bytes_are_bounded_by_half_of_redis_unless_set() -> None:
    found = [bounds(spec(name), redis_bytes=2000).class_bytes for name in CLASSES]
    assert found == [1000, 950, 800, 500]
    assert bounds(spec("low"), redis_bytes=2000, max_queued_bytes=100).class_bytes == 50
    assert bounds(spec("low"), others=True).class_bytes == 0, "Redis has no maxmemory"


@pytest.mark.parametrize("own", [{"ttft_slo_ms": 1000}, {"background": True}])
def test_long_wait_refuses_no_request_with_slo_or_in_background(own: Any) -> None:
    assert bounds(spec(), wait_s=3600).late is not None
    assert bounds(spec(**own), wait_s=3600).late is None
    assert bounds(spec(), wait_s=3600, max_wait_s=0).late is None


@pytest.mark.parametrize("wait_s", [48.001, 50.5, 61.0])
def test_wait_is_admitted_after_retry_after_and_not_before(wait_s: float) -> None:
    late = bounds(spec(), wait_s=wait_s).late
    assert late is not None and late.code == "overloaded"
    after = int(late.headers["Retry-After"])
    assert bounds(spec(), wait_s=wait_s - after).late is None
    assert bounds(spec(), wait_s=wait_s - after + 1).late is not None, "no later than needed"


@pytest.mark.parametrize("waiting", [791, 1500, 2000])
def test_queue_has_room_after_retry_after(waiting: int) -> None:
    found = bounds(spec())
    error = refusal(found, b"full", waiting)
    assert (error.code, "class normal" in error.message) == ("queue_full", True)
    left = waiting - RATE * int(error.headers["Retry-After"])
    assert left + 10 <= found.class_tokens < left + RATE + 10
    above = refusal(bounds(spec(prompts=[[1] * 5000])), b"full", 700)
    assert int(above.headers["Retry-After"]) == 10, "when the queue is empty"
    for answer in (b"ok", b"duplicate"):
        assert found.refusal([answer], retry_after_s) is None


def test_tenant_queue_drains_slower_with_more_waiting_tenants() -> None:
    found = bounds(spec(), others=True)
    error = refusal(found, b"tenant", 740, 3)
    assert (error.code, found.tenant_tokens) == ("tenant_queue_full", 400)
    assert int(error.headers["Retry-After"]) == 15  # 350 tokens at a third of 70 a second


def test_full_of_bytes_retries_after_an_equal_share_of_tokens() -> None:
    found = bounds(spec(), others=True, max_queued_bytes=100_000)
    error = refusal(found, b"bytes", 78_000, 10_000, 0, 1400)
    assert (error.code, int(error.headers["Retry-After"])) == ("queue_full", 3)  # 8/78 of 1400 tokens, 70 a second
    assert "hold 78000 of at most 80000 bytes in Redis; retry" in error.message
    error = refusal(found, b"tenant bytes", 39_000, 10_000, 0, 700, 3)
    assert (error.code, int(error.headers["Retry-After"])) == ("tenant_queue_full", 7)
    assert "this tenant in class normal" in error.message and "at most 40000 bytes" in error.message
    error = refusal(found, b"bytes", 100, 200_000, 0, 70)
    assert int(error.headers["Retry-After"]) == 1, "until nothing is held"
    error = refusal(found, b"tenant bytes", 39_000, 10_000, 290_001, 700, 3)
    assert (error.headers["Retry-After"], error.retry_after_s) == ("291", None), "no place, which would be 60 to 120 s"


def test_place_exceeds_the_bounds_by_a_tenth_and_any_wait() -> None:
    asked, caller = spec("low"), Caller("t")
    settings = GatewaySettings(model=DEMO_MODEL, max_queued_tokens=1000, max_wait_s=60)
    found = Bounds.of(settings, asked, caller, Forecast(40_000, 500, RATE), has_place=True)
    assert (found.class_tokens, found.tenant_tokens, found.late) == (550, 550, None)


def test_backlog_and_expiry_before_redis_are_429() -> None:
    error = refusal(bounds(spec("low")), b"backlog", True, "bytes", 50, 48, 2.5)
    assert error.code == "tenant_queue_full"
    assert "queue full for this tenant in class low: 50 of at most 48 bytes are waiting" in error.message
    error = refusal(bounds(spec("low")), b"backlog", False, "requests", 2050, 2048, 2.5)
    assert (error.code, error.headers["Retry-After"]) == ("queue_full", "3")
    assert "class low: 2050 of at most 2048 requests are waiting for Redis" in error.message
    error = refusal(bounds(spec(deadline_ms=70)), b"expired")
    assert (error.code, error.param) == ("deadline_unreachable", "deadline_ms")


def test_deadline_allows_for_the_tokens_after_the_first() -> None:
    forecast = Forecast(1000.0, 500, RATE, token_ms=50.0)
    for deadline_ms, max_tokens in ((1000, 1), (2500, 31)):
        asked = spec(max_tokens=max_tokens, stop_ids=[])
        more_ms = forecast.token_ms * (asked.least_tokens - 1)
        refuse_late(forecast, "deadline_ms", deadline_ms, "deadline_unreachable", more_ms)
        with pytest.raises(ApiError) as refused:
            refuse_late(forecast, "deadline_ms", deadline_ms - 1, "deadline_unreachable", more_ms)
        assert refused.value.headers["Retry-After"] == "1"
    assert spec(max_tokens=31, min_tokens=5).least_tokens == 5, "an end-of-text token may end it"


def test_time_that_has_passed_counts_for_slo_and_deadline() -> None:
    forecast = Forecast(1000.0, 35, RATE)
    for name in ("ttft_slo_ms", "deadline_ms"):
        limit: dict[str, Any] = {name: 1500}
        asked = spec(**limit)
        refuse_limits(forecast, asked, 0.5)
        with pytest.raises(ApiError, match=f"{name}: the first token is predicted in 1000 ms and about 600 ms more"):
            refuse_limits(forecast, asked, 0.6)


def test_forecast_counts_what_statistics_do_not_show_yet() -> None:
    recent, now = RecentAdmissions(), 100.0
    seen = Snapshot(now, frozenset(), {}, {}, renewal_times={"a": now - 0.2})
    recent.add(spec("normal"), now - 5)  # the statistics have it
    recent.add(spec("normal", prompts=[[1] * 70] * 2), now - 0.1)
    recent.add(spec("low"), now)
    recent.add(spec("realtime"), now)
    before = Forecast(500.0, 35, RATE)
    assert recent.added_to(before, "realtime", seen).ttft_ms == pytest.approx(500 + 1000 * 10 / RATE)
    after = recent.added_to(before, "normal", seen)
    assert (after.queued_tokens, after.ttft_ms) == (35 + 150, pytest.approx(500 + 1000 * 150 / RATE))
    crowded = Forecast(500.0, 35, RATE, behind=4, starts_s=2.0)
    after = recent.added_to(crowded, "normal", seen)
    assert (after.behind, after.ttft_ms) == (7, pytest.approx(2000))


def test_recent_admissions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RECENT", 2)
    recent, seen = RecentAdmissions(), Snapshot(100.0, frozenset(), {}, {}, renewal_times={"a": 100.0})
    for tokens in (1000, 20, 10):
        recent.add(spec("normal", prompts=[[1] * tokens]), 100.0)
    assert recent.added_to(Forecast(0.0, 5, RATE), "normal", seen).queued_tokens == 35


def test_answers_that_are_read_again_are_bounded_for_a_tenant_and_for_all() -> None:
    rereads = HeldBytes("answers", 1000)
    one, other, alone = Caller("one", has_others=True), Caller("other", has_others=True), Caller("alone")
    big = rereads.hold(one, 5000)  # alone it has room
    with pytest.raises(ApiError, match="too many bytes of this tenant") as refused:
        rereads.hold(one, 1)
    assert (refused.value.status, refused.value.code, refused.value.headers) == (
        429,
        MANY_REREADS,
        {"Retry-After": "1"},
    )
    with pytest.raises(ApiError, match="too many bytes are held") as refused:
        rereads.hold(other, 1)
    assert (refused.value.status, refused.value.code) == (503, MANY_REREADS)
    assert "5000" not in refused.value.message
    rereads.hold(one, 5000, of_request=5000)()  # of the same answer
    with pytest.raises(ApiError):
        rereads.hold(other, 1, of_request=5000 - 1)
    big()
    third = Caller("third", has_others=True)
    for caller, share in ((one, 500), (other, 250), (third, 126)):  # each has half of what is left
        rereads.hold(caller, 100)
        rereads.hold(caller, share - 101)
        with pytest.raises(ApiError) as refused:
            rereads.hold(caller, 2)
        assert refused.value.status == 429
    rereads.hold(one, 1, of_request=399)()  # what began before the others came goes on
    rereads.hold(alone, 127)()  # without keys of others there is one bound
    with pytest.raises(ApiError):
        rereads.hold(alone, 128)


async def test_conversation_counts_in_the_backlog() -> None:
    def size_bytes(asked: GenerationSpec) -> int:
        return entry_of(Keys("c"), "g", asked, Caller("t"), b"", bounds(asked), 0.0).size_bytes

    assert size_bytes(spec(conversation_bytes=5000)) - size_bytes(spec()) == 5000


@pytest.mark.parametrize(("size", "is_apart"), [(GRAMMAR_APART_BYTES, False), (GRAMMAR_APART_BYTES + 1, True)])
async def test_long_grammar_goes_to_redis_by_name(size: int, is_apart: bool) -> None:
    text = "g" * size

    def entry(tenant: str) -> Entry:
        asked = spec(sampling=queue_pb2.Sampling(seed=7, grammar=text))
        return entry_of(Keys("c"), "g", asked, Caller(tenant), b"", bounds(asked), 0.0)

    request, *_, name, kept = entry("alice").arguments(0)
    wire = queue_pb2.Request.FromString(request)
    assert (name, kept) == ((grammar_name("alice", text), text) if is_apart else ("", ""))
    assert wire.sampling.grammar == (name or text) and wire.sampling.seed == 7
    assert (entry("bob").arguments(0)[-2] == name) is not is_apart, "tenants share no text"
    assert entry("alice").size_bytes >= len(request) + len(kept)


def has_place(places: Places, content: int, now: float) -> bool:
    with places.claim(content, now) as found:
        return found


def test_first_refused_request_comes_when_there_is_room() -> None:
    assert Places().promise(1, "normal", 3.2, 0.5, 100.0) == 4
    assert Places().promise(1, "normal", 0.0, 0.5, 100.0) == 1


def test_refused_requests_come_one_behind_the_other() -> None:
    found = Places()
    assert [found.promise(number, "normal", 2.0, 1.5, 100.0) for number in range(4)] == [2, 4, 5, 7]
    assert found.promise(9, "normal", 2.0, 1.5, 106.0) == 2, "the work of four has drained"


def test_time_is_that_at_the_rate_which_admitted_requests_leave() -> None:
    found = Places()
    for _ in range(10):
        found.count_admitted("high", 0.5, 100.0)
    assert found.spare("normal", 100.0) == pytest.approx(0.5)
    assert found.promise(1, "normal", 3.0, 0.0, 100.0) == 6
    assert found.promise(2, "realtime", 3.0, 0.0, 100.0) == 3, "the others are behind it"
    assert found.promise(3, "normal", 3.0, 0.0, 200.0) == 3, "nothing came for long"
    found.count_admitted("low", 10.0, 200.0)
    assert found.promise(4, "low", 3.1, 0.0, 200.0) >= HORIZON_S, "a lasting overload"


def test_time_beyond_the_horizon_is_spread_and_promises_nothing() -> None:
    found = Places()
    after = {found.promise(number, "normal", HORIZON_S, 1.0, 100.0) for number in range(50)}
    assert min(after) >= HORIZON_S and max(after) <= 2 * HORIZON_S and len(after) > 10
    assert found.promise(99, "normal", 2.0, 1.0, 100.0) == 2
    assert not has_place(found, 0, 100.0 + HORIZON_S)


@pytest.mark.parametrize(("after_s", "kept"), [(1.9, False), (2.0, True), (3.0, True), (18.0, True), (18.1, False)])
def test_place_is_kept_from_shortly_before_its_time(after_s: float, kept: bool) -> None:
    found = Places()
    found.promise(1, "normal", 3.0, 1.0, 100.0)
    assert has_place(found, 1, 100.0 + after_s) is kept


def test_place_is_spent_once_by_the_same_request() -> None:
    found = Places()
    found.promise(1, "normal", 3.0, 1.0, 100.0)
    assert not has_place(found, 2, 103.0)
    assert not has_place(found, 1, 100.5), "too early, which does not lose it"
    with found.claim(1, 103.0) as first, found.claim(1, 103.0) as copy:
        assert (first, copy) == (True, False)
    assert has_place(found, 1, 103.0), "it was given back"
    found.spend(1)
    assert not has_place(found, 1, 103.0)


def test_refused_copy_leaves_the_place_that_another_one_is_about_to_claim() -> None:
    found = Places()
    found.promise(1, "normal", 3.0, 1.0, 100.0)
    assert has_place(found, 1, 103.2), "for its turn"
    assert found.promise(1, "normal", 3.0, 1.0, 103.3) == 3
    assert has_place(found, 1, 103.4), "and for the queue"
    found.spend(1)
    assert found.promise(1, "normal", 2.0, 1.0, 103.5) == 2, "a place of its own"


def test_place_is_of_one_tenant_and_body() -> None:
    found = {content_of(tenant, body) for tenant, body in (("a", b"{}"), ("a", b"{ }"), ("b", b"{}"), ("a", b"{}"))}
    assert len(found) == 3


def test_body_of_a_grpc_request_is_the_same_in_any_order_of_its_map() -> None:
    assert body_of({"prompt": "x", "seed": {"b": 1, "a": 2}}) == body_of({"seed": {"a": 2, "b": 1}, "prompt": "x"})


def test_request_that_comes_back_early_moves_no_other_back() -> None:
    found = Places()
    assert [found.promise(1, "normal", 1.0, 0.5, 100.0 + at / 10) for at in range(10)] == [1] * 10
    assert found.promise(2, "normal", 1.0, 0.5, 100.0) == 2


def test_places_are_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_PLACES", 2)
    found = Places()
    assert [found.promise(number, "normal", 1.0, 0.0, 100.0) for number in range(2)] == [1, 1]
    assert found.promise(3, "normal", 1.0, 0.0, 100.0) >= HORIZON_S
    assert not has_place(found, 3, 200.0)
    assert found.promise(3, "normal", 1.0, 0.0, 200.0) == 1
