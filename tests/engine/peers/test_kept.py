"""KV that outlives its worker in a file, taken up by the next one: transformers' tokens; what is amiss is refused."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from protos import worker_pb2
from services.worker.kv.cache import KEPT_SHARE
from services.worker.kv.host_tier import HostTier
from services.worker.kv.share_folder import ID, ShareFolder
from services.worker.parallel.state import ParallelState
from shared.errors import ConfigurationError, ProtocolError
from shared.settings import WorkerSettings
from shared.wire.columns import pack, unpack
from tests.engine.driver import Driver, make_engine
from tests.engine.peers.test_peers import HOST_BLOCKS, OUTPUTS, goes_on, peer_of, sharing
from tests.support.checkpoints.models import Reference

MODEL = {"seed": 11, "requests": 2}
BLOCK_BYTES = 8192


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kept"))


def driver(reference: Reference, folder: Path, run: int, *wanted: str, **settings: Any) -> Driver:
    """Return a worker with a Run of this epoch; wanted: the host tiers that its scheduler needs."""
    engine = make_engine(**sharing(reference.path, folder, kernels="cpu", block_size=16, **settings))
    engine.serve(worker_pb2.Hello(shard="shard-0", kept=wanted))
    engine.reset(run)
    return Driver(engine)


def left(reference: Reference, folder: Path, **settings: Any) -> tuple[worker_pb2.WorkerInfo, list[int], np.ndarray]:
    """What a worker is that has computed the first prompt and is gone, its first token, and its host blocks."""
    worker = driver(reference, folder, 5, **settings)
    info, prompt = worker.engine.info(), reference.prompts[0]
    assert info.keeps
    worker.enter(0, prompt)
    worker.step({0: len(prompt)})
    used = worker.blocks(0)[: -(-len(prompt) // worker.size)]
    host = np.random.default_rng(4).permutation(HOST_BLOCKS)[: len(used)].astype(np.int32)
    worker.free(0)
    result = worker.step({}, swap_out_gpu=pack(used), swap_out_host=pack(host), keep=pack(host))
    assert result.kept == len(host) and unpack(result.swap_out_acks).tolist() == used.tolist()
    first = worker.outputs[0]
    del worker
    gc.collect()
    return info, first, host


def test_next_worker_goes_on_with_the_references_tokens_and_removes_the_file(
    reference: Reference, folder: Path
) -> None:
    info, first, host = left(reference, folder)
    (file,) = kept(folder)
    found = file.stat()
    assert found.st_mode & 0o777 == 0o600 and sorted(os.listdir(folder)) == sorted([ID, file.name])
    assert found.st_size > HOST_BLOCKS * info.block_bytes
    assert found.st_blocks * 512 <= (2 * len(host) + 1) * max(info.block_bytes, 4096), "it has the memory of all blocks"
    worker = driver(reference, folder, 6, info.host_tier)
    assert unpack(worker.step({}, peers=[peer_of(info, 3, run=5)]).peer_acks).tolist() == [3]
    assert goes_on(worker, reference.prompts[0], first, host, 3) == reference.outputs[0][:OUTPUTS]
    assert kept(folder) == [file]
    worker.step({}, peers=[worker_pb2.Peer(number=3)])
    assert not kept(folder)


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def symlink(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def of_another_size(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 4096)


def without_digests(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8 * HOST_BLOCKS)


@pytest.mark.parametrize("spoil", [truncated, symlink, of_another_size, without_digests, Path.unlink])
def test_file_that_is_not_the_one_that_was_kept_is_not_acknowledged(
    reference: Reference, folder: Path, spoil: Callable[[Path], None]
) -> None:
    info, *_ = left(reference, folder)
    spoil(kept(folder)[0])
    worker = driver(reference, folder, 6, info.host_tier)
    result = worker.step({}, peers=[peer_of(info, 3, run=5)])
    assert (result.peer_acks, unpack(result.stale_peers).tolist()) == (b"", [3])
    assert result.stale_reasons[0].startswith("the host tier of peer 3 cannot be read, KV there is computed again: ")
    worker.step({}, peers=[worker_pb2.Peer(number=3)])
    assert not kept(folder)


def test_copies_from_a_file_of_another_run_are_named(reference: Reference, folder: Path) -> None:
    info, _, host = left(reference, folder)
    worker = driver(reference, folder, 6, info.host_tier)
    worker.step({}, peers=[peer_of(info, 3, run=4)])
    there = worker.blocks(5)[: len(host)]
    peers = pack([3] * len(host))
    result = worker.step({}, swap_in_host=pack(host), swap_in_gpu=pack(there), swap_in_peers=peers)
    assert unpack(result.stale_peers).tolist() == [3]


@pytest.mark.parametrize("is_mapped_before", [False, True])
def test_damaged_block_is_named_with_its_peer(
    reference: Reference, folder: Path, caplog: pytest.LogCaptureFixture, is_mapped_before: bool
) -> None:
    """Name, size and Run of the file stay. A worker of the same shard may map it while its own worker lives."""
    leaving, reader = driver(reference, folder, 5), driver(reference, folder, 6)
    info, host = leaving.engine.info(), np.array([7, 9], np.int32)
    copies = [
        {"swap_in_host": pack([block]), "swap_in_gpu": pack([at]), "swap_in_peers": pack([3])}
        for at, block in enumerate(host.tolist())
    ]
    if is_mapped_before:
        reader.step({}, peers=[peer_of(info, 3, run=5)])
        assert not reader.step({}, **copies[0]).stale_peers, "it has no digest while its worker lives"
    assert leaving.step({}, keep=pack(host)).kept == 2
    with kept(folder)[0].open("r+b") as file:
        file.seek(9 * info.block_bytes + 5)
        file.write(b"\x01")
    if not is_mapped_before:
        assert unpack(reader.step({}, peers=[peer_of(info, 3, run=5)]).peer_acks).tolist() == [3]
    results = [reader.step({}, **copy) for copy in copies]
    assert [unpack(result.stale_peers).tolist() for result in results] == [[], [3]]
    (reason,) = results[1].stale_reasons
    assert reason.startswith("KV in the host tier of peer 3 is computed again: block 9 differs from its checksum")
    assert reason in caplog.text


def test_steps_are_answered_while_copied_blocks_are_compared(
    reference: Reference, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later result names the first block that differs, of all steps that it acknowledges."""
    leaving, reader, host = driver(reference, folder, 5), driver(reference, folder, 6), np.array([9, 7], np.int32)
    info, engine = leaving.engine.info(), reader.engine
    leaving.step({}, keep=pack(host))
    with kept(folder)[0].open("r+b") as file:
        for block in host.tolist():
            file.seek(block * info.block_bytes)
            file.write(b"\x01")
    reader.step({}, peers=[peer_of(info, 3, run=5)])
    may_compare, crc32 = threading.Event(), zlib.crc32

    def slow(*given: Any) -> int:
        assert may_compare.wait(10)
        return crc32(*given)

    monkeypatch.setattr(zlib, "crc32", slow)
    steps = [
        worker_pb2.Step(
            epoch=1, id=reader.next_id + at, swap_in_host=pack([block]), swap_in_gpu=pack([at]), swap_in_peers=pack([3])
        )
        for at, block in enumerate(host.tolist())
    ]
    first = engine.finish(engine.submit(steps[0]), lambda: True)
    assert not first.swap_in_acks and not first.stale_peers
    may_compare.set()
    last = engine.finish(engine.submit(steps[1]))
    assert unpack(last.swap_in_acks).tolist() == host.tolist()
    assert unpack(last.stale_peers).tolist() == [3]
    assert "block 9 differs from its checksum" in last.stale_reasons[0]


