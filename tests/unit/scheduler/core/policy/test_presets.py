"""Each preset's schedule on a scenario small enough to be computed by hand, and policies by the names of their parts.

`orca`, `sarathi` and `orcinus` have more of them in ../test_schedules.py.
"""

from __future__ import annotations

import pytest

from services.scheduler.core.policy.base import Mode
from services.scheduler.core.policy.fairness import Fair
from services.scheduler.core.policy.memory import FtAimd
from services.scheduler.core.policy.order import FirstCome
from services.scheduler.core.policy.preemption import SLO, LastStarted, Newest
from services.scheduler.core.policy.presets import MAX_NUMBER, NEEDS, PARTS, PRESETS, TAKES, parse, preset
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits
from tests.unit.scheduler.core.policy.rows import Rows
from tests.unit.scheduler.core.twin import MS, House, house, request


def running(h: House, steps: int) -> list[str]:
    """Names of the next steps' chunks, in alphabetical order."""
    return ["".join(sorted(h.step())) for _ in range(steps)]


# -- batches that run to their end


def test_static_runs_a_batch_to_its_longest_and_admits_none() -> None:
    """Two seats. a, b and c have 2, 4 and 2 tokens: c waits for b though a's seat is empty for two steps."""
    h = house("static", max_seqs=2)
    h.add_all(("a", 4, 2), ("b", 4, 4), ("c", 4, 2), ("d", 4, 1))
    assert running(h, 6) == ["ab", "ab", "b", "b", "cd", "c"]
    assert h.core.idle


def test_members_of_static_batch_enter_as_worker_takes_their_prompts() -> None:
    """A step takes 8 tokens: of the batch of three b enters a step later, c with it; d is of the next batch."""
    h = house("static", step_max=8)
    h.add_all(("a", 6, 2), ("b", 4, 3), ("c", 3, 1))
    assert h.step() == {"a": (0, 6)}
    h.add_all(("d", 2, 1))
    assert h.step() == {"a": (6, 1), "b": (0, 4), "c": (0, 3)}
    assert running(h, 3) == ["b", "b", "d"]
    assert h.core.idle


def test_request_level_batching_waits_50_ms_or_for_32() -> None:
    h = house("request", slots=40)
    h.add_all(("a", 4, 2))
    for _ in range(5):
        assert h.plan() is None
        h.now += 10 * MS
    h.add_all(("b", 4, 1))
    assert running(h, 2) == ["ab", "a"]
    for i in range(33):
        h.add_all((f"{i:02}", 2, 1))
    assert len(h.step()) == 32, "a full batch does not wait"
    assert h.plan() is None
    h.now += 50 * MS
    assert list(h.step()) == ["32"]


# -- iteration-level batching, all that it can ever need reserved


@pytest.mark.parametrize("policy", ["orca", "tgi", "trt-no-evict", "iteration-level"])
def test_reserving_policies_stop_at_the_first_misfit_and_never_preempt(policy: str) -> None:
    """10 blocks of 4. a and b reserve 4 each (15 tokens); c wants 3 and d 1: d may not pass it. a ends after 12."""
    h = house(policy, blocks=10)
    h.add_all(("a", 4, 12), ("b", 4, 12), ("c", 4, 8), ("d", 2, 2))
    assert running(h, 14) == ["ab"] * 12 + ["cd"] * 2
    h.finish()
    assert h.core.stats()["preemptions"] == 0


# -- memory by need


@pytest.mark.parametrize(("policy", "runs"), [("lightllm", "ab"), ("orcinus", "ab"), ("orca", "a")])
def test_peak_admits_where_a_reservation_would_not(policy: str, runs: str) -> None:
    """9 blocks of 4. a (23 tokens, 6 blocks at its end) has 4 steps to go; b grows to 5 blocks after a has gone."""
    h = house(policy, blocks=9)
    h.add_all(("a", 4, 20))
    running(h, 16)
    h.add_all(("b", 4, 16))
    assert running(h, 1) == [runs]
    h.finish()
    assert h.core.stats()["preemptions"] == 0


def test_trt_max_utilization_admits_what_fits_and_pauses_the_last() -> None:
    """8 blocks of 2. All three fit (3 + 2 + 3). At once b needs a third one: c, started last, pauses. At position 8 a
    needs a fifth and none is left: b pauses. Both compute what they knew again when a has ended: 8 and 6 tokens."""
    h = house("trt-max-utilization", blocks=8, block_size=2, context=32)
    h.add_all(("a", 4, 8))
    assert running(h, 1) == ["a"]
    h.add_all(("b", 4, 5), ("c", 5, 5))
    assert h.step() == {"a": (4, 1), "b": (0, 4), "c": (0, 5)}
    assert running(h, 3) == ["ab"] * 3
    assert running(h, 3) == ["a"] * 3
    assert h.step() == {"b": (0, 8), "c": (0, 6)}
    assert running(h, 3) == ["c"] * 3
    assert h.core.idle and h.core.stats()["preemptions"] == 2
    assert isinstance(h.core.policy.relief, LastStarted)


