"""The parts that only the simulator knows, against the rules of their sources."""

from __future__ import annotations

import random

import numpy as np
import pytest

from services.scheduler.core.policy.base import Pace
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import StepPlan
from services.simulator.device.clock import Linear
from services.simulator.engine import Run, Setup, named, simulate
from services.simulator.literature.static import padding
from services.simulator.policies.parts import ByCapacity, ExactAimd, Grouped, Margin, TokenBudget
from services.simulator.workload.workload import Workload, all_at_once
from tests.unit.scheduler.core.policy.rows import Rows, entrants

PACE = Pace(0, 10_000)
MS_NS = 1_000_000


def observed(policy: str, prompts: list[int], outputs: list[int], **setup: int) -> tuple[Run, list[tuple[int, ...]]]:
    """Run requests that arrive at once; also return the lengths of the prompts that enter at each step, if any do."""
    entered: list[tuple[int, ...]] = []

    def observe(now_ns: int, core: Scheduler, plan: StepPlan) -> None:
        if plan.enters:
            entered.append(tuple(enter.tokens.size for enter in plan.enters))

    made = Setup(**{"blocks": 10_000, "lookahead": 0, "host_us": 0.0, **setup})
    return simulate(policy, all_at_once(prompts, outputs), made, Linear(1e6), observer=observe), entered


# -- AIMD


def refused(blocks: int, limit: int) -> tuple[Rows, ExactAimd]:
    """21 blocks of 4 are in use, and a sequence of `limit` tokens in the end was held back, or let in, once."""
    replica, memory = Rows(blocks=blocks), ExactAimd()
    replica.add(known_tokens=84, limit=400)
    assert bool(memory.admit(replica, entrants((4, limit)), PACE).size) is (blocks > 100)
    return replica, memory


@pytest.mark.parametrize(
    ("blocks", "limit", "reserved", "preempted", "limits"),
    [
        (100, 399, 0, [0] * 12, [500, 600, 700, *[800] * 9]),  # also at steps at which no candidate is judged again
        (100, 399, 68, [0], [500]),
        (100, 399, 69, [0], [400]),  # 90 percent are used
        (2_000, 99, 0, [1, 0, 3, 1], [7_000, 7_000, 6_000, 5_000]),  # once a step, whatever is swapped
        (100, 399, 0, [2], [400 + 100 - 1_000]),  # both at one step
    ],
)
def test_aimd_adds_100_while_the_need_exceeds_the_limit_and_subtracts_1000(
    blocks: int, limit: int, reserved: int, preempted: list[int], limits: list[int]
) -> None:
    """21 of 100 blocks of 4 are in use; with (4, 399) the peak is 180 blocks: 720 tokens."""
    replica, memory = refused(blocks, limit)
    replica.reserved = reserved
    found = []
    for count in preempted:
        memory.on_step(replica, count)
        found.append(memory.limit)
    assert found == limits
    assert bool(memory.admit(replica, entrants((4, 399)), PACE).size) is (memory.limit >= 720)


# -- the token budget


