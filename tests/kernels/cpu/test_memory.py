"""Large memory: where it lies, and which part of it may be huge pages."""

from __future__ import annotations

import mmap

import pytest
import torch

from kernels.cpu import memory
from kernels.cpu.memory import HUGE_BYTES, large


@pytest.mark.parametrize("size", [HUGE_BYTES, 3 * HUGE_BYTES - 1, 3 * HUGE_BYTES + 4097])
def test_whole_huge_pages_alone_are_asked_for(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("this system has none")
    asked: list[tuple[int, int]] = []

    class Area(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            assert option == mmap.MADV_HUGEPAGE
            asked.append((torch.frombuffer(self, dtype=torch.uint8).data_ptr() + start, length))
            super().madvise(option, start, length)

    monkeypatch.setattr(memory.mmap, "mmap", Area)
    found = large(size)
    assert found.shape == (size,) and found.data_ptr() % HUGE_BYTES == 0
    assert asked == [(found.data_ptr(), size // HUGE_BYTES * HUGE_BYTES)]
    assert not found.any()
    found.fill_(1)


def test_small_memory_is_zeros_too() -> None:
    assert not large(100).any() and large(0).shape == (0,)


def test_a_system_without_huge_pages_still_gives_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Area(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Area)
    assert large(3 * HUGE_BYTES).shape == (3 * HUGE_BYTES,)
