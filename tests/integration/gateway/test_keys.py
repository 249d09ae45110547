"""Keys of `orcinus keys` at a real gateway: which are valid, what a key may, what Redis and the log hold of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.gateway.auth import Keyring
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway
from services.gateway.text.tokenizer import ModelText
from shared.errors import ConfigurationError
from shared.keys import Keys
from shared.security.api_keys import KeyRecord
from shared.settings import GatewaySettings
from shared.tasks import end
from tests.integration.gateway.conftest import asgi
from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway.process import GatewayProcess
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler, answering
from tests.support.waiting import free_port, until, wait_until

CONFIGURED = "sk-of-the-settings"
GATEWAY = {"served_model_name": "keyed", "api_key": CONFIGURED}
Made = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def served(gateway: GatewayProcess, redis_server: RedisServer) -> Iterator[ScriptedScheduler]:
    scheduler = ScriptedScheduler(redis_server.client, gateway.keys).lead()
    gateway.wait_ready()
    with answering(scheduler, lambda _: token_ids("and so on and so on")):
        yield scheduler


@pytest.fixture(scope="module")
def orcinus(redis_server: RedisServer) -> Made:
    """Return a function that runs `orcinus keys ...` and returns what it printed."""

    def run(*words: str, status: int = 0) -> dict[str, Any]:
        command = ["keys", *words, "--redis-url", redis_server.url, "--served-model-name", "keyed", "--json"]
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        assert done.exit_code == status, done.output
        return json.loads(done.stdout) if done.exit_code == 0 else {}

    return run


@pytest.fixture(scope="module")
def made(gateway: GatewayProcess, orcinus: Made) -> dict[str, dict[str, Any]]:
    """What `orcinus keys add` printed of each key; the gateway has read them all."""
    options = {
        "brief": ("--expires", "1d"), "batch": ("--max-priority", "low"), "old": ("--tenant", "alice"),
        "new": ("--tenant", "alice"), "slow": ("--requests-per-minute", "2", "--tokens-per-minute", "1000"),
        "bob": (), "gone": (),
    }  # fmt: skip
    found = {name: orcinus("add", name, *words) for name, words in options.items()}
    until("the gateway knows the last key", lambda: models(gateway, found["gone"]["key"]).status_code == 200)
    return found


def complete(gateway: GatewayProcess, key: str, **body: Any) -> httpx.Response:
    return gateway.post("/v1/completions", {"prompt": "The", "max_tokens": 3, **body}, key=key)


def models(gateway: GatewayProcess, key: str) -> httpx.Response:
    return gateway.get("/v1/models", key=key)


def test_key_is_valid_until_revoked_beside_those_of_the_settings(
    gateway: GatewayProcess, orcinus: Made, made: dict[str, Any]
) -> None:
    key = made["gone"]["key"]
    assert complete(gateway, key).status_code == 200
    assert models(gateway, key[:-1] + ("A" if key[-1] != "A" else "B")).status_code == 401
    orcinus("revoke", key.split("-")[2])
    until("the revoked key is refused", lambda: models(gateway, key).status_code == 401)
    assert "revoked" in models(gateway, key).json()["error"]["message"]
    assert models(gateway, CONFIGURED).status_code == 200
    assert [row["state"] for row in orcinus("list")["keys"] if row["name"] == "gone"] == ["revoked"]


def test_expired_key_is_refused(gateway: GatewayProcess, made: dict[str, Any], redis_server: RedisServer) -> None:
    brief, keys, client = made["brief"], gateway.keys, redis_server.client
    key = brief["key"]
    assert brief["expires_s"] - brief["created_s"] == 86400
    assert models(gateway, key).status_code == 200
    record = KeyRecord.decode(client.hget(keys.api_keys, brief["id"]))
    past = KeyRecord.decode(record.encode().replace(str(record.expires_s).encode(), str(record.created_s).encode()))
    client.hset(keys.api_keys, past.id, past.encode())
    client.incr(keys.keys_version)
    until("the expired key is refused", lambda: models(gateway, key).status_code == 401)
    assert "expired" in models(gateway, key).json()["error"]["message"]


def test_class_above_the_ceiling_of_a_key_gets_403(gateway: GatewayProcess, made: dict[str, Any]) -> None:
    key = made["batch"]["key"]
    refused = complete(gateway, key, priority="normal")
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["type"]) == (403, "priority", "permission_error")
    taken = complete(gateway, key)
    record = gateway.get(f"/v1/requests/{taken.headers['x-orcinus-request']}", key=key)
    assert record.json()["priority"] == "low", "the ceiling, where no class is named"


def test_limits_of_a_key_are_in_headers_and_429(gateway: GatewayProcess, made: dict[str, Any]) -> None:
    key = made["slow"]["key"]
    first, second, third = (complete(gateway, key) for _ in range(3))
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [a.headers["x-ratelimit-remaining-requests"] for a in (first, second)] == ["1", "0"]
    assert 990 < int(first.headers["x-ratelimit-remaining-tokens"]) < 1000
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert third.json()["error"]["code"] == "rate_limit_exceeded" and int(third.headers["retry-after"]) >= 1
    assert "x-ratelimit-limit-requests" not in complete(gateway, CONFIGURED).headers


def test_keys_of_one_tenant_share_requests_and_prefix_cache(
    gateway: GatewayProcess, made: dict[str, Any], served: ScriptedScheduler
) -> None:
    alice, again, bob = (made[name]["key"] for name in ("old", "new", "bob"))
    of_alice, of_again, of_bob = (complete(gateway, key).headers["x-orcinus-request"] for key in (alice, again, bob))

    def seen(key: str, request: str) -> int:
        return gateway.get(f"/v1/requests/{request}", key=key).status_code

    assert (seen(again, of_alice), seen(alice, of_again), seen(bob, of_alice)) == (200, 200, 404)
    salts = {request: served.claimed(request).request.cache_salt for request in (of_alice, of_again, of_bob)}
    assert salts[of_alice] == salts[of_again] != salts[of_bob]
    assert all(len(salt) == 16 for salt in salts.values())


def test_redis_and_the_log_hold_no_key(
    gateway: GatewayProcess, orcinus: Made, made: dict[str, Any], redis_server: RedisServer
) -> None:
    key = made["bob"]["key"]
    complete(gateway, key)
    complete(gateway, key, max_tokens="wrong")
    complete(gateway, key + "x")
    client, secret = redis_server.client, key.split("-", 3)[3]
    stored = [client.dump(name) or b"" for name in client.scan_iter(match="*{keyed}*", count=1000)]
    assert stored and not any(secret.encode() in value or CONFIGURED.encode() in value for value in stored)
    assert secret not in gateway.log() and CONFIGURED not in gateway.log()
    shown = orcinus("list")["keys"]
    assert secret not in str(shown) and "digest" not in str(shown)


def test_unreadable_key_record_is_refused_and_harms_no_other(
    gateway: GatewayProcess, made: dict[str, Any], redis_server: RedisServer
) -> None:
    keys, client = gateway.keys, redis_server.client
    good = json.loads(client.hget(keys.api_keys, made["bob"]["id"]))
    changes: list[dict[str, Any]] = [
        {"digest": None}, {"expires_s": "soon"}, {"max_priority": "now"}, {"id": []}, {"more": 1},
    ]  # fmt: skip
    bad = [b"\xff", b"[]", b"{}", b"1", *(json.dumps(good | change).encode() for change in changes)]
    client.hset(keys.api_keys, mapping={f"{number:012x}": record for number, record in enumerate(bad)})
    client.incr(keys.keys_version)
    until("the log names all of them", lambda: gateway.log().count("is unreadable") == len(bad))
    assert models(gateway, f"sk-orc-{1:012x}-{'a' * 43}").status_code == 401
    assert models(gateway, made["bob"]["key"]).status_code == 200
    client.hdel(keys.api_keys, *(f"{number:012x}" for number in range(len(bad))))
    client.incr(keys.keys_version)


def test_wrong_options_make_no_key(orcinus: Made) -> None:
    for words in (("--expires", "2001-01-01"), ("--expires", "soon"), ("--max-priority", "now"), ("--tenant", "a b")):
        with pytest.raises(Exception, match=words[0]):
            orcinus("add", "x", *words)
    with pytest.raises(ConfigurationError, match="unknown; `orcinus keys list`"):
        orcinus("revoke", "missing")


def test_key_is_revoked_by_its_name_where_one_has_it(orcinus: Made) -> None:
    first, second = orcinus("add", "twice"), orcinus("add", "twice")
    with pytest.raises(ConfigurationError, match=f"the name of 2 keys; .*{first['id']}") as refused:
        orcinus("revoke", "twice")
    assert second["id"] in str(refused.value)
    assert orcinus("revoke", first["id"])["state"] == "revoked"
    assert orcinus("revoke", "twice")["id"] == second["id"]


@contextlib.asynccontextmanager
async def read(
    server: RedisServer, name: str, *others: str, closed: bool = False, api_key: str | None = None
) -> AsyncIterator[Keyring]:
    """Yield the keys of a gateway, which are read. others: models that it serves, too."""
    settings = GatewaySettings(redis_url=server.url, served_model_name=name, require_key=closed, api_key=api_key)
    keyring = Keyring(settings, models=others)
    reading = asyncio.create_task(keyring.run())
    try:
        await wait_until(lambda: keyring.has_read)
        yield keyring
    finally:
        await end(reading)
        await keyring.close()


@pytest.fixture
def empty_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server without keys: those of a Redis are for all of its models."""
    with RedisServer(tmp_path / "empty") as server:
        yield server


