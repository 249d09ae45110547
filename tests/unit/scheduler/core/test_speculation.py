"""Where guesses come from and how many a step takes; that they change no token is shown by the twin and the engine."""

from __future__ import annotations

import random

import numpy as np
import pytest

from services.scheduler.core import speculation
from services.scheduler.core.policy.step_time import StepTime
from services.scheduler.core.speculation import (
    GAP,
    MAX_TENANTS,
    TENANT_TOKENS,
    History,
    Outputs,
    Speculation,
    agree,
    find,
)
from services.scheduler.core.step import StepBuilder
from services.scheduler.core.table import SlotTable
from services.scheduler.core.types import Int32, Limits, NewRequest
from tests.unit.scheduler.core.named import Named, house
from tests.unit.scheduler.core.twin import MS, request

SEED = 20261124


def ids(*tokens: int) -> Int32:
    return np.array(tokens, np.int32)


def longest_match(text: list[int], tail: list[int]) -> int:
    """By brute force: the most last tokens of `tail` that stand in `text` with something behind them; 3 at least."""
    most = 0
    for end in range(1, len(text)):
        length = 0
        while length < min(end, len(tail)) and text[end - 1 - length] == tail[-1 - length]:
            length += 1
        most = max(most, length)
    return most if most >= 3 else 0


@pytest.mark.parametrize("seed", range(200))
def test_longest_match_is_that_of_brute_force(seed: int) -> None:
    rng = random.Random(SEED + seed)
    text = [rng.randrange(3) for _ in range(rng.randrange(60))]
    tail = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
    length, follows = find(ids(*text), ids(*tail), 4)
    assert length == longest_match(text[-60:], tail) or len(text) > 16 + 3  # only the latest places are compared
    for each in follows:
        before = [tuple(text[at : at + len(each)]) for at in range(3, len(text)) if text[at - 3 : at] == tail[-3:]]
        assert tuple(each) in before


def test_outputs_of_tenant_are_found_as_in_their_text() -> None:
    rng, history = random.Random(SEED), History()
    outputs = [[rng.randrange(4) for _ in range(rng.randrange(4, 40))] for _ in range(50)]
    for output in outputs:
        history.add(NewRequest("r", [ids(1)], 9, tenant="a"), ids(*output))
    for _ in range(200):
        tail = [rng.randrange(4) for _ in range(10)]
        length, follows = history.find("a", ids(*tail), 5)
        assert length <= max(longest_match([*output, 9], tail) for output in outputs)
        joined = ",".join(str(token) for output in outputs for token in [*output, GAP]) + 8 * ",-1"
        assert all(",".join(map(str, each)) in joined for each in follows)
        assert history.find("b", ids(*tail), 5) == (0, [])


def test_history_is_bounded_in_tenants_and_tokens() -> None:
    history = History()
    for number in range(MAX_TENANTS + 5):
        history.add(NewRequest("r", [ids(1)], 9, tenant=str(number)), ids(1, 2, 3, 4, 5))
    assert history.find("4", ids(1, 2, 3), 2) == (0, [])
    assert history.find("5", ids(1, 2, 3), 2) == (3, [[4, 5]])
    for number in range(400):
        history.add(NewRequest("r", [ids(1)], 9, tenant="x"), np.arange(100, dtype=np.int32) + 100 * number)
    assert history.find("x", ids(1, 2, 3), 2) == (0, [])
    assert history.find("x", ids(39_901, 39_902, 39_903), 2) == (3, [[39_904, 39_905]])
    history.add(NewRequest("r", [ids(1)], 9, tenant="y"), np.arange(3 * TENANT_TOKENS, dtype=np.int32))
    assert history.find("y", ids(1, 2, 3), 1) == (3, [[4]])


