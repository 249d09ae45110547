"""Host tiers of other workers on this host: swapped-out blocks are copied from them into this worker's pool.

The scheduler names them in a Step (`Step.peers`). The thread that submits steps uses them; a running copy keeps the
memory that it reads.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.ops import Cache, Int32
from protos import worker_pb2
from services.worker.kv.share_folder import PeerError, ShareFolder
from services.worker.kv.tier_file import Digests, compute_digests, layout
from services.worker.parallel.state import ParallelState
from shared.errors import ProtocolError
from shared.messages import quantity

log = logging.getLogger("orcinus.worker")

OWN_TIER = -1
"""In Step.swap_in_peers: a block of this worker's host tier."""

MAX_NUMBER = (1 << 31) - 1
"""The largest number: columns are int32."""


@dataclass(frozen=True, slots=True)
class Tier:
    """The host tier of a worker; of several ranks the part that this rank's counterpart has.

    memory: the blocks as the cache copies them; content: [host_blocks, block_bytes] uint8, the same bytes. run: the
    epoch of the Run with the blocks that the scheduler knows; epoch: [1] int64, that of the Run that has the tier now,
    empty in the file of an older worker. stored_digests: [host_blocks] int64, 0 for a block that was not kept; empty as
    `epoch`. is_kept: whether the file had outlived its worker when it was mapped.
    """

    memory: Tensor
    host_blocks: int
    run: int
    content: npt.NDArray[np.uint8]
    epoch: Digests
    stored_digests: Digests
    is_kept: bool

    def has_digests(self, blocks: Int32) -> bool:
        """Return whether `fault` reads any of these blocks, which takes a while."""
        return self.is_kept or bool(self.stored_digests.size and self.stored_digests[blocks].any())

    def fault(self, blocks: Int32, threads: int = 1) -> str:
        """Return why copies of these blocks that were made before may be anything; empty if they are right."""
        if self.run and (self.epoch != self.run).any():
            return "another Run has it"
        if not self.has_digests(blocks):
            return ""
        if not self.is_kept:
            blocks = blocks[self.stored_digests[blocks] != 0]
        digests = self.stored_digests[blocks] if self.stored_digests.size else np.zeros(blocks.size, np.int64)
        mismatches = blocks[compute_digests(self.content, blocks, threads) != digests]
        if mismatches.size < 2:
            return f"block {mismatches[0]} differs from its checksum" if mismatches.size else ""
        return f"block {mismatches[0]} and {quantity(mismatches.size - 1, 'further block')} differ from their checksums"


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
        self.refusals: dict[int, str] = {}
        """Why tiers that the last step with news named cannot be read, by number."""
        self._owner = owner
        self._needed_tiers = set(needed)  # none after the first step

    def update(self, peers: Iterable[worker_pb2.Peer]) -> list[int]:
        """Map new peers and unmap those that are gone; return the numbers of the new ones that every rank can read.

        The file of one that is gone, or has another tier now, is removed where it outlived its worker.
        One that cannot be read is left out, and `refusals` says why. Raise ProtocolError for a number that no
        `swap_in_peers` can say.
        """
        new = []
        self.refusals = {}
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
                self.refusals.setdefault(number, "another rank cannot read it")
        return [number for number in new if number in self._tiers]

    def remove_unannounced(self) -> None:
        """Remove files that the hello named and the first step does not announce as peers: the peer is gone, or this
        worker cannot use its KV. Called in the first step, which announces all peers."""
        if unannounced := self._needed_tiers - set(self._names.values()):
            self._remove(unannounced)
        self._needed_tiers.clear()

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
            self._names[peer.number] = name
            ends = layout(peer.host_blocks, self._block_bytes)
            sizes = (ends.digests, ends.epoch, ends.blocks)  # the last ones of older workers
            file, is_kept = self._folder.map(f"{name}-{self._parallel.rank}", sizes)
        except PeerError as error:
            log.warning("the host tier of peer %d cannot be read: %s", peer.number, error)
            self.refusals[peer.number] = str(error)
            return
        content = file[: ends.blocks].view(peer.host_blocks, self._block_bytes).numpy()
        epoch, digests = (file[begin:end].numpy().view(np.int64) for begin, end in itertools.pairwise(ends[1:]))
        memory = self._cache.host_tier(file[: ends.blocks])
        tier = Tier(memory, peer.host_blocks, peer.run, content, epoch, digests, is_kept)
        self._tiers[peer.number] = tier
        log.info("the host tier of peer %d is mapped: %d blocks", peer.number, peer.host_blocks)
