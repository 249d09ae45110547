"""The texts of the study of speculation are what their names say."""

from __future__ import annotations

import json
from pathlib import Path

from bench.result import ROOT
from bench.studies.speculation import texts


def test_edit_has_the_old_passage_as_prompt_and_the_new_as_output(tmp_path: Path) -> None:
    old, new = [f"line {at}" for at in range(40)], [f"line {at}" for at in range(40)]
    new[20] = "another"
    for name, lines in (("old", old), ("new", new), ("same", old)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("\n".join(lines))
    ((prompt, output),) = texts.edits(tmp_path / "old", tmp_path / "new")
    assert "line 20" in prompt and "another" not in prompt
    assert "another" in output and "line 19\n" in output and "line 20\n" not in output
    assert not list(texts.edits(tmp_path / "old", tmp_path / "same"))


def test_records_are_json_of_one_schema() -> None:
    found = list(texts.records())
    assert len(found) > 20
    assert len({tuple(json.loads(output)) for _, output in found}) == 1


def test_answer_quotes_its_prompt_and_prose_does_not() -> None:
    for prompt, output in texts.quotes(ROOT / "docs", 1):
        quoted = output.removeprefix("It says: ").split(" Also: ")[1]
        assert quoted in prompt
    pages = list(texts.prose(ROOT / "docs"))
    assert len(pages) > 100
    assert all(first + second in texts.passages(ROOT / "docs") for first, second in pages[:20])
