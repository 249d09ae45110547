"""Read requests from the Open Inference Protocol's tensors, and write answers into them. Pure.

A request has the tensor `text_input` and, if it likes, `sampling_parameters` (one JSON object) and `stream`; its
parameters are fields of `/v1/completions`. An answer has `text_output` and `finish_reason`, an element a choice.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from google.protobuf.message import DecodeError

from protos import kserve_pb2 as kserve
from services.gateway.errors import MAX_PARAM, ApiError, invalid
from services.gateway.openai.bodies import parse_json
from shared.keys import CLASSES
from shared.messages import quote, shorten

INPUTS = (("text_input", "BYTES", (-1,)), ("sampling_parameters", "BYTES", (1,)), ("stream", "BOOL", (1,)))
OUTPUTS = (("text_output", "BYTES", (-1,)), ("finish_reason", "BYTES", (-1,)))
VERSIONS = ("", "1")
EMPTY_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 16
"""Of a tensor; more than any server's limit of choices. Both bound the work before a request has been checked."""
MAX_FIELDS = 4096
"""Of a message with those of its tensors. protobuf's time for a map grows with the square of its entries at some sizes:
two seconds for 4 MB."""
OVER_HTTP = (
    "model",
    "prompt",
    "stream_options",
    "return_token_ids",
    "logprobs",
    "prompt_logprobs",
    "best_of",
    "background",
)
"""Fields of `/v1/completions` that have another form here, or none."""


_TENSORS = frozenset(kserve.ModelInferRequest.DESCRIPTOR.fields_by_name[name].number for name in ("inputs", "outputs"))
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def read_request(data: bytes) -> kserve.ModelInferRequest:
    """Return the message. Raise DecodeError, also for more than MAX_FIELDS fields."""
    _count_fields(memoryview(data), MAX_FIELDS, _TENSORS)
    return kserve.ModelInferRequest.FromString(data)


def fields_of(request: kserve.ModelInferRequest) -> dict[str, Any]:
    """Return the body of `/v1/completions` that a request stands for. Raise ApiError(400, 404)."""
    if request.model_version not in VERSIONS:
        message = f"the model has version 1; got {quote(request.model_version)}"
        raise ApiError(404, message, param="model_version", code="model_not_found")
    tensors = _tensors(request)
    if "text_input" not in tensors:
        raise invalid("text_input", "you must provide the input text_input", "missing_required_parameter")
    texts = [_text(element, "text_input") for element in tensors["text_input"]]
    fields = {"model": request.model_name, "prompt": texts[0] if len(texts) == 1 else texts}
    parameters = [_parameters(request.parameters)]
    if "sampling_parameters" in tensors:
        parameters.append(_json_object(tensors["sampling_parameters"]))
    if "stream" in tensors:
        parameters.append({"stream": _only_element(tensors["stream"], "stream")})
    for more in parameters:
        for name, value in more.items():
            if name in OVER_HTTP:
                raise invalid(name, f"{name} is not a parameter over gRPC", "unsupported_parameter")
            if name in fields:
                raise invalid(name, f"{shorten(name, MAX_PARAM)} is given twice; send it once", "invalid_value")
            fields[name] = value
    return fields


def answer(
    request: kserve.ModelInferRequest, texts: Sequence[str], reasons: Sequence[str], parameters: Mapping[str, Any]
) -> kserve.ModelInferResponse:
    """Return one response: text and finish reason (empty while it continues) of each choice. Raise ApiError(400)."""
    columns = {"text_output": texts, "finish_reason": reasons}
    names = [output.name for output in request.outputs] or list(columns)
    response = kserve.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    for name in names:
        column = columns[name]
        response.outputs.add(name=name, datatype="BYTES", shape=[len(column)])
        response.raw_output_contents.append(b"".join(_pack(text.encode()) for text in column))
    for name, value in parameters.items():
        _set_parameter(response.parameters[name], value)
    return response


def check_outputs(request: kserve.ModelInferRequest) -> None:
    """Raise ApiError(400) for an output that there is not."""
    output_names = [name for name, _, _ in OUTPUTS]
    if len(request.outputs) > len(output_names):
        raise invalid(
            "outputs", f"the model has {len(output_names)} outputs; got {len(request.outputs)}", "invalid_value"
        )
    for output in request.outputs:
        if output.name not in output_names:
            raise invalid(
                "outputs",
                f"unknown output {quote(output.name)}; the model has {', '.join(output_names)}",
                "invalid_value",
            )


