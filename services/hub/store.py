"""The models of huggingface_hub's cache: what is there, where it came from, whether it is in use, and its removal.

The cache belongs to all tools of its user. A record beside each repository (`.orcinus.json`) says which files we
fetched and checked; everything else is another tool's and stays unless it is named. A model in use is a shared lock
(flock) held by the processes that serve it, which the kernel drops with them.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.errors import ConfigurationError
from shared.models.hub import HubName, cache_directory, find_snapshot, repository_directory, repository_of, snapshot_of

RECORD = ".orcinus.json"
PARTIAL = ".orcinus.incomplete"
"""End of the name of a file that is not whole yet; huggingface_hub counts it among its incomplete files."""

_held: list[int] = []
"""Descriptors of locks that this process keeps until it ends."""


@dataclass(slots=True)
class Record:
    """Digests of the files that were checked, by `COMMIT/NAME`, and which of them we fetched."""

    path: Path
    checked: dict[str, str] = field(default_factory=dict)
    fetched: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, repository: str) -> Record:
        """Return the record of a repository, an empty one where there is none or it cannot be read."""
        path = repository_directory(repository) / RECORD
        try:
            record = json.loads(path.read_bytes())
            return cls(path, dict(record["checked"]), set(record["fetched"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls(path)

    def write(self) -> None:
        new = self.path.with_name(f"{RECORD}.new")
        new.write_text(json.dumps({"checked": self.checked, "fetched": sorted(self.fetched)}, indent=1) + "\n")
        os.replace(new, self.path)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A revision of a model on this machine."""

    repository: str
    commit: str
    refs: tuple[str, ...]
    path: Path
    size_bytes: int
    fetched_bytes: int  # by us
    in_use: bool

    @property
    def origin(self) -> str:
        if not self.fetched_bytes:
            return "another tool"
        return "orcinus" if self.fetched_bytes == self.size_bytes else "orcinus and another tool"


def local_models() -> list[LocalModel]:
    """Return every revision of every model in the cache, by name."""
    models = []
    for repository in _scan().repos if cache_directory().is_dir() else ():
        if repository.repo_type != "model":
            continue
        record, busy = Record.of(repository.repo_id), is_in_use(repository.repo_id)
        for revision in repository.revisions:
            ours = {file.blob_path: file.size_on_disk for file in revision.files if _key(file) in record.fetched}
            models.append(
                LocalModel(
                    repository.repo_id,
                    revision.commit_hash,
                    tuple(sorted(revision.refs)),
                    revision.snapshot_path,
                    revision.size_on_disk,
                    sum(ours.values()),
                    busy,
                )
            )
    return sorted(models, key=lambda model: (model.repository, model.commit))


@dataclass(frozen=True, slots=True)
class Removal:
    """Files that `orcinus rm` would remove, and those of other tools that would stay."""

    name: HubName
    files: tuple[Any, ...]  # huggingface_hub's CachedFileInfo
    partial: tuple[Path, ...]
    size_bytes: int
    other_files: int
    other_bytes: int
    whole_revisions: tuple[str, ...]  # commits of which nothing stays


def plan_removal(name: HubName, others: bool, whole: bool) -> Removal:
    """Return what would be removed. Raise ConfigurationError when nothing of that name is here.

    others: files that another tool fetched too. whole: all revisions, not only the one that is named.
    """
    directory = repository_directory(name.repository)
    repositories = [
        repository for repository in (_scan().repos if directory.is_dir() else ())
        if (repository.repo_type, repository.repo_id) == ("model", name.repository)
    ]  # fmt: skip
    commit = None if whole else getattr(find_snapshot(name), "name", "")
    revisions = [
        revision for repository in repositories for revision in repository.revisions
        if commit is None or revision.commit_hash == commit
    ]  # fmt: skip
    partial = tuple(directory.glob(f"blobs/*{PARTIAL}")) if whole else ()
    if not revisions and not partial:
        raise ConfigurationError(f"{name}: no such model on this machine; `orcinus list` shows those that are")
    record = Record.of(name.repository)
    files = [file for revision in revisions for file in revision.files]
    chosen = [file for file in files if others or _key(file) in record.fetched]
    stays = {file.blob_path: file.size_on_disk for file in files if file not in chosen}
    removed = {file.blob_path: file.size_on_disk for file in chosen if file.blob_path not in stays}
    return Removal(
        name,
        tuple(chosen),
        partial,
        sum(removed.values()) + sum(path.stat().st_size for path in partial),
        len(stays),
        sum(stays.values()),
        tuple(revision.commit_hash for revision in revisions if revision.files <= set(chosen)),
    )


def remove(removal: Removal) -> None:
    """Remove it. Raise ConfigurationError while a process serves the model."""
    repository = removal.name.repository
    with _unused(repository):
        cache = _scan()
        cache.delete_files(*removal.files).execute()
        if removal.whole_revisions:
            _scan().delete_revisions(*removal.whole_revisions).execute()
        for path in removal.partial:
            path.unlink(missing_ok=True)
        record = Record.of(repository)
        gone = {_key(file) for file in removal.files}
        record.fetched -= gone
        record.checked = {key: digest for key, digest in record.checked.items() if key not in gone}
        if record.path.parent.is_dir():
            record.write()


def hold(model: Path) -> None:
    """Mark a model of the cache as in use until this process ends; pass over other paths and a read-only cache."""
    snapshot, repository = snapshot_of(model), repository_of(model)
    if snapshot is None or repository is None:
        return
    with suppress(OSError):
        path = _lock_path(repository, snapshot.parents[2])
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a removal
        _held.append(descriptor)


def is_in_use(repository: str) -> bool:
    """Return whether a process of this machine serves the model."""
    try:
        with _unused(repository):
            return False
    except ConfigurationError:
        return True


@contextmanager
def pulling(repository: str) -> Iterator[None]:
    """Keep other transfers of the same repository out. Raise ConfigurationError while there is one."""
    path = _lock_path(repository, cache_directory()).with_name("orcinus-pull.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigurationError(
            f"{path.parent}: cannot be written: {error.strerror}; set HF_HOME to a directory that can"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigurationError(f"{repository}: another process fetches it; wait until it has ended") from None
    finally:
        os.close(descriptor)


@contextmanager
def _unused(repository: str) -> Iterator[None]:
    path = _lock_path(repository, cache_directory())
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # it has never been served
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigurationError(f"{repository}: in use by a process that serves it; stop that one first") from None
    finally:
        os.close(descriptor)


def _lock_path(repository: str, cache: Path) -> Path:
    return cache / ".locks" / ("models--" + repository.replace("/", "--")) / "orcinus.lock"


def _key(file: Any) -> str:
    """Return a cached file's name in a record."""
    snapshots = next(parent for parent in file.file_path.parents if parent.name == "snapshots")
    return str(file.file_path.relative_to(snapshots))


def _scan() -> Any:
    from huggingface_hub import scan_cache_dir

    return scan_cache_dir(cache_directory())
