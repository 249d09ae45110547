"""Replicas of several ranks in real processes: the reference's tokens, and the end of one rank is the end of all."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import psutil
import pytest

from deploy import certs
from tests.chaos.streams import load
from tests.support.checkpoints.models import Reference
from tests.support.stack import Stack
from tests.support.waiting import free_port, until

REQUESTS = 6
LONG = 160  # tokens of a stream that a fault shall hit; the reference says what the first 48 are
CONTEXT = 1024
STEP_TIMEOUT_S = 10.0  # long enough that no step of a busy machine takes it
GONE_S = 60.0  # a rank that is stopped is missed after STEP_TIMEOUT_S; the rest is a busy machine's
MODEL = {"requests": REQUESTS, "output_tokens": 48, "max_position_embeddings": CONTEXT, "seed": 20261123}
STACK = {
    "dtype": "float32", "tp": 2, "pp": 2, "threads": 1, "step_timeout_s": STEP_TIMEOUT_S,
    "kv_blocks": 24, "host_blocks": 48, "policy": "sarathi:relief=newest-swap", "step_tokens": 24,  # short of memory
}  # fmt: skip


def ranks_of(stack: Stack) -> list[psutil.Process]:
    """The leader and those that it started."""
    leader = psutil.Process(stack.pid("worker"))
    return [leader, *filter(computes, leader.children())]


def computes(process: psutil.Process) -> bool:
    """Whether it is no process that makes masks of grammars."""
    with contextlib.suppress(psutil.Error):
        return not any("grammar_process" in word for word in process.cmdline())
    return True


def listening(process: psutil.Process) -> set[str]:
    """IP addresses."""
    return {
        each.laddr.ip.removeprefix("::ffff:") for each in process.net_connections() if each.status == psutil.CONN_LISTEN
    }


def ports(process: psutil.Process) -> list[int]:
    """On which it listens."""
    return [each.laddr.port for each in process.net_connections() if each.status == psutil.CONN_LISTEN]


def test_ranks_give_references_tokens_with_chunks_preemption_swap_and_cancels(
    stack: Stack, reference: Reference
) -> None:
    assert [listening(rank) for rank in ranks_of(stack)] == [{"127.0.0.1"}] * 4

    def disturbed() -> bool:
        """Run the load once. Five streams of LONG tokens need twice the blocks there are."""
        with load(stack, reference, LONG) as streams:
            streams.streams[0].leave.set()
            streams.check(LONG, but=[0])
        stack.settled()
        stats = stack.stats()
        return min(int(stats[name]) for name in ("preemptions", "swapped_blocks", "cancelled")) > 0

    until("sequences were preempted, swapped and cancelled", disturbed, 120)
    stack.settled_empty()


@pytest.mark.parametrize(
    ("rank", "how", "then"),
    [
        (3, signal.SIGKILL, {"tp": 2, "pp": 1}),
        (0, signal.SIGKILL, {"tp": 1, "pp": 2}),
        (1, signal.SIGSTOP, {"tp": 2, "pp": 2}),
    ],
    ids=["rank 3 killed", "leader killed", "rank 1 stopped"],
)
def test_dead_or_hung_rank_ends_its_replica_without_token_loss(
    stack: Stack, reference: Reference, rank: int, how: signal.Signals, then: dict[str, int]
) -> None:
    """The next replicas have fewer ranks, the last one all of them again: each is a process that has to start."""
    ranks = ranks_of(stack)
    with load(stack, reference, LONG) as streams:
        ranks[rank].send_signal(how)
        until("every rank is gone", lambda: not any(alive(process) for process in ranks), GONE_S)
        assert stack.wait("worker") == (-signal.SIGKILL if rank == 0 else 1)
        stack.start("worker", **then)
        streams.check(LONG)
    stack.settled_empty()


def test_ranks_end_with_a_leader_told_to_end(stack: Stack) -> None:
    ranks = ranks_of(stack)
    assert len(ranks) == 4
    assert stack.kill("worker", signal.SIGTERM) == 0
    assert not any(rank.is_running() for rank in ranks)


def test_torchrun_ranks_meet_over_tls_and_end_with_their_leader(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank is the other's parent, so that no kernel ends one with the other: the broken stream has to."""
    files = tmp_path / "tls"
    certs.make(files, [])
    stack = Stack(tmp_path, reference.path, dtype="float32", tp=2, threads=1, step_timeout_s=STEP_TIMEOUT_S)
    for name, value in {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    try:
        stack.redis.start()
        for rank, name in enumerate(("worker", "rank-1")):
            monkeypatch.setenv("RANK", str(rank))
            stack.start("worker", name, **mutual_tls(files, "worker"))
        stack.start("scheduler", **mutual_tls(files, "scheduler"))
        stack.start("gateway")
        until("the stack is ready", stack.ready, 90)
        ranks = [psutil.Process(stack.pid(name)) for name in ("worker", "rank-1")]
        with load(stack, reference, LONG) as streams:
            ranks[0].kill()
            until("every rank is gone", lambda: not any(alive(process) for process in ranks), GONE_S)
            assert stack.wait("rank-1") == 1
            for stream in streams.streams:
                stream.leave.set()
        said = stack.log("rank-1")  # whichever it met first: the end of the stream, or of a sum under way
        assert "rank 0 is lost" in said or "so the replica ends itself: RankError" in said
    finally:
        stack.__exit__(None, None, None)


TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2",
    "--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--no-python",
]  # fmt: skip


def test_torchrun_starts_the_ranks_again_and_no_token_is_lost(reference: Reference, tmp_path: Path) -> None:
    """Twice: the leader dies, the other rank dies. Only the leader has the port of the metrics."""
    metrics = free_port()
    stack = Stack(
        tmp_path, reference.path, dtype="float32", tp=2, threads=1, worker_metrics_port=metrics, rank_token="t"
    )

    def ranks() -> list[psutil.Process]:
        children = psutil.Process(stack.pid("worker")).children(recursive=True)
        return [each for each in children if alive(each) and computes(each)]

    try:
        stack.redis.start()
        stack.start("worker", by=TORCHRUN)
        stack.start("scheduler")
        stack.start("gateway")
        until("the stack is ready", stack.ready, 90)
        for victim in (0, 1):
            before = ranks()
            assert [ports(rank).count(metrics) for rank in before] == [1, 0]
            with load(stack, reference, LONG) as streams:
                before[victim].kill()
                streams.check(LONG)
            assert not any(alive(rank) for rank in before)
            assert len(ranks()) == 2
        stack.settled_empty()
        last = ranks()
        stack.kill("worker", signal.SIGTERM)  # its own status is then 1, whatever the ranks' are
        assert not any(alive(rank) for rank in last)
        assert "rank 0: draining" in stack.log("worker")
    finally:
        stack.__exit__(None, None, None)


def mutual_tls(files: Path, role: str) -> dict[str, Path]:
    """Settings of a service."""
    return {"grpc_ca": files / "ca.pem", "grpc_cert": files / f"{role}.pem", "grpc_key": files / f"{role}-key.pem"}


def alive(process: psutil.Process) -> bool:
    """Not the leader that has ended and that this test, its parent, has not asked for yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
