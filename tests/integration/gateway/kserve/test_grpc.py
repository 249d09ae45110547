"""The gRPC front over a scripted scheduler: tensors in and out, streams, keys, errors by status, cancel, stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import signal
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy import certs
from protos import kserve_pb2 as kserve
from protos.kserve_pb2_grpc import GRPCInferenceServiceStub
from services.gateway.admission import BODIES
from services.gateway.gateway import Gateway
from services.gateway.kserve import front
from services.gateway.kserve.tensors import MAX_FIELDS, fields_of
from shared.settings import GatewaySettings
from tests.integration.conftest import KEY, TEXT, add_key
from tests.integration.gateway.conftest import in_process
from tests.support.checkpoints.tokenizers import PANIC, token_ids, write_panicking_model
from tests.support.gateway import generations
from tests.support.gateway.process import GatewayProcess, led_gateway, running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import LENGTH, Line, ScriptedScheduler
from tests.support.waiting import free_port, until, wait_until

Request = kserve.ModelInferRequest
METADATA = (("authorization", f"Bearer {KEY}"),)
SERVICE = "inference.GRPCInferenceService"
GRPC_PORT = free_port()
GATEWAY = {"api_key": KEY, "grpc_port": GRPC_PORT}


@pytest.fixture(scope="module")
def stub() -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel:
        yield GRPCInferenceServiceStub(channel)


def request_of(gateway: GatewayProcess, *texts: str, raw: bool = True, **parameters: Any) -> Request:
    """Return a request in one of the protocol's two forms."""
    made = Request(model_name=gateway.name, id="mine")
    made.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    encoded = [text.encode() for text in texts]
    if raw:
        made.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in encoded))
    else:
        made.inputs[0].contents.bytes_contents.extend(encoded)
    for name, value in parameters.items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(made.parameters[name], kinds[type(value)], value)
    return made


def outputs(response: kserve.ModelInferResponse) -> dict[str, list[str]]:
    found = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        elements, at = [], 0
        while at < len(raw):
            (size,) = struct.unpack_from("<I", raw, at)
            elements.append(raw[at + 4 : at + 4 + size].decode())
            at += 4 + size
        assert list(output.shape) == [len(elements)]
        found[output.name] = elements
    return found


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
def test_continued_texts_are_in_order(
    gateway: GatewayProcess, stub: GRPCInferenceServiceStub, answers: None, raw: bool
) -> None:
    request = request_of(gateway, "a", "b", raw=raw, max_tokens=100, temperature=0.5, echo=True)
    response = stub.ModelInfer(request, metadata=METADATA)
    assert outputs(response) == {"text_output": ["a" + TEXT, "b" + TEXT], "finish_reason": ["length"] * 2}
    assert (response.id, response.model_name) == ("mine", gateway.name)
    assert response.parameters["completion_tokens"].int64_param == 2 * len(token_ids(TEXT))


def test_only_requested_outputs_are_returned(
    gateway: GatewayProcess, stub: GRPCInferenceServiceStub, answers: None
) -> None:
    request = request_of(gateway, "The", max_tokens=100)
    request.outputs.add(name="text_output")
    assert outputs(stub.ModelInfer(request, metadata=METADATA)) == {"text_output": [TEXT]}


def test_stream_comes_in_pieces_and_marks_the_last(
    gateway: GatewayProcess, stub: GRPCInferenceServiceStub, scheduler: ScriptedScheduler
) -> None:
    request = request_of(gateway, "The", max_tokens=4, triton_enable_empty_final_response=True)
    call = stub.ModelStreamInfer(iter([request]), metadata=METADATA, timeout=60)
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, [50, 51]), started=[claimed.id])
    first = next(call)  # the rest is published only now, so it has to come in another piece
    scheduler.publish(Line(claimed.id, 2, [52, 53], finish=LENGTH))
    scheduler.publish(ended=[(claimed.id, [LENGTH], [4])])
    responses = [first, *call]
    assert not any(response.error_message for response in responses)
    pieces = [outputs(response.infer_response) for response in responses]
    assert pieces[0]["text_output"][0]
    whole = stub.ModelInfer.future(request_of(gateway, "The", max_tokens=4), metadata=METADATA)
    scheduler.serve(scheduler.claim(), [50, 51, 52, 53])
    assert "".join(piece["text_output"][0] for piece in pieces) == outputs(whole.result(60))["text_output"][0]
    assert [piece["finish_reason"][0] for piece in pieces] == [""] * (len(pieces) - 1) + ["length"]
    final = [response.infer_response.parameters["triton_final_response"].bool_param for response in responses]
    assert final == [False] * (len(pieces) - 1) + [True]


