"""Several models in one Redis behind one gateway: which one a name means, what is listed, what is refused, what is let
go.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import orjson
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from protos import kserve_pb2 as kserve
from protos.kserve_pb2_grpc import GRPCInferenceServiceStub
from services.gateway import models
from services.gateway.adapters import AdapterRecord
from services.gateway.auth import ANONYMOUS, Caller
from services.gateway.delivery.background import OrphanAdopter
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway
from services.gateway.kserve.front import GrpcFront
from services.gateway.models import LEAST_IDLE_S, ServedModel
from services.gateway.openai.bodies import CompletionBody
from services.gateway.openai.completions import completion_spec
from services.gateway.text.tokenizer import ModelText
from shared.errors import ConfigurationError, ModelError
from shared.keys import PLACER, PLACER_KEYS, Keys
from shared.placement import Placement
from shared.security import api_keys
from shared.security.api_keys import KeyRecord
from shared.settings import GatewaySettings
from tests.integration.conftest import add_key
from tests.integration.gateway.conftest import asgi, in_process
from tests.support.checkpoints.tokenizers import CONTEXT, byte_level, token_ids, write_model
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler, answering
from tests.support.waiting import free_port, wait_until

FIRST, SECOND, THIRD = "first", "org/Second", "third"
FILE = """
models:
  first: {source: a, aliases: [gpt-4o]}
  org/Second: {source: b, aliases: ["claude:latest"]}
  third: {source: c}
