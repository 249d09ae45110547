"""Which kernels and which type a worker takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kernels.reference.backend import ReferenceOps
from services.worker import backend
from services.worker.models.config import DecoderConfig, load_config
from shared.errors import ConfigurationError
from shared.settings import DEMO_MODEL, WorkerSettings


def config_of(dtype: torch.dtype) -> DecoderConfig:
    return dataclasses.replace(load_config(DEMO_MODEL), checkpoint_dtype=str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(
    "given", [{"deterministic": True}, {"quantize": "int8"}, {"kv_dtype": "int8"}, {"kernels": "cpu"}]
)
def test_block_size_the_cpu_kernels_cannot_use_is_named(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ConfigurationError, match=r"--(deterministic|quantize int8|kv-dtype int8|kernels cpu).*--block-size 8"
    ):
        backend.choose(WorkerSettings(block_size=8, **given), config_of(torch.float32))
    assert "reference" not in caplog.text


@pytest.mark.parametrize("option", [{"quantize": "int8"}, {"kv_dtype": "int8"}])
def test_the_reference_by_name_and_int8_exclude_each_other(option: dict[str, Any]) -> None:
    settings = WorkerSettings(kernels="reference", **option)
    wanted = r"--(quantize|kv-dtype) int8 needs the cpu kernels; give --kernels auto or cpu"
    with pytest.raises(ConfigurationError, match=wanted):
        backend.choose(settings, config_of(torch.float32))


def test_int8_kv_and_a_gpu_exclude_each_other() -> None:
    for given in ({"device": "cuda"}, {"device": "auto", "kernels": "cuda"}):
        with pytest.raises(ConfigurationError, match=r"--kv-dtype int8 is for CPUs alone and .* for a GPU"):
            backend.choose(WorkerSettings(kv_dtype="int8", **given), config_of(torch.float32))


@pytest.mark.parametrize("most", [1, 33, 1000, 3000])
def test_sizes_that_are_warmed_up_are_no_larger_than_step(most: int) -> None:
    sizes = ReferenceOps(torch.device("cpu")).batch_sizes(torch.bfloat16, most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
