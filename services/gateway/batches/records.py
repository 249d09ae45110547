"""Keep batches on disk: what a client ordered, how far it is, and which gateway may say so.

A batch is a folder of its tenant: `batch.json`, written once; a link to the input, so that deleting the file does not
end the batch; `cancel`, once a client asked for it; and for each gateway that drove it a state and a journal
(journal.py), both with the epoch of its lease in their names. The highest epoch counts. A gateway that lost its lease
may go on writing under its own epoch: no reader looks there, and what was in its journal when the next epoch began is
`sealed` in the state of that one. The folder `open` names the batches that have not ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from services.gateway.batches.files import FileStore, create, flush_folder, open_plain, write_whole
from services.gateway.batches.journal import journal_name, whole_bytes
from services.gateway.batches.usage import Usage
from services.gateway.errors import RETRY, ApiError

BATCH_ID = re.compile(r"batch_[0-9a-f]{30}")
MARKER = re.compile(r"([0-9]{12})\.([0-9a-f]{32})\.(batch_[0-9a-f]{30})")
STATE = re.compile(r"state-([0-9]{16})\.json")
EPOCHAL = re.compile(r"state-|rows-|\.state-|\.good-|\.bad-")
"""Beginnings of the names that belong to one epoch."""
ENDED = ("completed", "failed", "expired", "cancelled")
MAX_BATCHES = 1000
"""Of a tenant. Beyond, the oldest that has ended is forgotten; when none has, a new one is refused."""
STALE_S = 60.0
"""Age at which a marker without a batch belongs to a gateway that died."""


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """What a client ordered."""

    id: str
    tenant: str
    key: str  # that pays for the lines; its id
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_kept_s: int | None = None
    requests: int = 0  # of a batch of messages


@dataclass(frozen=True, slots=True)
class BatchState:
    """How far a batch is, as the gateway of one epoch knows. sealed: bytes that count of earlier journals."""

    epoch: int = 0
    status: str = "validating"
    total: int = 0
    completed: int = 0
    failed: int = 0
    expired: int = 0  # of those that failed; known at the end
    usage: Usage = field(default_factory=Usage)
    times: dict[str, int] = field(default_factory=dict)  # in_progress_at, completed_at, ...
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    sealed: list[tuple[int, int]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)  # ids for the output and the error file, once it is about to end

    def move(self, status: str, now: float, **fields: Any) -> BatchState:
        """Return the state with another status and its time."""
        return replace(self, status=status, times={**self.times, f"{status}_at": int(now)}, **fields)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as it is now."""

    order: BatchOrder
    state: BatchState
    cancelling_at: int | None

    @property
    def status(self) -> str:
        """Return the status as OpenAI's API has it."""
        is_cancelled = self.cancelling_at is not None and self.state.status not in ENDED
        return "cancelling" if is_cancelled else self.state.status

    def body(self) -> dict[str, Any]:
        """Return the batch object of OpenAI's API."""
        order, state = self.order, self.state
        names = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelled_at")
        return {
            "id": order.id,
            "object": "batch",
            "endpoint": order.endpoint,
            "errors": {"object": "list", "data": state.errors} if state.errors else None,
            "input_file_id": order.input_file_id,
            "completion_window": order.completion_window,
            "status": self.status,
            "output_file_id": state.output_file_id,
            "error_file_id": state.error_file_id,
            "created_at": order.created_at,
            "expires_at": order.expires_at,
            **{name: state.times.get(name) for name in names},
            "cancelling_at": self.cancelling_at,
            "request_counts": {"total": state.total, "completed": state.completed, "failed": state.failed},
            "usage": state.usage.body(),
            "metadata": order.metadata,
        }


@dataclass(frozen=True, order=True, slots=True)
class OpenBatch:
    """A batch that has not ended, by its age."""

    created_at: int
    owner: str
    id: str


class Outdated(Exception):  # noqa: N818 - an event, not an error
    """A gateway with a later epoch drives the batch."""


_ORDER = TypeAdapter(BatchOrder)
_STATE = TypeAdapter(BatchState)


