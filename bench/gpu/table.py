"""The CUDA kernels in one table: what each takes of a multiprocessor, its time beside its floor, how it was checked.

docs/gpu.md has it. All figures come from files: registers.json and banks.json of kernels/cuda and a result of
`python -m bench.gpu`; how many blocks of a kernel run at once is computed (kernels/cuda/residency.py) from the launch
that calls.py makes for a model of Llama-8B's shape, and for experts of Qwen3-30B-A3B's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.kernels.shapes import BLOCK_SIZE, LLAMA_8B, QWEN_30B
from kernels.cuda import calls, residency
from kernels.cuda.calls import BF16, HEAD_DIMS, LOW_RANK_ROWS, PACKED_UNIT, Block

BANKS = Path(residency.__file__).with_name("banks.json")
MODEL = LLAMA_8B
ROWS, SEQUENCES, PARTS, ADAPTERS, RANK = 4096, 64, 8, 8, 16
"""Rows of a large step; sequences that decode; parts of a token's attention that are merged; adapters, rank of each."""
COPIED, BLOCK_BYTES = 256, 2 << 20
EMULATED = "emulator, PTX, races"
"""What tests/kernels/cuda runs every kernel of the sources on."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of bfloat16 as the table has it.

    block: of a launch; shape: what the times are of; moved_bytes: what such a launch reads and writes at least, where
    no bench counts it; part, op: where a result of bench.gpu has it; checks: how the names of its
    checks begin, by default with the op.
    """

    block: Block
    shape: str
    moved_bytes: float = 0.0
    part: str = "rows"
    op: str = ""
    checks: tuple[str, ...] | None = None


PACKED_ROWS = {(1, 1): (1, 3, 8), (1, 2): (16,)}
"""Rows of the checks of bench.gpu, of a small matrix, by the shape of the kernel that multiplies them."""


