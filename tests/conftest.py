"""How generated tests look for examples: the same ones in each run, so that what was green stays green until the code
changes; `make explore` (`--hypothesis-profile explore`) looks for new ones.

A failure then prints a `@reproduce_failure` line with which it is repeated. The number of examples is bounded in each
test; a slow machine is no failure, so there is no deadline.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True)
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.load_profile("repeat")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here because pytest reads options from the conftest of the folder it is given only."""
    parser.addoption("--kernels-variant", default="", help="test the CPU kernels in this instruction set only")
