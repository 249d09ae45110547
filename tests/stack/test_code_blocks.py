"""Every code block of README.md and docs/*.md that can run here does, against one stack; -rs lists the others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared.settings import ROOT
from tests.support.docs import code_blocks
from tests.support.docs.code_blocks import LEFT_OUT, SHORT, TAGS, Block
from tests.support.stack import Stack

BLOCKS = list(code_blocks.blocks())
LONGEST_S = 120
STACK: dict[str, str] = {}
BATCH = {
    "custom_id": "a", "method": "POST", "url": "/v1/completions",
    "body": {"model": "demo-model", "prompt": "def", "max_tokens": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader stands, with the file that the page on clients reads."""
    directory = tmp_path_factory.mktemp("reader")
    (directory / "in.jsonl").write_text(json.dumps(BATCH) + "\n")
    return directory


def run(command: list[str], stack: Stack, place: Path) -> str:
    """What a command printed; its failure fails the test."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**stack.environment(url=stack.url), "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=LONGEST_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def here(text: str, stack: Stack) -> str:
    """The addresses of the pages are those of this stack."""
    return re.sub(r"(127\.0\.0\.1|localhost):8000", f"127.0.0.1:{stack.port}", text)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.line}")
def test_code_block_runs_as_written(block: Block, request: pytest.FixtureRequest) -> None:
    if why := code_blocks.why_not(block):
        pytest.skip(f"{block.page}:{block.line}: {why}")
    if block.language == "json":
        json.loads(block.text)
        return
    statements = block.statements()
    assert statements or block.language, f"{block.page}:{block.line} has no command: tag it"
    wanted = [statement for statement in statements if not code_blocks.left_out(statement)]
    if statements and not wanted:
        pytest.skip(f"{block.page}:{block.line}: {code_blocks.left_out(statements[0])}")
    stack, place = request.getfixturevalue("stack"), request.getfixturevalue("place")
    if block.language == "python":
        assert run([sys.executable, "-c", here(block.text, stack)], stack, place)
    for statement in wanted:
        short = here(code_blocks.shortened(statement), stack)
        printed = run(["bash", "-c", short.replace("curl ", "curl -sS --fail-with-body ", 1)], stack, place)
        assert printed.strip(), statement


def test_every_code_block_has_a_known_tag() -> None:
    assert not [(block.page, block.line, block.tag) for block in BLOCKS if block.tag not in TAGS]
    assert len(BLOCKS) > 50


@pytest.mark.parametrize("pattern", [*SHORT, *LEFT_OUT])
def test_rule_about_statements_has_a_statement(pattern: str) -> None:
    statements = [statement for block in BLOCKS if not code_blocks.why_not(block) for statement in block.statements()]
    assert any(re.search(pattern, statement) for statement in statements)
