"""With which losses of a worker its requests are suspected."""

from __future__ import annotations

import grpc
import pytest

from services.scheduler.workers.link import WorkerLostError, may_be_caused_by_step


def rpc(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("details", "blamed"),
    [
        ("Socket closed", True),
        ("recvmsg:Connection reset by peer", True),
        ("Stream removed (ping timeout)", False),  # SIGSTOP, or nothing comes through any more
    ],
)
def test_a_worker_that_is_silent_as_a_whole_blames_no_request(details: str, blamed: bool) -> None:
    assert may_be_caused_by_step(rpc(grpc.StatusCode.UNAVAILABLE, details)) is blamed


def test_a_worker_that_takes_another_run_blames_no_request() -> None:
    assert not may_be_caused_by_step(rpc(grpc.StatusCode.ABORTED, "another Run took its place"))
    assert not may_be_caused_by_step(rpc(grpc.StatusCode.FAILED_PRECONDITION, "epoch 1 is older than 2"))
    assert not may_be_caused_by_step(WorkerLostError("its stream ended"))
