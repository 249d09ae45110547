"""Serve gRPC: the Open Inference Protocol (KServe v2) and Triton's stream, over the same Gateway as HTTP.

A ModelInferRequest becomes the body of `/v1/completions` (tensors.py) and passes the same checks, keys, limits and
queue. A call that its client ends or loses cancels its requests. The certificate can be read again while the server
runs.

Every method is served as a stream of requests; clients see no difference. gRPC calls the handler of any other method
only when the message has come. So a client without a key could hold all of MAX_CALLS by sending no message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message

from protos import kserve_pb2 as kserve
from services.gateway.admission import BODIES, MANY_BODIES, HeldBytes
from services.gateway.auth import Caller
from services.gateway.delivery.stream import Generation
from services.gateway.errors import RETRY, ApiError, invalid, too_big
from services.gateway.gateway import Gateway
from services.gateway.kserve.tensors import (
    FINAL,
    INPUTS,
    OUTPUTS,
    answer,
    body_of,
    check_outputs,
    fields_of,
    read_request,
)
from services.gateway.models import SERVING
from services.gateway.openai.answers import SLOW_FLUSH_S
from services.gateway.openai.bodies import (
    CompletionBody,
    check_body,
    choose_adapter,
    parse_object,
    served_model,
    wait_for_turn,
)
from services.gateway.openai.completions import completion_spec
from services.gateway.openai.info import VERSION
from services.gateway.request import ARRIVAL, Arrival
from shared.errors import ConfigurationError
from shared.security.tls import check_pair
from shared.tasks import end

log = logging.getLogger("orcinus.gateway")


class Certificate:
    """A chain and its key. gRPC calls `_renew` at each handshake, on another thread."""

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        self._fresh: grpc.ServerCertificateConfiguration | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials to listen with. Raise ConfigurationError for bad files."""
        return grpc.dynamic_ssl_server_credentials(self._read(), self._renew)

    def renew(self) -> None:
        """Read the files again, for connections that come from now on. Raise ConfigurationError."""
        self._fresh = self._read()

    def _read(self) -> grpc.ServerCertificateConfiguration:
        check_pair(self._chain, self._key)
        return grpc.ssl_server_certificate_configuration([(self._key.read_bytes(), self._chain.read_bytes())])

    def _renew(self) -> grpc.ServerCertificateConfiguration | None:
        """Return a certificate that was read since the last handshake; None to keep the one before."""
        fresh, self._fresh = self._fresh, None
        return fresh


SERVICE = "inference.GRPCInferenceService"
MAX_CALLS = 4096
TENANT_CALLS = MAX_CALLS // 2
"""Of one tenant, where there are keys of others."""
MAX_MESSAGE_BYTES = 2048
"""Of an error, which may quote its client. A client takes 8 KiB of metadata, in which a byte of a message takes up to
three; with more the call ends with another error.
"""
AT_ONCE_S = 2.0
"""A message that takes longer counts as the longest among the bodies that come in: gRPC does not say how much of it is
there.
"""
MAX_OF_A_STREAM = 256
"""Requests of one stream that run at the same time; it is read on when one of them ended."""
MAX_ID = 1024
"""Characters; each answer repeats them."""
READ_BYTES = 64 << 10
"""Messages that are longer than a body by so much are read, and refused here with a message and a code. At longer ones
gRPC ends the call without them.
"""
STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
Context: TypeAlias = grpc.aio.ServicerContext


@dataclass(slots=True)
class Inference:
    """A request. head: what its answers repeat; the message goes once it is read, as the request may wait for long."""

    head: kserve.ModelInferRequest
    message: kserve.ModelInferRequest

    @classmethod
    def of(cls, data: bytes) -> Inference:
        """Raise DecodeError."""
        message = read_request(data)
        head = kserve.ModelInferRequest(model_name=message.model_name, id=message.id)
        for output in message.outputs[: len(OUTPUTS)]:
            head.outputs.add(name=output.name)
        return cls(head, message)

    def take(self, most_bytes: int) -> dict[str, Any]:
        """Return the fields of the message, and drop it. Raise ApiError(400, 404, 413)."""
        message, self.message = self.message, kserve.ModelInferRequest()
        if (size := message.ByteSize()) > most_bytes:
            raise too_big(most_bytes, f"{size} bytes")
        if len(message.id) > MAX_ID:
            text = f"id has {len(message.id)} characters; this server accepts at most {MAX_ID}"
            raise invalid("id", text, "invalid_value")
        check_outputs(message)
        return fields_of(message)


