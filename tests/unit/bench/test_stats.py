"""Figures of `orcinus bench serve` and tables of the pages that come from results."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest

from bench import render, result
from bench.serve.stats import DEFAULT_SLO, Record, summarise


def finished(scheduled: float, events: list[float], tokens: list[int], end: float, prompt: int = 10) -> Record:
    return Record(
        index=0, prompt_tokens=prompt, asked_tokens=sum(tokens), scheduled_s=scheduled, sent_s=scheduled + 0.001,
        end_s=end, event_s=events, event_tokens=tokens, finish="length",
    )  # fmt: skip


def test_latencies_of_one_request_are_those_worked_out_by_hand() -> None:
    # Due at 100 s; 1 token at 100.5, 2 at 100.6, 1 at 100.9; stream over at 101.0.
    record = finished(100.0, [100.5, 100.6, 100.9], [1, 2, 1], 101.0)
    figures = summarise([record])
    assert figures["ttft_ms"]["p50"] == pytest.approx(500)
    assert sorted(record.gaps_s()) == pytest.approx([0.0, 0.1, 0.3])  # the two tokens of one event are 0 apart
    assert figures["tbt_ms"]["p50"] == pytest.approx(100)
    assert figures["tpot_ms"]["p50"] == pytest.approx(400 / 3, abs=1e-3)
    assert figures["e2e_ms"]["p50"] == pytest.approx(1000)
    assert figures["normalized_latency_ms"]["p50"] == pytest.approx(250)
    assert figures["late_ms"]["p99"] == pytest.approx(1)
    assert figures["output_tok_s"] == pytest.approx(4.0)
    assert figures["throughput_tok_s"] == pytest.approx(14.0)


def test_rates_divide_by_first_due_time_to_last_end() -> None:
    second = finished(4.0, [9.0], [1], 10.0)
    second.sent_s = 8.9
    figures = summarise([finished(0.0, [1.0], [1], 1.0), second])
    assert (figures["wall_s"], figures["ttft_ms"]["p99"]) == (10.0, pytest.approx(5000, rel=0.02))  # from the due time
    assert figures["late_ms"]["p99"] == pytest.approx(4900, rel=0.02)
    assert figures["output_tok_s"] == pytest.approx(0.2)
    assert figures["throughput_tok_s"] == pytest.approx(2.2)
    assert figures["request_rps"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("ttft", "gaps", "good"),
    [
        (2.0, [0.1], True),
        (2.001, [0.1], False),
        (0.5, [0.05] * 98 + [0.101], False),  # 99 gaps: the largest one decides
        (0.5, [0.05] * 199 + [0.5], True),  # 200 gaps: one in two hundred is above the P99
        (0.5, [0.05] * 190 + [0.5] * 10, False),
        (0.5, [], True),
    ],
)
def test_goodput_takes_ttft_and_p99_of_the_requests_own_gaps(ttft: float, gaps: list[float], good: bool) -> None:
    events = [ttft]
    for gap in gaps:
        events.append(events[-1] + gap)
    record = finished(0.0, events, [1] * len(events), events[-1])
    # Sums of floats are off by some ulps; a hair inside the bound keeps the exact case exact.
    if good:
        record.event_s = [t * (1 - 1e-12) for t in record.event_s]
    assert record.is_good(DEFAULT_SLO) is good


def test_failed_request_is_counted_by_kind_and_enters_no_latency() -> None:
    failed = Record(1, 10, 4, scheduled_s=0.0, sent_s=0.0, end_s=20.0, event_s=[5.0], event_tokens=[1], error="cut")
    figures = summarise([finished(0.0, [1.0, 2.0], [1, 1], 2.0), failed])
    assert (figures["requests"], figures["finished"], figures["failed"]) == (2, 1, 1)
    assert figures["errors"] == {"cut": 1}
    assert figures["ttft_ms"]["p99"] == pytest.approx(1000)
    assert figures["output_tok_s"] == pytest.approx(2 / 20)  # it ends the run all the same
    alone = summarise([Record(0, 1, 1, 0.0, sent_s=0.0, end_s=0.0, error="connect")])
    assert (alone["ttft_ms"]["p50"], alone["output_tok_s"]) == (None, None)


def test_tokens_reported_beyond_events_are_gaps_of_zero() -> None:
    record = finished(0.0, [1.0, 1.4], [1, 1], 1.4)
    record.reported_tokens = 5
    assert record.output_tokens == 5
    assert sorted(record.gaps_s()) == pytest.approx([0.0, 0.0, 0.0, 0.4])
    assert record.tpot_s() == pytest.approx(0.1)


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
