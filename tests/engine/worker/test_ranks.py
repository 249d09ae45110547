"""The ranks of a replica over real gRPC: every rank runs every step, and the end of one is the end of all.

Each rank here has a whole engine of its own, in this process; what they compute together is tested elsewhere.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import grpc
import pytest
import torch
import torch.distributed as dist

from protos import worker_pb2, worker_pb2_grpc
from services.worker.engine import Engine
from services.worker.in_flight import InFlightStep
from services.worker.parallel.launch import join_group
from services.worker.parallel.leader import METADATA_KEY, Ranks
from services.worker.parallel.state import own_gpu
from services.worker.serving.rank_server import RankServer
from services.worker.serving.server import MESSAGE_BYTES, OPTIONS, WorkerServer
from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from shared.wire.columns import pack, unpack
from tests.engine.driver import make_engine
from tests.engine.worker.test_server import Client, begun, chunk, first_step
from tests.support.checkpoints.models import Reference
from tests.support.waiting import until

MODEL = {"seed": 9, "requests": 2}

CONNECT_S = 60.0
SECRET = "of this replica alone"


class Replica:
    """A leader and two ranks that follow it; `lost` is what they had to say before they would have ended."""

    def __init__(self, reference: Reference, **settings: Any) -> None:
        self.engines = [make_engine(reference.path, kv_blocks=64, **settings) for _ in range(3)]
        self.lost: list[str] = []
        self.busy: dict[int, float] = {}
        self.followers = [RankServer("127.0.0.1:0", SECRET, on_lost=self.lost.append) for _ in range(2)]
        self.threads = [
            threading.Thread(target=server.serve, args=(engine,), daemon=True)
            for server, engine in zip(self.followers, self.engines[1:], strict=True)
        ]
        for thread in self.threads:
            thread.start()
        addresses = {rank + 1: server.address for rank, server in enumerate(self.followers)}
        self.ranks = Ranks(addresses, SECRET, busy=self._count, on_lost=self.lost.append)
        self.ranks.connect(self.engines[0].info(), CONNECT_S)
        self.leader = WorkerServer("127.0.0.1:0")
        self.leader.serve(self.engines[0], lambda *_: "", ranks=self.ranks)

    def _count(self, rank: int, seconds: float) -> None:
        self.busy[rank] = self.busy.get(rank, 0.0) + seconds

    def stop(self) -> None:
        self.leader.stop()
        self.ranks.stop()
        for thread in self.threads:
            thread.join(CONNECT_S)
            assert not thread.is_alive()


@pytest.fixture
def replica(reference: Reference) -> Iterator[Replica]:
    made = Replica(reference)
    yield made
    made.stop()


@pytest.fixture
def channel(replica: Replica) -> Iterator[grpc.Channel]:
    options = [*OPTIONS, ("grpc.max_send_message_length", MESSAGE_BYTES)]
    with grpc.insecure_channel(replica.leader.address, options=options) as channel:
        yield channel


class Held:
    """Keeps an engine's `finish` from returning, from its next call until `release`."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        finish = engine.finish

        def held(inflight: InFlightStep, *rest: Any) -> worker_pb2.Result:
            self.reached.set()
            assert self.go_on.wait(CONNECT_S)
            return finish(inflight, *rest)

        monkeypatch.setattr(engine, "finish", held)

    def release(self) -> None:
        self.go_on.set()


def test_every_rank_runs_every_step_of_each_run_in_order(
    replica: Replica, channel: grpc.Channel, reference: Reference
) -> None:
    for epoch, index in ((1, 0), (1, 1), (2, 0)):  # an equal epoch is a scheduler that dialled again
        prompt, output = reference.prompts[index], reference.outputs[index]
        run = Client(channel, epoch=epoch)
        run.send(1, **first_step(prompt, 24))
        for at in range(23):
            run.send(at + 2, **chunk(len(prompt) + at, 1))
        run.close()
        assert [unpack(result.tokens).tolist() for result in run.call] == [[token] for token in output]
    replica.stop()
    first = replica.engines[0]
    for other in replica.engines[1:]:
        for block in range(4):
            assert torch.equal(other.read_block(block), first.read_block(block))
    assert not replica.lost and all(not thread.is_alive() for thread in replica.threads)
    assert replica.busy.keys() == {1, 2} and min(replica.busy.values()) > 0


