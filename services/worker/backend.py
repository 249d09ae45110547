"""Choose the kernels, the device and the type that a worker computes with; the log says which.

`auto` is a GPU if one can be used, else the C++ kernels where they can be had, in the checkpoint's type. Nothing is
measured: the same machine, model and settings give the same choice, so answers do not change with a busy moment. A
backend that the operator names is used or refused, never replaced.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

import kernels.reference  # noqa: F401 - registers the backend
from kernels import ops as kernel_ops
from kernels.cpu.backend import CpuOps
from kernels.cpu.build import BuildError
from kernels.cpu.library import Library, load
from kernels.cuda.device import Device
from kernels.cuda.loader import CudaError
from kernels.ops import AnyOps
from services.worker.gpu_choice import (
    BLOCK_TOKENS,
    cpu_option,
    demands_gpu,
    has_kernels,
    lacks_kernels,
    may_use_gpu,
    refused_on_gpu,
    stays_on_cpu,
)
from services.worker.models.config import DecoderConfig
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from shared.settings import WorkerSettings  # pydantic: an engine in process does without

log = logging.getLogger("orcinus.worker")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose(settings: WorkerSettings, config: DecoderConfig) -> tuple[AnyOps, torch.dtype]:
    """Return the operations and the type to compute in. Raise ConfigurationError for what cannot be had."""
    if settings.kernels == "emulator":
        return _emulator(settings, config)
    if _on_gpu(settings, config):
        return _gpu(settings, config)
    dtype = cpu_dtype(settings.dtype, config)
    if settings.kernels == "reference" and (option := _needs_kernels(settings)):
        raise ConfigurationError(f"{option} needs the cpu kernels; give --kernels auto or cpu")
    library = None if settings.kernels == "reference" else cpu_library(settings)
    if library is None:
        return kernel_ops.create("reference", torch.device("cpu")), dtype
    return _cpu_ops(settings, config, library, dtype), dtype


def set_threads(settings: WorkerSettings, ranks_here: int) -> None:
    """Set the CPU threads of torch: as set, else its choice, shared with the replica's other ranks on this host."""
    if settings.threads or ranks_here > 1:
        torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() // ranks_here))


def device_of(ops: AnyOps) -> Device | None:
    """Return the device with the memory that holds the KV pool; None for the host's memory."""
    gpu: Device | None = getattr(ops, "gpu", None)
    if gpu is None and ops.device.type == "cuda":  # the reference kernels on a GPU
        from kernels.cuda.gpu import CudaDevice

        return CudaDevice(ops.device.index or 0)
    return gpu


def cpu_dtype(wanted: str, config: DecoderConfig) -> torch.dtype:
    """Return the type: `auto` is the checkpoint's, float16 as float32. Raise ConfigurationError for float16 by name."""
    if wanted == "float16":
        raise ConfigurationError("--dtype float16 needs a GPU; the CPU engine computes in float32 or bfloat16")
    dtype = gpu_dtype(wanted, config)
    return torch.float32 if dtype == torch.float16 else dtype


def gpu_dtype(wanted: str, config: DecoderConfig) -> torch.dtype:
    """Return the type; `auto` is the checkpoint's."""
    return DTYPES[config.checkpoint_dtype if wanted == "auto" else wanted]


def _on_gpu(settings: WorkerSettings, config: DecoderConfig) -> bool:
    """Return whether to compute on a GPU. Raise ConfigurationError when one is demanded and cannot be used."""
    if demands_gpu(settings):
        wish = "DEVICE=cuda" if settings.device == "cuda" else "--kernels cuda"
        if settings.device == "cpu":
            raise ConfigurationError("--kernels cuda needs a GPU, and DEVICE=cpu rules it out; give DEVICE=cuda")
        if option := cpu_option(settings):
            raise ConfigurationError(f"{option} is for CPUs alone and {wish} for a GPU; drop one of the two")
        if lack := _lacks_gpu():
            raise ConfigurationError(f"{wish}: {lack}")
        return True
    if not may_use_gpu(settings) or not torch.cuda.is_available():
        return False
    if lack := _lacks_gpu() or stays_on_cpu(settings, config):
        log.warning("the GPU is not used: %s", lack)
    return not lack