def kernels(has_wgmma: bool = False) -> list[Kernel]:
    """Return all kernels, attention for each size of a head. has_wgmma: of the device that the results are of."""
    hidden, width, heads, head_dim = MODEL.hidden, MODEL.intermediate, MODEL.heads, MODEL.head_dim
    row_bytes, rows, prompt = 2.0 * ROWS * hidden, f"{ROWS} x {hidden}", "1 x 8192 of 8192"
    adapted = f"gate_up, {ROWS} of {ADAPTERS}"
    down, up = calls.low_rank(BF16, ROWS // LOW_RANK_ROWS, hidden, 2 * width, 2, RANK, *[0] * 8)
    merge = calls.attention_merge(BF16, SEQUENCES, heads, head_dim, *[0] * 5)
    merged_bytes = SEQUENCES * heads * head_dim * (4.0 * PARTS + 2)
    rope = calls.rope_and_write(BF16, ROWS, heads, MODEL.kv_heads, head_dim, BLOCK_SIZE, 0, 0, 0, 0, 0, 0)
    coded = calls.rope_and_write(BF16, 1, heads, MODEL.kv_heads, head_dim, BLOCK_SIZE, 0, 0, 0, 0, 0, 0, fp8=True)
    layer_norm = calls.norm(BF16, ROWS, hidden, 0, 0, 0, 0.0, layer_norm=True)
    copy = calls.copy_blocks(COPIED, 0, 0, (BLOCK_BYTES, BLOCK_BYTES), BLOCK_BYTES)
    wgmma, wgmma_block = calls.WGMMA_HEAD_DIMS, partial(calls.prefill_block, has_wgmma=True)
    sample = calls.sample(256, MODEL.vocab, *[0] * 5)
    return [
        *_attention("decode", calls.decode_block, f"{SEQUENCES} x 1024"),
        *_attention("prefill", calls.prefill_block, prompt, unused=wgmma if has_wgmma else ()),
        *_attention("prefill", wgmma_block, prompt, wgmma, unused=() if has_wgmma else wgmma),
        *(
            kernel
            for kind, block_of in (("decode", calls.decode_block), ("prefill", calls.prefill_block))
            for kernel in _attention(kind, partial(block_of, fp8=True), "", calls.FP8_HEAD_DIMS, calls.FP8_HEAD_DIMS)
        ),
        Kernel(_block(merge), f"{SEQUENCES} of {PARTS} parts", merged_bytes),
        Kernel(_block(sample), f"256 x {MODEL.vocab}, top-p 0.9", part="sampler", op="sample"),
        Kernel(_block(calls.norm(BF16, ROWS, hidden, 0, 0, 0, 0.0)), rows, op="norm"),
        Kernel(_block(layer_norm), rows, 2 * row_bytes),
        Kernel(_block(rope), f"{ROWS} x {MODEL.qkv}", op="rope_and_write"),
        Kernel(_block(coded), "", checks=()),
        Kernel(_block(calls.gated(BF16, ROWS, width, 0, 0, "silu")), f"{ROWS} x {width}", op="act_and_mul"),
        Kernel(_block(calls.activate(BF16, ROWS, width, 0, 0, "silu")), f"{ROWS} x {width}", 4.0 * ROWS * width),
        Kernel(_block(calls.add(BF16, ROWS, hidden, 0, 0)), rows, 3 * row_bytes),
        Kernel(_block(calls.embed(BF16, ROWS, hidden, 0, 0, 0)), rows, op="embed"),
        Kernel(_block(calls.select(ROWS, hidden, 0, 0, 0)), rows, op="select"),
        *_experts(),
        Kernel(_block(copy), f"{COPIED} of {BLOCK_BYTES >> 20} MiB", 2.0 * COPIED * BLOCK_BYTES),
        Kernel(_block(down), adapted, row_bytes, "adapters", "low_rank_down", ("add_low_rank ",)),
        Kernel(_block(up), adapted, 2 * 2.0 * ROWS * 2 * width, "adapters", "low_rank_up", ("add_low_rank ",)),
        *_packed(calls.Q4, 8.0),
        *_packed(calls.FP8, 4.0),
    ]


def _packed(packing: calls.Packing, group_bytes: float) -> list[Kernel]:
    """Return the kernels of packed matrices, in groups of 128, for a small and the largest matrix.

    group_bytes: of the scale and minimum of a group.
    """
    made, inputs, large = [], MODEL.hidden, 2 * MODEL.intermediate
    mins, weight_bytes, op = (
        int(group_bytes > 4),
        packing.bits / 8 + group_bytes / PACKED_UNIT,
        f"linear_{packing.name}",
    )
    uses = ((8, MODEL.qkv), (8, large), (16, MODEL.qkv), (16, large), (64, large))
    for shape, (rows, outputs) in zip(packing.shapes, uses, strict=True):
        call = calls.linear_packed(
            packing, BF16, rows, inputs, outputs, PACKED_UNIT, 0, 0, 0, mins, 0, 0, outputs, shape
        )
        moved = outputs * inputs * weight_bytes + 2.0 * rows * (inputs + outputs)
        checks = tuple(f"{op} {count}," for count in PACKED_ROWS.get(shape, ()))
        made.append(Kernel(_block(call), f"{rows}: {outputs} x {inputs}", moved, op=op, checks=checks))
    unpack = calls.unpack(packing, BF16, inputs, large, PACKED_UNIT, 0, 0, mins, 0)
    moved = large * inputs * (weight_bytes + 2)
    return [*made, Kernel(_block(unpack), f"{large} x {inputs}", moved, checks=())]


def _experts() -> list[Kernel]:
    """Return the kernels of a mixture of experts; the products read gates and ups of all experts."""
    hidden, inner, count, top_k = QWEN_30B.hidden, QWEN_30B.intermediate, QWEN_30B.experts, QWEN_30B.top_k
    route = calls.route(ROWS, count, top_k, 16, True, *[0] * 6)
    combine = calls.combine(BF16, ROWS, hidden, top_k, 0, 0, 0)
    pairs, weight_bytes, named = ROWS * top_k, 2.0 * count * 2 * inner * hidden, ("experts ",)
    return [
        Kernel(_block(route), f"{ROWS} to {top_k} of {count}", ROWS * (4.0 * count + 12 * top_k), checks=named),
        *(
            Kernel(
                _block(calls.experts(BF16, size, 1, hidden, inner, top_k, 0, 0, 0, 0, 0, "silu")),
                f"{count} x {2 * inner} x {hidden}",
                weight_bytes,
                checks=named if size == 16 else (),  # the cases have few rows
            )
            for size in calls.EXPERTS_TILES
        ),
        Kernel(_block(combine), f"{ROWS} x {top_k} x {hidden}", 2.0 * (pairs + ROWS) * hidden, checks=named),
    ]


def _block(call: calls.Call) -> Block:
    return Block(call.name, call.block[0], call.shared)


def _attention(
    kind: str,
    block_of: Callable[[str, int], Block],
    shape: str,
    dims: Sequence[int] = HEAD_DIMS,
    unused: Sequence[int] = (),
) -> list[Kernel]:
    """Return the kernels of sizes of a head. shape: of what is timed, with the model's; unused: sizes that the device
    gives to another kernel."""
    return [
        Kernel(
            block_of(BF16, dim),
            shape if dim == MODEL.head_dim and dim not in unused else "",
            part=kind if dim == MODEL.head_dim and dim not in unused else "",
            op="attention",
            checks=() if dim in unused else (f"attention {kind} d{dim} ",),
        )
        for dim in dims
    ]


def rows(*results: Mapping[str, Any] | None) -> list[str]:
    """Return a line of the table for each kernel. results: of bench.gpu; a part is taken from the first that has it."""
    parts: dict[str, Any] = {}
    for result in results:
        parts = (result or {}).get("parts", {}) | parts
    banks = json.loads(BANKS.read_text())
    lines = []
    for kernel in kernels(parts.get("probes", {}).get("device", {}).get("has_wgmma", False)):
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
            EMULATED + _checked(parts, kernel.checks if kernel.checks is not None else (f"{kernel.op} ",)),
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


def _checked(parts: Mapping[str, Any], begins: tuple[str, ...]) -> str:
    """Return how many cases of bench.gpu were right on the card, behind a comma; nothing without any."""
    cases = [case for case in parts.get("checks", {}).get("checks", []) if case["name"].startswith(begins)]
    return f", H100 ({sum(case['right'] for case in cases)} of {len(cases)} cases)" if cases else ""
