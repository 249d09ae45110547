"""Weight formats of linear layers, one format a file: `models/weights` loads with them, `models/layers` multiplies.

Imports `kernels` and `models/checkpoint`, nothing else of the worker.
"""

from __future__ import annotations

from services.worker.quantization.base import LinearMethod
from services.worker.quantization.int8 import Int8
from services.worker.quantization.none import Unquantized

METHODS: dict[str, LinearMethod] = {method.name: method for method in (Unquantized(), Int8())}
"""Value of --quantize -> method."""
