"""The scheduler's end of one worker: hello, steps out, results in.

One link is one Run. A link that breaks is closed for good and the fleet makes another; by then the core has forgotten
all steps of the old link.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import suppress

import grpc

from protos import worker_pb2, worker_pb2_grpc
from services.scheduler.core.types import Limits
from services.scheduler.workers.contract import ContractError, check_info
from services.scheduler.workers.registry import Registration
from services.scheduler.workers.run_call import RunCall
from services.scheduler.workers.wire import limits_from_wire
from shared.errors import ProtocolError
from shared.keys import BELIEVED_EPOCHS
from shared.security.channels import aio_channel, channel_credentials
from shared.settings import SchedulerSettings
from shared.wire import handshake

log = logging.getLogger("orcinus.scheduler")

MESSAGE_BYTES = 64 << 20
OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # what grpcio acts on
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
DESCRIBE_S = 5.0
WATCH_S = 0.05
CLOSE_S = 1.0
ERROR_LENGTH = 1000
"""Characters of a worker's error that are kept."""


class WorkerLostError(Exception):
    """The link to the worker cannot be used any more."""


class StepFailedError(WorkerLostError):
    """The worker reported that it could not execute a step."""


class StepTimeoutError(WorkerLostError):
    """A step stayed unanswered: the worker hangs or is slow. No request is to blame."""


class StaleEpochError(WorkerLostError):
    """The worker has seen a higher epoch than this Run's, so Redis has lost the counter."""


