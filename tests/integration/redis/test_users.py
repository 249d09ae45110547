"""What each user of deploy/redis/users.acl may write: every kind of write, after a real login."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from deploy import redis_users
from shared.keys import PLACER, PLACER_KEYS, Keys
from shared.settings import ROOT
from tests.support.stack import RedisServer

KEYS = Keys("demo-model")
BOTH = {
    KEYS.requests("normal"), KEYS.prompt("x"), KEYS.req("x"), KEYS.out("x", 0), KEYS.queue, KEYS.queue_tenants,
    KEYS.queue_bytes, KEYS.queue_grammars, KEYS.queue_kept, KEYS.bucket("k"), KEYS.tokens("g"), KEYS.control("s"),
    KEYS.dead,
}  # fmt: skip
OF_SHARDS = {
    KEYS.logprobs("x", 0), KEYS.lease("s"), KEYS.epoch, KEYS.shard_epoch("s"), KEYS.policy("s"), KEYS.lengths("s"),
    KEYS.shards, KEYS.alive("scheduler", "s"), KEYS.stats("s"), KEYS.stats_history("s"), KEYS.iterations("s"),
    KEYS.replicas("s"), KEYS.events,
}  # fmt: skip
OF_GATEWAYS = {KEYS.background, KEYS.background_of("g"), KEYS.adopter("x"), KEYS.alive("gateway", "g"), KEYS.keys_salt}
OF_WORKERS = {KEYS.workers, KEYS.alive("worker", "w")}
OF_OPERATORS = {KEYS.drain("gateway", "g"), KEYS.drain("worker", "w"), KEYS.api_keys, KEYS.keys_version}
OF_PLACER = {
    PLACER_KEYS.lease(PLACER), PLACER_KEYS.epoch, PLACER_KEYS.shard_epoch(PLACER), PLACER_KEYS.placements,
}  # fmt: skip
MAY_WRITE = {
    "gateway": BOTH | OF_GATEWAYS | {KEYS.keys_used},
    "scheduler": BOTH | OF_SHARDS | {KEYS.worker("w")},
    "worker": OF_WORKERS | {KEYS.worker("w")},
    "placer": OF_PLACER,
    "ops": OF_OPERATORS | {KEYS.keys_used, KEYS.control("s")},
    "viewer": set[str](),
}
NAMES = (
    BOTH
    | OF_SHARDS
    | OF_GATEWAYS
    | OF_WORKERS
    | OF_OPERATORS
    | OF_PLACER
    | {KEYS.keys_used, KEYS.worker("w"), "foreign"}
)
WRITES = (
    "SET {k} 1", "DEL {k}", "UNLINK {k}", "SETRANGE {k} 0 a", "APPEND {k} a", "INCR {k}", "INCRBY {k} 1", "GETDEL {k}",
    "GETEX {k} PERSIST", "EXPIRE {k} 9", "PEXPIRE {k} 9000", "PERSIST {k}", "RENAME {k} {k}", "COPY {k} {k}",
    "HSET {k} a b", "HDEL {k} a", "HINCRBY {k} a 1", "HINCRBYFLOAT {k} a 1", "SADD {k} a", "SREM {k} a", "SPOP {k}",
    "ZADD {k} 1 a", "ZREM {k} a", "ZREMRANGEBYSCORE {k} 0 1", "RPUSH {k} a", "XADD {k} * a b", "XDEL {k} 1-1",
    "XTRIM {k} MAXLEN 1", "XGROUP CREATE {k} g 0 MKSTREAM", "XACK {k} g 1-1",
    "EVAL return(redis.call('DEL',KEYS[1])) 1 {k}",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("users")
    assert redis_users.main([str(directory)]) == 0
    with (directory / "users.acl").open("a") as acl:
        acl.write("user looks_on on >looks-on ~* &* +@all\n")
    return directory


@pytest.fixture(scope="module")
def port(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--aclfile", str(files / "users.acl"))
    server.client = redis.Redis(port=server.port, username="looks_on", password="looks-on", socket_timeout=60)
    with server:
        yield server.port


def login(port: int, files: Path, user: str) -> Any:
    return redis.Redis(port=port, username=user, password=(files / f"{user}.password").read_text(), socket_timeout=60)


def permitted(client: Any, words: list[Any]) -> bool:
    """Return whether Redis lets the user send this; it may fail for another reason, such as the type of the key."""
    try:
        client.execute_command(*words)
    except redis.exceptions.NoPermissionError:
        return False
    except redis.exceptions.ResponseError as error:
        assert "wrong number of arguments" not in str(error), words  # Redis counts them before it looks at the user
        return "command not allowed" not in str(error)  # DEBUG and MODULE, which the configuration closes to all
    return True


@pytest.mark.parametrize("user", MAY_WRITE)
def test_user_writes_no_other_key(port: int, files: Path, user: str) -> None:
    with login(port, files, user) as client:
        may = {key for key in NAMES for words in WRITES if permitted(client, words.replace("{k}", key).split())}
    assert may == MAY_WRITE[user]


def writing(commands: list[list[Any]]) -> list[list[bytes | str]]:
    """Return the commands of the server that write or may lead to it, with placeholders for their arguments."""
    dangerous = {b"@write", b"@dangerous", b"@admin", b"@scripting", b"@pubsub"}
    found: list[list[bytes | str]] = []
    for name, arity, flags, _, _, _, categories, *rest in commands:
        subcommands = rest[2] if len(rest) > 2 else []
        if subcommands:
            found += writing(subcommands)
        elif dangerous & set(categories) or b"write" in flags:
            words = name.split(b"|")
            found.append([*words, *["{k}"] * (abs(arity) - len(words))])
    return found


READS = {b"info", b"scan"}
"""What Redis counts as dangerous and boards need: figures of the server, and which shards there are."""


def test_user_of_grafana_may_send_no_command_that_writes(port: int, files: Path) -> None:
    document = yaml.safe_load((ROOT / "deploy/observability/grafana/datasources/datasources.yml").read_text())
    (user,) = [each["jsonData"]["user"] for each in document["datasources"] if each["type"] == "redis-datasource"]
    with redis.Redis(port=port, username="looks_on", password="looks-on") as looks_on:
        connection = looks_on.connection_pool.get_connection()
        connection.send_command("COMMAND")
        commands = writing(connection.read_response(disable_decoding=True))
        looks_on.connection_pool.release(connection)
    assert len(commands) > 150
    with login(port, files, user) as client:
        for key in (KEYS.queue, KEYS.api_keys, KEYS.control("s"), KEYS.drain("gateway", "g")):
            calls = [[key if word == "{k}" else word for word in words] for words in commands]
            allowed = {words[0] for words in calls if permitted(client, words)}
            assert allowed <= READS, allowed - READS
        for query in (f"HGETALL {KEYS.queue}", f"XREVRANGE {KEYS.events} + -", f"HGETALL {KEYS.stats('s')}"):
            assert permitted(client, query.split())


READ = (
    "HGETALL {p}req:x", "GET {p}out:x:0", "GET {p}prompt:x", "XRANGE {p}dead - +", "XRANGE {p}requests:normal - +",
    "XRANGE {p}tokens:g - +", "HGETALL {p}keys", "GET {p}keys:salt", "HGETALL {p}queue:tenants",
    "HGETALL {p}queue:bytes", "HGETALL {p}bucket:k", "HGETALL foreign",
)  # fmt: skip


def test_viewer_reads_no_request_no_key_and_no_tenant(port: int, files: Path) -> None:
    with login(port, files, "viewer") as client:
        assert not [read for read in READ if permitted(client, read.replace("{p}", KEYS.prefix).split())]
