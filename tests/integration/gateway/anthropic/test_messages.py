"""`/v1/messages` over HTTP: whole, streamed, counted, and every error in its shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.batches.files import FileStore, new_id
from services.gateway.batches.records import BatchStore
from shared.settings import GatewaySettings
from tests.integration.conftest import KEY, OTHER
from tests.support import sse
from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway.process import GatewayProcess, led_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ERROR, STOP, Line, ScriptedScheduler, answering
from tests.support.waiting import until

SAID = '<think>fox?</think>The <tool_call>{"name": "look", "arguments": {"at": "fox"}}</tool_call>'
SETTINGS: dict[str, Any] = {"served_model_name": "claude", "reasoning_parser": "think", "tool_parser": "hermes"}
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
BODY: dict[str, Any] = {
    "model": "claude", "max_tokens": 100, "messages": [{"role": "user", "content": "x"}], "tools": [TOOL],
    "metadata": {"user_id": "u"},
}  # fmt: skip
CONTENT = [
    {"type": "thinking", "thinking": "fox?"},
    {"type": "text", "text": "The"},
    {"type": "tool_use", "name": "look", "input": {"at": "fox"}},
]
HEADERS = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "some-beta-2099-01-01"}


@pytest.fixture(scope="module")
def led(
    tmp_path_factory: pytest.TempPathFactory, model: Path, redis_server: RedisServer
) -> Iterator[tuple[GatewayProcess, ScriptedScheduler]]:
    directory = tmp_path_factory.mktemp("claude")
    (directory / "keys").write_text(f"{KEY}\n{OTHER}\n")
    limits = {
        "api_key_file": directory / "keys", "max_body_bytes": 20_000, "max_header_bytes": 4096,
        "files_dir": directory / "files", "batch_requests": 2,
    }  # fmt: skip
    with led_gateway(directory, model, redis_server, **SETTINGS, **limits) as found:
        found[0].key = KEY
        yield found


@pytest.fixture
def claude(led: tuple[GatewayProcess, ScriptedScheduler]) -> Iterator[GatewayProcess]:
    """A gateway of a model that thinks, speaks and calls a tool."""
    gateway, scheduler = led
    with answering(scheduler, lambda _: token_ids(SAID), STOP):
        yield gateway


def post(gateway: GatewayProcess, path: str = "", headers: dict[str, str] = HEADERS, **fields: Any) -> httpx.Response:
    return gateway.post(f"/v1/messages{path}", BODY | fields, headers=headers, key="")


def bare(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return blocks without ids and signatures."""
    return [{name: value for name, value in block.items() if name not in ("id", "signature")} for block in content]


def test_message_has_thinking_text_and_calls(claude: GatewayProcess) -> None:
    answer = post(claude)
    body = answer.json()
    assert bare(body["content"]) == CONTENT
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert body.keys() == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert (body["stop_reason"], body["model"], body["id"][:4]) == ("tool_use", "claude", "msg_")
    assert body["usage"]["output_tokens"] == len(token_ids(SAID))
    counted = post(claude, "/count_tokens", max_tokens=None, metadata=None)
    assert counted.status_code == 400  # no field of this endpoint
    fields = {name: BODY[name] for name in ("model", "messages", "tools")}
    counted = claude.post("/v1/messages/count_tokens", fields)
    assert counted.json() == {"input_tokens": body["usage"]["input_tokens"]}
    assert claude.get(f"/v1/requests/{body['id']}").json()["result"] == body


def test_usage_parts_the_cached_tokens_of_the_prompt(led: tuple[GatewayProcess, ScriptedScheduler]) -> None:
    gateway, scheduler = led
    with gateway.stream(BODY, "/v1/messages") as answer:
        claimed = scheduler.claim()
        scheduler.publish(Line(claimed.id, 0, [50], finish=STOP, cached=3), started=[claimed.id])
        scheduler.end(claimed, [[50]], [STOP])
        start, *_, delta, _ = (event.json for event in sse.events(answer.iter_lines()))
    for usage in (start["message"]["usage"], delta["usage"]):
        assert usage["cache_read_input_tokens"] == 3
        assert usage["input_tokens"] == sum(map(len, claimed.prompts)) - 3
    path = f"/v1/requests/{claimed.id}"

    def kept() -> bool:
        """Whether the record has the tokens: they are written behind the first token, and no answer waits for that."""
        found = gateway.get(path).json()["result"]["usage"]
        return bool(found == {**found, "cache_read_input_tokens": 3})

    until("the record has the cached tokens", kept)
    again = sse.parse(gateway.get(f"{path}/stream").content)
    assert again[0].json["message"]["usage"] == start["message"]["usage"]
    assert scheduler.client.ttl(gateway.keys.req(claimed.id)) > 0


