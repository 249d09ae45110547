"""From an Outcome to what Redis gets, and from Outcomes to what dashboards read: pure, against hand-made columns."""

from __future__ import annotations

import numpy as np
import pytest

from protos import queue_pb2
from services.scheduler.core.types import Finish, FinishedRequest, NewRequest, Outcome
from services.scheduler.requests.intake import Entry, extend, room_by_class
from services.scheduler.requests.publisher import arguments, batches, written_keys
from services.scheduler.telemetry import Stats, Window
from shared.keys import Keys
from shared.wire.columns import pack, unpack

SECOND = 1_000_000_000


def request(name: str, gateway: str, **more: int) -> NewRequest:
    return NewRequest(id=name, prompts=[np.arange(5, dtype=np.int32)], max_tokens=8, gateway=gateway, **more)


def outcome() -> Outcome:
    """Two gateways; `b` ends without a token, `c` fails."""
    rows = [request("a", "g1"), request("b", "g1"), request("c", "g2")]
    return Outcome(
        requests=rows,
        gateways=[row.gateway for row in rows],
        choices=np.array([0, 1, 0], np.int32),
        first_indices=np.array([3, 7, 0], np.int32),
        counts=np.array([1, 0, 1], np.int32),
        tokens=np.array([11, 22], np.int32),
        waits_ns=np.array([2_000_000, -1, 40_000_000], np.int64),
        finish=np.array([Finish.RUNNING, Finish.CANCELLED, Finish.ERROR], np.uint8),
        errors={2: "it broke"},
        cached_tokens={2: 4},
        checkpoints=[("a", 0, 2, np.array([10, 11], np.int32))],
        started_ids=["c"],
        ended_requests=[FinishedRequest(rows[2], [np.array([22], np.int32)], [Finish.ERROR], "it broke")],
    )


def test_each_gateway_gets_one_entry_with_its_rows_alone() -> None:
    (first, one), (second, two) = batches(outcome(), epoch=4, step=9)
    assert (first, second) == ("g1", "g2")
    batch = queue_pb2.TokenBatch.FromString(one)
    assert (batch.epoch, batch.step, list(batch.requests)) == (4, 9, ["a", "b"])
    assert unpack(batch.counts).tolist() == [1, 0]
    assert unpack(batch.tokens).tolist() == [11]
    assert list(batch.finish) == [Finish.RUNNING, Finish.CANCELLED]
    assert not batch.errors and not batch.cached
    batch = queue_pb2.TokenBatch.FromString(two)
    assert unpack(batch.tokens).tolist() == [22]
    assert dict(batch.errors) == {0: "it broke"} and dict(batch.cached) == {0: 4}


def test_an_outcome_without_rows_makes_no_entry() -> None:
    assert batches(Outcome(started_ids=["a"]), 1, 1) == []


def test_arguments_carry_checkpoints_finishes_starts_and_ends() -> None:
    entry = Entry("stream", "5-0", queue_pb2.Request())
    args = arguments([(9, outcome())], 4, "prefix:", {"c": entry})
    at = 7  # epoch, prefix, group, three times, and that it is the first call
    assert args[0] == 4
    assert args[at] == 2  # entries
    at += 1 + 2 * 2
    assert args[at] == 3  # checkpoints: of a, and the ends of b and c
    rows = [args[at + 1 + 6 * i : at + 7 + 6 * i] for i in range(3)]
    assert rows[0] == ["a", 0, 8, pack([10, 11]), 0, 0]
    assert sorted(map(tuple, rows[1:])) == [("b", 1, 0, b"", Finish.CANCELLED, 7), ("c", 0, 0, b"", Finish.ERROR, 1)]
    at += 1 + 3 * 6
    assert args[at : at + 2] == [1, "c"]
    assert args[at + 2 :] == [1, "c", "stream", "5-0", "5", 5, "1", "it broke", 0]


def test_an_end_without_its_entry_is_not_written_again() -> None:
    assert arguments([(9, outcome())], 4, "prefix:", {})[-2:] == [0, 0]


def test_log_probabilities_go_to_their_requests_and_record_places() -> None:
    told = outcome()
    told.logprobs = np.array([b"aaaaaaaaaaaa", b""], object)
    (_, one), (_, two) = batches(told, epoch=4, step=9)
    batch = queue_pb2.TokenBatch.FromString(one)
    assert (batch.logprobs, unpack(batch.logprob_sizes).tolist()) == (b"aaaaaaaaaaaa", [12, 0])
    assert not queue_pb2.TokenBatch.FromString(two).logprob_sizes
    assert arguments([(9, told)], 4, "prefix:", {})[-5:] == [1, "a", 0, 36, b"aaaaaaaaaaaa"]


