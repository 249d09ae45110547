"""Keep the output lines of a batch as they come, each once, and write the two output files from them.

A journal belongs to one epoch of a batch. A row is the number of the input line, 1 for a failed request, and the output
line: `17 0 {"id": ...}`. A row counts once it is on the disk; one that a kill or a full disk cut off does not. Nor does
what a gateway writes after the next epoch began: it is beyond what that epoch sealed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from services.gateway.batches.files import create, flush, flush_folder, open_plain
from services.gateway.batches.usage import Usage, usage_of

ROW = re.compile(rb"([0-9]{1,9}) ([01]) (\{.*\}\n)", re.DOTALL)
EXPIRED_MARK = b'"response":null,"error":{"code":"batch_expired"'
"""In the output line of a request that has expired; in a text the marks would be escaped."""


class Row(NamedTuple):
    """Where an output line lies, and the tokens of its request."""

    epoch: int
    offset: int
    bytes: int
    is_failed: bool
    usage: Usage


def journal_name(epoch: int) -> str:
    """Return the name of an epoch's journal."""
    return f"rows-{epoch:016d}.jsonl"


def whole_bytes(folder: Path, epoch: int) -> int:
    """Return the bytes of all whole rows in the journal of an epoch; 0 where there is none."""
    return sum(len(text) for _, text in _texts(folder, epoch, None))


def rows(folder: Path, sealed_bytes: Sequence[tuple[int, int]], epoch: int) -> dict[int, Row]:
    """Return the rows that count at an epoch, by the number of their input line; the first of a line counts."""
    rows_by_number: dict[int, Row] = {}
    for each, most_bytes in [*sealed_bytes, (epoch, None)]:
        for offset, text in _texts(folder, each, most_bytes):
            if (match := ROW.fullmatch(text)) and (line := _object(match[3])) is not None:
                begin = match.start(3)
                row = Row(each, offset + begin, len(text) - begin, match[2] == b"1", usage_of(line))
                rows_by_number.setdefault(int(match[1]), row)
    return rows_by_number


def _object(text: bytes) -> Any:
    """Return an output line; None for one that a full disk cut: it may have the next row behind it."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _texts(folder: Path, epoch: int, most_bytes: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield offset and text of each whole row, in the first `most_bytes`."""
    try:
        journal = open_plain(folder / journal_name(epoch))
    except FileNotFoundError:
        return
    offset = 0
    with journal:
        for text in journal:
            end = offset + len(text)
            if not text.endswith(b"\n") or (most_bytes is not None and end > most_bytes):
                return
            yield offset, text
            offset = end


class Journal:
    """The journal of the epoch that runs."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self._file = create(folder / journal_name(epoch))
        self._failure: OSError | None = None
        flush_folder(folder)

    def append(self, rows: Sequence[tuple[int, bool, bytes]]) -> None:
        """Write rows (number of the line, whether its request failed, output line) through to the disk.

        Raise OSError, and then always: behind a row that may be cut no row is written.
        """
        if self._failure is not None:
            raise self._failure
        text = b"".join(b"%d %d %b\n" % (number, is_failed, line) for number, is_failed, line in rows)
        try:
            self._file.write(text)
            flush(self._file)
        except OSError as error:
            self._failure = error
            raise

    def close(self) -> None:
        self._file.close()


def write_outputs(folder: Path, rows: dict[int, Row], parts: tuple[Path, Path]) -> tuple[int, int, int]:
    """Write the lines of good and of failed requests into two files, in the order of the input; return how many each
    has, and how many of the failed ones have expired.
    """
    counts, expired_count = [0, 0], 0
    journals = {epoch: open_plain(folder / journal_name(epoch)) for epoch in {row.epoch for row in rows.values()}}
    try:
        with create(parts[0]) as good, create(parts[1]) as bad:
            for number in sorted(rows):
                row = rows[number]
                text = os.pread(journals[row.epoch].fileno(), row.bytes, row.offset)
                if len(text) != row.bytes:
                    raise OSError(f"{folder.name}: row of line {number} is cut; {len(text)} of {row.bytes} bytes")
                (bad if row.is_failed else good).write(text)
                counts[row.is_failed] += 1
                expired_count += row.is_failed and EXPIRED_MARK in text
            flush(good)
            flush(bad)
    finally:
        for journal in journals.values():
            journal.close()
    return counts[0], counts[1], expired_count
