"""The input of a batch: what is wrong with lines, in which order they are sent, which seeds they get."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.gateway.batches import lines as module
from services.gateway.batches.lines import InputLines, seed_of
from shared.text.bounded_json import MAX_CONTAINERS

URL = "/v1/completions"
MAX_BYTES = 100_000
GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": URL, "body": {"prompt": "x"}}


Check = Callable[..., tuple[list[tuple[str, int | None]], InputLines]]


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[Check]:
    """Return a function that writes an input and returns the problems of its lines, and the lines."""
    with contextlib.ExitStack() as stack:

        def check(text: str | bytes, most_bytes: int = MAX_BYTES) -> tuple[list[tuple[str, int | None]], InputLines]:
            (path := tmp_path / "in").write_bytes(text.encode() if isinstance(text, str) else text)
            lines = InputLines(path)
            stack.callback(lines.close)
            return [(problem["code"], problem["line"]) for problem in lines.check(URL, most_bytes)], lines

        yield check


def test_lines_are_read_by_their_number_whatever_is_between_them(checked: Check) -> None:
    texts = [json.dumps({**GOOD, "custom_id": f"n{n}"}) for n in range(3)]
    problems, lines = checked(f"\n{texts[0]}\r\n  \n\n{texts[1]}\n{texts[2]}")
    assert (problems, len(lines)) == ([], 3)
    assert [lines.read(number).custom_id for number in (2, 0, 1)] == ["n2", "n0", "n1"]


def test_line_is_read_without_the_empty_ones_before_it(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lines = checked("\n" * 500 + json.dumps(GOOD))
    read, sizes = os.pread, []

    def counted(file: int, most: int, offset: int) -> bytes:
        sizes.append(most)
        return read(file, most, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert (lines.read(0).custom_id, sizes) == ("a", [len(json.dumps(GOOD))])


def test_line_may_have_the_endpoint_of_its_batch_alone(tmp_path: Path) -> None:
    texts = [json.dumps({**GOOD, "custom_id": url, "url": url}) for url in ("/v1/messages", "/v1/rerank", URL)]
    (path := tmp_path / "in").write_text("\n".join(texts))
    with contextlib.closing(InputLines(path)) as lines:
        problems = lines.check("/v1/messages", MAX_BYTES)
        assert [(each["code"], each["line"]) for each in problems] == [("invalid_url", 2), ("mismatched_url", 3)]
        assert lines.read(0).url == "/v1/messages"


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
        (json.dumps({**GOOD, "body": {"prompt": "x" * MAX_BYTES}}), "line_too_long"),
    ],
)  # fmt: skip
def test_line_that_is_no_request_is_named(checked: Check, text: str | bytes, code: str) -> None:
    good = json.dumps({**GOOD, "custom_id": "b"}).encode()
    given = text.encode() if isinstance(text, str) else text
    problems, _ = checked(good + b"\n" + given)
    assert problems == [(code, 2)]


@pytest.mark.parametrize(
    ("value", "code"),
    [("[" * 300 + "]" * 300, "json_too_deep"), ("[" + "[]," * MAX_CONTAINERS + "[]]", "json_too_wide")],
    ids=["deep", "wide"],
)
def test_line_beyond_the_bounds_of_json_is_named(checked: Check, value: str, code: str) -> None:
    body = f'{{"prompt": "x", "metadata": {value}}}'
    problems, _ = checked(json.dumps(GOOD).replace(json.dumps(GOOD["body"]), body), most_bytes=1 << 20)
    assert problems == [(code, 1)]


def test_empty_lines_are_bounded(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 3)
    for empty, expected in ((5, []), (6, [("too_many_lines", 7)])):
        problems, _ = checked("\n" * empty + json.dumps(GOOD))
        assert problems == expected


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", [("empty_file", None)]),
        ("\n \n", [("empty_file", None)]),
        ("\n".join([json.dumps(GOOD)] * 3), [("duplicate_custom_id", 2), ("duplicate_custom_id", 3)]),
    ],
    ids=["empty", "blank", "the same name"],
)
def test_input_without_lines_or_with_names_that_repeat_is_no_batch(
    checked: Check, text: str, problems: list[tuple[str, int | None]]
) -> None:
    assert checked(text)[0] == problems


def test_number_of_lines_and_of_problems_is_bounded(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 2)
    problems, _ = checked("\n".join(json.dumps({**GOOD, "custom_id": f"{n}"}) for n in range(9)))
    assert problems == [("too_many_lines", 3)]
    monkeypatch.setattr(module, "MAX_LINES", 500)
    problems, _ = checked("{\n" * 500)
    assert len(problems) == module.MAX_PROBLEMS


def test_lines_with_a_common_beginning_are_sent_one_after_another(checked: Check) -> None:
    prompts = ["b two", "a one", "b one", "a two"]
    text = "\n".join(json.dumps({**GOOD, "custom_id": prompt, "body": {"prompt": prompt}}) for prompt in prompts)
    _, lines = checked(text)
    assert [prompts[number] for number in lines.order()] == ["a one", "a two", "b one", "b two"]


@pytest.mark.parametrize("chars", [10, 300, 2000, 8000, 30_000])
def test_beginnings_that_differ_late_are_sent_side_by_side(checked: Check, chars: int) -> None:
    documents = ["x" * chars + each + "y" * 40_000 for each in ("dog", "cat", "cow")]
    asked = [(document, question) for question in "ab" for document in documents]
    for bodies in (
        [{"prompt": document + question} for document, question in asked],
        [{"instructions": document, "input": question} for document, question in asked],
    ):
        _, lines = checked(
            "\n".join(json.dumps({**GOOD, "custom_id": f"{n}", "body": b}) for n, b in enumerate(bodies))
        )
        order = lines.order()
        assert sorted(order) == list(range(6))
        assert {tuple(order[at : at + 2]) for at in (0, 2, 4)} == {(0, 3), (1, 4), (2, 5)}


def test_lines_that_differ_stay_in_the_order_of_the_file(checked: Check) -> None:
    prompts = ["x" * 300 + each for each in ("dog", "cat", "cow", "bee", "ant")]
    text = "\n".join(json.dumps({**GOOD, "custom_id": each, "body": {"prompt": each}}) for each in prompts)
    assert checked(text)[1].order() == [0, 1, 2, 3, 4]


def test_seed_follows_from_the_batch_and_the_line() -> None:
    seeds = {seed_of(batch, number) for batch in ("batch_1", "batch_2") for number in range(50)}
    assert len(seeds) == 100 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert seed_of("batch_1", 7) == seed_of("batch_1", 7)
