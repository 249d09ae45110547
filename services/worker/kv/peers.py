"""Host tiers of other workers on this host: swapped-out blocks are copied from them into this worker's pool.

The scheduler names them in a Step (`Step.peers`). The thread that submits steps uses them; a running copy keeps the
memory that it reads.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import Cache
from protos import worker_pb2
from services.worker.kv.share_folder import PeerError, ShareFolder
from services.worker.parallel.state import ParallelState
from shared.errors import ProtocolError

log = logging.getLogger("orcinus.worker")

OWN_TIER = -1
"""In Step.swap_in_peers: a block of this worker's host tier."""

RUN_BYTES = 8

MAX_NUMBER = (1 << 31) - 1
"""The largest number: columns are int32."""


def run_place(size: int) -> tuple[int, int]:
    """Return where in the file of a host tier, behind blocks of `size` bytes, the epoch of its Run stands: an int64."""
    begin = -(-size // RUN_BYTES) * RUN_BYTES
    return begin, begin + RUN_BYTES


@dataclass(frozen=True, slots=True)
class Tier:
    """The host tier of a worker; of several ranks the part that this rank's counterpart has.

    run: the epoch of the Run of which the scheduler knows the blocks; written: [1] int64, the epoch of the Run that
    has the tier, empty in the file of an older worker.
    """

    memory: Tensor
    host_blocks: int
    run: int
    written: Tensor

    @property
    def is_stale(self) -> bool:
        """Return whether another Run has the tier: what was read before may be anything."""
        return bool(self.run) and bool((self.written != self.run).any())


class Peers:
    """The peers of one Run, by number."""

    def __init__(
        self,
        cache: Cache,
        block_bytes: int,
        folder: ShareFolder | None,
        parallel: ParallelState,
        owner: str = "",
        needed: Collection[str] = (),
    ) -> None:
        """Create an empty table. block_bytes: of a block on this rank; folder: None if this worker shares nothing.

        owner: of files that outlived their workers and that this one may remove (ShareFolder.keep). needed: names of
        tiers with such files that the scheduler needed at the begin of the Run.
        """
        self._cache, self._block_bytes, self._folder, self._parallel = cache, block_bytes, folder, parallel
        self._tiers: dict[int, Tier] = {}
        self._names: dict[int, str] = {}  # of the files of all peers that were announced, by number, without the rank
        self._owner = owner
        self._needed = set(needed)  # none after the first step

    def update(self, peers: Iterable[worker_pb2.Peer]) -> list[int]:
        """Map new peers and unmap those that are gone; return the numbers of the new ones that every rank can read.

        The file of one that is gone, or has another tier now, is removed where it outlived its worker.
        One that cannot be read is left out, with a warning in the log. Raise ProtocolError for a number that no
        `swap_in_peers` can say.
        """
        new = []
        for peer in peers:
            if peer.number > MAX_NUMBER:
                raise ProtocolError(f"peers: number {peer.number} is outside 0..{MAX_NUMBER}")
            self._tiers.pop(peer.number, None)
            name = self._names.pop(peer.number, "")
            if peer.host_tier:
                new.append(peer.number)
                self._map(peer)
            if name and name != self._names.get(peer.number):
                self._remove({name})
        mapped = self._parallel.least([int(number in self._tiers) for number in new])
        for number, everywhere in zip(new, mapped, strict=True):
            if not everywhere:
                self._tiers.pop(number, None)
        return [number for number in new if number in self._tiers]

    def remove_unannounced(self) -> None:
        """Remove files that were needed when the Run began, but of which no step has announced a peer: it is gone
        meanwhile, or has KV that this worker cannot use. For the first step, which announces all peers."""
        if unannounced := self._needed - set(self._names.values()):
            self._remove(unannounced)
        self._needed.clear()

    def forget(self) -> None:
        """Unmap all. A tier that is being read stays mapped until the copy ends."""
        self._tiers.clear()

    def tier(self, number: int) -> Tier:
        """Return the tier of a peer. Raise ProtocolError for one that was not acknowledged."""
        try:
            return self._tiers[number]
        except KeyError:
            raise ProtocolError(f"swap_in_peers: the host tier of peer {number} was not acknowledged") from None

    def has(self, number: int, tier: Tier | None) -> bool:
        """Return whether the number still means this tier, of this Run."""
        return tier is not None and self._tiers.get(number) is tier

    def _remove(self, names: Collection[str]) -> None:
        """Remove the files of host tiers that outlived their workers, of all ranks."""
        if self._folder is not None:
            files = self._folder.kept_files()
            self._folder.remove_kept(file for file in files if file.owner == self._owner and file.tier in names)

    def _map(self, peer: worker_pb2.Peer) -> None:
        folder, _, name = peer.host_tier.partition("/")
        try:
            if self._folder is None or folder != self._folder.id:
                raise PeerError("it is not in this worker's --kv-share-dir")
            size = peer.host_blocks * self._block_bytes
            begin, end = run_place(size)
            self._names[peer.number] = name
            file = self._folder.map(f"{name}-{self._parallel.rank}", size, end - size)
        except PeerError as error:
            log.warning("the host tier of peer %d cannot be read: %s", peer.number, error)
            return
        memory = self._cache.host_tier(file[:size])
        self._tiers[peer.number] = Tier(memory, peer.host_blocks, peer.run, file[begin:end].view(torch.int64))
        log.info("the host tier of peer %d is mapped: %d blocks", peer.number, peer.host_blocks)
