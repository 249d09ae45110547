"""Parametrises `variant` over the instruction sets of the CPU kernels, or the one that --kernels-variant names."""

from __future__ import annotations

import pytest

from tests.kernels import cpu_variants


def pytest_configure(config: pytest.Config) -> None:
    cpu_variants.keep_to(config.getoption("--kernels-variant"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", cpu_variants.names(), scope="module")


@pytest.fixture(autouse=True)
def _needs_compiler(request: pytest.FixtureRequest) -> None:
    if "variant" in request.fixturenames and cpu_variants.compiler() is None:
        pytest.skip("no g++")
