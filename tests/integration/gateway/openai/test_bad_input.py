"""docs/bad-input.md has what a gateway answers to more than three hundred bad requests, word for word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.docs import bad_input
from tests.support.gateway.process import GatewayProcess


@pytest.fixture(scope="module")
def gateway_and_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GatewayProcess, str]]:
    with bad_input.answers(tmp_path_factory.mktemp("bad")) as found:
        yield found[0].gateway, bad_input.page(*found)


def test_page_holds_the_answers_of_the_gateway(gateway_and_page: tuple[GatewayProcess, str]) -> None:
    _, page = gateway_and_page
    assert page.splitlines() == bad_input.PAGE.read_text().splitlines(), "run `python -m tests.support.docs.bad_input`"


def test_bad_request_is_refused_with_a_message_never_with_500(gateway_and_page: tuple[GatewayProcess, str]) -> None:
    _, page = gateway_and_page
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) >= 100
    for row in rows:
        status, code, param, message = row[-4:]
        assert not status.startswith(("2", "500")), row
        assert status not in ("internal", "unknown"), row
        assert len(message) >= 10, row
        assert status != "400" or code != " " or param, row


def test_gateway_serves_after_all_bad_requests(gateway_and_page: tuple[GatewayProcess, str]) -> None:
    gateway, _ = gateway_and_page
    answer = gateway.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert "Traceback" not in gateway.log()
    assert gateway.get("/v1/files").json()["data"] == [], "no refused form leaves a file"
