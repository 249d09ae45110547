"""How many blocks of a kernel a multiprocessor holds at once, by arithmetic: the planner fills one wave of them.

The limits are those of "Compute Capabilities" in NVIDIA's CUDA C++ Programming Guide 13.0; the rounding of registers
and shared memory is that of its occupancy calculator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "registers.json"
REGISTERS = 1 << 16  # of a multiprocessor, in four parts
PARTS = 4
REGISTER_UNIT = 256  # what a warp's registers are rounded up to
SHARED_UNIT = 128
RESERVED_BYTES = 1 << 10  # of shared memory, by the system, for each block


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """The resources of a multiprocessor of an architecture."""

    threads: int
    blocks: int
    shared_kib: int
    shared_kib_of_block: int


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(2048, 32, 164, 163),
    "sm_86": Multiprocessor(1536, 16, 100, 99),
    "sm_89": Multiprocessor(1536, 24, 100, 99),
    "sm_90": Multiprocessor(2048, 32, 228, 227),
    "sm_100": Multiprocessor(2048, 32, 228, 227),
    "sm_120": Multiprocessor(1536, 24, 100, 99),
}


def resident(arch: str, registers: int, threads: int, shared_bytes: int) -> int:
    """Return how many blocks run at once; 0 where not even one does.

    registers: of a thread; shared_bytes: of a block, declared and dynamic.
    """
    limits, warps = MULTIPROCESSORS[arch], -(-threads // 32)
    if shared_bytes > limits.shared_kib_of_block << 10:
        return 0
    of_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS // PARTS // of_warp * PARTS // warps
    of_block = -(-(shared_bytes + RESERVED_BYTES) // SHARED_UNIT) * SHARED_UNIT
    return min(limits.threads // (warps * 32), limits.blocks, by_registers, (limits.shared_kib << 10) // of_block)


@cache
def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what registers.json says of each kernel, by architecture."""
    kernels: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORDED.read_text())["kernels"]
    return kernels


def resident_of(arch: str, kernel: str, threads: int, dynamic_bytes: int) -> int:
    """Return how many blocks of a recorded kernel run at once, at least one.

    An architecture that is not in the tables, of a multiprocessor or of registers, counts as the newest before it.
    Raise KeyError for a kernel that is not recorded.
    """
    usage = recorded()[_newest(recorded(), arch)][kernel]
    shared_bytes = usage["shared_bytes"] + dynamic_bytes
    return max(1, resident(_newest(MULTIPROCESSORS, arch), usage["registers"], threads, shared_bytes))


def _newest(known: Iterable[str], arch: str) -> str:
    """Return the newest architecture that is not newer than `arch`; the oldest where all are."""

    def version(name: str) -> int:
        return int(name.removeprefix("sm_"))

    names = sorted(known, key=version)
    return [names[0], *(name for name in names if version(name) <= version(arch))][-1]
