"""The gateway's forecast, the best prediction of the leading shards, none of a silent one; and why it is not ready."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from services.gateway.admission import overload_error, refuse_late
from services.gateway.cluster import (
    FIRST_LOAD_S,
    PLACER_S,
    STALE_S,
    Cluster,
    Forecast,
    PlacerSeen,
    Snapshot,
    placed_at,
    renewed_at,
)
from services.gateway.errors import ApiError
from services.gateway.progress import Observation
from services.gateway.request import Limits
from shared.placement import Placement
from shared.settings import GatewaySettings
from tests.support.gateway import generations

BUSY = {"queued_tokens_normal": "800", "predicted_ttft_ms_normal": "4000.5", "prefill_tok_s": "200.0", "time_ms": "7"}


def snapshot(stats: dict[str, dict[str, str]], leases: Any = ("a", "b"), silent_s: float = 0.0) -> Snapshot:
    """Return a look at Redis at which each shard's statistics were last seen to change `silent_s` before."""
    now = time.monotonic()
    return Snapshot(now, frozenset(leases), {}, stats, renewal_times={shard: now - silent_s for shard in stats})


def forecast(stats: dict[str, dict[str, str]], priority: str = "normal", **more: Any) -> Forecast | None:
    return snapshot(stats, **more).forecasts.get(priority)


def test_forecast_is_the_least_of_the_leading_shards() -> None:
    better = BUSY | {"predicted_ttft_ms_normal": "30", "queued_tokens_normal": "6"}
    assert forecast({"a": BUSY, "b": better}) == Forecast(30.0, 6, 200.0)
    assert forecast({"a": BUSY, "b": better}, leases=["a"]) == Forecast(4000.5, 800, 200.0)
    assert forecast({"a": BUSY}, leases=[]) is None
    assert forecast({}) is None


@pytest.mark.parametrize(
    "change", [{"queued_tokens_normal": "0"}, {"prefill_tok_s": "0"}, {"queued_tokens_normal": "nan"}]
)
def test_forecast_is_none_without_a_queue_or_a_rate(change: dict[str, str]) -> None:
    assert forecast({"a": BUSY, "b": BUSY | change}) is None


def test_forecast_names_the_reason_for_its_class() -> None:
    urgent = {"queued_tokens_realtime": "5", "predicted_ttft_ms_realtime": "30.0", "behind_realtime": "0"}
    crowded = BUSY | urgent | {"behind_normal": "12", "starts_s": "2.9996"}
    assert forecast({"a": crowded}, "realtime") == Forecast(30.0, 5, 200.0, 0, 2.9996)
    normal = forecast({"a": crowded})
    assert normal == Forecast(4000.5, 800, 200.0, 12, 2.9996)
    assert normal.reason == "12 sequences wait for slots or memory before it, 3 start a second"
    assert forecast({"a": BUSY}).reason == "800 prompt tokens are before it, at 200 a second"
    assert forecast({"a": crowded}, "low") is None, "nothing is said of that class"


@pytest.mark.parametrize(
    ("queue", "rate"),
    [
        ({}, 400.0),
        ({"tokens": "1000", "requests": "10"}, 250.0),  # b starts 50 tokens a second
        ({"tokens": "100000", "requests": "10"}, 400.0),  # prompts are slower than starts
    ],
)
def test_queue_drains_at_the_slower_of_prefill_and_starts(queue: dict[str, str], rate: float) -> None:
    stats = {"a": BUSY, "b": BUSY | {"starts_s": "0.5"}, "c": BUSY}  # no scheduler leads c
    assert Snapshot(0.0, frozenset("ab"), {}, stats, queue=queue).drain_tok_s == rate
    assert Snapshot(0.0, frozenset("ab"), {}, {}, queue=queue).drain_tok_s == 0, "nothing was measured"


def test_forecast_ignores_a_shard_with_stale_stats() -> None:
    assert forecast({"a": BUSY}, silent_s=STALE_S - 1) is not None
    assert forecast({"a": BUSY}, silent_s=STALE_S + 1) is None


def test_stats_are_renewed_when_their_time_changes() -> None:
    before = Snapshot(10.0, frozenset(), {}, {"a": BUSY, "b": BUSY}, renewal_times={"a": 3.0, "b": 4.0})
    now = {"a": BUSY, "b": BUSY | {"time_ms": "8"}, "c": BUSY}
    assert renewed_at(now, before, 11.0) == {"a": 3.0, "b": 11.0, "c": 11.0}
    assert renewed_at({"a": BUSY}, None, 11.0) == {"a": 11.0}
    after_an_outage = 10.1 + STALE_S
    assert renewed_at({"a": BUSY}, before, after_an_outage) == {"a": after_an_outage}


def test_lease_serves_nothing_without_a_scheduler_that_writes_statistics() -> None:
    """A foreign value may stand in the place of a lease."""
    stats = {"a": BUSY | {"workers": "1"}}
    look = Snapshot(100.0, frozenset("a"), {"w": {}}, stats, renewal_times={"a": 100.1 - STALE_S})
    assert look.is_served
    assert not replace(look, renewal_times={"a": 99.9 - STALE_S}).is_served


@pytest.mark.parametrize(("overdue", "is_served"), [("", True), ("0", True), ("1", True), ("2", False)])
def test_model_is_served_while_a_linked_worker_answers(overdue: str, is_served: bool) -> None:
    stats = {"a": BUSY | {"workers": "2"} | ({"workers_overdue": overdue} if overdue else {})}
    assert Snapshot(100.0, frozenset("a"), {"w": {}}, stats).is_served == is_served


