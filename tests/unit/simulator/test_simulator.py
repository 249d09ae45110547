"""The simulator against schedules worked out by hand: steps of a fixed time, so every figure is a sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import EMPTY, Outcome, StepPlan, StepResult
from services.simulator.device.clock import Features, Linear, RooflineClock
from services.simulator.device.device import Device
from services.simulator.device.roofline import Roofline
from services.simulator.engine import Run, Setup, Stuck, simulate
from services.simulator.metrics import Histogram
from services.simulator.workload.arrivals import Lengths, Spec, build
from services.simulator.workload.workload import STOP_ID, Workload, all_at_once

MS = 1_000_000
TEN = Linear(10 * MS)  # every step takes 10 ms, whatever is in it
BARE = Setup(blocks=1000, lookahead=0, host_us=0)


def at(ms: list[int], prompt: list[int], output: list[int]) -> Workload:
    return Workload(np.array(ms) * MS, np.array(prompt), np.array(output))


def of(run: Run, name: str) -> list[float]:
    return (getattr(run.seen, name) / MS).tolist()


def test_three_at_once_get_tokens_at_each_steps_end() -> None:
    run = simulate("orca", all_at_once([5, 6, 7], [1, 3, 2]), BARE, TEN)
    assert of(run, "ttft_ns") == [10, 10, 10]
    assert of(run, "e2e_ns") == [10, 30, 20]
    assert of(run, "worst_ns") == [0, 10, 10]
    result = run.result
    assert result["iterations"] == 3 and result["finished"] == 3 and result["duration_s"] == 0.03
    assert result["output_tok_s"] == 200 and result["throughput_tok_s"] == 800  # 6 and 24 tokens in 30 ms
    assert result["goodput_rps"] == 100 and result["device_busy"] == 1
    assert result["computed_tokens"] == 18 + 2 + 1


def by_brute_force(work: Workload, clock: Linear, seats: int, host_ns: int) -> list[list[int]]:
    """Orca with memory for all and nothing planned ahead: of each request the times of its tokens since it arrived."""
    arrived = work.arrived_ns.tolist()
    now, entered = 0, 0
    told: list[list[int]] = [[] for _ in arrived]
    context: dict[int, int] = {}  # of those that run, tokens in KV
    while entered < len(arrived) or context:
        if not context:
            now = max(now, arrived[entered])
        tokens, pairs, read = len(context), 0.0, sum(context.values())
        for i in context:
            context[i] += 1
        while entered < len(arrived) and arrived[entered] <= now and len(context) < seats:
            prompt = context[entered] = int(work.prompt[entered])
            tokens, pairs = tokens + prompt, pairs + prompt * (prompt + 1) / 2
            entered += 1
        now += host_ns + int(clock.c0 + clock.c1 * tokens + clock.c2 * read + clock.c3 * pairs)
        for i in list(context):
            told[i].append(now - arrived[i])
            if len(told[i]) == work.output[i]:
                del context[i]
    return told


@pytest.mark.parametrize("seed", range(2))
def test_orca_is_as_a_loop_over_lists_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 80
    work = Workload(np.sort(rng.integers(0, 4_000, n)) * MS, rng.integers(1, 90, n), rng.integers(1, 40, n))
    clock = Linear(3 * MS, 40_000, 900, 70)
    told = by_brute_force(work, clock, 5, 300_000)
    setup = replace(BARE, max_seqs=5, host_us=300, max_step_tokens=10_000)
    seen = simulate("orca", work, setup, clock).seen
    assert seen.ttft_ns.tolist() == [times[0] for times in told]
    assert seen.e2e_ns.tolist() == [times[-1] for times in told]
    assert seen.worst_ns.tolist() == [int(max(np.diff(times), default=0)) for times in told]


def test_contexts_count_as_the_model_says() -> None:
    steps: list[Features] = []

    class Spy:
        def duration_ns(self, plan: StepPlan, features: Features) -> int:
            steps.append(features)
            return MS

    simulate("sarathi", all_at_once([10], [3]), replace(BARE, step_tokens=6), Spy())
    # chunks [0, 6) and [6, 10): pairs 6 * 3.5 and 4 * (6 + 2.5); then decodes over 10 and 11 tokens
    assert steps == [(6, 0, 21, 6), (4, 0, 34, 4), (1, 10, 0, 0), (1, 11, 0, 0)]


def test_lookahead_hides_the_schedulers_time_behind_the_step() -> None:
    work = all_at_once([4], [4])
    paid = simulate("orca", work, replace(BARE, host_us=2000), TEN)
    hidden = simulate("orca", work, replace(BARE, host_us=2000, lookahead=1), TEN)
    assert of(paid, "e2e_ns") == [48]
    assert of(hidden, "e2e_ns") == [42]  # only before the first step nothing runs that could hide it


def test_lookahead_computes_one_token_more_and_delivers_none() -> None:
    run = simulate("orca", all_at_once([4], [3], [9]), replace(BARE, lookahead=1), TEN)
    assert run.seen.tokens.tolist() == [3]
    assert run.result["computed_tokens"] == 4 + 2 + 1
    assert of(run, "e2e_ns") == [30]


def test_two_microbatches_run_in_a_pipeline_of_two_stages() -> None:
    work = all_at_once([4, 4], [3, 3])
    run = simulate("orca", work, replace(BARE, microbatches=2, max_seqs=2), TEN)
    # each batch of one takes 10 ms through both stages of 5 ms; the second follows 5 ms behind the first
    assert sorted(of(run, "e2e_ns")) == [30, 35]


STATIC, REQUEST = "orca:batch=static-8", "orca:batch=request-2"


def test_what_is_delivered_at_the_end_need_not_be_padded() -> None:
    run = simulate(REQUEST, all_at_once([4, 8], [2, 5]), BARE, TEN)
    assert of(run, "e2e_ns") == [50, 50] and run.result["padding"] == 0
    assert run.result["computed_tokens"] == 12 + 5


def test_a_padded_engine_delivers_when_its_batch_ends() -> None:
    for lookahead in (0, 1):
        work = all_at_once([4, 8], [2, 5], [9, 9])
        run = simulate(STATIC, work, replace(BARE, lookahead=lookahead), TEN)
        assert of(run, "ttft_ns") == [10, 10]
        assert of(run, "e2e_ns") == [50, 50]
        assert of(run, "worst_ns") == [40, 10]  # (50 - 10) / (n - 1)
        # gaps 10, 10, 10, 10, 40: the P99 lies 0.96 of the way from the fourth to the fifth
        assert [run.result["tbt_ms"][p] for p in ("p50", "p99")] == pytest.approx([10, 38.8], rel=2e-4)


def test_a_request_refused_meanwhile_does_not_end_the_batch() -> None:
    work = at([0, 0, 5], [4, 8, 400], [2, 5, 2])
    run = simulate(STATIC, work, replace(BARE, blocks=20), TEN)
    assert of(run, "e2e_ns")[:2] == [50, 50] and run.result["finished"] == 2


def test_padding_is_prompts_to_longest_and_token_step_of_finished() -> None:
    run = simulate(STATIC, all_at_once([4, 8], [2, 5]), BARE, TEN)
    # prefill 2 x 8, then four steps of 2 rows; of them 4 of the prompt and 3 decodes are padding
    assert run.result["computed_tokens"] == 16 + 8
    assert run.result["padding"] == pytest.approx(7 / 24, abs=1e-5)


def test_swapped_blocks_hold_back_the_result_of_their_step() -> None:
    device = Device(4, TEN, np.array([9, 9]), 1, False, False, block_ns=6 * MS)
    none = np.zeros(0, np.bool_)
    plan = StepPlan(1, 0, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, [], EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, none)
    assert device.send(replace(plan, swap_out_gpu=np.arange(3, dtype=np.int32)), 0, int).end_ns == 18 * MS
    assert device.send(replace(plan, id=2, chunk_slots=np.zeros(1, np.int32)), 0, int).end_ns == 18 * MS  # in order


@pytest.mark.parametrize("routing", ["round-robin", "random", "least-tokens", "two-choices", "prefix"])
def test_every_request_finishes_with_all_its_tokens_in_little_memory(routing: str) -> None:
    rng = np.random.default_rng(7)
    n = 100
    work = Workload(
        np.sort(rng.integers(0, 1_000, n)) * MS, rng.integers(1, 120, n), output := rng.integers(1, 60, n), output + 20
    )
    setup = Setup(blocks=40, max_seqs=16, block_size=16, replicas=3, routing=routing, seed=3, max_step_tokens=256)
    run = simulate("orcinus", work, setup, Linear(2 * MS, 10_000))
    assert run.result["finished"] == n
    assert np.array_equal(run.seen.tokens, output)
    assert (run.seen.ttft_ns > 0).all() and (run.seen.e2e_ns >= run.seen.ttft_ns).all()
    assert run.seen.gaps.distribution()[1].sum() == output.sum() - n


@pytest.mark.parametrize(
    ("policy", "microbatches", "lookahead"), [("orca", 1, 1), ("sarathi", 2, 1), ("orcinus", 2, 0)]
)
def test_every_requests_times_are_those_that_the_core_told(
    policy: str, microbatches: int, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits gathered row by row from the Outcomes, by request, against the columns; with preemptions in flight."""
    told: dict[int, list[int]] = {}
    apply = Scheduler.apply

    def spy(self: Scheduler, result: StepResult, now_ns: int) -> Outcome:
        outcome = apply(self, result, now_ns)
        for request, count, wait in zip(outcome.requests, outcome.counts, outcome.waits_ns, strict=True):
            if count:
                told.setdefault(request.payload, []).append(int(wait))
        return outcome

    monkeypatch.setattr(Scheduler, "apply", spy)
    rng = np.random.default_rng(11)
    n = 48
    output = rng.integers(1, 260, n)
    work = Workload(np.sort(rng.integers(0, 2_000, n)) * MS, rng.integers(1, 120, n), output, np.full(n, 300))
    setup = Setup(
        blocks=60, max_seqs=16, microbatches=microbatches, lookahead=lookahead, max_step_tokens=200, replicas=2
    )
    run = simulate(policy, work, setup, Linear(2 * MS, 10_000, 100))
    assert run.result["finished"] == n and (policy != "sarathi" or run.result["preemptions"] > 0)
    for i in range(n):
        waits = told[i]
        assert len(waits) == output[i]
        assert run.seen.ttft_ns[i] == waits[0] and run.seen.e2e_ns[i] == sum(waits)
        gaps = waits[1:] or [0]
        worst = np.percentile(gaps, 99) if len(gaps) >= 100 else max(gaps)
        assert run.seen.worst_ns[i] == pytest.approx(worst, abs=1)
    every = np.array([wait for waits in told.values() for wait in waits[1:]])
    assert run.result["tbt_ms"]["p99"] == pytest.approx(np.percentile(every, 99) / MS, rel=3e-4)


