"""Priority by deadline with preemption, against its formula, brute force and a run computed by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.core.policy.memory import Lengths
from services.scheduler.core.policy.order import TTFT_NS
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.types import NewRequest, StepPlan
from services.simulator.device.clock import Linear
from services.simulator.engine import Run, Setup, simulate
from services.simulator.policies.deadlines import ByDeadline, Forecast, Outranked, Progress
from services.simulator.workload.workload import Workload
from tests.unit.scheduler.core.policy.rows import Rows, drained, waiting

MS_NS = 1_000_000


def forecast(outputs: int = 0) -> Forecast:
    """A forecast of 2 ms a prompt token and 10 ms a step; with `outputs`, all requests seen had so many."""
    made = Forecast(Lengths())
    made.token_ns, made.step_ns = 2.0 * MS_NS, 10.0 * MS_NS
    for _ in range(8 if outputs else 0):
        made.lengths.learn(outputs, 1_000)
    return made


def with_deadline(sequence: Sequence, deadline_ns: int) -> Sequence:
    sequence.record.request = replace(sequence.record.request, deadline_ns=deadline_ns)
    return sequence


# -- the formula


@pytest.mark.parametrize(
    ("progress", "slack_ms"),
    [
        (Progress(1_000 * MS_NS, known=50, computed=0, prompt=50, limit=100), 500),  # - 100 - 50 x 2 - 30 x 10
        (Progress(1_000 * MS_NS, known=60, computed=59, prompt=50, limit=100), 698),  # - 100 - 2 - 20 x 10
        (Progress(1_000 * MS_NS, known=60, computed=20, prompt=50, limit=100), 620),  # - 100 - 40 x 2 - 20 x 10
        (Progress(1_000 * MS_NS, known=50, computed=0, prompt=50, limit=10), 700),  # at most 10 outputs
        (Progress(1_000 * MS_NS, known=90, computed=89, prompt=50, limit=100), 498),  # 40 outputs: twice as long
    ],
)
def test_slack_is_deadline_less_finish(progress: Progress, slack_ms: int) -> None:
    """All requests seen had 30 outputs; it is 100 ms."""
    assert forecast(30).slack([progress], 100 * MS_NS).tolist() == [slack_ms * MS_NS]


def test_ttft_limit_stands_for_a_deadline_that_is_not_given() -> None:
    own, limited, plain = waiting(0, arrived=5, ttft=700), waiting(1, arrived=5, ttft=700), waiting(2, arrived=5)
    with_deadline(own, 900)
    nothing = Forecast(Lengths())
    assert nothing.of_waiting([own, limited, plain], 0).tolist() == [900, 705, 5 + TTFT_NS]


def test_a_step_is_predicted_as_the_replica_is_now() -> None:
    replica, made = Rows(), Forecast(Lengths())
    for tokens in (1, 2, 60, 100, 200, 700, 1_000, 50) * 8:
        replica.model.observe(tokens, 0, 0.0, 5 * MS_NS + tokens * 10_000)
    for _ in range(3):
        replica.add(known_tokens=10, limit=50)
    made.measure(replica)
    assert made.step_ns == pytest.approx(5 * MS_NS + 3 * 10_000, rel=0.02)
    assert made.token_ns == pytest.approx(10_000, rel=0.02)


# -- against brute force


def slack_of(deadline: int, known: int, computed: int, prompt: int, limit: int, now: int, seen: list[int]) -> int:
    """The formula in one line of Python for each term."""
    longer = sorted(length for length in seen if length > known - prompt)
    length = longer[len(longer) // 2] if longer else 2 * (known - prompt)
    left = max(min(length, limit) - (known - prompt), 0)
    return max(deadline - now - (known - computed) * 2 * MS_NS - left * 10 * MS_NS, 1)


@pytest.mark.parametrize("seed", range(3))
def test_waiting_sequences_leave_in_the_order_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    made = forecast()
    seen = [rng.randint(1, 80) for _ in range(8)]
    for length in seen:
        made.lengths.learn(length, 1_000)
    queue, sequences = ByDeadline(made).queue(), []
    for number in range(60):
        one = waiting(
            number, rng.randint(0, 9) * MS_NS, rng.randint(1, 90), outputs=rng.choice((0, 0, rng.randint(1, 99)))
        )
        sequences.append(with_deadline(one, rng.randint(100, 1_200) * MS_NS))
        queue.push(one, 0)
    for now in (0, 200 * MS_NS, 600 * MS_NS):
        expected = sorted(
            sequences,
            key=lambda s: (
                slack_of(s.record.request.deadline_ns, s.known_tokens, 0, s.prompt.size, 100, now, seen),
                s.record.arrived_ns,
                s.number,
            ),
        )
        served = drained(queue, now)
        assert [s.number for s in served] == [s.number for s in expected]
        for one in served:
            queue.push(one, now)


@pytest.mark.parametrize("seed", range(10))
def test_the_victim_is_that_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    made, replica, slacks = forecast(40), Rows(blocks=10_000), []
    made.measure = lambda replica: None  # type: ignore[method-assign]
    order, relief, now = ByDeadline(made), Outranked(made), 50 * MS_NS
    for row in range(10):
        prompt, outputs, arrived = rng.randint(1, 60), rng.randint(0, 39), rng.randint(0, 3)
        replica.add(known_tokens=prompt + outputs, limit=prompt + 100, prompt=prompt, arrival_ns=arrived)
        deadline = rng.choice((100, 600, 900)) * MS_NS
        replica.table.request[row] = NewRequest(str(row), [np.zeros(prompt, np.int32)], 100, deadline_ns=deadline)
        known = prompt + outputs
        slacks.append((slack_of(deadline, known, known - 1, prompt, 100, now, [40] * 8), arrived, row))
    rows = replica.slots.astype(np.intp)
    assert order.sort(replica.table, rows, now).tolist() == [row for _, _, row in sorted(slacks)]
    some = np.array(sorted(rng.sample(range(10), 6)), np.intp)
    lowest = max(slacks[row] for row in some)
    head = with_deadline(waiting(99, tokens=20), rng.randint(100, 900) * MS_NS)
    mine = slack_of(head.record.request.deadline_ns, 20, 0, 20, 100, now, [40] * 8)
    wanted = [lowest[2]] if mine < lowest[0] else []
    assert relief.early_victims(replica, some, head, now) == wanted
    assert relief.early_victims(replica, some, None, now) == []
    assert relief.early_victims(replica, some[:0], head, now) == []
    replica.draining = 1
    assert relief.early_victims(replica, some, head, now) == [], "blocks come already"


# -- in the core


def run(
    deadlines_ms: list[int], policy: str = "deadline", prompt: int = 16, **setup: int
) -> tuple[Run, list[list[str]]]:
    """One slot and steps of 1 ms: a request of 60 outputs at 0 ms, one of 5 at 10 ms and one at 12 ms.

    prompt: tokens of the second and third prompt. Returns the run and the requests that run, by step.
    """
    running: list[list[str]] = []

    def observe(now_ns: int, core: Scheduler, plan: StepPlan) -> None:
        table = core.replicas[0].table
        running.append([request.id for request in table.request[: table.high] if request is not None])

    workload = Workload(
        np.array([0, 10, 12], np.int64) * MS_NS,
        np.array([16, prompt, prompt], np.int64),
        np.array([60, 5, 5], np.int64),
        deadline_ns=np.array(deadlines_ms, np.int64) * MS_NS,
    )
    made = Setup(**{"blocks": 100, "host_blocks": 100, "lookahead": 0, "host_us": 0.0, "max_seqs": 1, **setup})
    return simulate(policy, workload, made, Linear(1e6), observer=observe), running


def in_turn(running: list[list[str]]) -> list[str]:
    """The requests of one slot, each once for each stay."""
    ids = [ids[0] for ids in running if ids]
    return [one for i, one in enumerate(ids) if not i or ids[i - 1] != one]


BLOCKS = {"max_seqs": 3, "blocks": 5, "prompt": 64}
"""There are three slots, but 5 blocks: the prompts of 64 tokens need 4, and the first request has 2."""


@pytest.mark.parametrize("setup", [{}, BLOCKS], ids=["slots", "blocks"])
def test_a_nearer_deadline_takes_the_slot_and_gives_it_back(setup: dict[str, int]) -> None:
    done, running = run([900, 200, 100], **setup)
    assert in_turn(running) == ["0", "1", "2", "1", "0"] and max(len(ids) for ids in running) == 1
    assert done.result["finished"] == 3 and done.result["preemptions"] == 2
    assert done.result["recomputed_tokens"] == 0 and done.result["swapped_blocks"] > 0, "its KV was kept"
    waits, running = run([200, 900, 800], **setup)
    assert waits.result["finished"] == 3 and waits.result["preemptions"] == 0, "a farther one waits"
    assert setup or in_turn(running) == ["0", "2", "1"]


def test_late_sequences_are_equal_and_preempt_none() -> None:
    """Without deadlines each is to end within its TTFT limit; limits of 1 ns are past at once."""
    workload = Workload(
        np.array([0, 10, 12], np.int64) * MS_NS, *(np.array(column, np.int64) for column in ([16] * 3, [60, 5, 5])),
        ttft_slo_ns=np.ones(3, np.int64),
    )  # fmt: skip
    done = simulate("deadline", workload, Setup(blocks=100, lookahead=0, max_seqs=1), Linear(1e6))
    assert done.result["preemptions"] == 0 and done.result["finished"] == 3


def test_a_request_ends_at_its_deadline() -> None:
    done, _ = run([30, 900, 900], policy="orca")
    assert done.result["finished"] == 2 and done.result["errors"] == {"the deadline passed": 1}
    assert done.seen.e2e_ns[0] == -1


@pytest.mark.parametrize(("seed", "lookahead"), [(0, 0), (1, 1)])
def test_random_runs_end_and_lose_nothing(seed: int, lookahead: int) -> None:
    rng = np.random.default_rng(seed)
    count = 120
    arrived = np.sort(rng.integers(0, 300, count)) * MS_NS
    prompt, output = rng.integers(1, 90, count), rng.integers(1, 40, count)
    workload = Workload(arrived, prompt, output, output + 20, deadline_ns=rng.integers(50, 5_000, count) * MS_NS)

    def observe(now_ns: int, core: Scheduler, plan: StepPlan) -> None:
        core.check()

    setup = Setup(blocks=40, host_blocks=30, lookahead=lookahead, max_seqs=8)
    done = simulate("deadline", workload, setup, Linear(1e6, 1e4), observer=observe)
    passed = done.result["errors"].get("the deadline passed", 0)
    assert done.result["finished"] + passed == count and done.result["preemptions"] > 0
