"""The study of forced drafts: answers are served whole, and what a grammar forces comes in fewer steps."""

from __future__ import annotations

from bench.studies.forced import open_process, recorded, run


def test_first_answers_of_a_schema_take_fewer_steps_with_forced_drafts() -> None:
    process = open_process()
    try:
        found, forced = (run(process, "forms", 2, 1, False, given) for given in (False, True))
    finally:
        process.close()
    assert found.tokens == forced.tokens == sum(answer.tokens.size for answer in recorded("forms", 2))
    assert found.rows == found.tokens, "something was found in the first answers"
    assert 2 * forced.right > forced.drafted > 0
    assert 4 * forced.rows < 3 * found.rows
