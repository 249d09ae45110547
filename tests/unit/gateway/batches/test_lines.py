"""The input of a batch: what is wrong with lines, in which order they are sent, which seeds they get."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.gateway.batches import lines as module
from services.gateway.batches.lines import InputLines, seed_of

URL = "/v1/completions"
GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": URL, "body": {"prompt": "x"}}


def checked(
    tmp_path: Path, text: str | bytes, most_bytes: int = 1000
) -> tuple[list[tuple[str, int | None]], InputLines]:
    path = tmp_path / "in"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    lines = InputLines(path)
    return [(problem["code"], problem["line"]) for problem in lines.check(URL, most_bytes)], lines


def test_lines_are_read_by_their_number_whatever_is_between_them(tmp_path: Path) -> None:
    texts = [json.dumps({**GOOD, "custom_id": f"n{n}"}) for n in range(3)]
    problems, lines = checked(tmp_path, f"\n{texts[0]}\r\n  \n\n{texts[1]}\n{texts[2]}")
    assert (problems, len(lines)) == ([], 3)
    assert [lines.read(number).custom_id for number in (2, 0, 1)] == ["n2", "n0", "n1"]
    lines.close()


def test_line_is_read_without_the_empty_ones_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lines = checked(tmp_path, "\n" * 500 + json.dumps(GOOD))
    read, sizes = os.pread, []

    def counted(file: int, most: int, offset: int) -> bytes:
        sizes.append(most)
        return read(file, most, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert (lines.read(0).custom_id, sizes) == ("a", [len(json.dumps(GOOD))])
    lines.close()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid_json_line"),
        (b"\xff\n", "invalid_json_line"),
        ("[]", "invalid_request"),
        (json.dumps({**GOOD, "more": 1}), "invalid_request"),
        (json.dumps({**GOOD, "custom_id": ""}), "invalid_custom_id"),
        (json.dumps({**GOOD, "custom_id": "x" * 513}), "invalid_custom_id"),
        (json.dumps({**GOOD, "custom_id": 1}), "invalid_custom_id"),
        (json.dumps({**GOOD, "method": "GET"}), "invalid_url"),
        (json.dumps({**GOOD, "url": "/v1/messages"}), "invalid_url"),
        (json.dumps({**GOOD, "url": "/v1/embeddings"}), "mismatched_url"),
        (json.dumps({**GOOD, "body": "x"}), "invalid_request"),
        (json.dumps({**GOOD, "body": {"stream": True}}), "invalid_request"),
        (json.dumps({**GOOD, "body": {"background": True}}), "invalid_request"),
        (json.dumps({**GOOD, "body": {"priority": "high"}}), "invalid_value"),
        (json.dumps({**GOOD, "body": {"prompt": "x" * 1000}}), "line_too_long"),
    ],
)  # fmt: skip
def test_line_that_is_no_request_is_named(tmp_path: Path, text: str | bytes, code: str) -> None:
    good = json.dumps({**GOOD, "custom_id": "b"}).encode()
    given = text.encode() if isinstance(text, str) else text
    problems, lines = checked(tmp_path, good + b"\n" + given)
    assert problems == [(code, 2)]
    lines.close()


@pytest.mark.parametrize("name", ["prompt", "metadata"])
def test_line_too_deep_to_be_sent_is_named(tmp_path: Path, name: str) -> None:
    body = f'{{"prompt": "x", "{name}": {"[" * 300}{"]" * 300}}}'
    problems, lines = checked(tmp_path, json.dumps(GOOD).replace(json.dumps(GOOD["body"]), body))
    assert problems == [("invalid_value", 1)]
    lines.close()


def test_empty_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 3)
    for empty, expected in ((5, []), (6, [("too_many_lines", 7)])):
        problems, lines = checked(tmp_path, "\n" * empty + json.dumps(GOOD))
        assert problems == expected
        lines.close()


def test_custom_id_occurs_once(tmp_path: Path) -> None:
    problems, lines = checked(tmp_path, "\n".join([json.dumps(GOOD)] * 3))
    assert problems == [("duplicate_custom_id", 2), ("duplicate_custom_id", 3)]
    lines.close()


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_file_is_no_batch(tmp_path: Path, text: str) -> None:
    problems, lines = checked(tmp_path, text)
    assert problems == [("empty_file", None)]
    lines.close()


def test_number_of_lines_and_of_problems_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 2)
    problems, lines = checked(tmp_path, "\n".join(json.dumps({**GOOD, "custom_id": f"{n}"}) for n in range(9)))
    assert problems == [("too_many_lines", 3)]
    lines.close()
    monkeypatch.setattr(module, "MAX_LINES", 500)
    problems, lines = checked(tmp_path, "{\n" * 500)
    assert len(problems) == module.MAX_PROBLEMS
    lines.close()


def test_lines_with_a_common_beginning_are_sent_one_after_another(tmp_path: Path) -> None:
    prompts = ["b two", "a one", "b one", "a two"]
    text = "\n".join(json.dumps({**GOOD, "custom_id": prompt, "body": {"prompt": prompt}}) for prompt in prompts)
    _, lines = checked(tmp_path, text)
    assert [prompts[number] for number in lines.order()] == ["a one", "a two", "b one", "b two"]
    lines.close()


def test_seed_follows_from_the_batch_and_the_line() -> None:
    seeds = {seed_of(batch, number) for batch in ("batch_1", "batch_2") for number in range(50)}
    assert len(seeds) == 100 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert seed_of("batch_1", 7) == seed_of("batch_1", 7)
