"""An engine with a device that is always behind: what a GPU may put off is put off until it is waited for.

The reference backend underneath, in float32, so that transformers is the oracle. A real GPU cannot be here, and the
emulated one computes in 16 bits.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.ops import Batch, CacheShape, Int32, Pending, Sampled, SamplingRows
from kernels.reference.backend import ReferenceOps, ReferencePrepared
from kernels.reference.cache import ReferenceCache
from services.worker import engine as engine_module
from services.worker.engine import Engine
from tests.engine.driver import make_engine

SLOTS = 64
T = TypeVar("T")
_one_at_a_time = threading.RLock()


class Later(Pending[T]):
    """Done when it is waited for, and all that was put off before it with it."""

    def __init__(self, queue: deque[Later[Any]], work: Callable[[], T], patience: int = 0) -> None:
        """patience: how often it says that it is not ready before it is."""
        self._queue, self.work, self.patience = queue, work, patience
        self.results: list[T] = []
        queue.append(self)

    def ready(self) -> bool:
        self.patience -= 1
        if self.patience < 0:
            self.wait()
        return bool(self.results)

    def wait(self) -> T:
        with _one_at_a_time:
            while not self.results:
                first = self._queue.popleft()
                first.results.append(first.work())
                del first.work  # and what it keeps alive
        return self.results[0]


class LateCache(ReferenceCache):
    """Copies are made when they are waited for, as a block that is used too early must see."""

    def __init__(self, shape: CacheShape, device: torch.device, seed: int, host: Tensor | None = None) -> None:
        super().__init__(shape, device, host)
        self.copies: deque[Later[Any]] = deque()
        self._random = np.random.default_rng(seed)

    def start_copy_out(self, blocks: Int32, host_blocks: Int32) -> Pending[int]:
        return self._later(lambda: self.copy_out(blocks, host_blocks))

    def start_copy_in(self, host_blocks: Int32, blocks: Int32, tier: Tensor | None = None) -> Pending[int]:
        kept = None if tier is None else weakref.ref(tier)

        def copy() -> None:
            source = kept and kept()
            assert kept is None or source is not None, "what is copied from was let go before"
            self.copy_in(host_blocks, blocks, source)

        return self._later(copy)

    def _later(self, copy: Callable[[], None]) -> Later[int]:
        def work() -> int:
            copy()
            return 1000

        return Later(self.copies, work, patience=int(self._random.integers(4)))


class LateOps(ReferenceOps):
    """Tokens are drawn when they are waited for, or when the device itself needs them."""

    overlaps = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self.seed = seed
        self._broadcast: deque[Later[Any]] = deque()
        self._last = np.full(SLOTS, -1, np.int32)  # of each slot

    def new_cache(self, shape: CacheShape, host: Tensor | None = None) -> ReferenceCache:
        return LateCache(shape, self.device, self.seed, host)

    def prepare(self, batch: Batch, cache: ReferenceCache) -> ReferencePrepared:
        with _one_at_a_time:
            if self._broadcast:
                self._broadcast[-1].wait()
        return super().prepare(dataclasses.replace(batch, tokens=self._resolved(batch.tokens)), cache)

    def sample_later(self, logits: Tensor, rows: SamplingRows, slots: Int32) -> Pending[Sampled]:
        def draw() -> Sampled:
            history = rows.history
            if history is not None:
                history = dataclasses.replace(history, ids=self._resolved(history.ids))
            sampled = self.sample(logits, dataclasses.replace(rows, history=history))
            self._last[slots] = np.where(sampled.status == 0, sampled.tokens, 0)
            return sampled

        return Later(self._broadcast, draw)

    def _resolved(self, ids: Any) -> Any:
        """Ids with the device's own tokens in place of ~slot."""
        late = ids < 0
        found = np.where(late, self._last[np.where(late, ~ids, 0)], ids).astype(ids.dtype)
        assert found.size == 0 or found.min() >= 0, "a token is asked for that was never drawn"
        return found


def make_late_engine(model: Path, seed: int = 0, **settings: Any) -> Engine:
    """As make_engine, by LateOps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "choose", lambda *_: (LateOps(seed), torch.float32))
        return make_engine(model, **settings)