@dataclass(frozen=True, slots=True)
class Call:
    """The caller of a gRPC call, and the trace that the call belongs to."""

    caller: Caller
    traceparent: str


class GrpcFront:
    """Calls that come before `start` wait, `stop` ends what still runs."""

    def __init__(self, gateway: Gateway) -> None:
        """Listen. Raise ConfigurationError for a port or certificate that will not do."""
        self._gateway = gateway
        self._calls: Counter[str] = Counter()  # of each tenant
        self.settings = settings = gateway.settings
        self._longest = settings.max_body_bytes + READ_BYTES
        # Each stream may bring a message at any time. They count apart: idle ones leave room for other bodies.
        self._streams = HeldBytes("messages of streams", BODIES * self._longest, RETRY, MANY_BODIES)
        chain, key = settings.tls_cert, settings.tls_key
        self._certificate = Certificate(chain, key) if chain is not None and key is not None else None
        options = [
            ("grpc.max_receive_message_length", self._longest),
            ("grpc.max_metadata_size", settings.max_header_bytes),
            ("grpc.max_allowed_incoming_connections", settings.max_connections),
            ("grpc.max_connection_idle_ms", 1000 * settings.idle_connection_s),
            ("grpc.http2.bdp_probe", 0),  # else what comes in of a message that is not read yet grows with the network
            ("grpc.server_handshake_timeout_ms", int(1000 * settings.read_timeout_s)),
            ("grpc.keepalive_time_ms", 10_000),  # the death of a client's machine is noticed
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.ping_timeout_ms", 5_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            # A port in use is an error, not a second listener; with several processes the parent reserves it.
            ("grpc.so_reuseport", int(settings.processes > 1)),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((self._handlers(),))
        host = settings.host.strip("[]")
        address = f"[{host}]:{settings.grpc_port}" if ":" in host else f"{host}:{settings.grpc_port}"
        try:
            if self._certificate is not None:
                self._server.add_secure_port(address, self._certificate.credentials())
            else:
                self._server.add_insecure_port(address)
        except (OSError, RuntimeError) as error:
            problem = f"cannot listen for gRPC on {address}: {error}"
            raise ConfigurationError(f"{problem}; choose another --host or --grpc-port") from error

    async def start(self) -> None:
        """Answer."""
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)

    def renew_certificate(self) -> None:
        """Read the files again; what will not do is not taken."""
        try:
            if self._certificate is not None:
                self._certificate.renew()
        except (OSError, ConfigurationError) as error:
            log.error("certificate of gRPC not reloaded: %s", error)

    def _handlers(self) -> grpc.GenericRpcHandler:
        """Return how each method of the protocol is served."""
        open_methods = {"ServerLive": self._is_live, "ServerReady": self._is_ready, "ServerMetadata": self._metadata}
        methods: dict[str, tuple[type[Message | Inference], Callable[[Call, Context], Awaitable[None]]]] = {
            "ModelReady": (kserve.ModelReadyRequest, self._serve_unary(self._is_model_ready)),
            "ModelMetadata": (kserve.ModelMetadataRequest, self._serve_unary(self._model_metadata)),
            "ModelInfer": (Inference, self._serve_unary(self._infer)),
            "ModelStreamInfer": (Inference, self._stream),
        }
        handlers = {
            name: _handler(partial(self._answer_all, answer), kserve.ServerLiveRequest)
            for name, answer in open_methods.items()
        }
        handlers |= {
            name: _handler(partial(self._answer, name, serve), kind) for name, (kind, serve) in methods.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    # What needs no key, and says the same whatever the message is

    async def _answer_all(self, answer: Callable[[], Message], _requests: object, context: Context) -> None:
        await context.write(answer())

    def _is_live(self) -> kserve.ServerLiveResponse:
        """Say that the process runs."""
        return kserve.ServerLiveResponse(live=True)

    def _is_ready(self) -> kserve.ServerReadyResponse:
        """Return whether new work would be served."""
        return kserve.ServerReadyResponse(ready=not self._gateway.reason_not_ready())

    def _metadata(self) -> kserve.ServerMetadataResponse:
        """Return name, version, and what is beyond the protocol."""
        return kserve.ServerMetadataResponse(name="orcinus", version=VERSION, extensions=["model_stream_infer"])

    # The model

    def _serve_unary(
        self, answer: Callable[[Any, Call], Awaitable[Message]]
    ) -> Callable[[Call, Context], Awaitable[None]]:
        """Return how a method of one request and one answer is served."""

        async def serve(call: Call, context: Context) -> None:
            await context.write(await answer(await self._request(call, context), call))

        return serve

    async def _request(self, call: Call, context: Context) -> Message | Inference:
        """Return the request of a call. Raise ApiError(400, 408, 429, 503)."""
        patience_s = self._gateway.settings.read_timeout_s
        read_task = asyncio.ensure_future(context.read())
        try:
            async with asyncio.timeout(patience_s):
                await asyncio.wait([read_task], timeout=AT_ONCE_S)
                with contextlib.ExitStack() as stack:
                    if not read_task.done():
                        stack.callback(self._gateway.bodies.hold(call.caller, self._longest))
                    request = await read_task
        except TimeoutError:
            text = f"request incomplete after {patience_s:g} s; send it in less time"
            raise ApiError(408, text, code="request_timeout") from None
        finally:
            await end(read_task)
        if not isinstance(request, Message | Inference):
            raise invalid(None, "the call ended without a request; send one message", "invalid_value")
        return request

    async def _is_model_ready(self, request: kserve.ModelReadyRequest, call: Call) -> kserve.ModelReadyResponse:
        """Return whether the model is ready or asleep, and new work taken; another model is not ready."""
        gateway = self._gateway
        name = gateway.models.resolve(request.name)
        is_here = bool(name) and call.caller.may_use(name)
        ready = is_here and gateway.models.state(name) in SERVING and not gateway.reason_not_ready()
        return kserve.ModelReadyResponse(ready=ready)

    async def _model_metadata(self, request: kserve.ModelMetadataRequest, call: Call) -> kserve.ModelMetadataResponse:
        """Return the tensors of the model."""
        model = await served_model(self._gateway, request.name, call.caller)
        tensor = kserve.ModelMetadataResponse.TensorMetadata
        return kserve.ModelMetadataResponse(
            name=model.name,
            versions=["1"],
            platform="orcinus",
            inputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, shape in INPUTS],
            outputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, shape in OUTPUTS],
        )

    async def _infer(self, request: Inference, call: Call) -> kserve.ModelInferResponse:
        """Return the whole answer to one request."""
        generation = await self.begin(request, call, streams=False)
        try:
            return await whole_answer(request.head, generation)
        finally:
            generation.close()

    async def _stream(self, call: Call, context: Context) -> None:
        """Answer in pieces, each with the id of its request; a request that fails ends alone."""
        release = self._streams.hold(call.caller, self._longest)
        try:
            await _Stream(self, context, call).run()
        finally:
            release()

    async def begin(self, request: Inference, call: Call, streams: bool) -> Generation:
        """Return the request, checked and enqueued. Raise ApiError; the Generation must be closed."""
        arrived_at = time.monotonic()
        gateway = self._gateway
        fields = {"stream": streams, **request.take(gateway.settings.max_body_bytes)}
        if fields["stream"] and not streams:
            raise invalid("stream", "ModelInfer returns one response; use ModelStreamInfer to stream")
        raw = body_of(fields)
        del fields
        value = parse_object(raw)
        arrival = Arrival.of(value, raw, call.caller, arrived_at)
        await wait_for_turn(gateway, value.get("model"), call.caller, arrival)
        body = check_body(value, CompletionBody)
        model = await served_model(gateway, body.model, call.caller, lately=True)
        spec = await completion_spec(body, model.text, model.cluster.limits, tenant=call.caller.tenant)
        if spec.max_tokens == 0:
            raise invalid("max_tokens", "max_tokens must be at least 1; got 0")
        spec.traceparent, spec.content = call.traceparent, arrival.content
        refusal = choose_adapter(model, spec)
        del raw, value, body  # the request may wait for long, with the spec alone
        return await model.admission.begin(spec, call.caller, arrived_at, refusal=refusal)

    def _call(self, context: Context) -> Call:
        """Raise ApiError(401)."""
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        caller = self._gateway.keyring.identify(metadata.get("authorization"), metadata.get("x-api-key"))
        return Call(caller, str(metadata.get("traceparent", ""))[:256])

    async def _serve(self, serve: Callable[[Call, Context], Awaitable[None]], context: Context) -> None:
        """Serve a call within the bound of its tenant. Raise ApiError."""
        call = self._call(context)
        tenant = call.caller.tenant
        if call.caller.has_others and self._calls[tenant] >= TENANT_CALLS:
            text = f"too many calls of one tenant at a time (limit {TENANT_CALLS}); {RETRY}"
            raise ApiError(429, text, code="too_many_calls", retry_after_s=1)
        self._calls[tenant] += 1
        ARRIVAL.set(Arrival.of({}, b"", call.caller, time.monotonic()))
        try:
            await serve(call, context)
        except DecodeError as error:
            raise invalid(None, f"the message cannot be read: {error}; send one of kserve.proto") from error
        finally:
            self._calls[tenant] -= 1
            if not self._calls[tenant]:
                del self._calls[tenant]

    async def _answer(
        self,
        method: str,
        serve: Callable[[Call, Context], Awaitable[None]],
        _requests: object,
        context: Context,
    ) -> None:
        """Serve a call; answer an ApiError with a status and trailing metadata."""
        status = "cancelled"
        try:
            await self._serve(serve, context)
            status = "ok"
        except ApiError as error:
            code = STATUS.get(error.status, grpc.StatusCode.INTERNAL)
            status = code.name.lower()
            details = {"code": error.code, "param": error.param, "retry-after": error.headers.get("Retry-After")}
            trailing_metadata = tuple(
                (name, value) for name, value in details.items() if value and value.isascii() and value.isprintable()
            )
            message = error.message.encode()[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore")
            await context.abort(code, message, trailing_metadata)
        except Exception:
            status = "internal"
            log.exception("%s failed", method)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the log of the gateway")
        finally:
            self._gateway.metrics.answers.labels(f"grpc/{method}", status).inc()


def _handler(
    serve: Callable[[Any, Context], Awaitable[None]], kind: type[Message | Inference]
) -> grpc.RpcMethodHandler:
    """Return the handler of a method. serve: gets the requests, of this kind, and the context."""
    read = Inference.of if issubclass(kind, Inference) else kind.FromString
    return grpc.stream_stream_rpc_method_handler(serve, read, _serialize)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


class _Stream:
    """One ModelStreamInfer: its requests run side by side, their answers take turns."""

    def __init__(self, front: GrpcFront, context: Context, call: Call) -> None:
        self._front = front
        self._context = context
        self._call = call
        self._turn = asyncio.Lock()  # one write at a time
        self._room = asyncio.Semaphore(MAX_OF_A_STREAM)
        self._writes: set[asyncio.Task[None]] = set()
        self._idle_s = front.settings.idle_connection_s
        self._idle = asyncio.timeout(self._idle_s)  # while no request runs
        self._active_requests = 0

    async def run(self) -> None:
        """Serve until the client has sent all and read all. Raise ApiError when it does not read, or sends nothing."""
        try:
            async with self._idle, asyncio.TaskGroup() as group:
                await self._room.acquire()
                while isinstance(request := await self._context.read(), Inference):
                    self._begin()
                    group.create_task(self._serve(request))
                    await self._room.acquire()  # a message that cannot be begun is not read
        except TimeoutError:
            text = "stream: no request came in time and none runs; call again when there is one"
            raise ApiError(408, text, code="request_timeout") from None
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _begin(self) -> None:
        self._active_requests += 1
        self._idle.reschedule(None)

    def _end(self) -> None:
        self._active_requests -= 1
        if not self._active_requests:
            self._idle.reschedule(asyncio.get_running_loop().time() + self._idle_s)

    async def _serve(self, request: Inference) -> None:
        try:
            await self._answer(request)
        except ApiError as error:
            await self._refuse(request.head, error)
        except Exception:
            log.exception("a request of a stream failed")
            await self._refuse(
                request.head, ApiError(500, "internal error; see the log of the gateway", code="internal_error")
            )
        finally:
            self._room.release()
            self._end()

    async def _answer(self, request: Inference) -> None:
        generation = await self._front.begin(request, self._call, streams=True)
        send_task = asyncio.create_task(self._send(request.head, generation))
        cut_task = asyncio.create_task(generation.stream.is_cut.wait())
        try:
            await asyncio.wait({send_task, cut_task}, return_when=asyncio.FIRST_COMPLETED)
            if not send_task.done():
                generation.failure = generation.stream.failure
                raise generation.failure or ApiError(503, "the stream was cut", code="cut")
            send_task.result()
        finally:
            generation.close()
            await end(send_task, cut_task)

    async def _send(self, request: kserve.ModelInferRequest, generation: Generation) -> None:
        if not generation.spec.stream:
            response = await whole_answer(request, generation)
            response.parameters[FINAL].bool_param = True
            await self._write(kserve.ModelStreamInferResponse(infer_response=response))
            return
        texts = _texts_before(generation)
        while not generation.is_done:
            reasons = [""] * len(texts)
            for delta in await generation.next():
                texts[delta.choice] += delta.text
                reasons[delta.choice] = delta.finish_reason or ""
            if not (any(texts) or any(reasons) or generation.is_done):  # all is held back
                continue
            parameters = _facts(generation) | {FINAL: generation.is_done}
            response = answer(request, texts, reasons, parameters)
            texts = [""] * len(texts)
            await self._write(kserve.ModelStreamInferResponse(infer_response=response))

    async def _refuse(self, request: kserve.ModelInferRequest, error: ApiError) -> None:
        """Write the error of one request, in Triton's form. Raise it when the client does not even read that."""
        response = kserve.ModelStreamInferResponse(error_message=error.message)
        response.infer_response.id = request.id
        response.infer_response.model_name = request.model_name
        for name, value in (("code", error.code), ("param", error.param)):
            if value:
                response.infer_response.parameters[name].string_param = value
        response.infer_response.parameters[FINAL].bool_param = True
        try:
            async with asyncio.timeout(SLOW_FLUSH_S):
                await self._write(response)
        except TimeoutError:
            raise error from None

    async def _write(self, response: kserve.ModelStreamInferResponse) -> None:
        """Write one answer. A caller that is cancelled leaves its write to end: gRPC takes no second one beside it."""
        write_task = asyncio.create_task(self._write_in_turn(response))
        self._writes.add(write_task)
        write_task.add_done_callback(self._forget)
        await asyncio.shield(write_task)

    async def _write_in_turn(self, response: kserve.ModelStreamInferResponse) -> None:
        async with self._turn:
            await self._context.write(response)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has it, or was cancelled


async def whole_answer(request: kserve.ModelInferRequest, generation: Generation) -> kserve.ModelInferResponse:
    """Return all choices at their ends. Raise ApiError."""
    texts = _texts_before(generation)
    while not generation.is_done:
        for delta in await generation.next():
            texts[delta.choice] += delta.text
    reasons = [choice.finish_reason or "" for choice in generation.choices]
    return answer(request, texts, reasons, _facts(generation))


def _texts_before(generation: Generation) -> list[str]:
    """Return the text of each choice before its first token: with `echo` its prompt."""
    spec = generation.spec
    return [spec.prompt_texts[choice // spec.n] if spec.echo else "" for choice in range(spec.choices)]


def _facts(generation: Generation) -> dict[str, Any]:
    """Return the facts that every answer has about its request; token counts at its end."""
    facts: dict[str, Any] = {"request_id": generation.spec.id}
    if generation.is_done:
        usage = generation.usage
        facts |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    return facts