def test_run_of_a_scheduler_that_does_not_need_it_removes_the_file(reference: Reference, folder: Path) -> None:
    left(reference, folder)
    foreign = folder / f"{'a' * 32}-0.{'b' * 16}.kept"
    foreign.touch(0o600)
    driver(reference, folder, 6)
    assert kept(folder) == [foreign], "the one of another model stays"


def announced(info: worker_pb2.WorkerInfo) -> list[worker_pb2.Peer]:
    return [peer_of(info, 3, run=5)]


def gone(info: worker_pb2.WorkerInfo) -> list[worker_pb2.Peer]:
    return [worker_pb2.Peer(number=3)]


def unrelated(info: worker_pb2.WorkerInfo) -> list[worker_pb2.Peer]:
    return [worker_pb2.Peer(number=4, host_tier="a/b", host_blocks=1)]


def no_peers(info: worker_pb2.WorkerInfo) -> list[worker_pb2.Peer]:
    return []


@pytest.mark.parametrize(("news", "stays"), [(announced, 1), (gone, 0), (unrelated, 0), (no_peers, 0)])
def test_file_stays_after_the_first_step_only_if_that_announces_its_tier(
    reference: Reference,
    folder: Path,
    news: Callable[[worker_pb2.WorkerInfo], list[worker_pb2.Peer]],
    stays: int,
) -> None:
    """The requests that needed it end between the hello and the first step, or this worker has another kv_format."""
    info, *_ = left(reference, folder)
    worker = driver(reference, folder, 6, info.host_tier)
    worker.engine.prove()
    assert len(kept(folder)) == 1
    worker.step({}, peers=news(info))
    assert len(kept(folder)) == stays
    worker.step({})
    assert len(kept(folder)) == stays