def test_lmdeploy_has_128_slots_through_which_requests_flow() -> None:
    h = house("lmdeploy", slots=200)
    for i in range(150):
        h.add_all((f"{i:03}", 1, 1 if i < 10 else 3))
    assert len(h.step()) == 128
    assert len(h.step()) == 128, "ten went, ten came"
    assert len(h.step()) == 128
    assert len(h.step()) == 22
    h.finish()


@pytest.mark.parametrize(
    ("policy", "steps"), [("vllm:order=swapped-first", ["a"] * 5 + ["c"]), ("vllm:order=fcfs", ["ac"])]
)
def test_vllms_swapped_stand_before_all_that_wait(policy: str, steps: list[str]) -> None:
    """8 blocks of 2. b yields its four by swap when both need a fifth, and needs them back before c, which is older and
    needs one, may enter; that is when a has ended. Where all stand in one order c enters at once."""
    h = House(Scheduler(f"{policy},relief=newest-swap", lookahead=0), Limits(8, 8, 2, 32, 64, host_blocks=8))
    h.add_all(("a", 4, 10), ("b", 4, 10))
    assert running(h, 6) == ["ab"] * 5 + [""]
    h.add(request("c", 1, 1, seed=3, arrived_ns=1))
    assert running(h, len(steps)) == steps
    h.finish()
    assert h.core.stats()["recomputed_tokens"] == 0


# -- chunks


SCHEDULES: dict[str, tuple[str, dict[str, int], list[tuple[str, int, int]], list[dict[str, tuple[int, int]]]]] = {
    "tgi prefills newcomers whole beside those that decode": (
        "tgi", {"context": 3000, "blocks": 10_000, "step_max": 8192}, [("a", 2000, 3), ("b", 2096, 3), ("c", 2999, 1)],
        [{"a": (0, 2000), "b": (0, 2096)}, {"a": (2000, 1), "b": (2096, 1), "c": (0, 2999)},
         {"a": (2001, 1), "b": (2097, 1)}],
    ),
    "trt chunks contexts by 64 after the decodes": (
        "trt-no-evict", {"step_tokens": 130}, [("a", 40, 4), ("b", 200, 2)],
        [{"a": (0, 40), "b": (0, 64)}, {"a": (40, 1), "b": (64, 128)}, {"a": (41, 1), "b": (192, 8)},
         {"a": (42, 1), "b": (200, 1)}],
    ),
    "fastgen fills every pass to 768 tokens": (
        "fastgen", {"context": 1000}, [("a", 300, 4), ("b", 500, 3), ("c", 900, 2)],
        [{"a": (0, 300), "b": (0, 468)}, {"a": (300, 1), "b": (468, 32), "c": (0, 735)},
         {"a": (301, 1), "b": (500, 1), "c": (735, 165)}, {"a": (302, 1), "b": (501, 1), "c": (900, 1)}],
    ),
    "sarathi fills the budget of 8 with decodes first, then chunks": (
        "sarathi", {"step_tokens": 8}, [("a", 4, 6), ("b", 20, 3)],
        [{"a": (0, 4), "b": (0, 4)}, {"a": (4, 1), "b": (4, 7)}, {"a": (5, 1), "b": (11, 7)},
         {"a": (6, 1), "b": (18, 2)}, {"a": (7, 1), "b": (20, 1)}, {"a": (8, 1), "b": (21, 1)}],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "limits", "requests", "steps"), SCHEDULES.values(), ids=SCHEDULES)
def test_schedule_is_that_computed_by_hand(
    policy: str, limits: dict[str, int], requests: list[tuple[str, int, int]], steps: list[dict[str, tuple[int, int]]]
) -> None:
    h = house(policy, **limits)
    h.add_all(*requests, seed=1)
    assert [h.step() for _ in steps] == steps
    assert h.core.idle


def test_sglang_skips_prefill_when_fewer_than_64_tokens_are_left() -> None:
    """66 tokens a step. With two decodes 64 are left, with three 63: d waits until one of them has ended."""
    h = house("sglang", step_tokens=66)
    h.add_all(("a", 2, 4), ("b", 2, 9), ("c", 2, 9))
    assert running(h, 1) == ["abc"]
    h.add_all(("d", 90, 2))
    assert running(h, 3) == ["abc"] * 3
    assert h.step() == {"b": (5, 1), "c": (5, 1), "d": (0, 64)}
    assert h.step() == {"b": (6, 1), "c": (6, 1), "d": (64, 26)}
    h.finish()


# -- ft-aimd


