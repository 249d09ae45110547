"""Formats of quantized weights: their names, sizes and tables of numbers, and what `--quantize` rounds to.

Imports no torch: the launcher computes a model's memory from them. `ops.py` says what a weight of `Groups` is,
`cpu/src/formats/` multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1, the floats of 4 bits: sign, two bits of exponent, one of fraction (OCP Microscaling Formats 1.0, 5.3.3)."""
IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
"""Numbers of GGUF's IQ4_NL and IQ4_XS (`kvalues_iq4nl` of https://github.com/ggml-org/llama.cpp, ggml-common.h)."""
TABLES = {"float4": FLOAT4, "iq4": IQ4}
"""Name -> the 16 numbers that 4 bits choose from (kernels/cpu/src/formats/groups.h)."""
FLOAT8 = "float8"
"""The `table` of bytes that are themselves numbers of E4M3FN."""
W8A8 = "w8a8"
"""The format of Groups with rounds_rows."""


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """Numbers of a few bits. Each `group` inputs of an output share a float32 scale, and perhaps a float32 minimum."""

    bits: int
    group: int
    has_mins: bool = False
    table: str = ""  # of TABLES, or FLOAT8; empty: the numbers are integers

    @property
    def name(self) -> str:
        """Return the name, as in Ops.group_formats: int4-32, int8-128-mins, float4-32."""
        return f"{self.table or f'int{self.bits}'}-{self.group}{'-mins' if self.has_mins else ''}"

    @property
    def bits_per_weight(self) -> float:
        """Return the bits of a weight in memory, with its part of the scale and the minimum."""
        memory_bits = 8 if self.bits == 6 else self.bits
        return memory_bits + (64 if self.has_mins else 32) / self.group

    @classmethod
    def parse(cls, name: str) -> GroupFormat:
        """Return the format of a name that `name` gives."""
        numbers, group, *mins = name.split("-")
        if numbers in TABLES:
            return cls(4, int(group), table=numbers)
        if numbers == FLOAT8:
            return cls(8, int(group), table=numbers)
        return cls(int(numbers.removeprefix("int")), int(group), bool(mins))


INT4 = GroupFormat(4, 32)


@dataclass(frozen=True, slots=True)
class Rounding:
    """The form that a value of --quantize rounds weights to while they are loaded."""

    bits_per_weight: float
    backends: tuple[str, ...]
    """Those that multiply it (`Ops.name`)."""


ROUNDINGS = {
    "int8": Rounding(8, ("cpu",)),
    "int4": Rounding(INT4.bits_per_weight, ("cpu", "cuda", "emulator")),
}
"""Value of --quantize, other than none -> what it rounds to. `services/worker/quantization` has the class of each."""

CUDA_FORMATS = frozenset({"int4-32", "int4-32-mins", "int4-128", "int4-128-mins", "float8-32", "float8-128"})
"""Names of the formats of Groups that the CUDA kernels multiply (kernels/cuda/operations/quantized.py)."""
