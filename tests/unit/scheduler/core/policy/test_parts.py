"""Each part of a policy against brute force or figures computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.policy.base import Mode
from services.scheduler.core.policy.batching import Chunked, Static, WholePrefill
from services.scheduler.core.policy.budget import EmaBudget, Fixed, ModelBudget, Unlimited
from services.scheduler.core.policy.iteration_level import ClassThenTtft
from services.scheduler.core.policy.order import (
    ClassThenArrival,
    ClassThenSlack,
    FirstCome,
    LeastSlack,
    ResponseRatio,
    ShortestPrompt,
)
from services.scheduler.core.policy.preemption import (
    LastStarted,
    LeastLost,
    LeastOutput,
    Newest,
    cheaper,
    groups,
    recompute,
    swap,
)
from services.scheduler.core.policy.presets import parse
from services.scheduler.core.types import PREFILL, NewRequest
from tests.unit.scheduler.core.policy.rows import Rows, column, waiting

MS, S = 1_000_000, 1_000_000_000


# -- tokens


def test_budgets_are_bounded_by_what_the_worker_takes() -> None:
    replica = Rows(step_max=300)
    for part, most in (
        (Unlimited(), 300),
        (Fixed(200), 200),
        (Fixed(2048), 300),
        (EmaBudget(), 300),
        (ModelBudget(), 300),
    ):
        assert part.max_tokens(replica, 0) == most
        assert part.max_tokens(replica, 100) == 100 and part.max_tokens(replica, 1000) == 300
        assert part.budget(replica, replica.slots, 0, 0) == most
        assert part.budget(replica, replica.slots, 0, 100) == 100


def decoding(count: int, known: int = 100, **columns: int) -> Rows:
    replica = Rows(slots=64, blocks=4000)
    for _ in range(count):
        replica.add(known_tokens=known, limit=4000, **columns)
    return replica


def test_the_ema_budget_is_that_of_the_facts_sheet() -> None:
    """10 decodes. Before any measurement 256 tokens of prompts; at 0.25 ms a token 100 ms take 400: 390 -> 384."""
    replica = decoding(10)
    part = EmaBudget()
    assert part.budget(replica, replica.slots, 0, 0) == 10 + 256
    replica.token_time.observe(100, 25 * MS)
    assert part.budget(replica, replica.slots, 0, 0) == 10 + 384
    replica.limit_tbt(3, 50 * MS)
    assert part.budget(replica, replica.slots, 0, 0) == 10 + 128
    replica.limit_tbt(3, 5 * MS)
    assert [part.budget(replica, replica.slots, 0, 0) for _ in range(18)] == [10] * 16 + [74, 10]


def known_model(replica: Rows, c0: float, c1: float, c2: float, c3: float) -> None:
    replica.model.observations = 100
    replica.model.c0, replica.model.c1, replica.model.c2, replica.model.c3 = c0, c1, c2, c3


@settings(max_examples=100, deadline=None)
@given(
    c0=st.floats(1e6, 2e7), c1=st.floats(1e4, 1e5), c2=st.floats(0, 200), c3=st.floats(0, 10),
    known=st.integers(2, 3000), depth=st.sampled_from([0, 500, 3000]),
    limits=st.lists(st.sampled_from([0, 40 * MS, 80 * MS, 300 * MS]), min_size=1, max_size=20),
)  # fmt: skip
def test_a_declared_limit_bounds_the_model_budget(
    c0: float, c1: float, c2: float, c3: float, known: int, limits: list[int], depth: int
) -> None:
    replica = decoding(len(limits), known)
    for slot, limit_ns in enumerate(limits):
        replica.limit_tbt(slot, limit_ns)
    slots = replica.slots
    if depth:
        replica.add(known_tokens=3990, planned_tokens=depth, limit=4000)
    known_model(replica, c0, c1, c2, c3)
    replica.model.prompts_observed, replica.model.largest_seen = 16, 8192
    count, context = len(limits), len(limits) * (known - 1)

    def keeps(prompts: int, limit: float) -> bool:
        pairs = prompts * (depth + (prompts + 1) / 2)
        return bool(c0 + c1 * (count + prompts) + c2 * context + c3 * pairs <= limit * 0.95)

    def most(limit: float) -> int:
        return max((n for n in range(1, 8192 - count + 1) if keeps(n, limit)), default=0)

    def budget(**at: int) -> int:
        return ModelBudget(tbt_ns).budget(replica, slots, 0, 0, **at)

    tbt_ns = 0
    crowd = 1_000_000  # so many wait that only limits bound the step
    declared = min((limit for limit in limits if limit), default=0)
    assert budget(waiting=crowd) == (count + min(most(declared), 8192 - count) if declared else 8192)
    tbt_ns = 100 * MS
    operator = max(most(tbt_ns), 64)
    assert budget(waiting=crowd) == count + (min(most(declared), operator) if declared else operator)


def test_prompts_get_share_of_step_that_they_have_of_requests() -> None:
    """10 ms a step and 10 us a token; the share s becomes (s + 0.25) / 1.25, and n is 1000 * share / (1 - share)."""
    replica = decoding(10)
    known_model(replica, 9.9 * MS, 0.01 * MS, 0, 0)
    part = ModelBudget()
    assert part.budget(replica, replica.slots, 0, 0, waiting=10) == pytest.approx(10 + 1500, abs=1)
    assert part.budget(replica, replica.slots, 0, 0, waiting=5) == pytest.approx(10 + 875, abs=1)
    assert part.budget(replica, replica.slots, 0, 0, waiting=0) == pytest.approx(10 + 250, abs=1)
    replica.add(known_tokens=300, limit=4000, planned_tokens=100)
    assert part.budget(replica, replica.slots[:10], 0, 0, waiting=4) == pytest.approx(10 + 875, abs=1), (
        "one is computed"
    )
    replica.model.knees = [(256, 0.03 * MS)]
    assert part.budget(replica, replica.slots[:10], 0, 0, waiting=4) == 256, "up to the knee tokens are cheap"
    known_model(replica, 1 * MS, 1 * MS, 0, 0)
    assert part.budget(replica, replica.slots[:10], 0, 0, waiting=0) == 10 + 64, "prompts are not kept out"


@pytest.mark.parametrize(
    ("base_ms", "token_ms", "others", "low", "fit"),
    [
        (10, 0.5, 4, 40, 24),
        (10, 0.5, 4, 20, 20),
        (1, 1, 1, 40, 2),
        (1, 1, 12, 40, 13),
        (0, 1, 1, 40, 1),
        (5, 0, 1, 9, 9),
    ],
)
def test_low_decodes_take_as_long_as_the_others_do_alone(
    base_ms: float, token_ms: float, others: int, low: int, fit: int
) -> None:
    replica = decoding(others)
    for _ in range(low):
        replica.add(known_tokens=100, limit=4000, priority=3)
    part, rows = ModelBudget(), replica.slots
    assert part.low_decodes(replica, rows[:others], rows[others:]) == low, "before the model has seen 16 steps"
    known_model(replica, base_ms * MS, token_ms * MS, 0, 0)
    assert part.low_decodes(replica, rows[:others], rows[others:]) == fit
    assert part.low_decodes(replica, rows[:0], rows[others:]) == low, "alone"
    assert Unlimited().low_decodes(replica, rows[:others], rows[others:]) == low


def test_low_prompts_and_decodes_do_not_size_a_step_beside_better_classes() -> None:
    """10 ms a step and 10 us a token: without a prompt that counts the share is 0.2, which 250 tokens have."""
    replica = decoding(10)
    for _ in range(30):
        replica.add(known_tokens=3000, limit=4000, planned_tokens=100, priority=3)
    known_model(replica, 9.9 * MS, 0.01 * MS, 0, 0)
    decodes = replica.slots[:10]
    assert ModelBudget().budget(replica, decodes, 0, 0) == pytest.approx(10 + 250, abs=1)
    known_model(replica, 1 * MS, 1 * MS, 0, 0)
    assert ModelBudget().budget(replica, decodes, 0, 0) == 10 + 11, "as long again"
    assert ModelBudget().budget(replica, replica.slots[:40], 0, 0) == 40, "30 low decodes take longer"
    known_model(replica, 9.9 * MS, 0.01 * MS, 0, 0)
    replica.add(known_tokens=3000, limit=4000, planned_tokens=100)
    assert ModelBudget().budget(replica, decodes, 0, 0) == pytest.approx(10 + 375, abs=1), "one of eleven counts"


@pytest.mark.parametrize(("rest", "tokens"), [(2000, 2000), (300, 978)])
def test_prompt_of_better_class_alone_has_its_tokens_beside_low_ones(rest: int, tokens: int) -> None:
    """All of its prompt in one step; low prompts fill it to twice the time of a step without tokens."""
    replica = decoding(10, priority=3)
    replica.add(known_tokens=3000, limit=4000, planned_tokens=100, priority=3)
    replica.add(known_tokens=100 + rest, limit=4000, planned_tokens=100)
    known_model(replica, 9.9 * MS, 0.01 * MS, 0, 0)
    assert ModelBudget().budget(replica, replica.slots[:10], 0, 0) == pytest.approx(10 + tokens, abs=3)


def test_low_steps_take_twice_as_long_as_their_decodes_where_better_classes_come() -> None:
    replica, part = decoding(10, priority=3), ModelBudget()
    for _ in range(30):
        replica.add(known_tokens=3000, limit=4000, planned_tokens=100, priority=3)
    known_model(replica, 9.9 * MS, 0.01 * MS, 0, 0)
    decodes = replica.slots[:10]
    assert part.budget(replica, decodes, 0, 0) > 10 + 1000
    beside = decoding(10)
    known_model(beside, 9.9 * MS, 0.01 * MS, 0, 0)
    part.on_step(beside, 10, 10, 0)
    assert part.budget(replica, decodes, 0, 0) == pytest.approx(10 + 1000, abs=1)
    for _ in range(256):
        part.on_step(replica, 10, 10, 0)
    assert part.budget(replica, decodes, 0, 0) > 10 + 1000


@pytest.mark.parametrize(("priority", "ttft", "passes"), [(2, 0, True), (2, 1, True), (3, 0, False)])
def test_better_class_passes_a_low_prompt_that_age_has_not_lifted(priority: int, ttft: int, passes: bool) -> None:
    replica, now = Rows(), 30 * S
    for row_class, age_s in ((3, 9), (3, 11), (2, 9), (0, 0)):
        replica.add(known_tokens=100, limit=4000, planned_tokens=10, priority=row_class, arrival_ns=now - age_s * S)
    head = waiting(9, now, priority=priority, ttft=ttft)
    passed = ClassThenSlack().find_overtaken(replica.table, replica.slots, head, now)
    assert passed.tolist() == [passes, False, False, False]


def past_a_knee(waits: int, beside: int = 0) -> ModelBudget:
    """A budget that has planned 1000 steps of 10 decodes, in `beside` of which one prompt waited.

    10 ms a step and 0.03 ms a token past 256: 10 decodes and 246 prompt tokens are free.
    """
    replica, part = beside_ten_decodes(), ModelBudget()
    for step in range(1000):
        if step < beside:
            part.budget(replica, replica.slots, 0, 0, waiting=waits)
        part.on_step(replica, 10, 10, 0)
    return part


def beside_ten_decodes(timed: int = 2048) -> Rows:
    """Ten decodes, and a model that has timed steps of at most `timed` tokens."""
    replica = decoding(10)
    known_model(replica, 10 * MS, 0, 0, 0)
    replica.model.knees, replica.model.largest_seen = [(256, 0.03 * MS)], timed
    return replica


@pytest.mark.parametrize(
    ("rest", "planned"),
    [(100, 256), (240, 256), (300, 10 + 300), (600, 10 + 600), (1200, 10 + 1200)],
)
def test_what_is_left_of_rare_prompts_takes_fewer_steps(rest: int, planned: int) -> None:
    """A step less brings the prompt to its first token 10 ms sooner, and that weighs much where prompts are rare."""
    replica = beside_ten_decodes()
    assert past_a_knee(0).budget(replica, replica.slots, 0, 0, waiting=1, waiting_tokens=rest) == planned


def test_prompts_are_cut_at_the_knee_where_they_are_in_every_step() -> None:
    replica = beside_ten_decodes()
    part = past_a_knee(1, beside=1000)
    assert part.budget(replica, replica.slots, 0, 0, waiting=1, waiting_tokens=1200) == 256


def test_a_model_that_holds_steps_for_free_still_gives_a_budget() -> None:
    """A fit of nothing but prefill attention: it says that decodes and short prompts take no time."""
    replica, part = beside_ten_decodes(), ModelBudget()
    known_model(replica, 0, 0, 0, 1.0)
    replica.model.knees = []
    assert 10 < part.budget(replica, replica.slots, 0, 0, depth=1000, waiting=1, waiting_tokens=1200) <= 10 + 1200


def test_larger_step_than_all_timed_ones_at_most_doubles_them() -> None:
    replica = beside_ten_decodes(timed=256)
    assert past_a_knee(0).budget(replica, replica.slots, 0, 0, waiting=1, waiting_tokens=1200) == 10 + 300


def test_the_error_of_the_model_is_kept_as_a_margin() -> None:
    replica = decoding(1, tbt_slo_ns=100 * MS)
    known_model(replica, 0, MS, 0, 0)
    replica.model.error = 0.9
    assert ModelBudget().budget(replica, replica.slots, 0, 0, waiting=1_000_000) == 50


def test_budget_by_time_takes_its_target_in_milliseconds_by_name() -> None:
    replica = decoding(1)
    known_model(replica, 0, MS, 0, 0)  # a token a millisecond

    def most(text: str) -> int:
        return parse(text).tokens.budget(replica, replica.slots, 0, 0, waiting=1_000_000)

    assert [most(f"orcinus{part}") for part in ("", ":tokens=model-100", ":tokens=model-200")] == [8192, 95, 190]


def test_before_sixteen_measured_steps_the_model_budget_is_512() -> None:
    replica = decoding(4)
    for _ in range(15):
        replica.model.observe(10, 10, 0, 10 * MS)
    assert ModelBudget().budget(replica, replica.slots, 0, 0) == 512
    replica.model.observe(10, 10, 0, 10 * MS)
    assert ModelBudget().budget(replica, replica.slots, 0, 0) != 512


def test_under_a_limit_a_step_is_at_most_a_quarter_larger_than_those_timed() -> None:
    replica = decoding(4, tbt_slo_ns=100 * MS)
    known_model(replica, MS, 0.001 * MS, 0, 0)

    def budget() -> int:
        return ModelBudget().budget(replica, replica.slots, 0, 0, waiting=1_000_000)

    replica.model.prompts_observed, replica.model.largest_seen = 15, 4000
    assert budget() == 512, "before 16 steps with prompts were timed"
    replica.model.prompts_observed = 16
    assert budget() == 5000
    replica.model.largest_seen = 100
    assert budget() == 512
    replica.limit_tbt(0, 0)
    for slot in range(1, 4):
        replica.limit_tbt(slot, 0)
    assert budget() == 8192, "without a limit"


def test_impossible_limit_does_not_keep_prompts_out_forever() -> None:
    replica = decoding(4, tbt_slo_ns=5 * MS)
    known_model(replica, 20e6, 1e4, 0, 0)
    part = ModelBudget()
    assert [part.budget(replica, replica.slots, 0, 0) for _ in range(34)] == ([4] * 16 + [68]) * 2


# -- batch


def test_whole_prompts_wait_and_only_the_first_is_cut() -> None:
    chunks = WholePrefill().chunks
    none = column(0, 0, 0)
    assert chunks(column(5, 3, 9), none, 16, True, False).tolist() == [5, 3]
    assert chunks(column(5, 3, 8), none, 16, False, False).tolist() == [5, 3, 8]
    assert chunks(column(50, 3, 8), none, 16, True, False).tolist() == [16]
    assert chunks(column(50, 3, 8), none, 16, False, False).tolist() == []
    assert chunks(column(5), none[:1], 0, True, False).tolist() == []
    assert WholePrefill(128).max_running(256) == 128 and WholePrefill().max_running(256) == 256
    assert WholePrefill().max_step_seqs(3, 6, 3) == 2


@settings(max_examples=100, deadline=None)
@given(
    rest=st.lists(st.integers(1, 900), min_size=1, max_size=10), left=st.integers(0, 2000),
    multiple=st.sampled_from([1, 64]), most=st.sampled_from([0, 256]), least=st.sampled_from([0, 64]),
    depth=st.sampled_from([0, 512]), before=st.integers(0, 4000),
)  # fmt: skip
def test_chunks_are_those_of_a_loop_over_the_prompts(
    rest: list[int], left: int, multiple: int, most: int, least: int, depth: int, before: int
) -> None:
    part = Chunked(multiple, most, least, depth)
    said = part.chunks(column(*rest), np.full(len(rest), before, np.int64), left, True, False).tolist()
    expected, rem = [], left
    for tokens in rest if left >= least else []:
        cap = most or left
        if depth:
            cap = cap * depth // (depth + before)
        if most or depth:
            tokens = min(tokens, max(cap, multiple))
        if tokens >= multiple:
            tokens = tokens // multiple * multiple
        if tokens > rem:
            tokens = rem // multiple * multiple
            if tokens:
                expected.append(tokens)
            break
        expected.append(tokens)
        rem -= tokens
    assert said == expected
    assert sum(said) <= left and all(0 < a <= b for a, b in zip(said, rest, strict=False))


def test_alone_in_small_step_a_prompt_gets_what_there_is() -> None:
    for part in (Chunked(64), Chunked(least=64)):
        assert part.chunks(column(500, 3), column(0, 0), 40, True, True).tolist() == [40]
        assert part.chunks(column(500, 3), column(0, 0), 40, False, False).tolist() == []


def test_static_batch_is_no_larger_than_what_may_run() -> None:
    replica, part = Rows(), Static(max_bs=32)
    assert part.max_new_seqs(replica, 20, 4, 0, 0) == 4
    part.on_enter(replica, 4)
    replica.table.count = 3  # one has ended
    assert part.max_new_seqs(replica, 16, 4, 0, 0) == 0


# -- relief


def test_victims_by_hand() -> None:
    """arrived  generation  class  planned  prompt  applied
    0          3      9      1       90      80       91     high
    1          5      8      3       50      40       51     low
    2          4     12      3       30      20       31     low, least work
    3          9     11      2       20      10       12     newest, least output
    """
    replica = Rows(blocks=1000)
    for arrived, generation, priority, planned, prompt, applied in (
        (3, 9, 1, 90, 80, 91), (5, 8, 3, 50, 40, 51), (4, 12, 3, 30, 20, 31), (9, 11, 2, 20, 10, 12),
    ):  # fmt: skip
        replica.add(
            known_tokens=applied, limit=500, arrival_ns=arrived, generation=generation, priority=priority,
            planned_tokens=planned, prompt=prompt, applied_tokens=applied,
        )  # fmt: skip
    table, all_of = replica.table, replica.slots
    assert Newest().choose(table, all_of) == 3
    assert LastStarted().choose(table, all_of) == 2
    assert LeastLost().choose(table, all_of) == 2
    assert LeastLost().choose(table, np.array([0, 1, 3], np.int32)) == 1
    assert LeastOutput().choose(table, all_of) == 3
    assert LeastOutput().choose(table, np.array([1, 0, 2], np.int32)) == 0, "11 outputs each: the longest input"


def test_ways_out() -> None:
    replica = Rows(blocks=1000)
    slot = replica.add(known_tokens=401, limit=900)  # 400 planned, 101 blocks held
    assert recompute(replica, slot) is Mode.RECOMPUTE and swap(replica, slot) is Mode.SWAP
    assert cheaper(replica, slot) is Mode.RECOMPUTE, "nothing was measured"
    known_model(replica, 5e6, 500.0, 0.0, 1.0)  # again: 400 * 500 + 400 * 401 / 2 = 280,200 ns
    replica.swap_ns_per_block = 1387.0  # both ways: 280,174 ns
    assert cheaper(replica, slot) is Mode.SWAP
    replica.swap_ns_per_block = 1388.0
    assert cheaper(replica, slot) is Mode.RECOMPUTE
    replica.table.request[slot] = NewRequest("a", [np.zeros(3, np.int32)], 5)
    assert groups(replica, slot) is Mode.RECOMPUTE
    replica.table.request[slot] = NewRequest("a", [np.zeros(3, np.int32)], 5, n=2)
    assert groups(replica, slot) is Mode.SWAP


# -- order of the running


def test_the_running_are_sorted_as_a_sort_by_key_would() -> None:
    rng = np.random.default_rng(3)
    replica, now = Rows(blocks=10**6), 100 * S
    table = replica.table
    for number in range(32):
        prompt = int(rng.integers(1, 3000))
        output = int(rng.integers(0, 3))
        replica.add(
            known_tokens=prompt + output, prompt=prompt, limit=3999, number=number, priority=int(rng.integers(0, 4)),
            arrival_ns=int(rng.integers(70, 100)) * S, ttft_slo_ns=int(rng.choice([0, S, 20 * S])),
            tbt_slo_ns=int(rng.choice([0, 50 * MS])), last_token_ns=now - int(rng.integers(0, 200)) * MS,
            planned_tokens=prompt + output - 1 if output else int(rng.integers(0, prompt)),
        )  # fmt: skip
    slots = rng.permutation(32).astype(np.int32)

    def lifted(s: int) -> int:
        return max(int(table.priority[s]) - int(now - table.arrival_ns[s]) // (10 * S), 0)

    def due(s: int, token_ns: int) -> int:
        if table.applied_tokens[s] > table.prompt[s]:
            return int(table.last_token_ns[s]) + int(table.tbt_slo_ns[s] or 100 * MS)
        rest = int(table.known_tokens[s] - table.planned_tokens[s])
        return int(table.arrival_ns[s]) + int(table.ttft_slo_ns[s] or 2 * S) - rest * token_ns

    def slack(s: int) -> tuple[int, ...]:
        late = table.applied_tokens[s] == table.prompt[s] and due(s, 50_000) < now
        return lifted(s), int(late), int(table.arrival_ns[s]) if late else due(s, 50_000), s

    def ratio(s: int) -> float:
        return -float(now - table.arrival_ns[s]) / float(table.known_tokens[s])

    keys = (
        (FirstCome(), lambda s: (table.arrival_ns[s], s)),
        (ClassThenArrival(), lambda s: (lifted(s), table.arrival_ns[s], s)),
        (ClassThenTtft(), lambda s: (table.priority[s], table.arrival_ns[s] + int(table.ttft_slo_ns[s] or 2 * S), s)),
        (ClassThenSlack(), slack),
        (LeastSlack(), lambda s: (max(due(s, 50_000) - now, 1), table.arrival_ns[s], s)),
        (ShortestPrompt(), lambda s: (table.known_tokens[s] - table.planned_tokens[s], table.arrival_ns[s], s)),
        (ResponseRatio(), lambda s: (ratio(s), table.arrival_ns[s], s)),
    )
    for order, key in keys:
        assert order.sort(table, slots, now).tolist() == sorted(slots.tolist(), key=key), order


def test_step_of_handed_over_prompts_takes_half_the_limit() -> None:
    """2 ms and 10 us a token: of 100 ms the half less 5 % leaves 45.5 ms, of 20 ms 7.5."""
    replica = Rows(slots=64, blocks=4000)
    for tokens in range(10, 330, 10):
        replica.model.observe(tokens, 0, 0.0, 2 * MS + tokens * MS // 100)
        replica.token_time.observe(5000, 50 * MS)
    none = replica.slots[:0]
    assert ModelBudget().budget(replica, none, 0, 0) == 8192, "it decodes here: nothing waits"
    replica.limits.role = PREFILL
    assert ModelBudget().budget(replica, none, 0, 0) == pytest.approx(4550, rel=0.02)
    replica.token_time.observe(100, 1 * MS)
    replica.add(known_tokens=100, limit=4000, planned_tokens=10, tbt_slo_ns=20 * MS)
    assert ModelBudget().budget(replica, none, 0, 0) == pytest.approx(750, rel=0.06)
    replica.limit_tbt(0, 2 * MS)
    assert ModelBudget().budget(replica, none, 0, 0) == 64, "prompts are not kept out"
    alike = Rows(slots=64, blocks=4000)
    alike.limits.role = PREFILL
    for _ in range(20):
        alike.model.observe(512, 0, 0.0, 20 * MS)
        alike.token_time.observe(512, 20 * MS)
    assert ModelBudget().budget(alike, none, 0, 0) == 1216, "47.5 ms at the mean of a token, in 64s"