"""
TEXTS = {FIRST: "and so on", SECOND: "what else"}


def lead(redis_server: RedisServer, name: str) -> ScriptedScheduler:
    """A scheduler and a worker of a model."""
    return ScriptedScheduler(redis_server.client, Keys(name)).lead()


def leave(redis_server: RedisServer, name: str) -> None:
    keys = Keys(name)
    redis_server.client.delete(keys.workers, keys.worker("worker-0"), keys.lease("shard-0"))


@pytest.fixture(scope="module", autouse=True)
def schedulers(redis_server: RedisServer) -> Iterator[dict[str, ScriptedScheduler]]:
    """Two of the three models run; each answers with a text of its own."""
    found = {name: lead(redis_server, name) for name in TEXTS}
    with (
        answering(found[FIRST], lambda _: token_ids(TEXTS[FIRST])),
        answering(found[SECOND], lambda _: token_ids(TEXTS[SECOND])),
    ):
        yield found


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> GatewaySettings:
    directory = tmp_path_factory.mktemp("several")
    for name in "abc":
        write_model(directory / name, byte_level(), chat_template="{{ messages[0].content }}" + name)
    (directory / "models.yaml").write_text(FILE)
    (directory / "adapters").mkdir()
    return GatewaySettings(
        models=directory / "models.yaml", redis_url=redis_server.url, files_dir=directory / "files",
        adapter_dir=directory / "adapters",
    )  # fmt: skip


@pytest.fixture
async def gateway(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    text = ModelText(settings.model)
    async with in_process(settings, text) as running:
        await wait_until(lambda: running.models.state(SECOND) == "ready")
        yield running
    text.close()


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with asgi(gateway) as client:
        yield client


async def complete(client: httpx.AsyncClient, model: str, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": model, "prompt": "The", "max_tokens": 64, **fields})


async def text_of(client: httpx.AsyncClient, model: str) -> str:
    answer = await complete(client, model)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


async def test_name_or_alias_chooses_the_model(client: httpx.AsyncClient, gateway: Gateway) -> None:
    assert [model.name for model in gateway.models.models()] == [FIRST]  # nothing is read before it is asked for
    assert await text_of(client, FIRST) == TEXTS[FIRST]
    assert await text_of(client, "gpt-4o") == TEXTS[FIRST]
    assert await text_of(client, SECOND) == TEXTS[SECOND]
    assert await text_of(client, "claude:latest") == TEXTS[SECOND]
    assert [model.name for model in gateway.models.models()] == [FIRST, SECOND]


async def test_name_of_the_first_model_is_no_alias_of_another(settings: GatewaySettings, tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("models: {second: {source: b, aliases: [claude]}}")
    given = settings.model_copy(update={"models": path, "served_model_name": "claude"})
    text = ModelText(given.model)
    with pytest.raises(ConfigurationError, match="'claude' names both 'claude' and 'second'"):
        Gateway(given, text)
    text.close()


async def test_adapter_never_answers_for_a_model(
    client: httpx.AsyncClient, gateway: Gateway, redis_server: RedisServer
) -> None:
    names, adapters = (FIRST, "gpt-4o", SECOND, "claude:latest", THIRD), gateway.first_model.settings.keys.adapters
    for name in names:
        if ":" not in name:  # which no adapter's name has
            answer = await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "x"})
            assert answer.status_code == 400
            assert f"lora_name: {name!r} is the name or an alias of a model" in answer.json()["error"]["message"]
        record = AdapterRecord("ab" * 32, 1, "x", 1)  # as if it was loaded before the model had the name
        redis_server.client.hset(adapters, name, orjson.dumps(asdict(record)))
    try:
        await wait_until(lambda: set(names) <= gateway.first_model.adapters.records.keys())
        for name, model in zip(names, (FIRST, FIRST, SECOND, SECOND), strict=False):
            assert await text_of(client, name) == TEXTS[model]
        assert (await complete(client, THIRD)).status_code == 404  # it does not run
        for name in names:
            assert "parent" not in (await client.get(f"/v1/models/{name}")).json()
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == [FIRST, SECOND, THIRD]
    finally:
        redis_server.client.delete(adapters)


async def test_adapters_of_models_that_are_not_open_are_listed(
    client: httpx.AsyncClient, gateway: Gateway, redis_server: RedisServer
) -> None:
    record, key = AdapterRecord("ab" * 32, 1, "/x", 7), Keys(SECOND).adapters
    stored = {"sql": record.encode(), "gone": replace(record, unloaded_s=9).encode(), SECOND: record.encode()}
    redis_server.client.hset(key, mapping=stored | {"broken": b"{", b"\xff": record.encode()})
    redis_server.client.set(Keys(THIRD).adapters, "of another type")
    try:
        *models, card = (await client.get("/v1/models")).json()["data"]
        assert ([each["id"] for each in models], card["id"]) == ([FIRST, SECOND, THIRD], "sql")
        assert (card["parent"], card["root"], card["created"], card["state"]) == (SECOND, "/x", 7, "ready")
        assert (await client.get("/v1/models/sql")).json() == card
        for name in ("gone", "broken"):
            assert (await client.get(f"/v1/models/{name}")).status_code == 404
        assert set(gateway.models.open) == {FIRST, "gpt-4o"}
        bound = Caller("t", models=frozenset({FIRST}))
        assert await gateway.models.adapters(bound) == {}
        assert await text_of(client, "sql") == TEXTS[SECOND]
        assert (await client.get("/v1/models")).json()["data"][-1]["id"] == "sql"
    finally:
        redis_server.client.delete(key, Keys(THIRD).adapters)


async def test_adapter_of_a_model_that_is_not_open_opens_it(
    client: httpx.AsyncClient, gateway: Gateway, redis_server: RedisServer, schedulers: dict[str, ScriptedScheduler]
) -> None:
    record = AdapterRecord("ab" * 32, 1, "x", 1)
    key = Keys(SECOND).adapters
    redis_server.client.hset(key, "sql", record.encode())
    try:
        answer = await client.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "x"})
        assert f"'sql' is an adapter of {SECOND!r}" in answer.json()["error"]["message"]
        assert SECOND not in gateway.models.open
        assert await text_of(client, "sql") == TEXTS[SECOND]
        model = gateway.models.open[SECOND]
        assert (await client.get("/v1/models/sql")).json()["parent"] == SECOND
        answer = await client.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "x"})
        assert f"'sql' is an adapter of {SECOND!r}" in answer.json()["error"]["message"]
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql", "model": "claude:latest"})
        assert answer.status_code == 200
        assert model.adapters.records == {}
        for path in ("/v1/completions", "/v1/messages/count_tokens", "/tokenize"):
            answer = await client.post(path, json=BODIES[path] | {"model": "sql"})
            assert (path, answer.status_code) == (path, 404)
    finally:
        redis_server.client.delete(key)


@pytest.mark.usefixtures("schedulers")
async def test_model_that_has_an_adapter_comes_before_one_that_had_it(
    gateway: Gateway, redis_server: RedisServer
) -> None:
    standing = AdapterRecord("ab" * 32, 1, "x", 1)
    former = replace(standing, unloaded_s=int(time.time()))
    key, other = Keys(THIRD).adapters, Keys(SECOND).adapters  # the order of the file is the other one
    for stored in (former.encode(), b"no record", replace(former, unloaded_s=1).encode()):
        redis_server.client.hset(key, "sql", standing.encode())
        redis_server.client.hset(other, "sql", stored)
        try:
            found = await gateway.models.closed_with("sql")
            assert found[0] == (found[0][0], standing) and found[0][0].name == THIRD
            assert [record for _, record in found[1:]] == ([former] if stored == former.encode() else [])
        finally:
            redis_server.client.delete(key, other)


async def test_adapter_of_a_model_that_the_key_is_not_for_is_unknown(
    client: httpx.AsyncClient, gateway: Gateway, redis_server: RedisServer, keys_of: dict[str, dict[str, str]]
) -> None:
    key = Keys(THIRD).adapters
    lead(redis_server, THIRD)
    redis_server.client.hset(key, "sql", AdapterRecord("ab" * 32, 1, "x", 1).encode())
    try:
        client.headers.update(keys_of["second"])
        assert (await complete(client, "sql")).status_code == 404
        assert THIRD not in gateway.models.open
    finally:
        redis_server.client.delete(key)
        leave(redis_server, THIRD)


async def test_first_requests_of_a_model_open_it_once(client: httpx.AsyncClient, gateway: Gateway) -> None:
    opened: list[ServedModel] = []
    gateway.models.on_open = opened.append
    answers = await asyncio.gather(*(text_of(client, SECOND) for _ in range(8)))
    assert answers == [TEXTS[SECOND]] * 8
    assert opened == [gateway.models.open[SECOND]]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/embeddings": {"input": "x"},
    "/v2/embed": {"texts": ["x"], "input_type": "clustering"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/rerank": {"query": "x", "documents": ["y"]},
    "/v2/rerank": {"query": "x", "documents": ["y"]},
    "/score": {"text_1": "x", "text_2": "y"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "x"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
}


async def test_bodies_are_those_of_all_endpoints_with_a_model(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"].items()
    kinds = [f"#/components/schemas/{name}" for name, schema in schemas if "model" in schema.get("properties", {})]
    texts = {path: json.dumps(operations.get("post", {})) for path, operations in document["paths"].items()}
    assert {path for path, text in texts.items() if any(f'"{kind}"' in text for kind in kinds)} == BODIES.keys()


async def test_model_without_a_worker_is_a_404_that_lists_the_others(client: httpx.AsyncClient) -> None:
    for path, body in BODIES.items():
        for name, problem, remedy, code in (
            (THIRD, "has no worker", "; start its scheduler and a worker", "model_unavailable"),
            ("gpt-5", "does not exist", "", "model_not_found"),
        ):
            answer = await client.post(path, json={"model": name, **body})
            message = f"The model '{name}' {problem}; this server has first, org/Second{remedy}"
            error = answer.json()["error"]
            assert (answer.status_code, error["message"]) == (404, message), path
            assert path.startswith("/v1/messages") or error["code"] == code


async def test_each_model_has_its_template_and_tokenizer(client: httpx.AsyncClient) -> None:
    counts = {}
    for name in (FIRST, SECOND):
        body = {"model": name, "messages": [{"role": "user", "content": "x"}]}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        text = (await client.post("/detokenize", json={"model": name, "tokens": tokens})).json()["prompt"]
        counts[name] = text[-2:]
    assert counts == {FIRST: "xa", SECOND: "xb"}


async def test_tokenizer_info_is_that_of_the_model(
    client: httpx.AsyncClient, keys_of: dict[str, dict[str, str]]
) -> None:
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": None, "unk_token": None}
    expected = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "max_model_len": CONTEXT}
    template = "{{ messages[0].content }}"
    assert (await client.get("/tokenizer_info")).status_code == 401
    client.headers.update(keys_of["second"])
    for path in ("/tokenizer_info", f"/tokenizer_info?model={FIRST}"):
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")
    for name in (SECOND, "claude:latest"):
        found = (await client.get("/tokenizer_info", params={"model": name})).json()
        assert found == {**expected, "chat_template": template + "b"}
    client.headers.update(keys_of["any"])
    assert (await client.get("/tokenizer_info")).json() == {**expected, "chat_template": template + "a"}
    assert (await client.get("/tokenizer_info?model=gpt-5")).status_code == 404


async def test_models_are_listed_with_their_states(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()["data"]
    states = {card["id"]: (card["state"], card["aliases"]) for card in listed}
    expected = {
        FIRST: ("ready", ["gpt-4o"]), SECOND: ("ready", ["claude:latest"]), THIRD: ("unavailable", []),
    }  # fmt: skip
    assert states == expected
    for path in (SECOND, SECOND.replace("/", "%2F"), "claude:latest"):
        assert (await client.get(f"/v1/models/{path}")).json()["id"] == SECOND
    for path in ("gpt-5", SECOND.lower()):
        assert (await client.get(f"/v1/models/{path}")).status_code == 404


async def ready(client: httpx.AsyncClient, **headers: str) -> tuple[int, dict[str, str] | None]:
    answer = await client.get("/ready", headers=headers)
    return answer.status_code, answer.json().get("models")


async def test_gateway_is_ready_while_one_model_is_and_says_which(
    client: httpx.AsyncClient, gateway: Gateway, schedulers: dict[str, ScriptedScheduler]
) -> None:
    assert await ready(client) == (200, {FIRST: "ready", SECOND: "ready", THIRD: "unavailable"})
    try:
        schedulers[FIRST].resign()
        await wait_until(lambda: gateway.models.state(FIRST) == "loading")
        assert await ready(client) == (200, {FIRST: "loading", SECOND: "ready", THIRD: "unavailable"})
        assert b"orcinus_stack_ready 1.0" in gateway.metrics.text()
        schedulers[SECOND].resign()
        await wait_until(lambda: gateway.models.state(SECOND) == "loading")
        assert await ready(client) == (503, {FIRST: "loading", SECOND: "loading", THIRD: "unavailable"})
        assert (await client.get("/ready")).json()["reason"] == "no scheduler is alive"
    finally:
        for scheduler in schedulers.values():
            scheduler.lead()
    await wait_until(lambda: not gateway.reason_not_ready())


async def test_ready_names_no_models_without_a_key_that_is_for_them(
    client: httpx.AsyncClient, keys_of: dict[str, dict[str, str]]
) -> None:
    assert await ready(client) == (200, None)
    assert await ready(client, **keys_of["second"]) == (200, {SECOND: "ready"})


def place(redis_server: RedisServer, name: str, is_awake: bool, lives: bool = True) -> None:
    """Leave in Redis that a placer, which lives or does not, wants the model awake or asleep."""
    wanted = Placement(is_awake, wake_ms=(1000, 2000, 30_000, 40_000))
    if lives:
        redis_server.client.set(PLACER_KEYS.lease(PLACER), "1", px=60_000)
    redis_server.client.hset(PLACER_KEYS.placements, name, wanted.encode())


@contextlib.asynccontextmanager
async def without_worker(gateway: Gateway, redis_server: RedisServer, name: str = SECOND) -> AsyncIterator[None]:
    """Take the model's worker away within the block; end what is placed behind it."""
    redis_server.client.delete(Keys(name).worker("worker-0"))
    try:
        yield
    finally:
        redis_server.client.delete(PLACER_KEYS.lease(PLACER), PLACER_KEYS.placements)
        ScriptedScheduler(redis_server.client, Keys(name)).register()
    await wait_until(lambda: gateway.models.state(name) == "ready")


