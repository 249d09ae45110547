"""The official Triton client over gRPC; its own copy of the protocol is the oracle for ours."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[triton.InferenceServerClient]:
    made = triton.InferenceServerClient(server.grpc)
    yield made
    made.close()


@pytest.fixture(scope="module")
def headers(server: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {server.key}"}


def text_input(*texts: str) -> triton.InferInput:
    made = triton.InferInput("text_input", [len(texts)], "BYTES")
    made.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=object))
    return made


class Stream:
    """Answers of one ModelStreamInfer, in the order of the client's callback."""

    def __init__(self, server: Any, headers: dict[str, str]) -> None:
        self.client = triton.InferenceServerClient(server.grpc)
        self._answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.client.start_stream(lambda result, error: self._answers.put((result, error)), headers=headers)

    def next(self) -> tuple[Any, Any]:
        return self._answers.get(timeout=60)

    def pieces(self) -> list[Any]:
        """All answers of one request."""
        found = []
        while True:
            result, error = self.next()
            assert error is None, error
            found.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return found


@pytest.fixture
def stream(server: Any, headers: dict[str, str]) -> Iterator[Stream]:
    made = Stream(server, headers)
    yield made
    made.client.stop_stream(cancel_requests=True)
    made.client.close()


def test_our_protocol_is_theirs(request: pytest.FixtureRequest) -> None:
    ours = FileDescriptorProto.FromString(Path(request.config.getoption("--server-descriptor")).read_bytes())
    theirs = FileDescriptorProto.FromString(service_pb2.DESCRIPTOR.serialized_pb)
    assert ours.package == theirs.package
    known = {message.name: message for message in theirs.message_type}
    for message in ours.message_type:
        assert shape(message) == shape(known[message.name])
    methods = {method.name: method for method in theirs.service[0].method}
    assert ours.service[0].name == theirs.service[0].name
    for method in ours.service[0].method:
        their = methods[method.name]
        assert (method.input_type, method.output_type) == (their.input_type, their.output_type)
        streaming = (method.client_streaming, method.server_streaming)
        assert streaming == (their.client_streaming, their.server_streaming)


def shape(message: DescriptorProto) -> dict[str, Any]:
    """Names, numbers and types of a message's fields, nested messages too."""
    fields = {field.name: (field.number, field.type, field.label, field.type_name) for field in message.field}
    return fields | {inner.name: shape(inner) for inner in message.nested_type}


def test_server_and_model(client: Any, server: Any, headers: dict[str, str]) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata().name == "orcinus"
    assert client.is_model_ready(server.model, headers=headers)
    assert not client.is_model_ready("gpt-none", headers=headers)
    metadata = client.get_model_metadata(server.model, headers=headers)
    assert {tensor.name for tensor in metadata.outputs} == {"text_output", "finish_reason"}


def test_infer_and_usage(client: Any, server: Any, headers: dict[str, str], continued: str) -> None:
    result = client.infer(
        server.model, [text_input("def add(")], parameters={"max_tokens": 12, "temperature": 0.0}, headers=headers,
        request_id="one", outputs=[triton.InferRequestedOutput("text_output")],
    )  # fmt: skip
    assert [text.decode() for text in result.as_numpy("text_output")] == [continued]
    response = result.get_response()
    assert response.id == "one"
    assert response.parameters["completion_tokens"].int64_param == 12


def test_stream_in_pieces(stream: Stream, server: Any, continued: str) -> None:
    stream.client.async_stream_infer(
        server.model, [text_input("def add(")], request_id="two", enable_empty_final_response=True,
        parameters={"max_tokens": 12, "temperature": 0.0},
    )  # fmt: skip
    pieces = stream.pieces()
    assert "".join(piece.as_numpy("text_output")[0].decode() for piece in pieces) == continued
    assert len(pieces) > 2
    assert pieces[-1].as_numpy("finish_reason")[0] == b"length"
    assert {piece.get_response().id for piece in pieces} == {"two"}


def test_errors(client: Any, server: Any, headers: dict[str, str]) -> None:
    def status(**changes: Any) -> str:
        arguments = {
            "model_name": server.model, "inputs": [text_input("x")], "headers": headers, **changes
        }  # fmt: skip
        with pytest.raises(InferenceServerException) as refused:
            client.infer(**arguments)
        return refused.value.status()

    assert status(headers={"authorization": "Bearer wrong"}) == "StatusCode.UNAUTHENTICATED"
    assert status(headers=None) == "StatusCode.UNAUTHENTICATED"
    assert status(model_name="gpt-none") == "StatusCode.NOT_FOUND"
    assert status(parameters={"temperature": 7.0}) == "StatusCode.INVALID_ARGUMENT"


def test_error_in_a_stream_leaves_the_stream(stream: Stream, server: Any, continued: str) -> None:
    stream.client.async_stream_infer(server.model, [text_input("x")], parameters={"temperature": 7.0})
    result, error = stream.next()
    assert result is None
    assert "temperature" in str(error)
    stream.client.async_stream_infer(
        server.model, [text_input("def add(")], parameters={"max_tokens": 12, "temperature": 0.0}
    )
    assert "".join(piece.as_numpy("text_output")[0].decode() for piece in stream.pieces()) == continued


def test_seed_n_and_priority(client: Any, server: Any, headers: dict[str, str]) -> None:
    def texts(seed: int) -> list[bytes]:
        parameters = {"max_tokens": 12, "seed": seed, "n": 3, "temperature": 1.0}
        result = client.infer(
            server.model, [text_input("def add(")], parameters=parameters, headers=headers, priority=2
        )
        return list(result.as_numpy("text_output"))

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert len(texts(1)) == 3


def test_leaving_a_stream_cancels(stream: Stream, server: Any) -> None:
    stream.client.async_stream_infer(
        server.model, [text_input("x")], parameters={"max_tokens": 900, "ignore_eos": True}
    )
    result, error = stream.next()
    assert error is None
    stream.client.stop_stream(cancel_requests=True)
    request_id = result.get_response().parameters["request_id"].string_param
    assert server.ended(request_id)["finish_reasons"] == ["cancelled"]
