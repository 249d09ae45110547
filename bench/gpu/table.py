"""The CUDA kernels in one table: what each takes of a multiprocessor, its time beside its floor, how it was checked.

docs/gpu.md has it. All figures come from files: registers.json and banks.json of kernels/cuda and a result of
`python -m bench.gpu`; how many blocks of a kernel run at once is computed (kernels/cuda/residency.py), and how many
waves of them a launch has, from the launch that calls.py and planner.py make for a model of Llama-8B's shape, and for
experts of Qwen3-30B-A3B's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.kernels.shapes import BLOCK_SIZE, LLAMA_8B, QWEN_30B
from kernels.cuda import calls, residency
from kernels.cuda.calls import BF16, HEAD_DIMS, LOW_RANK_ROWS, PACKED_UNIT, SCALE_BYTES, Block
from kernels.cuda.planner import Planner, Seats

BANKS = Path(residency.__file__).with_name("banks.json")
MODEL = LLAMA_8B
ROWS, SEQUENCES, PARTS, ADAPTERS, RANK = 4096, 64, 8, 8, 16
"""Rows of a large step; sequences that decode; parts of a token's attention that are merged; adapters, rank of each."""
CONTEXT, PROMPT = 1024, 8192
"""Of each sequence that decodes; tokens of a prompt."""
COPIED, BLOCK_BYTES = 256, 2 << 20
ROWS_OF_TILES = {16: 64, 64: 512, 128: 4096}
"""For how many rows experts have such tiles."""
CARDS = {
    "sm_80": ("A100", 108),
    "sm_86": ("RTX 3090", 82),
    "sm_89": ("L4", 58),
    "sm_90": ("H100", 132),
    "sm_100": ("B200", 148),
    "sm_120": ("RTX 5090", 170),
}
"""One of each architecture, with its multiprocessors: their waves are counted."""
EMULATED = "emulator, PTX, races"
"""What tests/kernels/cuda runs every kernel of the sources on."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of bfloat16 as the table has it.

    block: of a launch; blocks: of the launch, by architecture and multiprocessors; shape: what the times are of;
    moved_bytes: the least that a launch reads and writes, where no bench counts it; operations: its products; part, op:
    where a result of bench.gpu has it; checks: how the names of its checks begin, by default with the op.
    """

    block: Block
    blocks: Callable[[str, int], int]
    shape: str
    moved_bytes: float = 0.0
    operations: float = 0.0
    part: str = "rows"
    op: str = ""
    checks: tuple[str, ...] | None = None


PACKED_ROWS = {(1, 1): (1, 3, 8), (1, 2): (16,)}
"""Rows of the checks of bench.gpu, of a small matrix, by the shape of the kernel that multiplies them."""


