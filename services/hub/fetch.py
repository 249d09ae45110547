"""Fetch a model from the Hub into huggingface_hub's cache: `orcinus pull`, and `orcinus up` with a name.

The order makes a half-fetched model invisible: small files, then weights, then the reference (`refs/main`) by which
the name is found. A large file grows in a file of its own, which the next run continues; it becomes a file of the cache
by a rename, after its SHA-256 was compared. Pickled weights are never fetched.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, disable_progress_bars

from services.hub.progress import Report, size
from services.hub.store import PARTIAL, Record, pulling
from shared.errors import ConfigurationError, ModelError
from shared.models.gguf.parts import part_names
from shared.models.hub import HubName, cache_directory, find_snapshot, repository_directory
from shared.models.model_files import MAX_FILE_BYTES, read_json
from shared.text.tokenizer import tokenizer_json

T = TypeVar("T")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
NEEDED = ("config.json", TOKENIZER)
SMALL = (
    *NEEDED, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SPARE_BYTES = 64 << 20  # of the disk, beside the files
PIECE_BYTES = 8 << 20
TRIES = 6  # without a byte of progress
MAX_WAIT_S = 300.0  # that the Hub may ask for at once

disable_progress_bars()


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository. Its digest: SHA-256 of a large file (Git LFS), else Git's SHA-1 of a blob."""

    name: str
    size: int
    digest: str
    is_large: bool


@dataclass(frozen=True, slots=True)
class Fetched:
    """Where the model lies now; new_bytes: what this run transferred."""

    path: Path
    commit: str
    total_bytes: int
    new_bytes: int


def pull(
    name: HubName, report: Report, file: str = "", before_weights: Callable[[Path, int], None] | None = None
) -> Fetched:
    """Fetch what is missing of a model, or its one GGUF `file`, with all its parts; return where it is.

    before_weights: called with the directory of the small files and the bytes of the weights, before any of these are
    fetched; it may raise to end the run. Raise ConfigurationError with the remedy.
    """
    if file and (not file.endswith(".gguf") or file.startswith("/") or ".." in file.split("/")):
        raise ConfigurationError(
            f"--file {file}: not a GGUF file; leave --file out for safetensors, or name one *.gguf"
        )
    if constants.is_offline_mode():
        return _offline(name)
    with pulling(name.repository), _Waits(report):
        try:
            return _Pull(name, report, file, before_weights).run()
        except UnreachableError as error:
            if find_snapshot(name) is None:
                raise
            report.note(f"warning: {error}; what is on this machine stays in use")
            return _offline(name)
        except OSError as error:
            raise ConfigurationError(
                f"{name}: cannot be written to {error.filename or cache_directory()}: {error.strerror or error}; free "
                "some room or set HF_HOME to another directory, then run the same command again"
            ) from error


def _offline(name: HubName) -> Fetched:
    snapshot = find_snapshot(name)
    if snapshot is None:
        raise ConfigurationError(
            f"{name}: not on this machine, and HF_HUB_OFFLINE forbids to fetch it; unset that, or copy the model "
            f"into {cache_directory()}"
        )
    total_bytes = sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file())
    return Fetched(snapshot, snapshot.name, total_bytes, 0)


class UnreachableError(ConfigurationError):
    """The Hub does not answer at all."""


