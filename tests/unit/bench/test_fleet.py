"""The fleet model: against formulas, against steps counted one by one, against the core; nothing is lost on the way."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import yaml

from bench.fleet import main as command
from bench.fleet.replica import Replica, Requests, Size, StepCost
from bench.fleet.routing import ROUTERS
from bench.fleet.run import Fleet, FleetRun, Rule, Scaler, run
from bench.fleet.traffic import Spec, Traffic, build
from services.simulator.device.roofline import Roofline
from shared.settings import ROOT

MS = 1e6
PLAIN = StepCost(fixed=MS, weights=0.0, token=0.0, context=0.0, pair=0.0)  # every step takes a millisecond
GPU = StepCost.of(Roofline("llama-8b", "h100"))
SIZE = Size(256, 400_000)


def traffic(arrived_s: np.ndarray, output: np.ndarray, prompt: int = 1) -> Traffic:
    count = len(arrived_s)
    return Traffic(
        (arrived_s * 1e9).astype(np.int64), np.full(count, prompt, np.int64), output.astype(np.int64),
        np.full(count, -1, np.int64),
    )  # fmt: skip


def waits_s(servers: int, routing: str, load: float, count: int = 40_000) -> float:
    """Mean wait before the service, of servers that serve one at a time, exponential times of 1 s on average."""
    rng = np.random.default_rng(3)
    arrived = np.cumsum(rng.exponential(1 / (load * servers), count))
    steps = np.maximum(1, np.rint(rng.exponential(1000, count)))
    one_at_a_time = Size(1, 10_000_000, 512, lookahead=0, block_size=1)
    ran = run(Fleet(servers, routing, one_at_a_time, PLAIN), traffic(arrived, steps))
    return float((ran.ttft_s - 0.001).mean())


def erlang_c(servers: int, load: float) -> float:
    """Mean wait over the mean service in M/M/c."""
    offered = servers * load
    busy = offered**servers / math.factorial(servers) / (1 - load)
    idle = sum(offered**k / math.factorial(k) for k in range(servers))
    return busy / (busy + idle) / (servers * (1 - load))


@pytest.mark.parametrize(
    ("servers", "routing", "load", "wait_s"),
    [
        (1, "one-queue", 0.5, erlang_c(1, 0.5)),
        pytest.param(8, "one-queue", 0.7, erlang_c(8, 0.7), marks=pytest.mark.slow),
        pytest.param(4, "random", 0.7, 0.7 / 0.3, marks=pytest.mark.slow),  # so many queues of their own
    ],
)
def test_queue_waits_as_long_as_formula_of_erlang_says(servers: int, routing: str, load: float, wait_s: float) -> None:
    assert waits_s(servers, routing, load) == pytest.approx(wait_s, rel=0.08)


@pytest.mark.parametrize("routing", ROUTERS)
def test_every_request_ends_once_with_all_its_tokens_whatever_fails(
    routing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = Rule(least=2, most=12, startup_s=20.0, up_period_s=30.0, down_window_s=60.0, down_period_s=30.0)
    fleet = Fleet(
        4, routing, replace(SIZE, kv_tokens=60_000), GPU, (1.0, 0.5), mtbf_s=120.0, restart_s=10.0, scaler=rule,
        price_hour=3.0,
    )  # fmt: skip
    asked = build(Spec(6000, 60.0, swing=0.9, day_s=60.0, groups=20, prefix_tokens=64))
    going = FleetRun(fleet, asked, None)
    ended: list[int] = []
    before = Replica.event

    def event(self: Replica, now: float) -> tuple[list[int], float]:
        found = before(self, now)
        ended.extend(found[0])
        return found

    monkeypatch.setattr(Replica, "event", event)
    result = going.go().result
    assert sorted(ended) == list(range(6000)) and result["finished"] == 6000
    assert result["failures"] > 5 and result["restarted"] > 0
    sizes = np.array(going.requests.prompt) + np.array(going.requests.output)
    assert (sizes == asked.prompt + asked.output).all()
    for replica in going.replicas:
        assert (replica.load, replica.pending, replica.running, replica.kv_share) == (0, 0, 0, 0.0)
    first, end = np.array(going.requests.first), np.array(going.requests.end)
    assert (first >= asked.arrived_ns).all() and (end >= first - 1).all()
    paid_h = result["replica_hours"]
    assert 0 < result["cost"] <= paid_h * 3.0 + 0.01


def test_stopped_replica_gives_back_its_requests_with_their_outputs() -> None:
    requests = Requests([10], [100], [-1], 0)
    replica = Replica(0, requests, SIZE, PLAIN)
    first = replica.take(0, 0.0)
    replica.event(first)
    assert replica.stop(first + 40 * MS) == [0]
    assert (requests.prompt, requests.output) == ([51], [59])
    assert not replica.up and replica.load == 0


def test_a_load_counts_by_the_speed_of_the_machine() -> None:
    requests = Requests([90, 40], [10, 10], [-1, -1], 0)
    fast, slow = Replica(0, requests, SIZE, GPU), Replica(1, requests, SIZE, GPU, 0.25)
    fast.take(0, 0.0)
    slow.take(1, 0.0)
    router = ROUTERS["least-tokens"]([fast, slow], 0)
    router.changed()
    assert fast.load > slow.load and router.choose(0, -1) == 0


def test_the_rule_is_that_of_the_kubernetes_overlay() -> None:
    text = (ROOT / "deploy/kubernetes/overlays/autoscaling/workers.yaml").read_text()
    spec = yaml.safe_load(text)["spec"]
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    percent, pods = behavior["scaleUp"]["policies"]
    (down,) = behavior["scaleDown"]["policies"]
    age, sequences = (float(each["metadata"]["threshold"]) for each in spec["triggers"])
    assert [each["metricType"] for each in spec["triggers"]] == ["Value", "AverageValue"]
    assert Rule() == Rule(
        least=spec["minReplicaCount"], most=spec["maxReplicaCount"], polling_s=spec["pollingInterval"], age_s=age,
        sequences=sequences, up_window_s=behavior["scaleUp"]["stabilizationWindowSeconds"],
        up_factor=percent["value"] / 100,
        up_count=pods["value"], up_period_s=percent["periodSeconds"],
        down_window_s=behavior["scaleDown"]["stabilizationWindowSeconds"], down_count=down["value"],
        down_period_s=down["periodSeconds"],
    )  # fmt: skip


def test_the_rule_doubles_at_most_and_goes_down_by_one() -> None:
    scaler = Scaler(Rule(most=20), 4)
    there, seen = 4, []
    for at in range(15, 1500, 15):
        there = scaler.wanted(float(at), there, 100.0 if at < 300 else 0.0, 3)
        seen.append(there)
    assert max(seen[:11]) == 8  # within the first period
    assert max(seen) == 16 and seen[-1] == 15  # a quarter of an hour after the last wish for more, by one


def test_command_prints_one_object_and_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--replicas", "1,3", "--routing", "all", "--requests", "60", "--price", "2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(each["replicas"], each["finished"]) for each in results] == [(n, 60) for n in (1, 3) for _ in ROUTERS]
    assert all(each["cost_per_million_output"] > each["cost_per_million_tokens"] > 0 for each in results)
    for wrong in (["--replicas", "0"], ["--routing", "best"], ["--requests", "0"], ["--swing", "1"], ["--speeds", "x"]):
        assert command.main(wrong) == 2
    assert "best" in capsys.readouterr().err
