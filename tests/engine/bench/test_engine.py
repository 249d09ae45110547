"""What `orcinus bench engine` says of a model: which kernels ran, what an iteration must read, torch beside it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bench.engine import adapters
from bench.engine import cases as engine_cases
from bench.engine import main as bench
from bench.engine.cases import CASES, Case, TorchMatrices, layer_matrices, work
from bench.studies.step_time import DECODES, PROMPT, run
from kernels.cpu.library import load
from protos import worker_pb2
from services.worker.adapters.peft import linear_layers
from services.worker.models.config import load_config
from shared.errors import ConfigurationError
from shared.settings import DEMO_MODEL
from tests.engine.driver import make_engine
from tests.support.checkpoints.models import make_llama
from tests.support.compiler import demand_compiler


@pytest.fixture
def _compiled() -> None:
    demand_compiler()
    load()


@pytest.mark.usefixtures("_compiled")
def test_int8_layers_are_read_as_bytes() -> None:
    case = Case("decode-1", 1, 160)
    plain, int8 = (make_engine(DEMO_MODEL, block_size=16, quantize=q, deterministic=True) for q in ("none", "int8"))
    c = plain.config
    numbers = c.layers * sum(outputs * inputs for outputs, inputs in layer_matrices(c))
    scales = c.layers * sum(outputs for outputs, _ in layer_matrices(c))
    assert plain.dtype == torch.float32
    assert work(plain, case, 8)[0] - work(int8, case, 8)[0] == 3 * numbers - 4 * scales
    assert work(plain, case, 8)[1] == work(int8, case, 8)[1]


def test_what_cannot_be_profiled_names_an_option_that_helps() -> None:
    engine = make_engine(DEMO_MODEL, block_size=16, kernels="reference")
    with pytest.raises(ConfigurationError, match="reference kernels cannot be profiled; use --kernels cpu"):
        engine.profile(worker_pb2.Step())


def test_torchs_matrices_are_made_once_for_a_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(DEMO_MODEL)
    monkeypatch.setattr(engine_cases, "TORCH_BYTES", 1)
    monkeypatch.setattr(engine_cases, "TORCH_REPEATS", 1)
    made = TorchMatrices(config, torch.float32)
    rows: list[tuple[int, ...]] = []
    now = iter([0.0, 2.0, 5.0])  # the layer takes 2 s, the head 3 s

    def linear(x: torch.Tensor, weight: torch.Tensor) -> None:
        rows.append((x.shape[0], *weight.shape))

    monkeypatch.setattr(engine_cases.F, "linear", linear)
    monkeypatch.setattr(engine_cases, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    assert made.ms(9, 3) == pytest.approx(1000 * (2.0 * config.layers + 3.0))
    assert rows == [*((9, *shape) for shape in layer_matrices(config)), (3, config.vocab_size, config.hidden_size)]


def test_torchs_matrices_of_a_device_are_timed_by_its_clock() -> None:
    config = load_config(DEMO_MODEL)
    calls: list[int] = []

    class Stopwatch:
        def random(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

        def eager(self, timed: list[Any]) -> float:
            calls.append(len(timed))
            return 100.0 if len(calls) == 1 else 7.0  # microseconds of a layer's matrix, then of the head

    made = TorchMatrices(config, torch.bfloat16, cast(Any, Stopwatch()))
    assert made.ms(9, 3) == pytest.approx((100.0 * config.layers * len(layer_matrices(config)) + 7.0) / 1000)
    assert calls == [config.layers * len(layer_matrices(config)), 1]


@pytest.mark.parametrize(
    ("lookahead", "order"),
    [
        (0, "give 1, answer 1, give 2, answer 2, give 3, answer 3"),
        (1, "give 1, give 2, answer 1, give 3, answer 2, answer 3"),
    ],
)
def test_engine_that_overlaps_is_given_step_before_it_answers_last(lookahead: int, order: str) -> None:
    said: list[str] = []

    class Recorder:
        def submit(self, step: int) -> int:
            said.append(f"give {step}")
            return step

        def finish(self, flight: int) -> int:
            said.append(f"answer {flight}")
            return flight

    steps = iter([1, 2, 3])
    driver = SimpleNamespace(next=lambda: next(steps), executed=lambda: None)
    results, walls = engine_cases.run(cast(Any, Recorder()), cast(Any, driver), 3, lookahead)
    assert ", ".join(said) == order
    assert results == [1, 2, 3] and len(walls) == 3


def test_a_mixture_of_experts_has_no_floor_and_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1, kind="mixtral").path
    assert bench.main(["--model", str(path)]) == 2
    assert "no floor for a mixture of experts" in capsys.readouterr().err


@pytest.mark.usefixtures("_compiled")
def test_json_says_which_kernels_ran_and_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--deterministic", "--profile", "--cases", CASES[0].name, "--steps", "1", "--threads", "1", "--json"]
    assert bench.main(given) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["model"]["backend"] == "cpu" and found["model"]["numerics"].startswith("cpu ")
    assert found["model"]["deterministic"] and found["model"]["quantize"] == "none"
    assert found["results"][0]["profile_us"]["linear"] > 0


@pytest.mark.usefixtures("_compiled")
def test_iterations_with_adapters_stand_beside_those_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adapters, "ROUNDS", 1)
    given = ["--kernels", "cpu", "--dtype", "bfloat16", "--adapters", "1,8", "--steps", "1", "--threads", "1"]
    assert bench.main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in found["results"]] == ["decode-8", "decode-32"]
    layers = linear_layers(load_config(DEMO_MODEL)).values()
    bytes_of_one = adapters.RANK * sum(2 * (outputs + inputs) for outputs, inputs in layers)
    for row in found["results"]:
        one, eight = row["adapters"]
        assert (one["adapters"], eight["adapters"]) == (1, 8)
        assert (one["bytes_ratio"] - 1) * row["read_mb"] * 1e6 == pytest.approx(bytes_of_one)
        assert eight["bytes_ratio"] - 1 == pytest.approx(8 * (one["bytes_ratio"] - 1))
        assert row["forward_ms"] > 0 and eight["forward_ratio"] > 0


def test_numbers_of_adapters_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("0,8", "65", "one", ""):
        assert bench.main(["--adapters", text]) == 2
        assert "numbers from 1 to 64" in capsys.readouterr().err


@pytest.mark.usefixtures("_compiled")
def test_pool_holds_the_sequences_of_the_longest_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """32 contexts of 1,024 tokens are more than a worker's pool on one thread has by default."""
    model = make_llama(tmp_path / "tiny", seed=4, requests=1, output_tokens=1, max_position_embeddings=1100)
    given = ["--kernels", "cpu", "--kv-dtype", "int8", "--cases", "decode-32-long", "--threads", "1"]
    assert bench.main(["--model", str(model.path), *given, "--steps", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in found["results"]] == ["decode-32-long"]
    assert found["model"]["kv_dtype"] == "int8"
    assert found["model"]["block_bytes"] == 2 * 2 * 2 * 16 * (
        16 + 4
    )  # K and V, layers, KV heads, tokens, codes and scale


def test_engine_takes_the_steps_of_the_study() -> None:
    engine = make_engine(
        DEMO_MODEL, block_size=16, max_seqs=DECODES + 1, max_step_tokens=DECODES + PROMPT, kv_blocks=4160
    )
    seen = run(engine, 1, 300)
    assert all(one.measured_ns > 0 for rows in seen.values() for one in rows)
    assert {bool(one.prompt_tokens) for one in seen["cpu"]} == {True, False}
