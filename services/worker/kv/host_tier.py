"""Place the host tier of a worker, in private memory or in a folder that other workers read, and describe it."""

from __future__ import annotations

import logging
import mmap
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Cache, Int32
from services.worker.kv.cache import KEPT_SHARE, NO_HOST_TIER
from services.worker.kv.peers import Peers
from services.worker.kv.share_folder import KeptFile, NoRoomError, Reservation, ShareFolder
from services.worker.kv.tier_file import compute_digests, layout
from services.worker.parallel.state import ParallelState
from shared.errors import ConfigurationError
from shared.kept_files import owner_of

if TYPE_CHECKING:
    from shared.settings import WorkerSettings  # pydantic: an engine in process does without

FOLDER_SHARE = 0.5
"""Of what is free in --kv-share-dir, at most, for a tier without --host-blocks: another worker may be about to take the
rest."""

PRIVATE = "the host tier lies in memory of this worker alone, and no KV outlives it: %s"

NOT_KEPT = "--kv-share-dir %s: KV is not kept: %s"

RESERVE_S = 1.0
"""How long a worker that leaves waits for the folder's lock: its scheduler waits for a few seconds."""

log = logging.getLogger("orcinus.worker")


class HostTier:
    """This rank's part of the host tier. `name`: WorkerInfo.host_tier, the same on all ranks; empty if not shared."""

    def __init__(self, settings: WorkerSettings, parallel: ParallelState) -> None:
        """Raise ConfigurationError for a folder that cannot be used, or that not all ranks see."""
        self._settings, self._parallel, self._folder, name = settings, parallel, None, ""
        # Parts of the file: its blocks, the epoch and the digests.
        self._memory = torch.empty((0, 0), dtype=torch.uint8)
        self._run = self._digests = torch.empty(0, dtype=torch.int64)
        self._blocks = self._block_bytes = self._rest_bytes = 0  # rest: behind the blocks
        self._threads = 1  # of this rank
        self._owner = ""  # of the file if it outlives this process: equal for workers of the same model and shard
        self._needed_tiers: set[str] = set()  # names of tiers with kept files, of the last Hello
        self._older: list[KeptFile] = []  # files from before it
        self._release: Callable[[], object] = lambda: None  # gives back the room that is reserved
        if settings.kv_share_dir is not None:
            self._folder = ShareFolder(settings.kv_share_dir)
            self._older = self._folder.kept_files()
            name = f"{self._folder.id}/{secrets.token_hex(16)}"
        # Also without a folder: a rank that did not take part would block the others.
        given = "any" if settings.host_blocks is None else "given"
        said = parallel.texts(f"{settings.worker_role} {given} {name}")
        for rank, other in enumerate(said):
            if other.partition("/")[0] != said[0].partition("/")[0]:
                raise ConfigurationError(
                    f"rank {rank} of the replica has another --worker-role, --host-blocks or --kv-share-dir than rank "
                    "0; give all ranks the same, on one host"
                )
        self.name = said[0].rpartition(" ")[2]

    def take(self, host_blocks: int, block_bytes: int, is_for_memory: bool = False) -> tuple[int, Tensor | None]:
        """Return how many blocks the tier has, and their memory, which other workers can read; None if not shared, or
        for nothing. To be called once with more than 0, on every rank.

        Without --host-blocks the tier has fewer than host_blocks if the folder has no room for them: other workers may
        take room at the same moment. A worker without a role that needs the tier for sequences beyond its pool
        (is_for_memory) then gets all blocks, not shared. Raise ConfigurationError if a worker with a role has no room
        for one.
        """
        self._threads = torch.get_num_threads()
        if self._folder is None or not host_blocks:
            return host_blocks, None
        if self._settings.host_blocks is not None:
            try:
                file = self._make(self._folder, host_blocks, block_bytes)
            except NoRoomError as error:
                if self._settings.worker_role != "both":
                    raise
                log.warning(PRIVATE, error)
                return host_blocks, None
            return host_blocks, self._part(file, host_blocks, block_bytes)
        blocks, memory = host_blocks, None
        while blocks := self._parallel.least([min(blocks, self._fitting(self._folder, block_bytes))])[0]:
            with suppress(NoRoomError):
                memory = self._make(self._folder, blocks, block_bytes)
            if self._parallel.least([int(memory is not None)])[0]:
                break
            memory = None  # another rank may be short of it
            blocks //= 2
        if blocks < host_blocks:
            if is_for_memory and self._settings.worker_role == "both":
                log.warning(PRIVATE, f"{self._said} has room for {blocks} blocks instead of {host_blocks}")
                return host_blocks, None
            log.warning("%s has room for %d blocks of the host tier instead of %d", self._said, blocks, host_blocks)
        if not blocks and self._settings.worker_role == "prefill":
            raise ConfigurationError(NO_HOST_TIER)
        return blocks, self._part(memory, blocks, block_bytes) if memory is not None else None

    @property
    def _said(self) -> str:
        return f"--kv-share-dir {self._settings.kv_share_dir}"

    def _fitting(self, folder: ShareFolder, block_bytes: int) -> int:
        return int(folder.free_bytes() * FOLDER_SHARE) // self._parallel.ranks_here // block_bytes

    @property
    def _tier_id(self) -> str:
        return self.name.partition("/")[2]

    @property
    def _file(self) -> str:
        return f"{self._tier_id}-{self._parallel.rank}"

    def _make(self, folder: ShareFolder, blocks: int, block_bytes: int) -> Tensor:
        return folder.make(self._file, layout(blocks, block_bytes).digests)

    def _part(self, file: Tensor, blocks: int, block_bytes: int) -> Tensor:
        """Return the part of the file that the blocks have."""
        ends = layout(blocks, block_bytes)
        self._blocks, self._block_bytes, self._rest_bytes = blocks, block_bytes, ends.digests - ends.blocks
        self._run = file[ends.run : ends.epoch].view(torch.int64)
        self._digests = file[ends.epoch : ends.digests].view(torch.int64)
        self._memory = file[: ends.blocks].view(blocks, block_bytes)
        return file[: ends.blocks]

    def begin_run(self, epoch: int) -> None:
        """Tell readers that a Run of this epoch has the tier now. No copy of the Run before may be running."""
        self._run.fill_(epoch)
        self._digests.zero_()

    def peers(self, cache: Cache, block_bytes: int) -> Peers:
        """Return the peers of a Run that begins. block_bytes: of a block on this rank."""
        return Peers(cache, block_bytes, self._folder, self._parallel, self._owner, self._needed_tiers)

    def serve(self, shard: str, wanted: Collection[str]) -> None:
        """Take the shard of a Run that begins, and remove what earlier workers of the same model and shard have kept.

        wanted: names of host tiers that the scheduler still needs. Files that came while it wrote them stay: those
        that were not there at the start of this process, or at the Hello before.
        """
        if self._folder is None:
            return
        model = self._settings.served_model_name
        self._owner = owner_of(model, shard)
        self._needed_tiers = {name.partition("/")[2] for name in wanted}
        self._release()
        old = self._older
        self._folder.remove_kept(
            file for file in old if file.owner == self._owner and file.tier not in self._needed_tiers
        )
        self._older = self._folder.kept_files()

    def make_room(self, blocks: int, memory_bytes: int) -> int:
        """Return how many of `blocks` may outlive this worker, on every rank, and reserve the room for them.

        Where room is short, what other models have kept is removed, the oldest first.

        That is all with --host-blocks, else as many as fit into this model's part of KEPT_SHARE of `memory_bytes`, the
        memory of the worker. Models that keep KV have equal parts, at most a half each. Workers of one model that leave
        at the same time share its part: the first one takes what it needs.
        """
        most = blocks if self._run.numel() and self._owner else 0
        most, memory_bytes, block_bytes = self._parallel.least([most, memory_bytes, -self._block_bytes])
        if most and self._folder is not None and self._parallel.is_leader:  # one rank decides for all
            try:
                most = self._reserve(self._folder, most, memory_bytes, -block_bytes)
            except OSError as error:
                log.warning(NOT_KEPT, self._settings.kv_share_dir, error.strerror)
                most = 0
        return self._parallel.least([most])[0]

    def _reserve(self, folder: ShareFolder, blocks: int, memory_bytes: int, block_bytes: int) -> int:
        """Reserve room for at most `blocks` blocks of `block_bytes` on each rank. Return how many. Raise OSError."""
        self._release()
        ranks = self._parallel.ranks_here
        rest = -(-self._rest_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with folder.locked(RESERVE_S):
            if self._settings.host_blocks is None:
                tiers, budget = _kept_tiers(folder), int(memory_bytes * KEPT_SHARE) * ranks
                blocks = min(blocks, max(0, self._room(tiers, budget) // ranks - rest) // block_bytes)
            size = (blocks * block_bytes + rest) * ranks if blocks else 0
            if self._settings.host_blocks is None:
                _remove_oldest(folder, tiers, self._owner, size, budget)
            if blocks:
                self._release = folder.reserve(Reservation(self._tier_id, self._owner, size))
        return blocks

    def _room(self, tiers: Sequence[_KeptTier], budget: int) -> int:
        """Return the bytes that all ranks have in this model's part of the memory for kept files."""
        part = budget // max(2, len({tier.owner for tier in tiers} | {self._owner}))
        part -= sum(tier.size_bytes for tier in tiers if tier.owner == self._owner)
        stays = sum(tier.size_bytes for tier in tiers if tier.owner == self._owner or tier.is_reserved)
        return min(part, _most_kept(tiers, budget) - stays)

    def keep(self, blocks: Int32) -> int:
        """Let these blocks outlive this process with their digests, for workers that map them as a peer's, and free
        the memory of the others. Return how many: none where the system refuses."""
        if self._folder is None or not blocks.size:
            return 0
        block_bytes = self._block_bytes
        edges = np.unique(np.concatenate([[-1], blocks, [self._blocks]]))
        begins, sizes = (edges[:-1] + 1) * block_bytes, (np.diff(edges) - 1) * block_bytes
        gaps = [(begin, size) for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True) if size]
        self._digests.numpy()[blocks] = compute_digests(self._memory.numpy(), blocks, self._threads)
        try:
            self._folder.keep(self._file, self._owner, gaps)
        except OSError as error:
            log.warning(NOT_KEPT, self._settings.kv_share_dir, error.strerror)
            return 0
        mib = blocks.size * block_bytes / 2**20
        log.info("%d blocks of the host tier (%.0f MiB) stay for the next worker", blocks.size, mib)
        return int(blocks.size)

    def describe(self, cache: Cache, kernels: str, model_hash: str) -> dict[str, Any]:
        """Return fields of WorkerInfo. kv_format: the facts that decide which bytes a block has on each rank: layout
        (another for KV in 8 bits), kernels, ranks, settings and weights."""
        settings, parallel, shape = self._settings, self._parallel, cache.shape
        size = "x".join(map(str, (shape.layers, 2, shape.kv_heads, shape.block_size, shape.head_dim)))
        ranks = f"tp {parallel.tp} pp {parallel.pp}"
        how = f"{settings.quantize}{' deterministic' if settings.deterministic else ''}"
        return {
            "role": "" if settings.worker_role == "both" else settings.worker_role,
            "host_tier": self.name,
            "keeps": bool(self._run.numel()),
            "kv_format": f"{kernels} {cache.layout} {shape.dtype} {size} {ranks} {how} {model_hash}",
        }


class _KeptTier(NamedTuple):
    """A host tier that was kept, or that a worker which leaves has reserved room for."""

    owner: str
    size_bytes: int  # of all ranks
    files: list[KeptFile]
    is_reserved: bool


def _kept_tiers(folder: ShareFolder) -> list[_KeptTier]:
    """Return the tiers that were kept, or are about to be, oldest first."""
    files: dict[str, list[KeptFile]] = {}
    for file in folder.kept_files():
        files.setdefault(file.tier, []).append(file)
    rooms = {room.tier: room for room in folder.reservations()}
    tiers = []
    for tier in {**files, **rooms}:
        kept, room = files.get(tier, []), rooms.get(tier)
        size = max(sum(file.size_bytes for file in kept), room.size_bytes if room else 0)
        tiers.append(_KeptTier((room or kept[0]).owner, size, kept, room is not None))
    return tiers


def _remove_oldest(folder: ShareFolder, tiers: Sequence[_KeptTier], owner: str, size: int, budget: int) -> None:
    """Remove files of other models until `size` bytes of `owner` have room."""
    excess = size + sum(tier.size_bytes for tier in tiers) - _most_kept(tiers, budget)
    for tier in tiers:
        if excess > 0 and tier.owner != owner and not tier.is_reserved:
            folder.remove_kept(tier.files)
            excess -= tier.size_bytes


def _most_kept(tiers: Sequence[_KeptTier], budget: int) -> int:
    """Return the bytes that all kept files may have.

    The worker of another model may have more memory than this one with `budget`. It has kept a half of its own budget
    at most, so the largest host tier tells of the largest budget. One with --host-blocks may have kept more than that:
    beside its tier the bound is higher than any worker's budget.
    """
    return max(budget, 2 * max((tier.size_bytes for tier in tiers), default=0))
