"""Adapters that the worker of a replica holds, by number: which are loaded, which one makes room for another.

Replica holds one object. Like peers (peers.py), an adapter is announced in the next step and used when the worker has
answered. There are as many numbers as adapters that the worker holds; a number is given to another adapter only while
no row has the old one, the least recently used first. So no step has more adapters than numbers. An adapter that the
worker could not load has a number, too, so that a sequence fails with the worker's reason. The refusal outlives the
number: for RETRY_NS no replica that refused it is chosen while another may load it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from services.scheduler.core.types import Int32

News = dict[int, bytes]
NO_NEWS: News = {}  # shared: read only
RETRY_NS = 10_000_000_000  # for which a refusal holds: each further one costs a step the time of a load
MAX_REFUSALS = 64  # that a replica remembers; the oldest are forgotten


@dataclass(slots=True)
class Refusal:
    """The answer of a worker that it could not load an adapter."""

    until_ns: int
    reason: str = ""  # known when a sequence has failed for it


class Adapters:
    """The adapters of one replica, each named by its digest."""

    def __init__(self, most: int) -> None:
        """most: adapters that the worker holds at once."""
        self._free = list(range(most, 0, -1))  # numbers; 0 is the base model
        self._numbers: dict[bytes, int] = {}  # least recently used first
        self._answered_digests: set[bytes] = set()
        self._refused_digests: set[bytes] = set()  # of the answered ones: the worker could not load them
        self._refusals: dict[bytes, Refusal] = {}  # oldest first; also of adapters that have no number any more
        self._of_row: dict[int, bytes] = {}  # slot -> adapter, for rows that have one
        self._rows: Counter[bytes] = Counter()
        self.news: News = {}  # for the next step

    def usable(self, digest: bytes) -> bool:
        """Return whether a sequence with this adapter may take a slot. With a refused one it does, and fails alone."""
        return not digest or digest in self._answered_digests

    def holds(self, digest: bytes) -> bool:
        """Return whether the worker has the adapter, or is about to have it."""
        return not digest or (digest in self._numbers and digest not in self._refused_digests)

    def refuses(self, digest: bytes) -> bool:
        """Return whether the worker could not load the adapter a short time ago."""
        return digest in self._refusals

    def reason(self, digest: bytes) -> str:
        """Return why the worker could not load the adapter; empty when that is not known, or it may load it."""
        refusal = self._refusals.get(digest)
        return "" if refusal is None else refusal.reason

    def on_failure(self, digest: bytes, reason: str) -> bool:
        """Note the error of a sequence with this adapter; return whether it tells first why that was refused."""
        refusal = self._refusals.get(digest)
        if refusal is None or refusal.reason or digest not in self._refused_digests:
            return False
        refusal.reason = reason
        return True

    def expire(self, now_ns: int) -> bool:
        """Forget the refusals that are over; return whether there were any."""
        over = [digest for digest, refusal in self._refusals.items() if refusal.until_ns <= now_ns]
        for digest in over:
            self._retry(digest)
        return bool(over)

    @property
    def are_crowded(self) -> bool:
        """Whether rows keep every number."""
        return not self._free and 0 < len(self._numbers) == len(self._rows)

    def keeps_out(self, digest: bytes) -> bool:
        """Return whether this adapter is not loaded before the rows of another one have left."""
        return self.are_crowded and bool(digest) and digest not in self._numbers

    def rows(self) -> list[list[int]]:
        """Return the slots of the rows of each adapter that has any."""
        rows = defaultdict(list)
        for slot, digest in self._of_row.items():
            rows[digest].append(slot)
        return list(rows.values())

    def seek(self, digest: bytes) -> None:
        """Announce an adapter in the next step if there is a number for it, and the step has no other to load."""
        if self.news or digest in self._numbers:
            return
        if not self._free:
            idle = (held for held in self._numbers if held in self._answered_digests and not self._rows[held])
            oldest = next(idle, None)
            if oldest is None:
                return
            self._forget(oldest)
        number = self._free.pop()
        self._numbers[digest] = number
        self.news[number] = digest

    def on_enter(self, slot: int, digest: bytes) -> None:
        """Note that a sequence with this adapter, which must be usable, or with none, took a slot."""
        if not digest:
            return
        self._of_row[slot] = digest
        self._rows[digest] += 1
        self._numbers[digest] = self._numbers.pop(digest)

    def on_leave(self, slot: int) -> None:
        """Note that the row of a slot was released."""
        digest = self._of_row.pop(slot, None)
        if digest is None:
            return
        self._rows[digest] -= 1
        if not self._rows[digest]:
            del self._rows[digest]
            if digest in self._refused_digests:
                self._forget(digest)

    def number(self, slot: int) -> int:
        """Return the number of the adapter of a row; 0 for the base model."""
        digest = self._of_row.get(slot)
        return 0 if digest is None else self._numbers[digest]

    def take_news(self) -> News:
        """Return and forget the news that the committed step carries."""
        news, self.news = self.news, {}
        return news

    def acknowledge(self, announced: News, numbers: Int32, now_ns: int) -> bool:
        """Note which of the adapters that a step announced are loaded; return whether `refuses` has new answers.

        Raise ValueError for one that the step did not announce.
        """
        loaded = set(numbers.tolist())
        if not loaded <= announced.keys():
            raise ValueError(f"adapter {min(loaded - announced.keys())} was acknowledged, and its step has none such")
        changed = False
        for number, digest in announced.items():
            self._answered_digests.add(digest)
            changed |= (self._refusals.pop(digest, None) is None) == (number not in loaded)
            if number not in loaded:
                self._refused_digests.add(digest)
                self._refusals[digest] = Refusal(now_ns + RETRY_NS)
        while len(self._refusals) > MAX_REFUSALS:
            self._retry(next(iter(self._refusals)))
        return changed

    def check(self) -> None:
        """Raise RuntimeError unless each number is free or of one adapter, and the adapters of rows are loaded."""
        numbers = sorted([*self._free, *self._numbers.values()])
        if numbers != list(range(1, len(numbers) + 1)):
            raise RuntimeError(f"numbers of adapters: {numbers}")
        if self._rows != Counter(self._of_row.values()):
            raise RuntimeError("rows of adapters are counted wrongly")
        if not self._rows.keys() <= self._answered_digests <= self._numbers.keys():
            raise RuntimeError("a row has an adapter that is not loaded")
        if len(self._refusals) > MAX_REFUSALS:
            raise RuntimeError(f"{len(self._refusals)} refusals of adapters are remembered")

    def _retry(self, digest: bytes) -> None:
        """Forget a refusal, so that the next sequence with the adapter announces it again."""
        del self._refusals[digest]
        if digest in self._refused_digests and not self._rows[digest]:
            self._forget(digest)

    def _forget(self, digest: bytes) -> None:
        self._free.append(self._numbers.pop(digest))
        self._answered_digests.discard(digest)
        self._refused_digests.discard(digest)
