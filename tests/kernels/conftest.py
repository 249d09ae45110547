"""Parametrises `variant` over the instruction sets of the CPU kernels, or the one that --kernels-variant names."""

from __future__ import annotations

import pytest

from tests.kernels.cpu_variants import SANITIZED, SETS, compiler


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels-variant", choices=[*SETS, SANITIZED], help="test the CPU kernels in this one only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        only = metafunc.config.getoption("--kernels-variant")
        metafunc.parametrize("variant", [only] if only else list(SETS), scope="module")


@pytest.fixture(autouse=True)
def _needs_compiler(request: pytest.FixtureRequest) -> None:
    if "variant" in request.fixturenames and compiler() is None:
        pytest.skip("no g++")
