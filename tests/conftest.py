"""How generated tests look for examples: the same ones in each run, so that what was green stays green until the test
or what it tests changes; `make explore` (`--hypothesis-profile explore`) looks for new ones.

A failure then prints a `@reproduce_failure` line with which it is repeated. The number of examples is bounded in each
test; a slow machine is no failure, so there is no deadline, neither for a test nor for the making of examples.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# Before numpy is imported. Threads of several test processes that share cores wait for each other in loops: the oracles
# of attention took seven times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

TESTS = Path(__file__).parent
AGAIN_S = 90.0
"""Between two signals of one time limit: the end of a whole stack must fit in between."""
SLOW = [HealthCheck.too_slow]
settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True, suppress_health_check=SLOW)
settings.register_profile("repeat", derandomize=True, deadline=None, suppress_health_check=SLOW)
settings.load_profile("repeat")


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the model that the module's MODEL describes, and what transformers answers for it."""
    from tests.support.checkpoints.models import make_llama  # most runs need no transformers

    return make_llama(tmp_path_factory.mktemp("model") / "tiny", **request.module.MODEL)


@pytest.fixture(scope="module")
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a running stack with the settings of the module's STACK: of its MODEL, else of the demo model."""
    from shared.settings import DEMO_MODEL
    from tests.support.stack import running_stack

    model = request.getfixturevalue("reference").path if hasattr(request.module, "MODEL") else DEMO_MODEL
    with running_stack(tmp_path_factory.mktemp("stack"), model, **request.module.STACK) as running:
        yield running


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture the project's own lines only: a library's thread of an earlier test may still log."""
    own = logging.Filter("orcinus")
    caplog.handler.addFilter(own)
    yield caplog
    caplog.handler.removeFilter(own)


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Run after hypothesis has taken its options. It mixes numbers and texts of all modules that are imported into its
    examples, so a constant anywhere, or one test file more in the run, would change those of every test."""
    if settings.default is not None and settings.default.derandomize:
        providers._get_local_constants = lambda: providers._local_constants
    # Under nohup, or in a script's background, processes ignore these, and so would all services that tests start. A
    # handler of this process leaves it as it is and is not inherited.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


class TimeLimit(pytest.fail.Exception, SystemExit):
    """The failure of a test that takes too long. As a SystemExit it passes through asyncio's tasks and callbacks, which
    keep every other exception: the test would go on, and perhaps pass.
    """


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Any:
    """Raise TimeLimit at a time limit, and again and again: a destructor or a callback from C swallows it, too."""
    is_set = yield
    fails: Any = signal.getsignal(signal.SIGALRM)
    if settings.method == "signal" and callable(fails):

        def raise_time_limit(*signal_and_frame: Any) -> None:
            try:
                fails(*signal_and_frame)
            except pytest.fail.Exception as error:
                raise TimeLimit(error.msg) from None

        signal.signal(signal.SIGALRM, raise_time_limit)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN_S)
    return is_set


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here because pytest reads options from the conftest of the folder it is given only."""
    parser.addoption("--kernels-variant", default="", help="test the CPU kernels in this instruction set only")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier: the folder it is in."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if not folder.endswith(".py"):
            item.add_marker(folder)
