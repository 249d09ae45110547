"""`--kv-dtype` is refused before anything starts where the cpu kernels are ruled out."""

from __future__ import annotations

from typing import Any

import pytest

from services.launcher import up
from shared.errors import ConfigurationError
from shared.settings import GatewaySettings, LauncherSettings, WorkerSettings


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kernels": "reference"}, "--kernels reference"),
        ({"kernels": "cuda"}, "--kernels cuda"),
        ({"kernels": "emulator"}, "--kernels emulator"),
        ({"device": "cuda"}, "DEVICE=cuda"),
    ],
)
def test_int8_kv_without_cpu_kernels_is_refused_before_start(given: dict[str, Any], said: str) -> None:
    wanted = f"--kv-dtype int8 needs the cpu kernels, and {said} rules them out; give DEVICE=cpu and --kernels cpu"
    with pytest.raises(ConfigurationError, match=wanted):
        up._check(LauncherSettings(), GatewaySettings(), WorkerSettings(kv_dtype="int8", **given))


@pytest.mark.parametrize("given", [{"device": "cpu"}, {"kernels": "cpu"}, {}])
def test_int8_kv_with_cpu_kernels_is_no_problem(given: dict[str, Any]) -> None:
    assert up.kv_problem(WorkerSettings(kv_dtype="int8", **given)) == ""