def _lacks_gpu() -> str:
    """Return why no GPU can be used and what to do; nothing where one can."""
    from kernels.cuda.gpu import demand_gpu

    try:
        demand_gpu(0)
    except CudaError as error:
        return str(error)
    return ""


def _gpu(settings: WorkerSettings, config: DecoderConfig) -> tuple[AnyOps, torch.dtype]:
    if refusal := refused_on_gpu(config, "give DEVICE=cpu"):
        raise ConfigurationError(refusal)
    dtype = gpu_dtype(settings.dtype, config)
    lack = "" if settings.kernels == "reference" else lacks_kernels(settings, config)
    if lack and settings.kernels == "cuda":
        raise ConfigurationError(f"--kernels cuda: {lack}")
    name = "reference" if lack or settings.kernels == "reference" else "cuda"
    if name == "reference" and (option := _needs_kernels(settings)):
        remedy = "DEVICE=cpu" if settings.kv_dtype == "auto" else "DEVICE=cpu or --kv-dtype auto"
        raise ConfigurationError(f"{option} needs the cuda kernels on a GPU{lack and f': {lack}'}; give {remedy}")
    if lack:
        log.warning("the slower reference kernels are used on the GPU: %s", lack)
    return _create(name, torch.device("cuda", 0)), dtype


def _emulator(settings: WorkerSettings, config: DecoderConfig) -> tuple[AnyOps, torch.dtype]:
    import kernels.emulator.device  # noqa: F401 - registers its name; every other worker does without

    if settings.device == "cuda":
        raise ConfigurationError("--kernels emulator runs on a CPU; give DEVICE=cpu, or --kernels cuda")
    if option := cpu_option(settings):
        raise ConfigurationError(
            f"{option} needs the cpu kernels, not --kernels emulator; drop it, or give --kernels cpu"
        )
    if refusal := refused_on_gpu(config, "give --kernels cpu"):
        raise ConfigurationError(refusal)
    dtype = gpu_dtype(settings.dtype, config)
    if lack := lacks_kernels(settings, config):
        raise ConfigurationError(f"--kernels emulator: {lack}")
    log.warning("a GPU is emulated, thread by thread: for tests only, it is slower than every other choice by far")
    return _create("emulator", torch.device("cpu")), dtype


def _create(name: str, device: torch.device) -> AnyOps:
    import kernels.cuda.backend  # noqa: F401 - registers its name; a CPU worker does without

    try:
        return kernel_ops.create(name, device)
    except CudaError as error:
        raise ConfigurationError(str(error)) from error


def _needs_kernels(settings: WorkerSettings) -> str:
    """Return the option, if one is given, that the reference kernels cannot do."""
    if not has_kernels(settings.quantize, "reference"):
        return f"--quantize {settings.quantize}"
    if settings.kv_dtype != "auto":
        return f"--kv-dtype {settings.kv_dtype}"
    if settings.deterministic:
        return "--deterministic"
    return "--kernels cpu" if settings.kernels == "cpu" else ""


def cpu_library(settings: WorkerSettings) -> Library | None:
    """Return the cpu kernels, or None with a warning when they cannot be loaded and no setting demands them."""
    try:
        if settings.block_size % BLOCK_TOKENS:
            raise BuildError(
                f"--block-size {settings.block_size} is no multiple of {BLOCK_TOKENS}; give {BLOCK_TOKENS}"
            )
        return load()
    except BuildError as error:
        if option := _needs_kernels(settings):
            raise ConfigurationError(f"{option}: the cpu kernels cannot be used: {error}") from error
        log.warning("the slower reference kernels are used: %s", error)
        return None


def _cpu_ops(settings: WorkerSettings, config: DecoderConfig, library: Library, dtype: torch.dtype) -> AnyOps:
    ops = CpuOps(library, torch.get_num_threads())
    formats = ""
    if settings.quantize != "none" or config.stored is not None:
        weights = settings.quantize if config.stored is None else f"{config.stored.method} {config.stored.bits}-bit"
        formats += f", {weights} weights"
    if settings.kv_dtype != "auto":
        formats += f", {settings.kv_dtype} KV"
    log.info(
        "%s kernels, %d threads: %s by %s instructions%s",
        library.variant,
        ops.threads,
        str(dtype).removeprefix("torch."),
        ops.numerics(dtype).removeprefix("cpu "),
        formats,
    )
    return ops
