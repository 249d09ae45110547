"""The grid of `orcinus simulate`: cells, comparison, page, and what is said of a bad file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from services.simulator.command import main as command
from services.simulator.grid import FIGURES, Cell, Grid, cells_of, compare, read_grid

SMALL = """
policies = ["orcinus", "vllm"]
seeds = [1, 2]
loads = [0.5, 2]
options = {requests = 12, kv-blocks = 400}

[[workloads]]
name = "chat"
rate = 20
options = {prompt-tokens = "20:60", output-tokens = 10}
limits = [[0, 0], [200, 40]]

[[workloads]]
name = "offline"
options = {prompt-tokens = "20:60", output-tokens = 10}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return path


def result(goodput: float = 1, throughput: float = 100, mean: float = 1000, ttft: float = 100) -> dict[str, Any]:
    return {
        "slo_violations": 0,
        "requests": goodput * 10,
        "duration_s": 10,
        "throughput_tok_s": throughput,
        "e2e_ms": {"mean": mean},
        "ttft_ms": {"p99": ttft},
    }


def beaten_by(*pairs: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, list[str]]:
    """Return what beats ours, given (ours, theirs) of each seed."""
    cell = Cell("w", "no limits", 1.0, [])
    compare(cell, ["ours", "theirs"], {"ours": [pair[0] for pair in pairs], "theirs": [pair[1] for pair in pairs]})
    return cell.beaten_by()


def test_cells_are_workloads_by_limits_by_loads(tmp_path: Path) -> None:
    cells = cells_of(read_grid(written(tmp_path, SMALL)))
    assert [cell.name for cell in cells] == [
        "chat, no limits, load 0.5",
        "chat, no limits, load 2",
        "chat, 200 / 40 ms, load 0.5",
        "chat, 200 / 40 ms, load 2",
        "offline, no limits, at once",
    ]
    assert {"--rate=10.0", "--ttft-slo-ms=200.0", "--tbt-slo-ms=40.0", "--requests=12"} <= set(cells[2].arguments)
    assert "--at-once" in cells[4].arguments


@pytest.mark.parametrize(
    ("theirs", "better"),
    [
        (result(), []),
        (result(ttft=90), ["ttft_p99"]),
        (result(goodput=1.1, throughput=110), ["goodput", "throughput"]),
        (result(ttft=99), []),  # within the margin
        (result(ttft=50, throughput=95), []),  # worse in another figure
        (result(ttft=50, throughput=99), ["ttft_p99"]),
    ],
)
def test_policy_beats_ours_if_better_once_and_worse_never(theirs: dict[str, Any], better: list[str]) -> None:
    assert beaten_by((result(), theirs)) == ({"theirs": better} if better else {})


def test_ratio_is_the_geometric_mean_of_pairs_with_its_interval() -> None:
    cell = Cell("w", "no limits", 1.0, [])
    ours, theirs = [result(ttft=100), result(ttft=200)], [result(ttft=50), result(ttft=200)]
    compare(cell, ["ours", "theirs"], {"ours": ours, "theirs": theirs})
    mean, low, high = cell.ratios["ttft_p99"]["theirs"]
    half = 12.706 * (math.log(2) / math.sqrt(2)) / math.sqrt(2)
    assert (mean, low, high) == pytest.approx((2**0.5, 2**0.5 / math.exp(half), 2**0.5 * math.exp(half)))
    assert cell.best("ttft_p99") == pytest.approx(2**-0.5)
    assert cell.best("throughput") == 1


def test_a_figure_of_zero_has_a_finite_ratio() -> None:
    assert beaten_by((result(goodput=0), result(goodput=1))) == {"theirs": ["goodput"]}
    assert beaten_by((result(goodput=0), result(goodput=0))) == {}