def _tensors(request: kserve.ModelInferRequest) -> dict[str, list[Any]]:
    """Return the elements of each input, from either of the protocol's two forms."""
    datatype_of = {name: datatype for name, datatype, _ in INPUTS}
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid(
            "raw_input_contents", f"{len(request.inputs)} inputs, but {len(raw)} raw contents; send one for each"
        )
    tensors: dict[str, list[Any]] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in datatype_of or name in tensors:
            what = (
                "is given twice; send it once"
                if name in tensors
                else f"is unknown; the model has {', '.join(datatype_of)}"
            )
            raise invalid("inputs", f"the input {quote(name)} {what}", "unknown_parameter")
        if tensor.datatype != datatype_of[name]:
            raise invalid(name, f"{name} must have the datatype {datatype_of[name]}; got {quote(tensor.datatype)}")
        elements: Sequence[bytes] | Sequence[bool]
        if datatype_of[name] == "BYTES":
            elements = _unpack(raw[index], name) if raw else tensor.contents.bytes_contents
        else:
            elements = [byte != 0 for byte in raw[index][: MAX_ELEMENTS + 1]] if raw else tensor.contents.bool_contents
        if len(elements) > MAX_ELEMENTS:
            raise invalid(name, f"{name} may have {MAX_ELEMENTS} elements; got {len(elements)}", "invalid_value")
        if len(tensor.shape) > MAX_DIMENSIONS:
            text = f"the shape of {name} may have {MAX_DIMENSIONS} dimensions; got {len(tensor.shape)}"
            raise invalid(name, text, "invalid_value")
        if any(size < 0 for size in tensor.shape) or math.prod(tensor.shape) != len(elements):
            text = f"{name} has the shape {list(tensor.shape)}, but {len(elements)} elements; send as many as it says"
            raise invalid(name, text)
        tensors[name] = list(elements)
    return tensors


def _parameters(parameters: Mapping[str, kserve.InferParameter]) -> dict[str, Any]:
    """Return parameters as fields. `priority` (1 is first) and `timeout` (in us) mean what the protocol says."""
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        value = getattr(parameter, kind) if kind else None
        if name == EMPTY_FINAL:  # the last answer is marked and never empty
            continue
        if name == "priority" and type(value) is int:
            if not 0 <= value <= len(CLASSES):
                raise invalid(name, f"priority must be 1 to {len(CLASSES)}, 0 for the default; got {value}")
            fields["priority"] = CLASSES[value - 1] if value else None
        elif name == "timeout" and type(value) is int:
            fields["deadline_ms"] = -(-value // 1000) or None
        else:
            fields[name] = value
    return fields


def _json_object(elements: list[Any]) -> dict[str, Any]:
    name = "sampling_parameters"
    value = parse_json(_only_element(elements, name), name, name)
    if not isinstance(value, dict):
        raise invalid("sampling_parameters", f"sampling_parameters must be a JSON object; got {quote(value)}")
    return value


def _only_element(elements: list[Any], name: str) -> Any:
    if len(elements) != 1:
        raise invalid(name, f"{name} must have one element; got {len(elements)}")
    return elements[0]


def _text(element: bytes, name: str) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise invalid(name, f"{name} is not UTF-8: {error}; encode it as UTF-8") from error


def _pack(element: bytes) -> bytes:
    return struct.pack("<I", len(element)) + element


def _unpack(raw: bytes, name: str) -> list[bytes]:
    """Elements of type BYTES, each behind its length; of too many one more than may be."""
    elements: list[bytes] = []
    at = 0
    while at < len(raw) and len(elements) <= MAX_ELEMENTS:
        start = at + 4
        (size,) = struct.unpack_from("<I", raw, at) if start <= len(raw) else (len(raw),)
        at = start + size
        if at > len(raw):
            raise invalid(
                name, f"the raw contents of {name} end within an element; put its length in 4 bytes before it"
            )
        elements.append(raw[start:at])
    return elements


def _set_parameter(parameter: kserve.InferParameter, value: Any) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    else:
        parameter.string_param = value


def body_of(fields: dict[str, Any]) -> bytes:
    """Return the HTTP body with the same fields; the order in which a map brings them does not count. Raise
    ApiError(400) for a number that JSON cannot write.
    """
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(name, f"{shorten(name, MAX_PARAM)} must be a finite number; got {value}")
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)


def _count_fields(data: memoryview, max_count: int, message_fields: frozenset[int] = frozenset()) -> int:
    """Return how many fields a message has on the wire, with those of the messages in its fields `message_fields`.

    Raise DecodeError for more than `max_count`. What else is wrong with it the library says.
    """
    at = count = 0
    while at < len(data):
        tag, at = _varint(data, at)
        count += 1
        if (kind := tag & 7) == _LENGTH:
            size, at = _varint(data, at)
            if tag >> 3 in message_fields:
                count += _count_fields(data[at : at + size], max_count - count)
            at += size
        elif kind == _VARINT:
            _, at = _varint(data, at)
        else:
            at += {_FIXED64: 8, _FIXED32: 4}.get(kind, 0)
        if count > max_count:
            raise DecodeError(f"more than {MAX_FIELDS} fields")
    return count


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number and the place behind it."""
    number = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return number, at
