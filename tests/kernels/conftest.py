"""Parametrises `variant` over the instruction sets of the CPU kernels, or the one that --kernels-variant names.

In float32 they differ by the width of their vectors alone, so a test with a `dtype` of float32 runs in one set of each
width, and so does one that asks for a `float32_variant`. A variant that is named is also what the backend `cpu` runs,
so that the tests of every backend test it.
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
    for name, sets in (("variant", cpu_variants.names()), ("float32_variant", cpu_variants.widths())):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, sets, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, again = [], []
    for item in items:
        (again if _has_same_code_in_another_variant(item) else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=again)


def _has_same_code_in_another_variant(item: pytest.Item) -> bool:
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    name = given.get("variant") or str(given.get("ops", "")).partition("-")[2]
    return bool(name) and given.get("dtype") is torch.float32 and name not in cpu_variants.widths()


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
    if {"variant", "float32_variant", "best_variant"} & set(request.fixturenames) and cpu_variants.compiler() is None:
        pytest.skip("no g++")
