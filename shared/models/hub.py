"""Names of models on the Hugging Face Hub, and where huggingface_hub keeps them on this machine.

Services look a name up here and never fetch it: `orcinus pull` and `orcinus up` do (`services/hub`). Nothing here
changes a file or opens a connection. The layout is that of
https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ModelError
from shared.models.gguf.parts import is_later_part

MAIN = "main"
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


@dataclass(frozen=True, slots=True)
class HubName:
    """`ORG/NAME[@REVISION]`; a revision is a branch, a tag or a commit."""

    repository: str
    revision: str = MAIN

    def __str__(self) -> str:
        return self.repository if self.revision == MAIN else f"{self.repository}@{self.revision}"


def is_repository(text: str) -> bool:
    """Return whether the Hub could have a repository of that name."""
    return _REPOSITORY.fullmatch(text) is not None and "--" not in text and ".." not in text


def in_address(text: str) -> HubName | None:
    """Return the name in the address of a model's page, also of one that was read as a path; None without one."""
    match = re.search(r"\bhttps?:/{1,2}[^/]+/([^/]+/[^/?#]+)", text)
    return parse_name(match[1]) if match else None


def parse_name(text: str) -> HubName | None:
    """Return the name that the text is; None when it cannot be one.

    >>> parse_name("Qwen/Qwen3-0.6B@v1")
    HubName(repository='Qwen/Qwen3-0.6B', revision='v1')
    """
    repository, at, revision = text.partition("@")
    if not is_repository(repository) or (at and (not _REVISION.fullmatch(revision) or ".." in revision)):
        return None
    return HubName(repository, revision or MAIN)


def as_hub_name(model: Path) -> HubName | None:
    """Return the Hub name that a model setting holds. An existing path is that path, not a name."""
    return None if model.exists() else parse_name(str(model))


def cache_directory() -> Path:
    """Return where huggingface_hub keeps models: HF_HUB_CACHE, else `hub` in HF_HOME."""
    from huggingface_hub import constants  # 50 ms that a model by its path does not need

    return Path(constants.HF_HUB_CACHE)


def repository_directory(repository: str) -> Path:
    """Return the directory of a repository, which need not exist."""
    return cache_directory() / ("models--" + repository.replace("/", "--"))


def find_snapshot(name: HubName) -> Path | None:
    """Return the directory of a model that was fetched; None when that revision is not on this machine."""
    directory = repository_directory(name.repository)
    try:
        commit = (directory / "refs" / name.revision).read_text().strip()
    except OSError:
        commit = name.revision
    snapshot = directory / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def gguf_in(directory: Path) -> Path:
    """Return the GGUF file of a directory that has one, perhaps a folder below, and no safetensors; else itself.

    One in several parts is named by the first.
    """
    if not directory.is_dir() or any(directory.glob("*.safetensors*")):
        return directory
    files = gguf_files(directory)
    return files[0] if len(files) == 1 else directory


def gguf_files(directory: Path) -> list[Path]:
    """Return the GGUF files of a directory and of the folders in it, by name; of several parts the first."""
    try:
        files = sorted([*directory.glob("*.gguf"), *directory.glob("*/*.gguf")])
        return [file for file in files if not is_later_part(file)]
    except OSError:  # a folder in it cannot be read, or was just removed
        return []


def snapshot_of(path: Path) -> Path | None:
    """Return the snapshot that the path is, or that it is a GGUF file of, by its place; None for any other path."""
    places = (path, *path.parents) if path.suffix == ".gguf" else (path,)
    return next((one for one in places if one.parent.name == "snapshots"), None)


def repository_of(path: Path) -> str | None:
    """Return the repository of which the path is a snapshot or a GGUF file; None for any other path."""
    if (snapshot := snapshot_of(path)) is None:
        return None
    kind, _, rest = snapshot.parent.parent.name.partition("--")
    repository = rest.replace("--", "/")
    return repository if kind == "models" and is_repository(repository) else None


def require_local(model: Path) -> None:
    """Raise ModelError for a Hub name of a model that is not on this machine."""
    if name := as_hub_name(model):
        raise ModelError(
            f"model {name}: neither a directory nor a model on this machine; fetch it with `orcinus pull {name}`"
        )
