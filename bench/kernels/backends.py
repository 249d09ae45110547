"""The backend that `bench.kernels.main` and `bench.gpu` time: clock, device, plain copies, and the machine's peaks.

Peaks are measured in the same run as the kernels: copies, reads, matrix multiplications.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from bench.kernels.clock import Clock, DeviceClock, HostClock
from bench.kernels.floor import machine_floor
from kernels.cpu.backend import CpuOps
from kernels.cpu.build import TILE_FLAGS, BuildError, cpu_flags, tiles_refusal
from kernels.cpu.commands import BFLOAT16
from kernels.cpu.library import Library, load
from kernels.cuda.device import Device
from shared.errors import ConfigurationError

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
        """Return the lower bound of a kernel that moves these bytes and does these operations."""
        multiply = self.tflop_s.get(type_name(dtype))
        return max(moved_bytes / self.bandwidth_gb_s / 1e3, operations / multiply / 1e6 if multiply else 0.0)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def host_peaks(clock: HostClock, name: str) -> Peaks:
    """Return the peaks of torch's threads. Raise ConfigurationError."""
    floor = machine_floor()
    source = torch.ones(COPIED_BYTES["cpu"], dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_us = clock.eager([lambda: target.copy_(source)])
    return Peaks(
        name,
        copy_gb_s=2 * source.nbytes / copy_us / 1e3,
        read_gb_s=floor.read_gb_s,
        bandwidth_gb_s=floor.read_gb_s,
        tflop_s={"float32": floor.float32_gflop_s / 1e3, "bfloat16": floor.bfloat16_gflop_s / 1e3},
        threads=floor.threads,
    )


def device_peaks(clock: DeviceClock, device: Device) -> Peaks:
    """Measure torch's copy and sum of several gigabytes and its product of two large matrices."""
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


DEVICES = ("cpu", "cuda", "emulator")
TYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float16"), "emulator": ("bfloat16", "float16")}


@dataclass(frozen=True, slots=True)
class Backend:
    """`device` is None on the CPU."""

    clock: Clock
    device: Device | None
    peaks: Callable[[], Peaks]
    instructions: str
    """Those that multiply on a CPU, and why not AMX; empty on a device."""
    plain_copy: Callable[[int, bool], Callable[[], object]]
    """Of a size in bytes, and whether it goes to the host, to a call that copies so much at once and waits for it."""


def opened(name: str, repeats: int, cpu: str = "") -> Backend:
    """Return the backend of a name in DEVICES. cpu: name of the processor. Raises ConfigurationError."""
    if name == "cpu":
        return _host(repeats, cpu)
    device = _device(name)
    from kernels.cuda.backend import CudaOps

    clock = DeviceClock(CudaOps(device), device, repeats)
    copy = partial(pinned_copy, device)
    return Backend(clock, device, lambda: device_peaks(clock, device), "", copy)


def _host(repeats: int, cpu: str) -> Backend:
    try:
        ops = CpuOps(load(), torch.get_num_threads())
    except BuildError as error:
        raise ConfigurationError(f"the cpu kernels cannot be used: {error}") from error
    clock = HostClock(ops, repeats)

    def plain(size: int, _out: bool) -> Callable[[], object]:
        source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        return lambda: target.copy_(source)

    return Backend(clock, None, lambda: host_peaks(clock, cpu), instructions(ops.library), plain)


def instructions(library: Library) -> str:
    """Return which instructions multiply bfloat16, and why they are not AMX."""
    name = library.numerics(BFLOAT16)
    if name == "amx":
        return "bfloat16 by AMX"
    lack = tiles_refusal() or "the kernels were compiled without it"
    if not cpu_flags() >= TILE_FLAGS:
        lack = f"this CPU has no {' and '.join(sorted(TILE_FLAGS))}"
    return f"bfloat16 by {name}; AMX is absent: {lack}"


def _device(name: str) -> Device:
    if name == "emulator":
        from kernels.emulator.device import EmulatedDevice

        return EmulatedDevice(1)  # puts work off: a wait that is missing here shows as a wrong number
    from kernels.cuda.gpu import CudaDevice
    from kernels.cuda.loader import CudaError

    try:
        return CudaDevice(0)
    except CudaError as error:
        raise ConfigurationError(str(error)) from error


def pinned_copy(device: Device, size: int, out: bool) -> Callable[[], object]:
    """Copy once between pinned memory and the device, and wait for the end."""
    host, there = device.pinned((size,), torch.uint8), device.empty((size,), torch.uint8)

    def copy() -> None:
        device.copies.copy(*((host, there) if out else (there, host)))
        device.copies.record().wait()

    return copy
