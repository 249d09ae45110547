"""Find what followed the last tokens of many sequences where they stood before, in texts that only grow.

The latest positions of all runs of MIN_MATCH tokens are kept by hash, so a search costs by the rows that search and the
tokens that came since the last one, not by the length of the text. Used by Speculation, with arrays over rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from services.scheduler.core.types import Int32, Rows

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

MIN_MATCH = 3  # tokens that stood before as they stand now; fewer predict little
MAX_MATCH = 16  # a longer match is not looked for
MAX_PLACES = 8  # latest places that are compared; a power of 2
FOLLOWS = 32  # tokens that are kept of what followed
GAP = -1  # between two outputs of one text, and before its begin
MAX_HASHES = 2048  # of one text
MARGIN = max(MAX_MATCH, FOLLOWS)  # unused tokens before the first text and behind the last one

_FACTORS = (np.uint32(2654435761), np.uint32(2246822519), np.uint32(3266489917))  # odd, as in xxHash32
_AHEAD: npt.NDArray[np.int8] = np.arange(FOLLOWS, dtype=np.int8)
_LATEST_FIRST: Rows = np.arange(-1, -MAX_PLACES - 1, -1)[:, None]


@dataclass(slots=True)
class Places:
    """Where the last tokens of [k] rows stood before, at most MAX_PLACES each, the latest first."""

    rows: Rows  # of those that were looked for
    texts: Rows
    ends: Rows  # [MAX_PLACES, k] tokens of the text up to the place, it included; 0: none
    lengths: Rows  # [MAX_PLACES, k] tokens that match there
    longest: Rows  # [k]

    def select(self, mask: Bool) -> Places:
        """Return those of the rows, [k], that `mask` selects."""
        if mask.all():
            return self
        at = mask.nonzero()[0]
        return Places(self.rows[at], self.texts[at], self.ends[:, at], self.lengths[:, at], self.longest[at])


def room_for_texts(texts: int, width: int) -> Int32:
    """Return room for texts of at most `width` tokens, one after another, with MARGIN tokens before and behind them."""
    return np.zeros(texts * width + 2 * MARGIN, np.int32)


class NgramIndex:
    """Texts of at most `width` tokens each in one flat array, which the owner fills.

    Memory: MAX_PLACES + 1 numbers of 4 bytes for each hash of a text, at most MAX_HASHES, as far as texts are used.
    """

    def __init__(self, tokens: Int32, texts: int, width: int) -> None:
        """tokens: room_for_texts(texts, width)."""
        self._tokens = tokens
        self._ahead: Int32 = sliding_window_view(tokens, FOLLOWS)  # [i] tokens from i on
        self._windows: Int32 = sliding_window_view(tokens[::-1], MAX_MATCH)  # [size - i] those before i, last first
        self._base: Rows = np.arange(MARGIN, MARGIN + texts * width, width)  # the first token of each text
        self._bits = min((width // MAX_PLACES).bit_length() + 2, MAX_HASHES.bit_length() - 1)
        self._latest: Int32 = np.zeros((texts << self._bits, MAX_PLACES), np.int32)  # Places.ends, a ring
        self._count: Int32 = np.zeros(texts << self._bits, np.int32)  # places ever put there
        self._indexed_tokens: Int64 = np.zeros(texts, np.int64)  # tokens of which the runs are in the index

    @property
    def nbytes(self) -> int:
        """Return the memory that the index takes when all texts are used."""
        return self._latest.nbytes + self._count.nbytes

    def clear(self, texts: Rows) -> None:
        """Forget the content of some texts."""
        for text in texts[self._indexed_tokens[texts] > 0].tolist():
            part = slice(text << self._bits, (text + 1) << self._bits)
            self._latest[part], self._count[part] = 0, 0
        self._indexed_tokens[texts] = 0

    def tails(self, texts: Rows, sizes: Int64) -> Int32:
        """Return [n, MAX_MATCH] the last of the first sizes[i] tokens of texts[i], the last one first."""
        tails: Int32 = self._windows[self._tokens.size - self._base[texts] - sizes]
        if int(sizes.min(initial=MAX_MATCH)) < MAX_MATCH:
            tails[np.arange(MAX_MATCH) >= sizes[:, None]] = GAP
        return tails

    def extend(self, texts: Rows, sizes: Int64) -> None:
        """Add the runs that end in the first sizes[i] tokens of texts[i], distinct texts. What was added stays."""
        starts = np.maximum(self._indexed_tokens[texts], MIN_MATCH - 1)
        counts = np.maximum(sizes - starts, 0)
        ends = counts.cumsum()
        total = int(ends[-1])
        if not total:
            return
        self._indexed_tokens[texts] = starts + counts
        order = np.arange(total)
        which = texts.repeat(counts)
        place = (starts - ends + counts).repeat(counts)
        place += order
        at = self._base[which] + place
        tokens = self._tokens
        keys = self._keys(which, tokens[at - 2], tokens[at - 1], tokens[at])
        number = self._count[keys]
        self._count[keys[::-1]] = order[::-1]  # of equal keys the first one stays
        if (again := (self._count[keys] != order).nonzero()[0]).size:  # the same hash several times among these
            again = again[keys[again].argsort(kind="stable")]
            same = keys[again[1:]] == keys[again[:-1]]
            nth = order[: again.size].copy()
            nth[1:][same] = 0
            number[again] += order[1 : again.size + 1] - np.maximum.accumulate(nth)
        place += 1
        self._latest.reshape(-1)[keys * MAX_PLACES + (number & (MAX_PLACES - 1))] = place
        number += 1
        self._count[keys] = number  # of equal keys the last one stays

    def find(self, texts: Rows, tails: Int32) -> Places:
        """Return where tails[i] stand in texts[i], as far as extend() went; only rows that stand somewhere.

        tails: [n, MAX_MATCH], the last token first.
        """
        keys = self._keys(texts, tails[:, 2], tails[:, 1], tails[:, 0])
        count = self._count[keys]
        rows = count.nonzero()[0]
        if rows.size < keys.size:
            texts, tails, keys, count = texts[rows], tails[rows], keys[rows], count[rows]
        ring = count + _LATEST_FIRST
        ring &= MAX_PLACES - 1
        ring += keys * MAX_PLACES
        ends = self._latest.reshape(-1)[ring].astype(np.intp)
        same = np.zeros((MAX_PLACES, rows.size, MAX_MATCH + 1), np.bool_)  # the last one ends all matches
        np.equal(self._windows[self._tokens.size - self._base[texts] - ends], tails, out=same[:, :, :-1])
        lengths = np.minimum(same.argmin(axis=2), ends)
        longest = lengths.max(axis=0)
        return Places(rows, texts, ends, lengths, longest).select(longest >= MIN_MATCH)

    def follow(self, found: Places, sizes: Int64, repeats: bool) -> tuple[Int32, Float32, Rows]:
        """Return what followed the places of [k] rows in texts of `sizes` tokens.

        Where places differ, those count at which at least half as many tokens match as at the best one. Returns
        [k, FOLLOWS] tokens of the place with the most frequent first one, of equally frequent ones the latest, the
        logarithm of the share of places that agree up to and with each of them, -inf behind the end, and [k] how many
        there are. repeats: what reaches the end of a text goes on from its own beginning, as it may repeat itself.
        """
        votes = found.lengths >= np.maximum((found.longest + 1) // 2, MIN_MATCH)
        starts = self._base[found.texts] + found.ends
        texts = self._ahead[starts]
        left = sizes - found.ends  # tokens behind a place
        if (ending := (left < FOLLOWS) & votes).any():
            short = left[ending][:, None]
            ahead = _AHEAD % short if repeats else np.minimum(_AHEAD, short - 1)
            texts[ending] = self._tokens[starts[ending][:, None] + ahead]
        first = texts[:, :, 0]
        agreeing = ((first[:, None] == first) & votes).view(np.int8).sum(axis=1, dtype=np.int8)
        best = (agreeing * votes).argmax(axis=0)
        follows = texts[best, np.arange(best.size)]
        same = np.zeros((*texts.shape[:2], FOLLOWS + 1), np.bool_)  # the last one ends all
        np.equal(texts, follows, out=same[:, :, :-1])
        lengths = same.argmin(axis=2).astype(np.int8) * votes
        counts = (lengths[:, :, None] > _AHEAD).view(np.int8).sum(axis=0, dtype=np.int8)
        voters = votes.view(np.int8).sum(axis=0, dtype=np.int8)
        shares = SHARES.take(counts + (MAX_PLACES + 1) * voters[:, None])
        if repeats:
            return follows, shares, np.full(best.size, FOLLOWS)
        ends = count_leading(follows != GAP)
        shares[ends[:, None] <= _AHEAD] = -np.inf
        return follows, shares, ends

    def _keys(self, texts: Rows, first: Int32, second: Int32, third: Int32) -> Rows:
        """Return the places of runs of tokens in the index."""
        mixed = first.view(np.uint32) * _FACTORS[0]
        mixed += second.view(np.uint32) * _FACTORS[1]
        mixed += third.view(np.uint32) * _FACTORS[2]
        mixed ^= mixed >> np.uint32(15)
        mixed *= _FACTORS[0]
        mixed >>= np.uint32(32 - self._bits)
        keys: Rows = texts << self._bits
        keys += mixed
        return keys


with np.errstate(divide="ignore", invalid="ignore"):
    _LOGS: Float32 = np.log(np.arange(MAX_PLACES + 1, dtype=np.float32))
    SHARES: Float32 = (_LOGS - _LOGS[:, None]).reshape(-1)  # logarithm of i / j at j * (MAX_PLACES + 1) + i


def count_leading(mask: Bool) -> Rows:
    """Return how many values stand before the first false one of the last axis."""
    count = mask.argmin(axis=-1)
    lengths: Rows = np.where((count == 0) & mask[..., 0], mask.shape[-1], count)
    return lengths
