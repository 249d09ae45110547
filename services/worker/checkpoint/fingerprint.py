"""The digest of a model's weights: every byte of every tensor, read again by threads beside the load.

`model_hash` of Describe. Equal ones mean equal numbers, which is what a sequence that goes on at another worker and a
block of KV from one rely on. The threads run at a low priority: they take what the load leaves of the cores. Of the
ranks of a replica that read the same files, the lowest one computes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import socket
import threading
from collections.abc import Iterable
from pathlib import Path

from services.worker.parallel.state import ParallelState
from shared.errors import ModelError

DIGITS = 32
LEAF_BYTES = 8 << 20
"""Bytes with a digest of their own; the fingerprint is the digest of these, so that threads can share a tensor."""
READ_BYTES = 1 << 20
MAX_THREADS = 4
NICE = 10
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The same in all containers of a machine. Machines may have one name, and as copies the same numbers of files."""

Span = tuple[Path, int, int]
"""A file, the first byte of a tensor in it, and the bytes of the tensor."""


class Fingerprint:
    """Begins at once; `result` does what is left. The threads end with the process."""

    def __init__(
        self, head: bytes, spans: Iterable[Span], threads: int = 1, parallel: ParallelState | None = None
    ) -> None:
        """head: what decides the numbers besides those of the tensors: settings, names, types and shapes. threads: at
        most, and MAX_THREADS. parallel: makes its calls in the same order at all ranks. Raise ModelError where a
        file is gone, and RankError.
        """
        self._head = head
        self._parallel = parallel or ParallelState()
        spans = list(spans)
        readers = self._parallel.texts(_files(spans))
        self._reader = readers.index(readers[self._parallel.rank])
        leaves = [leaf for span in spans for leaf in _leaves(*span)] if self._reader == self._parallel.rank else []
        self._digests = [b""] * len(leaves)
        self._spans: queue.SimpleQueue[tuple[int, Span]] = queue.SimpleQueue()
        for numbered in enumerate(leaves):
            self._spans.put(numbered)
        self._errors: list[Exception] = []
        count = min(threads, MAX_THREADS, len(leaves))
        self._threads = [threading.Thread(target=self._run_aside, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def result(self) -> str:
        """Return DIGITS hex digits. Raise ModelError where a file cannot be read, and RankError."""
        self._run()  # threads of a low priority may wait for long on a busy machine
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise _unreadable(self._errors[0])
        computed = hashlib.sha256(hashlib.sha256(self._head).digest() + b"".join(self._digests)).hexdigest()[:DIGITS]
        return self._parallel.texts(computed)[self._reader]

    def _run_aside(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a thread has a priority of its own on Linux alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        self._run()

    def _run(self) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        while not self._errors:
            try:
                number, span = self._spans.get_nowait()
            except queue.Empty:
                return
            try:
                self._digests[number] = _digest(*span, buffer)
            except (OSError, EOFError) as error:
                self._errors.append(error)


def _files(spans: Iterable[Span]) -> str:
    """Return a text that is the same in processes of one machine that read the same files. Raise ModelError."""
    try:
        states = [(path, path.stat()) for path in sorted({path for path, _, _ in spans})]
    except OSError as error:
        raise _unreadable(error) from error
    files = [(str(path), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns) for path, state in states]
    machine = socket.gethostname()
    with contextlib.suppress(OSError):  # Linux alone has it
        machine += BOOT_ID.read_text()
    return hashlib.sha256(repr((machine, files)).encode()).hexdigest()


def _unreadable(error: Exception) -> ModelError:
    return ModelError(f"the weights could not be read again for their digest: {error}")


def _leaves(path: Path, start: int, size: int) -> Iterable[Span]:
    for at in range(0, max(size, 1), LEAF_BYTES):  # a tensor without a byte has a leaf, too
        yield path, start + at, min(LEAF_BYTES, size - at)


def _digest(path: Path, start: int, size: int, buffer: memoryview) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while size:
            count = file.readinto(buffer[: min(size, READ_BYTES)])
            if not count:
                raise EOFError(f"{path} is cut off")
            digest.update(buffer[:count])
            size -= count
    return digest.digest()