def test_outputs_of_tenant_take_64_kib_and_those_of_all_4_mib() -> None:
    outputs = Outputs()
    for size in [5, TENANT_TOKENS // 2, 3 * TENANT_TOKENS, 100, TENANT_TOKENS - 1] * 20:
        outputs.add(np.arange(size, dtype=np.int32))
        assert outputs.tokens.nbytes <= 64 << 10
        assert outputs.tokens.base is not None and outputs.tokens.base.nbytes == 64 << 10
    assert MAX_TENANTS * (64 << 10) == 4 << 20


def test_tenant_that_was_served_goes_after_those_that_were_not() -> None:
    history = History()
    for number in [*range(MAX_TENANTS), 0, MAX_TENANTS]:
        history.add(NewRequest("r", [ids(1)], 9, tenant=str(number)), ids(1, 2, 3, 4, 5))
    assert history.find("0", ids(1, 2, 3), 1) == (3, [[4], [4]])
    assert history.find("1", ids(1, 2, 3), 1) == (0, [])


def test_request_without_guesses_adds_nothing_to_the_history() -> None:
    history = History()
    history.add(NewRequest("r", [ids(1)], 9, tenant="a", speculate=False), ids(1, 2, 3, 4, 5))
    assert history.find("a", ids(1, 2, 3), 2) == (0, [])


def test_guesses_end_where_places_disagree_or_the_chance_is_small() -> None:
    assert agree([[1, 2, 3]], 0.9, 0.5) == ([1, 2, 3], pytest.approx(0.9 + 0.81 + 0.729))
    assert agree([[1, 2, 3]], 0.7, 0.5)[0] == [1]
    assert agree([[1, 2, 9], [1, 2, 8], [1, 2, 7]], 0.95, 0.5)[0] == [1, 2]
    assert agree([[1, 5], [2, 6], [2, 7]], 0.95, 0.3) == ([2, 7], pytest.approx(0.95 * 2 / 3 * 1.475))
    assert agree([[1, GAP, 4]], 0.95, 0.1)[0] == [1]
    assert agree([], 0.9, 0.1) == ([], 0.0)


def measured(draft_ns: float = 100_000) -> StepTime:
    """A step of n tokens takes 2 ms and so much for each token."""
    model = StepTime()
    for tokens in list(range(1, 30)) * 20:
        model.observe(tokens, 100 * tokens, 0.0, int(2_000_000 + draft_ns * tokens))
    model.fold()
    return model


def running(count: int, limits: Limits, **more: int) -> tuple[SlotTable, Named]:
    """Rows that repeat four tokens again and again, with their last token planned."""
    h = house("sarathi:tokens=fixed-2048", slots=limits.slots)
    for number in range(count):
        new = request(f"r{number}", 4, 60, seed=number, **more)
        new.prompts = [np.tile(ids(1, 2, 3, 4), 6)]
        h.add(new)
    h.step()
    replica, rows = h.core.replicas[0], np.arange(count)
    table = replica.table
    table.tokens[:count, 24] = 1
    builder = StepBuilder(replica, 0, count, 64, h.now)
    builder.decode(table.mask(rows), rows, *builder.missing_blocks(table.mask(rows)))
    assert (table.known[rows] == 26).all()
    return table, h


LIMITS = Limits(40, 1000, 4, 400, 2048, max_drafts=64)


def propose(table: SlotTable, rows: int, model: StepTime, tokens: int = 1000, blocks: int = 1000) -> list[int]:
    """The number of guesses of each row."""
    made = Speculation(table, LIMITS, model, History()).propose(np.arange(rows), tokens, blocks, 25 * rows)
    counts = [0] * rows
    for row, count in zip(made.rows.tolist(), made.counts.tolist(), strict=True) if made is not None else ():
        counts[row] = count
    return counts


def test_more_rows_get_fewer_guesses_and_a_full_batch_none() -> None:
    counts = []
    for rows in (1, 8, 32):
        table, _ = running(rows, LIMITS)
        counts.append(propose(table, rows, measured())[0])
    assert counts[0] > counts[1] > counts[2]
    table, _ = running(32, LIMITS)
    assert propose(table, 32, measured(draft_ns=400_000)) == [0] * 32


def test_nothing_is_guessed_before_a_step_was_measured() -> None:
    table, _ = running(1, LIMITS)
    assert propose(table, 1, StepTime()) == [0]


def test_guesses_stay_in_tokens_blocks_and_limits_of_the_time_between_tokens() -> None:
    table, _ = running(1, LIMITS)
    free = propose(table, 1, measured())[0]
    assert free > 3
    assert propose(table, 1, measured(), tokens=2) == [2]
    assert propose(table, 1, measured(), blocks=0)[0] == table.capacity[0] - table.planned[0]
    limited, _ = running(1, LIMITS, tbt_slo_ns=int(2.35 * MS))
    assert 0 < propose(limited, 1, measured())[0] < free
    tight, _ = running(1, LIMITS, tbt_slo_ns=2 * MS)
    assert propose(tight, 1, measured()) == [0]


def test_row_with_wrong_guesses_gets_fewer_and_then_none_until_it_is_tried_again() -> None:
    table, _ = running(1, LIMITS)
    made, row = Speculation(table, LIMITS, measured(), History()), np.array([0])
    sizes = []
    for _ in range(12):
        drafts = made.propose(row, 1000, 1000, 25)
        sizes.append(0 if drafts is None else int(drafts.counts[0]))
        if drafts is not None:
            made.learn(row, drafts.counts, np.zeros(1, np.int32))
    assert sizes[0] > 3 and sizes[-1] == 0
    assert any(made.propose(row, 1000, 1000, 25) for _ in range(500))


def test_wait_for_an_answer_that_was_in_vain_is_not_repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ = running(1, LIMITS)
    made, row = Speculation(table, LIMITS, measured(), History()), np.array([0])
    assert made.worth_waiting(row, 1000, 25)
    monkeypatch.setattr(speculation, "find", lambda *_: (0, []))
    assert made.drafts(row, 1000, 1000, 25) is None
    monkeypatch.undo()
    looks = [made.worth_waiting(row, 1000, 25) for _ in range(2)]
    assert looks[0] is False


def test_no_step_is_put_off_for_a_guess_of_the_token_that_is_unanswered() -> None:
    table, _ = running(1, LIMITS)
    table.tokens[0, :25] = np.arange(25)
    made, row = Speculation(table, LIMITS, measured(draft_ns=1_000), History()), np.array([0])
    table.request[0].prediction = ids(22, 23, 24, 25)
    assert made.propose(row, 1000, 1000, 25) is not None
    assert not made.worth_waiting(row, 1000, 25)
    table.request[0].prediction = np.arange(22, 40, dtype=np.int32)
    assert made.worth_waiting(row, 1000, 25)


def test_waiting_is_charged_the_gap_before_the_step_and_the_one_behind_it() -> None:
    table, _ = running(1, LIMITS)
    made, row = Speculation(table, LIMITS, measured(draft_ns=1_000), History()), np.array([0])
    for _ in range(400):  # 2 ms steps, 1.4 ms beside a step that is planned alone, none beside one that is not
        made.answered(0, 2 * MS, int(3.4 * MS), alone=True)
        made.answered(0, 2 * MS, 2 * MS, alone=False)
    table.tokens[0, :25] = np.arange(25)
    table.request[0].prediction = np.arange(22, 29, dtype=np.int32)  # four guesses, three behind the answer
    assert made.propose(row, 1000, 1000, 25) is not None
    assert not made.worth_waiting(row, 1000, 25)
