"""What the machine can do at best, measured in the same run as the kernels: copies, reads, matrix multiplications."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.engine.floor import machine_floor
from bench.kernels.clock import DeviceClock, HostClock
from kernels.cuda.device import Device

COPIED_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
MATRIX = {"cpu": 16, "cuda": 8192}  # rows, columns and depth; on the CPU only the emulator multiplies here


@dataclass(frozen=True, slots=True)
class Peaks:
    """`bandwidth_gb_s` is what floors are made of: on a device that of copying, on the CPU that of reading."""

    device: str
    copy_gb_s: float  # bytes read and bytes written
    read_gb_s: float
    bandwidth_gb_s: float
    tflop_s: dict[str, float]  # of matrices, by their type
    threads: int = 0  # of the CPU

    def floor_us(self, moved_bytes: float, operations: float, dtype: torch.dtype) -> float:
        """No kernel is faster: it moves these bytes and does these operations on numbers of that type."""
        multiply = self.tflop_s.get(type_name(dtype))
        return max(moved_bytes / self.bandwidth_gb_s / 1e3, operations / multiply / 1e6 if multiply else 0.0)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def host_peaks(clock: HostClock, name: str) -> Peaks:
    """Of all threads of torch; a bfloat16 product is taken to cost half of a float32 one. Raises ConfigurationError."""
    floor = machine_floor()
    source = torch.ones(COPIED_BYTES["cpu"], dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_us = clock.eager([lambda: target.copy_(source)])
    float32 = floor.float32_gflop_s / 1e3
    return Peaks(
        name,
        copy_gb_s=2 * source.nbytes / copy_us / 1e3,
        read_gb_s=floor.read_gb_s,
        bandwidth_gb_s=floor.read_gb_s,
        tflop_s={"float32": float32, "bfloat16": 2 * float32},
        threads=floor.threads,
    )


def device_peaks(clock: DeviceClock, device: Device) -> Peaks:
    """Torch's copy of several gigabytes, its sum over them, its product of two large matrices."""
    kind = device.torch_device.type
    size = COPIED_BYTES[kind] // 4 if kind == "cuda" else 1 << 12
    source = clock.random(size, dtype=torch.float32)
    target, total = clock.empty(size, dtype=torch.float32), clock.empty(1, dtype=torch.float32)
    copy_us = clock.eager([lambda: target.copy_(source)])
    read_us = clock.eager([lambda: torch.sum(source, 0, keepdim=True, out=total)])
    copy_gb_s = 2 * source.nbytes / copy_us / 1e3
    types = (torch.bfloat16, torch.float16)
    return Peaks(
        device.name,
        copy_gb_s=copy_gb_s,
        read_gb_s=source.nbytes / read_us / 1e3,
        bandwidth_gb_s=copy_gb_s,
        tflop_s={type_name(dtype): _multiply_tflop_s(clock, MATRIX[kind], dtype) for dtype in types},
    )


def _multiply_tflop_s(clock: DeviceClock, size: int, dtype: torch.dtype) -> float:
    left, right = clock.random(size, size, dtype=dtype), clock.random(size, size, dtype=dtype, seed=1)
    out = clock.empty(size, size, dtype=dtype)
    multiply: Callable[[], object] = lambda: torch.mm(left, right, out=out)  # noqa: E731
    return 2 * size**3 / clock.eager([multiply] * 4) / 1e6