def test_list_shows_whole_ids_and_no_empty_column(empty_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    command = ["--redis-url", empty_redis.url, "--served-model-name", "listed"]
    assert "`orcinus keys add NAME`" in CliRunner().invoke(app, ["keys", "list", *command]).stdout
    made = CliRunner().invoke(app, ["keys", "add", "a long name of a key that is not cut off", *command])
    assert "from now on every request needs a key" in made.stderr
    second = CliRunner().invoke(app, ["keys", "add", "b", "--tenant", "shop", *command])
    assert "from now on" not in second.stderr
    shown = CliRunner().invoke(app, ["keys", "list", *command]).stdout.splitlines()
    assert shown[0].split() == ["id", "name", "tenant", "state", "created"]
    rows = {line.split()[0]: line for line in shown[1:]}
    ids = [ran.stdout.split("-")[2] for ran in (made, second)]
    assert rows.keys() == set(ids)
    assert "a long name of a key that is not cut off" in rows[ids[0]] and "shop" in rows[ids[1]]


async def test_model_without_its_last_key_stays_closed_behind_a_restart(empty_redis: RedisServer) -> None:
    command = ["--redis-url", empty_redis.url, "--served-model-name", "emptied"]
    made = CliRunner().invoke(app, ["keys", "add", "last", *command])
    removed = CliRunner().invoke(app, ["keys", "revoke", "--forget", "last", *command])
    assert made.exit_code == removed.exit_code == 0
    assert "no key is active, and requests still need one" in removed.stderr
    assert "requests still need one" in CliRunner().invoke(app, ["keys", "list", *command]).stdout
    async with read(empty_redis, "emptied") as keyring:
        assert keyring.needs_key


@pytest.mark.parametrize("foreign", ["api_keys", "keys_version", "keys_salt"])
async def test_key_of_another_type_closes_no_gateway_to_the_keys_of_its_settings(
    empty_redis: RedisServer, foreign: str
) -> None:
    name = getattr(Keys("keyed"), foreign)
    if foreign == "api_keys":
        empty_redis.client.set(name, "x")
    else:
        empty_redis.client.hset(name, "x", "y")
    async with read(empty_redis, "keyed") as keyring:
        with pytest.raises(ApiError, match="you didn't provide an API key"):
            keyring.identify(None)
    async with read(empty_redis, "keyed", api_key=CONFIGURED) as keyring:
        assert keyring.identify(f"Bearer {CONFIGURED}").salt


@pytest.mark.parametrize("settings", [{}, {"require_key": True}, {"api_key": CONFIGURED}], ids=str)
async def test_gateway_that_has_not_read_the_keys_serves_nothing_that_may_need_one(
    model: Path, settings: dict[str, Any]
) -> None:
    text = ModelText(model)
    running = Gateway(GatewaySettings(model=model, redis_url=f"redis://127.0.0.1:{free_port()}/0", **settings), text)
    await running.start()
    headers = {"Authorization": "Bearer sk-orc-0123456789ab-of-redis"} if settings else {}
    async with asgi(running) as client:
        asked = [client.get(path, headers=headers) for path in ("/v1/models", "/stats")]
        asked.append(client.post("/tokenize", json={"prompt": "x"}, headers=headers))
        for answer in await asyncio.gather(*asked):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "keys_unread")
        if settings:
            assert (await client.get("/v1/models")).status_code == 401
    await running.stop()
    text.close()


