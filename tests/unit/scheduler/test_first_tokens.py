"""The predicted time to the first token beside the measured one, on the simulator's clock."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import pytest

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits, NewRequest, Outcome, StepPlan, StepResult
from services.scheduler.telemetry import Stats
from services.simulator import engine
from services.simulator.device.clock import Linear
from services.simulator.workload.workload import Workload
from shared.keys import CLASSES

CLOCK = Linear(5e6, 50e3)  # 5 ms a step and 50 us a token
SECOND = 1_000_000_000
Reports = list[dict[str, float | int | str]]
Load = tuple[float, tuple[int, int], tuple[int, int]]  # requests a second, tokens of prompts and of outputs


class Reporting(Scheduler):
    """A core beside which the statistics run as in the service: a report each second."""

    reports: Reports
    _reported_ns = SECOND

    @cached_property
    def statistics(self) -> Stats:
        return Stats(SECOND)

    def add(self, request: NewRequest, now_ns: int) -> Outcome:
        self._report(now_ns)
        self.statistics.arrives(request, self.first_tokens(), now_ns)
        return super().add(request, now_ns)

    def plan(self, now_ns: int, replica: int = 0) -> tuple[StepPlan | None, Outcome | None]:
        step, outcome = super().plan(now_ns, replica)
        self.statistics.outcome(outcome, now_ns)
        return step, outcome

    def apply(self, result: StepResult, now_ns: int) -> Outcome:
        self._report(now_ns)
        outcome = super().apply(result, now_ns)
        self.statistics.outcome(outcome, now_ns)
        self.statistics.result(result.step_ns, 0, 0)
        return outcome

    def _report(self, now_ns: int) -> None:
        while now_ns >= self._reported_ns + SECOND:
            self._reported_ns += SECOND
            predicted_ns = [self.predicted_ttft_ns(number) for number in range(len(CLASSES))]
            fields = self.statistics.snapshot(self.stats(), self._reported_ns, 0, 1, "", 1, predicted_ns)
            self.reports.append(fields)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reports]:
    monkeypatch.setattr(engine, "Scheduler", Reporting)
    Reporting.reports = []
    yield Reporting.reports


def load(seconds: float, rate: float, prompt: tuple[int, int], output: tuple[int, int]) -> Workload:
    rng = np.random.default_rng(4)
    requests = int(seconds * rate)
    arrived = np.cumsum(rng.exponential(1 / rate, requests) * SECOND).astype(np.int64)
    return Workload(arrived, rng.integers(*prompt, requests), rng.integers(*output, requests))


LOW, OVERLOAD, PROMPTS = (5, (16, 256), (16, 128)), (200, (16, 256), (16, 128)), (60, (200, 2000), (4, 60))


@pytest.mark.parametrize(
    ("policy", "load_of", "most"),
    [
        ("orcinus", LOW, 0.3),
        pytest.param("orcinus", OVERLOAD, 0.1, marks=pytest.mark.slow),
        ("orcinus", PROMPTS, 0.1),
        ("sarathi", LOW, 0.2),
    ],
    ids=["orcinus-low", "orcinus-overload", "orcinus-prompts", "sarathi-low"],
)
def test_predicted_first_token_is_near_the_measured(reports: Reports, policy: str, load_of: Load, most: float) -> None:
    """most: the median error as a share of the median time. The overloads bring more than twice what can be served."""
    engine.simulate(policy, load(15, *load_of), engine.Setup(blocks=4000, max_seqs=64), CLOCK)
    fields = reports[12]
    measured_ms = float(fields["ttft_ms_p50_normal"])
    assert measured_ms > (1000 if load_of is not LOW else 10), "the load is not the one that is meant"
    assert 0 < float(fields["ttft_error_ms_p50"]) < most * measured_ms
    assert float(fields["ttft_predicted_ms_p50"]) == pytest.approx(measured_ms, rel=0.4)


def test_prediction_counts_steps_in_flight_and_the_prompt() -> None:
    core = Scheduler("sarathi")
    core.join(Limits(8, 1000, 4, 4000, 512))
    model = core.replicas[0].model
    model.observations, model.c0, model.c1, model.c2, model.c3 = 1, 4e6, 1e5, 0.0, 0.0  # 4 ms a step, 0.1 ms a token
    asks = NewRequest("a", [np.zeros(100, np.int32)], 4, arrived_ns=SECOND)
    assert core.first_tokens().wait_ns(asks, SECOND, 0, 0.0) == 14_000_000
    core.add(asks, SECOND)
    later = NewRequest("b", [np.zeros(200, np.int32)], 4, arrived_ns=SECOND)
    assert core.first_tokens().wait_ns(later, SECOND, 0, 0.0) == 34_000_000, "both prompts in one step"
    core.plan(SECOND)
    assert core.first_tokens().wait_ns(later, SECOND, 0, 0.0) == 31_100_000, "half of the step in flight, then its own"
    long = NewRequest("c", [np.zeros(1024, np.int32)], 4, arrived_ns=SECOND)
    full_steps_ns = 1024 / 511 * 55_200_000
    assert core.first_tokens().wait_ns(long, SECOND, 0, 0.0) == pytest.approx(7_000_000 + full_steps_ns)


def test_order_that_puts_late_requests_last_bounds_the_wait() -> None:
    """Under overload a request starts in time or behind all that are: not when the queue before it is served."""
    core = Scheduler("orcinus")
    core.join(Limits(8, 1000, 4, 4000, 512))
    model = core.replicas[0].model
    model.observations, model.c0, model.c1, model.c2, model.c3 = 1, 4e6, 1e5, 0.0, 0.0
    for number in range(100):
        core.add(NewRequest(str(number), [np.zeros(100, np.int32)], 4, arrived_ns=SECOND), SECOND)
    asks = NewRequest("asks", [np.zeros(100, np.int32)], 4, arrived_ns=SECOND)
    in_time_ns = core.policy.order.in_time_ns(asks, 100, SECOND)
    assert core.first_tokens().wait_ns(asks, SECOND, 0, 10.0) == in_time_ns + 14_000_000, (
        "100 are before it, 10 start a second"
    )
    assert core.first_tokens().wait_ns(asks, SECOND, in_time_ns, 10.0) == 10 * SECOND, "it is late already"
    core.switch("sarathi")
    core.plan(SECOND, replica=1)  # there is none
    assert core.first_tokens().wait_ns(asks, SECOND, 0, 10.0) == 10 * SECOND, "that order puts no request last"


def test_prompt_as_long_as_those_that_became_late_is_expected_to_be_late() -> None:
    core = Scheduler("orcinus", max_seqs=1)
    core.join(Limits(8, 4000, 4, 4000, 512))
    order = core.policy.order
    for number, tokens in enumerate([10, *range(100, 140)]):
        core.add(NewRequest(str(number), [np.zeros(tokens, np.int32)], 4000, arrived_ns=SECOND), SECOND)
    core.plan(SECOND)
    short, long = (NewRequest("asks", [np.zeros(tokens, np.int32)], 4, arrived_ns=SECOND) for tokens in (50, 120))
    assert 0 < order.in_time_ns(long, 120, SECOND) < order.in_time_ns(short, 50, SECOND)
    late_ns = 3 * SECOND  # the one slot is taken, and a limit of 2 s is over
    core.waiting.head(None, late_ns)
    assert order.in_time_ns(long, 120, late_ns) == 0 < order.in_time_ns(short, 50, late_ns)
    order.queue()
    assert order.in_time_ns(long, 120, late_ns) > 0, "of a new queue nothing became late"
    assert order.in_time_ns(long, 120, late_ns + 2 * SECOND) > 0, "nothing has become late for as long as a limit"
