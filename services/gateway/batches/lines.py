"""Read the input of a batch: check all of its lines once, then each when its turn comes."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from services.gateway.batches.files import open_plain
from shared.batch_lines import Line, LineError, parse_line

MAX_LINES = 50_000
MAX_PROBLEMS = 100
PREFIX_BYTES = 256
"""Of a prompt, by which lines are ordered, so that those with a common beginning find it in the prefix cache."""
LONGER_BYTES = (1024, 4096, 16_384, 65_536)
"""Longer beginnings: lines that have one in common are side by side, where the first of them stands in the file."""
SEED_BITS = 63


class InputLines:
    """The checked input of a batch. Close it."""

    def __init__(self, path: Path) -> None:
        self._file = open_plain(path)
        self._endpoint = ""
        self._places = array("Q")  # begin and end of each line
        self._prefixes: list[bytes] = []
        self._digests = [array("Q") for _ in LONGER_BYTES]  # of the longer beginnings of each line

    def __len__(self) -> int:
        """Return how many requests there are."""
        return len(self._places) // 2

    def check(self, endpoint: str, most_bytes: int) -> list[dict[str, Any]]:
        """Read all lines; return what is wrong with them, as `errors.data` of a batch has it.

        most_bytes: of one line, as of the body of a request.
        """
        problems: list[dict[str, Any]] = []
        ids: set[str] = set()
        self._endpoint = endpoint
        number = 0
        while len(problems) < MAX_PROBLEMS and (text := self._file.readline(most_bytes + 2)):
            number += 1
            try:
                if number > 2 * MAX_LINES:
                    raise LineError(
                        "too_many_lines", f"more than {2 * MAX_LINES} lines with the empty ones; split the file"
                    )
                if text.strip():
                    self._check_line(text, endpoint, most_bytes, ids)
            except LineError as error:
                problem = {"code": error.code, "message": str(error), "param": error.param, "line": number}
                problems.append(problem)
                if error.code in ("line_too_long", "too_many_lines"):
                    break
        if not problems and not len(self):
            problem = {"code": "empty_file", "message": "the file has no line; write one JSON object per line"}
            problems.append(problem | {"param": None, "line": None})
        return problems

    def _check_line(self, text: bytes, endpoint: str, most_bytes: int, ids: set[str]) -> None:
        """Note where a line lies. Raise LineError."""
        if len(text) > most_bytes + 1:
            raise LineError("line_too_long", f"more than {most_bytes} bytes; send a shorter request")
        line = parse_line(text, endpoint)
        if line.url != endpoint:
            problem = f"url is {line.url}, and the batch is for {endpoint}; make a batch for each endpoint"
            raise LineError("mismatched_url", problem, "url")
        if line.custom_id in ids:
            problem = f"custom_id {line.custom_id!r} occurs twice; make it unique"
            raise LineError("duplicate_custom_id", problem, "custom_id")
        if (priority := line.body.get("priority")) not in (None, "low"):
            problem = f"priority: lines of a batch run in class low; got {str(priority)[:80]!r}; leave it out"
            raise LineError("invalid_value", problem, "priority")
        if len(self) >= MAX_LINES:
            raise LineError("too_many_lines", f"more than {MAX_LINES} requests; split the file")
        ids.add(line.custom_id)
        end = self._file.tell()
        self._places.extend((end - len(text), end))
        prompt = _prompt(line.body)
        self._prefixes.append(prompt[:PREFIX_BYTES])
        for digests, size in zip(self._digests, LONGER_BYTES, strict=True):
            digests.append(int.from_bytes(hashlib.blake2b(prompt[:size], digest_size=8).digest()))

    def order(self) -> list[int]:
        """Return the numbers of all lines, once, those with a common beginning of their prompts side by side."""
        prefixes, self._prefixes = self._prefixes, []
        firsts = [_firsts(digests) for digests in self._digests]
        self._digests = []
        return sorted(range(len(prefixes)), key=lambda number: (prefixes[number], *(each[number] for each in firsts)))

    def read(self, number: int) -> Line:
        """Return a line by its number among the requests, from 0. Raise LineError when the file has changed."""
        begin, end = self._places[2 * number : 2 * number + 2]
        return parse_line(os.pread(self._file.fileno(), end - begin, begin).strip(), self._endpoint)

    def close(self) -> None:
        self._file.close()


def _prompt(body: dict[str, Any]) -> bytes:
    parts = [body[name] for name in ("instructions", "system", "messages", "prompt", "input") if name in body]
    return b"".join(map(orjson.dumps, parts))


def _firsts(digests: Sequence[int]) -> Sequence[int]:
    """Return for each line the number of the first one with its digest."""
    known: dict[int, int] = {}
    return array("Q", (known.setdefault(digest, number) for number, digest in enumerate(digests)))


def seed_of(batch_id: str, number: int) -> int:
    """Return the seed of a line without one: the same whenever the line is computed."""
    return int.from_bytes(hashlib.sha256(f"{batch_id}:{number}".encode()).digest()[:8]) >> (64 - SEED_BITS)