def test_round_robin_deals_and_least_tokens_avoids_the_busy_replica() -> None:
    work = at([0, 1, 2, 3], [500, 4, 4, 4], [50, 2, 2, 2])
    dealt = simulate("orca", work, replace(BARE, replicas=2), TEN)
    assert dealt.seen.replica.tolist() == [0, 1, 0, 1]
    least = simulate("orca", work, replace(BARE, replicas=2, routing="least-tokens"), TEN)
    assert least.seen.replica.tolist() == [0, 1, 1, 1]


def test_prefix_routing_sends_a_group_to_one_replica() -> None:
    n = 40
    group = np.arange(n) % 8
    work = Workload(np.arange(n) * MS, np.full(n, 64), np.full(n, 2), group=group, prefix_tokens=32)
    run = simulate("orca", work, replace(BARE, replicas=4, routing="prefix"), TEN)
    assert all(len(set(run.seen.replica[group == g].tolist())) == 1 for g in range(8))
    assert len(set(run.seen.replica.tolist())) > 1


def test_one_scheduler_routes_by_prefix_among_its_replicas() -> None:
    n = 120
    group = np.random.default_rng(5).integers(0, 16, n)
    work = Workload(np.arange(n) * 4 * MS, np.full(n, 80), np.full(n, 4), group=group, prefix_tokens=64)
    setup = Setup(blocks=60, max_seqs=8, lookahead=1, replicas=4, routing="scheduler")
    run, by_load = (simulate("orcinus", work, replace(setup, affinity=a), Linear(2 * MS, 100_000)) for a in (1.0, 0.0))
    assert run.result["finished"] == n and set(run.seen.replica.tolist()) == {0, 1, 2, 3}
    assert len(run.stats) == 1 and len(run.devices) == 4 and all(device.tokens for device in run.devices)
    assert run.result["prefix_hit_tokens"] > by_load.result["prefix_hit_tokens"] > 0


