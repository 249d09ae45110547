"""How large the KV pool and its host tier may be. The memory itself belongs to the backend (`kernels.ops.Cache`).

All arithmetic is in blocks; what does not fit is a ConfigurationError that names the setting.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernels.cpu.build import BuildError
from kernels.cuda.loader import CudaError
from kernels.ops import CacheShape
from services.worker.models.config import DecoderConfig
from services.worker.parallel.state import ParallelState
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from shared.settings import WorkerSettings  # pydantic: an engine in process does without

POOL_SHARE, GPU_POOL_SHARE = 0.2, 0.9
"""Of the free memory for a pool without --kv-blocks; on a CPU at most, and for a worker with all cores. A GPU is the
worker's alone; what is left is for what torch's allocator wastes and for recorded steps."""

TOKENS_PER_THREAD = 16_384
"""Tokens in a pool on a CPU without --kv-blocks and --kv-memory-fraction, for each thread that computes: more sequences
than this holds wait for their turn in a step anyway, and the memory is taken at start, used or not."""

HOST_SHARE, PINNED_SHARE = 0.05, 0.1
"""Of the free memory, at most, for a host tier without --host-blocks: on a CPU for what other workers copy from it,
beside a GPU it is memory that the pool does not take."""

KEPT_SHARE = 0.05
"""Of the memory that a worker has, at most: for a host tier without --host-blocks that is there to outlive the worker,
and for all tiers in --kv-share-dir that have outlived theirs, of which a model has a half at most."""

PINNED_BYTES = 16 << 30
"""At most for the same beside a GPU: pinning more keeps a start waiting for many seconds."""

NO_HOST_TIER = (
    "a prefill worker hands KV over in its host tier, which would be empty: raise --host-blocks, or give "
    "--kv-share-dir or the machine more memory"
)
NO_MEMORY = (
    *("not enough memory", "can't allocate memory", "Storage size calculation overflowed", "numel: integer"),
    "out of memory",
)
"""In torch's errors, which are RuntimeErrors like any other (c10/core/CPUAllocator, c10/core/TensorImpl, CUDA's)."""

log = logging.getLogger("orcinus.worker")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token limits of one sequence; model = prompt and output together."""

    model: int
    input: int
    output: int


def resident_memory_bytes() -> int:
    """Return the memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def free_memory_bytes() -> int:
    """Return the memory that this process can still take: the machine's, or its control group's if that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text()
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))


@contextmanager
def room_for(what: str, remedy: str) -> Iterator[None]:
    """Turn memory that the system refuses inside into a ConfigurationError; let other errors pass."""
    try:
        yield
    except (CudaError, BuildError) as error:
        raise ConfigurationError(f"{what}: {error}") from error
    except (MemoryError, OSError, OverflowError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        known = isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY)
        if isinstance(error, RuntimeError) and not known:
            raise
        said = str(error).rpartition("DefaultCPUAllocator: ")[2].partition(". Error code")[0].partition(". GPU")[0]
        said = said or "out of memory"
        raise ConfigurationError(f"this machine has no memory for {what} ({said}); {remedy}") from error


def wanted_lengths(settings: WorkerSettings, config: DecoderConfig) -> Lengths:
    """Return the limits that settings and the model's context ask for. Raise ConfigurationError naming the setting."""
    context = config.context
    for name, value in (
        ("--max-input-tokens", settings.max_input_tokens),
        ("--max-output-tokens", settings.max_output_tokens),
    ):
        if value >= context:
            raise ConfigurationError(
                f"{name} {value} leaves no room in the model's context of {context} tokens; set at most {context - 1}"
            )
    both = settings.max_input_tokens + settings.max_output_tokens
    if both > context:
        raise ConfigurationError(
            f"--max-input-tokens {settings.max_input_tokens} and --max-output-tokens {settings.max_output_tokens} "
            f"together pass the model's context of {context} tokens; lower one of them by {both - context}"
        )
    limit = both if settings.max_input_tokens and settings.max_output_tokens else context
    return Lengths(
        model=limit,
        input=settings.max_input_tokens or limit - 1,
        output=settings.max_output_tokens or limit - 1,
    )


def plan_pool(
    settings: WorkerSettings,
    shape: CacheShape,
    block_bytes: int,
    lengths: Lengths,
    gpu_bytes: int | None,
    parallel: ParallelState,
) -> tuple[CacheShape, Lengths]:
    """Return the blocks of the pool and of its host tier, and the lengths that fit: what every rank can hold.

    block_bytes: of one block as the backend holds it; gpu_bytes: what a GPU has left for the pool, None where it lies
    in the host's memory, which the ranks of this host share.
    """
    host_bytes = free_memory_bytes() // parallel.ranks_here
    on_gpu = gpu_bytes is not None
    blocks, lengths = plan_blocks(
        settings,
        block_bytes,
        lengths,
        host_bytes if gpu_bytes is None else gpu_bytes,
        on_gpu,
        torch.get_num_threads() * parallel.ranks_here,
    )
    resident = resident_memory_bytes()
    host_blocks = plan_host_blocks(settings, blocks, lengths, block_bytes, host_bytes, on_gpu, resident)
    mine = [blocks, host_blocks, lengths.model, lengths.input, lengths.output]
    blocks, host_blocks, *least = parallel.least(mine)
    if settings.worker_role == "prefill" and not host_blocks:
        raise ConfigurationError(NO_HOST_TIER)
    return dataclasses.replace(shape, blocks=blocks, host_blocks=host_blocks), Lengths(*least)