def test_requests_of_one_stream_run_together_and_fail_alone(
    gateway: GatewayProcess, stub: GRPCInferenceServiceStub, scheduler: ScriptedScheduler
) -> None:
    requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    call = stub.ModelStreamInfer(iter(requests.get, None), metadata=METADATA, timeout=60)
    second = request_of(gateway, "The", max_tokens=4, temperature=7.0)
    second.id = "bad"
    requests.put(request_of(gateway, "The", max_tokens=4))
    requests.put(second)
    claimed = scheduler.claim()  # the first runs, and has no answer yet
    refused = next(call)
    assert refused.infer_response.id == "bad"
    assert "temperature" in refused.error_message
    assert refused.infer_response.parameters["param"].string_param == "temperature"
    scheduler.serve(claimed, [50, 51, 52, 53])
    requests.put(None)
    responses = list(call)
    assert {response.infer_response.id for response in responses} == {"mine"}
    assert responses[-1].infer_response.parameters["triton_final_response"].bool_param


def test_parameters_reach_the_scheduler(
    gateway: GatewayProcess, stub: GRPCInferenceServiceStub, scheduler: ScriptedScheduler
) -> None:
    request = request_of(gateway, "The", max_tokens=3, seed=7, priority=4, timeout=90_000_000, top_p=0.5)
    request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    fields = b'{"stop": ["x", "y"], "logit_bias": {"5": -1}}'
    request.raw_input_contents.append(struct.pack("<I", len(fields)) + fields)
    waiting = stub.ModelInfer.future(request, metadata=(*METADATA, ("traceparent", "00-aa-bb-01")))
    claimed = scheduler.claim()
    assert claimed.stream == gateway.keys.requests("low")
    assert claimed.request.max_tokens == 3
    assert 0 < claimed.request.deadline_ms <= 90_000  # what is left of it
    assert (claimed.request.sampling.seed, claimed.request.sampling.top_p) == (7, 0.5)
    assert len(claimed.request.sampling.bias_ids) == 4
    assert claimed.request.traceparent == "00-aa-bb-01"
    scheduler.serve(claimed, [50, 51, 52])
    assert waiting.result(60).parameters["request_id"].string_param == claimed.id


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),)], ids=["none", "wrong"])
def test_every_call_but_health_needs_a_key(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, stub: GRPCInferenceServiceStub, metadata: Any
) -> None:
    calls = (
        lambda: stub.ModelInfer(request_of(gateway, "The"), metadata=metadata),
        lambda: list(stub.ModelStreamInfer(iter([request_of(gateway, "The")]), metadata=metadata)),
        lambda: stub.ModelMetadata(kserve.ModelMetadataRequest(name=gateway.name), metadata=metadata),
        lambda: stub.ModelReady(kserve.ModelReadyRequest(name=gateway.name), metadata=metadata),
    )
    for call in calls:
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert stub.ServerLive(kserve.ServerLiveRequest()).live
    assert stub.ServerReady(kserve.ServerReadyRequest()).ready
    assert stub.ServerMetadata(kserve.ServerMetadataRequest()).name == "orcinus"


def never(ended: threading.Event) -> Iterator[bytes]:
    """Send nothing until the test ends."""
    ended.wait(60)
    yield from ()


