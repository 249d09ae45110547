"""The code blocks of README.md and docs/*.md, what is done with each, and why some are not run.

A comment before a block says what it needs: `<!-- block: docker -->`, `gpu` or `cluster`; `text` is nothing to run.
Without one it has to run here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shared.settings import ROOT

TAGS = ("run", "docker", "gpu", "cluster", "text")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_TAG = re.compile(r"<!-- block: (.*?) -->")
_COMMAND = re.compile(r"([A-Z_]+=(\$\(.*?\)|\S+) )*(orcinus|make|curl|docker|python3?|redis-server) ")

SHORT = {
    r"^orcinus top$": "orcinus top --once",  # a page of its own in a terminal
    r"^orcinus keys": "ORCINUS_REDIS_URL=${ORCINUS_REDIS_URL%/*}/1 orcinus keys",  # a key would close the shared stack
    r"^(orcinus simulate .*)--requests \d+": r"\1--requests 60",  # hours of virtual time
    r"^orcinus bench serve --rate 1,2,4,8,16 --seconds 60": "orcinus bench serve --rate 8 --seconds 2",
    r"^(orcinus bench serve .*)--requests 200": r"\1--requests 8",
    r"^(orcinus bench serve )--rate 4": r"\1--rate 16",
    r"^orcinus bench serve (?!.*--url)": "orcinus bench serve --url http://127.0.0.1:8000 ",
}
"""Where a statement would take long, or would change the stack that others need: what is run in its place."""

LEFT_OUT = {
    r"^(ORCINUS_\w+=\S+ )?(make run|orcinus up)\b": "starts the stack, as tests/stack/test_make_run.py does",
    r"^make test$": "this is a part of it",
    r"^make k8s-check": "tests/deploy/test_kubernetes.py is all of it",
    r"^make (test-faults|soak)$|^orcinus chaos": "hurts a stack for minutes; tests/chaos does that",
    r"^make peers|^python -m bench\.peers": "installs other servers and measures for half an hour",
    r"cmpl-0123": "names a request of the reader's; tests/chaos/test_resume.py goes on with one of its own",
    r"^orcinus (gateway|scheduler|worker) --(?!help)": "a service stays; tests/stack and tests/chaos start them",
    r"--find ": "dozens of runs; tests/unit/simulator/test_search.py does them in small",
    r"^orcinus drain": "ends what the shared stack needs; tests/chaos/test_stack.py does it",
    r"^orcinus (pull|rm) ": "needs the Hub; tests/integration/cli/test_hub.py fetches from a server that stands for it",
    r"^make certs|\.run/certs|redis-users": "writes into .run; tests/stack/test_secured_stack.py makes its own",
    r"--trace trace\.csv|http://other:8000|steps\.jsonl": "needs a file or a server of the reader's",
}
"""Statements that are not run here, and why."""

ELSEWHERE = {
    ("docs/clients.md", "python"): "each client has an environment of its own: tests/clients runs the examples",
    ("docs/clients.md", "javascript"): "tests/clients runs it",
    ("docs/redis.md", ""): "tests/integration/cli/test_top.py runs the board",
}
"""Blocks that other tests run: page, language -> which. (The board of the Redis page is the only block there.)"""


@dataclass(frozen=True, slots=True)
class Block:
    """One block. language: of its fence, empty for an indented one."""

    page: str
    line: int
    tag: str
    language: str
    text: str

    def statements(self) -> list[str]:
        """Shell statements: lines that begin with a command, with what a backslash or an open quote takes along.

        Other lines are what a command printed, and words two blanks behind it say what it does.
        """
        found: list[str] = []
        for line in self.text.splitlines():
            if found and (found[-1].endswith("\\") or found[-1].count("'") % 2):
                found[-1] += "\n" + line
            elif _COMMAND.match(line):
                found.append(re.sub(r"  +.*$", "", line))
        return found


def blocks() -> Iterator[Block]:
    """All of them, page by page."""
    for page in PAGES:
        yield from blocks_of(page.relative_to(ROOT).as_posix(), page.read_text())


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """Fenced ones, and indented ones behind an empty line or a tag."""
    lines = text.splitlines()
    at, tag = 0, "run"
    while at < len(lines):
        line = lines[at]
        begun = at
        if line.startswith("```"):
            at = lines.index("```", at + 1)
            yield Block(page, begun + 1, tag, line[3:].strip(), "\n".join(lines[begun + 1 : at]))
            tag = "run"
        elif line.startswith("    ") and (
            begun == 0 or not lines[begun - 1].strip() or _TAG.fullmatch(lines[begun - 1])
        ):
            while at + 1 < len(lines) and (lines[at + 1].startswith("    ") or _goes_on(lines, at + 1)):
                at += 1
            yield Block(page, begun + 1, tag, "", "\n".join(each[4:] for each in lines[begun : at + 1]))
            tag = "run"
        elif found := _TAG.fullmatch(line):
            tag = found[1]
        elif line.strip():
            tag = "run"
        at += 1


def _goes_on(lines: list[str], at: int) -> bool:
    """An empty line inside an indented block."""
    rest = [line for line in lines[at:] if line.strip()]
    return not lines[at].strip() and bool(rest) and rest[0].startswith("    ")


def why_not(block: Block) -> str:
    """Why a whole block is not run here; empty where it is."""
    if block.tag != "run":
        return f"needs {block.tag}" if block.tag != "text" else "nothing to run"
    return ELSEWHERE.get((block.page, block.language), "")


def left_out(statement: str) -> str:
    """Why a statement is not run; empty where it is."""
    return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, statement)), "")


def shortened(statement: str) -> str:
    """What is run for a statement."""
    for pattern, instead in SHORT.items():
        statement = re.sub(pattern, instead, statement)
    return statement
