"""Parametrises `variant` over the instruction sets of the CPU kernels, or the one that --kernels-variant names.

A variant that is named is also what the backend `cpu` runs, so that the tests of every backend test it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels import cpu_variants


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # operations of the oracles are small: threads would only wait for each other
    cpu_variants.keep_to(config.getoption("--kernels-variant"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", cpu_variants.names(), scope="module")


@pytest.fixture(scope="session")
def best_variant() -> str:
    """The one for tests of which every case in every variant would be too many."""
    return cpu_variants.best()


@pytest.fixture(autouse=True, scope="session")
def _named_variant_is_the_backends(request: pytest.FixtureRequest) -> Iterator[None]:
    with cpu_variants.serving(request.config.getoption("--kernels-variant")):
        yield


@pytest.fixture(autouse=True)
def _needs_compiler(request: pytest.FixtureRequest) -> None:
    if {"variant", "best_variant"} & set(request.fixturenames) and cpu_variants.compiler() is None:
        pytest.skip("no g++")
