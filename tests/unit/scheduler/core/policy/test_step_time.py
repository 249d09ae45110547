"""The step-time models against least squares, known coefficients, brute force and the facts sheet's formulas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from services.scheduler.core.policy.step_time import UNBOUNDED, StepTime, SwapTime, TokenTime
from services.simulator.device.roofline import Roofline

TRUE = np.array([2e6, 30e3, 12.0, 1.5])
PROBES = [(1, 500, 0.0), (256, 300_000, 0.0), (512, 0, 512 * 256.5), (2048, 100_000, 2048 * 3000.0)]
Row = tuple[int, int, float]


def rows(seed: int, prefill: float = 0.5) -> Iterator[Row]:
    rng = np.random.default_rng(seed)
    while True:
        decodes = int(rng.integers(1, 257))
        context = decodes * int(rng.integers(100, 3000))
        if rng.random() >= prefill:
            yield decodes, context, 0.0
            continue
        length, start = int(rng.integers(64, 1024)), int(rng.integers(0, 4000))
        yield decodes + length, context, length * (start + (length + 1) / 2)


def exact(row: Row, coefficients: np.ndarray = TRUE) -> float:
    return float(coefficients @ np.array([1, *row]))


EXPERTS, PER_TOKEN = 128, 8
MIXTURE = np.array([1e6, 6e3, 8.0, 0.5])
EXPERT_NS = 25e3


class Mixture:
    """A device with a mixture of experts, each of which takes EXPERT_NS once a step of which some token chooses it."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def distinct(self, tokens: int) -> int:
        """Draw the experts of a step with even routing; return how many there are."""
        chosen = self.rng.random((min(tokens, 400), EXPERTS)).argpartition(PER_TOKEN, 1)[:, :PER_TOKEN]
        return len(np.unique(chosen))

    def ns(self, row: Row) -> float:
        return exact(row, MIXTURE) + EXPERT_NS * self.distinct(row[0])

    def teach(self, model: StepTime, steps: int) -> None:
        """Feed decodes of 1 to 64 rows, every third step with a prompt's chunk beside them."""
        for step in range(steps):
            decodes = int(self.rng.integers(1, 65))
            length = int(self.rng.integers(16, 512)) if step % 3 == 0 else 0
            row = (decodes + length, decodes * int(self.rng.integers(100, 800)), length * (length + 1) / 2)
            model.observe(*row, round(self.ns(row) * (1 + 0.02 * self.rng.normal())))
        model.fold()


class Machine:
    """Feeds a model with steps of known coefficients and relative noise of 3 %."""

    def __init__(self, seed: int, steps: int = 0) -> None:
        self.model = StepTime()
        self.rows = rows(seed)
        self.rng = np.random.default_rng(seed + 1)
        self.seen: list[tuple[Row, int]] = []
        self.steps(steps)

    def step(self, row: Row, coefficients: np.ndarray = TRUE, factor: float = 1.0) -> None:
        ns = max(int(exact(row, coefficients) * factor * (1 + 0.03 * self.rng.normal())), 1)
        self.model.observe(*row, ns)
        self.seen.append((row, ns))

    def steps(self, count: int, coefficients: np.ndarray = TRUE) -> None:
        for _ in range(count):
            self.step(next(self.rows), coefficients)

    def worst(self, coefficients: np.ndarray = TRUE) -> float:
        """The largest relative error over the probes."""
        self.model.fold()
        return max(abs(self.model.predict(*row) / exact(row, coefficients) - 1) for row in PROBES)


def test_before_any_observation_nothing_is_predicted_and_nothing_binds() -> None:
    model = StepTime()
    model.observe(10, 10, 0.0, 0)
    model.observe(10, 10, 0.0, -5)
    assert model.observations == 0
    assert model.predict(100, 100, 100) == 0.0
    assert model.largest(1e6, 3, 100) == UNBOUNDED


def test_one_observation_is_enough_for_a_prediction() -> None:
    model = StepTime()
    model.observe(8, 4000, 0.0, 5_000_000)
    assert model.observations == 1
    assert model.predict(8, 4000) == pytest.approx(5e6, rel=0.01)


