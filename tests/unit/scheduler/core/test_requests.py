"""What the core tells about a request: its ends, checkpoints, restarts, and what it refuses."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish, Int32, Limits, NewRequest, Records, StepResult
from tests.unit.scheduler.core.twin import MS, House, answer, request

LIMITS = Limits(slots=8, blocks=64, block_size=4, max_model_len=64, max_step_tokens=128)
PURE = {"__future__", "abc", "collections", "dataclasses", "enum", "hashlib", "heapq", "math", "numpy", "re", "typing"}
CORE = Path(__file__).resolve().parents[4] / "services" / "scheduler" / "core"


def house(policy: str = "orcinus", limits: Limits = LIMITS, **more: int) -> House:
    return House(Scheduler(policy, **more), limits)


# -- ends


def test_last_of_many_stop_ids_counts_beside_request_without_any() -> None:
    many = request("many", 4, 30, seed=3)
    tokens, _ = answer(many, 0, 64)
    many.stop_ids = np.array([*range(100, 115), tokens[6]], np.int32)
    h = house()
    h.add(many)
    h.add(request("none", 4, 30, seed=4))
    h.finish()
    assert [h.ended["many"], h.ended["none"]] == [[Finish.STOP], [Finish.LENGTH]]


def test_max_tokens_zero_ends_at_once() -> None:
    h = house()
    h.add(request("a", 4, 0, seed=1))
    assert h.ended["a"] == [Finish.LENGTH] and h.core.idle


def test_a_cancel_with_an_error_tells_it() -> None:
    h = house()
    h.add(request("a", 4, 9, seed=1))
    h.take(h.core.cancel("a", h.now, Finish.ERROR, "was alone in the step at two crashes"))
    assert h.errors["a"] == "was alone in the step at two crashes" and h.core.stats()["failed"] == 1


def test_stop_for_what_has_ended_or_never_was_tells_nothing() -> None:
    h = house()
    h.add(request("a", 5, 3, seed=1, n=2))
    h.finish()
    for choice in (0, 7, -1):
        assert not h.core.stop("a", choice, 1, h.now).requests
    assert not h.core.stop("unknown", 0, 1, h.now).requests


def test_sequence_goes_on_at_a_stop_behind_its_tokens() -> None:
    """As where Redis lost tokens that a gateway has read: an end there would leave less text than its client has."""
    h = house()
    h.add(request("a", 5, 8, seed=1))
    h.steps(4)
    held = h.core.outputs("a", 0)
    assert held is not None and 0 < held.size < 8
    assert not h.core.stop("a", 0, held.size + 1, h.now).requests
    h.finish()
    assert h.ended["a"] == [Finish.LENGTH]


def test_forecast_learns_the_length_that_a_stop_string_leaves() -> None:
    h = house()
    h.add(request("a", 5, 20, seed=1))
    h.steps(9)
    h.stop("a", 0, 3)
    assert set(map(tuple, h.core.lengths().values())) == {(3,)}


@pytest.mark.parametrize("slots", [1, 8])
def test_a_passed_deadline_ends_the_running_and_the_waiting(slots: int) -> None:
    h = house(limits=Limits(slots, 64, 4, 64, 128))
    h.add(request("first", 5, 50, seed=1, deadline_ns=h.now + 95 * MS))
    h.add(request("second", 5, 50, seed=2, deadline_ns=h.now + 50 * MS))
    h.add(request("third", 5, 3, seed=3))
    h.steps(7)
    assert h.ended["second"] == [Finish.DEADLINE] and "first" not in h.ended
    h.steps(4)
    assert h.ended["first"] == [Finish.DEADLINE]
    h.finish()
    assert h.ended["third"] == [Finish.LENGTH]


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    h = house()
    for i in range(600):
        h.add(request(f"r{i}", 2, 1, seed=1, deadline_ns=h.now + 10**15))
        h.steps(3)
    h.finish()
    h.core.check()


# -- what can never run


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [(64, 1, ("64", "context is 64")), (30, 30, ("30", "15 KV blocks", "has 10")), (0, 5, ("empty",))],
)
@pytest.mark.parametrize("joined", [True, False])
def test_request_that_can_never_run_is_error_that_names_values(
    prompt: int, max_tokens: int, says: tuple[str, ...], joined: bool
) -> None:
    limits = Limits(slots=8, blocks=10, block_size=4, max_model_len=64, max_step_tokens=128)
    h = house(limits=limits)
    if not joined:
        h.lose()
    h.add(request("a", prompt, max_tokens, seed=1))
    if not joined:
        h.join(limits)
        assert not h.core.idle or "a" in h.ended
        h.plan()
    assert h.ended["a"] == [Finish.ERROR] and h.core.idle
    assert all(word in h.errors["a"] for word in says), h.errors["a"]


def test_a_request_that_just_fits_an_empty_pool_runs() -> None:
    for policy in ("orca", "sarathi", "orcinus"):
        h = house(policy, Limits(slots=2, blocks=10, block_size=4, max_model_len=64, max_step_tokens=16), lookahead=2)
        h.add(request("a", 21, 20, seed=1))  # 40 tokens are computed: 10 blocks of 4
        h.finish()
        assert h.ended["a"] == [Finish.LENGTH]


def test_wrong_calls_are_refused() -> None:
    h = house()
    h.add(request("a", 4, 9, seed=1))
    with pytest.raises(ValueError, match="held already"):
        h.core.add(request("a", 4, 9, seed=1), h.now)
    with pytest.raises(ValueError, match="priority 4"):
        h.core.add(request("b", priority=4), h.now)
    with pytest.raises(ValueError, match="17 stop ids"):
        h.core.add(request("c", stop_ids=tuple(range(17))), h.now)
    h.plan()
    with pytest.raises(ValueError, match="other slots"):
        h.core.apply(StepResult(1, 0, np.array([3], np.int32), np.array([1], np.int32)), h.now)
    with pytest.raises(ValueError, match="2 tokens for 1"):
        h.core.apply(StepResult(1, 0, np.array([0], np.int32), np.array([1, 2], np.int32)), h.now)
    for wrong in (NewRequest("x", [], 4), NewRequest("y", [request("z").prompts[0]], 4, n=0)):
        with pytest.raises(ValueError, match="at least 1"):
            h.core.add(wrong, h.now)
    assert h.core.unfinished_count == 1


# -- delivery


def test_rows_follow_an_adopted_request_to_its_new_gateway() -> None:
    h = house()
    h.add_all(("a", 5, 20, 1), ("b", 5, 20, 2), gateway="one")
    h.steps(4)
    h.core.adopt("a", "two")
    h.core.adopt("unknown", "two")
    h.plan()
    outcome = h.answer()
    assert outcome is not None and sorted(outcome.gateways) == ["one", "two"]
    h.finish()


def records_of(tokens: Int32) -> Records:
    """Something of each token's own."""
    return np.array([b"%d" % token for token in tokens.tolist()], object)


