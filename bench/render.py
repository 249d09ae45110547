"""Render the generated sections of README.md and docs/ from committed results and from the code.

    python -m bench.render            rewrite every section
    python -m bench.render --check    write nothing; exit code 1 when a page is stale

A section stands between `<!-- render: TEMPLATE [PART] -->` and `<!-- end -->`. TEMPLATE is a file of bench/templates/
(Jinja), PART a word for the template. A new section is a template and a pair of markers, nothing else.

In a template `result(NAME)` is the content of bench/results/NAME.json, or none; `module(NAME)` is a module of bench
with constants and pure functions; the filter `f` is Python's `format`, the test `startswith` that of a string.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import jinja2

from bench.result import ROOT, read

TEMPLATES = Path(__file__).parent / "templates"
_SECTION = re.compile(r"^(<!-- render: ([\w-]+)(?: ([\w-]+))? -->\n).*?^(<!-- end -->)", re.DOTALL | re.MULTILINE)


def pages() -> Iterator[Path]:
    """Yield every page that may have generated sections."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def section(template: str, part: str = "", results: Mapping[str, Any] | None = None) -> str:
    """Return the text of one section.

    results: used instead of the committed results of these names. Raises jinja2.TemplateError when the template is not
    there or names a field that the result does not have.
    """
    given = results or {}
    text = (
        _environment()
        .get_template(f"{template}.md")
        .render(part=part, result=lambda name: given[name] if name in given else read(name))
    )
    return text.strip("\n")


def fill(page: str) -> str:
    """Return the text of a page with every section rendered anew."""
    return _SECTION.sub(lambda found: f"{found[1]}{section(found[2], found[3] or '')}\n{found[4]}", page)


def stale() -> list[Path]:
    """Return the pages that differ from what their results render to."""
    return [path for path in pages() if fill(path.read_text()) != path.read_text()]


def write() -> None:
    """Render every page."""
    for path in stale():
        path.write_text(fill(path.read_text()))


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(  # noqa: S701 - Markdown for pages of the repository
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    made.filters["f"] = format
    made.tests["startswith"] = str.startswith
    made.globals["module"] = import_module
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.render", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a page is stale")
    if not parser.parse_args(argv).check:
        write()
        return 0
    for path in stale():
        print(f"{path.relative_to(ROOT)}: stale; run `python -m bench.render`", file=sys.stderr)
    return 1 if stale() else 0


if __name__ == "__main__":
    sys.exit(main())
