"""The prefix index of one tier of blocks: it maps a token prefix to the block that holds its KV.

Called by BlockPool, which manages the blocks. The Hasher is also called at intake, outside the iteration. A key of 128
bits identifies a salt and all tokens up to the end of a block. Equal keys mean equal content, so tokens are not kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from services.scheduler.core.types import EMPTY, Int32

Keys = npt.NDArray[np.object_]  # Python ints of 128 bits
Mask = npt.NDArray[np.bool_]
NO_KEYS: Keys = np.zeros(0, np.object_)
NO_KEYS.setflags(write=False)
KEY_BYTES = 16


class Hasher:
    """Chained keys of full blocks: key = BLAKE2b(previous key, tokens of the block). The first one follows a key of the
    salt.

    Source: RFC 7693. A salt separates the prompts of tenants that may not share KV.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def keys(self, tokens: Int32, salt: bytes = b"", before: int = 0) -> Keys:
        """Return [tokens.size // block_size] keys of the full blocks, each an int above 0.

        before: key of the block before `tokens`; the chain goes on from there, and the salt is not used. 0 starts a
        chain.
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
        self._keys = [0] * blocks  # by block; 0 means not indexed
        self._block_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Keys, hidden: Mask | None = None) -> Int32:
        """Return [m] blocks of the longest indexed prefix of `keys`.

        hidden: [blocks] mask of blocks that must not be found; the prefix ends before the first of them.
        """
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
        """Index `blocks` under `keys`, except blocks with a key that is 0 or indexed already.

        Raise ValueError if a block is indexed already.
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
        """Return the keys of [n] blocks; 0 for a block that is not indexed."""
        return [self._keys[block] for block in blocks.tolist()]

    def forget(self, blocks: Int32) -> None:
        """Remove blocks from the index; ignore those that are not indexed."""
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
            return found  # extend() has kept the blocks before the missing key
        return found