def test_prefill_replicas_hand_over_to_decode_replicas() -> None:
    setup = Setup(
        blocks=200, max_seqs=8, host_blocks=100, lookahead=1, replicas=2, routing="scheduler", block_bytes=1 << 10,
        roles=("prefill", "decode"), share_host_tiers=True,
    )  # fmt: skip
    run = simulate("orcinus", at([0, 5, 9], [40, 50, 60], [6, 7, 8]), setup, Linear(2 * MS, 10_000))
    assert run.result["finished"] == 3 and run.stats[0]["handed_over"] == 3
    assert (run.seen.second_ns > 0).all()


@pytest.mark.parametrize(
    "changes",
    [{"roles": ("", "")}, {"affinity": 0.0}, {"share_host_tiers": True}, {"routing": "scheduler", "roles": ("", "")}],
)
def test_a_setup_that_its_routing_cannot_have_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"routing scheduler|3 replicas"):
        simulate("orca", all_at_once([4], [2]), replace(BARE, replicas=3, **changes), TEN)


def test_prompts_differ_from_their_first_token_on_outside_groups() -> None:
    work = Workload(np.zeros(2000, np.int64), np.full(2000, 20), np.ones(2000, np.int64), group=np.full(2000, -1))
    firsts = {int(work.request(i, 0).prompts[0][0]) for i in range(2000)}
    assert len(firsts) == 2000 and min(firsts) > STOP_ID
    shared = replace(work, group=np.arange(2000) % 2, prefix_tokens=16)
    one, other, same = (shared.request(i, 0).prompts[0] for i in (0, 1, 2))
    assert one[:16].tolist() == same[:16].tolist() != other[:16].tolist()
    assert one[16] != same[16]