def sees_empty_queue(model: ServedModel, since: float) -> bool:
    """Return whether the gateway has read the queue since then and found no request, which would wake the model."""
    snapshot = model.cluster.snapshot
    return snapshot is not None and snapshot.at > since and not int(snapshot.queue.get("requests", 0))


@pytest.fixture(params=[True, False], ids=["open", "closed"])
async def second(request: pytest.FixtureRequest, gateway: Gateway) -> Callable[[str], Awaitable[object]]:
    """Wait for a state of the second model, which is open or is not."""
    if request.param:
        await gateway.models.open_model(SECOND, None)
    return lambda state: wait_until(lambda: gateway.models.state(SECOND) == state)


async def test_model_is_loading_once_the_record_of_its_worker_has_run_out(
    gateway: Gateway, redis_server: RedisServer, second: Callable[[str], Awaitable[object]]
) -> None:
    async with without_worker(gateway, redis_server):
        await second("loading")


async def test_model_without_a_worker_sleeps_while_a_placer_lives_that_wants_it(
    client: httpx.AsyncClient, gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch,
    second: Callable[[str], Awaitable[object]],
) -> None:  # fmt: skip
    async with without_worker(gateway, redis_server):
        place(redis_server, SECOND, True)
        await second("loading")
        place(redis_server, SECOND, False)
        await second("asleep")
        assert (await ready(client))[1] == {FIRST: "ready", SECOND: "asleep", THIRD: "unavailable"}
        assert await text_of(client, SECOND) == TEXTS[SECOND], "it is admitted; the scheduler is here at once"
        answered = time.monotonic()
        await wait_until(lambda: sees_empty_queue(gateway.models.open[SECOND], answered))
        refused = await complete(client, SECOND, deadline_ms=10_000)
        assert refused.status_code == 429 and "does not wake it" in refused.json()["error"]["message"]
        assert "Retry-After" not in refused.headers
        redis_server.client.delete(PLACER_KEYS.lease(PLACER))
        place(redis_server, SECOND, True, lives=False)
        await second("loading")
        place(redis_server, SECOND, False, lives=False)
        await second("asleep")  # a placer is about to be there again
        monkeypatch.setattr("services.gateway.cluster.PLACER_S", 0.0)
        await second("loading")


