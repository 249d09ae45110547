"""Copies between the tiers: the swap-outs and swap-ins of one replica in flight, and the rows that wait for them.

Replica holds one object. A block that a copy reads or writes is not used before the worker has acknowledged the copy
(docs/protocol.md#steps). Copies are acknowledged in the order in which they were sent: the worker has one copy stream.
Blocks that are copied from the host tier of a peer (peers.py) keep their references there until then.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.scheduler.core.kv.blocks import BlockPool
from services.scheduler.core.sequence import SavedKV, Sequence
from services.scheduler.core.table import SlotTable
from services.scheduler.core.types import EMPTY, Int32


class HostTier(Protocol):
    """The part of a replica that readers of its host tier need."""

    number: int
    host: BlockPool


@dataclass(slots=True)
class KVLoad:
    """KV in flight from a host tier into the blocks of one row."""

    slot: int
    generation: int
    host: Int32
    gpu: Int32
    is_shared: bool  # a cached prefix, which stays on the host; else the KV of a swapped sequence
    blocks_left: int  # blocks not acknowledged yet
    orphan: bool = False  # the sequence has left the row
    saved_kv: SavedKV | None = None  # the KV of a swapped sequence; None for a cached prefix
    peer: int = -1  # number of the replica with the host tier; -1 means this replica
    tier: BlockPool | None = None  # host tier of that peer; None if it is this replica's, or the peer is lost


@dataclass(slots=True, frozen=True)
class Copies:
    """Columns of the copies that one step orders; in_peers is empty where all come from this replica's host tier."""

    out_gpu: Int32
    out_host: Int32
    in_host: Int32
    in_gpu: Int32
    in_peers: Int32


NO_COPIES = Copies(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY)


