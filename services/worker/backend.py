"""Which kernels a worker computes with, and in which type: chosen at start, said in the log.

`auto` is the C++ kernels where they can be had, in the checkpoint's type; what is faster on this machine is measured,
not assumed (`kernels.cpu.choice`). Whatever the operator asked for by name is used or refused, never replaced.
"""

from __future__ import annotations

import logging

import torch

import kernels.reference  # noqa: F401 - registers the backend
from kernels import ops as kernel_ops
from kernels.cpu.backend import CpuOps
from kernels.cpu.build import BuildError
from kernels.cpu.choice import measure, pick
from kernels.cpu.library import Library, load
from kernels.ops import AnyOps
from services.worker.models.config import DecoderConfig
from shared.errors import ConfigurationError
from shared.settings import WorkerSettings

log = logging.getLogger("orcinus.worker")

BLOCK_TOKENS = 16  # the C++ kernels' blocks are multiples of it


def choose(settings: WorkerSettings, config: DecoderConfig) -> tuple[AnyOps, torch.dtype]:
    """The operations and the type to compute in. Raises ConfigurationError for what cannot be had."""
    device = choose_device(settings.device)
    library = None if settings.kernels == "reference" else _library(settings)
    if library is None:
        if settings.deterministic or settings.quantize != "none":
            option = "--deterministic" if settings.deterministic else f"--quantize {settings.quantize}"
            raise ConfigurationError(f"{option} needs the cpu kernels; use --kernels cpu, and install g++")
        return kernel_ops.create("reference", device), choose_dtype(settings.dtype, config)
    return _measured(settings, config, library)


def choose_device(wanted: str) -> torch.device:
    """The device to compute on. Raises ConfigurationError for one that this build cannot use."""
    if wanted == "cuda":
        raise ConfigurationError("DEVICE=cuda: this build has no CUDA engine yet; use DEVICE=cpu or DEVICE=auto")
    return torch.device("cpu")


def choose_dtype(wanted: str, config: DecoderConfig) -> torch.dtype:
    """`auto` is the checkpoint's type; float16, which the CPU engine does not compute in, is widened to float32."""
    if wanted == "float32":
        return torch.float32
    if wanted == "bfloat16":
        return torch.bfloat16
    return torch.bfloat16 if config.checkpoint_dtype == torch.bfloat16 else torch.float32


def _library(settings: WorkerSettings) -> Library | None:
    """None, with a warning, where the cpu kernels cannot be had and nobody insists on them."""
    try:
        if settings.block_size % BLOCK_TOKENS:
            raise BuildError(f"--block-size {settings.block_size} is no multiple of {BLOCK_TOKENS}")
        return load()
    except BuildError as error:
        if settings.kernels == "cpu" or settings.deterministic:
            raise ConfigurationError(f"the cpu kernels cannot be used: {error}") from error
        log.warning("the slower reference kernels are used: %s", error)
        return None


def _measured(settings: WorkerSettings, config: DecoderConfig, library: Library) -> tuple[AnyOps, torch.dtype]:
    threads = torch.get_num_threads()
    dtypes = [choose_dtype(settings.dtype, config)]
    if settings.dtype == "auto" and dtypes[0] == torch.bfloat16:
        dtypes.append(torch.float32)
    own_only = settings.deterministic or settings.quantize != "none"
    timings = measure(
        lambda path: CpuOps(library, threads, path),
        layer_matrices(config),
        config.layers,
        dtypes,
        ["own"] if own_only else ["own", "torch"],
    )
    best = pick(timings)
    others = "; ".join(str(timing) for timing in timings if timing is not best)
    log.info("%s kernels, %d threads: %s%s", library.variant, threads, best, f" ({others})" if others else "")
    return CpuOps(library, threads, best.path), best.dtype


def layer_matrices(config: DecoderConfig) -> list[tuple[int, int]]:
    """[outputs, inputs] of one layer's matrices."""
    hidden, attention = config.hidden_size, config.heads * config.head_dim
    qkv = attention + 2 * config.kv_heads * config.head_dim
    return [(qkv, hidden), (hidden, attention), (config.up_size, hidden), (hidden, config.intermediate_size)]
