"""What the parts of `bench.gpu` begin with: the device and what it can do at best."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.gpu.context import Context
from bench.kernels.backends import opened
from bench.kernels.case import Bench
from bench.kernels.clock import DeviceClock
from bench.kernels.peaks import Peaks, device_peaks
from bench.kernels.shapes import GPU, QUICK, Plan
from kernels.cuda.device import Device
from shared.errors import ConfigurationError

REPEATS = 9


@dataclass(frozen=True, slots=True)
class Setup:
    clock: DeviceClock
    device: Device
    plan: Plan

    def bench(self, peaks: Peaks, dtype: torch.dtype = torch.bfloat16) -> Bench:
        return Bench(self.clock, peaks, self.plan, dtype)


def setup(context: Context) -> Setup:
    """Raises ConfigurationError where the device cannot be had."""
    backend = opened(context.device, 2 if context.quick else REPEATS)
    if backend.device is None or not isinstance(backend.clock, DeviceClock):
        raise ConfigurationError(f"{context.device} is no device of the CUDA kernels")
    return Setup(backend.clock, backend.device, QUICK if context.quick else GPU)


def known_peaks(context: Context, made: Setup | None = None) -> Peaks:
    """As the probes found them in this run, or found now. Raises ConfigurationError as `setup`."""
    if found := context.found("probes").get("peaks"):
        return Peaks(**found)
    made = made or setup(context)
    return device_peaks(made.clock, made.device)