class Transfers:
    """Columns for the next step, loads in flight, and rows that a step enters when their KV has arrived."""

    def __init__(self, pool: BlockPool, host: BlockPool, table: SlotTable) -> None:
        self.swapped_blocks = 0  # moved since the start, both ways
        self.queued_out = self.copied_out = 0  # blocks with a copy to the host that was ordered; is complete
        self._pool = pool
        self._host = host
        self._table = table
        self._block_refs: Counter[int] = Counter()  # block -> references that copies in flight hold
        self._copies_out: list[tuple[Int32, Int32]] = []  # GPU, host
        self._copies_in: list[tuple[Int32, Int32, int]] = []  # host, GPU, peer
        self._loads: deque[KVLoad] = deque()
        self._pending_loads: dict[int, KVLoad] = {}  # slot -> its load
        self._arrived_slots: dict[
            int, None
        ] = {}  # slots with KV that has arrived and no step has entered yet, in order

    @property
    def has_copies(self) -> bool:
        """Whether the next step carries copies."""
        return bool(self._copies_out or self._copies_in)

    @property
    def has_arrivals(self) -> bool:
        """Whether the next step enters rows."""
        return bool(self._arrived_slots)

    def copy_out(self, blocks: Int32, stay: bool = False) -> Int32:
        """Order the copy of `blocks` to host blocks, and return these. The caller's references pass to the copy.

        A block that other tables hold as well keeps this reference until the copy is acknowledged, so that it is not
        freed during the copy. With `stay` every block does, so that its prefix can be found meanwhile.
        """
        host = self._host.take(blocks.size)
        alone = (self._pool.refs[blocks] == 1) & (not stay)
        self._pool.drain(blocks[alone])
        self._block_refs.update(blocks[~alone].tolist())
        self._order_out(blocks, host)
        return host

    def is_saved(self, sequence: Sequence) -> bool:
        """Return whether all KV of a sequence swapped out here is in the host tier, for other processes to read."""
        return sequence.saved_kv is not None and self.copied_out >= sequence.saved_kv.copied_blocks

    def keep(self, blocks: Int32) -> None:
        """Order the copy of cached prefix blocks, which have no reference, to the host tier, and free them after it."""
        host = self._host.take(blocks.size)
        self._host.register(host, self._pool.keys_of(blocks))
        self._pool.share(blocks)
        self._pool.forget(blocks)
        self._pool.drain(blocks)
        self._host.give(host)
        self._order_out(blocks, host)

    def _order_out(self, blocks: Int32, host: Int32) -> None:
        self._copies_out.append((blocks, host))
        self.swapped_blocks += blocks.size
        self.queued_out += blocks.size

    def load(self, slot: int, host: Int32, gpu: Int32, saved: SavedKV | None, source: HostTier | None = None) -> None:
        """Order the copy of `host` into `gpu`, blocks that the row of `slot` holds already.

        saved: the KV of a swapped sequence; None for a cached prefix, which stays on the host. source: the peer with
        `saved` in its host tier; None means this replica. Its references pass to the load.
        """
        tier = source.host if source is not None else None
        if saved is None:
            self._host.share(host)
        elif tier is None:
            self._host.drain(host)
        peer = source.number if source is not None else -1
        self._copies_in.append((host, gpu, peer))
        generation = int(self._table.generation[slot])
        load = KVLoad(slot, generation, host, gpu, saved is None, host.size, saved_kv=saved, peer=peer, tier=tier)
        self._loads.append(load)
        self._pending_loads[slot] = load
        self.swapped_blocks += host.size

    def loads(self, slot: int) -> bool:
        """Return whether the row of `slot` waits for KV, or for the step that enters it."""
        return slot in self._pending_loads or slot in self._arrived_slots

    def awaits(self, slot: int) -> bool:
        """Return whether KV of the row of `slot` is in flight."""
        return slot in self._pending_loads

    def slots(self) -> list[int]:
        """Return the rows that wait for KV, or for the step that enters them."""
        return [*self._pending_loads, *self._arrived_slots] if self._pending_loads or self._arrived_slots else []

    def leaves(self, slot: int) -> Int32:
        """Return the blocks of `slot` into which a copy is still in flight, when its sequence leaves."""
        self._arrived_slots.pop(slot, None)
        load = self._pending_loads.pop(slot, None)
        if load is None:
            return EMPTY
        load.orphan = True
        return load.gpu

    def from_peer(self, slot: int) -> KVLoad | None:
        """Return the load from the host tier of another replica that the row of `slot` waits for."""
        load = self._pending_loads.get(slot)
        return load if load is not None and load.peer >= 0 else None

    def abandon(self, peer: int) -> list[int]:
        """Return the slots that wait for loads from a lost replica; their sequences have to leave."""
        gone = [load for load in self._loads if load.peer == peer and load.tier is not None]
        for load in gone:
            load.tier = None
        return [load.slot for load in gone if not load.orphan]

    def loading_from(self, peer: int) -> list[int]:
        """Return the slots that wait for loads from the host tier of a peer."""
        return [slot for slot, load in self._pending_loads.items() if load.peer == peer]

    def let_go(self) -> None:
        """Give back the blocks of peers' tiers of loads without a sequence, because this replica is lost."""
        for load in self._loads:
            if load.orphan and load.tier is not None:
                load.tier.give(load.host)
                load.tier = None

    def held_of(self, tier: BlockPool) -> list[Int32]:
        """Return the blocks of `tier`, of this replica or a peer, that loads refer to."""
        shared = [load.host for load in self._loads if load.is_shared and tier is self._host]
        return shared + [load.host for load in self._loads if load.tier is tier]

    def take_arrived(self) -> list[int]:
        """Return and forget the slots that the next step has to enter."""
        slots = list(self._arrived_slots)
        self._arrived_slots.clear()
        return slots

    def take_copies(self) -> Copies:
        """Return and forget the copies that the committed step carries."""
        out, in_ = self._copies_out or [(EMPTY, EMPTY)], self._copies_in or [(EMPTY, EMPTY, -1)]
        self._copies_out, self._copies_in = [], []
        peers = EMPTY
        if any(peer >= 0 for _, _, peer in in_):
            peers = np.repeat(np.array([peer for _, _, peer in in_], np.int32), [host.size for host, _, _ in in_])
        return Copies(
            np.concatenate([gpu for gpu, _ in out]),
            np.concatenate([host for _, host in out]),
            np.concatenate([host for host, _, _ in in_]),
            np.concatenate([gpu for _, gpu, _ in in_]),
            peers,
        )

    def acknowledge(self, out_gpu: Int32, in_host: Int32) -> list[KVLoad]:
        """Complete copies that the worker has acknowledged: free drained blocks and return the loads that are complete.

        Raise ValueError for a copy that is not in flight.
        """
        if out_gpu.size:
            self._check_out(out_gpu)
            alone = self._pool.drains(out_gpu)
            self._pool.end_drain(out_gpu[alone])
            self._give(out_gpu[~alone])
            self._block_refs.subtract(out_gpu[~alone].tolist())
            self.copied_out += out_gpu.size
        done: list[KVLoad] = []
        at = 0
        while at < in_host.size:
            if not self._loads:
                raise ValueError("acknowledged a copy that is not under way")
            load = self._loads[0]
            count = min(load.blocks_left, in_host.size - at)
            begin = load.host.size - load.blocks_left
            if not np.array_equal(in_host[at : at + count], load.host[begin : begin + count]):
                raise ValueError("copies were acknowledged out of order")
            load.blocks_left -= count
            at += count
            if not load.blocks_left:
                self._loads.popleft()
                self._complete(load, done)
        return done

    def _check_out(self, blocks: Int32) -> None:
        """Raise ValueError for a block of which no copy to the host is under way."""
        if blocks.min() < 0 or blocks.max() >= self._pool.total:
            raise ValueError("acknowledged a block that does not exist")
        alone = self._pool.drains(blocks)
        counts = Counter(blocks.tolist())
        under_way = dict.fromkeys(blocks[alone].tolist(), 1)
        if any(count > under_way.get(block, self._block_refs[block]) for block, count in counts.items()):
            raise ValueError("acknowledged a copy that is not under way")

    def _give(self, blocks: Int32) -> None:
        """Give back references of copies; `blocks` contains a block once for each copy that refers to it."""
        first = np.sort(np.unique(blocks, return_index=True)[1])
        if first.size < blocks.size:
            self._give(np.delete(blocks, first))
        self._pool.give(blocks[first])

    def _complete(self, load: KVLoad, done: list[KVLoad]) -> None:
        if load.is_shared:
            self._host.give(load.host)
        elif load.peer < 0:
            self._host.end_drain(load.host)
        elif load.tier is not None:
            load.tier.give(load.host)
        if load.orphan:
            self._pool.end_drain(load.gpu)
            return
        del self._pending_loads[load.slot]
        self._arrived_slots[load.slot] = None
        done.append(load)

    @property
    def referenced_blocks(self) -> Int32:
        """Blocks that are referenced by copies in flight, once for each reference."""
        return np.fromiter(self._block_refs.elements(), np.int32)

    def check(self) -> None:
        """Raise RuntimeError when rows and loads are inconsistent."""
        for slot, load in self._pending_loads.items():
            if self._table.generation[slot] != load.generation or not self._table.active[slot]:
                raise RuntimeError(f"slot {slot} waits for KV and holds another sequence")
        if sum(not load.orphan for load in self._loads) != len(self._pending_loads):
            raise RuntimeError("loads are counted wrongly")
        for slot in self._arrived_slots:
            if not self._table.active[slot]:
                raise RuntimeError(f"slot {slot} is to be entered and holds no sequence")
