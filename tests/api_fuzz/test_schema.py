"""The OpenAPI document holds: schemathesis sends what it allows and forbids; no 5xx, no undocumented answer."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from shared.settings import ROOT
from tests.support.checkpoints.tokenizers import write_model
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler, answering

KEY = "sk-test"
EXAMPLES = 15


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    model = write_model(tmp_path_factory.mktemp("models") / "tiny")
    directory = tmp_path_factory.mktemp("gateway")
    with (
        RedisServer(directory / "redis") as server,
        running_gateway(
            directory, model, server, api_key=KEY, max_choices=16, files_dir=directory / "files", batch_requests=4
        ) as running,
    ):
        scheduler = ScriptedScheduler(server.client, running.keys).lead()
        running.wait_ready()
        with answering(scheduler, lambda _: [50, 51, 52]):
            yield running


@pytest.fixture(scope="module")
def api(gateway: GatewayProcess) -> BaseSchema:
    return schemathesis.openapi.from_url(gateway.url + "/openapi.json", headers={"Authorization": f"Bearer {KEY}"})


PATHS = json.loads((ROOT / "tests/unit/snapshots/openapi.json").read_text())["public"]["paths"]
OPERATIONS = [(path, method.upper()) for path, operations in PATHS.items() for method in operations]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]


def test_the_document_names_every_operation(api: BaseSchema) -> None:
    found = {(result.ok().path, result.ok().method.upper()) for result in api.get_all_operations()}
    assert found == set(OPERATIONS)


def test_the_document_says_which_paths_need_no_key(api: BaseSchema, gateway: GatewayProcess) -> None:
    for path, operations in api.raw_schema["paths"].items():
        for method, operation in operations.items():
            answer = httpx.request(method, gateway.url + path, timeout=60)
            assert (operation.get("security") == []) == (answer.status_code != 401), (method, path)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_in_the_background_is_answered_as_documented(
    api: BaseSchema, gateway: GatewayProcess, path: str
) -> None:
    said = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    answer = gateway.post(path, {**said, "background": True}, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 202, answer.text
    assert str(answer.status_code) in api.raw_schema["paths"][path]["post"]["responses"]


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=lambda value: str(value))
def test_every_answer_is_documented_and_none_is_a_server_error(
    api: BaseSchema, gateway: GatewayProcess, path: str, method: str, mode: GenerationMode
) -> None:
    operation = api[path][method]
    if mode is GenerationMode.NEGATIVE and not (operation.body or "{" in path):
        pytest.skip("nothing can be wrong in it")

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = gateway.name
        case.call_and_validate(headers={"Authorization": f"Bearer {KEY}"}, checks=CHECKS, timeout=60)

    check()