def test_log_probabilities_of_prompts_go_to_their_places() -> None:
    told = Outcome(prompt_logprobs=[("a", 0, 1, 2, b"aaaabbbb"), ("b", 3, 7, 1, b"cccc")])
    args = arguments([(9, told)], 4, "prefix:", {})
    assert args[7:] == [0, 0, 0, 0, 0, 2, "a", 0, 0, b"aaaabbbb", "b", 3, 24, b"cccc"]
    assert written_keys(Keys("m"), [told])[Keys("m").prompt_logprobs("b", 3)] == "string"


def test_a_window_keeps_the_newest_samples_of_the_last_minute() -> None:
    window = Window(samples=4)
    assert window.percentiles(0, 50, 99) == [0.0, 0.0]
    window.add(np.array([1.0, 2.0, 3.0]), 1 * SECOND)
    window.add(np.array([4.0, 5.0, 6.0]), 2 * SECOND)  # 1 and 2 are overwritten
    assert window.percentiles(3 * SECOND, 0, 100) == [3.0, 6.0]
    assert window.percentiles(61 * SECOND + 1, 0) == [4.0]  # 3 is a minute old
    assert window.percentiles(70 * SECOND, 50) == [0.0]


def test_statistics_tell_first_tokens_from_gaps_and_count_missed_limits() -> None:
    stats = Stats(0)
    seen = outcome()
    seen.requests[2].ttft_slo_ns = 30_000_000
    stats.outcome(seen, SECOND)
    stats.step(decode=2, prefill=5)
    stats.result(step_ns=3_000_000, idle_ns=1_000_000, prefill=6)
    fields = stats.snapshot({"queued_tokens_low": 10}, 2 * SECOND, 77, 4, "orcinus", 1)
    assert (fields["ttft_ms_p50"], fields["tbt_ms_p50"]) == (40.0, 2.0)
    assert fields["slo_violations_normal"] == 1
    assert (fields["tokens_total"], fields["tok_s"]) == (2, 1.0)
    assert (fields["step_ms"], fields["device_idle_pct"]) == (3.0, 25.0)
    assert (fields["prefill_tok_s"], fields["predicted_ttft_ms"]) == (2000.0, 5.0)
    again = stats.snapshot({"queued_tokens_low": 10}, 3 * SECOND, 78, 4, "orcinus", 1)
    assert (again["tokens_total"], again["tok_s"], again["ttft_ms_p50"]) == (2, 0.0, 40.0)
    assert again["predicted_ttft_ms"] == 5.0  # no prompt ran in that second; the rate stands
    fitted = stats.snapshot(
        {"queued_tokens_low": 10}, 4 * SECOND, 79, 4, "orcinus", 1, predicted_ns=[1_000_000, 2, 3, 7_240_000]
    )
    assert (fitted["predicted_ttft_ms"], fitted["prefill_tok_s"]) == (7.2, 2000.0)
    assert (fitted["predicted_ttft_ms_realtime"], fitted["predicted_ttft_ms_low"]) == (1.0, 7.2)


def test_prediction_is_compared_with_the_measured_time_of_its_request() -> None:
    stats = Stats(0)
    stats.forecasts.on_arrival("before", 2, 0.0, 7.0)
    stats.forecasts.on_start("before", 2, 7.0, SECOND)  # it took no time beyond the prediction
    first = outcome()
    request = first.requests[2]  # its first token came after 40 ms
    stats.snapshot({}, SECOND, 77, 4, "orcinus", 1, predicted_ns=[0, 0, 900_000_000, 0])
    stats.forecasts.on_arrival(request.id, request.priority, 1.0, 4.0)  # the report plays no part
    stats.outcome(first, 3 * SECOND)
    fields = stats.snapshot({}, 4 * SECOND, 79, 4, "orcinus", 1)
    assert (fields["ttft_predicted_ms_p50"], fields["ttft_error_ms_p50"]) == (5.0, 35.0)
    of_class = [fields[f"{name}_normal"] for name in ("ttft_predicted_ms_p50", "ttft_ms_p50", "ttft_error_ms_p50")]
    assert of_class == [5.0, 40.0, 35.0]
    assert fields["ttft_error_ms_p50_low"] == 0
    stats.outcome(outcome(), 5 * SECOND)
    assert stats.snapshot({}, 90 * SECOND, 80, 4, "orcinus", 1)["ttft_error_ms_p50"] == 0, "no promise, no error"


