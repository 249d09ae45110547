"""A gateway whose model has the name of a repository of the Hub: its id, its keys, its sampling defaults."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from protos import queue_pb2
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.scripted_scheduler import LENGTH, Line, ScriptedScheduler
from tests.support.stack import PLAIN, RedisServer
from tests.support.tokenizers import write_model
from tests.support.waiting import until

NAME = "Acme/Tiny-0.1B"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("hub")
    model = write_model(directory / "models--Acme--Tiny-0.1B" / "snapshots" / "0123abcd")
    stated = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(stated))
    with running_gateway(directory, model, redis_server, served_model_name=NAME) as running:
        yield running


@pytest.fixture
def scheduler(gateway: GatewayProcess, redis_server: RedisServer) -> ScriptedScheduler:
    leading = ScriptedScheduler(redis_server.client, gateway.keys).lead()
    gateway.wait_ready()
    return leading


def sampled(gateway: GatewayProcess, scheduler: ScriptedScheduler, path: str, **body: Any) -> queue_pb2.Sampling:
    """Send a request and return the sampling that the scheduler gets."""
    thread = threading.Thread(target=gateway.post, args=(path, {"model": NAME, "max_tokens": 1, **body}))
    thread.start()
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, [9], 0, LENGTH))
    thread.join(30)
    return claimed.request.sampling


def test_exact_name_is_the_id_and_the_keys_hold_a_tag_of_it(gateway: GatewayProcess, redis_server: RedisServer) -> None:
    gateway.wait_live()
    for path in (f"/v1/models/{NAME}", "/v1/models/Acme%2FTiny-0.1B"):
        assert httpx.get(gateway.url + path, verify=PLAIN).json()["id"] == NAME
    answer = httpx.get(f"{gateway.url}/v1/models/acme/tiny-0.1b", verify=PLAIN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")

    def registered() -> list[str]:
        return [key.decode() for key in redis_server.client.scan_iter("orcinus:*alive:gateway:*")]

    alive = until("the gateway is registered", registered)
    assert [key.partition("}")[0].rpartition("-")[0] for key in alive] == ["orcinus:{acme-tiny-0.1b"]


def test_requests_take_the_models_sampling_where_they_state_none(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    found = sampled(gateway, scheduler, "/v1/completions", prompt="a")
    assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == (0.5, 20, 0.75, 1)
    found = sampled(gateway, scheduler, "/v1/completions", prompt="a", temperature=0, top_k=0, top_p=1)
    assert (found.temperature, found.top_k, found.top_p) == (0, 0, 1)
