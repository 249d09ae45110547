"""Which Runs a worker takes: those of the shard that took it in Redis, by a token of the lease, one version apart."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from protos import worker_pb2
from services.scheduler.workers.contract import ContractError, check_info
from services.worker.registration import Registration
from shared.lease import Lease
from shared.redis_client import Scripts
from shared.settings import SchedulerSettings, WorkerSettings
from shared.tasks import end
from shared.wire.handshake import FIRST, VERSION, version
from tests.integration.redis.script_calls import KEYS, SHARD
from tests.integration.redis.script_calls import client as client  # the fixtures
from tests.integration.redis.script_calls import scripts as scripts
from tests.integration.redis.script_calls import server as server
from tests.integration.scheduler.test_contract import SETTINGS, ScriptedWorker, ask, assert_all_right, described
from tests.support.older_worker import Recording
from tests.support.shard import Shard, serving
from tests.support.stack import RedisServer
from tests.support.waiting import wait_until

LEASE_MS = 600_000


async def leased(scripts: Scripts, shard: str = SHARD) -> Lease:
    lease = Lease(scripts, KEYS, shard, LEASE_MS)
    assert await lease.take()
    return lease


async def taken(scripts: Scripts, lease: Lease, shard: str = SHARD) -> int:
    """Take the worker for a shard; return the epoch of the Run."""
    names = [KEYS.worker("w"), KEYS.epoch, KEYS.worker("w")]
    return int(await lease.run_fenced(scripts.take_worker, names, [lease.text, shard, KEYS.prefix, 0]))


def registered(server: RedisServer) -> Registration:
    """Return the registration of a worker that has written its record."""
    settings = WorkerSettings(redis_url=server.url, served_model_name="tiny", worker_id="w")
    registration = Registration(settings, {"address": "127.0.0.1:1", "identity": "a", "ready": "1"}, lambda: 0)
    registration.refresh()
    return registration


def hello(epoch: int, token: str, shard: str = SHARD) -> worker_pb2.Step:
    return worker_pb2.Step(epoch=epoch, hello=worker_pb2.Hello(shard=shard, token=token, version=version()))


async def test_worker_takes_a_run_of_its_lease_holder_alone(
    server: RedisServer, client: Redis, scripts: Scripts
) -> None:
    registration, lease = registered(server), await leased(scripts)
    assert "to no Run" in registration.refusal(hello(lease.epoch, lease.token), False), "no shard has taken it yet"
    run = await taken(scripts, lease)
    right = hello(run, lease.token)
    assert registration.refusal(right, False) == ""
    for epoch in (0, run - 1, run + 1, (1 << 40) - 2, (1 << 40) - 1, 1 << 63):
        assert "epoch: Redis has given" in registration.refusal(hello(epoch, lease.token), False), epoch
    held: Any = await client.get(KEYS.lease(SHARD))
    for token in ("", "guessed", held.decode().partition(":")[2], held.decode(), lease.token[:-1]):
        assert "token: not that of the lease" in registration.refusal(hello(run, token), False), token
    other = await leased(scripts, "other")
    for token in (lease.token, other.token):
        assert "to no Run" in registration.refusal(hello(run, token, "other"), False)
    assert "not that of the lease" in registration.refusal(hello(run, other.token), False)
    assert registration.refusal(hello(run, ""), True) == "", "the user or the certificate stands for the token"
    assert "to no Run" in registration.refusal(hello(run + 1, ""), True)
    assert "not that of the lease" in registration.refusal(hello(run, "guessed"), True)


async def test_run_of_a_lease_that_was_lost_is_refused(server: RedisServer, client: Redis, scripts: Scripts) -> None:
    registration, lease = registered(server), await leased(scripts)
    run = await taken(scripts, lease)
    await client.delete(KEYS.lease(SHARD))
    for token, is_known in ((lease.token, False), (lease.token, True), ("", True)):
        assert "has no lease now" in registration.refusal(hello(run, token), is_known)
    follower = await leased(scripts)
    assert "not that of the lease" in registration.refusal(hello(run, lease.token), False)
    later = await taken(scripts, follower)
    assert registration.refusal(hello(later, follower.token), False) == ""
    await client.flushall()
    assert registration.refusal(hello(later, follower.token), False), "the record and the lease are gone"
    await asyncio.to_thread(registration.refresh)
    again = await leased(scripts)
    assert registration.refusal(hello(await taken(scripts, again), again.token), False) == ""


async def test_lease_of_a_shard_that_has_not_taken_the_worker_is_not_read(
    server: RedisServer, client: Redis, scripts: Scripts
) -> None:
    registration, lease = registered(server), await leased(scripts)
    await taken(scripts, lease)
    await client.config_resetstat()
    assert "to no Run" in registration.refusal(hello(1, "x", shard="s" * 60_000), False)
    assert "cmdstat_get" not in await client.info("commandstats")


async def test_worker_says_once_that_rules_of_redis_are_old(
    server: RedisServer, client: Redis, scripts: Scripts, caplog: pytest.LogCaptureFixture
) -> None:
    registration, lease = registered(server), await leased(scripts)
    first = hello(await taken(scripts, lease), lease.token)
    await client.acl_setuser("worker", enabled=True, nopass=True, keys=["*:worker:*"], commands=["+hget", "+get"])
    settings = WorkerSettings(
        redis_url=server.url, redis_username="worker", redis_password="x", served_model_name="tiny", worker_id="w"
    )
    registration = Registration(settings, {"identity": "a"}, lambda: 0)
    for _ in range(3):
        assert "deploy/redis/users.acl; restart Redis" in registration.refusal(first, False)
    assert [record.message.count("users.acl; restart Redis") for record in caplog.records] == [1]
    await client.acl_setuser("worker", enabled=True, nopass=True, keys=["*"], commands=["+hget", "+get"])
    assert registration.refusal(first, False) == ""


def test_no_run_begins_while_redis_is_away() -> None:
    url = "redis://127.0.0.1:1/0"
    registration = Registration(WorkerSettings(redis_url=url), {"identity": "a"}, lambda: 0)
    assert "Redis does not say which shard may begin a Run" in registration.refusal(hello(1, "x"), True)


def names(major: int, minor: int) -> worker_pb2.WorkerInfo:
    return described(id="bad", version=worker_pb2.Version(major=major, minor=minor))


@pytest.mark.parametrize(("major", "minor"), [(VERSION[0], VERSION[1] + 2), (VERSION[0] + 1, 0), (0, 9)])
async def test_worker_two_minor_versions_away_is_refused_with_both_named(major: int, minor: int) -> None:
    shard = Shard(SchedulerSettings())
    async with serving(ScriptedWorker(names(major, minor))) as (worker,):
        await shard.fleet.serve(worker)
    ((kind, text, _),) = shard.events
    older = "this scheduler" if (major, minor) > VERSION else "worker bad"
    assert kind == "worker_refused"
    assert f"bad speaks {major}.{minor} of worker.proto and this scheduler 1.1" in text and f"update {older}" in text


@pytest.mark.parametrize("minor", [VERSION[1] - 1, VERSION[1], VERSION[1] + 1])
async def test_worker_one_minor_version_away_serves(minor: int) -> None:
    shard, info = Shard(SETTINGS), described(version=worker_pb2.Version(major=VERSION[0], minor=minor))
    async with serving(ScriptedWorker(info)) as (worker,):
        run = asyncio.create_task(shard.fleet.serve(replace(worker, epoch=3)))
        ask(shard)
        await wait_until(lambda: len(shard.ended) == 10 or run.done())
        await end(run)
    assert_all_right(shard)


def test_worker_that_names_no_version_counts_as_the_first_one() -> None:
    info = Recording.read().info
    assert not info.HasField("version") and FIRST == (1, 0)
    check_info(info, info.model)
    info.version.major = 2
    with pytest.raises(ContractError, match=r"speaks 2\.0"):
        check_info(info, info.model)