async def test_model_of_a_placer_is_asked_for_again_while_its_scheduler_starts(
    client: httpx.AsyncClient, gateway: Gateway, redis_server: RedisServer, schedulers: dict[str, ScriptedScheduler],
    second: Callable[[str], Awaitable[object]],
) -> None:  # fmt: skip
    async with without_worker(gateway, redis_server):
        place(redis_server, SECOND, False)
        schedulers[SECOND].resign()
        try:
            await second("loading")
            refused = await complete(client, SECOND)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_scheduler")
            assert "Retry-After" in refused.headers
        finally:
            schedulers[SECOND].lead()
        redis_server.client.delete(Keys(SECOND).worker("worker-0"))
        await second("asleep")
        assert await text_of(client, SECOND) == TEXTS[SECOND]


async def test_state_is_unknown_while_redis_is_silent(
    client: httpx.AsyncClient, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise RedisConnectionError("away")

    gateway.cluster.note_unreachable("away")
    assert gateway.models.state(FIRST) == "unknown"
    monkeypatch.setattr(models, "STALE_S", 0.0)
    monkeypatch.setattr(models, "look", fails)
    assert gateway.models.state(THIRD) == "unknown"
    answer = await complete(client, THIRD)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "redis_unavailable")
    monkeypatch.undo()
    await wait_until(lambda: gateway.models.state(THIRD) == "unavailable" and gateway.models.state(FIRST) == "ready")