class _Pull:
    """One run for one model."""

    def __init__(
        self, name: HubName, report: Report, file: str, before_weights: Callable[[Path, int], None] | None
    ) -> None:
        self.name = name
        self.repository = name.repository
        self.report = report
        self.file = file
        self.before_weights = before_weights
        self.directory = repository_directory(name.repository)
        self.record = Record.of(name.repository)
        self.commit = ""
        self.new_bytes = 0

    def run(self) -> Fetched:
        files = self._listed()
        if self.file:
            small, large = _small(files), self._named(files)
        else:
            self._refuse_without_safetensors(files)
            small, large = _small(files), _likely_weights(files)
            if missing := [name for name in NEEDED if name not in files]:
                raise ConfigurationError(
                    f"{self.name}: has no {missing[0]}, so it cannot be served; choose another repository"
                )
            if (count := files[TOKENIZER].size) > MAX_FILE_BYTES:
                raise ConfigurationError(
                    f"{self.name}: {TOKENIZER} has {count} bytes, at most {MAX_FILE_BYTES}; choose another repository"
                )
        self._check_disk([*small, *large])
        for one in small:
            self._fetch(one)
        if not self.file:
            tokenizer_json(self.directory / "snapshots" / self.commit / TOKENIZER)
            large = self._weights(files)
        weights_bytes = sum(one.size for one in large)
        snapshot = self.directory / "snapshots" / self.commit
        if self.before_weights is not None:
            self.before_weights(snapshot, weights_bytes)
        self._check_disk(large)
        missing_bytes = sum(one.size for one in large if not self._blob(one).exists())
        self.report.note(f"{self.name}: {size(weights_bytes)} of weights, {size(missing_bytes)} of them to fetch")
        for one in large:
            self._fetch(one)
        self._refer()
        total = sum(one.size for one in {one.name: one for one in [*small, *large]}.values())
        return Fetched(snapshot, self.commit, total, self.new_bytes)

    def _listed(self) -> dict[str, RemoteFile]:
        """Return the files of the revision, by name; fix the commit."""
        api = HfApi()
        info = self._asked(
            lambda: api.model_info(self.repository, revision=self.name.revision, files_metadata=True), "its files"
        )
        if info.id != self.repository:
            raise ConfigurationError(f"{self.repository}: the Hub calls it {info.id}; use that name")
        self.commit = self._checked(str(info.sha), False, self.repository, "commit")
        files = {}
        for one in info.siblings or ():
            lfs, name = one.lfs, one.rfilename
            digest = lfs.sha256 if lfs is not None else one.blob_id
            count = lfs.size if lfs is not None else one.size
            leads_out = name.startswith("/") or ".." in name.split("/") or not name.isprintable()
            if digest and count is not None and not leads_out:
                digest = self._checked(digest, lfs is not None, name, "digest")
                files[name] = RemoteFile(name, int(count), digest, lfs is not None)
        return files

    def _checked(self, digest: str, is_large: bool, name: str, what: str) -> str:
        """Return a digest of the Hub, which becomes a part of paths. Raise ConfigurationError for any other text."""
        if not re.fullmatch(r"[0-9a-f]{64}" if is_large else r"[0-9a-f]{40}", digest):
            raise ConfigurationError(
                f"{name}: its {what} is {digest[:200]!r} at {constants.ENDPOINT}, and a digest in hex is needed; check "
                "HF_ENDPOINT and any proxy"
            )
        return digest

    def _named(self, files: dict[str, RemoteFile]) -> list[RemoteFile]:
        """Return the named file, or all parts where it is one of several. Raise ConfigurationError."""
        names = part_names(self.file)
        if missing := [name for name in names if name not in files]:
            models = _gguf_models(files)
            remedy = f"choose one of {', '.join(models[:20])}" if models else "choose another repository"
            raise ConfigurationError(f"{self.name}: has no file {missing[0]}; {remedy}")
        return [files[name] for name in names]

    def _refuse_without_safetensors(self, files: dict[str, RemoteFile]) -> None:
        if SINGLE in files or INDEX in files:
            return
        if gguf := _gguf_models(files):
            raise ConfigurationError(
                f"{self.name}: has GGUF files only; choose one of {', '.join(gguf[:20])}: "
                f"`orcinus pull {self.name} --file {gguf[0]}`"
            )
        if parts := sorted(name for name in files if name.endswith(".gguf")):
            raise ConfigurationError(
                f"{self.name}: has {parts[0]}, and not all parts of that model; choose another repository"
            )
        pickles = sorted(name for name in files if any(fnmatch(name, pattern) for pattern in PICKLES))
        if pickles:
            raise ConfigurationError(
                f"{self.name}: has pickled weights only ({pickles[0]}), which run code when they are read; "
                "they are never fetched: choose a repository with safetensors"
            )
        raise ConfigurationError(f"{self.name}: has no {SINGLE} and no {INDEX}; choose a repository with safetensors")

    def _weights(self, files: dict[str, RemoteFile]) -> list[RemoteFile]:
        """Return the files of the weights; those of an index are fetched after it was read."""
        if SINGLE in files:
            return [files[SINGLE]]
        self._fetch(files[INDEX])
        index = self.directory / "snapshots" / self.commit / INDEX
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
            return [files[name] for name in names]
        except (ModelError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{self.name}: {INDEX} names files that the repository does not have, or is broken ({error}); "
                "choose another revision"
            ) from error

    def _check_disk(self, files: list[RemoteFile]) -> None:
        """Raise ConfigurationError when the disk has not enough room for what is missing."""
        missing = sum(one.size - self._partial_bytes(one) for one in files if not self._blob(one).exists())
        place = self.directory
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if missing and missing + SPARE_BYTES > free:
            raise ConfigurationError(
                f"{self.name}: needs {size(missing)} of disk, {size(free)} are free at {place}; free some, or set "
                "HF_HOME to a directory on another disk"
            )

    def _fetch(self, file: RemoteFile) -> None:
        """Fetch one file unless it is there, compare its digest, and give it its place in the snapshot."""
        key = f"{self.commit}/{file.name}"
        pointer = self.directory / "snapshots" / self.commit / file.name
        if pointer.exists() and self.record.checked.get(key) == file.digest and pointer.stat().st_size == file.size:
            return
        blob = self._blob(file)
        was_here = blob.exists()
        if was_here and not self._is_right(blob, file):
            self.report.note(f"{file.name}: damaged on this disk; fetching it again")
            blob.unlink()
            was_here = False
        is_ours = file.is_large and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE
        if is_ours and not was_here:
            self._transfer(file)
        # This fetches the blob of a small file, and one that plain HTTP does not carry; for others it makes the link.
        if file.is_large and not is_ours:
            self.report.begin(file.name, 0, file.size)
        self._asked(
            lambda: hf_hub_download(self.repository, file.name, revision=self.commit, tqdm_class=self._bar()), file.name
        )
        self.report.end()
        if not is_ours and not was_here:
            self._check(pointer, file)
            self.new_bytes += file.size
        self.record.checked[key] = file.digest
        if not was_here:
            self.record.fetched.add(key)
        self.record.write()

    def _transfer(self, file: RemoteFile) -> None:
        """Fetch a large file, from where the last run ended."""
        blob, partial = self._blob(file), self._partial(file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        before = self._partial_bytes(file)
        if before:
            self.report.note(f"{file.name}: going on at {size(before)} of {size(file.size)}")
        self.report.begin(file.name, before, file.size)
        try:
            self._grow(file, partial)
        except OSError as error:
            if error.errno is None:  # of the transfer, not of the disk
                partial.unlink(missing_ok=True)
                raise ConfigurationError(
                    f"{file.name}: the Hub sent another size than the {file.size} bytes that it states; run the same "
                    "command again, and if it stays so check HF_ENDPOINT and any proxy"
                ) from error
            raise ConfigurationError(
                f"{partial}: cannot be written: {error.strerror or error}; free some room, then run the same command "
                "again: it goes on from there"
            ) from error
        finally:
            self.report.end()
        self.new_bytes += file.size - before
        self._check(partial, file)
        os.replace(partial, blob)

    def _grow(self, file: RemoteFile, partial: Path) -> None:
        url = hf_hub_url(self.repository, file.name, revision=self.commit)
        left, last = TRIES, -1
        while (done := self._partial_bytes(file)) < file.size or not partial.exists():
            left = TRIES if done > last else left - 1
            last = max(last, done)
            with partial.open("ab") as out:
                out.truncate(done)

                def get(out: Any = out, done: int = done) -> None:
                    # The address of the Hub: a redirect to another host leaves the token behind.
                    http_get(
                        url, out, resume_size=done, expected_size=file.size, displayed_filename=file.name,
                        headers={**build_hf_headers(), "Accept-Encoding": "identity"}, tqdm_class=self._bar(),
                    )  # fmt: skip

                try:
                    self._asked(get, file.name, is_transfer=True)
                except httpx2.TransportError as error:
                    out.flush()
                    if left <= 1:
                        raise ConfigurationError(
                            f"{file.name}: the connection was lost at {size(self._partial_bytes(file))} of "
                            f"{size(file.size)} ({type(error).__name__}); run the same command again: it goes on from "
                            "there"
                        ) from error
                    self.report.note(f"{file.name}: connection lost at {size(self._partial_bytes(file))}; going on")
                out.flush()
                os.fsync(out.fileno())

    def _bar(self) -> type:
        """Return what huggingface_hub takes for a tqdm: it reports here."""
        report = self.report

        class Bar:
            def __init__(self, **_: Any) -> None:
                """Nothing is known here that was not said before."""

            def update(self, count: float | None = 1) -> None:
                report.advance(int(count or 0))

            def close(self) -> None:
                """The bar ends with the file."""

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *_: object) -> None:
                self.close()

        return Bar

    def _check(self, path: Path, file: RemoteFile) -> None:
        """Raise ConfigurationError, and remove the file, when its digest is not the one that the Hub states."""
        if self._is_right(path, file):
            return
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        kind = "SHA-256" if file.is_large else "Git SHA-1"
        raise ConfigurationError(
            f"{file.name}: {kind} is not {file.digest}, as the Hub states, so the file was removed; run the same "
            "command again, and if it stays so check HF_ENDPOINT and any proxy"
        )

    def _is_right(self, path: Path, file: RemoteFile) -> bool:
        if path.stat().st_size != file.size:
            return False
        digest = hashlib.sha256() if file.is_large else hashlib.sha1(f"blob {file.size}\0".encode())  # noqa: S324
        shown = file.size > 256 << 20
        if shown:
            self.report.begin(f"checking {file.name}", 0, file.size)
        with path.open("rb") as source:
            while piece := source.read(PIECE_BYTES):
                digest.update(piece)
                if shown:
                    self.report.advance(len(piece))
        if shown:
            self.report.end()
        return digest.hexdigest() == file.digest

    def _refer(self) -> None:
        """Make the name find the commit: from now on the model is whole."""
        if self.name.revision == self.commit:
            return
        path = self.directory / "refs" / self.name.revision
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(self.commit)
        os.replace(new, path)

    def _asked(self, call: Callable[[], T], what: str, is_transfer: bool = False) -> T:
        """Return the Hub's answer. Wait where it asks for that; raise ConfigurationError in words.

        is_transfer: a lost connection is the caller's, which goes on from where it was.
        """
        for left in reversed(range(TRIES)):
            try:
                return call()
            except HfHubHTTPError as error:
                status = error.response.status_code
                if (status != 429 and status < 500) or not left:
                    raise self._in_words(error, what) from error
                wait_s = min(MAX_WAIT_S, _retry_after_s(error))
                self.report.note(f"the Hub answers {status} for {what}; trying again in {wait_s:g} s")
                time.sleep(wait_s)
            except LocalEntryNotFoundError as error:  # the request before this one failed, and nothing is here
                cause = error.__cause__
                if isinstance(cause, HfHubHTTPError):
                    raise self._in_words(cause, what) from error
                raise ConfigurationError(
                    f"{self.name}: the Hub did not answer for {what} ({type(cause or error).__name__}); check the "
                    "network, then run the same command again"
                ) from error
            except OfflineModeIsEnabled as error:
                raise ConfigurationError(f"{self.name}: HF_HUB_OFFLINE forbids to fetch {what}; unset it") from error
            except httpx2.TransportError as error:
                if is_transfer:
                    raise
                if not left or isinstance(error, httpx2.ConnectError):
                    raise UnreachableError(
                        f"{self.name}: the Hub at {constants.ENDPOINT} cannot be reached ({error}); check the network "
                        "and HF_ENDPOINT, or give a directory"
                    ) from error
                time.sleep(1)
        raise AssertionError("the loop returns or raises")

    def _in_words(self, error: HfHubHTTPError, what: str) -> ConfigurationError:
        page = f"{constants.ENDPOINT}/{self.repository}"
        has_token = get_token() is not None
        status = error.response.status_code
        if isinstance(error, GatedRepoError):
            remedy = "with the account of HF_TOKEN" if has_token else "and set HF_TOKEN to a token of your account"
            return ConfigurationError(f"{self.name}: gated; accept its conditions at {page} {remedy}")
        if isinstance(error, RevisionNotFoundError):
            return ConfigurationError(f"{self.repository}: has no revision {self.name.revision}; see {page}/tree/main")
        if isinstance(error, RepositoryNotFoundError):
            private = "HF_TOKEN has no access to it" if has_token else "it is private and needs HF_TOKEN"
            return ConfigurationError(
                f"{self.repository}: neither a directory here nor a model at {constants.ENDPOINT}, or {private}; "
                "check the name"
            )
        if isinstance(error, EntryNotFoundError):
            return ConfigurationError(f"{self.name}: has no file {what}; run the same command again")
        if status in (401, 403):
            return ConfigurationError(
                f"{self.name}: the Hub answers {status} for {what}; "
                + ("check the rights of HF_TOKEN" if has_token else "set HF_TOKEN to a token that may read it")
            )
        if status == 429:
            return ConfigurationError(
                f"{self.name}: the Hub refuses more requests for now (429); "
                + ("try again later" if has_token else "set HF_TOKEN for a higher limit, or try again later")
            )
        return ConfigurationError(f"{self.name}: the Hub answers {status} for {what}; try again later")

    def _blob(self, file: RemoteFile) -> Path:
        return self.directory / "blobs" / file.digest

    def _partial(self, file: RemoteFile) -> Path:
        return self.directory / "blobs" / f"{file.digest}{PARTIAL}"

    def _partial_bytes(self, file: RemoteFile) -> int:
        """Return how much of a file is here; a file that is longer than it may be begins anew."""
        try:
            found = self._partial(file).stat().st_size
        except OSError:
            return 0
        return found if found <= file.size else 0