def test_ft_aimd_raises_its_limit_stalls_one_and_swaps() -> None:
    """8 blocks of 4, 32 tokens. a and b end with 23 tokens, 6 blocks each, so b is held back and the limit rises. At
    position 16 a sits out with its four blocks while b, a step behind, goes on; when neither can run, b is swapped."""
    h = House(Scheduler("ft-aimd", lookahead=0), Limits(8, 8, 4, 64, 2048, host_blocks=8))
    memory = h.core.policy.memory
    assert isinstance(memory, FtAimd)
    h.add_all(("a", 4, 20), ("b", 4, 20))
    assert h.step() == {"a": (0, 4)} and memory.limit == 32 + 100
    assert h.step() == {"a": (4, 1), "b": (0, 4)}
    assert running(h, 11) == ["ab"] * 11
    assert h.step() == {"b": (15, 1)}
    assert h.step() == {} and h.core.stats()["swapped_blocks"] == 4
    assert memory.limit == 4, "132 - 1000, and one block is left in any case"
    assert h.step() == {"a": (16, 1)}
    assert running(h, 6) == ["a"] * 6
    assert h.step() == {}, "b comes back"
    assert h.step() == {"b": (16, 1)}
    assert running(h, 6) == ["b"] * 6
    assert h.core.idle and h.core.stats()["recomputed_tokens"] == 0


# -- names


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_known_by_its_name_and_never_shared(name: str) -> None:
    one, other = parse(name), preset(name)
    assert one.name == other.name == name
    assert one.memory is not other.memory and one.order is not other.order


def test_a_policy_takes_each_part_by_name() -> None:
    policy = parse("sarathi:order=fair,tokens=fixed-256,batch=chunked-64,relief=newest-swap+stalls+slo")
    assert isinstance(policy.order, Fair) and isinstance(policy.relief, Newest)
    assert (
        policy.relief.mode(Rows(), 0) is Mode.SWAP
        and policy.relief.stalls
        and policy.relief.slo is SLO
        and not policy.relief.takes
    )
    assert type(policy.memory) is type(preset("sarathi").memory)
    assert policy.name.startswith("sarathi:order=fair")
    assert isinstance(parse("vllm:memory=peak").order, FirstCome) and parse("vllm:memory=peak").prefix_cache


@pytest.mark.parametrize("part", PARTS)
def test_every_choice_of_every_part_can_be_named(part: str) -> None:
    for name in PARTS[part]:
        for choice in ([name] if name not in NEEDS else []) + ([f"{name}-64"] if name in NEEDS | TAKES else []):
            assert type(getattr(parse(f"orca:{part}={choice}"), part)).__name__


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fifo", "no policy 'fifo'; there are fastgen, .*vllm"),
        ("orca:order", "no part 'order'.*order, memory, tokens, batch, relief"),
        ("orca:orders=fcfs", "no part 'orders=fcfs'"),
        ("orca:", "no part ''"),
        ("orca:order=lifo", "no order 'lifo'; there are fcfs, .*fair"),
        ("orca:order=fcfs,order=fair", "gives order twice"),
        ("orca:tokens=fixed", "no tokens 'fixed'; there are unlimited, fixed-N"),
        ("orca:tokens=fixed-0", "number of 1 to 2147483647, not 0"),
        ("orca:tokens=fixed-064", "number of 1 to 2147483647, not 064"),
        ("sarathi:batch=chunked-2147483648", "batch chunked takes a number of 1 to 2147483647, not 2147483648"),
        ("sarathi:batch=chunked-99999999999999999999999", "1 to 2147483647, not 99999999999999999999999"),
        (f"orca:tokens=fixed-{5000 * '7'}", r"1 to 2147483647, not 7{40}\.\.\. \(5000 digits\)"),
        ("orca:tokens=fixed-\u0663", "no tokens 'fixed-\u0663'"),
        ("orca:tokens=unlimited-5", "no tokens 'unlimited-5'"),
        ("orca:relief=newest-swop", "no relief 'newest-swop'.*-recompute -swap -cheaper -groups"),
        ("orca:relief=newest+never", "no relief 'newest\\+never'.*\\+stalls"),
        ("orca:relief=newest-swap+slo+takes+slo", r"relief 'newest-swap\+slo\+takes\+slo' gives \+slo twice"),
    ],
)
def test_a_wrong_word_is_named_with_those_there_are(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(("policy", "number"), [("sarathi", 1), ("orcinus", MAX_NUMBER)])
@pytest.mark.parametrize("name", sorted(NEEDS | TAKES))
def test_the_least_and_the_greatest_number_of_each_part_serve(policy: str, name: str, number: int) -> None:
    part = next(part for part, table in PARTS.items() if name in table)
    h = house(f"{policy}:{part}={name}-{number}")
    h.add_all(*[(letter, 30, 4) for letter in "abcde"])
    h.now += 50 * MS
    h.finish()
    assert h.core.idle
