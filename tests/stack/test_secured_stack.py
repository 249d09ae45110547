"""The whole stack as it is deployed: Redis over TLS with a user for each service, mutual TLS to the worker."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from typer.testing import CliRunner

from deploy import certs, redis_users
from protos import worker_pb2, worker_pb2_grpc
from services.cli.app import app
from services.launcher.redis_server import find_binary
from shared.settings import DEMO_MODEL
from tests.support.stack import RedisServer, Stack
from tests.support.waiting import free_port, until

LOOKS_ON = "user looks_on on >looks-on ~* &* +@all\n"


BINARY = shutil.which("redis-server") or str(find_binary() or "")
"""The bundled Valkey was built without TLS."""


def redis_knows_tls() -> bool:
    command = [BINARY, "--port", "0", "--tls-port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)  # ends at once: it has no certificate
    return "Bad directive" not in done.stdout and "Failed finding TLS support" not in done.stdout


class SecuredRedis(RedisServer):
    def __init__(self, directory: Path, files: Path) -> None:
        port = free_port()
        super().__init__(
            directory, "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no",
            "--tls-cert-file", str(files / "redis.pem"), "--tls-key-file", str(files / "redis-key.pem"),
            "--tls-ca-cert-file", str(files / "ca.pem"), "--aclfile", str(files / "users.acl"),
            binary=BINARY,
        )  # fmt: skip
        self.url = f"rediss://localhost:{port}/0"
        self.ca = str(files / "ca.pem")
        self.port = port
        self.client = self.as_user("looks_on", "looks-on")

    def as_user(self, name: str = "", password: str = "") -> redis.Redis:
        user = {"username": name, "password": password} if name else {}
        return redis.Redis(port=self.port, ssl=True, ssl_ca_certs=self.ca, retry=Retry(NoBackoff(), 0), **user)


class SecuredStack(Stack):
    """Every service with its own user of Redis, and scheduler and worker with their certificates."""

    def __init__(self, directory: Path, model: Path, **settings: Any) -> None:
        super().__init__(directory, model, ops_port=free_port(), **settings)
        self.files = directory / "secrets"
        certs.make(self.files, [])
        redis_users.main([str(self.files)])
        with (self.files / "users.acl").open("a") as acl:
            acl.write(LOOKS_ON)
        self.redis = SecuredRedis(directory / "redis", self.files)

    def password(self, role: str) -> str:
        return (self.files / f"{role}.password").read_text()

    def operate(self, *command: str) -> str:
        """What the command line prints, as the user `ops`."""
        options = ["--redis-url", self.redis.url, "--redis-ca", str(self.files / "ca.pem"), "--redis-username", "ops"]
        options += ["--redis-password", self.password("ops"), "--served-model-name", self.name]
        done = CliRunner().invoke(app, [*command, *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    def start(self, service: str, name: str = "", **settings: Any) -> None:
        access = {
            "redis_username": service, "redis_password": self.password(service), "redis_ca": self.files / "ca.pem",
            "grpc_ca": self.files / "ca.pem", "grpc_cert": self.files / f"{service}.pem",
            "grpc_key": self.files / f"{service}-key.pem",
        }  # fmt: skip
        super().start(service, name, **access, **settings)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredStack]:
    if not redis_knows_tls():
        pytest.skip("this Redis was built without TLS")
    directory = tmp_path_factory.mktemp("secured")
    with SecuredStack(directory / "stack", DEMO_MODEL, kernels="reference", max_seqs=8, kv_blocks=64) as running:
        yield running


def test_requests_of_every_kind_need_no_denied_command(stack: SecuredStack) -> None:
    assert len(stack.complete("The", 5, ignore_eos=True)) == 5
    assert stack.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "logprobs": 2}).is_success
    assert stack.post("/v1/completions", {"prompt": "The", "max_tokens": 40, "stop": ["e", "a", "i"]}).is_success
    assert stack.post("/v1/completions", {"prompt": [5] * 20_000, "max_tokens": 1}).status_code == 400
    later = stack.post("/v1/completions", {"prompt": "The", "max_tokens": 3, "background": True})
    assert later.is_success
    where = f"{stack.url}/v1/requests/{later.json()['id']}"
    until("it has ended", lambda: httpx.get(where, timeout=60).json()["status"] == "finished")
    ops_port = int(stack.settings["ops_port"])
    assert httpx.get(f"http://127.0.0.1:{ops_port}/stats", timeout=60).json()["leases"] == ["shard-0"]
    made = json.loads(stack.operate("keys", "add", "a", "--json"))
    for command in (["keys", "list"], ["policy", "vllm"], ["policy", "orcinus"]):
        stack.operate(*command)
    until("a key is needed", lambda: stack.post("/v1/completions", {"prompt": "a"}).status_code == 401)
    stack.key = made["key"]
    running = stack.post("/v1/completions", {"prompt": "The", "max_tokens": 2})
    where = f"{stack.url}/v1/requests/{running.headers['x-orcinus-request']}"
    assert httpx.get(where, headers=stack.headers, timeout=60).json()["status"] == "finished"
    assert httpx.delete(where, headers=stack.headers, timeout=60).json()["cancelled"] is False
    until("the key's use is noted", lambda: stack.redis.client.hexists(stack.keys.keys_used, made["id"]))
    denied = [(e["username"], e["reason"], e["object"]) for e in stack.redis.client.acl_log()]  # type: ignore[union-attr]
    assert not [entry for entry in denied if "setinfo" not in str(entry)]  # a Redis 7.0 has no rule for that one


@pytest.mark.parametrize(
    ("role", "commands"),
    [
        ("gateway", ["FLUSHALL", "KEYS *", "CONFIG GET *", "GET foreign", "SET {p}lease:shard-0 1", "ACL LIST",
                     "HSET {p}keys a b", "EVAL return(1) 0", "HSET {p}worker:worker-0 address evil", "CLIENT LIST"]),
        ("scheduler", ["FLUSHALL", "KEYS *", "CONFIG GET *", "GET foreign", "GET {p}keys:salt", "HGETALL {p}keys"]),
        ("worker", ["FLUSHALL", "KEYS *", "GET {p}queue", "HGET {p}req:x a", "XADD {p}control:a * c d", "SCAN 0"]),
        ("ops", ["FLUSHALL", "KEYS *", "HGETALL {p}req:x", "GET {p}out:x:0", "XRANGE {p}requests:normal - +",
                 "GET {p}keys:salt", "XRANGE {p}tokens:g - +"]),
    ],
)  # fmt: skip
def test_user_of_redis_may_do_nothing_else(stack: SecuredStack, role: str, commands: list[str]) -> None:
    with stack.redis.as_user(role, stack.password(role)) as client:
        for command in commands:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.replace("{p}", stack.keys.prefix).split())
    with stack.redis.as_user(role, "guessed") as client, pytest.raises(redis.exceptions.AuthenticationError):
        client.ping()
    with stack.redis.as_user() as client, pytest.raises(redis.exceptions.AuthenticationError):
        client.ping()


def test_worker_refuses_peers_without_a_certificate_of_its_ca(stack: SecuredStack, tmp_path: Path) -> None:
    address = stack.redis.client.hget(stack.keys.worker("worker-0"), "address").decode()  # type: ignore[union-attr]
    certs.make(tmp_path, [])
    foreign, ours = tmp_path, stack.files

    def described(channel: grpc.Channel) -> bool:
        with channel:
            try:
                worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=60)
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                return False
        return True

    def dialled(ca: Path, own: Path | None) -> grpc.Channel:
        pair = [(own / name).read_bytes() for name in ("scheduler-key.pem", "scheduler.pem")] if own else [None, None]
        credentials = grpc.ssl_channel_credentials((ca / "ca.pem").read_bytes(), *pair)
        return grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", "orcinus-worker")])

    assert described(dialled(ours, ours))
    assert not described(grpc.insecure_channel(address))
    assert not described(dialled(ours, None))
    assert not described(dialled(ours, foreign))
    assert not described(dialled(foreign, ours))