@pytest.fixture
def ended() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("method", ["ServerLive", "ServerReady", "ServerMetadata"])
def test_open_methods_answer_a_call_without_a_message(
    gateway: GatewayProcess, ended: threading.Event, method: str
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel:
        assert channel.stream_unary(f"/{SERVICE}/{method}")(never(ended), timeout=30) is not None


@pytest.mark.parametrize("method", ["ModelReady", "ModelMetadata", "ModelInfer", "ModelStreamInfer"])
def test_a_call_without_a_key_is_refused_before_its_message(
    gateway: GatewayProcess, ended: threading.Event, method: str
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.stream_unary(f"/{SERVICE}/{method}")(never(ended), timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_message_that_is_none_of_the_protocol_is_refused(gateway: GatewayProcess) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel:
        with pytest.raises(grpc.RpcError, match="the message cannot be read") as refused:
            channel.unary_unary(f"/{SERVICE}/ModelInfer")(b"\xff", metadata=METADATA, timeout=30)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in gateway.log()


def test_error_that_quotes_much_of_its_client_arrives(gateway: GatewayProcess, stub: GRPCInferenceServiceStub) -> None:
    """A client takes a bounded number of bytes of metadata."""
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(request_of(gateway, "The", **{"x" * 9000: True}), metadata=METADATA, timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("code", "unknown_parameter") in refused.value.trailing_metadata()


def test_panic_of_the_tokenizer_refuses_one_call_and_the_next_is_answered(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    port, model = free_port(), write_panicking_model(tmp_path / "panics")
    with (
        led_gateway(tmp_path, model, redis_server, grpc_port=port) as (own, scheduler),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="cannot be tokenized by this model's tokenizer") as refused:
            stub.ModelInfer(request_of(own, PANIC), timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert ("code", "tokenizer_failed") in refused.value.trailing_metadata()
        (answer,) = stub.ModelStreamInfer(iter([request_of(own, "ac", PANIC)]), timeout=60)
        assert "cannot be tokenized" in answer.error_message
        waiting = stub.ModelInfer.future(request_of(own, "ac", max_tokens=2), timeout=60)
        scheduler.serve(scheduler.claim(), [50, 51])
        assert outputs(waiting.result())["finish_reason"] == ["length"]
        assert "Traceback" not in own.log()


@pytest.mark.parametrize("place", [lambda request: request, lambda request: request.inputs[0]], ids=["own", "tensor"])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_message_with_too_many_parameters_is_refused_unread(
    gateway: GatewayProcess, place: Callable[[Request], Any], method: str
) -> None:
    request = request_of(gateway, "The")
    for number in range(MAX_FIELDS):
        place(request).parameters[str(number)].bool_param = True
    with grpc.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel:
        with pytest.raises(grpc.RpcError, match=f"more than {MAX_FIELDS} fields") as refused:
            call = channel.stream_unary(f"/{SERVICE}/{method}")
            call(iter([request.SerializeToString()]), metadata=METADATA, timeout=30)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ["\N{WHALE}" * 9_000, "%" * 9_000, "a\nb"])
def test_parameter_with_a_bad_name_is_refused_with_a_status(
    gateway: GatewayProcess, stub: GRPCInferenceServiceStub, name: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(request_of(gateway, "The", raw=True, **{name: 1}), metadata=METADATA, timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("code", "unknown_parameter") in (refused.value.trailing_metadata() or ())


@pytest.mark.parametrize("name", ["x" * 9_000, "\N{WHALE}" * 9_000, "a\nb"])
def test_parameter_with_a_bad_name_that_is_given_twice_is_refused_with_a_status(
    gateway: GatewayProcess, stub: GRPCInferenceServiceStub, name: str
) -> None:
    request = request_of(gateway, "The", raw=False, **{name: 1})
    request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    request.inputs[1].contents.bytes_contents.append(json.dumps({name: 1}).encode())
    with pytest.raises(grpc.RpcError, match="is given twice") as refused:
        stub.ModelInfer(request, metadata=METADATA, timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_call_without_its_message_ends_after_a_time(
    tmp_path: Path, model: Path, redis_server: RedisServer, ended: threading.Event
) -> None:
    port = free_port()
    with (
        running_gateway(tmp_path, model, redis_server, api_key=KEY, grpc_port=port, read_timeout_s=0.2),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        with pytest.raises(grpc.RpcError, match=r"request incomplete after 0\.2 s") as late:
            channel.stream_unary(f"/{SERVICE}/ModelInfer")(never(ended), metadata=METADATA, timeout=30)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_connections_beyond_the_bound_are_closed(tmp_path: Path, model: Path, redis_server: RedisServer) -> None:
    port, bounds = free_port(), {"max_connections": 4, "read_timeout_s": 600}
    with running_gateway(tmp_path, model, redis_server, grpc_port=port, **bounds), contextlib.ExitStack() as opened:
        connections = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(12)]
        until("a connection beyond the bound is closed", lambda: any(map(is_closed, connections)))


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server has closed a connection on which it may have written its settings."""
    connection.setblocking(False)
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@contextlib.asynccontextmanager
async def serving(folder: Path, **more: Any) -> AsyncIterator[tuple[Gateway, RedisServer, grpc.aio.Channel, str, str]]:
    """Run a gateway and its front in this process, with keys of alice and bob. Keys bind all gateways of a Redis."""
    port = free_port()
    async with contextlib.AsyncExitStack() as running:
        redis = running.enter_context(RedisServer(folder / "redis"))
        settings = GatewaySettings(model=folder / "m", redis_url=redis.url, grpc_port=port, **more)
        ScriptedScheduler(redis.client, settings.keys).lead()
        alice, bob = (add_key(redis, settings.keys, tenant) for tenant in ("alice", "bob"))
        gateway = await running.enter_async_context(in_process(settings, generations.model()))
        grpc_front = front.GrpcFront(gateway)
        running.push_async_callback(grpc_front.stop, 0)
        await grpc_front.start()
        channel = await running.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        yield gateway, redis, channel, alice, bob


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_waiting_request_does_not_hold_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    read: list[Request] = []

    def keep(message: Request) -> dict[str, Any]:
        read.append(message)
        return fields_of(message)

    monkeypatch.setattr(front, "fields_of", keep)
    async with serving(tmp_path) as (gateway, redis, channel, alice, _), asyncio.timeout(60):
        keys = gateway.settings.keys
        request = Request(model_name=gateway.settings.served_model_name)
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(b"a")
        call = channel.stream_stream(f"/{SERVICE}/{method}")(
            iter([request.SerializeToString()]), metadata=(("x-api-key", alice),)
        )
        await wait_until(lambda: redis.client.hget(keys.queue, "requests") == b"1")
        assert len(read) == 1
        holders = sys.getrefcount(read[0])
        assert holders == 2, "the list of this test and the argument"
        call.cancel()


async def test_messages_that_come_slowly_are_bounded_for_a_tenant_and_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "AT_ONCE_S", 0.05)
    async with serving(tmp_path) as (gateway, _, channel, alice, bob), asyncio.timeout(60):

        def begin(key: str) -> grpc.aio.StreamStreamCall[Any, Any]:
            return channel.stream_stream(f"/{SERVICE}/ModelReady")(metadata=(("x-api-key", key),))

        longest = gateway.settings.max_body_bytes + front.READ_BYTES
        of_tenant = gateway.bodies.most_bytes // 2 // longest
        slow = [begin(alice) for _ in range(of_tenant)]
        await wait_until(lambda: gateway.bodies.held_bytes == of_tenant * longest)
        refused = begin(alice)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await refused.trailing_metadata())["code"] == "too_many_bodies"
        of_other = (gateway.bodies.most_bytes - of_tenant * longest) // 2 // longest
        slow += [begin(bob) for _ in range(of_other)]
        await wait_until(lambda: gateway.bodies.held_bytes == (of_tenant + of_other) * longest)
        for call in slow:
            call.cancel()
        await wait_until(lambda: not gateway.bodies.held_bytes)


@pytest.mark.parametrize("body_bytes", [1024, 4 << 20])
async def test_messages_of_streams_are_bounded_for_a_tenant(tmp_path: Path, body_bytes: int) -> None:
    """Each stream may hold the longest message; 256 of them held 2 GiB. A server of short ones serves as many."""
    async with serving(tmp_path, max_body_bytes=body_bytes) as (_, _, channel, alice, bob), asyncio.timeout(60):

        def begin(key: str) -> grpc.aio.StreamStreamCall[Any, Any]:
            return GRPCInferenceServiceStub(channel).ModelStreamInfer(metadata=(("x-api-key", key),))

        calls = [begin(alice) for _ in range(BODIES // 2 + 1)]
        codes = [asyncio.create_task(call.code()) for call in calls]
        ended, _ = await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
        assert [code.result() for code in ended] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        refused = calls[codes.index(ended.pop())]
        assert (await refused.trailing_metadata())["code"] == "too_many_bodies"
        other = begin(bob)
        await other.done_writing()
        assert await other.code() is grpc.StatusCode.OK
        for call in calls:
            call.cancel()
        await asyncio.wait(codes)


def test_request_with_a_long_id_is_refused(gateway: GatewayProcess, stub: GRPCInferenceServiceStub) -> None:
    request = request_of(gateway, "The")
    request.id = "x" * (front.MAX_ID + 1)
    with pytest.raises(grpc.RpcError, match="id has 1025 characters") as refused:
        stub.ModelInfer(request, metadata=METADATA, timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_one_tenant_leaves_calls_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "TENANT_CALLS", 2)
    async with serving(tmp_path) as (gateway, _, channel, alice, bob):
        settings = gateway.settings
        stub = GRPCInferenceServiceStub(channel)

        def ready(key: str) -> Any:
            asked = kserve.ModelReadyRequest(name=settings.served_model_name)
            return stub.ModelReady(asked, metadata=(("x-api-key", key),), timeout=30)

        idle = [stub.ModelStreamInfer(metadata=(("x-api-key", alice),)) for _ in range(2)]
        await asyncio.gather(*(call.wait_for_connection() for call in idle))
        with pytest.raises(grpc.aio.AioRpcError, match="too many calls of one tenant") as refused:
            async with asyncio.timeout(30):
                while True:  # until the idle calls have come
                    await ready(alice)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await ready(bob)
        idle[0].cancel()
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await ready(alice)
                    break


def test_metadata_names_the_tensors_of_the_model(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, stub: GRPCInferenceServiceStub
) -> None:
    found = stub.ModelMetadata(kserve.ModelMetadataRequest(name=gateway.name), metadata=METADATA)
    assert [tensor.name for tensor in found.inputs] == ["text_input", "sampling_parameters", "stream"]
    assert [tensor.name for tensor in found.outputs] == ["text_output", "finish_reason"]


def test_model_is_ready_while_a_scheduler_leads_a_worker(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, stub: GRPCInferenceServiceStub
) -> None:
    def is_ready(name: str) -> bool:
        return bool(stub.ModelReady(kserve.ModelReadyRequest(name=name), metadata=METADATA).ready)

    until("the model is ready", lambda: is_ready(gateway.name))
    assert not is_ready("gpt")
    scheduler.stats(workers=0)
    try:
        until("no worker is linked", lambda: not is_ready(gateway.name))
    finally:
        scheduler.stats(workers=1)
    until("the worker is linked again", lambda: is_ready(gateway.name))


@pytest.mark.parametrize("streams", [True, False])
def test_request_is_cancelled_when_its_client_ends_the_call(
    gateway: GatewayProcess, stub: GRPCInferenceServiceStub, scheduler: ScriptedScheduler, streams: bool
) -> None:
    request = request_of(gateway, "The", max_tokens=100)
    call: Any = (
        stub.ModelStreamInfer(iter([request]), metadata=METADATA)
        if streams
        else stub.ModelInfer.future(request, metadata=METADATA)
    )
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, [50, 51]), started=[claimed.id])
    if streams:
        assert outputs(next(call).infer_response)["text_output"][0]
    call.cancel()
    scheduler.wait_control("cancel", claimed.id)
    scheduler.end(claimed, [[50, 51]], [3])


def test_gateway_that_stops_ends_streams_with_a_reason(tmp_path: Path, model: Path, redis_server: RedisServer) -> None:
    port = free_port()
    with (
        led_gateway(tmp_path, model, redis_server, grpc_port=port, drain_s=0) as (leaving, scheduler),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([request_of(leaving, "The", max_tokens=9)]))
        claimed = scheduler.claim()
        scheduler.publish(Line(claimed.id, 0, [50, 51]), started=[claimed.id])
        next(call)
        assert leaving.process is not None
        leaving.process.send_signal(signal.SIGTERM)
        reason = until("the stream ends", lambda: next(call).error_message)
        assert claimed.id in reason  # it continues elsewhere
        assert leaving.process.wait(60) == 0
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(request_of(leaving, "The"), timeout=60)
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    scheduler.end(claimed, [[50, 51]], [LENGTH])


@pytest.mark.usefixtures("gateway")
def test_port_in_use_is_an_error_with_its_number(tmp_path: Path, model: Path, redis_server: RedisServer) -> None:
    failing = GatewayProcess(tmp_path, model, redis_server.url, grpc_port=GRPC_PORT).start()
    assert failing.process is not None
    assert failing.process.wait(60) == 2
    assert f"cannot listen for gRPC on 127.0.0.1:{GRPC_PORT}" in failing.log()


def test_certificate_is_that_of_http_and_reloads_at_sighup(
    tmp_path: Path, model: Path, redis_server: RedisServer
) -> None:
    certs.make(tmp_path / "certs", [])
    chain, key = (tmp_path / "certs" / name for name in ("gateway.pem", "gateway-key.pem"))
    port = free_port()
    serving = GatewayProcess(tmp_path, model, redis_server.url, grpc_port=port, tls_cert=chain, tls_key=key).start()

    def live(ca: bytes) -> bool:
        credentials = grpc.ssl_channel_credentials(ca)
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(f"localhost:{port}", credentials, options) as channel:
            try:
                return bool(GRPCInferenceServiceStub(channel).ServerLive(kserve.ServerLiveRequest(), timeout=60).live)
            except grpc.RpcError:
                return False

    try:
        first = (tmp_path / "certs" / "ca.pem").read_bytes()
        until("gRPC is served", lambda: live(first), 60)
        certs.make(tmp_path / "certs", [])  # of another CA
        assert live(first)
        assert serving.process is not None
        serving.process.send_signal(signal.SIGHUP)
        second = (tmp_path / "certs" / "ca.pem").read_bytes()
        until("the new certificate is served", lambda: live(second), 60)
        assert not live(first)
    finally:
        serving.stop()


def test_a_stream_without_a_request_ends_after_a_time(
    tmp_path: Path, model: Path, redis_server: RedisServer, ended: threading.Event
) -> None:
    port, requests = free_port(), queue.SimpleQueue[Request | None]()
    bounds = {"read_timeout_s": 0.2, "idle_connection_s": 2}
    with (
        led_gateway(tmp_path, model, redis_server, api_key=KEY, grpc_port=port, **bounds) as (gateway, scheduler),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        calls = GRPCInferenceServiceStub(channel)
        requests.put(request_of(gateway, "The", max_tokens=2))
        running = calls.ModelStreamInfer(iter(requests.get, None), metadata=METADATA, timeout=60)
        claimed = scheduler.claim()
        early = calls.ModelStreamInfer(never(ended), metadata=METADATA, timeout=60)  # opened before there is a request
        with pytest.raises(grpc.RpcError, match=r"request incomplete after 0\.2 s"):
            channel.stream_unary(f"/{SERVICE}/ModelInfer")(never(ended), metadata=METADATA, timeout=60)
        with pytest.raises(grpc.RpcError, match="no request came in time") as late:
            list(early)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        scheduler.serve(claimed, [50, 51])  # a stream that runs one has no such limit
        with pytest.raises(grpc.RpcError, match="no request came in time"):
            for answer in running:
                last = answer.infer_response.parameters["triton_final_response"].bool_param
        assert last
        requests.put(None)
