"""The prefix cache of one replica: match prefixes, register blocks, wait for a prefix that is being computed.

Replica holds one object. Only KV that results have confirmed is registered: blocks of a prompt after each chunk, blocks
of outputs when the sequence leaves its slot. A waiting sequence is set aside while a running one computes its next
block (in-batch prefix sharing); it comes back through `ready`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.scheduler.core.kv.blocks import BlockPool
from services.scheduler.core.kv.prefix_index import NO_KEY, Hasher, Key, Keys
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.table import SlotTable
from services.scheduler.core.types import EMPTY, Int32, Rows

LEAST_SHARED_BLOCKS = 2  # a sequence waits for at least so many blocks of another one
MAX_ASIDE = 256  # sequences that wait for one owner, at most: they all come back at once


@dataclass(slots=True)
class PrefixMatch:
    """The leading full blocks of a sequence that are cached: first those on the GPU, then those on the host."""

    gpu: Int32
    host: Int32

    @property
    def size(self) -> int:
        """Number of blocks."""
        return self.gpu.size + self.host.size


@dataclass(slots=True)
class Prefix:
    """KV of a sequence that left its slot before results had confirmed all of it."""

    blocks: Int32  # still referenced by the copy to the host
    registered_blocks: int  # how many of the first blocks are registered


@dataclass(slots=True)
class PendingPrefix:
    """A prefix that a running sequence computes, and the sequences that wait for it, each until a time (ns)."""

    slot: int
    key: Key  # of the next block that is not registered
    waiters: list[tuple[Sequence, int]] = field(default_factory=list)


class PrefixCache:
    """Matches and registers prefixes."""

    def __init__(self, pool: BlockPool, host: BlockPool, table: SlotTable, hasher: Hasher) -> None:
        self.hit_tokens = 0  # cached tokens that were not computed again, since the start
        self.ready: list[Sequence] = []  # sequences that were set aside and may return to the queue
        self._pool = pool
        self._host = host
        self._table = table
        self._hasher = hasher
        self._size = table.block_size
        self._owners: dict[int, PendingPrefix] = {}  # slot -> the prefix that it computes
        self._pending_prefixes: dict[Key, PendingPrefix] = {}  # key of the block under computation -> that prefix

    def chain(self, sequence: Sequence, tokens: Int32) -> Keys:
        """Return the keys of all full blocks of `tokens`, the first tokens of the sequence; keep them with it.

        It may return the keys of later blocks as well, if they were computed before.
        """
        keys, count = sequence.prefix.keys, tokens.size // self._size
        have = len(keys)
        if have < count:
            salt, before = sequence.record.request.salt, keys[-1] if keys else NO_KEY
            more = self._hasher.keys(tokens[have * self._size : count * self._size], salt, before)
            sequence.prefix.keys = keys = keys + more
        return keys

    def match(self, sequences: list[Sequence]) -> list[PrefixMatch]:
        """Return the cached blocks of each sequence; take no references.

        At least one token of a sequence is left to compute, and of a prompt with log-probabilities to tell all tokens
        from the one before the first that lacks them.
        """
        hits = []
        for sequence in sequences:
            tokens = sequence.tokens()
            most = tokens.size if sequence.is_scored else sequence.scored_tokens
            keys = self.chain(sequence, tokens)[: (most - 1) // self._size]
            gpu, host = self._pool.match(keys), EMPTY
            if self._host.cached and gpu.size < len(keys):
                host = self._host.match(keys[gpu.size :])
            sequence.prefix.hits = (gpu.size + host.size) * self._size
            hits.append(PrefixMatch(gpu, host))
        return hits

    def match_length(self, keys: Keys) -> int:
        """Return about how many leading blocks of a chain are cached, in either tier."""
        blocks = self._pool.match_length(keys)
        return blocks + (self._host.match_length(keys[blocks:]) if self._host.cached else 0)

    def pending_keys(self, key: Key) -> Keys | None:
        """Return the keys of the sequence that computes the block `key` now, or None."""
        owner = self._pending_prefixes.get(key)
        sequence: Sequence | None = self._table.sequence[owner.slot] if owner is not None else None
        return sequence.prefix.keys if sequence is not None else None

    def next_key(self, sequence: Sequence, blocks: int) -> Key:
        """Return the key of the block after the first `blocks`; NO_KEY if too few follow for a sequence to wait for."""
        keys = sequence.prefix.keys
        return keys[blocks] if len(keys) - blocks >= LEAST_SHARED_BLOCKS else NO_KEY

    def on_enter(self, slots: Rows, sequences: list[Sequence], hits: list[PrefixMatch]) -> None:
        """Note that sequences took slots with `hits`; other sequences may wait for the blocks that follow."""
        table, size = self._table, self._size
        for slot, sequence, hit in zip(slots.tolist(), sequences, hits, strict=True):
            found = hit.size
            table.registered_blocks[slot] = found
            if found * size > table.filled_tokens.item(slot):
                table.filled_tokens[slot] = found * size
            self.hit_tokens += found * size
            self._claim(slot, sequence, found)

    def owner_of(self, sequence: Sequence, blocks: int) -> int:
        """Return the slot that computes the next LEAST_SHARED_BLOCKS of `sequence` after its first `blocks`, or -1.

        It is -1 as well if the owner is of a lower class and so may take long, if MAX_ASIDE sequences wait for it
        already, or if `sequence` has waited for that block before or has log-probabilities of its prompt to tell.
        """
        key = self.next_key(sequence, blocks)
        owner = self._pending_prefixes.get(key) if key != sequence.prefix.waited_for else None
        if owner is None or not sequence.is_scored:
            return -1
        if self._table.priority[owner.slot] > sequence.priority or len(owner.waiters) >= MAX_ASIDE:
            return -1
        theirs = self._table.sequence[owner.slot].prefix.keys
        end = blocks + LEAST_SHARED_BLOCKS
        return owner.slot if theirs[blocks:end] == sequence.prefix.keys[blocks:end] else -1

    def wait(self, sequence: Sequence, slot: int, until_ns: int) -> None:
        """Let `sequence` wait until `slot` has registered its next blocks, at most until `until_ns`."""
        self._owners[slot].waiters.append((sequence, until_ns))

    def expire(self, now_ns: int) -> None:
        """Make sequences ready that have waited until their time."""
        for owner in self._owners.values():
            if owner.waiters and any(until <= now_ns for _, until in owner.waiters):
                late = [s for s, until in owner.waiters if until <= now_ns]
                for sequence in late:
                    sequence.prefix.waited_for = owner.key
                self._release(late)
                owner.waiters = [(s, until) for s, until in owner.waiters if until > now_ns]

    def register_rows(self, rows: list[tuple[int, int]]) -> None:
        """Register the blocks of rows, (slot, end) each, up to `end` tokens: a result has confirmed their KV."""
        self._register(rows)
        for slot, _ in rows:
            if (owner := self._owners.get(slot)) is not None:
                self._advance(owner)

    def leaves(self, slot: int, sequence: Sequence) -> None:
        """Register the computed blocks of a sequence that is about to leave `slot`; make its waiters ready."""
        self._register([(slot, self._table.computed_tokens(slot))])
        owner = self._owners.pop(slot, None)
        if owner is not None:
            self._disown(owner)

    def register_departed(self, sequence: Sequence, prefix: Prefix, end: int) -> None:
        """Register as filled() does, for a sequence that has left its slot with `prefix`."""
        begin, stop = prefix.registered_blocks, end // self._size
        if stop <= begin:
            return
        keys = self.chain(sequence, sequence.tokens()[: stop * self._size])
        self._pool.register(prefix.blocks[begin:stop], keys[begin:stop])
        prefix.registered_blocks = stop

    def is_awaited(self, slot: int) -> bool:
        """Return whether other sequences wait for a block that the sequence of `slot` computes."""
        owner = self._owners.get(slot)
        return owner is not None and bool(owner.waiters)

    def _register(self, rows: list[tuple[int, int]]) -> None:
        """Register the full blocks of rows, (slot, end) each, up to `end` tokens, all of which have KV."""
        table, blocks, keys = self._table, [], []
        for slot, end in rows:
            begin, stop = table.registered_blocks.item(slot), end // self._size
            if stop > begin:
                blocks.append(table.blocks[slot, begin:stop])
                keys += self.chain(table.sequence[slot], table.tokens[slot, : stop * self._size])[begin:stop]
                table.registered_blocks[slot] = stop
        if blocks:
            self._pool.register(np.concatenate(blocks), keys)

    def _claim(self, slot: int, sequence: Sequence, blocks: int) -> None:
        """Note that `slot` computes what follows the first `blocks` of its sequence, if others may wait for that."""
        key = self.next_key(sequence, blocks)
        if key and key not in self._pending_prefixes:
            self._owners[slot] = self._pending_prefixes[key] = PendingPrefix(slot, key)

    def _advance(self, owner: PendingPrefix) -> None:
        """After blocks were registered, make the waiting sequences ready and move the owner on to its next block."""
        slot = owner.slot
        done = self._table.registered_blocks.item(slot)
        sequence: Sequence = self._table.sequence[slot]
        if sequence.prefix.keys[done : done + 1] == [owner.key]:
            return
        del self._owners[slot]
        self._disown(owner)
        self._claim(slot, sequence, done)

    def _disown(self, owner: PendingPrefix) -> None:
        del self._pending_prefixes[owner.key]
        self._release([sequence for sequence, _ in owner.waiters])

    def _release(self, sequences: list[Sequence]) -> None:
        self.ready += [sequence for sequence in sequences if sequence.state is State.WAITING]
