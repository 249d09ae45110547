"""Skip tests of compiled kernels where there is no compiler."""

from __future__ import annotations

import shutil

import pytest

HAS_COMPILER = shutil.which("g++") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no g++")


def demand_compiler(kernels: str = "cpu") -> None:
    """Skip the calling test where its kernels need a compiler and there is none."""
    if kernels == "cpu" and not HAS_COMPILER:
        pytest.skip("no g++")