async def see_third_loading(gateway: Gateway, redis_server: RedisServer) -> None:
    """Lend the third model a lease until the gateway has seen it come and go."""
    keys = Keys(THIRD)
    redis_server.client.set(keys.lease("shard-0"), "1", px=60_000)
    await wait_until(lambda: gateway.models.state(THIRD) == "loading")
    redis_server.client.delete(keys.lease("shard-0"))
    await wait_until(lambda: gateway.models.state(THIRD) == "unavailable")


async def test_request_is_found_by_its_id_whatever_its_model(client: httpx.AsyncClient) -> None:
    begun = await complete(client, SECOND, background=True)
    assert begun.status_code == 202
    path = f"/v1/requests/{begun.json()['id']}"
    async with asyncio.timeout(30):
        while (state := (await client.get(path)).json())["status"] != "finished":
            await asyncio.sleep(0.01)
    assert state["result"]["choices"][0]["text"] == TEXTS[SECOND]
    assert (await client.delete(path)).json()["cancelled"] is False
    made = (await client.post("/v1/responses", json={"model": SECOND, "input": "x"})).json()
    assert (await client.get(f"/v1/responses/{made['id']}")).json()["output"] == made["output"]
    body = {"model": FIRST, "input": "y", "previous_response_id": made["id"]}
    assert (await client.post("/v1/responses", json=body)).status_code == 200
    assert (await client.get("/v1/requests/cmpl-0")).status_code == 404


async def test_lines_of_a_batch_name_their_models(client: httpx.AsyncClient) -> None:
    lines = [
        {
            "custom_id": name, "method": "POST", "url": "/v1/completions",
            "body": {"model": name, "prompt": "The", "max_tokens": 64},
        }
        for name in (FIRST, SECOND)
    ]  # fmt: skip
    content = "\n".join(map(json.dumps, lines)).encode()
    sent = await client.post("/v1/files", files={"file": ("x.jsonl", content)}, data={"purpose": "batch"})
    order = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    batch = (await client.post("/v1/batches", json=order)).json()
    async with asyncio.timeout(30):
        while batch["status"] != "completed":
            await asyncio.sleep(0.05)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    rows = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in map(json.loads, rows)}
    assert texts == TEXTS


@contextlib.asynccontextmanager
async def over_grpc(gateway: Gateway) -> AsyncIterator[GRPCInferenceServiceStub]:
    gateway.settings.grpc_port = free_port()
    front = GrpcFront(gateway)
    await front.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.settings.grpc_port}") as channel:
            yield GRPCInferenceServiceStub(channel)
    finally:
        await front.stop(0)
        gateway.settings.grpc_port = 0


async def test_grpc_front_resolves_names_as_http_does(gateway: Gateway) -> None:
    async with over_grpc(gateway) as stub:
        names = (FIRST, SECOND, "claude:latest", THIRD, "gpt-5")
        ready = [(await stub.ModelReady(kserve.ModelReadyRequest(name=name))).ready for name in names]
        assert ready == [True, True, True, False, False]
        metadata = await stub.ModelMetadata(kserve.ModelMetadataRequest(name="claude:latest"))
        assert metadata.name == SECOND
        asked = kserve.ModelInferRequest(model_name=SECOND)
        asked.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"The")
        asked.parameters["max_tokens"].int64_param = 64
        answer = await stub.ModelInfer(asked)
        assert TEXTS[SECOND].encode() in answer.raw_output_contents[0]
        with pytest.raises(grpc.aio.AioRpcError, match="has no worker; this server has first, org/Second"):
            await stub.ModelMetadata(kserve.ModelMetadataRequest(name=THIRD))


@pytest.mark.parametrize(("is_awake", "state"), [(True, "loading"), (False, "asleep")])
async def test_grpc_says_of_the_first_model_what_http_says(
    gateway: Gateway, redis_server: RedisServer, is_awake: bool, state: str
) -> None:
    async with without_worker(gateway, redis_server, FIRST), over_grpc(gateway) as stub:
        place(redis_server, FIRST, is_awake)
        await wait_until(lambda: gateway.models.state(FIRST) == state)
        answer = await stub.ModelReady(kserve.ModelReadyRequest(name=FIRST))
        assert answer.ready == (state == "asleep")


