"""`/v1/files` and `/v1/batches` through the official client, over a real gateway and a scripted scheduler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from shared.batch_lines import URLS
from tests.integration.conftest import KEY, OTHER, TEXT, add_key
from tests.support.gateway.clients import openai_client
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler
from tests.support.waiting import until

ENDED = ("completed", "failed", "expired", "cancelled")
CHAT: Any = "/v1/chat/completions"


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, model: Path, redis_server: RedisServer
) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("gateway")
    (directory / "keys").write_text(f"{KEY}\n{OTHER}\n")
    settings = {"files_dir": directory / "files", "file_bytes": 100_000, "tenant_file_bytes": 1 << 20}
    with running_gateway(
        directory, model, redis_server, api_key_file=directory / "keys", tenant_files=20, batch_requests=4,
        max_body_bytes=20_000, **settings,
    ) as running:  # fmt: skip
        running.key = KEY
        yield running


@pytest.fixture
def client(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> Iterator[openai.OpenAI]:
    with openai_client(gateway, KEY) as made:
        yield made
        for file in made.files.list():
            made.files.delete(file.id)


def line(name: str, model: str, url: str = CHAT, **body: Any) -> str:
    said = {"messages": [{"role": "user", "content": name}]} if url == CHAT else {}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"model": model, **said, **body}})


def begin(client: openai.OpenAI, lines: list[str], endpoint: Any = CHAT, **fields: Any) -> Batch:
    content = "".join(each + "\n" for each in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    until("the batch has ended", lambda: client.batches.retrieve(batch.id).status in ENDED, 60, every=0.05)
    return client.batches.retrieve(batch.id)


def completed(client: openai.OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    return 0 if counts is None else counts.completed


def rows(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def test_cancel_ends_what_runs_and_keeps_what_was_answered(
    client: openai.OpenAI, gateway: GatewayProcess, scheduler: ScriptedScheduler, redis_server: RedisServer
) -> None:
    batch = begin(client, [line(f"{n}", gateway.name, max_tokens=2) for n in range(9)])
    client.files.delete(batch.input_file_id)
    first = scheduler.claim()
    assert first.stream.endswith(":low")
    scheduler.serve(first, [50])
    running = [scheduler.claim() for _ in range(4)]
    assert scheduler.claim_one() is None, "no more lines than the setting"
    until("a line is counted", lambda: completed(client, batch) == 1)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    cancelled = set()
    for each in running:
        scheduler.wait_control("cancel", each.id)
        cancelled.add(each.id)
        scheduler.controls_from = "0-0"
    batch = ended(client, batch)
    assert (batch.status, len(cancelled)) == ("cancelled", 4)
    assert batch.request_counts is not None and batch.request_counts.completed == 1
    assert len(rows(client, batch.output_file_id)) == 1 and batch.error_file_id is None
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    lease = gateway.keys.batch_lease(batch.id)
    until("the lease is released", lambda: not redis_server.client.exists(lease))


def test_batches_are_listed_for_their_tenant(client: openai.OpenAI, gateway: GatewayProcess, answers: None) -> None:
    made = [begin(client, [line("a", gateway.name, max_tokens=1)]).id for _ in range(3)]
    listed = [batch.id for batch in client.batches.list(limit=2)]  # the client turns the pages
    assert set(made) <= set(listed) and len(set(listed)) == len(listed)
    with openai_client(gateway, OTHER) as other:
        assert list(other.batches.list()) == []
        for ask in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(made[0])
        with pytest.raises(openai.BadRequestError, match="upload it first"):
            input_file = client.batches.retrieve(made[0]).input_file_id
            other.batches.create(input_file_id=input_file, endpoint=CHAT, completion_window="24h")
    for batch_id in made:
        ended(client, client.batches.retrieve(batch_id))


@pytest.mark.parametrize("url", ["/v1/messages", "/v1/rerank"])
def test_other_endpoints_are_refused_by_the_ones_there_are(
    client: openai.OpenAI, gateway: GatewayProcess, url: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        begin(client, [line("a", gateway.name)], url)
    assert all(one in raised.value.message for one in URLS) and raised.value.param == "endpoint"
    batch = ended(client, begin(client, [line("a", gateway.name, url)]))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    [problem] = batch.errors.data
    assert (problem.code, problem.param) == ("invalid_url", "url")
    assert all(one in (problem.message or "") for one in (url, *URLS))


def test_files_come_and_go_through_the_official_client(client: openai.OpenAI, gateway: GatewayProcess) -> None:
    content = b'{"a": "\xf0\x9f\x90\x8b"}\r\n' * 3000
    made = client.files.create(
        file=("../a b.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    known = (made.bytes, made.filename, made.purpose, made.status)
    assert known == (len(content), "../a b.jsonl", "batch", "processed")
    assert made.expires_at == made.created_at + 3600
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == content
    others = [client.files.create(file=b"x", purpose="batch").id for _ in range(4)]
    assert next(file.id for file in client.files.list(limit=2, order="asc")) == made.id
    assert {file.id for file in client.files.list(limit=2)} == {made.id, *others}
    assert list(client.files.list(purpose="batch_output")) == []
    with openai_client(gateway, OTHER) as other:
        assert list(other.files.list()) == []
        for ask in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


def test_form_with_its_file_first_is_taken(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    parts = [("file", ("f", b"x")), ("purpose", (None, b"batch"))]
    assert gateway.request("POST", "/v1/files", files=parts).json()["bytes"] == 1


def test_responses_are_lines_as_well(client: openai.OpenAI, gateway: GatewayProcess, answers: None) -> None:
    url = "/v1/responses"
    batch = ended(client, begin(client, [line("a", gateway.name, url, input="hi", max_output_tokens=100)], url))
    [row] = rows(client, batch.output_file_id)
    stored = client.responses.retrieve(row["response"]["request_id"])
    assert (stored.output_text, row["response"]["body"]["id"]) == (TEXT, stored.id)


@pytest.fixture
def scarce(gateway: GatewayProcess, redis_server: RedisServer) -> str:
    """A key that may send one request a minute, and that the gateway knows."""
    text = add_key(redis_server, gateway.keys, tenant="scarce", requests_per_minute=1)
    until("the gateway knows the key", lambda: gateway.get("/v1/models", key=text).status_code == 200)
    return text


SAID = [{"role": "user", "content": "x"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"}, CHAT: {"messages": SAID}, "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": SAID, "max_tokens": 3},
}  # fmt: skip


@pytest.mark.parametrize("path", [*ASKED, "/v1/batches"])
def test_request_of_each_endpoint_counts_for_the_limits_of_a_key(
    client: openai.OpenAI, gateway: GatewayProcess, answers: None, scarce: str, path: str
) -> None:
    if path in ASKED:
        assert gateway.post(path, ASKED[path], key=scarce).status_code == 200
    else:
        own = client.with_options(api_key=scarce)
        batch = begin(own, [line(name, gateway.name, max_tokens=3) for name in "ab"])
        until("a line is counted", lambda: completed(own, batch) == 1)
    for other, body in ASKED.items():
        refused = gateway.post(other, body, key=scarce)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1, other
        assert "1 requests a minute" in refused.json()["error"]["message"]
    if path not in ASKED:
        assert completed(own, batch) == 1
        own.batches.cancel(batch.id)
        ended(own, batch)
