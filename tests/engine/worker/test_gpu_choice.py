"""Where a worker computes, with which kernels and in which type, on machines with a GPU and without.

No GPU is needed: whether one can be used, and what is created then, are replaced.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from kernels import ops as kernel_ops
from kernels.cpu.build import BuildError
from kernels.cuda import gpu
from kernels.cuda.loader import CudaError
from kernels.formats import ROUNDINGS
from kernels.reference.backend import ReferenceOps
from services.worker import backend
from services.worker.checkpoint.stored import Stored
from services.worker.gpu_choice import KERNELS
from services.worker.kv.cache import Lengths, plan_blocks, plan_host_blocks, room_for
from services.worker.models.config import DecoderConfig, Mixture, load_config, rank_config
from services.worker.models.registry import FAMILIES, ExpertNames
from services.worker.models.weights import shard_of
from services.worker.parallel.state import ParallelState
from services.worker.quantization import METHODS, STORED
from shared.errors import ConfigurationError
from shared.settings import DEMO_MODEL, WorkerSettings
from tests.engine.worker.test_process import MIB, SHAPE

HALF = (torch.bfloat16, torch.float16)
EXPERTS = Mixture(ExpertNames(), 4, 2, intermediate_size=64, shared_size=0, normalize=True, layers=frozenset({0}))
BROKEN = "the driver is too old: install a newer one"


def config_of(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, **fields: Any) -> DecoderConfig:
    config = load_config(DEMO_MODEL)
    return dataclasses.replace(config, checkpoint_dtype=str(dtype).removeprefix("torch."), head_dim=head_dim, **fields)


class Made:
    """Stands for the operations of a backend."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device