@pytest.mark.parametrize("seed", range(5))
def test_token_budget_equals_the_formulas_from_a_mean_of_zero(seed: int) -> None:
    rng = random.Random(seed)
    replica, part, mean = Rows(), TokenBudget(80 * MS_NS), 0.0
    for _ in range(30):
        replica.add(known_tokens=10, limit=50)
    for _ in range(60):
        decodes = replica.slots[: rng.randint(1, 30)]
        assert part.max_tokens(replica, 2_048) == 2_048
        prompts = max((min(int(80 * MS_NS / mean), 2_048) - decodes.size) // 64 * 64, 0) if mean else 256
        assert part.budget(replica, decodes, 0, 2_048) == min(decodes.size + prompts, 2_048)
        tokens, step_ns = rng.randint(1, 600), rng.randint(1, 90) * MS_NS
        replica.model.observe(tokens, 0, 0.0, step_ns)
        replica.token_time.observe(tokens, step_ns)
        mean = 0.1 * (step_ns / tokens) + 0.9 * mean


def test_token_budget_leaves_prompts_64_tokens_when_nothing_decodes() -> None:
    replica, part = Rows(), TokenBudget(MS_NS)
    replica.model.observe(1, 0, 0.0, 90 * MS_NS)
    replica.token_time.observe(1, 90 * MS_NS)
    part.max_tokens(replica, 2_048)
    assert part.budget(replica, replica.slots, 0, 2_048) == 64


# -- request-level scheduling by free capacity


def test_by_capacity_lets_one_enter_for_each_that_ends() -> None:
    """A prompt of 160 tokens fills the pool. At its end there is room for all of 10 short ones; one takes its place."""
    prompts, outputs, pool = [160, *[16] * 10], [2, *[20] * 10], {"blocks": 11}
    assert [len(step) for step in observed("orca", prompts, outputs, **pool)[1]][:2] == [1, 3]
    run, entered = observed("request-capacity", prompts, outputs, **pool)
    assert [len(step) for step in entered] == [1] * 11
    assert run.result["finished"] == 11


def test_by_capacity_lets_all_enter_while_there_is_room() -> None:
    entered = observed("request-capacity", [16] * 6, [5] * 6, max_seqs=4)[1]
    assert [len(step) for step in entered] == [4, 2]


# -- preemption before memory runs out


@pytest.mark.parametrize("seed", range(10))
def test_margin_preempts_the_newest_until_enough_is_free(seed: int) -> None:
    """As the loop of the source, except that the last running sequence stays."""
    rng = random.Random(seed)
    replica, rows = Rows(blocks=200), []
    for row in range(rng.randint(1, 12)):
        arrived, known = rng.randint(0, 4), rng.randint(1, 60)
        replica.add(known_tokens=known, limit=known + 50, arrival_ns=arrived)
        rows.append((arrived, row, -(-known // 4)))
    replica.draining = rng.choice((0, 3))
    margin = rng.choice((0, 30, 100, 150, 199))
    free, running, victims = replica.available + replica.draining, sorted(rows), []
    while free < (margin or 2) and len(running) > 1:
        _, victim, blocks = running.pop()
        victims.append(victim)
        free += blocks
    assert Margin(margin).early_victims(replica, replica.slots.astype(np.intp), None, 0) == victims


def test_margin_of_1_percent_is_rounded_up() -> None:
    replica = Rows(blocks=101)
    for known in (200, 200):  # 50 blocks each
        replica.add(known_tokens=known, limit=300)
    rows = replica.slots.astype(np.intp)
    assert Margin().early_victims(replica, rows, None, 0) == [1], "1 block is free, 2 are kept"
    assert Margin(1).early_victims(replica, rows, None, 0) == []


def least_free(policy: str) -> tuple[Run, int]:
    """40 requests that outgrow 60 blocks; also the fewest blocks free before a step in which none enters.

    Steps with a pinned sequence do not count: it is never preempted.
    """
    free: list[int] = []

    def observe(now_ns: int, core: Scheduler, plan: StepPlan) -> None:
        core.check()
        replica = core.replicas[0]
        if replica.table.count > 1 and not plan.enters and not replica.table.is_pinned.any():
            free.append(replica.available + plan.append_blocks.size)

    rng = random.Random(5)
    workload = all_at_once([rng.randint(10, 60) for _ in range(40)], [rng.randint(30, 90) for _ in range(40)])
    setup = Setup(blocks=60, lookahead=0, host_us=0.0, max_seqs=16)
    return simulate(policy, workload, setup, Linear(1e6), observer=observe), min(free)


def test_margin_keeps_blocks_free_where_others_run_out() -> None:
    run, free = least_free("sarathi:memory=fits,relief=margin-12")
    assert run.result["finished"] == 40 and run.result["preemptions"] and free >= 12
    run, free = least_free("sarathi:memory=fits")
    assert run.result["finished"] == 40 and run.result["preemptions"] and free < 12


def test_requests_end_under_a_margin_of_more_than_the_pool() -> None:
    run = observed("sarathi:relief=margin-500", [16] * 3, [20] * 3, blocks=20)[0]
    assert run.result["finished"] == 3


# -- a sequence without a block returns to those that wait


def computed(policy: str, requests: list[tuple[int, int]], blocks: int) -> tuple[Run, list[list[int]], list[int]]:
    """Run (prompt, output) tokens that arrive at once, blocks of 4; also the requests that compute, and the preemptions
    so far, at each step."""
    ran: list[list[int]] = []
    preempted: list[int] = []

    def observe(now_ns: int, core: Scheduler, plan: StepPlan) -> None:
        core.check()
        ran.append(sorted(int(core.replicas[0].table.request[slot].id) for slot in plan.chunk_slots))
        preempted.append(int(core.stats()["preemptions"]))

    setup = Setup(blocks=blocks, block_size=4, host_blocks=100, lookahead=0, host_us=0.0)
    workload = all_at_once([prompt for prompt, _ in requests], [output for _, output in requests])
    return simulate(policy, workload, setup, Linear(1e6), observer=observe), ran, preempted


RETURNS, STALLS = "orca:memory=fits,relief=returns", "orca:memory=fits,relief=newest-swap+stalls"


def test_none_is_swapped_while_a_prompt_goes_on() -> None:
    """Of 4 blocks the second prompt has reserved 3; 6 tokens a step."""
    policy = "sarathi:memory=fits,tokens=fixed-6,relief=returns"
    run, ran, _ = computed(policy, [(4, 5), (12, 1)], blocks=4)
    assert ran == [[0, 1], [1], [1], *[[0]] * 4] and run.result["preemptions"] == 0


@pytest.mark.parametrize("seed", range(8))
def test_returning_equals_brute_force_until_one_is_swapped(seed: int) -> None:
    rng = random.Random(seed)
    requests = [(rng.randint(1, 9), rng.randint(2, 30)) for _ in range(6)]
    held = [-(-prompt // 4) for prompt, _ in requests]
    tokens, left = [prompt for prompt, _ in requests], [output - 1 for _, output in requests]
    blocks = max(sum(held) + rng.randint(0, 6), 12)
    free, expected = blocks - sum(held), [list(range(6))]
    while any(left):
        free += sum(held[i] for i in range(6) if not left[i])
        held = [blocks if left[i] else 0 for i, blocks in enumerate(held)]
        ids = []
        for i in range(6):
            if left[i] and (tokens[i] < 4 * held[i] or free):
                free, held[i] = (free, held[i]) if tokens[i] < 4 * held[i] else (free - 1, held[i] + 1)
                ids.append(i)
        if not ids:
            break
        for i in ids:
            tokens[i], left[i] = tokens[i] + 1, left[i] - 1
        expected.append(ids)
    run, ran, preempted = computed(RETURNS, requests, blocks)
    assert ran[: len(expected)] == expected and preempted[len(expected) - 1] == 0
    assert run.result["preemptions"] == 0 if not any(left) else preempted[len(expected)] == 1
    assert run.result["finished"] == 6


@pytest.mark.parametrize(("policy", "passes"), [(RETURNS, False), (STALLS, True)])
def test_a_later_sequence_does_not_pass_one_without_a_block(policy: str, passes: bool) -> None:
    """With a step in flight no sequence takes the last block; a third one comes that needs one."""
    entered: list[tuple[str, int]] = []

    def observe(now_ns: int, core: Scheduler, plan: StepPlan) -> None:
        entered.extend((enter.request.id, core.replicas[0].table.count) for enter in plan.enters)

    columns = ([0, 0, MS_NS // 2], [4, 4, 4], [5, 5, 5])
    workload = Workload(*(np.array(column, np.int64) for column in columns))
    setup = Setup(blocks=3, block_size=4, host_blocks=100, lookahead=1, host_us=0.0)
    assert simulate(policy, workload, setup, Linear(1e6), observer=observe).result["finished"] == 3
    assert (("2", 3) in entered) is passes


# -- batches of similar lengths


@pytest.mark.parametrize("together", [8, 64])
def test_grouped_batches_are_runs_of_sorted_lengths(together: int) -> None:
    rng = random.Random(together)
    lengths = [rng.randint(1, 500) for _ in range(128)]
    entered = observed(f"static:batch=static-8,order=grouped-{together}", lengths, [1] * 128)[1]
    runs = [sorted(lengths[i : i + together]) for i in range(0, 128, together)]
    in_order = [length for one in runs for length in one]
    assert [length for step in entered for length in step] == in_order


def test_grouped_batches_pad_as_the_formula_says() -> None:
    rng = random.Random(7)
    lengths = [rng.randint(1, 500) for _ in range(512)]
    shares = {}
    for policy in ("static", "selective"):
        result = observed(policy, lengths, [1] * 512, max_step_tokens=16_384)[0].result
        shares[policy] = result["padding"]
    assert shares["static"] == pytest.approx(padding(np.array(lengths), 32), abs=1e-4)
    assert shares["selective"] == pytest.approx(padding(np.array(lengths), 32, grouped=True), abs=1e-4)
    assert shares["selective"] < shares["static"] / 2


# -- names


def test_a_policy_mixes_parts_of_service_and_simulator() -> None:
    mixed = named("sarathi:order=grouped-16,batch=capacity,relief=newest-swap")
    assert (type(mixed.order), type(mixed.batch), mixed.name) == (
        Grouped,
        ByCapacity,
        "sarathi:order=grouped-16,batch=capacity,relief=newest-swap",
    )
    changed = named("ft-aimd-exact:order=shortest,tokens=token-budget-50")
    assert isinstance(changed.memory, ExactAimd) and isinstance(changed.tokens, TokenBudget)
    assert type(changed.order).__name__ == "ShortestPrompt" and changed.relief.stalls


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fifo", "no policy 'fifo'"),
        ("fifo", "only simulated: ft-aimd-exact"),
        ("fifo:order=grouped", "no policy 'fifo'"),
        ("orca:order=grouped,order=fcfs", "gives order twice"),
        ("selective:order=fcfs,order=fcfs", "gives order twice"),
        ("orca:order=grouped-0", "takes a number of 1 to"),
        ("orca:memory=aimd-exact-3", "no memory 'aimd-exact-3'"),
        ("selective:rank=3", "no part 'rank=3'"),
    ],
)
def test_an_unknown_part_is_refused_with_the_words_that_exist(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        named(name)
