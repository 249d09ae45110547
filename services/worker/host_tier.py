"""Where the host tier of a worker lies, in its own memory or in a folder that others read, and what they must know."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kernels.ops import Cache
from services.worker.mesh import Mesh
from services.worker.peers import Peers
from services.worker.share_folder import ShareFolder
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from shared.settings import WorkerSettings


class HostTier:
    """This rank's part of it. `name`: WorkerInfo.host_tier, the same on all ranks; empty where nobody else reads it."""

    def __init__(self, settings: WorkerSettings, mesh: Mesh) -> None:
        """Raises ConfigurationError for a folder that cannot be used, or that not all ranks see."""
        self._settings, self._mesh, self._folder, self.name = settings, mesh, None, ""
        if settings.kv_share_dir is None:
            return
        self._folder = ShareFolder(settings.kv_share_dir)
        said = mesh.texts(f"{self._folder.id}/{secrets.token_hex(16)}")
        self.name = said[0]
        if any(not other.startswith(f"{self._folder.id}/") for other in said):
            raise ConfigurationError(
                f"--kv-share-dir {settings.kv_share_dir} is another folder on another rank: ranks whose host tiers are "
                "shared have to be on one host"
            )

    def memory(self, size: int) -> Tensor | None:
        """[size] uint8 that other workers can read, to be called once; None where they shall not, or for nothing.

        Raises ConfigurationError where there is no room.
        """
        if self._folder is None or not size:
            return None
        return self._folder.make(f"{self.name.partition('/')[2]}-{self._mesh.rank}", size)

    def peers(self, cache: Cache, block_bytes: int) -> Peers:
        """Of a Run that begins. block_bytes: of a block on this rank."""
        return Peers(cache, block_bytes, self._folder, self._mesh)

    def describe(self, cache: Cache, kernels: str, model_hash: str) -> dict[str, Any]:
        """Fields of WorkerInfo. kv_format: what decides which bytes a block has on each rank, and how they are
        computed, by whose kernels and from which weights."""
        settings, mesh, shape = self._settings, self._mesh, cache.shape
        size = "x".join(map(str, (shape.layers, 2, shape.kv_heads, shape.block_size, shape.head_dim)))
        how = f"{settings.quantize}{' deterministic' if settings.deterministic else ''}"
        return {
            "role": "" if settings.worker_role == "both" else settings.worker_role,
            "host_tier": self.name,
            "kv_format": f"{kernels} {cache.layout} {shape.dtype} {size} tp {mesh.tp} pp {mesh.pp} {how} {model_hash}",
        }
