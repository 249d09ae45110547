"""The peaks of the machine or its GPU, measured: bytes a second and multiplications a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernels.cpu.build import BuildError
from kernels.cpu.commands import BFLOAT16, FLOAT32
from kernels.cpu.library import Library, load
from shared.errors import ConfigurationError

READ_BYTES = 256 << 20  # past every cache
ROUNDS = 2_000_000
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Floor:
    """Peaks with all threads of torch, by the kernels' instructions. Those of a GPU if it is named: bytes copied, the
    rate of 16 bits, and half of it for 32."""

    threads: int
    read_gb_s: float
    float32_gflop_s: float
    bfloat16_gflop_s: float
    device: str = ""

    def step_ms(self, read_bytes: float, operations: float, width: int) -> float:
        """Return the lower bound of an iteration with this traffic and work at `width` bytes a number."""
        rate = self.float32_gflop_s if width == 4 else self.bfloat16_gflop_s
        return max(read_bytes / self.read_gb_s / 1e6, operations / rate / 1e6)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def machine_floor() -> Floor:
    """Measure the peaks in about a second. Raises ConfigurationError if the CPU kernels are not available."""
    try:
        library = load()
    except BuildError as error:
        raise ConfigurationError(f"the floor is measured with the cpu kernels: {error}") from error
    threads = torch.get_num_threads()
    data = torch.ones(READ_BYTES // 4)
    read_s = _best_s(lambda: library.read(data.data_ptr(), READ_BYTES, threads))
    float32, bfloat16 = (_gflop_s(library, dtype, threads) for dtype in (FLOAT32, BFLOAT16))
    return Floor(threads, READ_BYTES / read_s / 1e9, float32, bfloat16)


def _gflop_s(library: Library, dtype: int, threads: int) -> float:
    done = library.multiply(dtype, 1, threads) * ROUNDS
    return done / _best_s(lambda: library.multiply(dtype, ROUNDS, threads)) / 1e9


def _best_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)
