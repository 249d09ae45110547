"""The CUDA backend's KV pool on the emulated device: both layouts, many orders of work, and bugs that must show."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cuda.cache import CudaCache
from kernels.cuda.device import Device
from kernels.emulator.device import EmulatedDevice
from kernels.ops import CacheShape, Int32
from tests.kernels.cuda.programs import DEVICE, GPU, device_of
from tests.support.compiler import needs_compiler

SHAPE = CacheShape(blocks=12, host_blocks=9, layers=3, kv_heads=2, block_size=16, head_dim=8, dtype=torch.bfloat16)
SEEDS = range(9)

pytestmark = needs_compiler
layouts = pytest.mark.parametrize("layer_major", [False, True], ids=["block-major", "layer-major"])
orders = pytest.mark.parametrize("order", [None, *range(3), *([DEVICE] if GPU else [])])


def cache_on(device: Device, layer_major: bool = False) -> CudaCache:
    """Block b is full of the number b."""
    cache = CudaCache(SHAPE, device, layer_major)
    for block in range(SHAPE.blocks):
        write(cache, block, block)
    cache.host.fill_(-1)
    return cache


def write(cache: CudaCache, block: int, number: int) -> None:
    """On main, as an iteration does."""
    part = cache.pool[:, :, block] if cache.layer_major else cache.pool[block]
    cache.device.main.run(lambda: part.fill_(number))


def int32(*values: int) -> Int32:
    return np.array(values, np.int32)


def pool_of(cache: CudaCache) -> list[float]:
    return [whole(cache.read_block(block)) for block in range(SHAPE.blocks)]


def host_of(cache: CudaCache) -> list[float]:
    return [whole(block) for block in cache.host]


def whole(block: Any) -> float:
    """The number that a block is full of."""
    (number,) = block.unique().tolist() if not block.isnan().any() else (np.nan,)
    return float(number)


@layouts
@orders
def test_random_copies_give_what_they_give_one_after_another(order: int | None, layer_major: bool) -> None:
    cache = cache_on(device_of(order), layer_major)
    random = np.random.default_rng(5)
    pool, host = np.arange(SHAPE.blocks), np.full(SHAPE.host_blocks, -1)
    for _ in range(12):
        count = int(random.integers(1, 7))
        blocks = np.sort(random.choice(SHAPE.blocks, count, replace=False)).astype(np.int32)
        host_blocks = np.sort(random.choice(SHAPE.host_blocks, count, replace=False)).astype(np.int32)
        if random.random() < 0.5:
            cache.start_copy_out(blocks, host_blocks)
            host[host_blocks] = pool[blocks]
        else:
            cache.start_copy_in(host_blocks, blocks)
            pool[blocks] = host[host_blocks]
    cache.device.close()
    assert host_of(cache) == host.tolist() and pool_of(cache) == pool.tolist()


@layouts
def test_addresses_are_those_of_a_layers_keys_and_values(layer_major: bool) -> None:
    cache = CudaCache(SHAPE, EmulatedDevice(), layer_major)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(0)))
    slab = SHAPE.kv_heads * SHAPE.block_size * SHAPE.head_dim
    for block in (0, 1, SHAPE.blocks - 1):
        read = cache.read_block(block).view(torch.int16)
        for layer in range(SHAPE.layers):
            for value, base in enumerate((cache.keys(layer), cache.values(layer))):
                found = (ctypes.c_int16 * slab).from_address(base + 2 * block * cache.block_stride)
                assert list(found) == read[layer, value].flatten().tolist()


def test_pairs_that_follow_one_another_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_on(EmulatedDevice())
    sizes = []
    copy = cache.device.copies.copy

    def counted(target: torch.Tensor, source: torch.Tensor) -> None:
        sizes.append(len(target))
        copy(target, source)

    monkeypatch.setattr(cache.device.copies, "copy", counted)
    cache.copy_out(int32(3, 4, 5, 6, 8, 9, 0), int32(0, 1, 2, 5, 6, 7, 8))
    assert sizes == [3, 1, 2, 1]
    assert host_of(cache) == [3, 4, 5, -1, -1, 6, 8, 9, 0]
    sizes.clear()
    cache.copy_in(int32(0, 0, 1), int32(10, 11, 0))
    assert sizes == [1, 1, 1] and pool_of(cache)[10:] == [3, 3] and pool_of(cache)[0] == 4


@layouts
@pytest.mark.parametrize(
    ("kind", "right"),
    [("copied out before main is done", 99), ("rewritten while it drains", 4), ("read too early", 50)],
)
def test_a_missing_wait_shows(layer_major: bool, kind: str, right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(seed: int, wait: bool) -> float:
        """What becomes of block 4, which holds 4."""
        cache = cache_on(EmulatedDevice(seed), layer_major)
        if right == 99:
            cache.device.close()
            write(cache, 4, 99)
            if not wait:
                monkeypatch.setattr(cache.device.copies, "wait_for", lambda event: None)
            cache.copy_out(int32(4), int32(2))
            return host_of(cache)[2]
        cache.host.fill_(50)
        pending = cache.start_copy_out(int32(4), int32(2)) if right == 4 else cache.start_copy_in(int32(0), int32(4))
        if wait:
            pending.wait()
        if right == 50:
            return whole(cache.read_block(4))
        write(cache, 4, 99)
        cache.device.close()
        return host_of(cache)[2]

    assert {found(seed, wait=True) for seed in SEEDS} == {right}
    assert {found(seed, wait=False) for seed in SEEDS} == {4, 50 if right == 50 else 99}


def test_a_copy_is_ready_when_it_is_done() -> None:
    cache = cache_on(EmulatedDevice(0))
    pending = cache.start_copy_out(int32(1), int32(2))
    asked = 0
    while not pending.ready():
        asked += 1
        assert asked < 1000
    assert asked and host_of(cache)[2] == 1
    pending.wait()
    pending.wait()


def test_no_pairs_are_done_at_once() -> None:
    cache = cache_on(EmulatedDevice(0))
    assert cache.start_copy_out(int32(), int32()).ready() and cache.start_copy_in(int32(), int32()).ready()