class BatchStore:
    """The batches of all tenants."""

    def __init__(self, files: FileStore) -> None:
        self._files = files

    def create(self, order: BatchOrder) -> Batch:
        """Keep a new batch. Raise ApiError(404, 413, 429, 503)."""
        owner = self._files.owner(order.tenant)
        folder = self._files.folder(owner)
        source = self._files.path(order.tenant, order.input_file_id)
        with self._files.lock(folder):
            if self._files.room(owner) < 0:
                text = "files: their quota of bytes is used up; delete files that are not needed"
                raise ApiError(413, text, code="file_quota_exceeded")
            self._make_room(order.tenant, folder)
            new_folder = folder / f".new-{order.id}"
            new_folder.mkdir(mode=0o700)
            try:
                os.link(source, new_folder / "input", follow_symlinks=False)
                write_whole(new_folder / "batch.json", orjson.dumps(order))
                marker = self._marker(OpenBatch(order.created_at, owner, order.id))
                marker.parent.mkdir(mode=0o700, exist_ok=True)
                create(marker).close()
                flush_folder(marker.parent)
                new_folder.rename(folder / order.id)
            except BaseException:
                shutil.rmtree(new_folder, ignore_errors=True)
                raise
            flush_folder(folder)
        return Batch(order, BatchState(), None)

    def get(self, tenant: str, batch_id: str) -> Batch | None:
        """Return a batch of a tenant; None also for one that cannot be read."""
        folder = self._files.folder(self._files.owner(tenant))
        return self._read(folder / batch_id) if BATCH_ID.fullmatch(batch_id) else None

    def find(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch of a tenant. Raise ApiError(404)."""
        batch = self.get(tenant, batch_id)
        if batch is None:
            raise unknown_batch(batch_id)
        return batch

    def ids(self, tenant: str) -> list[str]:
        """Return the ids of a tenant's batches, the oldest first."""
        folder = self._files.folder(self._files.owner(tenant))
        return sorted(name for name in os.listdir(folder) if BATCH_ID.fullmatch(name))

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Ask the gateway that drives a batch to end it. Raise ApiError(404, 409)."""
        batch = self.find(tenant, batch_id)
        if batch.status in ENDED:
            text = f"batch {batch_id}: its status is {batch.status}; only one that has not ended can be cancelled"
            raise ApiError(409, text, param="batch_id", code="batch_ended")
        folder = self.folder(self._files.owner(tenant), batch_id)
        if batch.cancelling_at is None:
            write_whole(folder / "cancel", b"%d" % time.time())
        return self.find(tenant, batch_id)

    def delete(self, tenant: str, batch_id: str) -> None:
        """Forget a batch that has ended, and delete its files. Raise ApiError(404, 409)."""
        batch = self.find(tenant, batch_id)
        if batch.status not in ENDED:
            text = f"batch {batch_id}: its status is {batch.status}; cancel it first, or wait until it has ended"
            raise ApiError(409, text, param="batch_id", code="batch_not_ended")
        for file_id in (batch.order.input_file_id, batch.state.output_file_id, batch.state.error_file_id):
            if file_id is not None:
                with contextlib.suppress(ApiError):  # the client has deleted it
                    self._files.delete(tenant, file_id)
        _remove(self.folder(self._files.owner(tenant), batch_id))

    def find_unfinished(self) -> list[OpenBatch]:
        """Return the batches that have not ended, the oldest first."""
        root = self._files.root
        if root is None or not (root / "open").is_dir():
            return []
        matches = (MARKER.fullmatch(name) for name in os.listdir(root / "open"))
        return sorted(OpenBatch(int(match[1]), match[2], match[3]) for match in matches if match is not None)

    def folder(self, owner: str, batch_id: str) -> Path:
        """Return the folder of a batch."""
        return self._files.folder(owner) / batch_id

    def order(self, batch: OpenBatch) -> BatchOrder | None:
        """Return what was ordered; None, and no marker any more, where there is no such batch."""
        stored_batch = self._read(self.folder(batch.owner, batch.id))
        if stored_batch is not None and stored_batch.state.status not in ENDED:
            return stored_batch.order
        marker = self._marker(batch)
        if stored_batch is not None:
            self._forget(batch, stored_batch.state.epoch)
        elif marker.exists() and time.time() - marker.stat().st_mtime > STALE_S:
            marker.unlink(missing_ok=True)
        return None

    def epoch(self, batch: OpenBatch) -> int:
        """Return the last epoch of a batch; 0 where there is no such batch."""
        stored = self._read(self.folder(batch.owner, batch.id))
        return 0 if stored is None else stored.state.epoch

    def take_over(self, batch: OpenBatch, epoch: int) -> BatchState:
        """Begin an epoch and return its state; of earlier ones nothing stays but what counts. Raise Outdated."""
        folder = self.folder(batch.owner, batch.id)
        with self._files.lock(folder.parent):
            before = self._state(folder)
            if before.epoch >= epoch or before.status in ENDED:
                raise Outdated
            sealed = list(before.sealed)
            if before.epoch and (whole := whole_bytes(folder, before.epoch)):
                sealed.append((before.epoch, whole))
            new_state = replace(before, epoch=epoch, sealed=sealed)
            self._put(folder, new_state)
            names = {_state_name(epoch), *(journal_name(each) for each, _ in sealed)}
            for path in folder.iterdir():
                if path.name not in names and EPOCHAL.match(path.name):
                    path.unlink(missing_ok=True)
        return new_state

    def write(self, batch: OpenBatch, state: BatchState, first: Callable[[], None] | None = None) -> None:
        """Write the next state of an epoch. first: called while no other epoch can begin. Raise Outdated."""
        folder = self.folder(batch.owner, batch.id)
        with self._files.lock(folder.parent):
            if self._state(folder).epoch != state.epoch:
                raise Outdated
            if first is not None:
                first()
            self._put(folder, state)

    def close(self, batch: OpenBatch, state: BatchState, publish: Callable[[], None] | None = None) -> None:
        """Write the last state of a batch, and remove what is needed no more. publish: makes its output files.

        Raise Outdated; then nothing was published.
        """
        self.write(batch, state, publish)
        self._forget(batch, state.epoch)

    def _forget(self, batch: OpenBatch, epoch: int) -> None:
        """Remove what a batch that has ended needs no more, the marker last: until then `order` does it again."""
        folder = self.folder(batch.owner, batch.id)
        for path in folder.iterdir():
            if path.name not in ("batch.json", "cancel", _state_name(epoch)):
                path.unlink(missing_ok=True)
        self._marker(batch).unlink(missing_ok=True)

    def is_cancelled(self, batch: OpenBatch) -> bool:
        """Return whether the client wants the batch to end."""
        return (self.folder(batch.owner, batch.id) / "cancel").exists()

    def sweep(self, owner: str, retention_s: float) -> None:
        """Forget batches of a tenant that ended long ago, and rests of gateways that died."""
        folder = self._files.folder(owner)
        for name in os.listdir(folder):
            path = folder / name
            if BATCH_ID.fullmatch(name):
                stored = self._read(path)
                if stored is not None and stored.status in ENDED and _ended_at(stored) + retention_s < time.time():
                    _remove(path)
            elif name.startswith(".new-") and path.is_dir() and time.time() - path.stat().st_mtime > STALE_S:
                shutil.rmtree(path, ignore_errors=True)

    def _make_room(self, tenant: str, folder: Path) -> None:
        """Forget the oldest batch that has ended when there are as many as there may be. Raise ApiError(429)."""
        ids = self.ids(tenant)
        if len(ids) < MAX_BATCHES:
            return
        stored = (self._read(folder / batch_id) for batch_id in ids)
        ended_batch = next((batch for batch in stored if batch is not None and batch.status in ENDED), None)
        if ended_batch is None:
            text = f"batches: {MAX_BATCHES} have not ended, which is the most; {RETRY}, or cancel some"
            raise ApiError(429, text, code="too_many_batches", retry_after_s=60)
        _remove(folder / ended_batch.order.id)

    def _marker(self, batch: OpenBatch) -> Path:
        folder = self._files.folder(batch.owner).parent / "open"
        return folder / f"{batch.created_at:012d}.{batch.owner}.{batch.id}"

    def _read(self, folder: Path) -> Batch | None:
        """Return a batch; None also for one that cannot be read."""
        try:
            with open_plain(folder / "batch.json") as record:
                order = _ORDER.validate_json(record.read())
            cancel = folder / "cancel"
            cancelling_at = int(cancel.read_bytes()) if cancel.exists() else None
            return Batch(order, self._state(folder), cancelling_at) if order.id == folder.name else None
        except (FileNotFoundError, ValidationError, ValueError):
            return None

    def _state(self, folder: Path) -> BatchState:
        """Return the state of the highest epoch. Raise FileNotFoundError, ValidationError."""
        while True:
            epochs = [int(match[1]) for name in os.listdir(folder) if (match := STATE.fullmatch(name))]
            if not epochs:
                return BatchState()
            try:
                with open_plain(folder / _state_name(max(epochs))) as state:
                    return _STATE.validate_json(state.read())
            except FileNotFoundError:  # a later epoch has just ended the batch
                continue

    @staticmethod
    def _put(folder: Path, state: BatchState) -> None:
        write_whole(folder / _state_name(state.epoch), orjson.dumps(state))


def _state_name(epoch: int) -> str:
    return f"state-{epoch:016d}.json"


def _ended_at(batch: Batch) -> int:
    return batch.state.times.get(f"{batch.state.status}_at", batch.order.created_at)


def unknown_batch(batch_id: str) -> ApiError:
    """Return the 404; the same for a batch of another tenant."""
    text = f"batch {batch_id[:80]!r} not found; GET /v1/batches lists those of the key's tenant"
    return ApiError(404, text, param="batch_id", code="batch_not_found")


def _remove(folder: Path) -> None:
    """Remove the folder of a batch: first its name, so that no half of it is ever a batch."""
    removed_folder = folder.with_name(f".new-{folder.name}")
    with contextlib.suppress(OSError):
        folder.rename(removed_folder)
    shutil.rmtree(removed_folder, ignore_errors=True)
