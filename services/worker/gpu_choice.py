"""Whether a worker computes on a GPU that can be used: what its settings and its model say.

The worker (`backend.py`) and the launcher, which prepares for it, both ask here. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.cuda.calls import BF16, MAX_NORM_HIDDEN, VECTOR, decode_block, tokens_per_item
from kernels.formats import ROUNDINGS, W8A8
from services.worker.models.config import DecoderConfig
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from shared.settings import WorkerSettings  # pydantic: an engine in process does without

KERNELS = {W8A8: ("reference", "cpu")} | {name: rounding.backends for name, rounding in ROUNDINGS.items()}
"""Value of --quantize, or Stored.method -> the backends (`Ops.name`) that multiply it; all do where it is not here."""
BLOCK_TOKENS = 16  # the C++ kernels' blocks are multiples of it, the CUDA kernels' are it times a power of two


def has_kernels(method: str, backend: str) -> bool:
    """Return whether a backend multiplies weights of a method of KERNELS or another one, unpacked or not."""
    return backend in KERNELS.get(method, (backend,))


def may_use_gpu(settings: WorkerSettings) -> bool:
    """Return whether the settings allow a GPU; `stays_on_cpu` says what the model adds."""
    if settings.device == "cpu":
        return False
    if demands_gpu(settings):
        return True
    return settings.kernels == "auto" and not cpu_option(settings)


def demands_gpu(settings: WorkerSettings) -> bool:
    """Return whether a worker without a GPU is to fail."""
    return "cuda" in (settings.device, settings.kernels)


def stays_on_cpu(settings: WorkerSettings, config: DecoderConfig) -> str:
    """Return why a GPU that may be used is left for the CPU; empty when it is not. config: of a rank.

    Raise ConfigurationError.
    """
    if demands_gpu(settings) or settings.quantize == "none" or settings.kv_dtype != "auto":
        return ""  # fp8: the worker refuses what the cuda kernels lack
    lack = lacks_kernels(settings, config)
    return lack and f"--quantize {settings.quantize} needs the cuda kernels there: {lack}"


def refused_on_gpu(config: DecoderConfig, remedy: str) -> str:
    """Return why a checkpoint cannot be multiplied on a GPU, unpacked or not, with the remedy; empty when it can."""
    if config.stored is None or has_kernels(config.stored.method, "cuda"):
        return ""
    method = config.stored.method
    kernels = " and ".join(KERNELS[method])
    return f"the checkpoint is in {method}, which {kernels} kernels multiply on a CPU alone; {remedy}"


def cpu_option(settings: WorkerSettings) -> str:
    """Return the option, if one is given, that only the cpu kernels can do."""
    if settings.deterministic:
        return "--deterministic"
    if not has_kernels(settings.quantize, "cuda"):
        return f"--quantize {settings.quantize}"
    if settings.kv_dtype == "int8":
        return "--kv-dtype int8"
    return "--kernels cpu" if settings.kernels == "cpu" else ""


def lacks_kernels(settings: WorkerSettings, config: DecoderConfig) -> str:
    """Return what of the model the cuda kernels cannot compute; empty where they can all. config: of a rank.

    Raise ConfigurationError.
    """
    blocks = settings.block_size // BLOCK_TOKENS
    if settings.block_size % BLOCK_TOKENS or blocks & (blocks - 1):
        raise ConfigurationError(f"--block-size {settings.block_size}: on a GPU it is 16, 32, 64, 128 or 256")
    if config.family.is_encoder:
        return "the model is an encoder, they have no kernels for attention both ways"
    if config.family.names.sinks is not None:
        return "the model has sinks of attention, they have no kernels for them"
    if config.score_softcap or config.logit_softcap:
        return "the model caps its scores and logits, they have no kernels for it"
    if (config.checkpoint_dtype if settings.dtype == "auto" else settings.dtype) == "float32":
        return "the model is in float32, they compute in bfloat16 and float16 (--dtype bfloat16)"
    mixture = config.mixture
    if mixture and settings.quantize != "none":
        option = f"--quantize {settings.quantize}"
        return f"they hold experts in 16 bits, and {option} would round them for nothing (--quantize none)"
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
