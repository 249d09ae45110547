"""The order in which masks are computed: tenants in turn, then a tenant's sequences by arrival."""

from __future__ import annotations

from services.worker.grammar import Question, Turns
from shared.text.grammar_process import NO_TOKENS


def put(turns: Turns, *which: tuple[int, int]) -> list[Question]:
    """Add questions of (tenant, key)."""
    questions = []
    for tenant, key in which:
        questions.append(Question(tenant, key, "", NO_TOKENS))
        turns.put(questions[-1])
    return questions


def order(turns: Turns) -> list[int]:
    keys = []
    while (question := turns.take()) is not None:
        keys.append(question.key)
    return keys


def test_tenants_take_turns_and_sequences_go_by_arrival() -> None:
    turns = Turns()
    put(turns, (7, 1), (7, 2), (7, 3), (7, 4), (3, 5), (9, 6), (3, 7))
    assert order(turns) == [1, 5, 6, 2, 7, 3, 4]


def test_tenant_waits_for_one_question_of_each_other_tenant() -> None:
    """Also when those have more all the time."""
    turns = Turns()
    put(turns, *((1, key) for key in range(100)), *((2, key) for key in range(100, 200)))
    for key in range(500, 520):
        put(turns, (3, key))
        taken = []
        while key not in taken and (question := turns.take()) is not None:
            taken.append(question.key)
            if question.tenant != 3:
                put(turns, (question.tenant, question.key))
        assert len(taken) <= 3


def test_cancelled_question_takes_no_turn() -> None:
    turns = Turns()
    first, second, _, _ = put(turns, (1, 1), (1, 2), (2, 3), (1, 4))
    assert first.masks.cancel() and second.masks.cancel()
    assert order(turns) == [4, 3]
    gone = put(turns, (5, 6))[0]
    assert gone.masks.cancel()
    assert turns.take() is None


def test_taken_question_cannot_be_cancelled() -> None:
    turns = Turns()
    put(turns, (1, 1))
    question = turns.take()
    assert question is not None and not question.masks.cancel()
