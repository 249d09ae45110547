"""Properties of the device: identity, host cost of a launch, rates of copies, reads, products and swaps."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.context import Context
from bench.gpu.kernels import Setup, setup
from bench.kernels.backends import device_peaks, pinned_copy
from kernels.cuda import calls, loader
from kernels.cuda.calls import BF16
from kernels.emulator.program import compiled as emulated
from kernels.ops import Norm

SMALL = 8  # numbers: a kernel that does nothing else but start
LAUNCHES = 2000
IN_A_GRAPH = 200
PINNED_BYTES = 1 << 30
ASKED = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,pcie.link.gen.current,pcie.link.width.current"


def compile_all(context: Context) -> Iterator[tuple[str, Any]]:
    """Yield seconds_of: the compilation time of each source; later parts use the cache."""
    arch = loader.present_architecture() if context.device == "cuda" else None
    sources = loader.sources(arch)
    if arch:
        make: Callable[[Path], object] = partial(_cubin, arch)
    else:
        make = partial(emulated, include=(loader.SOURCES,))
    with ThreadPoolExecutor(len(sources)) as pool:
        yield (
            "seconds_of",
            dict(zip((path.name for path in sources), pool.map(partial(_took_s, make), sources), strict=True)),
        )


def _cubin(arch: str, source: Path) -> object:
    return loader.prebuilt(source, arch) or loader.compiled(source, arch)


def _took_s(make: Callable[[Path], object], source: Path) -> float:
    begun = time.monotonic()
    make(source)
    return round(time.monotonic() - begun, 1)


def probes(context: Context) -> Iterator[tuple[str, Any]]:
    """Yield device, peaks, launches_us, pinned_gb_s."""
    made = setup(context)
    yield "device", _about(made)
    with torch.inference_mode():
        yield "peaks", device_peaks(made.clock, made.device).as_dict()
        yield "launches_us", _launches(made, 20 if context.quick else LAUNCHES)
        size = 1 << 16 if context.quick else PINNED_BYTES
        copies = {"out": pinned_copy(made.device, size, True), "in": pinned_copy(made.device, size, False)}
        yield "pinned_gb_s", {name: size / made.clock.wall([copy], 5) / 1e3 for name, copy in copies.items()}


def _about(made: Setup) -> dict[str, Any]:
    device = made.device
    free, total = device.free_bytes()
    about: dict[str, Any] = {"name": device.name, "processors": device.processors, "free": free, "total": total}
    about["has_wgmma"] = device.has_wgmma
    if device.torch_device.type == "cuda":
        about["cuda_of_torch"] = torch.version.cuda
        about["capability"] = list(torch.cuda.get_device_capability(device.torch_device))
    if tool := shutil.which("nvidia-smi"):
        said = subprocess.run(
            [tool, f"--query-gpu={ASKED}", "--format=csv"], capture_output=True, text=True, timeout=20
        )
        about["nvidia_smi"] = said.stdout.strip()
    return about


def _launches(made: Setup, count: int) -> dict[str, float]:
    """Return microseconds of the host for each launch, and of the device for a small kernel in a graph of many."""
    clock, device, ops = made.clock, made.device, made.clock.ops
    x, residual = (clock.random(1, SMALL, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    call = calls.add(BF16, 1, SMALL, x.data_ptr(), residual.data_ptr())
    norm = Norm(clock.random(SMALL, dtype=torch.float32), None, 1e-5)

    def launch() -> None:
        device.main.launch(call, x, residual)

    def many() -> None:
        for _ in range(IN_A_GRAPH):
            launch()

    ways: dict[str, Callable[[], object]] = {
        "our kernel": launch,
        "our operation": lambda: ops.norm(x, norm),
        "torch add_": lambda: device.main.run(lambda: residual.add_(x)),
        "event": device.main.record,
    }
    found = {name: clock.host_us(way, count) for name, way in ways.items()}
    replay = device.capture(many)
    found["graph of 200, host"] = clock.host_us(replay, max(1, count // IN_A_GRAPH))
    found["kernel in a graph, device"] = clock.replayed(replay, IN_A_GRAPH)
    return found