ASLEEP = Placement(False, load_ms=5000, wake_ms=(6000, 7000, 8000, 9000))


def test_forecast_of_a_model_that_sleeps_has_the_time_until_it_wakes() -> None:
    look = snapshot({"a": BUSY}, leases="a")
    asleep = replace(look, placement=ASLEEP)
    assert asleep.forecasts["normal"] == replace(look.forecasts["normal"], wake_ms=8000, stays_asleep=True)
    nothing = Forecast(0.0, 0, 0.0, wake_ms=9000, stays_asleep=True)
    assert asleep.forecasts["low"] == nothing, "nothing else is known of that class"
    called = replace(nothing, stays_asleep=False)
    assert replace(asleep, queue={"requests": "1"}).forecasts["low"] == called, "that one wakes it"
    assert replace(asleep, stats={"a": BUSY | {"waiting": "1"}}).forecasts["low"] == called
    assert replace(asleep, placement=replace(ASLEEP, awake=True)).forecasts["low"] == called, "it loads"
    assert asleep.forecasts["low"].behind_more(500, 3).ttft_ms == 0
    served = {"a": BUSY | {"workers": "1"}}
    awake = Snapshot(look.at, look.leases, {"w": {}}, served, renewal_times=look.renewal_times, placement=ASLEEP)
    assert awake.forecasts == look.forecasts, "its worker has not gone yet"


def test_only_the_limits_of_a_request_count_the_time_until_the_model_wakes() -> None:
    forecast = Forecast(1000.0, 500, 200.0, wake_ms=8000)
    refuse_late(forecast, "deadline_ms", 9000, "deadline_unreachable")
    with pytest.raises(
        ApiError, match=r"predicted in 9000 ms, later than 6500 ms .the model is awake in 8000 ms"
    ) as late:
        refuse_late(forecast, "deadline_ms", 6500, "deadline_unreachable")
    assert late.value.headers["Retry-After"] == "3"
    with pytest.raises(ApiError, match="does not wake it; send a longer ttft_slo_ms, or none") as late:
        refuse_late(replace(forecast, stays_asleep=True), "ttft_slo_ms", 6500, "slo_unreachable")
    assert (late.value.status, late.value.headers) == (429, {}), "a later request would find it asleep as well"
    spec = generations.spec(prompts=[[1]], max_tokens=1)
    assert overload_error(forecast, spec, max_wait_s=2.0) is None, "it wakes for what waits"


async def test_model_that_sleeps_is_ready_and_its_queue_is_no_alarm() -> None:
    cluster = Cluster(GatewaySettings(api_keys=["k"]), "gateway-1", Limits(max_model_len=100, max_choices=8))
    cluster.redis_error = ""
    look = Snapshot(time.monotonic(), frozenset("a"), {}, {"a": BUSY | {"waiting": "1"}})
    cluster.snapshot = look
    assert cluster.reason_not_ready() == "no worker is registered"
    assert look.observation.stats
    cluster.snapshot = replace(look, placement=ASLEEP)
    assert cluster.reason_not_ready() == ""
    assert cluster.snapshot.observation == Observation()
    cluster.snapshot = replace(look, placement=ASLEEP, leases=frozenset())
    assert cluster.reason_not_ready() == "no scheduler is alive"
    await cluster.close()


def test_model_that_is_awake_has_no_worker_for_no_longer_than_a_load() -> None:
    look = replace(snapshot({"a": BUSY | {"waiting": "1"}}, leases="a"), placed_at=time.monotonic())
    awake = replace(ASLEEP, awake=True)
    for placement, most_s in ((awake, 5.0), (replace(awake, load_ms=0), FIRST_LOAD_S)):
        for passed_s, waits in ((most_s - 0.5, True), (most_s + 0.5, False)):
            late = replace(look, at=look.placed_at + passed_s, placement=placement)
            assert (late.has_to_wait, late.observation == Observation()) == (waits, waits)
            assert replace(late, placement=ASLEEP).has_to_wait, "that one waits for its turn"
    served = replace(look, placement=awake, workers={"w": {}}, stats={"a": BUSY | {"workers": "1"}})
    assert not served.has_to_wait


def test_turn_counts_from_its_first_look() -> None:
    first = replace(snapshot({}), placement=ASLEEP, placed_at=3.0)
    assert placed_at(replace(ASLEEP, load_ms=7), first, 9.0) == 3.0
    assert placed_at(replace(ASLEEP, awake=True, since_ms=7), first, 9.0) == 9.0
    assert placed_at(ASLEEP, None, 9.0) == placed_at(ASLEEP, snapshot({}), 9.0) == 9.0


def test_placer_that_was_killed_lives_until_it_should_be_there_again() -> None:
    placer = PlacerSeen()
    assert not placer.lives(0, 0.0)
    assert placer.lives(1, 5.0)
    assert placer.lives(0, 5.0 + PLACER_S - 0.1)
    assert not placer.lives(0, 5.0 + PLACER_S)


async def test_refused_writes_are_the_reason_when_not_ready() -> None:
    cluster = Cluster(GatewaySettings(api_keys=["k"]), "gateway-1", Limits(max_model_len=100, max_choices=8))
    cluster.redis_error = ""
    cluster.snapshot = snapshot({}, leases=())
    assert cluster.reason_not_ready() == "no scheduler is alive"
    cluster.write_error = "OOM command not allowed when used memory > 'maxmemory'."
    assert cluster.reason_not_ready() == f"Redis refuses to write: {cluster.write_error}"
    await cluster.close()
