"""The backend that `bench.kernels.main` and `bench.gpu` time: its clock, its device, what it copies plainly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.kernels.clock import Clock, DeviceClock, HostClock
from bench.kernels.peaks import Peaks, device_peaks, host_peaks
from kernels.cpu.backend import CpuOps
from kernels.cpu.build import BuildError
from kernels.cpu.library import load
from kernels.cuda.device import Device
from shared.errors import ConfigurationError

DEVICES = ("cpu", "cuda", "emulator")
TYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float16"), "emulator": ("bfloat16", "float16")}


@dataclass(frozen=True, slots=True)
class Backend:
    """`device` is None on the CPU."""

    clock: Clock
    device: Device | None
    peaks: Callable[[], Peaks]
    plain_copy: Callable[[int, bool], Callable[[], object]]
    """Of a size in bytes, and whether it goes to the host, to a call that copies so much at once and waits for it."""


def opened(name: str, repeats: int, cpu: str = "") -> Backend:
    """The backend called so, of DEVICES; cpu: what the processor is called. Raises ConfigurationError."""
    if name == "cpu":
        return _host(repeats, cpu)
    device = _device(name)
    from kernels.cuda.backend import CudaOps

    clock = DeviceClock(CudaOps(device), device, repeats)
    return Backend(clock, device, lambda: device_peaks(clock, device), lambda size, out: pinned_copy(device, size, out))


def _host(repeats: int, cpu: str) -> Backend:
    try:
        ops = CpuOps(load(), torch.get_num_threads())
    except BuildError as error:
        raise ConfigurationError(f"the cpu kernels cannot be used: {error}") from error
    clock = HostClock(ops, repeats)

    def plain(size: int, _out: bool) -> Callable[[], object]:
        source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        return lambda: target.copy_(source)

    return Backend(clock, None, lambda: host_peaks(clock, cpu), plain)


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
    """One copy between pinned memory and the device, waited for."""
    host, there = device.pinned((size,), torch.uint8), device.empty((size,), torch.uint8)

    def copy() -> None:
        device.copies.copy(*((host, there) if out else (there, host)))
        device.copies.record().wait()

    return copy
