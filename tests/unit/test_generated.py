"""Generated tests take the same examples in each run: tests/conftest.py."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

LEAST = 10**15
CONSTANT = LEAST + 123_456_789


def drawn() -> list[int]:
    numbers = []

    @given(st.integers(LEAST, LEAST + 10**9))
    @settings(max_examples=300, database=None)
    def draw(number: int) -> None:
        numbers.append(number)

    draw()
    return numbers


def test_new_constant_in_a_module_changes_no_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not settings.default.derandomize:
        pytest.skip("this run looks for new examples")
    before = drawn()
    (tmp_path / "some_module.py").write_text(f"LIMIT = {CONSTANT}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("some_module")
    assert drawn() == before and len(set(before)) > 200
