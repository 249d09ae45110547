"""Find what followed the last tokens of many sequences where they stood before, in texts that only grow.

The latest positions of all runs of MIN_MATCH tokens are kept by hash, so a search costs by the rows that search and the
tokens that came since the last one, not by the length of the text. Used by Speculation, with arrays over rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

_FACTORS = (np.uint32(2654435761), np.uint32(2246822519), np.uint32(3266489917))  # odd, as in xxHash32
_BACK: npt.NDArray[np.intp] = np.arange(MAX_MATCH)
_AHEAD: npt.NDArray[np.intp] = np.arange(FOLLOWS)
NO_PLACES: Rows = np.zeros((0, MAX_PLACES), np.intp)


@dataclass(slots=True)
class Places:
    """Where the last tokens of [k] rows stood before, at most MAX_PLACES each, the latest first."""

    rows: Rows  # of those that were looked for
    texts: Rows
    places: Rows  # [k, MAX_PLACES] of the last of the tokens
    lengths: Rows  # [k, MAX_PLACES] tokens that match there
    longest: Rows  # [k]

    def where(self, mask: Bool) -> Places:
        """Return those of the rows, [k], that `mask` selects."""
        if mask.all():
            return self
        return Places(self.rows[mask], self.texts[mask], self.places[mask], self.lengths[mask], self.longest[mask])


class NgramIndex:
    """Texts of at most `width` tokens each in one flat array, which the owner fills.

    Memory: MAX_PLACES + 1 numbers of 4 bytes for each hash of a text, at most MAX_HASHES, as far as texts are used.
    """

    def __init__(self, tokens: Int32, texts: int, width: int) -> None:
        """tokens: [texts * width], text after text."""
        self._tokens = tokens
        self._width = width
        self._bits = min((width // MAX_PLACES).bit_length() + 2, MAX_HASHES.bit_length() - 1)
        self._latest: Int32 = np.zeros((texts << self._bits, MAX_PLACES), np.int32)  # positions + 1; 0: none
        self._count: Int32 = np.zeros(texts << self._bits, np.int32)  # positions ever put there
        self._indexed: Int64 = np.zeros(texts, np.int64)  # positions that are in the index

    @property
    def nbytes(self) -> int:
        """Return the memory that the index takes when all texts are used."""
        return self._latest.nbytes + self._count.nbytes

    def clear(self, texts: Rows) -> None:
        """Forget the content of some texts."""
        for text in texts[self._indexed[texts] > 0].tolist():
            part = slice(text << self._bits, (text + 1) << self._bits)
            self._latest[part], self._count[part] = 0, 0
        self._indexed[texts] = 0

    def extend(self, texts: Rows, sizes: Int64) -> None:
        """Add the runs that end in the first sizes[i] tokens of texts[i], distinct texts. What was added stays."""
        starts = np.maximum(self._indexed[texts], MIN_MATCH - 1)
        counts = np.maximum(sizes - starts, 0)
        total = int(counts.sum())
        if not total:
            return
        self._indexed[texts] = np.maximum(sizes, starts)
        which = np.repeat(texts, counts)
        place = np.arange(total) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        at = which * self._width + place
        tokens = self._tokens
        keys = self._keys(which, tokens[at - 2], tokens[at - 1], tokens[at])
        order = keys.argsort(kind="stable")
        keys, place = keys[order], place[order]
        number = self._count[keys]
        again = keys[1:] == keys[:-1]
        if again.any():  # the same hash several times among these
            first = np.concatenate([[True], ~again])
            number += np.arange(total) - np.maximum.accumulate(np.where(first, np.arange(total), 0))
        self._latest[keys, number % MAX_PLACES] = place + 1
        self._count[keys] = number + 1  # of equal keys the last one stays

    def find(self, texts: Rows, tails: Int32) -> Places:
        """Return where tails[i] stand in texts[i], as far as extend() went; only rows that stand somewhere.

        tails: [n, MAX_MATCH], the last token first.
        """
        keys = self._keys(texts, tails[:, 2], tails[:, 1], tails[:, 0])
        rows = self._count.take(keys).nonzero()[0]
        if not rows.size:
            return Places(rows, texts[rows], NO_PLACES, NO_PLACES, rows)
        if rows.size < keys.size:
            texts, tails, keys = texts[rows], tails[rows], keys[rows]
        places = self._latest.take(keys, axis=0).astype(np.intp)
        places.sort(axis=1)
        places = places[:, ::-1] - 1
        at = (texts * self._width)[:, None] + places
        same = self._tokens.take(at[:, :, None] - _BACK, mode="clip") == tails[:, None, :]
        same &= places[:, :, None] >= _BACK
        lengths = leading(same)
        longest = lengths.max(axis=1)
        return Places(rows, texts, places, lengths, longest).where(longest >= MIN_MATCH)

    def follow(self, found: Places, sizes: Int64, repeats: bool) -> tuple[Int32, Float32]:
        """Return what followed the places of [k] rows in texts of `sizes` tokens.

        Where places differ, those count at which at least half as many tokens match as at the best one. Returns
        [k, FOLLOWS] tokens of the place with the most frequent first one, of equally frequent ones the latest, and the
        logarithm of the share of places that agree up to and with each of them; -inf behind the end. repeats: what
        reaches the end of a text goes on from its own beginning, as the text may repeat itself.
        """
        places = found.places
        votes = found.lengths >= np.maximum((found.longest + 1) // 2, MIN_MATCH)[:, None]
        left = sizes[:, None] - 1 - places  # tokens behind a place
        starts = (found.texts * self._width)[:, None] + places + 1
        if repeats:
            at = starts[:, :, None] + _AHEAD
            if (ending := (left < FOLLOWS) & votes).any():
                at[ending] = starts[ending][:, None] + _AHEAD % left[ending][:, None]
        else:
            at = starts[:, :, None] + np.minimum(_AHEAD, left[:, :, None] - 1)
        texts = self._tokens.take(at, mode="clip")
        first = texts[:, :, 0]
        agreeing = ((first[:, :, None] == first[:, None, :]) & votes[:, None, :]).sum(axis=2, dtype=np.int8)
        best = (agreeing * votes).argmax(axis=1)
        follows = texts[np.arange(best.size), best]
        lengths = leading(texts == follows[:, None, :]) * votes
        counts = (lengths[:, :, None] > _AHEAD).sum(axis=1, dtype=np.int8)
        shares = LOGS[counts] - LOGS[votes.sum(axis=1)][:, None]
        if not repeats:
            shares[leading(follows != GAP)[:, None] <= _AHEAD] = -np.inf
        return follows, shares

    def _keys(self, texts: Rows, first: Int32, second: Int32, third: Int32) -> Rows:
        """Return the places of runs of tokens in the index."""
        mixed = first.view(np.uint32) * _FACTORS[0]
        mixed += second.view(np.uint32) * _FACTORS[1]
        mixed += third.view(np.uint32) * _FACTORS[2]
        mixed ^= mixed >> np.uint32(15)
        mixed *= _FACTORS[0]
        keys: Rows = (mixed >> np.uint32(32 - self._bits)) + (texts << self._bits)
        return keys


with np.errstate(divide="ignore"):
    LOGS: Float32 = np.log(np.arange(MAX_PLACES + 1, dtype=np.float32))


def leading(mask: Bool) -> Rows:
    """Return how many values stand before the first false one of the last axis."""
    count = mask.argmin(axis=-1)
    found: Rows = np.where((count == 0) & mask[..., 0], mask.shape[-1], count)
    return found
