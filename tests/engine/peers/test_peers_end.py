"""Memory of other workers is mapped for as long as a Run needs it, and what is told of it can be meant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos import worker_pb2
from services.worker.serving.pipeline import Pipeline
from services.worker.serving.server import OPTIONS
from shared.wire.columns import pack, unpack
from tests.engine.driver import Driver, make_engine
from tests.engine.peers.test_peers import mapped, peer_of, sharing, tiers
from tests.engine.worker.test_ranks import Replica
from tests.engine.worker.test_server import Client
from tests.support.checkpoints.models import Reference
from tests.support.waiting import until

MODEL = {"seed": 11, "requests": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def replica(reference: Reference, folder: Path) -> Iterator[Replica]:
    """Three ranks of this process."""
    made = Replica(reference, kv_share_dir=folder, host_blocks=4)
    yield made
    made.stop()


def test_every_rank_releases_what_it_read_when_the_run_ends(
    reference: Reference, folder: Path, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = make_engine(**sharing(reference.path, folder))
    peer, before = peer_of(ours.info()), mapped(folder)
    with grpc.insecure_channel(replica.leader.address, options=OPTIONS) as channel:
        for epoch in (1, 2):
            run = Client(channel, epoch=epoch)
            run.send(1, peers=[peer])
            assert unpack(next(run.call).peer_acks).tolist() == [0]
            until("every rank has mapped it", lambda: mapped(folder) == before + 3)
            if epoch == 1:
                run.close()
            else:
                run.call.cancel()
            until("no rank has it any more", lambda: mapped(folder) == before)
        late, over = [], Pipeline.over
        monkeypatch.setattr(
            Pipeline, "over", lambda self, run: late.append((self, run)) if run.epoch == 3 else over(self, run)
        )
        old = Client(channel, epoch=3)
        old.send(1)
        next(old.call)
        new = Client(channel, epoch=4)
        new.send(1, peers=[peer])
        assert unpack(next(new.call).peer_acks).tolist() == [0]
        assert old.ended_with() == grpc.StatusCode.ABORTED
        until("its end is known", lambda: late)
        over(*late[0])  # as late as it can come
        new.send(2, swap_in_host=pack([3]), swap_in_gpu=pack([5]), swap_in_peers=pack([0]))
        assert unpack(next(new.call).swap_in_acks).tolist() == [3]
        new.call.cancel()
        until("no rank has it any more", lambda: mapped(folder) == before)
    assert not replica.lost


def epoch_of(file: Path) -> bytes:
    """Return the bytes between the four blocks and their digests."""
    return file.read_bytes()[-8 * 5 : -8 * 4]


def test_every_rank_writes_the_epoch_of_its_run_behind_its_blocks(folder: Path, replica: Replica) -> None:
    files = [folder / name for name in tiers(folder)]
    with grpc.insecure_channel(replica.leader.address, options=OPTIONS) as channel:
        for epoch in (5, 1 << 39):
            run = Client(channel, epoch=epoch)
            run.send(1)
            next(run.call)
            written = epoch.to_bytes(8, "little")
            until("every rank has begun the Run", lambda w=written: all(epoch_of(f) == w for f in files))
            run.call.cancel()
    assert len(files) == 3


def test_unacknowledged_reads_are_released_as_well(reference: Reference, folder: Path) -> None:
    ours, theirs = (make_engine(**sharing(reference.path, folder)) for _ in range(2))
    before, driver = mapped(folder), Driver(theirs)
    driver.step({}, peers=[peer_of(ours.info())])
    assert mapped(folder) == before + 1
    columns = {"swap_in_host": pack([0]), "swap_in_gpu": pack([0]), "swap_in_peers": pack([0])}
    theirs.submit(worker_pb2.Step(epoch=1, id=driver.next_id, **columns))
    theirs.end_run()
    assert mapped(folder) == before
