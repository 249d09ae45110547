"""Texts that drafts come from, beside the sequence's own: the last outputs of its tenant, and its predicted output."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from services.scheduler.core.ngrams import (
    GAP,
    MARGIN,
    MIN_MATCH,
    Float32,
    NgramIndex,
    Places,
    room_for_texts,
)
from services.scheduler.core.table import SlotTable
from services.scheduler.core.types import Int32, NewRequest, Rows

MAX_TENANTS = 64  # with outputs kept: those with the outputs that ended last
TENANT_TOKENS = 16_384  # kept of one tenant, with a GAP behind each output
INITIAL_SHARE = 0.7  # share of drafts that is taken to be right before any of a tenant was tried
MAX_SHARES = 4096  # tenants of which a share is kept: those that were served last


class History:
    """The last outputs by tenant, and how many drafts behind them were right; no tenant's drafts come from another
    one's. Shared by all replicas.

    drafted_tokens, accepted_tokens: drafts that were checked, and those that were right.
    """

    def __init__(self) -> None:
        self.drafted_tokens = self.accepted_tokens = 0
        self._tokens = room_for_texts(MAX_TENANTS, TENANT_TOKENS)
        self._sizes: npt.NDArray[np.int64] = np.zeros(MAX_TENANTS, np.int64)
        # Of these tokens, those in the index.
        self._indexed_tokens: npt.NDArray[np.int64] = np.zeros(MAX_TENANTS, np.int64)
        self._shares: OrderedDict[str, float] = OrderedDict()  # tenant -> of drafts that were right
        self._index = NgramIndex(self._tokens, MAX_TENANTS, TENANT_TOKENS)
        self._texts: OrderedDict[str, int] = OrderedDict()  # tenant -> number of its text

    @property
    def nbytes(self) -> int:
        """Return the memory that the outputs and their index take at most."""
        return self._tokens.nbytes + self._index.nbytes

    @property
    def texts(self) -> int:
        """Return the number of tenants with outputs."""
        return len(self._texts)

    def text(self, tenant: str) -> int:
        """Return the number of a tenant's text; -1: none."""
        return self._texts.get(tenant, -1)

    def share(self, tenant: str) -> float:
        """Return the share of a tenant's drafts that is taken to be right before any of a sequence was tried."""
        return self._shares.get(tenant, INITIAL_SHARE)

    def learn(self, tenant: str, share: float, rate: float) -> None:
        """Learn the share of drafts that was right in a sequence that has ended. rate: its weight."""
        before = self.share(tenant)
        self._shares[tenant] = before + rate * (share - before)
        self._shares.move_to_end(tenant)
        if len(self._shares) > MAX_SHARES:
            self._shares.popitem(last=False)

    def add(self, request: NewRequest, output: Int32) -> None:
        """Keep an output that has ended, its first tokens if it is long, for others of its tenant.

        Where there is no room the older half of the tenant's text goes.
        """
        if output.size <= MIN_MATCH or not request.speculate:
            return
        text = self._texts.get(request.tenant)
        if text is None:
            text = len(self._texts)
            if text == MAX_TENANTS:
                text = self._texts.popitem(last=False)[1]
                self._forget(text)
            self._texts[request.tenant] = text
        self._texts.move_to_end(request.tenant)
        half, first, size = TENANT_TOKENS // 2, MARGIN + text * TENANT_TOKENS, int(self._sizes[text])
        output = output[: half - 1]
        if size + output.size >= TENANT_TOKENS:
            kept = self._tokens[first + half : first + size].copy()
            self._forget(text)
            self._tokens[first : first + kept.size] = kept
            size = kept.size
        end = first + size + output.size
        self._tokens[first + size : end], self._tokens[end] = output, GAP
        self._sizes[text] = size + output.size + 1

    def find(self, texts: Rows, tails: Int32) -> Places:
        """Return where tails[i] stand in texts[i]; see NgramIndex.find."""
        for text in set(texts.tolist()):
            if self._indexed_tokens[text] < self._sizes[text]:
                self._index.extend(np.array([text]), self._sizes[text : text + 1] - 1)
                self._indexed_tokens[text] = self._sizes[text]
        return self._index.find(texts, tails)

    def follow(self, found: Places) -> tuple[Int32, Float32, Rows]:
        """Return what followed there; see NgramIndex.follow."""
        return self._index.follow(found, self._sizes[found.texts], repeats=False)

    def _forget(self, text: int) -> None:
        self._index.clear(np.array([text]))
        self._sizes[text] = self._indexed_tokens[text] = 0


class Predictions:
    """The predicted outputs of one replica's rows."""

    def __init__(self, table: SlotTable) -> None:
        self._width = table.width
        self._tokens = room_for_texts(table.slots, table.width)
        self._sizes: npt.NDArray[np.int64] = np.zeros(table.slots, np.int64)
        self._index = NgramIndex(self._tokens, table.slots, table.width)

    def set(self, row: int, prediction: Int32) -> None:
        """Make this the prediction of a row, as far as an output can be long."""
        prediction = prediction[: self._width - 1]
        first, size = MARGIN + row * self._width, prediction.size
        self._tokens[first : first + size], self._tokens[first + size] = prediction, GAP
        rows = np.array([row])
        self._index.clear(rows)
        self._sizes[row] = size + 1
        self._index.extend(rows, self._sizes[rows] - 1)

    def find(self, rows: Rows, tails: Int32) -> Places:
        """Return where tails[i] stand in the prediction of rows[i]; see NgramIndex.find."""
        return self._index.find(rows, tails)

    def follow(self, found: Places) -> tuple[Int32, Float32, Rows]:
        """Return what followed there; see NgramIndex.follow."""
        return self._index.follow(found, self._sizes[found.texts], repeats=False)
