"""KV of a sequence that one worker has swapped out, taken up by another: through files that both map.

The oracle is transformers: what the second one goes on with are the reference's tokens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos import worker_pb2
from services.worker.kv.share_folder import ID
from services.worker.kv.tier_file import layout
from shared.errors import ConfigurationError, ProtocolError
from shared.wire.columns import pack, unpack
from tests.engine.driver import Driver, make_engine
from tests.engine.emulated import SMALL, float16_model
from tests.engine.late_engine import make_late_engine
from tests.engine.ranks import Processes
from tests.support.checkpoints.models import Reference, random_prompts
from tests.support.compiler import needs_compiler

MODEL = {"seed": 11, "requests": 3}

OUTPUTS = 12
HOST_BLOCKS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def sharing(model: Path, folder: Path, **settings: Any) -> dict[str, Any]:
    return {"model": model, "host_blocks": HOST_BLOCKS, "kv_share_dir": folder, **settings}


def peer_of(info: worker_pb2.WorkerInfo, number: int = 0, run: int = 0) -> worker_pb2.Peer:
    return worker_pb2.Peer(number=number, host_tier=info.host_tier, host_blocks=info.host_blocks, run=run)


def tiers(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ID)


def prefilled(driver: Driver, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """The first token, and the host blocks in which the KV of the prompt lies."""
    driver.enter(0, prompt)
    driver.step({0: len(prompt)})
    used = driver.blocks(0)[: -(-len(prompt) // driver.size)]
    host = np.random.default_rng(4).permutation(HOST_BLOCKS)[: len(used)].astype(np.int32)
    driver.free(0)
    acked = driver.step({}, swap_out_gpu=pack(used), swap_out_host=pack(host))
    assert unpack(acked.swap_out_acks).tolist() == used.tolist()
    return driver.outputs[0], host


def goes_on(driver: Driver, prompt: list[int], first: list[int], host: np.ndarray, number: int = 0) -> list[int]:
    """All outputs, with the KV of the prompt from a peer."""
    there = driver.blocks(5)[: len(host)]
    peers = pack([number] * len(host))
    acked = driver.step({}, swap_in_host=pack(host), swap_in_gpu=pack(there), swap_in_peers=peers)
    assert unpack(acked.swap_in_acks).tolist() == host.tolist()
    driver.enter(5, prompt + first, prompt=len(prompt), computed=len(prompt))
    return driver.run(5, OUTPUTS)


@pytest.mark.parametrize(("kernels", "block_size"), [("reference", 4), ("cpu", 16)])
def test_another_worker_goes_on_with_the_references_tokens(
    reference: Reference, folder: Path, kernels: str, block_size: int
) -> None:
    given = sharing(reference.path, folder, kernels=kernels, block_size=block_size)
    ours, theirs = Driver(make_engine(**given)), Driver(make_engine(**given))
    infos = [driver.engine.info() for driver in (ours, theirs)]
    modes = {path.stat().st_mode & 0o777 for path in (folder, *(folder / name for name in tiers(folder)))}
    assert modes == {0o700, 0o600}
    assert infos[0].kv_format == infos[1].kv_format and infos[0].host_tier != infos[1].host_tier
    assert infos[0].host_tier.partition("/")[0] == infos[1].host_tier.partition("/")[0]
    assert unpack(theirs.step({}, peers=[peer_of(infos[0], 7)]).peer_acks).tolist() == [7]
    for prompt, outputs in zip(reference.prompts, reference.outputs, strict=True):
        ours.engine.reset()
        first, host = prefilled(ours, prompt)
        assert goes_on(theirs, prompt, first, host, 7) == outputs[:OUTPUTS]
        theirs.free(5)


@needs_compiler
def test_emulated_gpus_copy_out_of_memory_that_they_registered(tmp_path: Path, folder: Path) -> None:
    reference = float16_model(tmp_path / "tiny", random_prompts(30, (20, 40), 3), OUTPUTS)
    prompt, outputs = reference.prompts[0], reference.outputs[0]
    given = sharing(reference.path, folder, kernels="emulator", dtype="auto", **SMALL | {"max_output_tokens": 16})
    ours, theirs = Driver(make_engine(**given)), Driver(make_engine(**given))
    assert unpack(theirs.step({}, peers=[peer_of(ours.engine.info())]).peer_acks).tolist() == [0]
    first, host = prefilled(ours, prompt)
    assert goes_on(theirs, prompt, first, host) == outputs


def test_own_blocks_and_those_of_two_peers_share_a_step(reference: Reference, folder: Path) -> None:
    drivers = [Driver(make_engine(**sharing(reference.path, folder))) for _ in range(3)]
    last = drivers[2].engine
    held = []
    for driver, prompt in zip(drivers, reference.prompts, strict=True):
        _, host = prefilled(driver, prompt)
        used = driver.blocks(0)[: len(host)]
        held.append((host[0], driver.engine.read_block(int(used[0]))))
    drivers[2].step({}, peers=[peer_of(driver.engine.info(), at) for at, driver in enumerate(drivers[:2])])
    rows = [1, 2, 0, 1]
    there = pack([100, 101, 102, 103])
    peers = pack([-1 if at == 2 else at for at in rows])
    acked = drivers[2].step({}, swap_in_host=pack([held[at][0] for at in rows]), swap_in_gpu=there, swap_in_peers=peers)
    assert unpack(acked.swap_in_acks).tolist() == [held[at][0] for at in rows]
    for block, at in zip((100, 101, 102, 103), rows, strict=True):
        assert last.read_block(block).equal(held[at][1])


def test_unreadable_tier_is_not_acknowledged_and_never_used(
    reference: Reference, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = (make_engine(**sharing(reference.path, folder)) for _ in range(2))
    good, copy = peer_of(ours.info(), 1), {"swap_in_host": pack([0]), "swap_in_gpu": pack([0])}
    (folder / f"{'f' * 32}-0").symlink_to(folder / tiers(folder)[0])
    here = good.host_tier.partition("/")[0]
    for tier, blocks, said in (
        ("0" * 32 + "/" + "0" * 32, HOST_BLOCKS, "not in this worker's --kv-share-dir"),
        ("none/at/all", HOST_BLOCKS, "not in this worker's --kv-share-dir"),
        (f"{here}/{'0' * 32}", HOST_BLOCKS, "No such file"),
        (f"{here}/../../etc/passwd", HOST_BLOCKS, "no name of a host tier"),
        (f"{here}/{ID}", HOST_BLOCKS, "no name of a host tier"),
        (good.host_tier, HOST_BLOCKS + 1, "bytes instead of"),
        (f"{here}/{'f' * 32}", HOST_BLOCKS, "symbolic link"),
    ):
        caplog.clear()
        theirs.reset()
        driver, bad = Driver(theirs), worker_pb2.Peer(number=2, host_tier=tier, host_blocks=blocks)
        assert unpack(driver.step({}, peers=[bad, good]).peer_acks).tolist() == [1]
        assert said in caplog.text
        driver.step({}, **copy, swap_in_peers=pack([1]))
        with pytest.raises(ProtocolError, match="peer 2 was not acknowledged"):
            driver.step({}, **copy, swap_in_peers=pack([2]))


def test_a_swap_in_that_cannot_be_meant_is_refused(reference: Reference, folder: Path) -> None:
    ours = make_engine(**sharing(reference.path, folder))
    theirs = make_engine(**sharing(reference.path, folder, host_blocks=3))
    for hosts, peers, said in (
        ([0, 1], [1], "columns of 2 and 1 entries"),
        ([HOST_BLOCKS], [1], "swap_in_host of peer 1: 40 is outside 0..39"),
        ([-1], [1], "swap_in_host of peer 1: -1 is outside 0..39"),
        ([3], [-1], "swap_in_host of peer -1: 3 is outside 0..2"),
        ([0], [-2], "peer -2 was not acknowledged"),
        ([], [-1], "swap_in_host, swap_in_peers: columns of 0 and 1 entries"),
    ):
        theirs.reset()
        driver = Driver(theirs)
        driver.step({}, peers=[peer_of(ours.info(), 1)])
        columns = {"swap_in_host": hosts, "swap_in_gpu": range(len(hosts)), "swap_in_peers": peers}
        with pytest.raises(ProtocolError, match=said):
            driver.step({}, **{name: pack(column) for name, column in columns.items()})
    theirs.reset()
    wild = worker_pb2.Peer(number=1 << 31, host_tier="a/b", host_blocks=1)
    with pytest.raises(ProtocolError, match="number 2147483648 is outside"):
        Driver(theirs).step({}, peers=[wild])


def test_lost_peer_is_released_after_its_last_read(reference: Reference, folder: Path) -> None:
    """The device is late: the copy begins after the scheduler has said that the tier is gone, and its process is."""
    prompt, outputs = reference.prompts[0], reference.outputs[0]
    ours = make_engine(**sharing(reference.path, folder))
    first, host = prefilled(Driver(ours), prompt)
    late = make_late_engine(seed=3, **sharing(reference.path, folder))
    driver = Driver(late)
    driver.step({}, peers=[peer_of(ours.info())])
    (folder / f"{ours.info().host_tier.partition('/')[2]}-0").unlink()
    there = driver.blocks(5)[: len(host)]
    columns = {"swap_in_host": pack(host), "swap_in_gpu": pack(there), "swap_in_peers": pack([0] * len(host))}
    begun = late.submit(worker_pb2.Step(epoch=1, id=driver.next_id, **columns))
    before = mapped(folder)
    gone = late.submit(worker_pb2.Step(epoch=1, id=driver.next_id + 1, peers=[worker_pb2.Peer(number=0)]))
    assert mapped(folder) == before
    assert unpack(late.finish(begun).swap_in_acks).tolist() == host.tolist()
    late.finish(gone)
    del begun, gone
    assert mapped(folder) == before - 1
    driver.next_id += 2
    driver.enter(5, prompt + first, prompt=len(prompt), computed=len(prompt))
    assert driver.run(5, OUTPUTS) == outputs[:OUTPUTS]


def copy_of(host: np.ndarray, number: int = 0) -> dict[str, bytes]:
    """Columns of a step that copies blocks of a peer."""
    peers, there = pack([number] * len(host)), pack(np.arange(len(host)))
    return {"swap_in_host": pack(host), "swap_in_gpu": there, "swap_in_peers": peers}


def test_copies_from_a_tier_that_another_run_has_are_stale(reference: Reference, folder: Path) -> None:
    """The other Run comes before the copy, or between the copy and its end."""
    owner, reader = (make_engine(**sharing(reference.path, folder)) for _ in range(2))
    owner.reset(7)
    driver = Driver(reader)
    driver.step({}, peers=[peer_of(owner.info(), 3, run=7)])
    _, host = prefilled(Driver(owner), reference.prompts[0])
    found = driver.step({}, **copy_of(host, 3))
    assert unpack(found.swap_in_acks).tolist() == host.tolist() and not found.stale_peers
    begun = reader.submit(worker_pb2.Step(epoch=1, id=driver.next_id, **copy_of(host, 3)))
    owner.reset(8)
    for found in (reader.finish(begun), driver.step({}, **copy_of(host, 3))):
        assert unpack(found.swap_in_acks).tolist() == host.tolist()
        assert unpack(found.stale_peers).tolist() == [3]


@pytest.mark.parametrize("is_lost", [False, True])
def test_number_of_a_stale_peer_that_means_another_is_not_told(
    reference: Reference, folder: Path, is_lost: bool
) -> None:
    """The scheduler gives the number to a worker that joined in the place of one that it lost, while a copy ran."""
    owner, other, reader = (make_engine(**sharing(reference.path, folder)) for _ in range(3))
    owner.reset(7)
    other.reset(7)
    driver, host = Driver(reader), np.array([2], np.int32)
    driver.step({}, peers=[peer_of(owner.info(), 3, run=7)])
    begun = reader.submit(worker_pb2.Step(epoch=1, id=driver.next_id, **copy_of(host, 3)))
    owner.reset(8)
    changed = worker_pb2.Peer(number=3) if is_lost else peer_of(other.info(), 3, run=7)
    after = reader.submit(worker_pb2.Step(epoch=1, id=driver.next_id + 1, peers=[changed]))
    found = reader.finish(begun)
    assert unpack(found.swap_in_acks).tolist() == host.tolist() and not found.stale_peers
    assert unpack(reader.finish(after).peer_acks).tolist() == ([] if is_lost else [3])
    driver.next_id += 2
    if not is_lost:
        other.reset(8)
        assert unpack(driver.step({}, **copy_of(host, 3)).stale_peers).tolist() == [3]


def test_run_of_an_older_worker_or_scheduler_is_not_compared(reference: Reference, folder: Path) -> None:
    owner, reader = (make_engine(**sharing(reference.path, folder)) for _ in range(2))
    owner.reset(7)
    file = folder / f"{owner.info().host_tier.partition('/')[2]}-0"
    ends = layout(HOST_BLOCKS, owner.info().block_bytes)
    blocks = HOST_BLOCKS * owner.info().block_bytes
    assert file.stat().st_size == ends.digests and ends.epoch == blocks + 8
    older = "6" * 32
    (folder / f"{older}-0").write_bytes(file.read_bytes()[:blocks])
    untold, without = peer_of(owner.info(), 0), peer_of(owner.info(), 1, run=9)
    without.host_tier = f"{without.host_tier.partition('/')[0]}/{older}"
    driver = Driver(reader)
    assert unpack(driver.step({}, peers=[untold, without]).peer_acks).tolist() == [0, 1]
    for number in (0, 1):
        assert not driver.step({}, **copy_of(np.array([2], np.int32), number)).stale_peers


def test_a_new_run_knows_no_peer_of_the_one_before(reference: Reference, folder: Path) -> None:
    ours, theirs = (make_engine(**sharing(reference.path, folder)) for _ in range(2))
    driver = Driver(theirs)
    driver.step({}, peers=[peer_of(ours.info())])
    before = mapped(folder)
    theirs.reset()
    assert mapped(folder) == before - 1
    with pytest.raises(ProtocolError, match="peer 0 was not acknowledged"):
        driver.step({}, swap_in_host=pack([0]), swap_in_gpu=pack([0]), swap_in_peers=pack([0]))


def mapped(folder: Path) -> int:
    """How many files of the folder this process has mapped, each as often as it has."""
    return sum(f"{folder}/" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_each_rank_copies_from_its_counterpart_when_all_can(
    processes: Processes, reference: Reference, folder: Path, tmp_path: Path, tp: int, pp: int
) -> None:
    prompt, outputs = reference.prompts[0], reference.outputs[0]
    given = sharing(reference.path, folder)
    model = given.pop("model")
    kept, name = tmp_path / "kept", "5" * 32
    kept.mkdir()
    with processes.replica(tp, pp, model, **given) as replica:
        driver = Driver(replica)
        ours = peer_of(replica.info())
        first, host = prefilled(driver, prompt)
        own, block_bytes = ours.host_tier.partition("/")[2], replica.info().block_bytes
        for rank in range(2):  # as if its processes went on
            (kept / f"{name}-{rank}").write_bytes((folder / f"{own}-{rank}").read_bytes())
        ours.host_tier = ours.host_tier.replace(own, name)
    with processes.replica(tp, pp, model, **given) as replica:
        for file in kept.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        driver = Driver(replica)
        assert unpack(driver.step({}, peers=[ours]).peer_acks).tolist() == [0]
        assert goes_on(driver, prompt, first, host) == outputs[:OUTPUTS]
        again = worker_pb2.Peer(number=0, host_tier=ours.host_tier, host_blocks=HOST_BLOCKS, run=2)
        for rank, epoch in ((0, 2), (1, 3)):  # one rank of the owner has begun its next Run
            with (folder / f"{name}-{rank}").open("r+b") as file:
                file.seek(layout(HOST_BLOCKS, block_bytes).run)
                file.write(epoch.to_bytes(8, "little"))
        driver.step({}, peers=[again])
        assert unpack(driver.step({}, **copy_of(host)).stale_peers).tolist() == [0]
        (folder / f"{name}-1").unlink()
        again = worker_pb2.Peer(number=1, host_tier=ours.host_tier, host_blocks=HOST_BLOCKS)
        assert unpack(driver.step({}, peers=[again]).peer_acks).tolist() == []


def test_prefill_worker_has_host_tier_and_roles_need_a_folder(reference: Reference, folder: Path) -> None:
    given = sharing(reference.path, folder, host_blocks=None)
    model = given.pop("model")
    infos = {role: make_engine(model, **given, worker_role=role).info() for role in ("both", "prefill", "decode")}
    assert [infos[role].role for role in infos] == ["", "prefill", "decode"]
    assert [infos[role].host_blocks > 0 for role in infos] == [True, True, False]
    assert all(info.host_tier for info in infos.values()), "without blocks of its own it still reads those of others"
    with pytest.raises(ConfigurationError, match=r"prefill worker.*raise --host-blocks"):
        make_engine(model, **given | {"host_blocks": 0}, worker_role="prefill")
    assert make_engine(model).info().host_tier == ""