def test_number_that_means_another_tier_removes_the_file_of_the_first(reference: Reference, folder: Path) -> None:
    info, *_ = left(reference, folder)
    (file,) = kept(folder)
    here, _, name = info.host_tier.partition("/")
    other = file.with_name(file.name.replace(name, "c" * 32))
    other.touch()
    unreadable = worker_pb2.Peer(number=1, host_tier=f"{here}/{'c' * 32}", host_blocks=1)
    worker = driver(reference, folder, 6, info.host_tier, unreadable.host_tier)
    worker.step({}, peers=[peer_of(info, 0, run=5), unreadable])
    worker.step({}, peers=[peer_of(info, 0, run=5)])
    assert file.exists() and other.exists()
    unreadable.number = 0
    worker.step({}, peers=[unreadable])
    assert kept(folder) == [other]


def test_file_that_was_kept_while_a_worker_started_stays(folder: Path) -> None:
    """The scheduler may have written its hello before; at the next one it knows the file."""
    later = HostTier(WorkerSettings(model=Path("/nowhere"), kv_share_dir=folder), ParallelState())
    first = tier(folder)
    assert first.keep(np.arange(first.make_room(64, memory_for(40)), dtype=np.int32)) == 20
    later.serve("shard-0", [])
    assert len(kept(folder)) == 1
    later.serve("shard-0", [first.name])
    assert len(kept(folder)) == 1
    later.serve("shard-0", [])
    assert not kept(folder)


def test_peer_with_a_path_as_name_removes_nothing_elsewhere(reference: Reference, folder: Path) -> None:
    left(reference, folder)
    name = f"{'a' * 32}-0.{kept(folder)[0].name.split('.')[1]}.kept"
    elsewhere = folder.parent / name
    elsewhere.touch()
    worker = driver(reference, folder, 6)
    here = worker.engine.info().host_tier.partition("/")[0]
    worker.step({}, peers=[worker_pb2.Peer(number=3, host_tier=f"{here}/../{'a' * 32}", host_blocks=1)])
    worker.step({}, peers=[worker_pb2.Peer(number=3)])
    assert elsewhere.exists()


@pytest.mark.parametrize("blocks", [[0, 0], [-1], [HOST_BLOCKS]])
def test_blocks_that_cannot_be_kept_break_the_contract(reference: Reference, folder: Path, blocks: list[int]) -> None:
    worker = driver(reference, folder, 5)
    with pytest.raises(ProtocolError, match="keep: a block twice, or outside"):
        worker.step({}, keep=pack(blocks))


def test_worker_without_folder_keeps_nothing(reference: Reference) -> None:
    engine = make_engine(reference.path, kernels="cpu", block_size=16, host_blocks=4)
    engine.serve(worker_pb2.Hello(shard="shard-0"))
    engine.reset(1)
    assert not engine.info().keeps
    assert Driver(engine).step({}, keep=pack([1])).kept == 0


def tier(folder: Path, wanted: Collection[str] = (), **settings: Any) -> HostTier:
    found = HostTier(WorkerSettings(model=Path("/nowhere"), kv_share_dir=folder, **settings), ParallelState())
    found.take(64, BLOCK_BYTES)
    found.serve("shard-0", wanted)
    return found


def memory_for(blocks: int) -> int:
    """Return the bytes of a worker that may keep this number of blocks, in two files."""
    return int((blocks * BLOCK_BYTES + 2 * mmap.PAGESIZE) / KEPT_SHARE) + 1


def sleep(folder: Path, model: str, memory_bytes: int, blocks: int = 64) -> int:
    """Return how many blocks a worker of the model keeps at its end. Its start removes the file of the one before."""
    worker = tier(folder, served_model_name=model)
    most = worker.make_room(blocks, memory_bytes)
    return worker.keep(np.arange(most, dtype=np.int32))


def test_workers_that_leave_at_one_time_keep_what_one_may(folder: Path) -> None:
    """None has kept anything when the last one asks: all workers of a model are drained together."""
    memory = memory_for(40)
    workers = [tier(folder, served_model_name="one") for _ in range(3)]
    rooms = [worker.make_room(12, memory) for worker in workers]
    assert rooms[0] == 12 and 0 < rooms[1] <= 8 and rooms[2] == 0
    for worker, most in zip(workers, rooms, strict=True):
        assert worker.keep(np.arange(most, dtype=np.int32)) == most
    assert sum(file.size_bytes for file in ShareFolder(folder).kept_files()) <= memory * KEPT_SHARE / 2


