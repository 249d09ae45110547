"""The CUDA kernels in one table: what each takes of a multiprocessor, its time beside its floor, how it was checked.

docs/gpu.md has it. All figures come from files: registers.json and banks.json of kernels/cuda and a result of
`python -m bench.gpu`; how many blocks of a kernel run at once is computed (kernels/cuda/residency.py) from the launch
that calls.py makes for a model of Llama-8B's shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kernels.shapes import BLOCK_SIZE, LLAMA_8B
from kernels.cuda import calls, residency
from kernels.cuda.calls import BF16, HEAD_DIMS, LOW_RANK_ROWS, Block

BANKS = Path(residency.__file__).with_name("banks.json")
MODEL = LLAMA_8B
ROWS, SEQUENCES, PARTS, RANK = 4096, 64, 8, 16
"""Rows of a large step; sequences that decode; parts of a token's attention that are merged; rank of an adapter."""
COPIED, BLOCK_BYTES = 256, 2 << 20
EMULATED = "emulator, PTX, races"
"""What tests/kernels/cuda runs every kernel of the sources on."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of bfloat16 as the table has it.

    block: of a launch; shape: what the times are of; moved_bytes: what such a launch reads and writes at least, where
    no bench counts it; part, op: where a result of bench.gpu has it; checks: how the names of its checks begin.
    """

    block: Block
    shape: str
    moved_bytes: float = 0.0
    part: str = "rows"
    op: str = ""
    checks: str = ""


def kernels() -> list[Kernel]:
    """Return all kernels, attention for each size of a head."""
    hidden, width, heads, head_dim = MODEL.hidden, MODEL.intermediate, MODEL.heads, MODEL.head_dim
    row_bytes, rows = 2.0 * ROWS * hidden, f"{ROWS} x {hidden}"
    down, up = calls.low_rank(BF16, ROWS // LOW_RANK_ROWS, hidden, 2 * width, 2, RANK, *[0] * 8)
    merge = calls.attention_merge(BF16, SEQUENCES, heads, head_dim, *[0] * 5)
    merged_bytes = SEQUENCES * heads * head_dim * (4.0 * PARTS + 2)
    rope = calls.rope_and_write(BF16, ROWS, heads, MODEL.kv_heads, head_dim, BLOCK_SIZE, 0, 0, 0, 0, 0, 0)
    layer_norm = calls.norm(BF16, ROWS, hidden, 0, 0, 0, 0.0, layer_norm=True)
    copy = calls.copy_blocks(COPIED, 0, 0, (BLOCK_BYTES, BLOCK_BYTES), BLOCK_BYTES)
    sample = calls.sample(256, MODEL.vocab, *[0] * 5)
    return [
        *_attention("decode", calls.decode_block, f"{SEQUENCES} x 1024"),
        *_attention("prefill", calls.prefill_block, "1 x 8192 of 8192"),
        *(Kernel(calls.prefill_block(BF16, head_dim, has_wgmma=True), "") for head_dim in calls.WGMMA_HEAD_DIMS),
        Kernel(_block(merge), f"{SEQUENCES} of {PARTS} parts", merged_bytes),
        Kernel(_block(sample), f"256 x {MODEL.vocab}, top-p 0.9", part="sampler", op="sample"),
        Kernel(_block(calls.norm(BF16, ROWS, hidden, 0, 0, 0, 0.0)), rows, op="norm"),
        Kernel(_block(layer_norm), rows, 2 * row_bytes),
        Kernel(_block(rope), f"{ROWS} x {MODEL.qkv}", op="rope_and_write"),
        Kernel(_block(calls.gated(BF16, ROWS, width, 0, 0, "silu")), f"{ROWS} x {width}", op="act_and_mul"),
        Kernel(_block(calls.activate(BF16, ROWS, width, 0, 0, "silu")), f"{ROWS} x {width}", 4.0 * ROWS * width),
        Kernel(_block(calls.add(BF16, ROWS, hidden, 0, 0)), rows, 3 * row_bytes),
        Kernel(_block(calls.embed(BF16, ROWS, hidden, 0, 0, 0)), rows, op="embed"),
        Kernel(_block(calls.select(ROWS, hidden, 0, 0, 0)), rows, op="select"),
        Kernel(_block(copy), f"{COPIED} of {BLOCK_BYTES >> 20} MiB", 2.0 * COPIED * BLOCK_BYTES),
        Kernel(_block(down), f"{ROWS} x {hidden} to 2 x {RANK}", row_bytes, checks="add_low_rank "),
        Kernel(_block(up), f"{ROWS} x {2 * width} of {RANK}", 2 * 2.0 * ROWS * 2 * width, checks="add_low_rank "),
    ]


def _block(call: calls.Call) -> Block:
    return Block(call.name, call.block[0], call.shared)


def _attention(kind: str, block_of: Callable[[str, int], Block], shape: str) -> list[Kernel]:
    """Return the kernels of all sizes of a head. shape: of what is timed, with the model's."""
    return [
        Kernel(
            block_of(BF16, dim),
            shape if dim == MODEL.head_dim else "",
            part=kind if dim == MODEL.head_dim else "",
            op="attention",
            checks=f"attention {kind} d{dim} ",
        )
        for dim in HEAD_DIMS
    ]


def rows(result: Mapping[str, Any] | None) -> list[str]:
    """Return a line of the table for each kernel. result: of bench.gpu."""
    parts = (result or {}).get("parts", {})
    banks = json.loads(BANKS.read_text())
    lines = []
    for kernel in kernels():
        name = kernel.block.name
        usages = {arch: usage.get(name) for arch, usage in residency.recorded().items()}
        registers = [str(usage["registers"]) if usage else "-" for usage in usages.values()]
        blocks = [str(residency.resident_of(arch, *kernel.block)) if usage else "-" for arch, usage in usages.items()]
        found = [
            row
            for row in parts.get(kernel.part, {}).get("rows", [])
            if row["op"] == kernel.op and row["shape"].startswith(kernel.shape) and row["us"] is not None
        ]
        peak = parts.get("probes", {}).get("peaks", {}).get("copy_gb_s")
        floor_us = found[0]["floor_us"] if found else kernel.moved_bytes / peak / 1e3 if peak else 0.0
        cells = (
            f"`{name.replace('_bf16', '')}`",
            ", ".join(registers),
            ", ".join(blocks),
            *(_banks(banks.get(name, {}), space) for space in ("shared", "global")),
            kernel.shape if floor_us else "",
            f"{floor_us:,.1f}" if floor_us else "",
            f"{found[0]['us']:,.1f}" if found else "",
            EMULATED + (_checked(parts, kernel.checks or f"{kernel.op} ") if kernel.checks or kernel.op else ""),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def architectures() -> list[str]:
    """Return those that the kernels are compiled for."""
    return list(residency.recorded())


def _banks(spaces: Mapping[str, Mapping[str, float]], space: str) -> str:
    """Return what is taken for one that must be, atomics apart, and the goal."""
    if space not in spaces:
        return ""
    row = spaces[space]
    return f"{row['taken'] / row['least']:.2f} (<= {row['goal']:.2f})"


def _checked(parts: Mapping[str, Any], begin: str) -> str:
    """Return how many cases of bench.gpu were right on the card, behind a comma; nothing without any."""
    cases = [case for case in parts.get("checks", {}).get("checks", []) if case["name"].startswith(begin)]
    return f", H100 ({sum(case['right'] for case in cases)} of {len(cases)} cases)" if cases else ""
