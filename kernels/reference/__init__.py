"""The reference backend: plain torch, float32 and bfloat16, the oracle of every other backend."""

from kernels.ops import register
from kernels.reference.backend import ReferenceOps

register("reference", ReferenceOps)

__all__ = ["ReferenceOps"]