@pytest.mark.parametrize("seed", range(2))
def test_predictions_are_those_of_weighted_least_squares_over_the_memory(seed: int) -> None:
    machine = Machine(seed, 3008)
    latest = machine.seen[-400:]
    features = np.array([[1, *row] for row, _ in latest], dtype=np.float64)
    times = np.array([ns for _, ns in latest], dtype=np.float64)
    weight = 1 / (features @ TRUE)
    oracle = np.linalg.lstsq(features * weight[:, None], times * weight, rcond=None)[0]
    for row in PROBES:
        assert machine.model.predict(*row) == pytest.approx(exact(row, oracle), rel=0.02)
    assert machine.worst() < 0.02


@pytest.mark.parametrize(("shape", "device"), [("llama-8b", "h100"), ("llama-13b", "a100"), ("llama-70b", "h100x4")])
def test_a_roofline_is_fitted_on_both_sides_of_its_knee(shape: str, device: str) -> None:
    """A linear fit is 30 % off where the weights' time hides that of the tokens."""
    roofline, model, rng = Roofline(shape, device), StepTime(), np.random.default_rng(4)
    for row, _ in zip(rows(3), range(4000), strict=False):
        model.observe(*row, int(roofline.step_ns(*row) * (1 + 0.02 * rng.normal())))
    for decodes in (8, 64):
        for prompt in (0, 100, 200, 300, 500, 1000, 2000):
            row = (decodes + prompt, decodes * 500, prompt * (prompt + 1) / 2)
            assert model.predict(*row) == pytest.approx(roofline.step_ns(*row), rel=0.06), (decodes, prompt)


def test_error_is_the_quantile_of_steps_with_prompts() -> None:
    machine = Machine(4, 3000)
    assert 0.05 < machine.model.error < 0.12, "3 % of noise: 2.3 standard deviations"
    for _ in range(640):
        machine.step((200, 100_000, 0.0), factor=1.5)
    assert machine.model.error < 0.12, "steps without prompts do not count"


def test_what_was_learnt_since_is_no_error() -> None:
    """The first large chunks surprise a model that has seen decodes alone; their error must not outlive its fit."""
    roofline, model = Roofline("llama-8b", "h100"), StepTime()

    def observe(*row: float) -> None:
        model.observe(int(row[0]), int(row[1]), row[2], int(roofline.step_ns(int(row[0]), int(row[1]), row[2])))

    for step in range(640):
        prompt = 3000 if step > 320 and step % 16 == 0 else 0
        observe(8 + prompt, 4000 + step, prompt * (prompt + 1) / 2)
    assert model.error < 0.1


def test_a_large_chunk_says_nothing_of_attention() -> None:
    """A few chunks past the knee, without a prefix: what they took more is not read as the price of a long context."""
    roofline, model = Roofline("llama-8b", "h100"), StepTime()
    for step in range(640):
        prompt = 3000 if step in (330, 400, 470) else 100 if step % 20 == 0 else 0
        row = (8 + prompt, 4000 + step, prompt * (prompt + 1) / 2)
        model.observe(*row, int(roofline.step_ns(*row)))
    deep = (256, 4000, 248 * 12_000.0)
    assert model.predict(*deep) < 1.5 * roofline.step_ns(*deep)


def test_pause_is_an_error_of_at_most_the_whole_step() -> None:
    machine = Machine(4, 640)
    for _ in range(4):
        machine.step((600, 0, 512 * 256.5), factor=100.0)
    machine.steps(60)
    machine.model.fold()
    assert machine.model.error == 1.0


@pytest.mark.parametrize("factor", [100.0, 0.01])
@pytest.mark.parametrize("bad", [1, 4, 16])
def test_bad_timings_hardly_move_predictions(factor: float, bad: int) -> None:
    machine = Machine(7, 640)
    for i in range(160):
        machine.step(next(machine.rows), factor=factor if i * bad % 160 < bad else 1.0)
        if i % 8 == 0:
            assert machine.worst() < 0.05


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_a_bad_first_timing_is_soon_forgotten(factor: float) -> None:
    machine = Machine(11)
    machine.step(next(machine.rows), factor=factor)
    machine.steps(128)
    assert machine.worst() < 0.1


