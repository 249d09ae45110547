"""A gateway with a model that has the name of a repository of the Hub: its id, its keys, its sampling defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protos import queue_pb2
from tests.support.gateway_clients import posted
from tests.support.gateway_process import GatewayProcess
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import LENGTH, Line, ScriptedScheduler
from tests.support.tokenizers import write_model
from tests.support.waiting import until

NAME = "Acme/Tiny-0.1B"
GATEWAY = {"served_model_name": NAME}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model(tmp_path_factory.mktemp("hub") / "models--Acme--Tiny-0.1B" / "snapshots" / "0123abcd")
    stated = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "do_sample": True}
    (made / "generation_config.json").write_text(json.dumps(stated))
    return made


def sampled(gateway: GatewayProcess, scheduler: ScriptedScheduler, **body: Any) -> queue_pb2.Sampling:
    """Send a request and return the sampling that the scheduler gets."""
    with posted(gateway, {"prompt": "a", "max_tokens": 1, **body}):
        claimed = scheduler.claim()
        scheduler.publish(Line(claimed.id, 0, [9], 0, LENGTH))
    return claimed.request.sampling


def test_exact_name_is_the_id_and_tags_the_keys(gateway: GatewayProcess, redis_server: RedisServer) -> None:
    for path in (f"/v1/models/{NAME}", "/v1/models/Acme%2FTiny-0.1B"):
        assert gateway.get(path).json()["id"] == NAME
    answer = gateway.get("/v1/models/acme/tiny-0.1b")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")

    def registered() -> list[str]:
        return [key.decode() for key in redis_server.client.scan_iter("orcinus:*alive:gateway:*")]

    alive = until("the gateway is registered", registered)
    assert [key.partition("}")[0].rpartition("-")[0] for key in alive] == ["orcinus:{acme-tiny-0.1b"]


def test_sampling_of_the_model_fills_fields_a_request_lacks(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    found = sampled(gateway, scheduler)
    assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == (0.5, 20, 0.75, 1)
    found = sampled(gateway, scheduler, temperature=0, top_k=0, top_p=1)
    assert (found.temperature, found.top_k, found.top_p) == (0, 0, 1)