def test_classes_are_counted_apart() -> None:
    work = replace(
        at([0, 0, 0], [4, 4, 4], [2, 2, 30]), priority=np.array([0, 3, 3]), tbt_slo_ns=np.array([5, 0, 0]) * MS
    )
    classes = simulate("orca", work, BARE, TEN).result["classes"]
    assert set(classes) == {"realtime", "low"}
    assert classes["realtime"]["slo_violations"] == 1 and classes["low"]["slo_violations"] == 0
    assert classes["low"]["finished"] == 2 and classes["low"]["ttft_ms"]["p50"] == 10


def test_request_that_can_never_run_is_told_and_not_counted() -> None:
    run = simulate("orca", all_at_once([10, 4000], [2, 2]), replace(BARE, blocks=20), TEN)
    assert run.result["finished"] == 1 and run.result["requests"] == 2
    assert run.result["slo_violations"] == 0.5
    assert "KV blocks" in next(iter(run.result["errors"]))


def test_a_core_that_plans_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "plan", lambda self, now_ns, replica=0: (None, None))
    monkeypatch.setattr("services.simulator.engine.MAX_TICKS", 50)
    with pytest.raises(Stuck, match="orca holds 1 requests"):
        simulate("orca", all_at_once([4], [2]), BARE, TEN)


def test_the_histograms_percentiles_are_those_of_the_values() -> None:
    rng = np.random.default_rng(1)
    values = (rng.lognormal(17, 2, 700_000)).astype(np.int64)
    histogram = Histogram()
    for part in np.array_split(values, 9):
        histogram.add(part)
    assert histogram.percentiles((0, 50, 90, 99, 99.9)) == pytest.approx(
        np.percentile(values, (0, 50, 90, 99, 99.9)).tolist(), rel=3e-4
    )
    assert histogram.distribution()[1].sum() == values.size


@pytest.mark.parametrize("seed", [1, 8, 20])
def test_first_steps_keep_a_declared_limit_that_512_tokens_keep(seed: int) -> None:
    """Nothing is known of the device at first, and 512 tokens take 33 ms on it."""
    limit_ms = 40.0
    roofline = Roofline("llama-70b", "h100x4")
    work = build(Spec(requests=40, rate_rps=10, tbt_slo_ms={"": limit_ms}, seed=seed))
    setup = Setup(blocks=roofline.kv_blocks(16), lookahead=1)
    run = simulate("orcinus", work, setup, RooflineClock(roofline))
    assert run.result["finished"] == 40
    assert run.seen.worst_ns.max() <= limit_ms * MS


def test_long_outputs_all_at_once_end_no_later_than_without_a_forecast() -> None:
    """Blocks run short at once, when all that is known of the lengths is that the first to end were short."""
    output = Lengths.parse("lognormal:600:0.8").draw(300, 0, 1).tolist()
    setup, clock = Setup(blocks=3000, lookahead=1), RooflineClock(Roofline("llama-8b", "h100"))
    work = all_at_once([48] * 300, output, [8192] * 300)
    ours, theirs = (simulate(policy, work, setup, clock).result for policy in ("orcinus", "vllm"))
    assert ours["e2e_ms"]["mean"] < theirs["e2e_ms"]["mean"]
    assert ours["throughput_tok_s"] > theirs["throughput_tok_s"]