@pytest.mark.parametrize(
    ("speed", "steps", "error"),
    [
        (0.25, 100, 0.06),
        (1.3, 100, 0.06),
        (10.0, 130, 0.06),
        (12.0, 130, 0.06),
        (300.0, 130, 0.06),
        (np.array([1, 2, 1, 1]), 400, 0.1),
    ],
    ids=["faster", "slower", "ten times slower", "a little more", "much slower", "one cost alone"],
)
def test_lasting_change_of_speed_is_followed(speed: Any, steps: int, error: float) -> None:
    machine = Machine(5, 1000)
    machine.steps(steps, TRUE * speed)
    assert machine.worst(TRUE * speed) < error


def test_what_prefills_cost_is_remembered_through_hours_of_decode() -> None:
    machine = Machine(8, 500)
    for i in range(20_000):
        decodes = 250 + i % 7
        machine.step((decodes, decodes * (1000 + i % 500), 0.0))
    assert machine.worst() < 0.06


def test_decode_of_one_batch_size_says_nothing_of_prefill() -> None:
    machine = Machine(9)
    for i in range(5000):
        machine.step((256, 256 * (1000 + i % 500), 0.0))
    machine.model.fold()
    long = (256 + 2048, 256 * 1200, 2048 * 1024.5)
    decode = (256, 256 * 1200, 0.0)
    assert machine.model.predict(*decode) == pytest.approx(exact(decode), rel=0.02)
    assert machine.model.predict(*decode) <= machine.model.predict(*long) < 2 * exact(long)
    for i in range(64):
        machine.step(long if i % 16 == 0 else decode)
    machine.model.fold()
    assert machine.model.predict(*decode) == pytest.approx(exact(decode), rel=0.02)
    assert machine.model.predict(*long) == pytest.approx(exact(long), rel=0.1)


def test_no_coefficient_in_use_is_negative_even_where_data_fall() -> None:
    """Longer steps for fewer tokens: the slope is 0, not negative."""
    model, rng = StepTime(), np.random.default_rng(1)
    for _ in range(500):
        tokens = int(rng.integers(1, 500))
        model.observe(tokens, tokens * 10, 0.0, 10_000_000 - 10_000 * tokens)
        assert min(model.c0, model.c1, model.c2, model.c3, *(more for _, more in model.knees)) >= 0
        assert model.predict(tokens + 1, 10 * tokens + 1) >= model.predict(tokens, 10 * tokens)
    assert model.predict(250, 2500) == pytest.approx(7.5e6, rel=0.1)


@pytest.mark.parametrize("knees", [[], [(128, 5e3)], [(64, 1e4), (256, 2e4), (512, 1.0)]])
@pytest.mark.parametrize("prefix", [0, 100, 5000])
def test_largest_is_last_that_a_search_finds_within_the_limit(prefix: int, knees: list[tuple[int, float]]) -> None:
    model = Machine(2, 640).model
    model.fold()
    model.knees = knees
    for limit_ms in (3, 8, 11.5, 12, 20, 33.3, 100):
        for decodes, context in ((0, 0), (1, 10), (64, 64_000), (256, 500_000), (600, 10_000)):

            def time(chunk: int, decodes: int = decodes, context: int = context) -> float:
                return model.predict(decodes + chunk, context, chunk * (prefix + (chunk + 1) / 2))

            fitting = bisect_right(range(4000), limit_ms * 1e6, key=time)
            assert model.largest(limit_ms * 1e6, decodes, context, prefix) == max(fitting - 1, 0)