async def test_idle_model_is_let_go_and_opens_again(
    client: httpx.AsyncClient, gateway: Gateway, redis_server: RedisServer
) -> None:
    assert await text_of(client, SECOND) == TEXTS[SECOND]

    async def never() -> None:
        await asyncio.Event().wait()

    model: ServedModel = gateway.models.open[SECOND]
    await see_third_loading(gateway, redis_server)  # states were read while the second model was open
    model.dispatcher.submit(never)  # so that its end takes a while
    left: list[int] = []
    gateway.models.on_open = lambda _: left.append(len(model.tasks))
    await expire(model)
    await wait_until(lambda: SECOND not in gateway.models.open)
    assert await text_of(client, "claude:latest") == TEXTS[SECOND]
    assert gateway.models.open[SECOND] is not model
    assert left == [0]  # it ended before the next one began


@pytest.fixture
async def keys_of(gateway: Gateway, redis_server: RedisServer) -> AsyncIterator[dict[str, dict[str, str]]]:
    """Headers of two keys of one tenant: `any` is for all models, `second` for that one."""
    keys = Keys(FIRST)
    texts = {name: add_key(redis_server, keys, models=bound) for name, bound in (("any", ""), ("second", SECOND))}
    headers = {name: {"authorization": f"Bearer {text}"} for name, text in texts.items()}
    await wait_until(lambda: all(map(gateway.keyring.caller, (text.split("-")[2] for text in texts.values()))))
    yield headers
    redis_server.client.delete(keys.api_keys, keys.keys_version)


async def test_keys_of_an_older_version_close_every_model(
    gateway: Gateway, client: httpx.AsyncClient, redis_server: RedisServer
) -> None:
    keys, (key_id, text) = Keys(SECOND), api_keys.new_key()
    record = KeyRecord(key_id, api_keys.digest(text).hex(), "old", "alice")
    try:
        redis_server.client.hset(keys.model_keys, key_id, record.encode())
        redis_server.client.incr(keys.model_keys_version)
        await wait_until(lambda: gateway.keyring.needs_key)
        assert [(await complete(client, name)).status_code for name in TEXTS] == [401, 401]
        client.headers["authorization"] = f"Bearer {text}"
        assert [(await complete(client, name)).status_code for name in TEXTS] == [403, 200]
    finally:
        redis_server.client.delete(keys.model_keys, keys.model_keys_version)


BY_ID = [
    ("GET", "/v1/requests/{}"), ("GET", "/v1/requests/{}/stream"), ("DELETE", "/v1/requests/{}"),
    ("GET", "/v1/responses/{}"), ("GET", "/v1/responses/{}/input_items"), ("POST", "/v1/responses/{}/cancel"),
    ("DELETE", "/v1/responses/{}"),
]  # fmt: skip


