"""docs/bad-input.md says what a gateway answers to more than a hundred bad requests, word for word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.docs import bad_input
from tests.support.docs.bad_input import Answer, Asked

pytestmark = pytest.mark.slow  # each kind of field is refused in test_api.py, too


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Asked, list[Answer], list[Answer]]]:
    with bad_input.answers(tmp_path_factory.mktemp("bad")) as found:
        yield found


@pytest.fixture(scope="module")
def page(asked: tuple[Asked, list[Answer], list[Answer]]) -> str:
    return bad_input.page(*asked)


def test_the_page_says_what_the_gateway_answers(page: str) -> None:
    assert page.splitlines() == bad_input.PAGE.read_text().splitlines(), "run `python -m tests.support.docs.bad_input`"


def test_every_bad_request_is_refused_with_a_message_and_never_with_500(page: str) -> None:
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) >= 100
    for row in rows:
        status, code, param, message = row[-4:]
        assert not status.startswith(("2", "500")), row
        assert status not in ("internal", "unknown"), row
        assert len(message) >= 10, row
        assert status != "400" or code != " " or param, row


def test_the_gateway_serves_on_behind_all_of_it(asked: tuple[Asked, list[Answer], list[Answer]], page: str) -> None:
    gateway = asked[0].gateway
    headers = {"Authorization": f"Bearer {bad_input.USER}"}
    answer = gateway.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert "Traceback" not in gateway.log()