@pytest.mark.parametrize("knees", [[], [(128, 5e4)], [(64, 1e4), (256, 2e4), (512, 3e4)]])
def test_balanced_is_the_size_at_which_prompts_have_their_share(knees: list[tuple[int, float]]) -> None:
    """Brute force: the least of P * t(n) / n + N * t(n), at the ratio P : N that share and n stand for."""
    model = StepTime()
    model.c0, model.c1, model.c2, model.knees = 5e6, 2e3, 10.0, knees
    for decodes in (1, 40, 200):
        for share in (0.05, 0.3, 0.5, 0.9):
            found = model.balanced_tokens(share, decodes, 20_000)
            ratio = share / (1 - share)  # W / D = N * n / P
            sizes = np.arange(1, 200_000)
            time = 5e6 + 10.0 * 20_000 + 2e3 * (decodes + sizes)
            for knee, more in knees:
                time = time + more * np.maximum(decodes + sizes - knee, 0)
            cost = time / sizes * ratio * max(found, 1) + time  # P / N = ratio * n at the size chosen
            assert abs(int(sizes[cost.argmin()]) - found) <= 1
    assert model.balanced_tokens(1.0, 10, 100) == UNBOUNDED


def test_largest_is_exact_where_limit_is_time_of_a_chunk() -> None:
    model = StepTime()
    model.c1, model.c2, model.c3 = 30_000.7, 12.3, 1.1
    for chunk in range(1, 3000):
        limit = chunk * (model.c1 + model.c3 * 11.5 + model.c3 / 2 * chunk)
        assert model.largest(limit, 0, 0, 11) == chunk
        assert model.largest(limit - 1, 0, 0, 11) == chunk - 1


def test_largest_without_a_cost_per_token_is_unbounded() -> None:
    model = StepTime()
    model.observe(10, 0, 0.0, 1_000_000)  # one step: no cost per token is known yet
    assert model.largest(2e6, 10, 0) == UNBOUNDED
    assert model.largest(0.5e6, 10, 0) == 0


def test_the_dynamic_budget_follows_the_mean_time_per_token() -> None:
    time = TokenTime()
    assert time.budget(50e6, 2048, 100) == 256  # nothing measured
    assert time.budget(50e6, 300, 100) == 192
    time.observe(0, 10)
    time.observe(10, 0)
    assert time.token_ns == 0.0
    time.observe(100, 10_000_000)
    assert time.token_ns == 100_000
    time.observe(100, 20_000_000)
    assert time.token_ns == pytest.approx(110_000)
    assert time.budget(50e6, 2048, 32) == 384  # 454 - 32 = 422
    assert time.budget(50e6, 300, 32) == 256  # capped at 300: 268
    assert time.budget(50e6, 2048, 460) == 0


def test_swap_time_starts_at_link_and_follows_what_is_measured() -> None:
    time = SwapTime(2 << 20, 25e9)
    assert time.predict(10) == pytest.approx(10 * (2 << 20) / 25)
    for _ in range(100):
        time.observe(10, 2_000_000)
    assert time.predict(1) == pytest.approx(200_000, rel=1e-3)
    time.observe(10, 200_000_000)  # a hundred times as long
    assert time.predict(1) == pytest.approx(260_000, rel=1e-3)
    before = time.block_ns
    time.observe(0, 100)
    time.observe(10, 0)
    assert time.block_ns == before


def test_touched_experts_are_those_of_even_routing() -> None:
    model, device = StepTime(EXPERTS, PER_TOKEN), Mixture(1)
    assert model.touched_experts(0) == 0 and model.touched_experts(1) == pytest.approx(PER_TOKEN)
    for tokens, about in ((8, 52), (16, 82), (32, 112), (400, 128)):
        assert model.touched_experts(tokens) == pytest.approx(about, abs=0.5)
        drawn = np.mean([device.distinct(tokens) for _ in range(200)])
        assert model.touched_experts(tokens) == pytest.approx(drawn, rel=0.02)
    assert StepTime().touched_experts(5) == 0


@pytest.mark.parametrize("seed", range(2))
def test_time_of_experts_is_learned_where_without_it_few_rows_are_wrong(seed: int) -> None:
    """Steps of one row to 64, and the term's own coefficient."""
    device, model, without = Mixture(seed), StepTime(EXPERTS, PER_TOKEN), StepTime()
    device.teach(model, 1500)
    Mixture(seed).teach(without, 1500)
    assert model.c4 == pytest.approx(EXPERT_NS, rel=0.1)
    errors = []
    for one in (model, without):
        worst = 0.0
        for decodes in (1, 2, 4, 8, 16, 32, 64):
            row = (decodes, 400 * decodes, 0.0)
            true = exact(row, MIXTURE) + EXPERT_NS * EXPERTS * (1 - (1 - PER_TOKEN / EXPERTS) ** decodes)
            worst = max(worst, abs(one.predict(*row) / true - 1))
        errors.append(worst)
    assert errors[0] < 0.05 and errors[1] > 0.25