def kernels(has_wgmma: bool = False) -> list[Kernel]:
    """Return all kernels, attention for each size of a head. has_wgmma: of the device that the results are of."""
    hidden, width, heads, head_dim = MODEL.hidden, MODEL.intermediate, MODEL.heads, MODEL.head_dim
    row_bytes, rows = 2.0 * ROWS * hidden, f"{ROWS} x {hidden}"
    adapted = f"gate_up, {ROWS} of {ADAPTERS}"
    down, up = calls.low_rank(BF16, ROWS // LOW_RANK_ROWS, hidden, 2 * width, 2, RANK, *[0] * 8)
    merge = calls.attention_merge(BF16, SEQUENCES, heads, head_dim, *[0] * 5)
    merged_bytes = SEQUENCES * heads * head_dim * (4.0 * PARTS + 2)
    rope = calls.rope_and_write(BF16, ROWS, heads, MODEL.kv_heads, head_dim, BLOCK_SIZE, 0, 0, 0, 0, 0, 0)
    coded = calls.rope_and_write(BF16, ROWS, heads, MODEL.kv_heads, head_dim, BLOCK_SIZE, 0, 0, 0, 0, 0, 0, fp8=True)
    coded_bytes = ROWS * (2.0 * (MODEL.qkv + heads * head_dim) + 2 * MODEL.kv_heads * (head_dim + SCALE_BYTES))
    layer_norm = calls.norm(BF16, ROWS, hidden, 0, 0, 0, 0.0, layer_norm=True)
    copy = calls.copy_blocks(COPIED, 0, 0, (BLOCK_BYTES, BLOCK_BYTES), BLOCK_BYTES)
    wgmma = calls.WGMMA_HEAD_DIMS
    sample = calls.sample(256, MODEL.vocab, *[0] * 5)
    return [
        *(_attention(False, dim) for dim in HEAD_DIMS),
        *(_attention(True, dim, is_timed=not has_wgmma or dim not in wgmma) for dim in HEAD_DIMS),
        *(_attention(True, dim, is_timed=has_wgmma, has_wgmma=True) for dim in wgmma),
        *(_attention(prefills, dim, False, fp8=True) for prefills in (False, True) for dim in calls.FP8_HEAD_DIMS),
        Kernel(*_launch(merge), f"{SEQUENCES} of {PARTS} parts", merged_bytes),
        Kernel(*_launch(sample), f"256 x {MODEL.vocab}, top-p 0.9", part="sampler", op="sample"),
        Kernel(*_launch(calls.norm(BF16, ROWS, hidden, 0, 0, 0, 0.0)), rows, op="norm"),
        Kernel(*_launch(layer_norm), rows, 2 * row_bytes),
        Kernel(*_launch(rope), f"{ROWS} x {MODEL.qkv}", op="rope_and_write"),
        Kernel(*_launch(coded), f"{ROWS} x {MODEL.qkv}", coded_bytes, checks=()),
        Kernel(*_launch(calls.gated(BF16, ROWS, width, 0, 0, "silu")), f"{ROWS} x {width}", op="act_and_mul"),
        Kernel(*_launch(calls.activate(BF16, ROWS, width, 0, 0, "silu")), f"{ROWS} x {width}", 4.0 * ROWS * width),
        Kernel(*_launch(calls.add(BF16, ROWS, hidden, 0, 0)), rows, 3 * row_bytes),
        Kernel(*_launch(calls.embed(BF16, ROWS, hidden, 0, 0, 0)), rows, op="embed"),
        Kernel(*_launch(calls.select(ROWS, hidden, 0, 0, 0)), rows, op="select"),
        *_experts(),
        Kernel(*_launch(copy), f"{COPIED} of {BLOCK_BYTES >> 20} MiB", 2.0 * COPIED * BLOCK_BYTES),
        Kernel(*_launch(down), adapted, row_bytes, 0.0, "adapters", "low_rank_down", ("add_low_rank ",)),
        Kernel(*_launch(up), adapted, 8.0 * ROWS * width, 0.0, "adapters", "low_rank_up", ("add_low_rank ",)),
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
        made.append(Kernel(*_launch(call), f"{rows}: {outputs} x {inputs}", moved, op=op, checks=checks))
    unpack = calls.unpack(packing, BF16, inputs, large, PACKED_UNIT, 0, 0, mins, 0)
    moved = large * inputs * (weight_bytes + 2)
    return [*made, Kernel(*_launch(unpack), f"{large} x {inputs}", moved, checks=())]


def _experts() -> list[Kernel]:
    """Return the kernels of a mixture of experts; the products read gates and ups of all experts."""
    hidden, inner, count, top_k = QWEN_30B.hidden, QWEN_30B.intermediate, QWEN_30B.experts, QWEN_30B.top_k
    route = calls.route(ROWS, count, top_k, 16, True, *[0] * 6)
    combine = calls.combine(BF16, ROWS, hidden, top_k, 0, 0, 0)
    pairs, weight_bytes, named = ROWS * top_k, 2.0 * count * 2 * inner * hidden, ("experts ",)
    return [
        Kernel(*_launch(route), f"{ROWS} to {top_k} of {count}", ROWS * (4.0 * count + 12 * top_k), checks=named),
        *(
            Kernel(
                *_launch(calls.experts(BF16, size, tiles, hidden, inner, top_k, 0, 0, 0, 0, 0, "silu")),
                f"{rows}: {count} x {2 * inner} x {hidden}",
                weight_bytes,
                rows * top_k * 4.0 * inner * hidden,
                checks=named if size == 16 else (),  # the cases have few rows
            )
            for size, rows in ROWS_OF_TILES.items()
            for tiles in [calls.most_tiles(rows * top_k, count, size)]
        ),
        Kernel(*_launch(combine), f"{ROWS} x {top_k} x {hidden}", 2.0 * (pairs + ROWS) * hidden, checks=named),
    ]


def _launch(call: calls.Call) -> tuple[Block, Callable[[str, int], int]]:
    return Block(call.name, call.block[0], call.shared), lambda arch, processors: math.prod(call.grid)


def _attention(
    prefills: bool, head_dim: int, is_timed: bool = True, has_wgmma: bool = False, fp8: bool = False
) -> Kernel:
    """Return the kernel of a size of a head, with as many heads as the model has.

    is_timed: whether the device that results are of takes this kernel for such heads.
    """
    heads, kv_heads, kind = MODEL.heads, MODEL.kv_heads, "prefill" if prefills else "decode"
    tokens = PROMPT if prefills else SEQUENCES * CONTEXT  # of K and V
    rows, pairs = (PROMPT, PROMPT * (PROMPT + 1) / 2) if prefills else (SEQUENCES, float(tokens))
    moved = 2.0 * tokens * kv_heads * (head_dim + SCALE_BYTES if fp8 else 2 * head_dim) + 4.0 * rows * heads * head_dim
    block_of = partial(calls.prefill_block, has_wgmma=has_wgmma) if prefills else calls.decode_block
    block = block_of(BF16, head_dim, fp8=fp8)

    def blocks(arch: str, processors: int) -> int:
        seats = processors * residency.resident_of(arch, *block)
        planner = Planner(Seats(seats, seats), kv_heads, heads // kv_heads, head_dim)
        starts, context = ([0, PROMPT], [PROMPT]) if prefills else (range(SEQUENCES + 1), [CONTEXT] * SEQUENCES)
        plan = planner.plan(np.array(starts, np.int32), np.array(context, np.int32))
        items = kv_heads * len(plan.prefill if prefills else plan.decode)
        return min(processors, items) if has_wgmma else items  # a block of the wgmma kernel computes several items

    return Kernel(
        block,
        blocks,
        f"1 x {PROMPT} of {PROMPT}" if prefills else f"{SEQUENCES} x {CONTEXT}",
        moved,
        4.0 * pairs * heads * head_dim,
        part=kind if head_dim == MODEL.head_dim and is_timed else "",
        op="attention",
        checks=(f"attention {kind} d{head_dim} ",) if is_timed else (),
    )


def rows(*results: Mapping[str, Any] | None) -> list[str]:
    """Return a line of the table for each kernel. results: of bench.gpu; a part is taken from the first that has it."""
    parts: dict[str, Any] = {}
    for result in results:
        parts = (result or {}).get("parts", {}) | parts
    banks = json.loads(BANKS.read_text())["kernels"]
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
        waves = [
            f"{kernel.blocks(arch, CARDS[arch][1]) / CARDS[arch][1] / int(held):.1f}" if held != "-" else "-"
            for arch, held in zip(usages, blocks, strict=True)
        ]
        peaks = parts.get("probes", {}).get("peaks")
        floor_us = found[0]["floor_us"] if found else _floor_us(kernel, peaks) if peaks else 0.0
        cells = (
            f"`{name.replace('_bf16', '')}`",
            ", ".join(registers),
            ", ".join(blocks),
            ", ".join(waves),
            *(_banks(banks.get(name, {}), space) for space in ("shared", "global")),
            kernel.shape,
            f"{floor_us:,.1f}" if floor_us else "",
            f"{found[0]['us']:,.1f}" if found else "",
            EMULATED + _checked(parts, kernel.checks if kernel.checks is not None else (f"{kernel.op} ",)),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _floor_us(kernel: Kernel, peaks: Any) -> float:
    """Return the least time of its bytes, or of its products, at the rates that a card had."""
    multiply = peaks.get("tflop_s", {}).get("bfloat16")
    products = kernel.operations / multiply / 1e6 if multiply else 0.0
    return float(max(kernel.moved_bytes / peaks["copy_gb_s"] / 1e3, products))


def cards() -> list[str]:
    """Return the cards that the table has waves for."""
    return [CARDS[arch][0] for arch in architectures()]


def architectures() -> list[str]:
    """Return the architectures that the kernels are compiled for."""
    return list(residency.recorded())


def _banks(spaces: Mapping[str, Mapping[str, float]], space: str) -> str:
    """Return accesses taken per access needed, without atomics, and the goal."""
    if space not in spaces:
        return ""
    row = spaces[space]
    return f"{row['taken'] / row['least']:.2f} (<= {row['goal']:.2f})"


def _checked(parts: Mapping[str, Any], begins: tuple[str, ...]) -> str:
    """Return how many cases of bench.gpu were right on the card, behind a comma; nothing without any."""
    cases = [case for case in parts.get("checks", {}).get("checks", []) if case["name"].startswith(begins)]
    return f", H100 ({sum(case['right'] for case in cases)} of {len(cases)} cases)" if cases else ""
