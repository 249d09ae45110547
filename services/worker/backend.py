"""Which kernels a worker computes with, and in which type: chosen at start, said in the log.

`auto` is the C++ kernels where they can be had, in the checkpoint's type: what a model answers does not hang on a
stopwatch. Whose matrix kernels are faster is measured (`kernels.cpu.choice`) unless something else decides it.
Whatever the operator asked for by name is used or refused, never replaced.
"""

from __future__ import annotations

import logging

import torch

import kernels.reference  # noqa: F401 - registers the backend
from kernels import ops as kernel_ops
from kernels.cpu.backend import CpuOps
from kernels.cpu.build import BuildError
from kernels.cpu.choice import Candidate, Timing, clearly_faster, measure, sample_of
from kernels.cpu.library import Library, load
from kernels.ops import AnyOps
from services.worker.models.config import DecoderConfig
from shared.errors import ConfigurationError
from shared.settings import WorkerSettings

log = logging.getLogger("orcinus.worker")

BLOCK_TOKENS = 16  # the C++ kernels' blocks are multiples of it


def choose(settings: WorkerSettings, config: DecoderConfig) -> tuple[AnyOps, torch.dtype]:
    """The operations and the type to compute in. Raises ConfigurationError for what cannot be had."""
    device, dtype = choose_device(settings.device), choose_dtype(settings.dtype, config)
    if settings.kernels == "reference" and (option := _needs_cpu_kernels(settings)):
        raise ConfigurationError(f"{option} needs the cpu kernels; give --kernels auto or cpu")
    library = None if settings.kernels == "reference" else _library(settings)
    if library is None:
        return kernel_ops.create("reference", device), dtype
    return _faster(settings, config, library, dtype), dtype


def choose_device(wanted: str) -> torch.device:
    """The device to compute on. Raises ConfigurationError for one that this build cannot use."""
    if wanted == "cuda":
        raise ConfigurationError("DEVICE=cuda: this build has no CUDA engine yet; use DEVICE=cpu or DEVICE=auto")
    return torch.device("cpu")


def choose_dtype(wanted: str, config: DecoderConfig) -> torch.dtype:
    """`auto` is the checkpoint's type; float16, which the CPU engine does not compute in, is widened to float32."""
    if wanted == "float16":
        raise ConfigurationError("--dtype float16 needs a GPU; the CPU engine computes in float32 or bfloat16")
    if wanted == "float32":
        return torch.float32
    if wanted == "bfloat16":
        return torch.bfloat16
    return torch.bfloat16 if config.checkpoint_dtype == torch.bfloat16 else torch.float32


def _needs_cpu_kernels(settings: WorkerSettings) -> str | None:
    """The option, if one is given, that only the cpu kernels can do."""
    if settings.deterministic:
        return "--deterministic"
    if settings.quantize != "none":
        return f"--quantize {settings.quantize}"
    return "--kernels cpu" if settings.kernels == "cpu" else None


def _library(settings: WorkerSettings) -> Library | None:
    """None, with a warning, where the cpu kernels cannot be had and nobody insists on them."""
    try:
        if settings.block_size % BLOCK_TOKENS:
            raise BuildError(f"--block-size {settings.block_size} is no multiple of {BLOCK_TOKENS}")
        return load()
    except BuildError as error:
        if option := _needs_cpu_kernels(settings):
            raise ConfigurationError(f"{option}: the cpu kernels cannot be used: {error}") from error
        log.warning("the slower reference kernels are used: %s", error)
        return None


def _faster(settings: WorkerSettings, config: DecoderConfig, library: Library, dtype: torch.dtype) -> AnyOps:
    """Our matrix kernels, or torch's where they are clearly faster and keep what was promised."""
    threads = torch.get_num_threads()
    candidates = [Candidate(CpuOps(library, threads), "own", dtype)]
    if not settings.deterministic and settings.quantize == "none":
        candidates.append(Candidate(CpuOps(library, threads, "torch"), "torch", dtype))
    if settings.dtype == "auto" and dtype == torch.bfloat16 and settings.quantize == "none":
        candidates.append(Candidate(candidates[0].ops, "own", torch.float32))
    head = f"{library.variant} kernels, {threads} threads"
    if len(candidates) == 1:
        log.info("%s: %s, int8 weights" if settings.quantize == "int8" else "%s: %s", head, candidates[0])
        return candidates[0].ops
    sample = sample_of(layer_matrices(config), config.layers)
    passes = measure(candidates, sample)
    chosen = next(
        (at for at, other in enumerate(candidates) if other.path == "torch" and clearly_faster(passes, at, 0)), 0
    )
    said = [f"{candidate} {_best(passes, at)}" for at, candidate in enumerate(candidates)]
    log.info("%s: %s (%s); measured: %s", head, said.pop(chosen), "; ".join(said), sample)
    last = len(candidates) - 1
    if candidates[last].dtype != dtype and clearly_faster(passes, last, chosen):
        log.info("float32 would be faster than the checkpoint's bfloat16 on this CPU; --dtype float32 takes it")
    return candidates[chosen].ops


def _best(passes: list[list[Timing]], candidate: int) -> Timing:
    return min((timings[candidate] for timings in passes), key=lambda timing: timing.cost)


def layer_matrices(config: DecoderConfig) -> list[tuple[int, int]]:
    """[outputs, inputs] of one layer's matrices."""
    hidden, attention = config.hidden_size, config.heads * config.head_dim
    qkv = attention + 2 * config.kv_heads * config.head_dim
    return [(qkv, hidden), (hidden, attention), (config.up_size, hidden), (hidden, config.intermediate_size)]
