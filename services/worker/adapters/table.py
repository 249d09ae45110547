"""The adapters of a Run by number, as the scheduler names them, and those that are kept from before.

The scheduler gives each adapter a number from 1 to --max-loras, so no more are loaded than that. A number that is given
again then names another adapter. Adapters of an earlier Run stay packed until others need their places: the least
recently named goes first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kernels.ops import Int32
from protos import worker_pb2
from services.worker.adapters.peft import read_adapter
from services.worker.models.adapters import AdapterRows
from services.worker.models.config import DecoderConfig
from services.worker.parallel.state import ParallelState
from shared.errors import ModelError, ProtocolError
from shared.models.adapters import DIGEST_BYTES, STORE

log = logging.getLogger("orcinus.worker")


class AdapterTable:
    """The adapters of one rank."""

    def __init__(
        self,
        folder: Path | None,
        rows: AdapterRows,
        config: DecoderConfig,
        limits: tuple[int, int],
        parallel: ParallelState,
    ) -> None:
        """folder: --adapter-dir; None means none. config: of the whole model. limits: adapters, rank of each."""
        self._store = None if folder is None else folder / STORE
        self.max_adapters, self.max_rank = limits if folder is not None else (0, 0)
        self._rows, self._config, self._parallel = rows, config, parallel
        self._places: dict[bytes, int] = {}  # digest -> number under which it is packed, least recently named first
        self._numbers: dict[int, bytes] = {}  # of this Run: number -> digest
        self._problems: dict[int, str] = {}

    def begin_run(self) -> None:
        """Forget the numbers, not what is packed."""
        self._numbers.clear()
        self._problems.clear()

    def update(self, adapters: Iterable[worker_pb2.Adapter]) -> list[int]:
        """Load what a step names; return the numbers that every rank has loaded.

        One that cannot be loaded is left out, with a warning in the log. Raise ProtocolError for a number out of range.
        """
        named = []
        for adapter in adapters:
            if not 1 <= adapter.number <= self.max_adapters:
                raise ProtocolError(f"adapters: number {adapter.number} is outside 1..{self.max_adapters}")
            if len(adapter.digest) != DIGEST_BYTES:
                raise ProtocolError(f"adapters: a digest of {len(adapter.digest)} bytes, {DIGEST_BYTES} are needed")
            self._numbers[adapter.number] = adapter.digest
            self._problems[adapter.number] = self._load(adapter.digest)
            named.append(adapter.number)
        loaded = self._parallel.least([int(not self._problems[number]) for number in named])
        for number, everywhere in zip(named, loaded, strict=True):
            if not everywhere and not self._problems[number]:
                self._problems[number] = "another rank cannot load it; see its log"
        return [number for number, everywhere in zip(named, loaded, strict=True) if everywhere]

    def problem(self, number: int) -> str:
        """Return why a sequence cannot have this adapter; empty where it can, and for 0, the base."""
        return self._problems.get(number, f"adapter {number} was not named") if number else ""

    def places(self, numbers: Int32) -> Int32:
        """Return under which numbers the adapters with these numbers of the scheduler are packed; 0 stays 0."""
        by_number = np.zeros(self.max_adapters + 1, np.int32)
        for number, digest in self._numbers.items():
            by_number[number] = self._places.get(digest, 0)
        return by_number[numbers]

    def _load(self, digest: bytes) -> str:
        """Pack an adapter unless it is; return why it cannot be loaded."""
        if digest in self._places:
            self._places[digest] = self._places.pop(digest)
            return ""
        if self._store is None:
            return "this worker has no --adapter-dir"
        try:
            adapter = read_adapter(self._store / digest.hex(), digest, self._config, self.max_rank)
            place = self._free_place()
            try:
                self._rows.load(place, adapter)
            except BaseException:
                self._rows.unload(place)  # matrices that came before the one that failed
                raise
        except (ModelError, OSError, MemoryError, RuntimeError) as error:  # torch has RuntimeError for no memory
            log.warning("adapter %s cannot be loaded: %s", digest.hex(), error)
            if isinstance(error, ModelError):
                return str(error)
            return f"the adapter cannot be loaded ({type(error).__name__}); see the log of the worker"
        self._places[digest] = place
        log.info("adapter %s is loaded: %d matrices", digest.hex(), len(adapter))
        return ""

    def _free_place(self) -> int:
        """Return a place without an adapter; unload the one that was named longest ago and not in this Run."""
        if len(self._places) < self.max_adapters:
            return min(set(range(1, self.max_adapters + 1)).difference(self._places.values()))
        named = set(self._numbers.values())
        oldest = next(digest for digest in self._places if digest not in named)
        place = self._places.pop(oldest)
        self._rows.unload(place)
        return place