def _likely_weights(files: dict[str, RemoteFile]) -> list[RemoteFile]:
    """Return what an index that is not read yet will most likely name."""
    if SINGLE in files:
        return [files[SINGLE]]
    return [file for name, file in files.items() if fnmatch(name, "model-*-of-*.safetensors")]


def _gguf_models(files: Collection[str]) -> list[str]:
    """Return the GGUF files to choose from, by name; of a model in several parts, if all are there, the first."""
    names = [name for name in files if name.endswith(".gguf") and part_names(name)[0] == name]
    return sorted(name for name in names if all(part in files for part in part_names(name)))


def _small(files: dict[str, RemoteFile]) -> list[RemoteFile]:
    return [file for name, file in files.items() if any(fnmatch(name, pattern) for pattern in SMALL)]


def _retry_after_s(error: HfHubHTTPError) -> float:
    try:
        return max(0.0, float(error.response.headers.get("Retry-After", "2")))
    except ValueError:
        return 2.0


class _Waits(logging.Handler):
    """Pass on that huggingface_hub waits, which it says to its log alone."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report
        self._logger = logging.getLogger("huggingface_hub")

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Rate limited. Waiting"):
            self._report.note(f"the Hub asks for a pause: {text.removeprefix('Rate limited. ').lower()}")

    def __enter__(self) -> _Waits:
        """Take the place of its handlers: their lines hold signed addresses."""
        self._before = self._logger.handlers, self._logger.level, self._logger.propagate
        self._logger.handlers, self._logger.propagate = [self], False
        self._logger.setLevel(logging.WARNING)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.handlers, level, self._logger.propagate = self._before
        self._logger.setLevel(level)
