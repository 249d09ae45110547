"""The launcher expects a worker on the GPU where the worker's own choice of a backend puts it there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.launcher import doctor, model_check, up
from services.launcher.gpu.facts import Facts
from shared.errors import ConfigurationError
from shared.settings import LauncherSettings, WorkerSettings

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
INT8 = {"quantize": "int8"}


@pytest.fixture
def usable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (up, model_check, doctor):
        monkeypatch.setattr(module, "device_files", lambda: True)
    monkeypatch.setattr(up, "cuda_problem", lambda: "")
    monkeypatch.setattr(doctor, "gather", Facts)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that are started."""
    found: list[str] = []
    monkeypatch.setattr(up.subprocess, "run", lambda command, **_: found.append(command[-2]))
    return found


@pytest.mark.usefixtures("usable_gpu")
@pytest.mark.parametrize(
    ("given", "on_gpu"),
    [
        *((given, False) for given in ({"device": "cpu"}, {"kernels": "cpu"}, {"kernels": "emulator"}, INT8)),
        *((given, True) for given in ({}, {"device": "cuda", "kernels": "reference"}, {"kv_dtype": "fp8"})),
    ],
    ids=str,
)
def test_kernels_are_compiled_and_gpus_shared_where_the_worker_computes(
    given: dict[str, Any], on_gpu: bool, builds: list[str]
) -> None:
    """Which options put it where: tests/engine/worker/test_gpu_choice.py."""
    worker = WorkerSettings(**given)
    assert up.on_gpu(worker) == on_gpu and up.unused_gpu(worker) == ""
    up.compile_kernels(worker)
    assert len(builds) == (not on_gpu and worker.kernels in ("auto", "cpu"))
    assert ("CUDA_VISIBLE_DEVICES" in up.replica_env(worker, 1, 2)) == on_gpu
    (ranks,) = doctor.check_ranks(WorkerSettings(tp=2, **given))
    assert ("GPUs" in ranks.detail) == on_gpu


@pytest.mark.usefixtures("usable_gpu")
@pytest.mark.parametrize(
    ("config", "given", "on_gpu"),
    [
        (LLAMA, {}, True),
        (LLAMA | {"dtype": "float32"}, {}, False),
        (LLAMA | {"dtype": "float32"}, {"dtype": "bfloat16"}, True),
        (LLAMA | {"intermediate_size": 520}, {"tp": 2}, False),  # rows of 260 in a rank
        (LLAMA, {"tp": 8}, True),  # where the worker refuses
        (None, {}, True),
    ],
)
def test_int4_expects_the_gpu_where_the_worker_takes_it(
    tmp_path: Path, config: dict[str, Any] | None, given: dict[str, Any], on_gpu: bool
) -> None:
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    worker = WorkerSettings(model=tmp_path, **({"quantize": "int4"} | given))
    assert up.on_gpu(worker) == on_gpu
    (ranks,) = doctor.check_ranks(worker.model_copy(update={"pp": 2}))
    assert ("GPUs" in ranks.detail) == on_gpu


@pytest.mark.usefixtures("usable_gpu")
def test_w8a8_beside_a_gpu_is_refused_before_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for problem in ("model_problem", "shape_problem", "memory_problem"):
        monkeypatch.setattr(up, problem, lambda *_: "")
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    scheme = {"weights": weights, "input_activations": weights | {"strategy": "token", "dynamic": True}}
    stored = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": scheme}}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": stored}))
    with pytest.raises(ConfigurationError, match=r"in w8a8, which .* on a CPU alone; give DEVICE=cpu"):
        up.check_model(LauncherSettings(), WorkerSettings(model=tmp_path), "MODEL")
    up.check_model(LauncherSettings(), WorkerSettings(model=tmp_path, device="cpu"), "MODEL")


def test_gpu_that_cannot_be_used_is_not_expected(usable_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "cuda_problem", lambda: "no CuPy")
    assert not up.on_gpu(WorkerSettings()) and up.unused_gpu(WorkerSettings()) == "no CuPy"


@pytest.mark.parametrize(
    ("given", "option"),
    [
        *(({"kernels": kernels}, f"--kernels {kernels}") for kernels in ("reference", "cuda", "emulator")),
        ({"device": "cuda"}, "DEVICE=cuda"),
        *((given, "") for given in ({"device": "cpu"}, {"kernels": "cpu"}, {})),
    ],
)
def test_int8_kv_is_refused_before_start_without_cpu_kernels(given: dict[str, Any], option: str) -> None:
    said = f"--kv-dtype int8 needs the cpu kernels, and {option} rules them out; give DEVICE=cpu and --kernels cpu"
    problem = up.kv_problem(WorkerSettings(kv_dtype="int8", **given))
    assert problem.startswith(said) if option else problem == ""


@pytest.mark.parametrize("kernels", ["auto", "cpu", "reference"])
def test_fp8_kv_is_refused_before_start_with_reference_kernels(kernels: Any) -> None:
    problem = up.kv_problem(WorkerSettings(kv_dtype="fp8", kernels=kernels))
    said = "--kv-dtype fp8 needs the cpu or cuda kernels, and --kernels reference rules them out; give --kernels auto"
    assert problem.startswith(said) if kernels == "reference" else problem == ""
