"""The worker as a process: limits checked at start, registration in a real Redis, a clean stop."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
import torch.distributed as dist

from kernels.ops import CacheShape
from protos import worker_pb2, worker_pb2_grpc
from services.worker.kv import cache
from services.worker.kv.cache import Lengths, plan_blocks, plan_host_blocks, wanted_lengths
from services.worker.models.config import load_config
from services.worker.registration import WORKERS_MS, Registration
from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from shared.wire.columns import pack
from tests.engine.driver import Driver, make_engine
from tests.engine.worker.processes import WorkerProcess
from tests.support.checkpoints.models import Reference
from tests.support.stack import RedisServer
from tests.support.waiting import free_port, until

MODEL = {"seed": 9, "requests": 2}

SHAPE = CacheShape(1, 0, 2, 2, 16, 16, torch.float32)  # 8 KiB a block
MIB = 1 << 20


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


LENGTHS = Lengths(256, 255, 255)


def settings(model: Path, **values: Any) -> WorkerSettings:
    return WorkerSettings(model=model, device="cpu", **values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, LENGTHS),
        ({"max_input_tokens": 100}, Lengths(256, 100, 255)),
        ({"max_output_tokens": 40}, Lengths(256, 255, 40)),
        ({"max_input_tokens": 100, "max_output_tokens": 40}, Lengths(140, 100, 40)),
        ({"max_input_tokens": 200, "max_output_tokens": 56}, Lengths(256, 200, 56)),
    ],
)
def test_lengths_follow_from_the_settings_and_the_context(
    reference: Reference, values: dict[str, int], expected: Lengths
) -> None:
    assert wanted_lengths(settings(reference.path, **values), load_config(reference.path)) == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_input_tokens": 256}, ["--max-input-tokens 256", "context of 256", "255"]),
        ({"max_output_tokens": 9999}, ["--max-output-tokens 9999", "context of 256"]),
        ({"max_input_tokens": 200, "max_output_tokens": 60}, ["200", "60", "lower one of them by 4"]),
    ],
)
def test_lengths_beyond_the_context_name_the_setting_and_the_remedy(
    reference: Reference, values: dict[str, int], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        wanted_lengths(settings(reference.path, **values), load_config(reference.path))
    for word in words:
        assert word in str(caught.value)


def test_pool_is_bounded_by_its_fraction_and_the_slots(reference: Reference) -> None:
    given = settings(reference.path, kv_memory_fraction=0.5, max_seqs=10)
    assert plan_blocks(given, SHAPE.block_bytes, LENGTHS, 1 * MIB) == (64, LENGTHS)
    assert plan_blocks(given, SHAPE.block_bytes, LENGTHS, 100 * MIB) == (160, LENGTHS)
    assert plan_blocks(settings(reference.path, kv_blocks=21), SHAPE.block_bytes, LENGTHS, 0) == (21, LENGTHS)


@pytest.mark.parametrize(
    ("threads", "free_mib", "expected"),
    [
        (2, 1000, 2048),  # 16,384 tokens for each thread
        (4, 1000, 4096),  # what 256 sequences of 256 tokens need
        (0, 1000, 4096),  # all eight cores
        (2, 10, 64),  # a quarter of the cores: of 0.2 of the memory
        (8, 10, 256),
    ],
)
def test_default_cpu_pool_follows_threads_within_its_share(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, threads: int, free_mib: int, expected: int
) -> None:
    monkeypatch.setattr(cache.os, "sched_getaffinity", lambda pid: set(range(8)))
    given = settings(reference.path)
    assert plan_blocks(given, SHAPE.block_bytes, LENGTHS, free_mib * MIB, threads=threads) == (expected, LENGTHS)


def test_default_cpu_pool_holds_the_longest_sequence(reference: Reference) -> None:
    lengths = Lengths(1 << 20, 1 << 19, 1 << 19)
    blocks, _ = plan_blocks(settings(reference.path), SHAPE.block_bytes, lengths, 1 << 40, threads=1)
    assert blocks == (1 << 20) // 16


def test_heads_padded_by_cpu_kernels_count_at_their_padded_size(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((reference.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 72}))
    monkeypatch.setattr(cache, "free_memory_bytes", lambda: 4 * MIB)
    engine = make_engine(
        tmp_path, block_size=16, kernels="cpu", load_format="dummy", kv_blocks=0, kv_memory_fraction=0.5
    )
    info, held = engine.info(), engine.cache.blocks.nbytes
    assert info.block_bytes == 2 * 2 * 2 * 16 * 80 * 4  # K and V, layers, KV heads, tokens, numbers, bytes
    assert info.gpu_blocks * info.block_bytes == held
    assert 2 * MIB - info.block_bytes < held <= 2 * MIB


def test_pool_too_small_cuts_context_unless_lengths_were_asked_for(reference: Reference) -> None:
    assert plan_blocks(settings(reference.path, kv_blocks=5), SHAPE.block_bytes, LENGTHS, 0) == (5, Lengths(80, 79, 79))
    asked = settings(reference.path, kv_blocks=5, max_input_tokens=70, max_output_tokens=10)
    assert plan_blocks(asked, SHAPE.block_bytes, Lengths(80, 70, 10), 0) == (5, Lengths(80, 70, 10))
    for values in ({"max_input_tokens": 71, "max_output_tokens": 10}, {"max_input_tokens": 80}):
        asked = settings(reference.path, kv_blocks=5, **values)
        with pytest.raises(
            ConfigurationError, match=r"--kv-blocks 5 gives 5 KV blocks = 80 tokens.*--max-input-tokens"
        ):
            plan_blocks(asked, SHAPE.block_bytes, wanted_lengths(asked, load_config(reference.path)), 0)
    with pytest.raises(ConfigurationError, match=r"--kv-memory-fraction 0\.2 of 0 MiB free gives 0 KV blocks"):
        plan_blocks(settings(reference.path), SHAPE.block_bytes, LENGTHS, 1000)


@pytest.mark.parametrize(
    ("wanted", "blocks", "free_mib", "expected"),
    [
        (None, 100, 1000, 100),  # as many as the pool has
        (None, 100, 10, 64),  # 5 % of what is free
        (None, 1270, 10, 10),  # what the pool leaves
        (None, 4096, 1000, 3481),  # 5 % of 512 MiB and the pool, also where 256 sequences of 256 tokens fit into that
        (50, 4096, 1000, 50),
        (0, 100, 1000, 0),
        (7, 100, 1000, 7),
        (500, 0, 10, 500),
    ],
)
def test_shared_host_tier_is_as_large_as_requested_or_the_pool(
    reference: Reference, tmp_path: Path, wanted: int | None, blocks: int, free_mib: int, expected: int
) -> None:
    given = settings(reference.path, host_blocks=wanted, kv_share_dir=tmp_path)
    resident = 512 * MIB
    found = plan_host_blocks(given, blocks, LENGTHS, SHAPE.block_bytes, free_mib * MIB, resident_bytes=resident)
    assert found == expected


def test_cpu_worker_alone_has_no_host_tier_unless_requested(reference: Reference) -> None:
    for wanted, expected in ((None, 0), (50, 50)):
        given = settings(reference.path, host_blocks=wanted)
        assert plan_host_blocks(given, 100, LENGTHS, SHAPE.block_bytes, 1000 * MIB) == expected
    given = settings(reference.path, host_blocks=1200)
    with pytest.raises(ConfigurationError, match=r"--host-blocks 1200 needs 9 MiB.*leaves 2 MiB"):
        plan_host_blocks(given, 1000, LENGTHS, SHAPE.block_bytes, 10 * MIB)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_step_tokens": 3},
        {"max_seqs": 1, "max_step_tokens": 1},
        {"kv_blocks": 1, "block_size": 2},
        {"max_seqs": 64, "kv_blocks": 4, "max_step_tokens": 50},
        {"max_input_tokens": 1, "max_output_tokens": 1},
        {"dtype": "bfloat16", "max_step_tokens": 1000},
    ],
)
def test_warming_up_fits_every_size_and_leaves_no_trace(reference: Reference, values: dict[str, Any]) -> None:
    engine = make_engine(reference.path, **values)
    engine.warm_up()
    assert not engine.slots.active.any()
    driver = Driver(engine)
    driver.enter(0, reference.prompts[0][:1], blocks=pack([0]))
    assert len(driver.step({0: 1}).tokens) == 4


@pytest.mark.parametrize(("host_blocks", "copied"), [(0, []), (3, [3, 3]), (100, [16, 16])])
def test_warming_up_copies_as_much_as_the_longest_sequence_has(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, host_blocks: int, copied: list[int]
) -> None:
    engine = make_engine(reference.path, host_blocks=host_blocks, block_size=16)
    seen = []
    for name in ("copy_out", "copy_in"):
        copy = getattr(engine.cache, name)
        monkeypatch.setattr(engine.cache, name, lambda *a, copy=copy: (seen.append(len(a[0])), copy(*a)))
    engine.warm_up()
    assert seen == copied


def test_the_step_log_has_a_line_a_step(reference: Reference, tmp_path: Path) -> None:
    engine = make_engine(reference.path, step_log=tmp_path / "steps.jsonl")
    Driver(engine, reference.prompts[:1]).run(0, 3)
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    prompt = len(reference.prompts[0])
    assert len(lines) == 3 and f'"tokens":{prompt}' in lines[0]
    found = [(line["decode_context"], line["prefill_context"]) for line in map(json.loads, lines)]
    assert found == [(0, prompt * (prompt + 1) / 2), (prompt, 0), (prompt + 1, 0)]
    with pytest.raises(ConfigurationError, match="--step-log"):
        make_engine(reference.path, step_log=tmp_path / "no" / "such" / "place")


def make_registration(url: str, identity: str = "abc", step: int = 4, name: str = "worker-7") -> Registration:
    given = WorkerSettings(redis_url=url, served_model_name="tiny", worker_id=name)
    return Registration(given, {"address": "127.0.0.1:1", "identity": identity, "ready": "1"}, lambda: step)


RECORD, ALIVE = "orcinus:{tiny}:worker:worker-7", "orcinus:{tiny}:alive:worker:worker-7"
WORKERS = "orcinus:{tiny}:workers"
LONG_MS = 60_000
"""A record's lifetime in which a machine may stand still for seconds."""


