"""The article's scheduler: step tables that its own program made, and the format that they are exchanged in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.simulator.command.main import main
from services.simulator.literature.cases import PROGRAMS, BadCase, Case, read_cases, run_case
from services.simulator.literature.core import Core
from services.simulator.literature.priorities import drawn, usage_example
from services.simulator.policies.article import CORRECTED, Arrival, Article, Settings

CASES = Path(__file__).parent / "data" / "article_cases.json"


def case_of(*requests: Arrival, **settings: Any) -> Case:
    return Case("a case", {}, list(requests), Settings(**settings), None)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.given["name"]) for case in read_cases(CASES)])
def test_every_step_equals_the_programs(case: Case) -> None:
    assert run_case(case, Article(case.settings)) == case.expected


def test_the_last_chunk_samples_when_corrected() -> None:
    """100 tokens are 64 and 36; then one decode of the second output."""
    case = case_of(Arrival(0, 100, 2, 2, 2000, 100))
    assert run_case(case, Article(case.settings)) == [(0, 64, 0, 1, 0), (0, 36, 0, 1, 0), *[(1, 0, 0, 1, 0)] * 2]
    corrected = run_case(case, Article(case.settings, CORRECTED))
    assert corrected == [(0, 64, 0, 1, 0), (0, 36, 0, 1, 0), (1, 0, 0, 1, 0)]


def test_a_preempted_sequence_recomputes_its_outputs_when_corrected() -> None:
    """The urgent one arrives after 3 steps, 1 prefill and 2 decodes, when the other has 3 outputs: 20 tokens, then 23.

    It yields in each step in which the urgent one has an output, and enters again at once.
    """
    requests = Arrival(0, 20, 9, 2, 2000, 100), Arrival(60, 30, 3, 1, 2000, 10)
    case = case_of(*requests)
    rows = run_case(case, Article(case.settings, CORRECTED))
    assert rows[3:7] == [(1, 30, 0, 2, 0), (1, 24, 0, 2, 1), (1, 25, 0, 2, 1), (1, 0, 0, 1, 0)]


def test_first_steps_of_the_usage_example_equal_those_by_hand() -> None:
    """Highs first, by number. Step 1: 128 of number 0, all; 178 of 5, 228 of 10 and 256 of 15 to 35 make 1,814, so 40
    is the last to enter. Rounded down they are 128, 192 and 256, which leaves 40 a chunk of 256.

    Step 2: one decode; last chunks of 50, 36 and 22, then 64, 64, 128, 192 and 256 of 20 to 40, which leave 1,235:
    45 to 60 enter with 256 and 65 with 211, rounded down 192.
    """
    rows = run_case(usage_example(), PROGRAMS["article"](usage_example()))
    assert rows[0] == (0, 128 + 128 + 192 + 6 * 256, 91, 9, 0)
    assert rows[1] == (1, 50 + 36 + 22 + 64 + 64 + 128 + 192 + 256 + 4 * 256 + 192, 86, 14, 0)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 20))])
def test_the_preset_keeps_to_the_corrected_program(seed: int) -> None:
    case = drawn(seed)
    rows = run_case(case, PROGRAMS["article-corrected"](case))
    assert rows and run_case(case, PROGRAMS["iteration-level"](case)) == rows


@pytest.mark.parametrize("name", ["chunks-around-64", "limit-at-risk", "more-decodes-than-budget", "no-time"])
def test_the_preset_keeps_to_the_corrected_program_at_its_quirks(name: str) -> None:
    (case,) = [case for case in read_cases(CASES) if case.given["name"] == name]
    assert run_case(case, PROGRAMS["iteration-level"](case)) == run_case(case, PROGRAMS["article-corrected"](case))


def test_prompt_of_one_token_that_gets_no_chunk_stays_prompt() -> None:
    """Both enter, and the one that came later has less time: its chunk is the whole budget of 10."""
    case = case_of(Arrival(0, 1, 5, 2, 2000, 100), Arrival(0, 70, 5, 2, 300, 100), batch_tokens=10, steps=1)
    core = Core(case.settings, longest=75)
    assert run_case(case, core) == run_case(case, PROGRAMS["article-corrected"](case)) == [(0, 10, 0, 2, 0)]
    core.core.check()


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (case_of(Arrival(0, 0, 2, 2, 1, 1)), "0 + 2 tokens"),
        (case_of(Arrival(0, 100, 2, 2, 1, 1), blocks=6), "in 6 blocks"),
        (case_of(Arrival(0, 1, 2, 2, 1, 1), chunk=0), "settings: chunk: 0"),
        (case_of(Arrival(0, 1, 2, 2, 1, 1), fifo=False), "fifo: false"),
    ],
)
def test_the_preset_refuses_cases_that_the_service_would_refuse(case: Case, says: str) -> None:
    with pytest.raises(BadCase, match=re.escape(says)):
        PROGRAMS["iteration-level"](case)


def test_steps_prints_the_file_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", str(CASES), "--steps"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(CASES.read_text())


def test_check_counts_equal_cases_and_exits_1_on_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = json.loads(CASES.read_text())[:3]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    assert main(["--cases", str(file), "--check"]) == 0
    assert capsys.readouterr().out == "3 of 3 cases equal\n"
    cases[1]["steps"][2][3] += 1
    cases[2]["steps"].pop()
    file.write_text(json.dumps(cases))
    assert main(["--cases", str(file), "--check"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "1 of 3 cases equal\n"
    assert "case 'chunks-around-64': differs first in step 3: running " in printed.err
    assert "case 'limit-at-risk': " in printed.err


REQUEST = [0, 1, 1, 2, 2000, 100]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "is not an array"),
        ([], "no case; give at least one"),
        ([3], "case number 1: 3 is not an object"),
        ([{"requests": [REQUEST]}], "case number 1: name: missing"),
        ([{"name": "", "requests": [REQUEST]}], "name: '' is no name"),
        ([{"name": "a"}], "case 'a': requests: missing"),
        ([{"name": "a", "requests": []}], "case 'a': requests: empty"),
        ([{"name": "a", "requests": [REQUEST], "seed": 1}], "case 'a': unknown field 'seed'; drop it"),
        ([{"name": "a", "requests": [[0, 1]]}], "case 'a': requests[0]: [0, 1] is no request; give [arrival_ms,"),
        ([{"name": "a", "requests": [[-1, *REQUEST[1:]]]}], "requests[0]: arrival_ms: -1 is negative"),
        ([{"name": "a", "requests": [REQUEST, [0, "8", 1, 2, 9, 9]]}], "requests[1]: prompt: '8' is not an integer"),
        ([{"name": "a", "requests": [[0, 1, True, 2, 9, 9]]}], "max_new: True is not an integer"),
        ([{"name": "a", "requests": [[0, 1, 1, 4, 9, 9]]}], "priority: 4 is too large; give 0 to 3"),
        ([{"name": "a", "requests": [[0, 1, 1, 2, float("inf"), 9]]}], "ttft_ms: inf is not a finite number"),
        ([{"name": "a", "requests": [[0, 1, 1, 2, 9, None]]}], "tbt_ms: None is not a number"),
        ([{"name": "a", "requests": [REQUEST], "settings": []}], "settings: [] is not an object"),
        ([{"name": "a", "requests": [REQUEST], "settings": {"chunks": 3}}], "settings: unknown field 'chunks'"),
        ([{"name": "a", "requests": [REQUEST], "settings": {"chunk": -3}}], "settings: chunk: -3 is negative"),
        ([{"name": "a", "requests": [REQUEST], "settings": {"chunk": 2.5}}], "settings: chunk: 2.5 is not an integer"),
        ([{"name": "a", "requests": [REQUEST], "settings": {"fifo": 1}}], "fifo: 1 is neither true nor false"),
        ([{"name": "a", "requests": [REQUEST], "settings": {"token_ms": "x"}}], "token_ms: 'x' is not a number"),
        ([{"name": "a", "requests": [REQUEST]}], "case 'a': steps: missing"),
        ([{"name": "a", "requests": [REQUEST], "steps": 3}], "steps: 3 is not an array"),
        ([{"name": "a", "requests": [REQUEST], "steps": [[1, 2, 3, 4]]}], "steps[0]: [1, 2, 3, 4] is no step"),
        ([{"name": "a", "requests": [REQUEST], "steps": [[-1, 2, 3, 4, 5]]}], "steps[0]: decode: -1 is negative"),
    ],
)
def test_bad_case_is_refused_with_its_field_value_and_remedy(
    wrong: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(wrong))
    assert main(["--cases", str(file), "--check"]) == 2
    printed = capsys.readouterr()
    assert says in printed.err and printed.err.startswith("error: ") and not printed.out
