"""The LoRA adapters of a model by name: registered by one gateway, known to all through Redis.

A name stands for the digest of an adapter's files, which lie in the store of --adapter-dir. A request takes the digest
with it when it comes, so that a name that stands for another adapter afterwards changes nothing for it. A name that was
taken away is remembered for a day: a request that an Idempotency-Key names finds its model by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, fields, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError, WatchError
from safetensors import SafetensorError, safe_open

from services.gateway.errors import RETRY, ApiError, invalid, unavailable
from services.gateway.published import PublishedRecords
from services.gateway.text.tokenizer import is_encoder
from shared.dead_letters import DeadLetters, remove_foreign
from shared.errors import ModelError
from shared.messages import quote
from shared.models.adapters import (
    CONFIG,
    CONFIG_BYTES,
    DIGEST_BYTES,
    STORE,
    WEIGHTS,
    WEIGHTS_BYTES,
    check_base,
    check_dtypes,
    check_header,
    check_hidden_size,
    check_layers,
    check_modules,
    digest_of,
    open_regular,
    parse_config,
    parse_shapes,
)
from shared.models.gguf.reader import is_gguf
from shared.models.hub import repository_of
from shared.models.model_files import read_json
from shared.redis_client import WRONG_TYPE, Unreachable, connect
from shared.settings import GatewaySettings

log = logging.getLogger("orcinus.gateway")

MAX_NAMES = 1024
FORMER_S = 86_400
"""For so long a name that was taken away is remembered: a request may wait and run meanwhile."""
MAX_STORED = 4096
"""Folders of the store: those of names that are gone stay, as requests may still need them."""
MAX_TRIES = 64
"""Of a change of the names: each failure is a change by another gateway."""
PIECE_BYTES = 1 << 20
INDEX = "model.safetensors.index.json"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """What a name stands for."""

    digest: str  # hex
    rank: int  # the largest of its modules
    path: str  # from which it was loaded
    created_s: int
    unloaded_s: int = 0  # when the name was taken away; 0: it stands

    def encode(self) -> bytes:
        """Return JSON, without `unloaded_s` where it is 0: an older gateway reads it too."""
        return orjson.dumps({name: value for name, value in asdict(self).items() if name != "unloaded_s" or value})

    @classmethod
    def decode(cls, raw: bytes) -> AdapterRecord:
        """Return the record in `raw`. Raise ValueError or TypeError if it is not a record."""
        record = cls(**orjson.loads(raw))
        kinds = {"str": str, "int": int}
        if not all(type(getattr(record, field.name)) is kinds[str(field.type)] for field in fields(cls)):
            raise TypeError("adapter record: a field has the wrong type")
        if len(bytes.fromhex(record.digest)) != DIGEST_BYTES:
            raise ValueError(f"adapter record: a digest of {len(record.digest)} characters")
        return record


class AdapterNames:
    """The names of one model's adapters. `run` is a task of the gateway."""

    def __init__(self, settings: GatewaySettings, letters: DeadLetters | None = None) -> None:
        self.records: dict[str, AdapterRecord] = {}
        self.former: dict[str, AdapterRecord] = {}
        """Of names that were taken away lately."""
        self._folder, self._model, self._max_rank = settings.adapter_dir, settings.model, settings.max_lora_rank
        self._key = settings.keys.adapters
        self._expired_names: list[str] = []  # names of Redis that are remembered no longer
        self._redis: Redis = connect(settings, connections=2)
        self._letters = letters or DeadLetters()
        self._source = PublishedRecords("adapters", self._redis, AdapterRecord.decode, self._letters)
        self.has_looked = self._source.has_looked

    def digest(self, name: str) -> bytes | None:
        """Return the digest of the adapter that a name stands for now; None for no adapter."""
        record = self.records.get(name)
        return None if record is None else bytes.fromhex(record.digest)

    async def run(self) -> None:
        """Read the names once a second, until cancelled."""
        await self._source.follow(self._look)

    async def close(self) -> None:
        await self._redis.aclose()

    async def load(self, name: str, path: str, replaces: bool) -> None:
        """Copy an adapter into the store and give it a name. Raise ApiError.

        replaces: whether the name may stand for another adapter now; requests that have that one keep it.
        """
        folder = self._demand_folder()
        await _wait_answer(self._look())
        self._demand_room(name)  # before files are copied
        try:
            record = await asyncio.to_thread(_store, folder, path, self._max_rank, self._model)
        except ModelError as error:
            raise invalid("lora_path", f"lora_path: {error}") from error
        except OSError as error:
            text = f"lora_path: the store takes no adapter: {error.strerror}; {RETRY}"
            raise unavailable(text, "adapters_unavailable", 60) from error

        def load_record() -> AdapterRecord:
            self._demand_room(name)
            if name in self.records and self.records[name].digest != record.digest and not replaces:
                raise invalid(
                    "lora_name", f"lora_name: {quote(name)} is loaded already; unload it first, or send load_inplace"
                )
            return record

        await _wait_answer(self._change(name, load_record))
        log.info("adapter %s is %s, rank %d, from %s", name, record.digest, record.rank, record.path)

    async def unload(self, name: str) -> None:
        """Let a name stand for nothing. The files stay, and requests that have the adapter go on. Raise ApiError."""
        self._demand_folder()

        def unload_record() -> AdapterRecord:
            if name not in self.records:
                text = f"lora_name: no adapter {quote(name)} is loaded; /v1/models lists them"
                raise ApiError(404, text, param="lora_name", code="adapter_not_found")
            return replace(self.records[name], unloaded_s=int(time.time()))

        await _wait_answer(self._change(name, unload_record))
        log.info("adapter %s is unloaded", name)

    async def _change(self, name: str, decide: Callable[[], AdapterRecord]) -> None:
        """Write the record of a name that `decide` returns, and drop names that are remembered no longer.

        decide: called with the names as they are in Redis, again where another gateway changes one of them before the
        record is written. Raise what it raises, and ApiError(503).
        """
        for _ in range(MAX_TRIES):
            pipe: Any = self._redis.pipeline()
            async with pipe:
                await pipe.watch(self._key)
                await self._look(pipe)
                record = decide()
                latest = sorted(self.former, key=lambda each: self.former[each].unloaded_s, reverse=True)
                pipe.multi()
                if gone := [*self._expired_names, *latest[MAX_NAMES - 1 :]]:
                    pipe.hdel(self._key, *gone)
                pipe.hset(self._key, name, record.encode())
                with contextlib.suppress(WatchError):
                    await pipe.execute()
                    self._take(self.records | self.former | {name: record})
                    return
        text = f"lora_name: other gateways change the adapters all the time; {RETRY}"
        raise unavailable(text, "adapters_unavailable", 2)

    def _demand_room(self, name: str) -> None:
        if name not in self.records and len(self.records) >= MAX_NAMES:
            raise invalid("lora_name", f"lora_name: there are {MAX_NAMES} adapters, the maximum; unload one first")

    def _demand_folder(self) -> Path:
        if self._folder is None:
            text = "adapters are off; start gateways and workers with --adapter-dir"
            raise ApiError(404, text, code="adapters_off")
        return self._folder

    async def _look(self, redis: Redis | None = None) -> None:
        try:
            raw_records = await self._source.read(self._key, redis)
        except ResponseError as error:
            if WRONG_TYPE not in str(error):
                raise
            await remove_foreign(self._redis, self._letters, {self._key: "hash"})
            raw_records = {}
        self._take({name: record for name, record in raw_records.items() if record is not None})

    def _take(self, records: dict[str, AdapterRecord]) -> None:
        kept_s = int(time.time()) - FORMER_S
        self.records = {name: record for name, record in records.items() if not record.unloaded_s}
        self.former = {name: record for name, record in records.items() if record.unloaded_s > kept_s}
        self._expired_names = [name for name in records if name not in self.records and name not in self.former]


