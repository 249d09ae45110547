"""Where guesses come from and how many a step takes; that they change no token is shown by the twin and the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.scheduler.core.ngrams import GAP, MAX_MATCH, NgramIndex
from services.scheduler.core.policy.order import ClassThenSlack
from services.scheduler.core.policy.presets import parse
from services.scheduler.core.policy.step_time import StepTime
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.speculation.drafts import Drafts, Speculation, level
from services.scheduler.core.speculation.texts import MAX_SHARES, MAX_TENANTS, TENANT_TOKENS, History
from services.scheduler.core.step import StepBuilder
from services.scheduler.core.table import SlotTable
from services.scheduler.core.types import Int32, Limits, NewRequest
from tests.unit.scheduler.core.twin import MS, House, house, request

SEED = 20261124


def ids(*tokens: int) -> Int32:
    return np.array(tokens, np.int32)


def tail_of(*tokens: int) -> Int32:
    """The last tokens as a search takes them: [1, MAX_MATCH], the last one first."""
    tail = np.full((1, MAX_MATCH), GAP, np.int32)
    last = tokens[::-1][:MAX_MATCH]
    tail[0, : len(last)] = last
    return tail


def found_in(history: History, tenant: str, *tail: int) -> list[int] | None:
    """What followed the tail in the outputs of a tenant, as far as any; None without a match."""
    if (text := history.text(tenant)) < 0:
        return None
    places = history.find(np.array([text]), tail_of(*tail))
    if not places.rows.size:
        return None
    follows, _, counts = history.follow(places)
    found: list[int] = follows[0, : counts[0]].tolist()
    return found


def test_history_is_bounded_in_tenants_and_tokens() -> None:
    history = History()
    for number in range(MAX_TENANTS + 5):
        history.add(NewRequest("r", [ids(1)], 9, tenant=str(number)), ids(1, 2, 3, 4, 5))
    assert found_in(history, "4", 1, 2, 3) is None
    assert found_in(history, "5", 1, 2, 3) == [4, 5]
    for number in range(400):
        history.add(NewRequest("r", [ids(1)], 9, tenant="x"), np.arange(100, dtype=np.int32) + 100 * number)
        if number % 7 == 0:  # with its index filled at different sizes
            assert found_in(history, "x", 100 * number + 1, 100 * number + 2, 100 * number + 3)
    assert found_in(history, "x", 1, 2, 3) is None
    assert found_in(history, "x", 39_995, 39_996, 39_997) == [39_998, 39_999]
    history.add(NewRequest("r", [ids(1)], 9, tenant="y"), np.arange(3 * TENANT_TOKENS, dtype=np.int32))
    assert (found_in(history, "y", 1, 2, 3) or [])[:2] == [4, 5]


def test_outputs_of_all_tenants_take_9_mib() -> None:
    assert History().nbytes <= 9 << 20


def test_tenant_that_was_served_goes_after_those_that_were_not() -> None:
    history = History()
    for number in [*range(MAX_TENANTS), 0, MAX_TENANTS]:
        history.add(NewRequest("r", [ids(1)], 9, tenant=str(number)), ids(1, 2, 3, 4, 5))
    assert found_in(history, "0", 1, 2, 3) == [4, 5]
    assert found_in(history, "1", 1, 2, 3) is None
    assert found_in(history, str(MAX_TENANTS), 1, 2, 3) == [4, 5]  # in the place of another one's outputs


def test_request_without_guesses_adds_nothing_to_the_history() -> None:
    history = History()
    history.add(NewRequest("r", [ids(1)], 9, tenant="a", speculate=False), ids(1, 2, 3, 4, 5))
    assert found_in(history, "a", 1, 2, 3) is None


@pytest.mark.parametrize(("counts", "room", "cut"), [([3, 1, 5], 9, [3, 1, 5]), ([3, 1, 5], 7, [3, 1, 3]),
                                                      ([3, 1, 5], 6, [3, 1, 2]), ([4, 4, 4], 2, [1, 1, 0]),
                                                      ([16, 0, 2], 1, [1, 0, 0])])  # fmt: skip
def test_room_for_guesses_is_taken_from_the_rows_with_most(counts: list[int], room: int, cut: list[int]) -> None:
    assert level(ids(*counts), room).tolist() == cut


@pytest.mark.parametrize("seed", range(10))
def test_level_uses_all_room(seed: int) -> None:
    rng = np.random.default_rng(SEED + seed)
    counts = rng.integers(0, 17, 50).astype(np.int32)
    room = int(rng.integers(0, counts.sum() + 5))
    cut = level(counts, room)
    assert cut.sum() == min(room, counts.sum()) and (cut <= counts).all() and (cut >= 0).all()
    assert cut[cut < counts].max(initial=0) - cut[cut < counts].min(initial=99) <= 1


def measured(draft_ns: float = 100_000) -> StepTime:
    """A step of n tokens takes 2 ms and so much for each token."""
    model = StepTime()
    for tokens in list(range(1, 30)) * 20:
        model.observe(tokens, 100 * tokens, 0.0, int(2_000_000 + draft_ns * tokens))
    model.fold()
    return model


def running(count: int, limits: Limits, **more: int) -> tuple[SlotTable, House]:
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
    builder = StepBuilder(replica, 0, count, count, 64, h.now)
    builder.decode(table.mask(rows), rows, *builder.missing_blocks(table.mask(rows)))
    assert (table.known_tokens[rows] == 26).all()
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


@pytest.mark.parametrize("is_seen", [True, False])
def test_row_that_was_late_gets_no_guess_until_its_token_has_come(is_seen: bool) -> None:
    table, _ = running(1, LIMITS)
    speculation, row = Speculation(table, LIMITS, measured(), History()), np.arange(1)
    assert not is_seen or speculation.propose(row, 1000, 1000, 25) is not None
    speculation.sat_out(row)
    assert speculation.propose(row, 1000, 1000, 25) is None
    table.tokens[0, table.applied_tokens[0]] = table.tokens[
        0, table.applied_tokens[0] - 4
    ]  # the row goes on as it repeats
    table.applied_tokens[0] += 1
    assert speculation.propose(row, 1000, 1000, 25) is not None


def test_nothing_is_guessed_before_a_step_was_measured() -> None:
    table, _ = running(1, LIMITS)
    assert propose(table, 1, StepTime()) == [0]


def test_guesses_stay_in_tokens_blocks_and_limits_of_the_time_between_tokens() -> None:
    table, _ = running(1, LIMITS)
    free = propose(table, 1, measured())[0]
    assert free > 3
    assert propose(table, 1, measured(), tokens=2) == [2]
    assert propose(table, 1, measured(), blocks=0)[0] == table.capacity[0] - table.planned_tokens[0]
    limited, _ = running(1, LIMITS, tbt_slo_ns=int(3.35 * MS))  # 1 ms passes beside a step
    assert 0 < propose(limited, 1, measured())[0] < free
    tight, _ = running(1, LIMITS, tbt_slo_ns=3 * MS)
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
    for number in range(200):  # other tokens than those that are guessed
        table.tokens[0, table.applied_tokens[0]], table.applied_tokens[0] = 90 + number, table.applied_tokens[0] + 1
        assert made.propose(row, 1000, 1000, 25) is None
    came = 0
    while made.propose(row, 1000, 1000, 25) is None:
        table.tokens[0, table.applied_tokens[0]], table.applied_tokens[0] = 1 + came % 4, table.applied_tokens[0] + 1
        came += 1
        assert came < 100


def test_requests_of_a_tenant_begin_with_what_its_others_have_learned() -> None:
    history, (table, _) = History(), running(1, LIMITS)
    for _ in range(30):  # each time another sequence, of which all guesses are wrong
        made, row = Speculation(table, LIMITS, measured(draft_ns=900_000), history), np.array([0])
        drafts = made.propose(row, 1000, 1000, 25)
        for _ in range(12):
            made.learn(row, ids(4), ids(0))
        made.on_end(0)
    assert drafts is None
    other, _ = running(1, LIMITS)
    other.request[0].tenant = "another"
    assert Speculation(other, LIMITS, measured(draft_ns=900_000), history).propose(row, 1000, 1000, 25) is not None
    table.request[0].prediction = np.tile(ids(1, 2, 3, 4), 9)  # of this one the client knows more
    assert Speculation(table, LIMITS, measured(draft_ns=900_000), history).propose(row, 1000, 1000, 25) is not None


def test_short_answers_that_repeat_bring_a_tenant_its_drafts_back() -> None:
    history, row, model = History(), np.array([0]), measured(draft_ns=500_000)
    for _ in range(60):
        history.learn("", 0.01, 0.1)
    for _ in range(100):
        table, _ = running(1, LIMITS)
        made = Speculation(table, LIMITS, model, history)
        for number in range(8):
            if made.propose(row, 1000, 1000, 25) is not None:
                assert number > 2, "nothing was compared"
                return
            table.tokens[0, table.applied_tokens[0]], table.applied_tokens[0] = (
                (2, 3, 4, 1)[number % 4],
                table.applied_tokens[0] + 1,
            )
        made.on_end(0)
    pytest.fail("no guess")


def test_tenant_learns_from_outputs_that_a_stop_string_ends() -> None:
    history = History()
    table, h = running(1, LIMITS)
    h.core.replicas[0].speculation = made = Speculation(table, LIMITS, measured(), history)
    drafts = made.propose(np.array([0]), 1000, 1000, 25)
    assert drafts is not None
    made.learn(np.array([0]), drafts.counts, ids(0))
    before = history.share("")
    h.core.stop("r0", 0, 1, h.now)
    assert history.share("") < before


def test_output_that_a_stop_string_cut_is_a_guess_for_its_tenant() -> None:
    h = House(Scheduler("orcinus", lookahead=0), LIMITS)
    first, again = request("first", 8, 60, seed=5), request("again", 8, 40, seed=5)
    h.add(first)
    while len(h.published["first", 0]) < 30:
        h.step()
    h.stop("first", 0, 20)
    assert not h.core.stats()["drafted_tokens"], "nothing of this output repeats"
    h.add(again)
    while not h.core.idle:
        h.step()
    assert 10 < h.core.stats()["accepted_tokens"] < 20  # behind the cut nothing is known


def test_shares_of_tenants_are_bounded_and_keep_no_outputs_from_others() -> None:
    history = History()
    history.add(NewRequest("r", [ids(1)], 9, tenant="a"), ids(1, 2, 3, 4, 5))
    for number in range(MAX_SHARES + MAX_TENANTS):
        history.learn(str(number), 0.1, 0.5)
    assert history.share("0") == history.share("never seen") > history.share(str(MAX_SHARES))
    assert found_in(history, "a", 1, 2, 3) == [4, 5]


def test_guess_that_was_right_and_had_no_mask_does_not_count_as_wrong() -> None:
    table, _ = running(1, LIMITS)
    made, row = Speculation(table, LIMITS, measured(), History()), np.array([0])
    first = made.propose(row, 1000, 1000, 25)
    assert first is not None
    for _ in range(8):  # of the guesses one brings a token, and is equal to the one that comes behind it
        drafts = made.propose(row, 1000, 1000, 25)
        assert drafts is not None
        table.tokens[0, table.applied_tokens[0] : table.applied_tokens[0] + 2] = drafts.tokens[:2]
        table.applied_tokens[0] += 2
        made.learn(row, drafts.counts, ids(1))
    assert drafts.counts[0] >= first.counts[0]


@pytest.mark.parametrize(
    ("waits", "limit_ms", "drafts"), [(False, 5, True), (True, 5, False), (True, 50, True), (True, 0, True)]
)
def test_guesses_take_what_prompts_leave_of_a_limit_of_the_time_between_tokens(
    waits: bool, limit_ms: int, drafts: bool
) -> None:
    limits = Limits(8, 4000, 4, 1500, 2048, max_drafts=64)
    h = House(Scheduler("orcinus", lookahead=0), limits)
    for number in range(3):
        new = request(f"r{number}", 4, 500, tbt_slo_ns=limit_ms * MS)
        new.prompts = [np.tile(ids(1, 2, 3, 4), 6)]
        h.add(new)
    h.step()
    h.step()
    replica = h.core.replicas[0]
    replica.model = model = measured()
    replica.speculation = Speculation(replica.table, limits, model, History())
    replica.table.tokens[:3, :27] = np.tile(ids(1, 2, 3, 4), 7)[:27]
    if waits:
        h.add(request("p", 900, 5))
    step, _ = h.core.plan(h.now)
    assert step is not None
    assert not limit_ms or model.predict(int(step.chunk_lengths.sum())) < limit_ms * MS
    assert (step.prefill_tokens > 0, step.drafts.size > 0) == (waits, drafts)


def test_guesses_that_prompts_leave_no_room_for_are_not_taken_for_wrong() -> None:
    table, _ = running(1, LIMITS)
    made, row = Speculation(table, LIMITS, measured(), History()), np.array([0])
    before = made.propose(row, 1000, 1000, 25)
    assert before is not None and made.worth_waiting(row, 1000, 25)
    table.tokens[0, table.applied_tokens[0]], table.applied_tokens[0] = 2, table.applied_tokens[0] + 1
    assert made.drafts(row, 0, 1000, 26, prompts=1000) is None
    after = made.propose(row, 1000, 1000, 26)
    assert after is not None and after.counts[0] >= before.counts[0] - 1
    assert made.worth_waiting(row, 1000, 26)


def test_fairness_charges_guesses_whether_they_are_right_or_not() -> None:
    charged: list[int] = []

    class Charging(ClassThenSlack):
        counts_tokens = True

        def count_served(self, tenants: Int32, classes: Int32, tokens: Int32) -> None:
            charged.append(int(tokens.sum()))

    limits = Limits(8, 4000, 4, 1500, 2048, max_drafts=64)
    h = House(Scheduler(replace(parse("orcinus"), order=Charging()), lookahead=0), limits)
    new = request("r", 4, 60)
    new.prompts = [np.tile(ids(1, 2, 3, 4), 6)]
    h.add(new)
    h.step()
    replica = h.core.replicas[0]
    replica.speculation = Speculation(replica.table, limits, measured(), History())
    replica.table.tokens[0, :25] = np.tile(ids(1, 2, 3, 4), 7)[:25]
    step, _ = h.core.plan(h.now)
    assert step is not None and step.drafts.size
    assert charged == [24, 1 + step.drafts.size]


def test_wait_for_an_answer_that_was_in_vain_is_not_repeated_at_once() -> None:
    table, _ = running(1, LIMITS)
    made, row = Speculation(table, LIMITS, measured(), History()), np.array([0])
    assert made.worth_waiting(row, 1000, 25)
    table.tokens[0, 25], table.applied_tokens[0] = 99, 26  # the answer is another token
    assert made.drafts(row, 1000, 1000, 26) is None
    table.tokens[0, 26:38], table.applied_tokens[0] = (1, 2, 3, 4) * 3, 38
    assert not made.worth_waiting(row, 1000, 25)
    assert Speculation(table, LIMITS, measured(), History()).worth_waiting(row, 1000, 25)


@pytest.mark.parametrize(("rows", "most"), [(3, 200), (32, 40)])
def test_looks_without_a_guess_pause_where_they_cost_many_rows(
    rows: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, (table, _) = History(), running(rows + 2, LIMITS)
    made, looks, propose = Speculation(table, LIMITS, measured(), history), [0], Speculation.propose

    def counted(*args: Any, **more: Any) -> Drafts | None:
        looks[0] += 1
        return propose(*args, **more)

    monkeypatch.setattr(Speculation, "propose", counted)
    table.tokens[:] = np.arange(table.tokens.size).reshape(table.tokens.shape)  # nothing stands there twice
    for _ in range(200):
        assert not made.worth_waiting(np.arange(rows), 1000, 25 * rows)
    assert most // 2 < looks[0] <= most
    looks[0] = 0
    history.learn("doubtful", 0.1, 1.0)
    table.request[rows].tenant = "doubtful"
    for count in (rows + 1, rows + 1, rows + 2):  # the last one begins with a look
        assert not looks[0] or rows < 4
        assert not made.worth_waiting(np.arange(count), 1000, 25 * count)
    assert looks[0] == 1 or rows < 4


@pytest.mark.parametrize("repeating", [0, 1])
def test_microbatch_with_guesses_is_looked_at_beside_one_without(repeating: int) -> None:
    table, _ = running(16, LIMITS)
    made = Speculation(table, LIMITS, measured(draft_ns=10_000), History())
    parts = np.arange(8), np.arange(8, 16)
    table.tokens[:] = np.arange(table.tokens.size).reshape(table.tokens.shape)
    waits = [0, 0]
    for number in range(400):
        if number == 200:
            table.tokens[parts[repeating], :60], table.applied_tokens[parts[repeating]] = (
                np.tile(ids(1, 2, 3, 4), 15),
                50,
            )
        for microbatch in range(2):
            waits[microbatch] += made.worth_waiting(parts[microbatch], 1000, 200, microbatch)
    assert waits[repeating] > 150 and not waits[1 - repeating]


def of_tenants(*tenants: int, draft_ns: float = 40_000) -> tuple[SlotTable, Speculation, StepTime]:
    """Four rows, of which the first two repeat themselves; nothing passes beside steps."""
    table, _ = running(4, LIMITS)
    table.tenant[:4] = tenants
    table.tokens[2:4, :25] = np.arange(25)
    model = measured(draft_ns=draft_ns)
    made = Speculation(table, LIMITS, model, History())
    for _ in range(400):
        made.on_answer(0, 2 * MS, 2 * MS, alone=True)
        made.on_answer(0, 2 * MS, 2 * MS, alone=False)
    return table, made, model


def slower(model: StepTime, drafts: Drafts | None) -> float:
    assert drafts is not None
    return model.predict(4 + drafts.tokens.size, 100) / model.predict(4, 100)


@pytest.mark.parametrize("tenants", [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1)])
def test_guesses_of_a_tenant_hardly_slow_the_rows_of_another(tenants: tuple[int, ...]) -> None:
    _, made, model = of_tenants(*tenants)
    times = slower(model, made.propose(np.arange(4), 1000, 1000, 100))
    assert times < 1.12 if tenants == (0, 0, 1, 1) else times > 1.15


def test_tenant_with_guesses_in_one_row_of_many_takes_them_from_no_other() -> None:
    table, _ = running(20, LIMITS)
    table.tenant[10:20] = 1
    table.tokens[11:20, :25] = np.arange(25)  # of the second tenant the first row alone has guesses
    model = measured(draft_ns=20_000)
    made = Speculation(table, LIMITS, model, History())
    for _ in range(400):
        made.on_answer(0, 2 * MS, 2 * MS, alone=True)
        made.on_answer(0, 2 * MS, 2 * MS, alone=False)
    found = made.propose(np.arange(20), 1000, 1000, 500)
    assert found is not None and found.tokens.size > 10


def test_guesses_that_find_no_block_are_no_gain_of_their_tenant() -> None:
    table, made, model = of_tenants(0, 1, 0, 1, draft_ns=100_000)
    table.capacity[:2] = table.planned_tokens[:2] + np.array([16, 0])
    free = made.propose(np.arange(4), 1000, 1000, 100)
    full = made.propose(np.arange(4), 1000, 0, 100)
    assert slower(model, free) > 1.3 and slower(model, full) < 1.12


def test_tenant_whose_rows_take_turns_with_guesses_may_be_slowed_in_one_step() -> None:
    table, made, model = of_tenants(0, 0, 1, 1)
    for _ in range(20):  # in steps before, both tenants got three tokens a row
        drafts = made.drafts(np.arange(4), 1000, 1000, 100)
        made.learn(np.arange(4), np.full(4, 2, np.int32), np.full(4, 2, np.int32))
        table.applied_tokens[:4] = 25
    assert drafts is not None and slower(model, made.propose(np.arange(4), 1000, 1000, 100)) > 1.15


def test_guesses_of_what_an_answer_brings_take_no_room_from_a_tenant() -> None:
    table, made, _ = of_tenants(0, 0, 1, 1)
    table.unanswered_steps[:4] = 3
    found = made.propose(np.arange(4), 1000, 1000, 100, waiting=True)
    assert found is not None and found.tokens.size - 3 * found.rows.size >= 5


def test_guesses_go_on_behind_right_ones_without_another_search(monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ = running(1, LIMITS)
    made, row, tokens = Speculation(table, LIMITS, measured(), History()), np.array([0]), []
    searches, tails = [], NgramIndex.tails
    monkeypatch.setattr(NgramIndex, "tails", lambda self, *given: (searches.append(given), tails(self, *given))[1])
    for _ in range(3):
        drafts = made.propose(row, 4, 1000, 25)
        assert drafts is not None
        tokens += drafts.tokens.tolist()
        for token in drafts.tokens.tolist():
            table.tokens[0, table.applied_tokens[0]], table.applied_tokens[0] = token, table.applied_tokens[0] + 1
    assert tokens == [2, 3, 4, 1] * 3
    assert len(searches) == 1


def test_row_without_guesses_learns_from_what_would_have_been_right() -> None:
    table, _ = running(1, LIMITS)
    made, row = Speculation(table, LIMITS, measured(draft_ns=900_000), History()), np.array([0])
    assert made.propose(row, 1000, 1000, 25) is not None
    for _ in range(9):
        made.learn(row, ids(4), ids(0))
    for number in range(40):
        made.propose(row, 1000, 1000, 25)
        table.tokens[0, table.applied_tokens[0]], table.applied_tokens[0] = (
            (2, 3, 4, 1)[number % 4],
            table.applied_tokens[0] + 1,
        )
        if (drafts := made.propose(row, 1000, 1000, 25)) is not None:
            assert 1 < number < 30
            assert drafts.tokens[0] == (3, 4, 1, 2)[number % 4]
            return
    pytest.fail("no guess")


def test_no_step_is_put_off_for_a_guess_of_the_token_that_is_unanswered() -> None:
    table, _ = running(1, LIMITS)
    table.tokens[0, :25] = np.arange(25)
    made, row = Speculation(table, LIMITS, measured(draft_ns=1_000), History()), np.array([0])
    table.request[0].prediction = ids(22, 23, 24, 25)
    assert made.propose(row, 1000, 1000, 25) is not None
    assert not made.worth_waiting(row, 1000, 25)
    table.request[0].prediction = np.arange(22, 40, dtype=np.int32)
    assert Speculation(table, LIMITS, measured(draft_ns=1_000), History()).worth_waiting(row, 1000, 25)


def test_waiting_is_charged_the_gap_before_the_step_and_the_one_behind_it() -> None:
    table, _ = running(1, LIMITS)
    made, row = Speculation(table, LIMITS, measured(draft_ns=1_000), History()), np.array([0])
    for _ in range(400):  # 2 ms steps, 1.4 ms beside a step that is planned alone, none beside one that is not
        made.on_answer(0, 2 * MS, int(3.4 * MS), alone=True)
        made.on_answer(0, 2 * MS, 2 * MS, alone=False)
    table.tokens[0, :25] = np.arange(25)
    table.request[0].prediction = np.arange(22, 29, dtype=np.int32)  # four guesses, three behind the answer
    assert made.propose(row, 1000, 1000, 25) is not None
    assert not made.worth_waiting(row, 1000, 25)


def test_forced_guesses_go_before_those_that_were_found_and_are_judged_apart() -> None:
    table, _ = running(2, LIMITS)
    made, rows = Speculation(table, LIMITS, measured(), History()), np.arange(2)
    assert made.propose(rows, 1000, 1000, 50) is not None  # 2, 3, 4, 1, ... for both
    made.force(rows, ids(5, 2), ids(7, 8, 9, 10, 11, 2, 3))
    drafts = made.propose(rows, 1000, 1000, 50)
    assert drafts is not None and drafts.counts[0] == 5
    assert drafts.tokens[: 5 + 4].tolist() == [7, 8, 9, 10, 11, 2, 3, 4, 1]  # of the second row it goes on as found
    for _ in range(12):
        made.learn(rows, drafts.counts, ids(0, 2))
    made.propose(rows, 1000, 1000, 50)
    drafts = made.propose(rows, 1000, 1000, 50)
    assert drafts is not None and drafts.tokens[:3].tolist() == [2, 3, 4]  # found, and judged as before
    made.force(rows[:1], ids(2), ids(7, 8))
    drafts = made.propose(rows, 1000, 1000, 50)
    assert drafts is not None and drafts.tokens[:3].tolist() == [2, 3, 4]


def test_forced_guesses_that_came_true_before_the_step_are_left_out() -> None:
    table, _ = running(1, LIMITS)
    made, row = Speculation(table, LIMITS, measured(), History()), np.arange(1)
    made.force(row, ids(20), np.arange(50, 70, dtype=np.int32))  # more than a row may have
    table.tokens[0, table.applied_tokens[0]], table.applied_tokens[0] = 50, table.applied_tokens[0] + 1
    drafts = made.propose(row, 1000, 1000, 25)
    assert drafts is not None and drafts.tokens.tolist() == list(range(51, 51 + drafts.counts[0]))


def test_forced_guesses_are_followed_by_what_a_search_finds_behind_them() -> None:
    table, _ = running(1, LIMITS)
    made, row = Speculation(table, LIMITS, measured(), History()), np.arange(1)
    made.force(row, ids(2), ids(2, 3))
    drafts = made.propose(row, 1000, 1000, 25)
    assert drafts is not None and drafts.tokens[:5].tolist() == [2, 3, 4, 1, 2]