@pytest.mark.parametrize("decodes", [0, 1, 4, 16, 100])
def test_largest_counts_the_experts_that_it_touches(decodes: int) -> None:
    """Against a search; from where nearly all experts are touched on, a few tokens fewer may be found."""
    model = StepTime(EXPERTS, PER_TOKEN)
    Mixture(5).teach(model, 1500)
    for limit_ns in np.linspace(1e6, 12e6, 40):
        for prefix in (0, 3000):

            def time(n: int, prefix: int = prefix) -> float:
                return model.predict(decodes + n, 300 * decodes, n * (prefix + (n + 1) / 2))

            most = max(bisect_right(range(3000), limit_ns, key=time) - 1, 0)
            found = model.largest(limit_ns, decodes, 300 * decodes, prefix)
            assert found <= most
            assert found == most or time(most) - time(found) <= 0.01 * model.c4 * EXPERTS + time(found) * 0.01


def test_budget_of_prompts_takes_all_experts_for_read() -> None:
    """n * t'(n) / t(n) is the share, t with every expert: read once, they do not count as the prompt tokens' time."""
    model = StepTime(EXPERTS, PER_TOKEN)
    model.c0, model.c1, model.c4 = 1e6, 1e4, 2e4
    tokens = model.balanced_tokens(0.5, 2, 0)
    assert tokens == pytest.approx(100 + 2 + 256, abs=2)


def test_a_step_larger_than_all_before_is_taken_in_at_once() -> None:
    model = StepTime()
    for _ in range(64):
        model.observe(100, 0, 0, 10_000_000)
    guess = model.predict(1000)
    model.observe(1000, 0, 0, 30_000_000)
    assert model.predict(1000) > 1.3 * guess


def test_fit_that_went_astray_begins_anew() -> None:
    model = StepTime()
    for _ in range(128):
        model.observe(100, 0, 0, 10**18)
    for _ in range(256):
        model.observe(100, 0, 0, 10)
    assert model.predict(100) == pytest.approx(10, rel=0.5)


# Of a batch of 128 long prompts of the chat trace on the simulated device: tokens, decode_context, prefill_context, ms.
PROMPTS = [
    (6467, 0, 2626989.0, 358.3),
    (5852, 6467, 3753973.0, 477.7),
    (7410, 12319, 11790037.0, 462.3),
    (8083, 19729, 11746171.0, 922.6),
    (8002, 27812, 9287578.0, 1380.4),
    (7881, 35814, 9877139.0, 738.3),
    (8098, 43695, 3733146.0, 333.5),
    (5582, 51793, 2762196.0, 224.4),
    (6354, 57375, 9570775.0, 281.9),
    (8070, 63729, 10450066.0, 558.5),
    (8083, 71799, 5833582.0, 511.0),
    (7146, 79882, 3246889.0, 254.8),
    (8101, 87028, 4623002.0, 233.0),
    (7193, 95129, 6415582.0, 324.6),
    (7532, 102190, 9988389.0, 467.7),
    (4232, 109466, 8435778.0, 100.8),
]


def test_decodes_after_prompts_alone_leave_the_cost_of_prompts() -> None:
    model = StepTime()
    for tokens, decoded, prompts, ms in PROMPTS:
        model.observe(tokens, decoded, prompts, int(ms * 1e6))
    for more in range(128):
        model.observe(118, 112_000 + 118 * more, 0.0, 10_900_000 + 5_400 * more)
    assert model.predict(118, 120_000) == pytest.approx(11.3e6, rel=0.1)
    assert 0.5 < model.predict(*PROMPTS[-2][:3]) / (PROMPTS[-2][3] * 1e6) < 2