async def _wait_answer(command: Awaitable[Any]) -> None:
    """Wait for Redis. Raise ApiError(503)."""
    try:
        await command
    except (*Unreachable, RedisError) as error:
        raise unavailable(f"Redis does not answer: {error}; {RETRY}", "redis_unavailable", 2) from error


def _store(folder: Path, path: str, max_rank: int, model: Path) -> AdapterRecord:
    """Copy an adapter below `folder` into its store. Raise ModelError for one that cannot be served, and OSError."""
    root = folder.resolve(strict=True)
    source = _below(root, root / path, path)
    store = root / STORE
    store.mkdir(mode=0o755, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="new-", dir=store))
    try:
        for name, most in ((CONFIG, CONFIG_BYTES), (WEIGHTS, WEIGHTS_BYTES)):
            _copy(root, _below(root, source / name, f"{path}/{name}"), temporary / name, most)
        rank = _check(temporary, max_rank, model)
        digest = digest_of(temporary).hex()
        temporary.chmod(0o755)
        if not _is_stored(store / digest):
            _move(temporary, store / digest)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # where the store has it, or something is wrong
    return AdapterRecord(digest, rank, str(source), int(time.time()))


def _is_stored(folder: Path) -> bool:
    """Return whether a folder of the store has the files that its name says."""
    try:
        return digest_of(folder).hex() == folder.name
    except (ModelError, OSError):
        return False


