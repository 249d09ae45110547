"""Clients of the API, each in a separate environment, against one stack: `make clients` installs and runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from protos import kserve_pb2
from services.cli.app import app
from shared.settings import DEMO_MODEL
from tests.clients import install
from tests.support.checkpoints.encoders import make_encoder
from tests.support.stack import Stack, running_stack
from tests.support.waiting import free_port, until

KEY = "sk-clients"
# The demo model's template knows neither: calls are those that a grammar makes it write, thinking is begun for it.
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}
SUITES = Path(__file__).parent / "suites"
PYTHON = {
    "openai-2": "suite_openai.py", "openai-3": "suite_openai.py", "anthropic": "suite_anthropic.py",
    "litellm": "suite_litellm.py", "langchain": "suite_langchain.py", "triton": "suite_triton.py",
    "cohere": "suite_cohere.py::test_embed_and_errors",
}  # fmt: skip
# They would ask the internet for news of themselves, which these tests may not need.
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}  # fmt: skip
LIMIT_S = 280

pytestmark = pytest.mark.skipif(
    not all(install.made(name) for name in (*PYTHON, install.JAVASCRIPT)), reason="make clients installs the clients"
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    with running_stack(directory, DEMO_MODEL, key=KEY, dtype="float32", grpc_port=free_port(), **PARSERS) as running:
        yield running


@pytest.fixture(scope="module")
def limited(stack: Stack) -> str:
    """Return a key that may send 30 requests a minute, and that the gateway knows."""
    add = ["keys", "add", "limited", "--requests-per-minute", "30", "--json", "--redis-url", stack.redis.url]
    done = CliRunner().invoke(app, [*add, "--served-model-name", stack.name], catch_exceptions=False)
    key: str = json.loads(done.stdout)["key"]
    known = {"X-Api-Key": key}
    until("the gateway knows the key", lambda: httpx.get(f"{stack.url}/v1/models", headers=known).is_success)
    return key


def check(command: list[str | Path], folder: Path) -> str:
    """Run a program and return its output."""
    drop = ("ORCINUS_", "PYTEST_", "OPENAI_", "ANTHROPIC_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)} | QUIET
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    print(done.stdout[-12_000:], done.stderr[-4_000:])
    assert done.returncode == 0
    return done.stdout


def check_python(name: str, suite: str, stack: Stack, **options: str) -> None:
    """Run a suite, or a test of it, in a client's environment, with these options beside those of every suite."""
    options |= {"url": stack.url, "key": KEY, "model": stack.name}
    given = [f"--server-{option}={value}" for option, value in options.items()]
    files = [str(SUITES / file) for file in ("pytest.ini", suite)]
    check([install.python_of(name), "-m", "pytest", "-q", "-c", *files, *given], SUITES)
    stack.settled_empty()


@pytest.mark.parametrize("name", sorted(PYTHON))
def test_python_client_works(stack: Stack, limited: str, name: str) -> None:
    descriptor = stack.directory / "kserve.descriptor"
    descriptor.write_bytes(kserve_pb2.DESCRIPTOR.serialized_pb)
    grpc = f"127.0.0.1:{stack.settings['grpc_port']}"
    check_python(name, PYTHON[name], stack, grpc=grpc, descriptor=str(descriptor), limited=limited)


def test_cohere_client_reranks(tmp_path: Path) -> None:
    scorer = make_encoder(tmp_path / "scorer", "bert", scores=True)
    with running_stack(tmp_path / "stack", scorer.path, key=KEY, dtype="float32") as running:
        check_python("cohere", "suite_cohere.py::test_rerank_and_errors", running)


@pytest.mark.parametrize("suite", ["suite_openai.mjs", "suite_anthropic.mjs"])
def test_javascript_client_works(stack: Stack, limited: str, suite: str) -> None:
    folder = install.HOME / install.JAVASCRIPT
    shutil.copy(SUITES / suite, folder)  # beside node_modules, where its imports are looked for
    check(["node", suite, stack.url, KEY, stack.name, limited], folder)
    stack.settled_empty()


EXAMPLES = {
    "openai (Python)": "openai-3",
    "openai (JavaScript)": install.JAVASCRIPT,
    "anthropic (Python)": "anthropic",
    "anthropic (JavaScript)": install.JAVASCRIPT,
    "litellm": "litellm",
    "langchain": "langchain",
    "tritonclient": "triton",
}
"""Heading in docs/clients.md -> the client with the environment that its example needs."""


@pytest.mark.parametrize("heading", EXAMPLES)
def test_example_of_the_page_runs(stack: Stack, heading: str, tmp_path: Path) -> None:
    section = (install.ROOT / "docs" / "clients.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"^```(?:python|javascript)\n(.+?)^```$", section, re.MULTILINE | re.DOTALL)
    here = {
        "http://127.0.0.1:8000": stack.url,
        "127.0.0.1:8003": f"127.0.0.1:{stack.settings['grpc_port']}",
        "KEY": KEY,
    }
    for text, instead in here.items():
        code = code.replace(text, instead)
    client = EXAMPLES[heading]
    folder = install.HOME / client if client == install.JAVASCRIPT else tmp_path
    program = folder / ("example.mjs" if client == install.JAVASCRIPT else "example.py")
    program.write_text(code)
    said = check(["node" if client == install.JAVASCRIPT else install.python_of(client), program], folder)
    assert said.strip()
