"""The CUDA sources as tests launch them: emulated, in several orders of threads, on numbers with a fence around.

Under sanitizers one order is enough: which thread comes first changes what a race leaves, and no address. With
EMULATOR_RACES in the environment (`make kernels-races`) the order of all accesses to memory is checked.

Where torch has a GPU the same tests run on it instead: their memory is pinned, which a GPU reads and writes under the
same address. Under a preloaded libasan (`make sanitizers`) the emulated programs are instrumented; with EMULATOR_PTX
(`make kernels-ptx`) they are what NVRTC makes of the sources.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.cuda import loader
from kernels.cuda.calls import BF16, F16, SCALE_BYTES, SLAB, Call
from kernels.cuda.device import Device
from kernels.emulator.device import EmulatedDevice
from kernels.emulator.program import FORWARD, PTX, RACES, REVERSE, SANITIZERS, Program
from kernels.ops import MAX_CODE
from tests.kernels.sequences import rounded

GPU = torch.cuda.is_available()
HAS_WGMMA = not GPU or torch.cuda.get_device_capability() == (9, 0)
DEVICE = -1
"""Instead of an order of threads: on the GPU."""
TYPES = {BF16: torch.bfloat16, F16: torch.float16}
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
HOW = {"EMULATOR_RACES": RACES, "EMULATOR_PTX": PTX}
FLAGS = SANITIZERS if SANITIZED else next((flags for name, flags in HOW.items() if name in os.environ), ())
ORDERS = (DEVICE,) if GPU else (FORWARD,) if SANITIZED else (FORWARD, REVERSE, 2)
SEEDS = (None, 1, 2, 3)
"""Of the order in which an emulated device works; None is at once."""
FENCE = 64
UNTOUCHED = -77.0


@cache
def program_of(kernel: str) -> Program:
    """The emulated program that has a kernel of that name."""
    return Program(source_of(kernel), include=(loader.SOURCES,), flags=FLAGS)


@cache
def device_program_of(kernel: str) -> loader.Program:
    return loader.Program(source_of(kernel))


def device_of(order: int | None = None, processors: int = 4) -> Device:
    """The GPU if there is one, else an emulated device that does its work in an order."""
    if not GPU:
        return EmulatedDevice(order, processors=processors, flags=FLAGS)
    from kernels.cuda.gpu import CudaDevice

    return CudaDevice()


def device_of_threads(order: int, processors: int = 4) -> Device:
    """A device that runs the threads of its kernels in an order, or the GPU."""
    return device_of(order) if order == DEVICE else EmulatedDevice(None, order, processors=processors, flags=FLAGS)


def source_of(kernel: str) -> Path:
    return next(source for source in loader.sources() if f"KERNEL({kernel}," in source.read_text())


def launch(call: Call, order: int) -> None:
    """Runs the kernel to its end."""
    if order != DEVICE:
        program_of(call.name).launch(*call, order=order)
        return
    device_program_of(call.name).launch(*call, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return fenced(made.to(dtype))


def fenced(values: Tensor) -> Tensor:
    """A copy with a fence before and behind it in memory, at a multiple of 16 bytes; `assert_fences` looks at them."""
    whole = torch.full((values.numel() + 2 * FENCE,), UNTOUCHED, dtype=values.dtype, pin_memory=GPU)
    part = whole[FENCE:-FENCE].view(values.shape)
    part.copy_(values)
    return part


def untouched(*shape: int, dtype: torch.dtype) -> Tensor:
    """Room for results, fenced, so filled that one that is not written shows."""
    return fenced(torch.full(shape, UNTOUCHED, dtype=dtype))


def assert_fences(*tensors: Tensor) -> None:
    for tensor in tensors:
        whole = tensor.new_empty(0).set_(tensor.untyped_storage())
        assert (whole[:FENCE] == UNTOUCHED).all() and (whole[-FENCE:] == UNTOUCHED).all()


def part_of(kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, fp8: bool) -> Tensor:
    """K or V of a layer's block in which nothing was written: NaN, with fp8 in its scales."""
    if not fp8:
        return torch.full((kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    return torch.full((kv_heads, block_size // SLAB, SLAB * (head_dim + SCALE_BYTES)), -1, dtype=torch.int8)


def put(part: Tensor, blocks: Tensor, places: Tensor, x: Tensor, fp8: bool) -> Tensor:
    """Write x [n, kv_heads, head_dim] to places of blocks, and return what attention reads there.

    part: [blocks, ...] as part_of.
    """
    if not fp8:
        part[blocks, :, places] = x
        return x
    heads, head_dim = x.shape[1:]
    scale = x.float().abs().amax(-1, keepdim=True) / MAX_CODE["fp8"]
    codes = (x.float() / scale).to(torch.float8_e4m3fn)
    for values, begin in ((codes, 0), (scale, SLAB * head_dim)):
        held = values.view(torch.int8)
        at = begin + (places % SLAB)[:, None] * held.shape[-1] + torch.arange(held.shape[-1])
        part[blocks[:, None, None], torch.arange(heads)[:, None], (places // SLAB)[:, None, None], at[:, None]] = held
    return rounded(x, "fp8")


def take(part: Tensor, block: int, place: int, head_dim: int) -> Tensor:
    """Return the numbers [kv_heads, head_dim] of a place with fp8, and leave it untouched."""
    slab, token = part[block, :, place // SLAB], place % SLAB
    codes = slab[:, token * head_dim : (token + 1) * head_dim]
    scale = slab[:, SLAB * head_dim + SCALE_BYTES * token :][:, :SCALE_BYTES]
    numbers = codes.contiguous().view(torch.float8_e4m3fn).float() * scale.contiguous().view(torch.float32)
    codes.fill_(UNTOUCHED)
    scale.fill_(UNTOUCHED)
    return numbers


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32, pin_memory=GPU).numpy()
