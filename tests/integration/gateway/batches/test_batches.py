"""`/v1/files` and `/v1/batches` through the official client, over a real gateway and a scripted scheduler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.integration.conftest import KEY, OTHER, TEXT
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler
from tests.support.waiting import until

ENDED = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"


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
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key=KEY, max_retries=0) as made:
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
    def look() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ENDED else None

    return until("the batch has ended", look, 60, every=0.05)


def rows(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def test_every_line_is_answered_once(client: openai.OpenAI, gateway: GatewayProcess, answers: None) -> None:
    names = [f"line-{n}" for n in range(20)]
    lines = [line(name, gateway.name, max_tokens=9) for name in names]
    lines.insert(7, line("wrong", "another-model"))
    batch = begin(client, lines, metadata={"a": "b"})
    assert (batch.status, batch.metadata, batch.request_counts and batch.request_counts.total) == (
        "validating", {"a": "b"}, 0,
    )  # fmt: skip
    batch = ended(client, batch)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 21, "completed": 20, "failed": 1}
    answered = rows(client, batch.output_file_id)
    assert [row["custom_id"] for row in answered] == names
    assert all(TEXT.startswith(row["response"]["body"]["choices"][0]["message"]["content"]) for row in answered)
    assert {row["response"]["status_code"] for row in answered} == {200}
    [failed] = rows(client, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("wrong", 404)
    assert failed["response"]["body"]["error"]["code"] == "model_not_found"