def plan_blocks(
    settings: WorkerSettings,
    block_bytes: int,
    lengths: Lengths,
    free_bytes: int,
    on_gpu: bool = False,
    threads: int = 0,
) -> tuple[int, Lengths]:
    """Block of the pool and the lengths that fit into it.

    free_bytes: where the pool is to lie, on_gpu or not. threads: of the replica on this host; 0 means all cores.
    Lengths that are not set shrink to the pool, with a warning; those that were set are an error when they do not fit.
    """
    size = settings.block_size
    per_sequence = -(-lengths.model // size)
    useful = settings.max_seqs * per_sequence
    if settings.kv_blocks:
        blocks, source = settings.kv_blocks, f"--kv-blocks {settings.kv_blocks}"
    else:
        share = settings.kv_memory_fraction or GPU_POOL_SHARE
        if settings.kv_memory_fraction is None and not on_gpu:
            cores = len(os.sched_getaffinity(0))
            threads = threads or cores
            share = round(POOL_SHARE * min(1.0, threads / cores), 6)  # workers that share the cores share the memory
            useful = min(useful, max(per_sequence, TOKENS_PER_THREAD * threads // size))
        blocks = min(useful, int(free_bytes * share) // block_bytes)
        source = f"--kv-memory-fraction {share:g} of {free_bytes / 2**20:.0f} MiB free"
        if on_gpu:
            source += " beside weights and the largest step (--max-step-tokens)"
    if blocks >= per_sequence:
        return blocks, lengths
    need_mib = per_sequence * block_bytes / 2**20
    fits = blocks * size
    least = settings.max_input_tokens + settings.max_output_tokens
    if fits < 2 or (least and fits < least + (0 if settings.max_input_tokens and settings.max_output_tokens else 1)):
        raise ConfigurationError(
            f"{source} gives {blocks} KV blocks = {fits} tokens, but one sequence of --max-input-tokens "
            f"{lengths.input} and --max-output-tokens {lengths.output} needs {per_sequence} blocks "
            f"({need_mib:.0f} MiB); lower these two or raise --kv-blocks or --kv-memory-fraction"
        )
    log.warning("%s gives %d KV blocks: the context is cut from %d to %d tokens", source, blocks, lengths.model, fits)
    return blocks, Lengths(model=fits, input=min(lengths.input, fits - 1), output=min(lengths.output, fits - 1))


def has_room_for_all(settings: WorkerSettings, blocks: int, lengths: Lengths) -> bool:
    """Return whether every slot's longest sequence fits into a pool of `blocks` blocks."""
    return blocks >= settings.max_seqs * -(-lengths.model // settings.block_size)


def plan_host_blocks(
    settings: WorkerSettings,
    blocks: int,
    lengths: Lengths,
    block_bytes: int,
    free_bytes: int,
    on_gpu: bool = False,
    resident_bytes: int = 0,
) -> int:
    """Return the blocks of the host tier: as set, else as many as the pool has, within a share of the host's free
    memory. It has none if every slot's longest sequence fits into the pool, as no sequence is then swapped out, except
    in a worker that hands over prefilled sequences. On a CPU it exists only for other workers, as the pool is in the
    same memory. A tier that only serves the next worker has a share of this worker's memory, the pool included.

    resident_bytes: what the worker has taken without the pool.

    Raise ConfigurationError when the setting is more than pool and machine leave.
    """
    left = free_bytes - (0 if on_gpu else blocks * block_bytes)
    if settings.host_blocks is None:
        fits = has_room_for_all(settings, blocks, lengths)
        most = min(int(free_bytes * PINNED_SHARE), PINNED_BYTES) if on_gpu else int(free_bytes * HOST_SHARE)
        if settings.worker_role != "prefill" and (fits or not on_gpu):
            if settings.kv_share_dir is None:
                return 0
            if settings.worker_role == "both":
                most = min(most, int(KEPT_SHARE * (resident_bytes + blocks * block_bytes)))
            elif fits:
                return 0
        return max(0, min(blocks, most // block_bytes, left // block_bytes))
    if settings.host_blocks * block_bytes > left:
        raise ConfigurationError(
            f"--host-blocks {settings.host_blocks} needs {settings.host_blocks * block_bytes / 2**20:.0f} MiB, but "
            f"{'the host has' if on_gpu else 'the KV pool leaves'} {max(0, left) / 2**20:.0f} MiB; lower it, or give "
            "0 for no host tier"
        )
    return settings.host_blocks
