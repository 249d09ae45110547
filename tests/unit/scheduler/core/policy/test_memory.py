"""The memory parts of a policy against brute force or figures computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.policy.base import Pace
from services.scheduler.core.policy.memory import (
    ENOUGH,
    FEW,
    KEPT,
    Aimd,
    Expected,
    FtAimd,
    Lengths,
    Overcommit,
    Peak,
    PeakEstimate,
    Reserve,
    Watermark,
    quarter_octaves,
)
from services.scheduler.core.policy.queues import quarter_octave
from tests.unit.scheduler.core.policy.rows import Rows, column, entrants

MS, S = 1_000_000, 1_000_000_000
PACE = Pace(0, 10_000)


# -- the peak


def grown(held: list[int], steps: list[int], size: int, shared: list[int]) -> int:
    """Most blocks at any step, by running all of them: one token each at every step, until its own last one."""
    most = 0
    for t in range(max(steps, default=-1) + 1):
        alive = [i for i in range(len(held)) if steps[i] >= t]
        most = max(most, sum(-(-(held[i] + t) // size) - shared[i] for i in alive))
    return most


RUNNING = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), max_size=12)
NEWCOMERS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30), st.integers(0, 2)), min_size=1, max_size=6)


@settings(max_examples=120, deadline=None)
@given(
    running=RUNNING,
    newcomers=NEWCOMERS,
    size=st.sampled_from([1, 2, 4, 16]),
    room=st.integers(0, 150),
    later=st.integers(0, 9),
)
def test_peak_and_what_fits_are_those_of_running_it_all(
    running: list[tuple[int, int]], newcomers: list[tuple[int, int, int]], size: int, room: int, later: int
) -> None:
    """Also `later` steps after the sums were made, when all that run have as many tokens more and steps less."""
    peak = Peak()
    held, steps = column(*(h for h, _ in running)), column(*(s + later for _, s in running))
    peak.set_running(held, steps, size)
    assert peak.blocks == grown(held.tolist(), steps.tolist(), size, [0] * held.size)
    held, steps = held + later, steps - later
    peak.set_running(held, steps, size)
    shared = [min(s, -(-h // size)) for h, _, s in newcomers]
    fits = 0
    for k in range(1, len(newcomers) + 1):
        all_held = held.tolist() + [h for h, _, _ in newcomers[:k]]
        all_steps = steps.tolist() + [s for _, s, _ in newcomers[:k]]
        if grown(all_held, all_steps, size, [0] * held.size + shared[:k]) > room:
            break
        fits = k
    new_held, new_steps = column(*(h for h, _, _ in newcomers)), column(*(s for _, s, _ in newcomers))
    assert peak.count_fitting(new_held, new_steps, column(*shared), room) == fits


def test_blocks_that_all_share_count_once_at_every_end() -> None:
    """Three hold the same 5 blocks of 4 and grow by 4, 8 and 12 tokens: 3*6-10, 2*7-5, 1*8 blocks."""
    peak = Peak()
    peak.set_running(column(20, 20, 20), column(4, 8, 12), 4, spared=10)
    assert peak.blocks == max(3 * 6 - 10, 2 * 7 - 5, 8)


def test_the_peak_estimate_counts_the_reserved_blocks_of_pinned_rows() -> None:
    replica = Rows(blocks=12)
    replica.add(known_tokens=4, limit=29, reserved_blocks=7)
    replica.table.is_pinned[0] = True
    replica.reserved = 6
    assert PeakEstimate().admit(replica, entrants((4, 20)), PACE).tolist() == [1]
    assert PeakEstimate().admit(replica, entrants((4, 21)), PACE).tolist() == []


def test_the_peak_estimate_lengthens_lives_by_chunks_and_lookahead() -> None:
    """10 blocks of 4. a holds 16 tokens and has 3 steps to come. b (8 tokens, 21 in the end) alone is 6 blocks; when a
    ends they hold 5 and 3 blocks. With c's 40 tokens in chunks of 10 b still fits; c's own rest is counted too."""
    replica = Rows(blocks=8)
    replica.add(known_tokens=16, limit=20)
    assert PeakEstimate().admit(replica, entrants((8, 21)), PACE).tolist() == [2]
    assert PeakEstimate().admit(replica, entrants((8, 21)), Pace(2, 10_000)).tolist() == []


def test_an_empty_replica_takes_the_first_whatever_an_estimate_says() -> None:
    for memory in (Watermark(0.5), PeakEstimate(), FtAimd(), Aimd(), Overcommit(), Expected()):
        replica = Rows(blocks=10)
        assert memory.admit(replica, entrants((37, 40), (4, 8)), PACE).tolist() == [10], memory


# -- the other answers to "may it hold KV?"


def test_reserve_keeps_all_that_it_can_ever_need() -> None:
    assert Reserve().admit(Rows(), entrants((4, 9), (8, 8), (5, 31)), PACE).tolist() == [3, 2, 8]


def test_the_watermark_leaves_a_share_of_the_pool() -> None:
    """200 blocks of 4, of which 180 are held: 20 are free and 2 stay so."""
    replica = Rows(blocks=200)
    replica.add(known_tokens=720, limit=800)
    assert Watermark().admit(replica, entrants((40, 90), (32, 90)), PACE).tolist() == [10, 8]
    assert Watermark().admit(replica, entrants((40, 90), (36, 90)), PACE).tolist() == [10]
    assert Watermark().admit(replica, entrants((40, 90), (36, 90), shared=1), PACE).tolist() == [10, 9]
    assert Watermark(0.0).admit(replica, entrants((40, 90), (40, 90)), PACE).tolist() == [10, 10]


def refused(blocks: int = 100) -> Rows:
    """21 blocks in use. When the one that runs ends, it and (4, 399) have 399 and 319 tokens: 180 blocks."""
    replica = Rows(blocks=blocks)
    replica.add(known_tokens=84, limit=400)
    return replica


def test_limit_of_ft_aimd_moves_by_100_and_1000_tokens() -> None:
    replica, memory = refused(), FtAimd()
    for step in range(4):
        assert memory.admit(replica, entrants((4, 399)), PACE).size == 0
        memory.on_step(replica, 0)
        assert memory.limit == 400 + 100 * (step + 1)
    assert memory.admit(replica, entrants((4, 399)), PACE).tolist() == [1], "720 tokens are needed"
    memory.on_step(replica, 0)
    assert memory.limit == 800, "none is held back"
    memory.on_step(replica, 1)
    assert memory.limit == 4, "one block is left in any case"
    memory = FtAimd()
    memory.admit(replica, entrants((4, 399)), PACE)
    replica.reserved = 69  # 90 of 100 blocks
    memory.on_step(replica, 0)
    assert memory.limit == 400, "90 % of the pages are used"
    memory = FtAimd()
    memory.admit(replica := refused(2000), entrants((4, 99)), PACE)
    memory.on_step(replica, 2)
    assert memory.limit == 8000 - 2000, "1000 for each that is swapped"


def test_aimd_adds_blocks_and_multiplies() -> None:
    replica, memory = refused(), Aimd(add=3.0, factor=0.5)
    memory.admit(replica, entrants((4, 399)), PACE)
    memory.on_step(replica, 0)
    memory.on_step(replica, 0)
    assert memory.limit == 106
    memory.on_step(replica, 3)
    assert memory.limit == 53
    for _ in range(20):
        memory.on_step(replica, 0)
    assert memory.limit == 53 + 3 * 5, "eight steps after it was asked last none is known to be held back"


class SglangRatio:
    """Transcribe SGLang's new_token_ratio (schedule_batch.py) with plain lists."""

    def __init__(self) -> None:
        self.init = min(0.7 * 1.0, 1)
        self.floor = min(self.init * 0.14, 1)
        self.decay = (self.init - self.floor) / 600
        self.ratio = self.init

    def admit(self, running: list[tuple[int, int]], free: int, page: int, waiting: list[tuple[int, int]]) -> int:
        """running: (max_new, produced); waiting: (extend, max_new); tokens all."""
        reserved = sum(min(m - p, 4096) for m, p in running) * self.ratio
        admitted, count = 0, 0
        for extend, max_new in waiting:
            if extend + min(max_new, 4096) + page > free - reserved - admitted:
                break
            admitted += extend + min(max_new, 4096)
            count += 1
        return count

    def retracted(self, batch: list[tuple[int, int]]) -> None:
        self.ratio = min(1, (sum(p for _, p in batch) + 20 * len(batch)) / (sum(m for m, _ in batch) + 1))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 40), st.integers(0, 39)), min_size=1, max_size=8),
    coming=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 200)), min_size=1, max_size=6),
    events=st.lists(st.booleans(), max_size=30),
)
def test_overcommit_is_sglangs_ratio(
    rows: list[tuple[int, int, int]], coming: list[tuple[int, int]], events: list[bool]
) -> None:
    replica, memory, other = Rows(blocks=1000), Overcommit(), SglangRatio()
    running = []
    for prompt, max_new, produced in rows:
        produced = min(produced, max_new - 1)
        replica.add(known_tokens=prompt + produced, prompt=prompt, limit=prompt + max_new)
        running.append((max_new, produced))
    for preempts in events:
        memory.on_step(replica, int(preempts))
        if preempts:
            other.retracted(running)
        else:
            other.ratio = max(other.ratio - other.decay, other.floor)
        assert memory.ratio == pytest.approx(other.ratio)
        taken = memory.admit(replica, entrants(*((k, k + m - 1) for k, m in coming)), PACE)
        assert taken.size == other.admit(running, replica.available * 4, 4, coming)