def test_models_that_leave_at_one_time_keep_within_the_whole(folder: Path) -> None:
    """The part of the first is a half: it sees no other model."""
    memory = memory_for(40)
    workers = [tier(folder, served_model_name=name) for name in "abcd"]
    rooms = [worker.make_room(64, memory) for worker in workers]
    assert rooms[0] == 20 and sum(rooms) <= 40
    for worker, most in zip(workers, rooms, strict=True):
        worker.keep(np.arange(most, dtype=np.int32))
    assert sum(file.size_bytes for file in ShareFolder(folder).kept_files()) <= memory * KEPT_SHARE


def test_room_reserved_by_a_worker_that_is_gone_is_free_again(folder: Path) -> None:
    memory = memory_for(40)
    worker = tier(folder, served_model_name="one")
    assert worker.make_room(64, memory) == 20
    (reserved,) = folder.glob("*.reserved")
    assert reserved.stat().st_blocks == 0
    del worker
    gc.collect()
    assert os.listdir(folder) == [ID]
    reserved.touch()  # as SIGKILL leaves it
    assert tier(folder, served_model_name="one").make_room(64, memory) == 20
    assert not reserved.exists()


def test_folder_that_another_process_holds_keeps_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("services.worker.kv.host_tier.RESERVE_S", 0.0)
    worker = tier(folder)
    with ShareFolder(folder).locked():
        assert worker.make_room(64, memory_for(40)) == 0
    assert "KV is not kept" in caplog.text
    assert worker.make_room(64, memory_for(40)) == 20


@pytest.mark.parametrize(
    ("models", "rounds"),
    [("ab", [[20, 20], [20, 20], [20, 20]]), ("abc", [[20, 20, 13], [13, 13, 13], [13, 13, 13]])],
)
def test_models_that_take_turns_keep_equal_parts_at_full_demand(
    folder: Path, models: str, rounds: list[list[int]]
) -> None:
    """The file of a model is there until its next worker starts, after the end of the other model's."""
    memory, found = memory_for(40), []
    for _ in rounds:
        found.append([sleep(folder, model, memory) for model in models])
        assert sum(file.size_bytes for file in ShareFolder(folder).kept_files()) <= memory * KEPT_SHARE
        assert len(kept(folder)) >= 2
    assert found == rounds
    assert len(kept(folder)) == len(models)


def test_small_model_leaves_what_a_large_one_has_kept(folder: Path) -> None:
    for _ in range(2):
        assert sleep(folder, "large", memory_for(80)) == 40
        assert sleep(folder, "small", memory_for(10)) == 5
    assert len(kept(folder)) == 2


def test_oldest_file_of_another_model_goes_where_room_is_short(folder: Path) -> None:
    """A model that sleeps for good, with requests that have ended, takes no room from the others for ever."""
    memory = memory_for(40)
    assert sleep(folder, "gone", memory) == 20
    (oldest,) = kept(folder)
    assert sleep(folder, "one", memory, 10) == 10
    assert oldest.exists(), "there is room for both"
    assert sleep(folder, "two", memory) == 13
    assert not oldest.exists() and len(kept(folder)) == 2


def test_file_that_requests_of_the_same_model_need_stays_where_room_is_short(folder: Path) -> None:
    memory = memory_for(40)
    first = tier(folder, served_model_name="one")
    assert first.keep(np.arange(first.make_room(10, memory), dtype=np.int32)) == 10
    (needed,) = kept(folder)
    assert [sleep(folder, "two", memory), sleep(folder, "three", memory, 9)] == [20, 9]
    again = tier(folder, [first.name], served_model_name="one")
    assert again.make_room(64, memory) == 2
    assert needed.exists() and len(kept(folder)) == 2


def test_worker_with_host_blocks_may_keep_all(folder: Path) -> None:
    assert tier(folder, host_blocks=64).make_room(64, 0) == 64
    assert tier(folder).make_room(64, 0) == 0


@pytest.mark.parametrize("role", ["both", "decode"])
def test_tier_without_room_in_the_folder_is_private_without_a_role(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, role: Literal["both", "decode"]
) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    if role == "decode":
        with pytest.raises(ConfigurationError, match="has no room for the host tier"):
            tier(folder, host_blocks=64, worker_role=role)
        return
    assert tier(folder, host_blocks=64, worker_role=role).make_room(64, 1 << 40) == 0
    assert "no KV outlives it" in caplog.text


def test_file_system_that_frees_no_part_of_a_file_keeps_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: int, offset: int, size: int) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr("services.worker.kv.share_folder.free_part", refuse)
    assert tier(folder).keep(np.array([3], np.int32)) == 0
    assert not kept(folder) and "KV is not kept: Operation not supported" in caplog.text
