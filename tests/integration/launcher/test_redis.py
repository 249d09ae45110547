"""The Redis of a local stack: which binary runs, how it is closed to other users, that its data stays."""

from __future__ import annotations

import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis

from services.launcher import redis_server
from services.launcher.probes import RedisProbe
from services.launcher.redis_server import LocalRedis, check_server, client, configure, find_binary
from services.launcher.up import has_made_keys
from shared.errors import ConfigurationError
from shared.settings import GatewaySettings
from tests.support.waiting import until


@contextmanager
def running(server: LocalRedis) -> Iterator[redis.Redis]:
    process = subprocess.Popen(server.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    connection = client(server.url, server.password)
    try:
        until("Redis answers", RedisProbe(connection).ready)
        yield connection
    finally:
        connection.close()
        process.terminate()
        process.wait(60)


def executable(path: Path) -> Path:
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o755)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_local_server_keeps_its_data_and_admits_one_user(tmp_path: Path) -> None:
    server = configure(tmp_path, memory_bytes=64 << 20)
    with running(server) as connection:
        expected = {
            "port": "0", "appendonly": "yes", "appendfsync": "everysec", "save": "", "maxmemory": str(64 << 20),
            "maxmemory-policy": "noeviction", "dir": str(tmp_path / "redis"),
        }  # fmt: skip
        assert connection.config_get("*").items() >= expected.items()
        assert {mode(path) for path in (server.socket, server.socket.parent, tmp_path / "redis")} == {0o700}
        with client(server.url) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        process = psutil.Process(int(connection.info("server")["process_id"]))
        assert process.net_connections("inet") == []
        assert server.password not in " ".join(process.cmdline())
        assert server.password not in " ".join(process.environ().values())


def test_data_survives_a_restart_with_another_password_in_a_private_file(tmp_path: Path) -> None:
    odd = tmp_path / 'a "b" \\c %41?'
    odd.mkdir()
    first = configure(odd)
    assert mode(first.config) == 0o600 and first.password in first.config.read_text()
    assert f'maxmemory "{min(1 << 30, psutil.virtual_memory().total // 10)}"' in first.config.read_text()
    with running(first) as connection:
        connection.xadd("requests", {"id": "r1"})
        assert connection.config_get("dir")["dir"] == str(odd / "redis")
    first.remove()
    assert not first.config.exists() and not first.socket.parent.exists()
    second = configure(odd)
    assert second.password != first.password
    with running(second) as connection:
        assert connection.xlen("requests") == 1


def test_forged_record_of_a_socket_directory_deletes_nothing(tmp_path: Path) -> None:
    precious = tmp_path / "orcinus-precious"
    precious.mkdir()
    (tmp_path / "socket-dir").write_text(f"{precious}\n")
    configure(tmp_path)
    assert precious.exists()


def test_bundled_server_precedes_those_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    valkey = executable(tmp_path / "valkey-server")
    assert find_binary() == redis_server.bundled_binary() is not None
    monkeypatch.setattr(redis_server, "bundled_binary", lambda: None)
    assert find_binary() == valkey
    installed = executable(tmp_path / "redis-server")
    assert find_binary() == installed


def test_server_is_one_that_reads_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(configure(tmp_path)) as connection:
        assert connection.info("server")["valkey_version"].startswith("9.")
        connection.set("kept", "yes")
    with running(configure(tmp_path)) as connection:
        assert connection.get("kept") == b"yes"
    monkeypatch.setattr(redis_server, "bundled_binary", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigurationError, match="written by Valkey, which Redis cannot read; install valkey-server"):
        configure(tmp_path)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no Redis here")
def test_bundled_server_goes_on_with_the_data_of_a_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(redis_server, "bundled_binary", lambda: None)
        with running(configure(tmp_path)) as connection:
            assert "valkey_version" not in connection.info("server")
            connection.set("kept", "yes")
    with running(configure(tmp_path)) as connection:
        assert "valkey_version" in connection.info("server")
        assert connection.get("kept") == b"yes"


def test_data_of_a_newer_redis_needs_that_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "redis" / "appendonlydir" / "appendonly.aof.1.base.rdb"
    base.parent.mkdir(parents=True)
    base.write_bytes(b"REDIS0012" + b"x")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="written by a newer Redis, which Valkey cannot read; install redis-s"):
        configure(tmp_path)
    installed = executable(tmp_path / "redis-server")
    assert configure(tmp_path).binary == installed


@pytest.mark.parametrize(
    ("version", "is_valkey", "mended"),
    [
        ("6.2.19", False, False), ("6.2.20", False, True), ("7.0.15", False, False), ("7.2.10", False, False),
        ("7.4.6", False, True), ("8.0.3", False, False), ("8.2.2", False, True), ("8.4.0", False, True),
        ("Valkey 8.1.3", True, False), ("Valkey 8.1.4", True, True), ("9.1.2", True, True), ("9.0", True, True),
    ],
)  # fmt: skip
def test_version_with_known_faults_is_told(version: str, is_valkey: bool, mended: bool) -> None:
    assert redis_server.is_mended(version, is_valkey) == mended


def test_missing_redis_is_an_error_with_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(redis_server, "bundled_binary", lambda: None)
    with pytest.raises(ConfigurationError, match="sudo apt-get install redis-server"):
        configure(tmp_path)


def test_wrong_password_or_old_redis_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = configure(tmp_path)
    with running(server):
        assert check_server(server.url, server.password)
        with pytest.raises(ConfigurationError, match="does not answer"):
            check_server(server.url, "wrong")
        monkeypatch.setattr(redis_server, "OLDEST", (99, 0))
        with pytest.raises(ConfigurationError, match="needs"):
            check_server(server.url, server.password)


@pytest.mark.parametrize(
    ("info", "shown"),
    [
        ({"redis_version": "7.0.15"}, "7.0.15"),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.2"}, "Valkey 9.1.2"),
    ],
)
def test_version_of_valkey_is_shown(info: dict[str, str], shown: str) -> None:
    assert redis_server.version_text(info) == shown


@pytest.mark.parametrize("name", ["run", "x" * 120])
def test_command_finds_the_local_server_and_its_password(tmp_path: Path, name: str) -> None:
    run_dir = tmp_path / name  # the longer one's socket lies elsewhere
    assert redis_server.local(run_dir) is None
    run_dir.mkdir()
    server = configure(run_dir)
    assert redis_server.local(run_dir) == (server.url, server.password)
    assert mode(server.socket.parent) == 0o700
    if name != "run":
        assert server.socket.parent.parent == Path(tempfile.gettempdir())
        assert (run_dir / "socket-dir").read_text().strip() == str(server.socket.parent)
        with running(server) as connection:
            assert connection.ping()
        again = configure(run_dir)  # as after a killed launcher, which removed nothing
        assert not server.socket.parent.exists()
        server = again
    server.remove()
    assert redis_server.local(run_dir) is None and not server.socket.parent.exists()


def test_keys_that_were_made_are_seen_until_redis_is_gone(tmp_path: Path) -> None:
    gateway = GatewaySettings(served_model_name="tiny")
    with running(configure(tmp_path, memory_bytes=64 << 20)) as connection:
        assert not has_made_keys(connection, gateway)
        connection.incr(gateway.keys.keys_version)
        assert has_made_keys(connection, gateway)
    assert not has_made_keys(connection, gateway)
