"""gRPC calls that are refused, for docs/bad-input.md: each fills a ModelInferRequest that has only its model's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protos.kserve_pb2 import ModelInferRequest

USER = "sk-test-0123456789"
Fill = Callable[[ModelInferRequest], None]


@dataclass(frozen=True, slots=True)
class Called:
    """One ModelInfer, or the only request of a ModelStreamInfer. model: empty for the served one."""

    note: str
    fill: Fill
    model: str = ""
    key: str = USER  # empty: none
    streams: bool = False

    @property
    def method(self) -> str:
        return "ModelStreamInfer" if self.streams else "ModelInfer"


def _tensor(name: str, datatype: str, shape: list[int], *elements: bytes) -> Fill:
    def fill(request: ModelInferRequest) -> None:
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        tensor.contents.bytes_contents.extend(elements)

    return fill


def _all(*fills: Fill) -> Fill:
    def fill(request: ModelInferRequest) -> None:
        for each in fills:
            each(request)

    return fill


def _parameter(name: str, kind: str, value: bool | float | str) -> Fill:
    return _all(_TEXT, lambda request: setattr(request.parameters[name], kind, value))


def _raw(contents: bytes) -> Fill:
    def fill(request: ModelInferRequest) -> None:
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        request.raw_input_contents.append(contents)

    return fill


def _output(name: str) -> Fill:
    return lambda request: request.outputs.extend([ModelInferRequest.InferRequestedOutputTensor(name=name)])


_TEXT = _tensor("text_input", "BYTES", [1], b"x")
CALLS = [
    Called("no key", _TEXT, key=""),
    Called("another key", _TEXT, key="wrong"),
    Called("no key", _TEXT, key="", streams=True),
    Called("another key", _TEXT, key="wrong", streams=True),
    Called("the model `gpt-4`", _TEXT, model="gpt-4"),
    Called("`model_version` 2", _all(_TEXT, lambda request: setattr(request, "model_version", "2"))),
    Called("no input", lambda request: None),
    Called("an input `image`", _tensor("image", "BYTES", [1], b"x")),
    Called("`text_input` twice", _all(_TEXT, _TEXT)),
    Called("`text_input` of type `FP32`", _tensor("text_input", "FP32", [1])),
    Called("`text_input` of shape [2] with one element", _tensor("text_input", "BYTES", [2], b"x")),
    Called("`text_input` of shape [1, 3]", _tensor("text_input", "BYTES", [1, 3], b"x")),
    Called("`text_input` of nine dimensions", _tensor("text_input", "BYTES", [1] * 9, b"x")),
    Called("`text_input` with 40,000 empty texts", _raw(bytes(4 * 40_000))),
    Called("`text_input` that is no UTF-8", _tensor("text_input", "BYTES", [1], b"\xff")),
    Called("an empty `text_input`", _tensor("text_input", "BYTES", [1], b"")),
    Called("raw contents that end within an element", _raw(b"\x09\0\0\0x")),
    Called("raw contents without an input", lambda request: request.raw_input_contents.append(b"\1\0\0\0x")),
    Called("a message above 200,000 bytes", _tensor("text_input", "BYTES", [1], b"x" * 200_000)),
    Called("`max_tokens` 0", _parameter("max_tokens", "int64_param", 0)),
    Called("`temperature` not a number", _parameter("temperature", "double_param", float("nan"))),
    Called("`temperature` 3.0", _parameter("temperature", "double_param", 3.0)),
    Called("`priority` 9", _parameter("priority", "int64_param", 9)),
    Called("`stream` true", _parameter("stream", "bool_param", True)),
    Called("`background` true", _parameter("background", "bool_param", True)),
    Called("`logprobs` 2", _parameter("logprobs", "int64_param", 2)),
    Called("`prompt` x", _parameter("prompt", "string_param", "x")),
    Called("`max_token` 3", _parameter("max_token", "int64_param", 3)),
    Called("`sampling_parameters` that are no JSON", _all(_TEXT, _tensor("sampling_parameters", "BYTES", [1], b"{"))),
    Called("`temperature` 3.0", _parameter("temperature", "double_param", 3.0), streams=True),
    Called("`sampling_parameters` `[]`", _all(_TEXT, _tensor("sampling_parameters", "BYTES", [1], b"[]"))),
    Called("an output `image`", _all(_TEXT, _output("image"))),
    Called("the output `text_output` three times", _all(_TEXT, *[_output("text_output")] * 3)),
]