# -- expected lengths


def test_columns_know_the_same_quarter_octaves() -> None:
    sizes = np.arange(1, 5000)
    assert quarter_octaves(sizes).tolist() == [quarter_octave(n) for n in sizes.tolist()]


@settings(max_examples=100, deadline=None)
@given(
    outputs=st.lists(st.integers(1, 100), min_size=ENOUGH, max_size=64),
    produced=st.integers(0, 110),
    dice=st.floats(0, 0.999),
)
def test_expected_length_is_a_quantile_of_the_possible_ones(outputs: list[int], produced: int, dice: float) -> None:
    """100 is the limit of all, so they are of one group; it looks at every 16th request."""
    outputs = outputs[: len(outputs) // 16 * 16]
    lengths = Lengths()
    for output in outputs:
        lengths.learn(output, 100)
    kept = lengths.snapshot()[quarter_octave(100)]
    assert kept == outputs[-len(kept) :]
    possible = sorted(o for o in kept if o > produced)
    said = lengths.forecast(column(produced), column(100), np.array([dice]))[0]
    beyond = min(max(int(produced / (1 - dice)), produced + 1), 100)
    assert said == (possible[int(dice * len(possible))] if possible else beyond)


def test_ends_beyond_all_lengths_seen_are_spread() -> None:
    """A half becomes twice as long, a quarter four times: together they need no more blocks than they hold now."""
    lengths = Lengths()
    for _ in range(FEW):
        lengths.learn(5, 10_000)
    ends = lengths.forecast(np.full(1000, 50), np.full(1000, 10_000), np.arange(1000) / 1000)
    for times in (2, 4, 10):
        assert np.count_nonzero(ends >= times * 50) == pytest.approx(1000 / times, abs=2)
    assert ends.min() == 51
    assert lengths.forecast(column(50), column(80), np.array([0.9])) == 80


def test_lengths_are_pooled_until_a_group_has_enough() -> None:
    lengths = Lengths()

    def expected(produced: int, limit: int, dice: float = 0.0) -> int:
        return int(lengths.forecast(column(produced), column(limit), np.array([dice]))[0])

    for _ in range(FEW - 1):
        lengths.learn(5, 100)
    assert expected(0, 100) == 1 and expected(30, 3000) == 31, "nothing is known: what is used now counts"
    lengths.learn(5, 100)
    assert expected(0, 100) == expected(0, 3000) == 5, "all groups are one"
    longest = [expected(5, 100, 0.5), expected(60, 100, 0.5)]
    assert longest == [10, 100], "longer than all: twice as long in the median, up to the limit"
    for _ in range(ENOUGH):
        lengths.learn(70, 3000)
    assert expected(0, 3000) == 70
    for _ in range(ENOUGH):
        lengths.learn(9, 104)
    longest = [expected(0, limit, 0.99) for limit in (3000, 100, 500)]
    assert longest == [70, 9, 70] and expected(0, 500) == 5, "four groups to each doubling; 500 has none of its own"


def test_lengths_start_anew_when_they_become_other_ones() -> None:
    """Outputs of 400 to 480 tokens follow on 2,000 of 20 to 40: half of the ranks would be above all that was seen."""
    lengths, rng = Lengths(), np.random.default_rng(7)
    dice = np.arange(0.05, 1, 0.1)

    def median(produced: int = 0) -> float:
        return float(np.median(lengths.forecast(column(*[produced] * 10), column(*[1000] * 10), dice)))

    for length in rng.integers(20, 40, 2000).tolist():
        lengths.learn(length, 1000)
    assert 20 <= median() < 40
    for length in rng.integers(400, 480, 32).tolist():
        lengths.learn(length, 1000)
    assert 400 <= median() < 480
    for length in rng.integers(350, 500, 320).tolist():  # like them: nothing is dropped
        lengths.learn(length, 1000)
    assert 400 < median() < 450 and median(460) > 470


def lognormal(seed: int, count: int, sigma: float) -> list[int]:
    """Return `count` lengths with a median of 300 tokens."""
    drawn = np.random.default_rng(seed).normal(np.log(300), sigma, count)
    return [*map(int, np.maximum(np.exp(drawn).round(), 1))]


def drops(lengths: Lengths, outputs: list[int], limit: int = 10_000) -> list[int]:
    """Return after how many of `outputs` the earlier lengths of all groups were dropped."""
    found, before = [], len(lengths.snapshot().get(Lengths.POOLED, []))
    for number, output in enumerate(outputs, 1):
        lengths.learn(output, limit)
        now = len(lengths.snapshot()[Lengths.POOLED])
        found += [number] if now < before else []
        before = now
    return found


@pytest.mark.parametrize("sigmas", [(0.3, 1.2), (1.2, 0.3)], ids=["wider", "narrower"])
def test_lengths_start_anew_when_their_spread_changes(sigmas: tuple[float, float]) -> None:
    """The median stays, so the mean of the ranks does not see it."""
    for seed in range(6):
        lengths = Lengths()
        for output in lognormal(seed, 400, sigmas[0]):
            lengths.learn(output, 10_000)
        first = drops(lengths, lognormal(seed + 1000, 96, sigmas[1]))
        assert first and first[0] <= 64, seed
        dice = np.arange(0.005, 1, 0.01)
        said = lengths.forecast(column(*[0] * 100), column(*[10_000] * 100), dice)
        share = float(np.mean((said > 300 / 1.5) & (said < 300 * 1.5)))
        true = 0.264 if sigmas[1] == 1.2 else 0.823  # P(|z| < ln 1.5 / sigma)
        assert abs(share - true) < 0.2, (seed, share)


def test_lengths_of_an_unchanged_load_are_kept() -> None:
    """Ten loads of 4,000 requests that end; equal lengths are of one distribution, too."""
    false = [len(drops(Lengths(), lognormal(seed, 4000, 0.8))) for seed in range(10)]
    assert sum(false) <= 8, false
    rng = np.random.default_rng(5)
    assert drops(Lengths(), [200] * 2000) == []
    assert drops(Lengths(), rng.choice([1, 64], 2000).tolist()) == []


def test_restored_lengths_forecast_as_those_before() -> None:
    before, after = Lengths(), Lengths()
    for index, output in enumerate(lognormal(3, 64, 0.5)):
        limit = (500, 8000)[index % 2]
        before.learn(min(output, limit), limit)
    snapshot = before.snapshot()
    assert {group: len(lengths) for group, lengths in snapshot.items()} == {35: 32, 51: 32, Lengths.POOLED: 64}
    after.restore(snapshot)
    assert after.snapshot() == snapshot
    dice, produced = np.arange(0, 1, 0.05), column(*[0, 100, 300, 900] * 5)
    for limit in (500, 8000, 70):
        columns = produced, column(*[limit] * 20), dice
        assert after.forecast(*columns).tolist() == before.forecast(*columns).tolist()
    for output in lognormal(4, 320, 0.5):
        before.learn(output, 8000)
        after.learn(output, 8000)
    assert after.snapshot() == before.snapshot() and len(after.snapshot()[51]) == KEPT


def test_groups_without_the_pooled_one_forecast_for_themselves() -> None:
    lengths = Lengths()
    lengths.restore({35: [200] * ENOUGH, 51: [9] * (ENOUGH - 1)})
    said = lengths.forecast(column(0, 0, 40), column(500, 8000, 70), np.array([0.5, 0.5, 0.5]))
    assert said.tolist() == [200, 1, 70], "8000 has too few; longer than all that were seen is twice as long"


@pytest.mark.parametrize(
    "snapshot",
    [{-1: [5]}, {Lengths.POOLED + 1: [5]}, {35: []}, {35: [5] * (KEPT + 1)}, {35: [-1]}, {35: [600]},
     {Lengths.POOLED: [1 << 31]}],
)  # fmt: skip
def test_lengths_that_no_scheduler_saw_are_refused_whole(snapshot: dict[int, list[int]]) -> None:
    lengths = Lengths()
    with pytest.raises(ValueError, match="group"):
        lengths.restore({51: [4] * ENOUGH, **snapshot})
    assert lengths.snapshot() == {}


def test_expected_lengths_admit_what_max_tokens_would_keep_out_and_a_storm_is_damped() -> None:
    """100 blocks of 4. Ten run with 8 tokens of 1000 each; all that ever finished had 12 outputs: 5 blocks each."""
    replica, memory = Rows(blocks=100), Expected()
    for _ in range(10):
        replica.add(known_tokens=8, prompt=8, limit=1008)
    coming = entrants(*[(8, 1007)] * 20)
    assert memory.admit(replica, coming, PACE).size == 20, "nothing is known: only what is used counts, as in Watermark"
    for _ in range(ENOUGH):
        memory.on_finish(8, 12, 1000)
    taken = memory.admit(replica, coming, PACE)
    assert taken.tolist() == [2] * 9, "99 blocks are spoken for at 5 each (8 + 12 - 1 tokens), 10 of them running"
    memory.on_step(replica, 5)
    assert memory.spare == pytest.approx(0.06)
    assert memory.admit(replica, coming, PACE).size == 8, "94 // 5 - 10"
    memory.on_step(replica, 1000)
    assert memory.spare == 0.1
    for _ in range(200 * 10):
        memory.on_step(replica, 0)
    assert memory.spare == pytest.approx(0.01)


def test_a_preempted_one_is_expected_by_what_it_has_produced() -> None:
    replica, memory = Rows(blocks=100), Expected()
    replica.add(known_tokens=300, prompt=280, limit=360)
    for output in [10] * 24 + [70] * 8:
        memory.on_finish(8, output, 80)
    # The one that runs has 20 outputs, so it will have 70, in 49 steps. Then 40 + 70 - 1 tokens do not fit beside it,
    # 25 + 10 - 1 do in 9 steps.
    assert memory.admit(replica, entrants((55, 119), prompt=[40]), PACE).size == 0
    assert memory.admit(replica, entrants((25, 104), prompt=[25]), PACE).size == 1