def test_failure_of_a_worker_is_an_error_event(led: tuple[GatewayProcess, ScriptedScheduler]) -> None:
    gateway, scheduler = led
    with gateway.stream(BODY, "/v1/messages") as answer:
        claimed = scheduler.claim()
        scheduler.publish(Line(claimed.id, 0, [50, 51]), started=[claimed.id])
        scheduler.publish(Line(claimed.id, 2, [], finish=ERROR, error="the worker died"))
        *_, last = sse.events(answer.iter_lines())
    error = {"type": "api_error", "message": "the worker died"}
    assert (last.kind, last.json) == ("error", {"type": "error", "error": error})
    scheduler.end(claimed, [[50, 51]], [ERROR])


def refused(answer: httpx.Response, status: int, kind: str, words: str) -> None:
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), answer.text
    assert words in body["error"]["message"]
    assert body["error"].keys() == {"type", "message"}


def test_errors_have_the_shape_of_this_api_wherever_they_come_from(claude: GatewayProcess) -> None:
    thread = post(claude, thread={"type": "create"}).json()["error"]
    assert thread.pop("details") == {"error_code": "thread_unsupported_request"}
    assert thread.keys() == {"type", "message"}
    refused(post(claude, headers={}), 401, "authentication_error", "X-Api-Key: KEY")
    refused(post(claude, headers={"x-api-key": "wrong"}), 401, "authentication_error", "not valid")
    refused(post(claude, headers={"authorization": "Bearer wrong"}), 401, "authentication_error", "not valid")
    refused(post(claude, "/nothing"), 404, "not_found_error", "/v1/messages/nothing")
    refused(post(claude, model="gpt"), 404, "not_found_error", "'gpt'")
    refused(post(claude, system="x" * 30_000), 413, "request_too_large", "20000")
    refused(post(claude, max_tokens=0), 400, "invalid_request_error", "max_tokens")
    refused(claude.get("/v1/messages"), 405, "invalid_request_error", "POST")
    refused(post(claude, headers=HEADERS | {"x-long": "x" * 9000}), 431, "invalid_request_error", "head too large")
    text = claude.request("POST", "/v1/messages", content=b"{")
    refused(text, 415, "invalid_request_error", "application/json")
    assert post(claude, headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    chat = claude.post("/v1/chat/completions", {}, key="")
    assert chat.json()["error"]["code"] == "invalid_api_key"  # other paths keep OpenAI's shape


# Batches

BATCHES = "/v1/messages/batches"


def asked(name: str, **params: Any) -> dict[str, Any]:
    return {"custom_id": name, "params": BODY | params}


def batched(gateway: GatewayProcess, *requests: dict[str, Any]) -> dict[str, Any]:
    answer = gateway.request("POST", BATCHES, json={"requests": requests})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def got(gateway: GatewayProcess, batch: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = gateway.get(f"{BATCHES}/{batch['id']}").json()
    return found


def ended(gateway: GatewayProcess, batch: dict[str, Any]) -> dict[str, Any]:
    until("the batch has ended", lambda: got(gateway, batch)["processing_status"] == "ended", 60)
    return got(gateway, batch)


def results(gateway: GatewayProcess, batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = [json.loads(text) for text in gateway.get(batch["results_url"]).text.splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row["result"] for row in rows}


def counts(**counted: int) -> dict[str, int]:
    return dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0) | counted


def test_batch_has_a_result_of_each_request(claude: GatewayProcess) -> None:
    before = {file["id"] for file in claude.get("/v1/files").json()["data"]}
    made = batched(claude, asked("a"), asked("b", system="s"), asked("c", model="gpt"), asked("d", max_tokens=0))
    assert (made["type"], made["request_counts"], made["results_url"]) == ("message_batch", counts(processing=4), None)
    batch = ended(claude, made)
    assert batch["request_counts"] == counts(succeeded=2, errored=2)
    assert batch["created_at"] <= batch["ended_at"] < batch["expires_at"]
    found = results(claude, batch)
    for name in "ab":
        assert (found[name]["type"], bare(found[name]["message"]["content"])) == ("succeeded", CONTENT)
    for name, kind in (("c", "not_found_error"), ("d", "invalid_request_error")):
        error = found[name]["error"]
        assert (found[name]["type"], error["type"], error["error"]["type"]) == ("errored", "error", kind)
    for method, path in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
        answer = claude.request(method, f"{BATCHES}/{batch['id']}{path}", key=OTHER)
        refused(answer, 404, "not_found_error", "not found; GET /v1/messages/batches")
    assert claude.request("GET", BATCHES, key=OTHER).json()["data"] == []
    refused(claude.request("POST", f"{BATCHES}/{batch['id']}/cancel"), 409, "invalid_request_error", "completed")
    deleted = claude.request("DELETE", f"{BATCHES}/{batch['id']}").json()
    assert deleted == {"id": batch["id"], "type": "message_batch_deleted"}
    assert claude.get(f"{BATCHES}/{batch['id']}").status_code == 404
    assert {file["id"] for file in claude.get("/v1/files").json()["data"]} == before


def test_cancelled_batch_says_which_requests_have_no_message(led: tuple[GatewayProcess, ScriptedScheduler]) -> None:
    gateway, scheduler = led
    made = batched(gateway, *(asked(name) for name in "abc"))
    first, _ = scheduler.claim(), scheduler.claim()
    refused(gateway.get(f"{BATCHES}/{made['id']}/results"), 409, "invalid_request_error", "ask again once its")
    refused(gateway.request("DELETE", f"{BATCHES}/{made['id']}"), 409, "invalid_request_error", "cancel it first")
    tokens = token_ids(SAID)
    scheduler.publish(Line(first.id, 0, tokens, finish=STOP), started=[first.id])
    scheduler.end(first, [tokens], [STOP])
    scheduler.claim()  # the third request is sent once the first is answered
    cancelled = gateway.request("POST", f"{BATCHES}/{made['id']}/cancel").json()
    assert cancelled["cancel_initiated_at"] is not None and cancelled["processing_status"] in ("canceling", "ended")
    batch = ended(gateway, made)
    assert batch["request_counts"] == counts(succeeded=1, canceled=2)
    kinds = sorted(result["type"] for result in results(gateway, batch).values())
    assert kinds == ["canceled", "canceled", "succeeded"]


def test_expired_batch_says_which_requests_did_not_run(led: tuple[GatewayProcess, ScriptedScheduler]) -> None:
    gateway, scheduler = led
    made = batched(gateway, asked("a"), asked("b"))
    scheduler.claim(), scheduler.claim()
    files_dir = Path(gateway.environment["ORCINUS_FILES_DIR"])
    batches = BatchStore(FileStore(GatewaySettings(files_dir=files_dir, served_model_name=gateway.name)))
    (running,) = (batch for batch in batches.find_unfinished() if batch.id == made["id"])
    order = batches.order(running)
    assert order is not None
    late = batches.create(replace(order, id=new_id("batch_"), expires_at=order.created_at)).order
    batch = ended(gateway, {"id": late.id})
    assert batch["request_counts"] == counts(expired=2)
    assert results(gateway, batch) == {"a": {"type": "expired"}, "b": {"type": "expired"}}
    gateway.request("POST", f"{BATCHES}/{made['id']}/cancel")
    ended(gateway, made)


def test_batches_are_listed_a_page_at_a_time(claude: GatewayProcess) -> None:
    made = [batched(claude, asked("a"))["id"] for _ in range(3)]
    for one in made:
        ended(claude, {"id": one})
    newest = sorted((batch["id"] for batch in claude.get(f"{BATCHES}?limit=1000").json()["data"]), reverse=True)
    assert set(made) <= set(newest)
    pages = {"": newest[:2], f"&after_id={newest[0]}": newest[1:3], f"&before_id={newest[2]}": newest[:2]}
    for query, expected in pages.items():
        page = claude.get(f"{BATCHES}?limit=2{query}").json()
        assert [batch["id"] for batch in page["data"]] == expected
        assert (page["first_id"], page["last_id"]) == (expected[0], expected[-1])
    assert not claude.get(f"{BATCHES}?before_id={newest[1]}").json()["has_more"]
    assert claude.get(f"{BATCHES}?limit=1&before_id={newest[2]}").json()["has_more"]
    for query in ("after_id=x", f"after_id={made[0]}&before_id={made[1]}", "limit=0"):
        refused(claude.get(f"{BATCHES}?{query}"), 400, "invalid_request_error", query.partition("=")[0])
    assert newest[0] in [batch["id"] for batch in claude.get("/v1/batches").json()["data"]]


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "at least 1 item"),
        ([asked("a b")], "requests[0].custom_id"),
        ([asked("a"), asked("a")], "requests[1].custom_id 'a' occurs twice"),
        ([asked("a", stream=True)], "requests[0].params.stream is True; leave it out"),
        ([asked("a", priority="high")], "requests[0].params.priority is 'high'; leave it out"),
        ([{"custom_id": "a"}], "params"),
    ],
)
def test_batch_that_cannot_begin_is_refused(claude: GatewayProcess, requests: list[dict[str, Any]], words: str) -> None:
    files = len(claude.get("/v1/files").json()["data"])
    answer = claude.request("POST", BATCHES, json={"requests": requests})
    refused(answer, 400, "invalid_request_error", words)
    assert len(claude.get("/v1/files").json()["data"]) == files