async def test_keys_of_an_older_version_are_read_of_all_models(empty_redis: RedisServer) -> None:
    first, second = Keys("elder"), Keys("org/Second")
    record = KeyRecord("0123456789ab", "0" * 64, "old", "alice")
    async with read(empty_redis, "elder", "org/Second") as keyring:
        assert not keyring.needs_key
        empty_redis.client.incr(second.model_keys_version)  # as it is when the last key is gone
        await wait_until(lambda: keyring.needs_key)
        for keys, key_id in ((second, record.id), (first, "f" * 12)):
            empty_redis.client.hset(keys.model_keys, key_id, replace(record, id=key_id).encode())
            empty_redis.client.incr(keys.model_keys_version)
        await wait_until(lambda: keyring.caller(record.id) and keyring.caller("f" * 12))
        found = [caller and caller.models for caller in (keyring.caller("f" * 12), keyring.caller(record.id))]
        assert found == [frozenset({"elder"}), frozenset({"org/Second"})]
    async with read(empty_redis, "elder") as keyring:
        caller = keyring.caller("f" * 12)
        assert caller is not None and caller.models == {"elder"}


async def test_work_without_a_client_tells_a_revoked_key_from_a_missing_one(
    orcinus: Made, redis_server: RedisServer
) -> None:
    active, gone = orcinus("add", "active")["id"], orcinus("add", "over")["id"]
    orcinus("revoke", gone)
    async with read(redis_server, "keyed", closed=True) as keyring:
        caller = keyring.caller(active)
        assert caller is not None and caller.bucket == active
        assert keyring.caller("0" * 12) is None
        with pytest.raises(ApiError, match="revoked"):
            keyring.caller(gone)


def test_keys_of_all_models_of_the_file_are_moved_and_revoked(
    tmp_path: Path, empty_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, record = empty_redis.client, KeyRecord("0123456789ab", "0" * 64, "old", "alice")
    second, third = Keys("org/Second"), Keys("third")
    client.hset(second.model_keys, record.id, record.encode())
    client.incr(second.model_keys_version)
    (tmp_path / "models.yaml").write_text("models: {elder: {source: a}, org/Second: {source: b}, third: {source: c}}")
    monkeypatch.setenv("ORCINUS_MODELS", str(tmp_path / "models.yaml"))
    command = ["--redis-url", empty_redis.url, "--served-model-name", "elder", "--json"]
    listed = json.loads(CliRunner().invoke(app, ["keys", "list", *command]).stdout)["keys"]
    assert [(row["id"], row["models"]) for row in listed] == [(record.id, "org/Second")]
    assert not client.exists(second.model_keys)
    assert CliRunner().invoke(app, ["keys", "revoke", record.id, *command]).exit_code == 0
    assert client.get(second.model_keys_version) == b"2"  # gateways of the older version read again
    assert not client.exists(third.model_keys_version)
    assert second.model_keys.startswith("orcinus:{org-second-")
