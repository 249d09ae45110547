"""Weight formats of linear layers, one format a file: `models/weights` loads with them, `models/layers` multiplies.

Imports `kernels` and `checkpoint`, nothing else of the worker.
"""

from __future__ import annotations

from services.worker.checkpoint.stored import Stored
from services.worker.quantization.awq import Awq
from services.worker.quantization.base import LinearMethod
from services.worker.quantization.compressed_tensors import CompressedTensors
from services.worker.quantization.fp8 import Fp8
from services.worker.quantization.gguf import Gguf
from services.worker.quantization.gptq import Gptq
from services.worker.quantization.int4 import Int4
from services.worker.quantization.int8 import Int8
from services.worker.quantization.mxfp4 import Mxfp4
from services.worker.quantization.none import Unquantized
from services.worker.quantization.stored import StoredMethod
from services.worker.quantization.w8a8 import W8A8
from shared.errors import ConfigurationError

METHODS: dict[str, LinearMethod] = {method.name: method for method in (Unquantized(), Int8(), Int4())}
"""Value of --quantize -> method."""

STORED: dict[str, type[StoredMethod]] = {
    "compressed-tensors": CompressedTensors,
    "awq": Awq,
    "gptq": Gptq,
    "fp8": Fp8,
    "w8a8": W8A8,
    "mxfp4": Mxfp4,
    "gguf": Gguf,
}
"""Stored.method -> method."""


def method_of(quantize: str, stored: Stored | None) -> LinearMethod:
    """Return the method of a checkpoint with --quantize as given. Raise ConfigurationError for two formats."""
    if stored is None:
        return METHODS[quantize]
    if quantize != "none":
        raise ConfigurationError(
            f"--quantize {quantize}: the checkpoint is quantized already ({stored.method}); leave the option out"
        )
    return STORED[stored.method](stored)