def test_logprobs_of_the_preempted_stay_with_their_tokens() -> None:
    """A small pool: some are preempted with a step unanswered, and that step's token comes with its logprob."""
    h = house("sarathi", Limits(6, 20, 2, 40, 64), lookahead=2)
    late = 0
    for i in range(24):
        h.add(request(f"r{i}", 1 + 3 * i % 7, 9 + 5 * i % 11, seed=i, gateway="ab"[i % 2]))
    for _ in range(400):
        if h.core.idle:
            break
        while h.plan() is not None:
            pass
        if not h.workers[0].queue:
            continue
        late += bool(h.core.replicas[0].departures)
        result = h.workers[0].run()
        result.logprobs = records_of(result.tokens)
        outcome = h.core.apply(result, h.now)
        if outcome.tokens.size:
            assert outcome.logprobs is not None and (outcome.logprobs == records_of(outcome.tokens)).all()
        h.take(outcome)
    h.finish()
    assert late, "none was preempted with a step unanswered"


def test_checkpoint_is_due_after_32_tokens_one_second_or_end() -> None:
    h = house(limits=Limits(2, 64, 16, 256, 128), lookahead=0)
    h.add(request("a", 4, 71, seed=1))
    seen: list[tuple[int, int]] = []

    def go(times: int) -> None:
        for _ in range(times):
            h.plan()
            outcome = h.answer()
            assert outcome is not None
            seen.extend((first, tokens.size) for _, _, first, tokens in outcome.checkpoints)

    go(64)
    assert seen == [(0, 32), (32, 32)]
    go(2)
    h.now += 1000 * MS
    go(1)
    assert seen[2:] == [(64, 3)]
    go(4)
    assert seen[3:] == [(67, 4)] and h.core.idle


# -- structure


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r.table.planned_tokens.__setitem__(0, 30),
        lambda r: r.table.held_blocks.__setitem__(0, 0),
        lambda r: r.table.unanswered_steps.__setitem__(0, 0),
        lambda r: r.table.blocks.__setitem__((0, 0), int(r.table.blocks[1, 0])),
        lambda r: r.pool.refs.__setitem__(0, 2),
        lambda r: setattr(r, "reserved_blocks", 5),
        lambda r: r.table.sequence.__setitem__(0, r.table.sequence[1]),
    ],
)
def test_check_sees_a_spoiled_table(spoil: object) -> None:
    h = house()
    for name in "ab":
        h.add(request(name, 5, 20, seed=1))
    h.plan()
    h.core.check()
    spoil(h.core.replicas[0])  # type: ignore[operator]
    with pytest.raises(RuntimeError):
        h.core.check()


def test_the_core_is_pure() -> None:
    """numpy and the standard library's pure parts; no clock, no I/O."""
    for path in sorted(CORE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.startswith("services.scheduler.core") or name.split(".")[0] in PURE, (path, name)
