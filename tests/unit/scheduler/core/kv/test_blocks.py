"""What BlockPool evicts when, what it refuses, and copies in another tier; its twin is in test_prefix.py."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.core.kv.blocks import BlockPool


def enter(pool: BlockPool, keys: list[int]) -> np.ndarray:
    """Take blocks for one prompt and register them."""
    blocks = pool.take(len(keys))
    pool.register(blocks, keys)
    return blocks


def test_check_sees_a_block_that_is_counted_wrongly() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.check(blocks)
    with pytest.raises(RuntimeError, match="counted wrongly"):
        pool.check(blocks[:1])
    pool.free += 1
    with pytest.raises(RuntimeError):
        pool.check()


@pytest.mark.parametrize("references", [1, -1])
def test_check_sees_a_free_block_with_references(references: int) -> None:
    pool = BlockPool(4)
    (taken,) = pool.take(1)
    free = (taken + 1) % 4
    pool.refs[free] = references
    with pytest.raises(RuntimeError, match="in no state or in two"):
        pool.check()


def test_log_of_cached_blocks_stays_ordered_and_bounded() -> None:
    random = np.random.default_rng(3)
    pool = BlockPool(40, indexed=True)
    blocks = enter(pool, list(range(1, 41)))
    order = blocks.tolist()[::-1]
    pool.give(blocks)
    for _ in range(300):
        some = random.permutation(40)[: random.integers(1, 30)].astype(np.int32)
        pool.share(np.concatenate([some, some]))
        pool.give(some)
        pool.give(some)
        order = [b for b in order if b not in set(some.tolist())] + some.tolist()[::-1]
        count = int(random.integers(0, 41))
        assert pool.coldest(count).tolist() == order[:count]
    pool.check()


def test_wrong_registrations_are_refused() -> None:
    pool = BlockPool(4, indexed=True)
    blocks = enter(pool, [1])
    with pytest.raises(ValueError, match="registered already"):
        pool.register(blocks, [2])
    with pytest.raises(ValueError, match="without a reference"):
        pool.register(np.array([3], np.int32), [2])
    pool.check()


def test_a_refused_registration_changes_nothing() -> None:
    pool = BlockPool(4, indexed=True)
    registered, fresh = enter(pool, [1]), pool.take(1)
    with pytest.raises(ValueError, match="registered already"):
        pool.register(np.concatenate([fresh, registered]), [2, 3])
    for keys in ([2], [2, 3, 4]):
        with pytest.raises(ValueError, match="keys for 2 blocks"):
            pool.register(np.concatenate([fresh, pool.take(1)]), keys)
    assert pool.keys_of(fresh) == [0]
    pool.check()


def test_one_block_is_registered_for_equal_keys() -> None:
    pool = BlockPool(4, indexed=True)
    assert pool.keys_of(enter(pool, [5, 6, 5])) == [5, 6, 0]
    assert pool.keys_of(enter(pool, [6])) == [0]
    pool.check()


def test_a_block_without_a_key_is_not_registered() -> None:
    pool = BlockPool(4, indexed=True)
    blocks = enter(pool, [5, 0])
    assert pool.keys_of(blocks) == [5, 0]
    pool.give(blocks)
    assert (pool.free, pool.cached) == (3, 1)