async def test_request_of_a_model_that_the_key_is_not_for_is_unknown(
    client: httpx.AsyncClient, keys_of: dict[str, dict[str, str]]
) -> None:
    for method, path in BY_ID:
        body = {"model": FIRST, "input": "x"}
        made = (await client.post("/v1/responses", json=body, headers=keys_of["any"])).json()
        refused = await client.request(method, path.format(made["id"]), headers=keys_of["second"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found"), path
        answer = await client.request(method, path.format(made["id"]), headers=keys_of["any"])
        assert answer.status_code == 200, path


async def test_only_model_is_not_for_a_key_of_another(settings: GatewaySettings) -> None:
    alone = settings.model_copy(update={"models": None})
    running = Gateway(alone, ModelText(alone.model))
    await running.start()
    try:
        with pytest.raises(ApiError, match="'cmpl-0' not found"):
            await running.models.find_holder("cmpl-0", Caller("alice", models=frozenset({SECOND})))
        assert (
            await running.models.find_holder("cmpl-0", Caller("alice", models=frozenset({FIRST})))
            is running.first_model
        )
    finally:
        await running.stop()
        running.first_model.text.close()


async def test_response_goes_on_from_none_of_a_model_that_the_key_is_not_for(
    client: httpx.AsyncClient, keys_of: dict[str, dict[str, str]]
) -> None:
    made = (await client.post("/v1/responses", json={"model": FIRST, "input": "x"}, headers=keys_of["any"])).json()
    body = {"model": SECOND, "input": "y"}
    assert (await client.post("/v1/responses", json=body, headers=keys_of["second"])).status_code == 200
    body["previous_response_id"] = made["id"]
    refused = await client.post("/v1/responses", json=body, headers=keys_of["second"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert (await client.post("/v1/responses", json=body, headers=keys_of["any"])).status_code == 200


async def test_key_is_for_its_models_alone_and_has_one_bucket(
    gateway: Gateway, client: httpx.AsyncClient, redis_server: RedisServer
) -> None:
    keys = Keys(FIRST)
    text = add_key(redis_server, keys, requests_per_minute=3, models=f"{FIRST},{SECOND}")
    client.headers["authorization"] = f"Bearer {text}"
    try:
        await wait_until(lambda: gateway.keyring.needs_key)
        refused = await complete(client, THIRD)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        assert refused.json()["error"]["message"] == "model: this key is for first, org/Second; got 'third'"
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == [FIRST, SECOND]
        assert (await client.get(f"/v1/models/{THIRD}")).status_code == 404
        codes = [(await complete(client, name)).status_code for name in (FIRST, SECOND, "gpt-4o", "claude:latest")]
        assert codes == [200, 200, 200, 429]  # three a minute, whatever the model
        bucket = keys.bucket(text.split("-")[2])
        # The end of each gives it back, at either model, a moment behind its answer.
        await wait_until(lambda: redis_server.client.hget(bucket, "running") == b"0")
    finally:
        redis_server.client.delete(keys.api_keys, keys.keys_version)


@pytest.fixture
def third(gateway: Gateway, redis_server: RedisServer) -> Iterator[Keys]:
    """Lend the third model a scheduler and a worker."""
    keys = lead(redis_server, THIRD).keys
    yield keys
    leave(redis_server, THIRD)


async def expire(model: ServedModel) -> None:
    """Make a model idle once it has no requests."""
    busy = model.background
    await wait_until(lambda: not (model.dispatcher.streams or busy.request_ids or busy.readerless or busy.end_counts))
    model.idle_s = 0
    model.used_at -= 2 * LEAST_IDLE_S


async def test_model_is_let_go_once_when_two_tasks_find_it_idle(
    client: httpx.AsyncClient, gateway: Gateway, third: Keys, redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "orcinus.gateway")
    await wait_until(lambda: gateway.models.state(THIRD) == "ready")
    may_end = {}
    for name in (SECOND, THIRD):
        model = await gateway.models.open_model(name, None)
        may_end[name] = threading.Event()
        closing = (may_end[name].wait, model.text.close)
        monkeypatch.setattr(model.text, "close", lambda closing=closing: [each() for each in closing])
    second, other = gateway.models.open[SECOND], gateway.models.open[THIRD]
    await expire(second)
    await wait_until(lambda: SECOND not in gateway.models.open)  # the table waits for its end
    await expire(other)
    monkeypatch.setattr(models, "MAX_OPEN", 1)
    again = asyncio.create_task(text_of(client, SECOND))
    await wait_until(lambda: THIRD not in gateway.models.open)  # to make room
    may_end[SECOND].set()
    await wait_until(lambda: f"model {SECOND}: let go" in caplog.text)
    await asyncio.sleep(0)
    may_end[THIRD].set()
    assert await again == TEXTS[SECOND]
    leave(redis_server, THIRD)
    await wait_until(lambda: gateway.models.state(THIRD) == "unavailable")  # the table still looks
    assert caplog.text.count(f"model {THIRD}: let go") == 1
    assert gateway.dead_task() == ""


async def test_model_that_ends_badly_does_not_end_the_table(
    gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = await gateway.models.open_model(SECOND, None)
    close = model.text.close

    def fails() -> None:
        close()
        raise RuntimeError("no")

    monkeypatch.setattr(model.text, "close", fails)
    await expire(model)
    await wait_until(lambda: "did not end as it should" in caplog.text)
    await see_third_loading(gateway, redis_server)
    assert gateway.dead_task() == ""


async def test_model_that_was_just_let_go_refuses_requests(gateway: Gateway) -> None:
    model = await gateway.models.open_model(SECOND, None)
    spec = await completion_spec(CompletionBody(model=SECOND, prompt="The"), model.text, model.cluster.limits)
    await expire(model)
    await wait_until(lambda: SECOND not in gateway.models.open and not model.tasks)
    for work in (model.admission.begin(spec, Caller(ANONYMOUS), time.monotonic()), model.dispatcher.record(spec.id)):
        async with asyncio.timeout(30):
            with pytest.raises(ApiError, match="lets go of the model") as refused:
                await work
        assert refused.value.status == 503


async def test_model_is_in_use_until_a_while_after_its_last_request(gateway: Gateway) -> None:
    model = await gateway.models.open_model(SECOND, None)
    background = model.background
    parts: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (lambda: background.readerless.add("cmpl-1"), background.readerless.clear),
        (lambda: background.end_counts.update({"cmpl-1": 1}), background.end_counts.clear),
    ]
    for begin, end in parts:
        model.used_at -= 2 * LEAST_IDLE_S
        begin()
        assert model.unused_s() == 0
        end()
        assert model.unused_s() < LEAST_IDLE_S


async def test_request_that_is_read_keeps_its_model(client: httpx.AsyncClient, gateway: Gateway) -> None:
    made = (await client.post("/v1/responses", json={"model": SECOND, "input": "x"})).json()
    model = gateway.models.open[SECOND]
    await expire(model)
    model.idle_s = 3600  # so that the table keeps it until this is over
    assert (await client.get(f"/v1/responses/{made['id']}")).status_code == 200
    assert model.unused_s() < LEAST_IDLE_S


async def test_adopter_ends_before_the_tasks_that_it_begins(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    running = asyncio.Event()

    async def adopts(_: OrphanAdopter) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("adopter")

    async def stops() -> None:
        ended.append("background")

    monkeypatch.setattr(OrphanAdopter, "run", adopts)
    model = await gateway.models.open_model(SECOND, None)
    monkeypatch.setattr(model.background, "stop", stops)
    await running.wait()
    await expire(model)
    await wait_until(lambda: SECOND not in gateway.models.open and not model.tasks)
    assert ended == ["adopter", "background"]


async def test_no_model_is_opened_during_the_drain(
    client: httpx.AsyncClient, gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, may_load, loads = ModelText.close, threading.Event(), threading.Event()
    closed: list[ModelText] = []

    class Slow(ModelText):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            loads.set()
            may_load.wait()

        def close(self) -> None:
            closed.append(self)
            before(self)

    monkeypatch.setattr(models, "ModelText", Slow)
    opening = asyncio.create_task(complete(client, SECOND))
    await wait_until(loads.is_set)
    await gateway.drain(0)
    may_load.set()
    for answer in (await opening, await complete(client, SECOND)):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert [model.name for model in gateway.models.models()] == [FIRST]
    assert len(closed) == 1


async def test_models_with_orphans_open_in_turn_where_there_is_room(
    gateway: Gateway, redis_server: RedisServer, third: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wait_until(lambda: gateway.models.state(THIRD) == "ready")
    monkeypatch.setattr(models, "MAX_OPEN", 1)
    both = (Keys(SECOND), Keys(THIRD))
    with redis_server.client.pipeline() as pipe:
        for keys in both:
            pipe.sadd(keys.background, "gateway-dead")
        pipe.execute()
    assert not {SECOND, THIRD} & gateway.models.open.keys()
    await wait_until(lambda: len(gateway.models.models()) == 2)
    (model,) = (each for each in gateway.models.models() if each is not gateway.first_model)
    await wait_until(lambda: not redis_server.client.sismember(Keys(model.name).background, "gateway-dead"))
    await expire(model)
    await wait_until(lambda: not any(redis_server.client.sismember(keys.background, "gateway-dead") for keys in both))


async def test_model_with_ended_background_requests_stays_closed(
    client: httpx.AsyncClient, gateway: Gateway, redis_server: RedisServer
) -> None:
    begun = await complete(client, SECOND, background=True)
    assert begun.status_code == 202
    model = gateway.models.open[SECOND]
    await expire(model)
    await wait_until(lambda: SECOND not in gateway.models.open and not model.tasks)
    await wait_until(lambda: not redis_server.client.sismember(Keys(SECOND).background, gateway.id))
    redis_server.client.sadd(Keys(SECOND).background, gateway.id)  # as where something is left under it
    await see_third_loading(gateway, redis_server)  # two looks at Redis at least
    assert SECOND not in gateway.models.open
    redis_server.client.srem(Keys(SECOND).background, gateway.id)


async def test_model_that_cannot_be_read_is_tried_rarely(
    client: httpx.AsyncClient, settings: GatewaySettings, gateway: Gateway, redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fails(*_: Any) -> ModelText:
        raise ModelError("tokenizer.json: not JSON; copy the model again")

    with monkeypatch.context() as patched:
        patched.setattr(models, "ModelText", fails)
        redis_server.client.sadd(Keys(SECOND).background, "gateway-dead")
        await wait_until(lambda: "not JSON" in caplog.text)
        await see_third_loading(gateway, redis_server)  # two looks at Redis at least
        answer = await complete(client, SECOND)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unreadable")
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert caplog.text.count("not JSON") == 1
    redis_server.client.srem(Keys(SECOND).background, "gateway-dead")


async def test_idempotency_key_names_a_request_of_each_model(client: httpx.AsyncClient) -> None:
    client.headers["idempotency-key"] = "k"
    answers = [(await complete(client, name)).json() for name in (FIRST, SECOND, SECOND)]
    assert [answer["choices"][0]["text"] for answer in answers] == [TEXTS[FIRST], TEXTS[SECOND], TEXTS[SECOND]]
    first, second, again = (answer["id"] for answer in answers)
    assert second == again != first
