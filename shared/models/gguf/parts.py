"""Names of the files of a model in several parts, as llama.cpp's gguf-split gives them: NAME-00001-of-00003.gguf.

The first part stands for the model; `reader` compares what the parts say.
"""

from __future__ import annotations

import re
from pathlib import Path

MAX_PARTS = 1 << 9
"""Of one model. Those of 1,000 B parameters have some 50."""
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def part_number(name: str) -> tuple[int, int] | None:
    """Return which part, from 1 on, of how many a file is, by its name or path; None for a whole one."""
    match = _PART.fullmatch(name)
    return None if match is None else (int(match[2]), int(match[3]))


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the model that a part's name or path is of; of a whole file that one."""
    match = _PART.fullmatch(name)
    if match is None or not 0 < int(match[3]) <= MAX_PARTS:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def is_later_part(path: Path) -> bool:
    """Return whether the path is named as a part of a model of which the first one lies beside it."""
    first = path.with_name(part_names(path.name)[0])
    return first.name != path.name and first.is_file()


def stem_of(path: Path) -> str:
    """Return a file's name without its ending and the number of one of several parts."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None or int(match[3]) < 2 else match[1]