def measured(stats: Stats, *waits_ms: float) -> dict[str, float | int | str]:
    """Return the next statistics, after first tokens of class normal that took so long; the core predicts 5 ms."""
    for number, wait_ms in enumerate(waits_ms):
        stats.forecasts.on_arrival(str(number), 2, 1.0, 9.0)
        stats.forecasts.on_start(str(number), 2, wait_ms, SECOND)
    assert len(stats.forecasts) == 0
    return stats.snapshot({}, SECOND, 77, 4, "orcinus", 1, predicted_ns=[5_000_000] * 4)


def test_prediction_learns_the_time_outside_the_core() -> None:
    stats = Stats(0)
    assert measured(stats)["predicted_ttft_ms_normal"] == 5.0
    first = measured(stats, 24.0, 25.0, 900.0)
    assert first["predicted_ttft_ms_normal"] == 25.0  # the late one is an outlier
    assert first["ttft_error_ms_p50"] == 0.0, "no overhead was known for them"
    later = measured(stats, *[25.0] * 20)
    assert [later[f"predicted_ttft_ms_{name}"] for name in ("realtime", "normal", "low")] == [25.0] * 3
    assert (later["ttft_predicted_ms_p50"], later["ttft_error_ms_p50"]) == (25.0, 0.0)
    assert measured(stats, *[1.0] * 40)["predicted_ttft_ms_normal"] == 5.0  # never less than the core's
    assert measured(stats, *[1.0] * 80)["ttft_error_ms_p50"] == 0.0, "that of a request may be less"


def test_learnt_overhead_is_bounded_by_a_few_steps() -> None:
    stats = Stats(0)
    measured(stats)
    assert measured(stats, *[5_000.0] * 40)["predicted_ttft_ms_normal"] == 255.0
    stats.result(step_ns=50_000_000, idle_ns=0, prefill=0)
    assert measured(stats)["predicted_ttft_ms_normal"] == 455.0
    assert measured(stats, *[25.0] * 40)["predicted_ttft_ms_normal"] == 25.0  # an overload that is over is forgotten


def test_two_workers_compute_twice_as_many_prompt_tokens() -> None:
    stats = Stats(0)
    for replica in (0, 1):
        stats.result(step_ns=3_000_000, idle_ns=0, prefill=6, replica=replica)
    assert stats.snapshot({}, SECOND, 77, 4, "orcinus", 2)["prefill_tok_s"] == 4000.0


def test_age_of_a_queue_is_that_of_its_oldest_anywhere() -> None:
    core = {"oldest_ns_high": 2 * SECOND, "oldest_ns_low": 9 * SECOND}
    fields = Stats(0).snapshot(core, 10 * SECOND, 77, 4, "orcinus", 1, unclaimed_ms=[0, 300, 1500, 2000])
    assert [fields[f"queue_age_ms_{name}"] for name in ("realtime", "high", "normal", "low")] == [0, 8000, 1500, 2000]
    assert not any(name.startswith("oldest_ns") for name in fields)


def crowd(stats: Stats, now_s: float, waiting: int, running: int, **behind: int) -> dict[str, float | int | str]:
    core = {"waiting": waiting, "running": running, **{f"behind_{name}": count for name, count in behind.items()}}
    return stats.snapshot(core, int(now_s * SECOND), 0, 4, "orcinus", 1, predicted_ns=[500_000_000] * 4)


def start(stats: Stats, now_s: float, starts: int) -> None:
    for _ in range(starts):
        stats.outcome(outcome(), int(now_s * SECOND))  # one first token each


