"""The prefix index of one tier of blocks: which block holds the KV of which token prefix.

Called by BlockPool, which owns the blocks; the Hasher also at intake, outside the iteration. A key of 128 bits stands
for a salt and all tokens up to the end of a block, so an equal key means an equal content and tokens are not kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from services.scheduler.core.types import EMPTY, Int32

Keys = npt.NDArray[np.object_]  # of whole numbers
Mask = npt.NDArray[np.bool_]
NO_KEYS: Keys = np.zeros(0, np.object_)
NO_KEYS.setflags(write=False)
KEY_BYTES = 16


class Hasher:
    """Chained keys of full blocks: key = BLAKE2b(key before, tokens of the block), the first behind a key of the salt.

    Source: RFC 7693. A salt separates prompts of tenants that may not share KV.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def keys(self, tokens: Int32, salt: bytes = b"", before: int = 0) -> Keys:
        """Return [tokens.size // block_size] keys of the full blocks, each a whole number above 0.

        With `before`, the key of the block before them, the chain goes on from there and the salt does not matter.
        """
        full = tokens.size // self.block_size
        if not full:
            return NO_KEYS
        width = 4 * self.block_size
        data = tokens[: full * self.block_size].astype("<i4").tobytes()
        key = before.to_bytes(KEY_BYTES, "little") if before else blake2b(salt, digest_size=KEY_BYTES).digest()
        keys = []
        for at in range(0, full * width, width):
            key = blake2b(key + data[at : at + width], digest_size=KEY_BYTES).digest()
            keys.append(int.from_bytes(key, "little"))
        return np.array(keys, np.object_)


class Index:
    """Key -> block, and for each block its key. At most one block per key."""

    def __init__(self, blocks: int) -> None:
        self.indexed: Mask = np.zeros(blocks, np.bool_)
        self._keys = [0] * blocks  # 0: not indexed
        self._block_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Keys, hidden: Mask | None = None) -> Int32:
        """Return [m] the blocks of the longest indexed prefix. hidden: [blocks] those that must not be found."""
        found = self._leading(keys)
        if not found:
            return EMPTY
        blocks = np.array(found, np.int32)
        if hidden is not None:
            wrong = hidden.take(blocks)
            return blocks[: wrong.argmax()] if wrong.any() else blocks
        return blocks

    def match_length(self, keys: Keys) -> int:
        """Return how many of the first keys are indexed."""
        return len(self._leading(keys))

    def register(self, blocks: Int32, keys: Iterable[int]) -> None:
        """Index `blocks` under `keys`, but for those whose key is indexed already or 0.

        Raises ValueError if a block is indexed already.
        """
        fresh = []
        for block, key in zip(blocks.tolist(), keys, strict=True):
            if self._keys[block]:
                raise ValueError("a block is registered already")
            if key and self._block_of.setdefault(key, block) == block:
                self._keys[block] = key
                fresh.append(block)
        self.indexed[fresh] = True

    def keys_of(self, blocks: Int32) -> list[int]:
        """Return the keys of [n] blocks, 0 for each that is not indexed."""
        return [self._keys[block] for block in blocks.tolist()]

    def forget(self, blocks: Int32) -> None:
        """Remove blocks from the index; those that are not indexed stay as they are."""
        self.indexed[blocks] = False
        for block in blocks.tolist():
            if key := self._keys[block]:
                del self._block_of[key]
                self._keys[block] = 0

    def check(self) -> None:
        """Raise RuntimeError where keys and blocks contradict each other."""
        held = {key: block for block, key in enumerate(self._keys) if key}
        if held != self._block_of or sorted(held.values()) != np.flatnonzero(self.indexed).tolist():
            raise RuntimeError(f"{len(self._block_of)} keys are indexed, {len(held)} blocks have one")

    def _leading(self, keys: Keys) -> list[int]:
        """Return the blocks of the leading keys that are indexed."""
        found: list[int] = []
        if not keys.size or keys[0] not in self._block_of:
            return found
        try:
            found.extend(map(self._block_of.__getitem__, keys.tolist()))
        except KeyError:
            return found  # extend() keeps what came before the key that is not there
        return found