def _move(source: Path, target: Path) -> None:
    """Move a folder to its place in the store, in place of a damaged one. Raise ModelError where the store is full, and
    OSError.
    """
    if os.path.lexists(target):
        with (
            tempfile.TemporaryDirectory(prefix="old-", dir=source.parent, ignore_cleanup_errors=True) as aside,
            contextlib.suppress(FileNotFoundError),  # another gateway was faster
        ):
            target.rename(Path(aside) / target.name)
    elif sum(1 for _ in source.parent.iterdir()) > MAX_STORED:  # with the one that was made
        raise ModelError(f"{source.parent} has {MAX_STORED} folders, the maximum; remove those that no request needs")
    try:
        source.replace(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else another gateway was faster
            raise


def _below(root: Path, path: Path, name: str) -> Path:
    """Return the real path of what a client names. Raise ModelError where it is not below the folder."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{name[:200]!r} is not there; give a path below --adapter-dir") from error
    if root not in real.parents or real.is_relative_to(root / STORE):
        raise ModelError(f"{name[:200]!r} is not below --adapter-dir; copy the adapter there")
    return real


def _copy(root: Path, source: Path, target: Path, max_bytes: int) -> None:
    """Copy a file by its real path, below `root`. Raise OSError, and ModelError where a part of it is a link now."""
    with _open_below(root, source) as file, target.open("xb") as target_file:
        remaining_bytes = max_bytes
        while piece := file.read(PIECE_BYTES):
            remaining_bytes -= len(piece)
            if remaining_bytes < 0:
                raise ModelError(f"{source.name} has more than {max_bytes} bytes; use a smaller adapter")
            target_file.write(piece)
        target_file.flush()
        os.fsync(target_file.fileno())


def _open_below(root: Path, source: Path) -> BufferedReader:
    """Open a file below a folder, part by part: none of them is followed where it is a link now. Raise ModelError."""
    *parts, name = source.relative_to(root).parts
    with contextlib.ExitStack() as stack:
        at = os.open(root, FOLDER)
        stack.callback(os.close, at)
        try:
            for part in parts:
                at = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=at)
                stack.callback(os.close, at)
            return open_regular(Path(name), folder=at)
        except OSError as error:
            raise ModelError(f"{source}: cannot be opened ({error.strerror}); copy the adapter there again") from error


def _check(folder: Path, max_rank: int, model: Path) -> int:
    """Return the largest rank of an adapter. Raise ModelError for what no worker would load, or for another base."""
    adapter = parse_config((folder / CONFIG).read_bytes())
    check_header(folder / WEIGHTS)
    try:
        with safe_open(folder / WEIGHTS, framework="np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            shapes = {name: tuple(each.get_shape()) for name, each in slices.items()}
            dtypes = {name: each.get_dtype() for name, each in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{WEIGHTS}: cannot be read ({error}); save the adapter again") from error
    modules = parse_shapes(shapes, max_rank)
    check_dtypes(dtypes)
    config = _config(model)
    if is_encoder(config):
        raise ModelError("the served model is an encoder, which takes no adapters; name another one in `model`")
    text = config.get("text_config", config)
    if hidden_size := _size(text, "hidden_size", "n_embd"):
        check_hidden_size(modules, hidden_size)
    if layers := _size(text, "num_hidden_layers", "n_layer"):
        check_layers(modules, layers)
    check_modules(modules, _stored_shapes(model))
    # Quantized weights are in repositories of other names.
    if config and "quantization_config" not in config and not is_gguf(model):
        check_base(adapter, repository_of(model) or "")
    return max(module.rank for module in modules.values())


def _stored_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of the served model; none where no safetensors lie here: the worker compares."""
    try:
        if (index := model / INDEX).is_file():
            files = sorted(set(read_json(index)["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        shapes: dict[str, tuple[int, ...]] = {}
        for name in files:
            with safe_open(model / Path(name).name, framework="np") as tensors:
                shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError, ModelError):
        return {}
    return shapes


def _config(model: Path) -> dict[str, Any]:
    """Return config.json, or what a GGUF file says in its form; empty where it cannot be read: the worker compares."""
    try:
        return read_json(model / "config.json")
    except ModelError:
        return {}


def _size(config: Any, *names: str) -> int:
    """Return the first of these fields that is there; 0 for none."""
    size = next((config[name] for name in names if name in config), 0) if isinstance(config, dict) else 0
    return size if isinstance(size, int) else 0