def test_policy_that_finishes_no_request_is_never_better() -> None:
    none = {**result(goodput=0, throughput=0), "e2e_ms": {"mean": None}, "ttft_ms": {"p99": None}}
    cell = Cell("w", "no limits", 1.0, [])
    compare(cell, ["ours", "theirs"], {"ours": [result()], "theirs": [none]})
    assert all(ratios["theirs"][0] < 0.01 for ratios in cell.ratios.values())
    assert all(cell.best(figure.name) == 1 for figure in FIGURES)
    assert beaten_by((none, result())) == {"theirs": [figure.name for figure in FIGURES]}
    assert beaten_by((none, none)) == {}


def test_grid_in_which_requests_did_not_finish_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SMALL.replace("requests = 12", "requests = 12, deadline-ms = 1")
    page = tmp_path / "page.html"
    given = ["--grid", str(written(tmp_path, text)), "--page", str(page), "--json", "--jobs", "1"]
    assert command.main(given) == 1
    printed = capsys.readouterr()
    assert "240 requests of 240 did not finish" in printed.err
    values = [cell["values"] for cell in json.loads(printed.out, parse_constant=pytest.fail)["cells"]]
    assert all(value["latency"] == {"orcinus": None, "vllm": None} for value in values)


def test_held_back_cells_depend_on_their_names_alone() -> None:
    cells = [Cell(f"workload {number}", "no limits", 1.0, []) for number in range(300)]
    held = [cell.held_back for cell in cells]
    assert 70 < sum(held) < 130
    assert held == [Cell(cell.workload, cell.limits, cell.load, ["--other"]).held_back for cell in cells]


def test_grid_runs_and_its_page_shows_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    given = ["--grid", str(written(tmp_path, SMALL)), "--page", str(page), "--json", "--jobs", "1"]
    assert command.main(given) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["cells"]) == told["summary"]["all"]["cells"] == 5
    assert all(value > 0 for cell in told["cells"] for value in cell["values"]["throughput"].values())
    html = page.read_text()
    assert html.count("<td style=") == 5 * len(FIGURES)
    assert all(figure.title in html for figure in FIGURES)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"vllm"', '"vlm"', "vlm"),
        ("rate = 20", "rate = -1", "workloads.0.rate: -1: "),
        ("seeds = [1, 2]", "seeds = []", "seeds"),
        ("seeds = [1, 2]", "seeds = [1, -3]", "seeds.1: -3: "),
        ("seeds = [1, 2]", "seeds = [1, 2, 1]", "seed 1 is given twice"),
        ("loads = [0.5, 2]", "loads = [0.5, -2]", "loads.1: -2: "),
        ("loads = [0.5, 2]", "loads = [0.5, 0.5]", "load 0.5 is given twice"),
        ("[200, 40]]", "[0, 0]]", "workload 'chat': pair of limits (0.0, 0.0) is given twice"),
        ('"vllm"]', '"vllm", "vllm"]', "policy 'vllm' is given twice"),
        ("requests = 12", "requests = -2", "-2 must not be negative"),
        ("requests = 12", "request = 12", "request"),
        ('"20:60"', '"60:20"', "60:20"),
        ("kv-blocks = 400", 'find = "knee"', "find: a grid sets this itself"),
        ('"offline"', '"chat"', "'chat' is given twice"),
        ("[[workloads]]", "[[workloads", "is not TOML"),
        ("seeds = [1, 2]", "seeds = [1, 2]\nextra = 3", "extra"),
    ],
)
def test_bad_file_gets_an_error_that_names_the_value(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--grid", str(written(tmp_path, SMALL.replace(old, new, 1)))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and "Traceback" not in error


def test_missing_file_and_page_without_grid_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--grid", str(tmp_path / "none.toml")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert command.main(["--page", "x.html"]) == 2
    assert "add --grid" in capsys.readouterr().err


def test_too_many_runs_are_refused_before_any_starts() -> None:
    grid = Grid.model_validate(
        {
            "policies": ["orcinus", "vllm"],
            "seeds": list(range(50)),
            "loads": [float(load) for load in range(1, 51)],
            "workloads": [{"name": f"w{number}", "rate": 1} for number in range(100)],
        }
    )
    with pytest.raises(ValueError, match="500,000 runs"):
        cells_of(grid)
