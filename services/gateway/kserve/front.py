"""Serve gRPC: the Open Inference Protocol (KServe v2) and Triton's stream, over the same Gateway as HTTP.

A ModelInferRequest becomes the body of `/v1/completions` (tensors.py) and passes the same checks, keys, limits and
queue. A call that its client ends or loses cancels its requests. The certificate can be read again while the server
runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import grpc

from protos import kserve_pb2 as kserve
from protos import kserve_pb2_grpc
from services.gateway.auth import Caller
from services.gateway.delivery.stream import Generation
from services.gateway.errors import ApiError, invalid, too_big
from services.gateway.gateway import Gateway
from services.gateway.kserve.tensors import FINAL, INPUTS, OUTPUTS, answer, body_of, check_outputs, fields_of
from services.gateway.models import SERVING
from services.gateway.openai.answers import SLOW_FLUSH_S
from services.gateway.openai.bodies import CompletionBody, choose_adapter, parse_body, served_model
from services.gateway.openai.completions import completion_spec
from services.gateway.openai.info import VERSION
from shared.errors import ConfigurationError
from shared.security.tls import check_pair
from shared.tasks import end

log = logging.getLogger("orcinus.gateway")


class Certificate:
    """A chain and its key. gRPC calls `_renewed` at each handshake, on another thread."""

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        self._fresh: grpc.ServerCertificateConfiguration | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials to listen with. Raise ConfigurationError for bad files."""
        return grpc.dynamic_ssl_server_credentials(self._read(), self._renewed)

    def renew(self) -> None:
        """Read the files again, for connections that come from now on. Raise ConfigurationError."""
        self._fresh = self._read()

    def _read(self) -> grpc.ServerCertificateConfiguration:
        check_pair(self._chain, self._key)
        return grpc.ssl_server_certificate_configuration([(self._key.read_bytes(), self._chain.read_bytes())])

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return a certificate that was read since the last handshake; None to keep the one before."""
        fresh, self._fresh = self._fresh, None
        return fresh


MOST_CALLS = 4096
MOST_OF_A_STREAM = 256
"""Requests of one stream that run at the same time; it is read on when one of them ended."""
READ_BODIES = 2
"""Messages up to so many times the limit of a body are read, and refused here with a message and a code. At longer
ones gRPC ends the call without them."""
STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
Context: TypeAlias = grpc.aio.ServicerContext
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """The caller of a gRPC call, and the trace that the call belongs to."""

    caller: Caller
    traceparent: str


class GrpcFront(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """Calls that come before `start` wait, `stop` ends what still runs."""

    def __init__(self, gateway: Gateway) -> None:
        """Listen. Raise ConfigurationError for a port or certificate that will not do."""
        self._gateway = gateway
        chain, key = gateway.settings.tls_cert, gateway.settings.tls_key
        self._certificate = Certificate(chain, key) if chain is not None and key is not None else None
        options = [
            ("grpc.max_receive_message_length", READ_BODIES * gateway.settings.max_body_bytes),
            ("grpc.max_metadata_size", gateway.settings.max_header_bytes),
            ("grpc.keepalive_time_ms", 10_000),  # the death of a client's machine is noticed
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.ping_timeout_ms", 5_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            # A port in use is an error, not a second listener; with several processes the parent reserves it.
            ("grpc.so_reuseport", int(gateway.settings.processes > 1)),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MOST_CALLS)
        kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        settings = gateway.settings
        host = settings.host.strip("[]")
        address = f"[{host}]:{settings.grpc_port}" if ":" in host else f"{host}:{settings.grpc_port}"
        try:
            if self._certificate is not None:
                self._server.add_secure_port(address, self._certificate.credentials())
            else:
                self._server.add_insecure_port(address)
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(f"cannot listen for gRPC on {address}: {error}") from error

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

    # What needs no key

    async def ServerLive(  # noqa: N802 - names in kserve.proto, here and below
        self, request: kserve.ServerLiveRequest, context: Context
    ) -> kserve.ServerLiveResponse:
        """Answer that the process runs."""
        return kserve.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802
        self, request: kserve.ServerReadyRequest, context: Context
    ) -> kserve.ServerReadyResponse:
        """Return whether new work would be served."""
        return kserve.ServerReadyResponse(ready=not self._gateway.reason_not_ready())

    async def ServerMetadata(  # noqa: N802
        self, request: kserve.ServerMetadataRequest, context: Context
    ) -> kserve.ServerMetadataResponse:
        """Return name, version, and what is beyond the protocol."""
        return kserve.ServerMetadataResponse(name="orcinus", version=VERSION, extensions=["model_stream_infer"])

    # The model

    async def ModelReady(  # noqa: N802
        self, request: kserve.ModelReadyRequest, context: Context
    ) -> kserve.ModelReadyResponse:
        """Return whether the model is ready or asleep, and new work taken; another model is not ready."""
        call = await self._answered("ModelReady", context, self._call(context))
        gateway = self._gateway
        name = gateway.models.named(request.name)
        is_here = bool(name) and call.caller.may_use(name)
        ready = is_here and gateway.models.state(name) in SERVING and not gateway.reason_not_ready()
        return kserve.ModelReadyResponse(ready=ready)

    async def ModelMetadata(  # noqa: N802
        self, request: kserve.ModelMetadataRequest, context: Context
    ) -> kserve.ModelMetadataResponse:
        """Return the tensors of the model."""
        return await self._answered("ModelMetadata", context, self._metadata(request, context))

    async def ModelInfer(  # noqa: N802
        self, request: kserve.ModelInferRequest, context: Context
    ) -> kserve.ModelInferResponse:
        """Return the whole answer to one request."""
        return await self._answered("ModelInfer", context, self._infer(request, context))

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[kserve.ModelInferRequest], context: Context
    ) -> None:
        """Answer in pieces, each with the id of its request; a request that fails ends alone."""
        await self._answered("ModelStreamInfer", context, self._stream(requests, context))

    async def _metadata(self, request: kserve.ModelMetadataRequest, context: Context) -> kserve.ModelMetadataResponse:
        model = await served_model(self._gateway, request.name, (await self._call(context)).caller)
        tensor = kserve.ModelMetadataResponse.TensorMetadata
        return kserve.ModelMetadataResponse(
            name=model.name,
            versions=["1"],
            platform="orcinus",
            inputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, shape in INPUTS],
            outputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, shape in OUTPUTS],
        )

    async def _infer(self, request: kserve.ModelInferRequest, context: Context) -> kserve.ModelInferResponse:
        generation = await self.begin(request, await self._call(context), streams=False)
        try:
            return await whole_answer(request, generation)
        finally:
            generation.close()

    async def _stream(self, requests: AsyncIterator[kserve.ModelInferRequest], context: Context) -> None:
        stream = _Stream(self, context, await self._call(context))
        await stream.run(requests)

    async def begin(self, request: kserve.ModelInferRequest, call: Call, streams: bool) -> Generation:
        """Return the request, checked and enqueued. Raise ApiError; the Generation must be closed."""
        started = time.monotonic()
        gateway = self._gateway
        if (size := request.ByteSize()) > gateway.settings.max_body_bytes:
            raise too_big(gateway.settings.max_body_bytes, f"{size} bytes")
        check_outputs(request)
        fields = {"stream": streams, **fields_of(request)}
        if fields["stream"] and not streams:
            raise invalid("stream", "ModelInfer returns one response; use ModelStreamInfer to stream")
        body = parse_body(body_of(fields), CompletionBody)
        model = await served_model(gateway, body.model, call.caller, lately=True)
        spec = await completion_spec(body, model.text, model.cluster.limits, tenant=call.caller.tenant)
        if spec.max_tokens == 0:
            raise invalid("max_tokens", "max_tokens must be at least 1; got 0")
        spec.traceparent = call.traceparent
        refusal = choose_adapter(model, spec)
        return await model.admission.begin(spec, call.caller, started, refusal=refusal)

    async def _call(self, context: Context) -> Call:
        """Raise ApiError(401)."""
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        caller = self._gateway.keyring.identify(metadata.get("authorization"), metadata.get("x-api-key"))
        return Call(caller, str(metadata.get("traceparent", ""))[:256])

    async def _answered(self, method: str, context: Context, work: Awaitable[T]) -> T:
        """Return the outcome of a call; answer an ApiError with a status and trailing metadata."""
        status = "cancelled"
        try:
            result = await work
            status = "ok"
            return result
        except ApiError as error:
            code = STATUS.get(error.status, grpc.StatusCode.INTERNAL)
            status = code.name.lower()
            details = {"code": error.code, "param": error.param, "retry-after": error.headers.get("Retry-After")}
            trailing = tuple((name, value) for name, value in details.items() if value and value.isascii())
            await context.abort(code, error.message, trailing)
            raise
        except Exception:
            status = "internal"
            log.exception("%s failed", method)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the log of the gateway")
            raise
        finally:
            self._gateway.metrics.answers.labels(f"grpc/{method}", status).inc()


class _Stream:
    """One ModelStreamInfer: its requests run side by side, their answers take turns."""

    def __init__(self, front: GrpcFront, context: Context, call: Call) -> None:
        self._front = front
        self._context = context
        self._call = call
        self._turn = asyncio.Lock()  # one write at a time
        self._room = asyncio.Semaphore(MOST_OF_A_STREAM)
        self._writes: set[asyncio.Task[None]] = set()

    async def run(self, requests: AsyncIterator[kserve.ModelInferRequest]) -> None:
        """Serve until the client has sent all and read all. Raise ApiError when it does not read."""
        try:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    await self._room.acquire()
                    group.create_task(self._serve(request))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _serve(self, request: kserve.ModelInferRequest) -> None:
        try:
            await self._answer(request)
        except ApiError as error:
            await self._refuse(request, error)
        except Exception:
            log.exception("a request of a stream failed")
            await self._refuse(
                request, ApiError(500, "internal error; see the log of the gateway", code="internal_error")
            )
        finally:
            self._room.release()

    async def _answer(self, request: kserve.ModelInferRequest) -> None:
        generation = await self._front.begin(request, self._call, streams=True)
        sending = asyncio.create_task(self._send(request, generation))
        cutting = asyncio.create_task(generation.stream.cut.wait())
        try:
            await asyncio.wait({sending, cutting}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                generation.failure = generation.stream.failure
                raise generation.failure or ApiError(503, "the stream was cut", code="cut")
            sending.result()
        finally:
            generation.close()
            await end(sending, cutting)

    async def _send(self, request: kserve.ModelInferRequest, generation: Generation) -> None:
        if not generation.spec.stream:
            made = await whole_answer(request, generation)
            made.parameters[FINAL].bool_param = True
            await self._write(kserve.ModelStreamInferResponse(infer_response=made))
            return
        texts = _before(generation)
        while not generation.done:
            reasons = [""] * len(texts)
            for delta in await generation.next():
                texts[delta.choice] += delta.text
                reasons[delta.choice] = delta.finish_reason or ""
            if not (any(texts) or any(reasons) or generation.done):  # all is held back
                continue
            parameters = _facts(generation) | {FINAL: generation.done}
            made = answer(request, texts, reasons, parameters)
            texts = [""] * len(texts)
            await self._write(kserve.ModelStreamInferResponse(infer_response=made))

    async def _refuse(self, request: kserve.ModelInferRequest, error: ApiError) -> None:
        """Write the error of one request, in Triton's form. Raise it when the client does not even read that."""
        made = kserve.ModelStreamInferResponse(error_message=error.message)
        made.infer_response.id = request.id
        made.infer_response.model_name = request.model_name
        for name, value in (("code", error.code), ("param", error.param)):
            if value:
                made.infer_response.parameters[name].string_param = value
        made.infer_response.parameters[FINAL].bool_param = True
        try:
            async with asyncio.timeout(SLOW_FLUSH_S):
                await self._write(made)
        except TimeoutError:
            raise error from None

    async def _write(self, made: kserve.ModelStreamInferResponse) -> None:
        """Write one answer. A caller that is cancelled leaves its write to end: gRPC takes no second one beside it."""
        writing = asyncio.create_task(self._write_in_turn(made))
        self._writes.add(writing)
        writing.add_done_callback(self._forget)
        await asyncio.shield(writing)

    async def _write_in_turn(self, made: kserve.ModelStreamInferResponse) -> None:
        async with self._turn:
            await self._context.write(made)

    def _forget(self, writing: asyncio.Task[None]) -> None:
        self._writes.discard(writing)
        if not writing.cancelled():
            writing.exception()  # the caller has it, or was cancelled


async def whole_answer(request: kserve.ModelInferRequest, generation: Generation) -> kserve.ModelInferResponse:
    """Return all choices at their ends. Raise ApiError."""
    texts = _before(generation)
    while not generation.done:
        for delta in await generation.next():
            texts[delta.choice] += delta.text
    reasons = [choice.finish_reason or "" for choice in generation.choices]
    return answer(request, texts, reasons, _facts(generation))


def _before(generation: Generation) -> list[str]:
    """Return the text of each choice before its first token: with `echo` its prompt."""
    spec = generation.spec
    return [spec.prompt_texts[choice // spec.n] if spec.echo else "" for choice in range(spec.choices)]


def _facts(generation: Generation) -> dict[str, Any]:
    """Return the facts that every answer has about its request; token counts at its end."""
    facts: dict[str, Any] = {"request_id": generation.spec.id}
    if generation.done:
        usage = generation.usage
        facts |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    return facts