def test_step_breaking_the_contract_ends_no_rank(replica: Replica, channel: grpc.Channel, reference: Reference) -> None:
    run = Client(channel, epoch=1)
    run.send(1, free_slots=pack([3]))
    assert "slot 3 holds no sequence" in next(run.call).error
    run.send(2)
    assert "begin a new Run" in next(run.call).error
    begun(channel, 2, reference).call.cancel()
    assert not replica.lost


def test_leader_that_is_lost_ends_rank_in_middle_of_step(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[str] = []
    engine, steps = make_engine(reference.path, kv_blocks=64), queue.SimpleQueue[worker_pb2.Step | None]()
    held = Held(engine, monkeypatch)
    with following(engine, lost) as address, grpc.insecure_channel(address) as channel:
        call = follow(channel, SECRET.encode(), iter(steps.get, None))
        steps.put(worker_pb2.Step(epoch=1, hello=worker_pb2.Hello(shard="shard-0")))
        steps.put(worker_pb2.Step(epoch=1, id=1, **first_step(reference.prompts[0], 24)))
        try:
            assert held.reached.wait(CONNECT_S)
            call.cancel()
            until("the rank notices", lambda: lost)
        finally:
            held.release()
            steps.put(None)
    assert lost == ["rank 0 is lost: this rank ends itself"]


@contextmanager
def following(engine: Engine, lost: list[str]) -> Iterator[str]:
    """Yield the address of a rank, which has ended by the end of the block."""
    follower = RankServer("127.0.0.1:0", SECRET, on_lost=lost.append)
    thread = threading.Thread(target=follower.serve, args=(engine,), daemon=True)
    thread.start()
    yield follower.address
    thread.join(CONNECT_S)
    assert not thread.is_alive()


def follow(channel: grpc.Channel, token: bytes | None, steps: Iterable[worker_pb2.Step]) -> Any:
    """Call a rank as its leader does."""
    metadata = None if token is None else ((METADATA_KEY, token),)
    return worker_pb2_grpc.RankStub(channel).Follow(iter(steps), timeout=CONNECT_S, metadata=metadata)


def test_rank_follows_no_caller_without_its_token(reference: Reference) -> None:
    lost: list[str] = []
    with (
        following(make_engine(reference.path, kv_blocks=64), lost) as address,
        grpc.insecure_channel(address) as channel,
    ):
        for token in (None, b"", b"of another replica", SECRET.encode()[:-1]):
            with pytest.raises(grpc.RpcError, match="token: not that of this rank"):
                next(follow(channel, token, [worker_pb2.Step(end=True)]))
        ranks = Ranks({1: address}, SECRET, on_lost=lost.append)
        ranks.connect(make_engine(reference.path, kv_blocks=64).info(), CONNECT_S)
        for token, refusal in ((b"of another replica", "token: not that"), (SECRET.encode(), "its leader already")):
            with pytest.raises(grpc.RpcError, match=refusal):
                next(follow(channel, token, []))
        assert not lost  # a caller that is refused ends no rank
        ranks.stop()
    assert not lost


def test_leader_of_another_token_is_refused_by_name(reference: Reference) -> None:
    lost: list[str] = []
    with following(make_engine(reference.path, kv_blocks=64), []) as address:
        ranks = Ranks({1: address}, "of another replica", on_lost=lost.append)
        with pytest.raises(ConfigurationError):
            ranks.connect(make_engine(reference.path, kv_blocks=64).info(), 1.0)
        refusal = "UNAUTHENTICATED: token: not that of this rank; set one ORCINUS_RANK_TOKEN for all ranks"
        assert any(refusal in line for line in lost)
        ranks.stop()
        with grpc.insecure_channel(address) as channel:
            list(follow(channel, SECRET.encode(), [worker_pb2.Step(end=True)]))


def test_rank_without_token_and_certificate_opens_no_port() -> None:
    with pytest.raises(ConfigurationError, match=r"ORCINUS_RANK_TOKEN: not set.*set one secret for all ranks"):
        RankServer("127.0.0.1:0", "")


def test_a_leader_with_steps_that_end_without_a_word_is_lost(reference: Reference) -> None:
    """So a call that broke off may look to the rank."""
    lost: list[str] = []
    with (
        following(make_engine(reference.path, kv_blocks=64), lost) as address,
        grpc.insecure_channel(address) as channel,
    ):
        hello = worker_pb2.Step(epoch=1, hello=worker_pb2.Hello(shard="shard-0"))
        told = follow(channel, SECRET.encode(), [hello])
        assert [followed.HasField("ready") for followed in told] == [True]
        until("the rank notices", lambda: lost)
    assert lost == ["rank 0 is lost: this rank ends itself"]


class StandIn(worker_pb2_grpc.RankServicer):
    """A rank that is ready and does nothing."""

    def __init__(self) -> None:
        self.server = grpc.server(ThreadPoolExecutor(1))
        worker_pb2_grpc.add_RankServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Follow(  # noqa: N802 - the name in worker.proto
        self, request_iterator: Iterator[worker_pb2.Step], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.Followed]:
        yield worker_pb2.Followed(ready=worker_pb2.WorkerInfo())
        for _ in request_iterator:
            pass


def test_rank_that_is_lost_ends_leader_also_when_nothing_runs() -> None:
    stand_ins, lost = [StandIn(), StandIn()], list[str]()
    ranks = Ranks({rank: one.address for rank, one in enumerate(stand_ins, 1)}, SECRET, on_lost=lost.append)
    ranks.connect(worker_pb2.WorkerInfo(), CONNECT_S)
    stand_ins[1].server.stop(0)
    until("the leader notices", lambda: any("rank 2" in line and "is lost" in line for line in lost))
    assert not any("rank 1" in line for line in lost)
    ranks.stop()
    stand_ins[0].server.stop(0)


def test_ranks_of_two_models_are_refused_by_name(reference: Reference) -> None:
    with following(make_engine(reference.path, kv_blocks=65), []) as address:
        ranks = Ranks({1: address}, SECRET)
        with pytest.raises(ConfigurationError, match="rank 1 has gpu_blocks 65 and rank 0 64"):
            ranks.connect(make_engine(reference.path, kv_blocks=64).info(), CONNECT_S)
        ranks.stop()


@pytest.mark.parametrize(
    ("visible", "local_rank", "own"), [(None, 0, "0"), (None, 3, "3"), ("4,7", 1, "7"), ("4,7", 2, ""), ("", 0, "")]
)
def test_each_rank_takes_its_own_visible_gpu(visible: str | None, local_rank: int, own: str) -> None:
    assert own_gpu(local_rank, visible) == own


@pytest.mark.parametrize(("device", "visible"), [("auto", "7"), ("cuda", "7"), ("cpu", "4,7")])
def test_ranks_of_torchrun_on_one_host_see_one_gpu_each(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str
) -> None:
    """The engine computes on the first GPU that it sees."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=CONNECT_S), wait_for_workers=False)
    told = {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "MASTER_PORT": store.port, "CUDA_VISIBLE_DEVICES": "4,7"}
    for name, value in {**told, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, str(value))
    with join_group(WorkerSettings(tp=2, pp=2, device=device, rank_token=SECRET)) as place:
        assert place is not None and place.rank == 3
        assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE=3, but --tp 2 x --pp 1 is 2 ranks"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2, but the replica has the ranks 0 to 1"),
        ({"RANK": "first"}, "RANK='first'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "ORCINUS_RANK_TOKEN: not set"),
    ],
)
def test_ranks_that_torchrun_started_amiss_are_refused(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], said: str
) -> None:
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=said), join_group(WorkerSettings(tp=2)):
        pass
