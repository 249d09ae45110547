"""The study of forced drafts: answers are served whole, and what a grammar forces comes in fewer steps."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from bench.studies.forced import MODEL, open_process, recorded, run
from shared.text import grammar_process
from shared.text.grammar_process import MEMORY_BYTES, SPENT, _answer, _Followed
from shared.text.grammars import Grammars


def test_first_answers_of_a_schema_take_fewer_steps_with_forced_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The far end runs in this process, so that it has time to look ahead on any machine."""
    vocab = Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab_size()
    process, followed = open_process(), _Followed(Grammars(MODEL, vocab), MEMORY_BYTES)
    monkeypatch.setattr(grammar_process, "LOOK_AHEAD_S", 60.0)
    monkeypatch.setattr(process.jail, "ask", lambda question: SPENT.pack(0.0) + _answer(followed, question))
    found, forced = (run(process, "forms", 2, 1, False, given) for given in (False, True))
    process.close()
    assert found.tokens == forced.tokens == sum(answer.tokens.size for answer in recorded("forms", 2))
    assert found.rows == found.tokens, "something was found in the first answers"
    assert 2 * forced.right > forced.drafted > 0
    assert 4 * forced.rows < 3 * found.rows
