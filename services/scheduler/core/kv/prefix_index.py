"""The prefix index of one tier of blocks: it maps a token prefix to the block that holds its KV.

Called by BlockPool, which manages the blocks. The Hasher is also called at intake, outside the iteration. A key of 16
bytes identifies a salt and all tokens up to the end of a block. Equal keys mean equal content, so tokens are not kept.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from services.scheduler.core.types import EMPTY, Int32

Key = bytes  # KEY_BYTES of them; empty: none
Keys = list[Key]  # shared by all that have the same prompt: never changed in place
Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.intp]  # of blocks: numpy indexes with them several times faster than with int32
KEY_BYTES = 16
NO_KEY = b""


class Hasher:
    """Chained keys of full blocks: key = BLAKE2b(previous key, tokens of the block). The first one follows a key of the
    salt.

    Source: RFC 7693. A salt separates the prompts of tenants that may not share KV.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def keys(self, tokens: Int32, salt: bytes = b"", before: Key = NO_KEY) -> Keys:
        """Return [tokens.size // block_size] keys of the full blocks.

        before: key of the block before `tokens`; the chain goes on from there, and the salt is not used. NO_KEY starts
        a chain.
        """
        full = tokens.size // self.block_size
        if not full:
            return []
        width = 4 * self.block_size
        data = tokens[: full * self.block_size].astype("<i4").tobytes()
        key = before or blake2b(salt, digest_size=KEY_BYTES).digest()
        keys = []
        for at in range(0, full * width, width):
            key = blake2b(key + data[at : at + width], digest_size=KEY_BYTES).digest()
            keys.append(key)
        return keys


class Index:
    """Key -> block, and for each block its key. At most one block per key."""

    def __init__(self, blocks: int) -> None:
        self.is_indexed: Mask = np.zeros(blocks, np.bool_)
        self._keys: npt.NDArray[np.object_] = np.full(blocks, NO_KEY, np.object_)  # by block; NO_KEY: not indexed
        self._block_of: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Keys, hidden: Mask | None = None) -> Int32:
        """Return [m] blocks of the longest indexed prefix of `keys`.

        hidden: [blocks] mask of blocks that must not be found; the prefix ends before the first of them.
        """
        found = self._leading_blocks(keys)
        if not found:
            return EMPTY
        blocks = np.array(found, np.int32)
        if hidden is not None:
            wrong = hidden.take(blocks)
            return blocks[: wrong.argmax()] if wrong.any() else blocks
        return blocks

    def match_length(self, keys: Keys) -> int:
        """Return how many of the first keys are indexed."""
        return len(self._leading_blocks(keys))

    def register(self, blocks: Numbers, keys: Keys) -> None:
        """Index `blocks` under `keys`, except blocks without a key or with one that is indexed already.

        Raise ValueError, and change nothing, if a block is indexed already or the numbers of blocks and keys differ.
        """
        if len(keys) != blocks.size:
            raise ValueError(f"{len(keys)} keys for {blocks.size} blocks")
        if np.count_nonzero(self.is_indexed[blocks]):
            raise ValueError("a block is registered already")
        numbers = blocks.tolist()
        owners = list(map(self._block_of.setdefault, keys, numbers))
        if self._block_of.pop(NO_KEY, None) is not None or owners != numbers:
            fresh = [i for i, block in enumerate(numbers) if keys[i] and owners[i] == block]
            blocks, keys = blocks[fresh], [keys[i] for i in fresh]
        self._keys[blocks] = keys
        self.is_indexed[blocks] = True

    def keys_of(self, blocks: Numbers) -> Keys:
        """Return the keys of [n] blocks; NO_KEY for a block that is not indexed."""
        keys: Keys = self._keys[blocks].tolist()
        return keys

    def forget(self, blocks: Numbers) -> None:
        """Remove distinct blocks from the index; ignore those that are not indexed."""
        self.is_indexed[blocks] = False
        for key in filter(None, self._keys[blocks].tolist()):
            del self._block_of[key]
        self._keys[blocks] = NO_KEY

    def check(self) -> None:
        """Raise RuntimeError where keys and blocks contradict each other."""
        held = {key: block for block, key in enumerate(self._keys.tolist()) if key}
        if held != self._block_of or sorted(held.values()) != np.flatnonzero(self.is_indexed).tolist():
            raise RuntimeError(f"{len(self._block_of)} keys are indexed, {len(held)} blocks have one")

    def _leading_blocks(self, keys: Keys) -> list[int]:
        """Return the blocks of the leading keys that are indexed."""
        found: list[int] = []
        if keys and keys[0] in self._block_of:  # of most prompts it is not: an exception takes longer
            try:
                found.extend(map(self._block_of.__getitem__, keys))
            except KeyError:
                return found  # extend() has kept the blocks before the missing key
        return found
