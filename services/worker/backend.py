"""Choose the kernels, the device and the type that a worker computes with; the log says which.

`auto` is a GPU if one can be used, else the C++ kernels where they can be had, in the checkpoint's type. Nothing is
measured: the same machine, model and settings give the same choice, so answers do not change with a busy moment. What
the operator asks for by name is used or refused, never replaced.
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
from kernels.cuda.calls import BF16, MAX_NORM_HIDDEN, VECTOR, decode_block, tokens_per_item
from kernels.cuda.device import Device
from kernels.cuda.loader import CudaError
from kernels.ops import AnyOps
from services.worker.models.config import DecoderConfig
from services.worker.quantization import METHODS, STORED
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from shared.settings import WorkerSettings  # pydantic: an engine in process does without

log = logging.getLogger("orcinus.worker")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCK_TOKENS = 16  # the C++ kernels' blocks are multiples of it, the CUDA kernels' are it times a power of two


def choose(settings: WorkerSettings, config: DecoderConfig) -> tuple[AnyOps, torch.dtype]:
    """Return the operations and the type to compute in. Raise ConfigurationError for what cannot be had."""
    if settings.kernels == "emulator":
        return _emulator(settings, config)
    if _on_gpu(settings, config):
        return _gpu(settings, config)
    dtype = cpu_dtype(settings.dtype, config)
    if settings.kernels == "reference" and (option := _needs_kernels(settings)):
        raise ConfigurationError(f"{option} needs the cpu kernels; give --kernels auto or cpu")
    library = None if settings.kernels == "reference" else _library(settings)
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
    option = _needs_cpu_kernels(settings)
    if settings.device == "cuda" or settings.kernels == "cuda":
        asked = "DEVICE=cuda" if settings.device == "cuda" else "--kernels cuda"
        if settings.device == "cpu":
            raise ConfigurationError("--kernels cuda needs a GPU, and DEVICE=cpu rules it out; give DEVICE=cuda")
        if option:
            raise ConfigurationError(f"{option} is for CPUs alone and {asked} for a GPU: give up one of the two")
        if lack := _lacks_gpu():
            raise ConfigurationError(f"{asked}: {lack}")
        return True
    if settings.device == "cpu" or settings.kernels != "auto" or option or not torch.cuda.is_available():
        return False
    if lack := _lacks_gpu():
        log.warning("the GPU is not used: %s", lack)
    elif settings.kv_dtype == "auto" and (option := _needs_kernels(settings)):  # fp8: _gpu refuses what they lack
        lack = _lacks_kernels(settings, config, gpu_dtype(settings.dtype, config))
        if lack:
            log.warning("the GPU is not used: %s needs the cuda kernels there: %s", option, lack)
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
    _demand_cuda_has(config, "give DEVICE=cpu")
    dtype = gpu_dtype(settings.dtype, config)
    lack = "" if settings.kernels == "reference" else _lacks_kernels(settings, config, dtype)
    if lack and settings.kernels == "cuda":
        raise ConfigurationError(f"--kernels cuda: {lack}")
    name = "reference" if lack or settings.kernels == "reference" else "cuda"
    if name == "reference" and (option := _needs_kernels(settings)):
        remedy = "DEVICE=cpu" if settings.kv_dtype == "auto" else "DEVICE=cpu or --kv-dtype auto"
        raise ConfigurationError(f"{option} needs the cuda kernels on a GPU{lack and f': {lack}'}; give {remedy}")
    if lack:
        log.warning("the slower reference kernels are used on the GPU: %s", lack)
    return _created(name, torch.device("cuda", 0)), dtype


def _emulator(settings: WorkerSettings, config: DecoderConfig) -> tuple[AnyOps, torch.dtype]:
    if settings.device == "cuda":
        raise ConfigurationError("--kernels emulator runs on a CPU; give DEVICE=cpu, or --kernels cuda")
    if option := _needs_cpu_kernels(settings):
        raise ConfigurationError(f"{option} needs the cpu kernels; --kernels emulator has no such thing")
    _demand_cuda_has(config, "give --kernels cpu")
    dtype = gpu_dtype(settings.dtype, config)
    if lack := _lacks_kernels(settings, config, dtype):
        raise ConfigurationError(f"--kernels emulator: {lack}")
    log.warning("a GPU is emulated, thread by thread: for tests only, it is slower than every other choice by far")
    return _created("emulator", torch.device("cpu")), dtype


def _demand_cuda_has(config: DecoderConfig, remedy: str) -> None:
    """Raise ConfigurationError for a checkpoint that the cuda kernels cannot multiply, unpacked or not."""
    method = config.stored.method if config.stored else ""
    if method and (backends := STORED[method].backends) and "cuda" not in backends:
        raise ConfigurationError(
            f"the checkpoint is in {method}, which {' and '.join(backends)} kernels multiply on a CPU alone; {remedy}"
        )


def _created(name: str, device: torch.device) -> AnyOps:
    import kernels.cuda.backend  # noqa: F401 - registers its names; a CPU worker does without

    try:
        return kernel_ops.create(name, device)
    except CudaError as error:
        raise ConfigurationError(str(error)) from error


def _lacks_kernels(settings: WorkerSettings, config: DecoderConfig, dtype: torch.dtype) -> str:
    """Return what of the model the cuda kernels cannot compute; nothing where they can all."""
    blocks = settings.block_size // BLOCK_TOKENS
    if settings.block_size % BLOCK_TOKENS or blocks & (blocks - 1):
        raise ConfigurationError(f"--block-size {settings.block_size}: on a GPU it is 16, 32, 64, 128 or 256")
    if config.family.is_encoder:
        return "the model is an encoder, they have no kernels for attention both ways"
    if config.family.names.sinks is not None:
        return "the model has sinks of attention, they have no kernels for them"
    if config.score_softcap or config.logit_softcap:
        return "the model caps its scores and logits, they have no kernels for it"
    if dtype == torch.float32:
        return "the model is in float32, they compute in bfloat16 and float16 (--dtype bfloat16)"
    mixture = config.mixture
    if mixture and settings.quantize != "none":
        return f"they hold experts in 16 bits, and --quantize {settings.quantize} would round them for nothing"
    of_experts = (mixture.intermediate_size, mixture.shared_size) if mixture else ()
    if wrong := [width for width in (config.hidden_size, config.intermediate_size, *of_experts) if width % VECTOR]:
        return f"rows of {wrong[0]} numbers, they take multiples of {VECTOR}"
    if config.hidden_size > MAX_NORM_HIDDEN:
        return f"rows of {config.hidden_size} numbers, their norms take {MAX_NORM_HIDDEN} at most"
    try:
        tokens_per_item(config.head_dim, config.heads // config.kv_heads)
        decode_block(BF16, config.head_dim, fp8=settings.kv_dtype == "fp8")
    except ValueError as error:
        return str(error)
    return ""


def _needs_cpu_kernels(settings: WorkerSettings) -> str | None:
    """Return the option, if one is given, that only the cpu kernels can do."""
    if settings.deterministic:
        return "--deterministic"
    if METHODS[settings.quantize].backends == ("cpu",):
        return f"--quantize {settings.quantize}"
    if settings.kv_dtype == "int8":
        return "--kv-dtype int8"
    return "--kernels cpu" if settings.kernels == "cpu" else None


def _needs_kernels(settings: WorkerSettings) -> str | None:
    """Return the option, if one is given, that the reference kernels cannot do."""
    if METHODS[settings.quantize].backends:
        return f"--quantize {settings.quantize}"
    if settings.kv_dtype != "auto":
        return f"--kv-dtype {settings.kv_dtype}"
    return _needs_cpu_kernels(settings)


def _library(settings: WorkerSettings) -> Library | None:
    """Return the cpu kernels, or None with a warning when they cannot be loaded and no setting demands them."""
    try:
        if settings.block_size % BLOCK_TOKENS:
            raise BuildError(f"--block-size {settings.block_size} is no multiple of {BLOCK_TOKENS}")
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
