"""What `orcinus up --models` starts for each model of a file, and what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launcher import up
from services.launcher.model_check import GIB, WORK_BYTES, Share, sum_problem
from shared.errors import ConfigurationError

FILE = """
models:
  small: {source: a, quantize: int8, policy: sarathi}
  large: {source: b, workers: 2, threads: 3}
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    for name in "ab":
        (tmp_path / name).mkdir()
    path = tmp_path / "models.yaml"
    path.write_text(FILE)
    return str(path)


def test_each_model_has_its_settings_over_those_of_all(models: str) -> None:
    options = up.values_by_model({"models": models, "quantize": "none", "block_size": "32"})
    small, large = map(up.ModelStack.of, options)
    assert [stack.gateway.served_model_name for stack in (small, large)] == ["small", "large"]
    assert (small.worker.quantize, small.scheduler.policy, small.launcher.roles()) == ("int8", "sarathi", ["both"])
    assert (large.worker.quantize, large.worker.threads, large.launcher.roles()) == ("none", 3, ["both", "both"])
    assert {stack.worker.block_size for stack in (small, large)} == {32}
    named = up.values_by_model({"models": models, "served_model_name": "large"})
    assert [each["served_model_name"] for each in named] == ["large", "small"], "the gateway's own is the first"
    assert up.values_by_model({"model": models}) == [{"model": models}]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"model": "elsewhere"}, "has no model 'elsewhere'"),
        ({"prefill": "1", "decode": "1"}, "--models: excludes PREFILL and DECODE"),
    ],
)
def test_options_that_exclude_the_file_are_refused(models: str, more: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        up.values_by_model({"models": models, **more})


def test_models_that_do_not_fit_together_are_refused_with_their_sizes() -> None:
    shares = [Share("small", GIB, 1), Share("large", 2 * GIB, 2, kv_fraction=0.1)]
    free = 10 * GIB  # 1 + (2 + 1) * 2 and work for each
    assert sum_problem(shares, 7 * GIB + 2 * WORK_BYTES + free) == ""
    assert sum_problem(shares, free) == ""
    assert sum_problem(shares, 7 * GIB) == (
        "2 models: need 7.4 GiB together (small 1.5, large 5.9 (2 workers)), 7.0 are free; choose fewer or smaller "
        "models, fewer workers, quantize, or a smaller kv_memory_fraction"
    )


def test_processes_are_counted_over_all_models(models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "on_gpu", lambda worker: False)
    stacks = [up.ModelStack.of(each) for each in up.values_by_model({"models": models})]
    specs = up.process_specs(stacks, None, "unix:///x", None, None, tmp_path, {})
    found = [(spec.name, spec.env["ORCINUS_SERVED_MODEL_NAME"], spec.env.get("ORCINUS_WORKER_ID")) for spec in specs]
    assert found == [
        ("worker-0", "small", "worker-0"), ("scheduler-0", "small", None),
        ("worker-1", "large", "worker-1"), ("worker-2", "large", "worker-2"), ("scheduler-1", "large", None),
        ("gateway-0", "small", None),
    ]  # fmt: skip
    assert specs[-1].env["ORCINUS_MODELS"] == models


@pytest.mark.parametrize("is_given", [False, True])
def test_files_are_kept_in_the_run_directory_unless_a_folder_is_given(
    models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    monkeypatch.setattr(up, "on_gpu", lambda worker: False)
    values = {"models": models, "run_dir": str(tmp_path / "run")}
    values |= {"files_dir": str(tmp_path / "mine")} if is_given else {}
    stacks = [up.ModelStack.of(each) for each in up.values_by_model(values)]
    gateway = up.process_specs(stacks, None, "unix:///x", None, None, tmp_path, {})[-1]
    expected = tmp_path / "mine" if is_given else tmp_path / "run" / "files"
    assert (gateway.env or {})["ORCINUS_FILES_DIR"] == str(expected)
