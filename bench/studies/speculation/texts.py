"""Prompts with the outputs that a good model would give: edits of code, JSON, answers that quote, free text.

All of them are found on the machine: two versions of Python's standard library, the metadata of installed packages, the
project's pages. Pure but for reading files.
"""

from __future__ import annotations

import difflib
import json
import random
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

Pair = tuple[str, str]  # prompt, output
TEXT = {"type": ["string", "null"]}
SCHEMA = {
    "properties": {
        "name": TEXT,
        "version": TEXT,
        "summary": TEXT,
        "requires_python": TEXT,
        "keywords": {"type": "array", "items": {"type": "string"}},
        "requirements": {"type": "integer"},
    },
    "required": ["name", "version", "summary", "requires_python", "keywords", "requirements"],
    "additionalProperties": False,
}
"""Of `records`."""
LINES = 14  # of an edited passage


def edits(old: Path, new: Path) -> Iterator[Pair]:
    """Yield passages of files that differ between two versions: the old one is the prompt, the new one the output."""
    for path in sorted(new.rglob("*.py")):
        before = old / path.relative_to(new)
        if not before.is_file() or "site-packages" in path.parts:
            continue
        a, b = (file.read_text(errors="replace").splitlines() for file in (before, path))
        if a == b or len(b) > 3000:
            continue
        matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
        for tag, i1, _, j1, _ in matcher.get_opcodes():
            if tag == "replace":
                first, other = max(i1 - LINES // 2, 0), max(j1 - LINES // 2, 0)
                was, now = a[first : first + LINES], b[other : other + LINES]
                yield "\n".join(["# before", *was, "# after", ""]), "\n".join(now)
                break


def records() -> Iterator[Pair]:
    """Yield descriptions of installed packages with the JSON object that holds the same, all of one schema."""
    for package in sorted(metadata.distributions(), key=lambda found: found.metadata["Name"] or ""):
        about = package.metadata
        fields = {
            "name": about["Name"],
            "version": about["Version"],
            "summary": about["Summary"],
            "requires_python": about["Requires-Python"],
            "keywords": [word for word in re.split("[, ]+", about["Keywords"] or "") if word][:6],
            "requirements": len(about.get_all("Requires-Dist") or []),
        }
        text = f"{fields['name']} {fields['version']}: {fields['summary']} (Python {fields['requires_python']})\n"
        yield text, json.dumps(fields, indent=1, ensure_ascii=False)


def passages(folder: Path) -> list[str]:
    """Return paragraphs of pages in Markdown, without tables and code."""
    found = []
    for page in sorted(folder.glob("*.md")):
        parts = page.read_text().split("\n\n")
        found += [p for p in parts if len(p) > 200 and not p.lstrip().startswith(("|", "    ", "```", "<"))]
    return found


def quotes(folder: Path, seed: int) -> Iterator[Pair]:
    """Yield a passage as the prompt, and an answer that quotes two of its sentences between other words."""
    rng, parts = random.Random(seed), passages(folder)
    for index, part in enumerate(parts):
        sentences = re.split(r"(?<=[.:;]) ", part)
        other = re.split(r"(?<=[.:;]) ", parts[(index * 7 + 3) % len(parts)])[0]
        if len(sentences) >= 3:
            first, second = sorted(rng.sample(range(len(sentences)), 2))
            yield part + "\n\nWhat does it say?\n", f"It says: {sentences[first]} {other} Also: {sentences[second]}"


def prose(folder: Path) -> Iterator[Pair]:
    """Yield the first half of a passage and the second, which quotes nothing."""
    for part in passages(folder):
        half = part.find(" ", len(part) // 3)
        yield part[:half], part[half:]
