"""Generated sections: every page shows its committed results, and a template cannot hide a missing field."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest

from bench import render, result


@pytest.mark.parametrize("page", list(render.pages()), ids=lambda page: page.name)
def test_page_shows_the_committed_results(page: Path) -> None:
    assert render.fill(page.read_text()) == page.read_text(), "run `python -m bench.render`"


def test_every_template_has_a_section_in_a_page() -> None:
    pages = "".join(page.read_text() for page in render.pages())
    assert [path.stem for path in render.TEMPLATES.glob("*.md") if f"<!-- render: {path.stem}" not in pages] == []


def test_fill_replaces_only_what_stands_between_markers() -> None:
    page = "before\n<!-- render: serve-demo -->\nold\n<!-- end -->\nafter\n"
    filled = render.fill(page)
    assert filled.startswith("before\n<!-- render: serve-demo -->\n| requests |") and "old" not in filled
    assert filled.endswith("|\n<!-- end -->\nafter\n")
    with pytest.raises(jinja2.TemplateNotFound):
        render.section("no-such-bench")
    with pytest.raises(jinja2.UndefinedError):
        render.section("serve-demo", results={"serve-demo": {"runs": [{"loop": "closed"}]}})


def test_check_names_stale_pages_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- render: gateway -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(render, "pages", lambda: [page])
    monkeypatch.setattr(render, "ROOT", tmp_path)
    assert render.main(["--check"]) == 1
    assert "page.md: stale" in capsys.readouterr().err and "old" in page.read_text()
    assert render.main([]) == 0 and "old" not in page.read_text()
    assert render.main(["--check"]) == 0


def test_provenance_keeps_the_command_as_one_line() -> None:
    facts = result.provenance(["orcinus", "bench", "--note", "two words"], "numpy")
    assert facts["command"] == "orcinus bench --note 'two words'"
    assert list(facts) == ["command", "date", "commit", "machine", "versions"]
    assert set(facts["versions"]) == {"python", "numpy"}


def test_write_puts_rows_on_lines_when_asked(tmp_path: Path) -> None:
    found = {"rows": [{"a": 1}, {"a": 2}], "note": "x"}
    for rows_on_lines in (False, True):
        result.write(tmp_path / "result.json", found, rows_on_lines)
        assert json.loads((tmp_path / "result.json").read_text()) == found
    assert (tmp_path / "result.json").read_text().splitlines()[2] == '  {"a": 1},'


def test_runs_are_gathered_into_one_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(result, "RESULTS", tmp_path)
    runs = [tmp_path / "a.json", tmp_path / "b.json"]
    for number, path in enumerate(runs):
        path.write_text(json.dumps({"number": number}))
    assert result.main(["engine", "--note", "quiet", *map(str, runs)]) == 0
    assert result.read("engine") == {"note": "quiet", "runs": [{"number": 0}, {"number": 1}]}
    assert result.read("no-such-result") is None