@pytest.fixture(params=["usable", "broken", "none"])
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def on(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU that is usable, broken, or not there."""

    def demand(index: int) -> None:
        if machine != "usable":
            raise CudaError(BROKEN)

    monkeypatch.setattr(gpu, "demand_gpu", demand)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine != "none")
    monkeypatch.setattr(backend.kernel_ops, "create", Made)
    monkeypatch.setattr(backend, "cpu_library", lambda _: None)  # the C++ kernels have tests of their own


def chosen(config: DecoderConfig, **settings: Any) -> tuple[str, str, torch.dtype]:
    ops, dtype = backend.choose(WorkerSettings(**settings), config)
    return ops.name, ops.device.type, dtype


@pytest.mark.parametrize("dtype", HALF)
def test_auto_takes_a_usable_gpu_and_explains_an_unusable_one(
    machine: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on(machine, monkeypatch)
    widened = torch.float32 if dtype == torch.float16 else dtype
    expected = ("cuda", "cuda", dtype) if machine == "usable" else ("reference", "cpu", widened)
    assert chosen(config_of(dtype)) == expected
    assert (BROKEN in caplog.text) == (machine == "broken")


@pytest.mark.parametrize("given", [{}, {"device": "cuda"}, {"kernels": "reference"}])
def test_w8a8_is_refused_on_a_usable_gpu(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    on("usable", monkeypatch)
    config = config_of(stored=Stored("w8a8", 8))
    if given.get("kernels") != "reference":
        with pytest.raises(ConfigurationError, match=r"in w8a8, which .* on a CPU alone; give DEVICE=cpu"):
            chosen(config, **given)
    assert chosen(config, **given | {"device": "cpu"}) == ("reference", "cpu", torch.bfloat16)


@pytest.mark.parametrize("given", [{"device": "cuda"}, {"kernels": "cuda"}])
def test_requested_gpu_is_used_or_its_lack_is_an_error(
    machine: str, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(machine, monkeypatch)
    if machine == "usable":
        assert chosen(config_of(), **given) == ("cuda", "cuda", torch.bfloat16)
        assert chosen(config_of(), dtype="float16", **given) == ("cuda", "cuda", torch.float16)
    else:
        with pytest.raises(ConfigurationError, match=f"cuda: {BROKEN}"):
            chosen(config_of(), **given)


def test_weights_in_4_bits_go_to_a_usable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on("usable", monkeypatch)
    assert chosen(config_of(), quantize="int4") == ("cuda", "cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "words"),
    [({"dtype": torch.float32}, "the model is in float32"), ({"mixture": EXPERTS}, "experts in 16")],
)
def test_int4_that_the_cuda_kernels_lack_stays_on_the_cpu(
    config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on("usable", monkeypatch)
    assert chosen(config_of(**config), quantize="int4")[1] == "cpu"
    assert words in caplog.text
    with pytest.raises(ConfigurationError, match=words):
        chosen(config_of(**config), quantize="int4", device="cuda")


def test_formats_that_some_backends_lack_are_those_of_methods() -> None:
    import kernels.cuda.backend
    import kernels.emulator.device  # noqa: F401 - both register themselves

    assert KERNELS.keys() < METHODS.keys() | STORED.keys()
    assert METHODS.keys() == {"none", *ROUNDINGS}
    assert {name for names in KERNELS.values() for name in names} <= set(kernel_ops.names())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_choice_is_made_with_the_numbers_of_every_rank(tp: int) -> None:
    mixture = dataclasses.replace(EXPERTS, shared_size=128)
    for config in (config_of(heads=8, kv_heads=2, mixture=mixture), config_of(heads=8, kv_heads=4)):
        chosen_with = rank_config(config, tp, 1)
        for rank in range(tp):
            assert shard_of(config, ParallelState(tp, 1, rank)).config(config) == chosen_with


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"head_dim": 80}, "heads of 80 numbers, attention over fp8 has kernels for 64 and 128"),
        ({"dtype": torch.float32}, "the model is in float32.*--dtype bfloat16"),
        ({"score_softcap": 50.0}, "the model caps its scores"),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_fp8_without_a_kernel_is_refused_on_a_usable_gpu(
    device: str, config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("usable", monkeypatch)
    assert chosen(config_of(head_dim=128), kv_dtype="fp8", device=device)[0] == "cuda"
    with pytest.raises(ConfigurationError, match=f"{words}.*; give DEVICE=cpu or --kv-dtype auto"):
        chosen(config_of(**config), kv_dtype="fp8", device=device)


@pytest.mark.parametrize(
    "given",
    [{"device": "cpu"}, {"deterministic": True}, {"quantize": "int8"}, {"kernels": "reference"}, {"kernels": "cpu"}],
)
def test_what_only_a_cpu_can_do_stays_on_the_cpu(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    on("usable", monkeypatch)
    assert chosen(config_of(), **given)[1] == "cpu"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": "cuda", "deterministic": True}, "--deterministic is for CPUs alone and DEVICE=cuda"),
        ({"device": "cuda", "quantize": "int8"}, "--quantize int8 is for CPUs alone and DEVICE=cuda"),
        ({"device": "cuda", "kernels": "cpu"}, "--kernels cpu is for CPUs alone"),
        ({"kernels": "cuda", "quantize": "int8"}, "--quantize int8 is for CPUs alone and --kernels cuda"),
        ({"kernels": "cuda", "device": "cpu"}, "DEVICE=cpu rules it out"),
        ({"kernels": "cuda", "dtype": "float32"}, "--kernels cuda: the model is in float32.*--dtype bfloat16"),
        ({"kernels": "emulator", "dtype": "float32"}, "--kernels emulator: the model is in float32"),
        ({"kernels": "emulator", "device": "cuda"}, "runs on a CPU"),
        ({"kernels": "emulator", "deterministic": True}, "--deterministic needs the cpu kernels"),
        ({"device": "cuda", "block_size": 48}, "--block-size 48: on a GPU it is 16, 32"),
        ({"device": "cuda", "block_size": 8}, "--block-size 8"),
        ({"device": "cpu", "dtype": "float16"}, "--dtype float16 needs a GPU"),
        ({"device": "cuda", "kv_dtype": "int8"}, "--kv-dtype int8 is for CPUs alone and .* for a GPU"),
        ({"kernels": "cuda", "kv_dtype": "int8"}, "--kv-dtype int8 is for CPUs alone and .* for a GPU"),
        ({"kernels": "reference", "quantize": "int8"}, "--quantize int8 needs the cpu kernels; give --kernels auto or"),
        ({"kernels": "reference", "quantize": "int4"}, "--quantize int4 needs the cpu kernels; give --kernels auto or"),
        (
            {"kernels": "reference", "device": "cuda", "quantize": "int4"},
            "--quantize int4 needs the cuda kernels on a GPU; give DEVICE=cpu",
        ),
        (
            {"device": "cuda", "dtype": "float32", "quantize": "int4"},
            "--quantize int4 needs the cuda kernels on a GPU: the model is in float32.*; give DEVICE=cpu",
        ),
        ({"kernels": "reference", "kv_dtype": "int8"}, "--kv-dtype int8 needs the cpu kernels; give --kernels auto or"),
        ({"kernels": "reference", "kv_dtype": "fp8"}, "--kv-dtype fp8 needs the cpu kernels; give --kernels auto or"),
        (
            {"kernels": "reference", "device": "cuda", "kv_dtype": "fp8"},
            "--kv-dtype fp8 needs the cuda kernels on a GPU; give DEVICE=cpu",
        ),
    ],
)
def test_options_that_exclude_each_other_are_named(
    given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on("usable", monkeypatch)
    with pytest.raises(ConfigurationError, match=words):
        chosen(config_of(), **given)
    assert not caplog.text, "nothing is chosen in its place"


def test_format_of_reference_and_cpu_kernels_needs_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "int8", ("reference", "cpu"))
    assert chosen(config_of(), device="cpu", kernels="reference", quantize="int8")[0] == "reference"


@pytest.mark.parametrize(
    "given",
    [{"deterministic": True}, {"quantize": "int8"}, {"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, {"kernels": "cpu"}],
)
def test_block_size_the_cpu_kernels_cannot_use_is_named(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    named = r"--(deterministic|quantize int8|kv-dtype (int8|fp8)|kernels cpu).*--block-size 8"
    with pytest.raises(ConfigurationError, match=named):
        chosen(config_of(torch.float32), block_size=8, **given)
    assert "reference" not in caplog.text


@pytest.mark.parametrize("most", [1, 33, 1000, 3000])
def test_sizes_that_are_warmed_up_are_no_larger_than_step(most: int) -> None:
    sizes = ReferenceOps(torch.device("cpu")).batch_sizes(torch.bfloat16, most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))


def test_a_mixture_of_experts_takes_a_usable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on("usable", monkeypatch)
    assert chosen(config_of(mixture=EXPERTS), kernels="cuda") == ("cuda", "cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (config_of(torch.float32), "float32"),
        (config_of(head_dim=48), "heads of 48 numbers"),
        (config_of(intermediate_size=100), "rows of 100 numbers"),
        (config_of(score_softcap=50.0), "caps its scores and logits, they have no kernels for it"),
        (config_of(logit_softcap=30.0), "caps its scores and logits, they have no kernels for it"),
        (config_of(mixture=dataclasses.replace(EXPERTS, intermediate_size=44)), "rows of 44 numbers"),
        (config_of(mixture=EXPERTS, family=FAMILIES["GptOssForCausalLM"]), "sinks of attention, they have no kernels"),
        (config_of(hidden_size=1 << 16), "norms take 32768 at most"),
        (config_of(heads=512, kv_heads=1), "512 query heads share a KV head"),
    ],
)
def test_model_beyond_the_cuda_kernels_uses_the_reference_on_gpu(
    config: DecoderConfig, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on("usable", monkeypatch)
    assert chosen(config, device="cuda") == ("reference", "cuda", getattr(torch, config.checkpoint_dtype))
    assert words in caplog.text and "slower reference" in caplog.text
    with pytest.raises(ConfigurationError, match=words):
        chosen(config, kernels="cuda")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert chosen(config, device="cuda", kernels="reference")[:2] == ("reference", "cuda")
    assert not caplog.text


def test_emulator_runs_when_requested_and_says_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on("none", monkeypatch)
    assert chosen(config_of(torch.float16), kernels="emulator") == ("emulator", "cpu", torch.float16)
    assert "slower" in caplog.text


def test_device_that_fails_when_it_is_created_is_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    on("usable", monkeypatch)

    def create(name: str, device: torch.device) -> None:
        raise CudaError("no compiled kernels and no compiler are here")

    monkeypatch.setattr(backend.kernel_ops, "create", create)
    with pytest.raises(ConfigurationError, match="no compiler"):
        chosen(config_of())


LENGTHS = Lengths(256, 255, 255)  # 16 blocks of SHAPE


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, 115), ({"kv_memory_fraction": 0.5}, 64), ({"kv_blocks": 20}, 20), ({"max_seqs": 3}, 48)],
)
def test_gpu_pool_is_bounded_by_free_memory_and_slots(values: dict[str, Any], expected: int) -> None:
    assert plan_blocks(WorkerSettings(**values), SHAPE.block_bytes, LENGTHS, 1 * MIB, on_gpu=True) == (
        expected,
        LENGTHS,
    )


def test_lengths_that_do_not_fit_the_gpu_name_the_settings() -> None:
    settings = WorkerSettings(max_input_tokens=200, max_output_tokens=56)
    words = r"--kv-memory-fraction 0\.9 of 0 MiB free beside weights and the largest step \(--max-step-tokens\).*lower"
    with pytest.raises(ConfigurationError, match=words):
        plan_blocks(settings, SHAPE.block_bytes, Lengths(256, 200, 56), 100_000, on_gpu=True)


@pytest.mark.parametrize(
    ("wanted", "blocks", "expected"),
    [(None, 100, 100), (None, 4000, 128), (None, 4096, 0), (1280, 4000, 1280), (0, 100, 0)],
)
def test_gpu_host_tier_is_a_share_of_main_memory(wanted: int | None, blocks: int, expected: int) -> None:
    settings = WorkerSettings(host_blocks=wanted)
    assert plan_host_blocks(settings, blocks, LENGTHS, SHAPE.block_bytes, 10 * MIB, on_gpu=True) == expected
    with pytest.raises(ConfigurationError, match=r"--host-blocks 1281 needs 10 MiB, but the host has 10 MiB"):
        plan_host_blocks(WorkerSettings(host_blocks=1281), 9, LENGTHS, SHAPE.block_bytes, 10 * MIB, on_gpu=True)


def test_default_gpu_host_tier_is_pinned_in_seconds() -> None:
    large = 1 << 40
    assert plan_host_blocks(WorkerSettings(), 1 << 30, LENGTHS, MIB, large, on_gpu=True) == 0
    assert plan_host_blocks(WorkerSettings(max_seqs=8192), 130_000, LENGTHS, MIB, large, on_gpu=True) == 16 << 10


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"),
        CudaError("40.0 GiB of main memory cannot be pinned; lower --host-blocks"),
        BuildError("no g++ is installed to compile the emulated kernels with"),
    ],
)
def test_what_gpu_or_a_compiler_refuses_is_a_configuration_error(error: Exception) -> None:
    words = r"Tried to allocate 2.00 GiB\); lower it|cannot be pinned|no g\+\+"
    with pytest.raises(ConfigurationError, match=words), room_for("the pool", "lower it"):
        raise error