class WorkerLink:
    """A Run with one worker: `open` it, then `send` steps and iterate `results` until it ends."""

    def __init__(self, worker: Registration, settings: SchedulerSettings, token: str) -> None:
        """token: of the shard's lease."""
        self._token = token
        self.worker = worker
        self.epoch = worker.epoch
        self._shard = settings.shard
        self._model = settings.served_model_name
        self._speculate = settings.speculate
        self._mixed_numerics = settings.mixed_numerics
        self._channel = aio_channel(worker.address, channel_credentials(settings), OPTIONS)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._call: grpc.aio.StreamStreamCall | RunCall | None = None
        self._sent_steps: deque[tuple[int, int]] = deque()  # (step id, monotonic ns), unanswered
        self._moved_ns = 0  # the last answer
        self.info = worker_pb2.WorkerInfo()
        self.drains = False  # the worker drains: no further step may be sent, but for the last one

    async def open(self, kept: Callable[[], Iterable[str]]) -> Limits:
        """Ask for the size of the worker and say hello.

        kept: returns the host tiers that outlived their workers and that sequences need, as of the hello.
        Returns when the worker has begun the Run, if it says so (version 1.1). Raises grpc.aio.AioRpcError,
        ProtocolError or TimeoutError when it does not answer, ContractError when its answer is out of bounds or it
        refuses the Run, StaleEpochError when it would refuse the Run's epoch.
        """
        self.info = await self._stub.Describe(worker_pb2.DescribeRequest(), timeout=DESCRIBE_S)
        check_info(self.info, self._model)
        if self.info.highest_epoch > max(self.epoch, BELIEVED_EPOCHS):
            raise ContractError(
                f"highest_epoch: {self.info.highest_epoch} is far beyond Redis's clock, and the next Run would have to "
                "follow it; restart the worker"
            )
        if self.info.highest_epoch > self.epoch:
            raise StaleEpochError(
                f"epoch {self.epoch} is older than {self.info.highest_epoch}, which the worker has seen"
            )
        local = await RunCall.connect(self.info.run_socket) if self.info.run_socket else None
        self._call = local or self._stub.Run()
        hello = worker_pb2.Hello(
            shard=self._shard, takes_late=True, kept=kept(), version=handshake.version(), token=self._token,
            takes_begun=True,
        )  # fmt: skip
        version, first = self.info.version, worker_pb2.Step(epoch=self.epoch, hello=hello)
        if (version.major, version.minor) > handshake.FIRST:
            async with asyncio.timeout(DESCRIBE_S):
                await self._begin(first)
        else:
            await self._write(first)
        info = self.info
        log.info(
            "worker %s at %s%s: %d slots, %d blocks of %d tokens, %d on the host",
            self.worker.id,
            self.worker.address,
            " over its Unix socket" if local else "",
            info.max_seqs,
            info.gpu_blocks,
            info.block_size,
            info.host_blocks,
        )
        return limits_from_wire(info, self._speculate, self.epoch, self._mixed_numerics)

    async def _begin(self, hello: worker_pb2.Step) -> None:
        """Send hello, and wait until the worker has accepted it."""
        try:
            with suppress(grpc.aio.AioRpcError, ProtocolError):  # the call has ended: the first answer says why
                await self._write(hello)
            first = await anext(aiter(self._answers()))
        except grpc.aio.AioRpcError as error:
            raise refusal(error) or error from None
        except StopAsyncIteration:
            raise ProtocolError(f"the stream of worker {self.worker.id} ended before its Run began") from None
        if not first.begun:
            raise ContractError(f"worker {self.worker.id} answered hello with something else; update the worker")

    async def send(self, step: worker_pb2.Step) -> None:
        """Send a step. Raises AioRpcError, or ProtocolError when the stream has ended."""
        self._sent_steps.append((step.id, time.monotonic_ns()))
        await self._write(step)

    async def _write(self, step: worker_pb2.Step) -> None:
        if self._call is None:
            raise ProtocolError("a step was sent before hello")
        try:
            await self._call.write(step)
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:  # the call has ended meanwhile
            raise ProtocolError(f"the stream to worker {self.worker.id} has ended: {error}") from error

    async def results(self, has_last_step: Callable[[], bool]) -> AsyncIterator[worker_pb2.Result]:
        """Yield results in the order of the steps, until the stream ends or a worker that drains has answered all.

        has_last_step: returns whether such a worker gets one further step.
        Raises AioRpcError, ProtocolError, ContractError for an answer to another step, and StepFailedError for the
        first step that failed.
        """
        async for result in self._answers():
            if result.begun:
                continue
            if result.draining:
                self.drains = True
                if not self._sent_steps and not has_last_step():
                    return
                continue
            if not self._sent_steps or result.epoch != self.epoch or result.id != self._sent_steps[0][0]:
                raise ContractError(
                    f"worker {self.worker.id} answered step {result.id} of epoch {result.epoch}; "
                    f"expected {self._sent_steps[0][0] if self._sent_steps else 'none'} of epoch {self.epoch}"
                )
            self._sent_steps.popleft()
            self._moved_ns = time.monotonic_ns()
            if result.error:
                raise StepFailedError(f"step {result.id} failed: {result.error[:ERROR_LENGTH]}")
            yield result
            if self.drains and not self._sent_steps and not has_last_step():
                return

    def _answers(self) -> AsyncIterable[worker_pb2.Result]:
        if self._call is None:
            raise ProtocolError("results were read before hello")
        return self._call

    def waited_s(self) -> float:
        """Return for how long the oldest unanswered step has been at the worker; 0 when there is none."""
        return (time.monotonic_ns() - max(self._sent_steps[0][1], self._moved_ns)) / 1e9 if self._sent_steps else 0.0

    async def watch(self, limit_s: float, idle: Callable[[], None]) -> None:
        """Raise StepTimeoutError when a step stays unanswered for limit_s; call `idle` regularly while none is."""
        while (waited := self.waited_s()) < limit_s:
            if waited == 0:
                idle()
            await asyncio.sleep(WATCH_S)
        raise StepTimeoutError(f"a step is unanswered after {waited:.1f} s (limit {limit_s:.1f} s)")

    async def close(self) -> None:
        """End the call and close the channel, within CLOSE_S."""
        if self._call is not None:
            self._call.cancel()
        # In a separate task, so that a cancellation of the caller does not reach the channel.
        closing = asyncio.ensure_future(self._channel.close(grace=None))
        await asyncio.wait({closing}, timeout=CLOSE_S)
        if closing.done() and not closing.cancelled() and (error := closing.exception()):
            log.debug("channel to worker %s not closed: %s", self.worker.id, error)


NOT_CAUSED_BY_A_STEP = (
    grpc.StatusCode.FAILED_PRECONDITION,  # the worker refuses the Run
    grpc.StatusCode.ABORTED,  # a Run of a newer epoch took its place
)

SILENT = "ping timeout"
"""gRPC's text for a keepalive without an answer. A process that dies in a step closes its connection; a process that
hangs in a step still answers keepalives."""


def may_be_caused_by_step(error: BaseException) -> bool:
    """Return whether a step may have ended the link.

    No step causes the loss of a Run that was refused or replaced, of a worker that drained, of a silent process or
    machine, after a step that timed out, or after an answer that breaks the contract. A broken connection is caused by
    a step only if the worker died, too (Quarantine.link_lost).
    """
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() not in NOT_CAUSED_BY_A_STEP and SILENT not in (error.details() or "")
    return isinstance(error, (StepFailedError, ValueError))


def refusal(error: BaseException) -> ContractError | None:
    """Return why a worker refuses a Run, from the error that ended it before the first answer; None for other errors.

    TCP that is off, another version, or a Run that Redis does not give this shard: the next try ends alike. A worker
    that another shard has taken since refuses nothing: it aborts the older Run.
    """
    if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return ContractError(error.details() or "the worker refuses the Run")
    return None


def brief(error: BaseException) -> str:
    """Return one line for the log and for `events`."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