def test_rate_of_starts_is_that_of_whole_bursts() -> None:
    """Eight slots, all of which change hands every 1.1 s."""
    for shift in np.arange(0.0, 1.1, 0.1):
        stats = Stats(0)
        found = []
        for tick in range(1, 101):
            now = tick / 10
            if (tick - 1) % 11 == 0:
                start(stats, now, 8)
            if abs((now - shift) % 1 - 0.05) < 0.051:  # every second
                found.append(crowd(stats, now + 0.01, waiting=60 - 5 * tick // 10, running=8)["starts_s"])
        known = [rate for rate in found if rate]
        assert len(known) >= 6
        assert known == pytest.approx([8 / 1.1] * len(known), rel=0.001), shift


def test_predicted_ttft_counts_those_before_once_all_slots_turned_over() -> None:
    stats = Stats(0)
    start(stats, 0.5, 4)
    assert crowd(stats, 1, 0, 4)["predicted_ttft_ms"] == 500  # nothing waits: the rate is that of the demand
    start(stats, 1.5, 1)
    assert crowd(stats, 2, 40, 4, low=40)["predicted_ttft_ms"] == 500
    start(stats, 2.5, 3)
    few = crowd(stats, 3, 40, 4, low=40)
    assert (few["predicted_ttft_ms"], few["starts_s"], few["behind_low"]) == (500, 0, 0)
    start(stats, 3.5, 3)
    now = crowd(stats, 4, 40, 4, low=40, normal=10, high=1, realtime=0)
    assert now["starts_s"] == pytest.approx(3, rel=0.01)
    assert now["predicted_ttft_ms"] == now["predicted_ttft_ms_low"] == pytest.approx(40_000 / 3, rel=0.01)
    assert now["predicted_ttft_ms_normal"] == pytest.approx(10_000 / 3, rel=0.01)
    assert (now["predicted_ttft_ms_high"], now["predicted_ttft_ms_realtime"]) == (500, 500)
    assert [now[f"behind_{name}"] for name in ("realtime", "high", "normal", "low")] == [0, 0, 10, 40]
    assert crowd(stats, 5, 0, 4)["predicted_ttft_ms"] == 500
    start(stats, 5.5, 1)
    assert crowd(stats, 6, 40, 4, low=40)["predicted_ttft_ms"] == 500  # forgotten


def test_sequences_waiting_for_decode_elsewhere_tell_no_start_rate() -> None:
    stats = Stats(0)
    for second in range(1, 11):
        start(stats, second, 4)
        assert crowd(stats, second + 0.01, 40, 4, low=0)["starts_s"] == 0


def test_the_rate_of_starts_falls_when_none_comes() -> None:
    stats = Stats(0)
    for second in range(1, 11):
        start(stats, second, 4)
        rate = crowd(stats, second + 0.01, 40, 4, low=40)["starts_s"]
    assert rate == pytest.approx(4, rel=0.01)
    assert crowd(stats, 10.9, 40, 4)["starts_s"] == pytest.approx(4, rel=0.01), "before the next burst is due"
    assert float(crowd(stats, 20, 40, 4)["starts_s"]) < 2.2


def test_one_class_leaves_room_for_the_others() -> None:
    assert room_by_class(64, [0, 0, 0, 0]) == [40, 40, 40, 40]
    assert room_by_class(64, [0, 0, 0, 40]) == [8, 8, 8, 0]
    assert room_by_class(64, [8, 8, 8, 40]) == [0, 0, 0, 0]
    assert room_by_class(64, [0, 0, 60, 0])[2] < 0
    assert max(room_by_class(4, [3, 0, 0, 0])) == 1


def test_what_was_published_after_the_last_checkpoint_stands() -> None:
    new = request("a", "g1", n=2)
    new.outputs = [np.array([1, 2], np.int32), np.array([7], np.int32)]
    new.finishes = [Finish.RUNNING, Finish.STOP]

    def batch(rows: list[tuple[str, int, int, list[int]]]) -> queue_pb2.TokenBatch:
        return queue_pb2.TokenBatch(
            requests=[row[0] for row in rows],
            choices=pack([row[1] for row in rows]),
            first=pack([row[2] for row in rows]),
            counts=pack([len(row[3]) for row in rows]),
            tokens=pack([token for row in rows for token in row[3]]),
        )

    extend(
        [new],
        [
            batch(
                [("other", 0, 2, [9]), ("a", 0, 1, [2, 3]), ("a", 1, 1, [8])]
            ),  # one known, one new; choice 1 is over
            batch([("a", 0, 2, [99])]),  # published again, differently: the first one stands
            batch([("a", 0, 5, [6])]),  # a gap
            batch([("a", 0, 3, [4])]),
        ],
    )
    assert [output.tolist() for output in new.outputs] == [[1, 2, 3, 4], [7]]
