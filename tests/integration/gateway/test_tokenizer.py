"""A gateway with a tokenizer that fails: at one text, or as a whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import kserve_pb2 as kserve
from protos.kserve_pb2_grpc import GRPCInferenceServiceStub
from tests.integration.conftest import TEXT
from tests.support.checkpoints.tokenizers import write_model
from tests.support.gateway_process import GatewayProcess
from tests.support.stack import RedisServer
from tests.support.waiting import free_port, until

GRPC_PORT = free_port()
GATEWAY = {"grpc_port": GRPC_PORT}
PANIC = "a" * 60 + "cc"
"""The library gives up the search of SPLIT in it, with a panic."""
SPLIT = {"type": "Split", "pattern": {"Regex": "(?:a|a)+c(?!c)"}, "behavior": "Isolated", "invert": False}
MESSAGE = {"role": "user", "content": PANIC}


def change(model: Path, **parts: Any) -> Path:
    path = model / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("models") / "tiny")
    before = json.loads((directory / "tokenizer.json").read_text())["pre_tokenizer"]
    return change(directory, pre_tokenizer={"type": "Sequence", "pretokenizers": [SPLIT, before]})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": PANIC}, "prompt"),
        ("/v1/completions", {"prompt": ["x", PANIC], "stream": True}, "prompt"),
        ("/v1/chat/completions", {"messages": [MESSAGE]}, "messages"),
        ("/v1/responses", {"input": PANIC}, "input"),
        ("/tokenize", {"prompt": PANIC}, "prompt"),
        ("/tokenize", {"messages": [MESSAGE]}, "messages"),
    ],
)
def test_panic_refuses_one_request_and_the_next_is_answered(
    gateway: GatewayProcess, answers: None, path: str, body: dict[str, Any], param: str
) -> None:
    refused = gateway.post(path, body)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("tokenizer_failed", param)
    assert f"{param} cannot be tokenized by this model's tokenizer: " in error["message"]
    answer = gateway.post("/v1/completions", {"prompt": "ac", "max_tokens": 100})
    assert answer.json()["choices"][0]["text"] == TEXT


def test_panic_over_grpc_is_an_invalid_argument(gateway: GatewayProcess, answers: None) -> None:
    request = kserve.ModelInferRequest(model_name=gateway.name)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(struct.pack("<I", len(PANIC)) + PANIC.encode())
    with (
        grpc.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=60)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be tokenized by this model's tokenizer" in raised.value.details()


def test_gateway_does_not_start_with_an_unbounded_tokenizer(tmp_path: Path, redis_server: RedisServer) -> None:
    grow = {"type": "Replace", "pattern": {"Regex": "[ab]"}, "content": "a" * 100}
    step = {"type": "Sequence", "normalizers": [grow] * 5}
    gateway = GatewayProcess(tmp_path, change(write_model(tmp_path / "m"), normalizer=step), redis_server.url).start()
    process = gateway.process
    assert process is not None
    try:
        until("the gateway ends", lambda: process.poll() is not None, 60)
    finally:
        gateway.stop()
    assert process.returncode == 2 and "Traceback" not in gateway.log()
    assert "tokenizer.json: normalizer: one byte of text can become 21020201002, at most 4096; remove" in gateway.log()