def test_record_is_refreshed_without_touching_shard_and_leaves_with_worker(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.registration.TTL_MS", LONG_MS)
    registration = make_registration(redis.url)
    registration.start()
    until("the record is there", lambda: redis.client.hget(RECORD, "ready") == b"1")
    until("the heartbeat is there", lambda: redis.client.exists(ALIVE))
    assert 0 < redis.client.pttl(RECORD) <= LONG_MS and 0 < redis.client.pttl(ALIVE) <= LONG_MS
    assert redis.client.get(ALIVE) == b"4"
    redis.client.hset(RECORD, "shard", "shard-0")
    redis.client.hset(RECORD, "address", "stale")
    until("the record is written again", lambda: redis.client.hget(RECORD, "address") == b"127.0.0.1:1")
    assert redis.client.hget(RECORD, "shard") == b"shard-0"
    registration.stop()
    assert not redis.client.exists(RECORD, ALIVE)


def test_a_stopping_worker_leaves_the_record_of_its_successor(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.registration.REFRESH_S", LONG_MS / 1000)  # it registers once
    old, new = make_registration(redis.url, "old"), make_registration(redis.url, "new")
    old.start()
    until("the old one is there", lambda: redis.client.hget(RECORD, "identity") == b"old")
    new.refresh()
    old.stop()
    assert redis.client.hget(RECORD, "identity") == b"new"
    assert redis.client.zrange(WORKERS, 0, -1) == [b"worker-7"]
    new.start()
    new.stop()


def test_workers_are_listed_by_last_sight_and_lost_ones_leave(redis: RedisServer) -> None:
    def now_ms() -> int:
        seconds, micros = redis.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    one, other = make_registration(redis.url), make_registration(redis.url, name="worker-8")
    began = now_ms()
    redis.client.delete(WORKERS)
    redis.client.zadd(WORKERS, {"lost": began - WORKERS_MS - 1, "seen": began - WORKERS_MS + 30_000})
    one.refresh()
    other.refresh()
    assert redis.client.zrange(WORKERS, 0, -1) == [b"seen", b"worker-7", b"worker-8"]
    score = redis.client.zscore(WORKERS, "worker-7")
    assert score is not None and began <= score <= now_ms()
    assert 0 < redis.client.pttl(WORKERS) <= WORKERS_MS
    one.start()
    one.stop()
    assert redis.client.zrange(WORKERS, 0, -1) == [b"seen", b"worker-8"]
    other.start()
    other.stop()
    assert redis.client.zrange(WORKERS, 0, -1) == [b"seen"]


def test_redis_that_comes_late_or_forgets_is_registered_with_again(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    registration = make_registration(server.url)
    registration.start()
    try:
        with server:
            until("the record is there", lambda: server.client.exists(RECORD))
            server.client.flushall()
            until("the record is there again", lambda: server.client.exists(RECORD))
        with server:
            until("the record is there after a restart", lambda: server.client.hget(RECORD, "ready") == b"1")
    finally:
        registration.stop()


def test_refused_redis_password_is_reported_once_and_never_shown(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis.client.acl_setuser("worker", enabled=True, passwords=["+right"], categories=["+@all"], keys=["*"])
    registration = make_registration(redis.url.replace("redis://", "redis://worker:wrong@"))
    tries: list[float] = []
    refresh = registration.refresh
    registration.refresh = lambda: (tries.append(0.0), refresh())[1]
    registration.start()
    until("it has tried again", lambda: len(tries) >= 3)
    redis.client.acl_setuser("worker", enabled=True, passwords=["+wrong"])
    until("it registers when the password is right", lambda: redis.client.exists(RECORD))
    registration.stop()
    assert "wrong@" not in caplog.text
    said = [line for record in caplog.records if "refuses the user" in (line := record.getMessage())]
    assert len(said) == 1
    assert f"127.0.0.1:{redis.port} refuses the user 'worker'" in said[0] and "ORCINUS_REDIS_PASSWORD" in said[0]


def test_worker_serves_without_redis_and_registers_later(reference: Reference, tmp_path: Path) -> None:
    server, address = RedisServer(tmp_path / "redis"), f"127.0.0.1:{free_port()}"
    with WorkerProcess(MODEL=reference.path, REDIS_URL=server.url, LISTEN=address) as worker:
        until("it says that it waits for Redis", lambda: worker.says("waiting for Redis"))
        with grpc.insecure_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            info = stub.Describe(worker_pb2.DescribeRequest(), timeout=60)
        with server:
            key = server.client
            until("it registers", lambda: key.hget("orcinus:{tiny}:worker:worker-0", "ready") == b"1")
            record = key.hgetall("orcinus:{tiny}:worker:worker-0")
            assert record[b"address"].decode() == address
            assert record[b"identity"].decode() == info.identity
            assert record[b"pid"] == str(worker.process.pid).encode()
            worker.process.send_signal(signal.SIGINT)
            assert worker.ends() == 0
            assert not key.keys("orcinus:*")
        assert any("ready" in line and address in line for line in worker.lines)


def test_an_engine_tells_another_identity_at_each_start(reference: Reference) -> None:
    first, second = make_engine(reference.path).info(), make_engine(reference.path).info()
    assert first.identity != second.identity and first.model_hash == second.model_hash


WAITS = "waiting for 1 other rank"


def worker(model: Path, environment: dict[str, Any]) -> WorkerProcess:
    """A worker that knows of no Redis."""
    return WorkerProcess(environment=environment, MODEL=model, LISTEN="127.0.0.1:0")


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGTERM), (1, signal.SIGINT)])
def test_rank_waiting_for_others_ends_when_told_to(reference: Reference, rank: int, number: signal.Signals) -> None:
    """Its main thread is inside torch's store, for ten minutes."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    told = {"RANK": rank, "WORLD_SIZE": 2, "ORCINUS_TP": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    told_by_agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "ORCINUS_RANK_TOKEN": "of this replica alone"}
    with worker(reference.path, {**told, **told_by_agent}) as one:
        until("it waits", lambda: one.says(WAITS))
        one.process.send_signal(number)
        assert one.ends() == 0
        assert one.says(f"{number.name} while loading: stopping")


def test_loading_replica_ends_with_all_ranks_even_stopped_ones(tmp_path: Path) -> None:
    with worker(tmp_path, {"ORCINUS_TP": 3}) as one:
        last = until("rank 2 has started", lambda: rank_of(one, 2))
        last.suspend()  # long before it meets the others, which wait for it
        try:
            waits = [f"rank {rank}: waiting for 2 other ranks" for rank in (0, 1)]
            until("the others wait", lambda: all(map(one.says, waits)))
            other = until("rank 1 is found", lambda: rank_of(one, 1))
            other.suspend()
            one.process.terminate()
            assert one.process.wait(60) == 0
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                last.resume()
        until("the ranks are gone", lambda: has_ended(other) and has_ended(last))


def rank_of(worker: WorkerProcess, rank: int) -> psutil.Process | None:
    """The process that the worker started as this rank; None if there is none yet."""
    for child in psutil.Process(worker.process.pid).children():
        with contextlib.suppress(psutil.Error):
            if child.environ().get("RANK") == str(rank):
                return child
    return None


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_what_all_ranks_find_wrong_is_said_once(reference: Reference) -> None:
    with worker(reference.path, {"ORCINUS_TP": 3}) as one:
        assert one.ends() == 2
        said = [line for line in one.lines if "INFO" not in line]
    assert said == ["error: --tp 3 does not divide the model's num_attention_heads 4; --tp 2 does\n"]
