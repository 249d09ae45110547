"""CUDA kernels are free of races, each template in several orders of threads, and bugs planted in copies are found.

Kernels run as their own tests run them; see races.cpp of the emulator for what is a race.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import kernels.emulator.device
from kernels.cuda import calls, loader
from kernels.emulator.program import FORWARD, RACES, REVERSE, EmulatorError, Program
from tests.kernels.cuda import programs
from tests.kernels.cuda.operations import (
    test_adapters,
    test_attention_decode,
    test_attention_prefill,
    test_blocks,
    test_experts,
    test_quantized,
    test_rope,
    test_rows,
    test_sampling,
)
from tests.kernels.sampling_cases import mixed, normal, rows
from tests.support.compiler import needs_compiler

KERNELS = [name for source in loader.sources() for name in re.findall(r"KERNEL\((\w+),", source.read_text())]
ORDERS = (FORWARD, REVERSE, 2)
pytestmark = needs_compiler


class Sizes(NamedTuple):
    """What the kernels are run with: numbers of a row, of a row that is normed, of a block, of rows with adapters and
    of an expert's."""

    width: int
    hidden: int
    block: int
    long: int
    short: int
    inner: int
    vocabularies: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    group: int
    packed: test_quantized.Case


ODD = Sizes(2312, 8200, 8192 + 8, 584, 40, 456, (500, 5003), ((0, 33), (150, 9)), 3, test_quantized.Case(37, 40, 5200))
"""Threads without work, and parts that are not full. A list of candidates has room for all ids of the first vocabulary,
and not for those of the second."""


def sample(order: int, sizes: Sizes) -> None:
    for vocab in sizes.vocabularies:
        test_sampling.draw(order, normal(6, vocab, 1), mixed(2, 6, vocab))
        for options in ({}, {"top_p": 0.9}, {"top_k": 20}):
            plain = rows(2, temperature=[0.8, 0], seed=np.arange(2), **options)
            test_sampling.draw(order, normal(2, vocab, 1), plain, processors=8)


def attend(order: int, case: test_attention_decode.Case, dtype: str) -> None:
    step = test_attention_decode.Step(case, dtype)
    step.decode([step.whole(sequence) for sequence in range(len(case.lengths))], order)
    step.check()


def products(order: int, sizes: Sizes, size: int, dtype: str) -> None:
    """Launch both products of experts."""
    check = test_experts.test_products_are_those_of_each_pairs_expert
    check(order, sizes.inner, sizes.short, "silu", size, dtype)
    check(order, sizes.inner, sizes.short, "", size, dtype)


def run(kernel: str, order: int, sizes: Sizes = ODD) -> None:
    """Launch a kernel in blocks of all its threads."""
    named = re.fullmatch(r"(\w+?)(?:_(bf16|f16)(?:_d(\d+))?)?", kernel)
    assert named is not None
    dtype, head_dim = named[2], int(named[3] or 0)
    decode, prefill, quantized, rows = test_attention_decode, test_attention_prefill, test_quantized, test_rows
    runs: dict[str, Callable[[], None]] = {
        "activate": lambda: rows.test_activations_are_those_of_float64(order, sizes.width, dtype, "silu"),
        "add": lambda: rows.test_add_is_in_place_and_rounds_once(order, sizes.width, dtype),
        "attention_decode": lambda: attend(order, decode.Case(head_dim, 1, 4, (33, 300, 15)), dtype),
        "attention_decode_fp8": lambda: attend(order, decode.Case(head_dim, 1, 4, (33, 300, 15), fp8=True), dtype),
        "attention_merge": lambda: decode.test_the_merge_weighs_any_number_of_parts(order, dtype),
        "attention_prefill": lambda: prefill.check(
            prefill.Case(sizes.chunks, sizes.group, head_dim=head_dim), dtype, order
        ),
        "attention_prefill_fp8": lambda: prefill.check(
            prefill.Case(sizes.chunks, sizes.group, head_dim=head_dim, fp8=True), dtype, order
        ),
        "combine": lambda: test_experts.test_combine_weighs_and_rounds_once(order, sizes.width, dtype),
        "attention_prefill_sm90": lambda: prefill.check(
            prefill.Case(((500, 20), *sizes.chunks), sizes.group, head_dim=head_dim, processors=1), dtype, order
        ),
        "copy_blocks": lambda: test_blocks.test_blocks_are_gathered_scattered_and_copied(order, sizes.block),
        "embed": lambda: rows.test_embed_scales_adds_places_and_reads_last_tokens(order, sizes.width, dtype, True),
        **{f"experts_r{size}": partial(products, order, sizes, size, dtype) for size in calls.EXPERTS_TILES},
        "gated": lambda: rows.test_gated_multiplies_the_activated_half_with_the_other(
            order, sizes.width, dtype, "silu"
        ),
        "layer_norm": lambda: rows.test_norms_are_those_of_float64(order, sizes.hidden, dtype, True),
        "low_rank_down": lambda: test_adapters.test_kernels_read_and_write_what_their_items_say(
            order, sizes.long, sizes.short, dtype
        ),
        "low_rank_up": lambda: test_adapters.test_kernels_read_and_write_what_their_items_say(
            order, sizes.short, sizes.long, dtype
        ),
        "rms_norm": lambda: rows.test_norms_are_those_of_float64(order, sizes.hidden, dtype, False),
        "rope_and_write": lambda: test_rope.test_q_is_returned_and_kv_lies_in_its_slots(
            order, "all of it, blocks of 32", dtype
        ),
        "rope_and_write_fp8": lambda: test_rope.test_q_is_returned_and_kv_lies_in_its_slots(
            order, "fp8, blocks of 32", dtype
        ),
        "route": lambda: test_experts.test_rows_are_given_to_experts_and_sorted_by_them(order, 70, 128, 8, True, 16),
        "sample": lambda: sample(order, sizes),
        "select_rows": lambda: rows.test_select_takes_the_rows_that_sample_and_leaves_padding_alone(order, sizes.width),
        "unpack_q4": lambda: quantized.check_unpacked(order, dtype, quantized.Kind(32, True), sizes.width),
        "unpack_fp8": lambda: quantized.check_unpacked(order, dtype, quantized.Kind(128, fp8=True), sizes.width),
    }
    if shape := re.fullmatch(r"linear_(q4|fp8)_t(\d)c(\d)", named[1]):
        kind = quantized.Kind(32, True) if shape[1] == "q4" else quantized.Kind(128, fp8=True)
        quantized.check(order, dtype, sizes.packed, kind, (int(shape[2]), int(shape[3])))
        return
    runs[named[1]]()


def launch_from(monkeypatch: pytest.MonkeyPatch, program_of: Callable[[str], Program]) -> list[str]:
    """Take programs from there. Return the names of the kernels that are launched, as they are."""
    launched: list[str] = []

    def noted(kernel: str, flags: tuple[str, ...] = ()) -> Program:
        launched.append(kernel)
        return program_of(kernel)

    monkeypatch.setattr(programs, "program_of", noted)
    monkeypatch.setattr(kernels.emulator.device, "program_of", noted)
    return launched


@cache
def checked(source: Path) -> Program:
    return Program(source, include=(loader.SOURCES,), flags=RACES)


def pairs_of(kernels: Sequence[str]) -> list[tuple[str, int]]:
    """Return kernels with orders: each kernel in one at least, those of one template in all of them together.

    Its kernels differ by types and sizes, not by where they wait. A race is one in every order of threads, as the
    planted ones show; of what an order decides, such as when a copy lands, each template has all.
    """
    templates: dict[str, list[str]] = {}
    for kernel in kernels:
        templates.setdefault(re.sub("_(bf16|f16)|_d[0-9]+|_[tcr][0-9]+(c[0-9]+)?", "", kernel), []).append(kernel)
    return [
        (alike[i % len(alike)], ORDERS[i % len(ORDERS)])
        for alike in templates.values()
        for i in range(max(len(alike), len(ORDERS)))
    ]


@pytest.mark.parametrize(("kernel", "order"), pairs_of(KERNELS))
def test_kernel_has_no_race(kernel: str, order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launch_from(monkeypatch, lambda name: checked(programs.source_of(name)))
    run(kernel, order)
    assert kernel in launched


class Plant(NamedTuple):
    """A bug: in `file`, `right` becomes `wrong`, and `kernel` races. One of each kind is enough: these show that the
    search sees what a kernel does, and tests/emulator/test_races.py shows what a race is."""

    file: str
    right: str
    wrong: str
    kernel: str
    in_check: bool = False
    """Whether `make kernels-check` plants it, so CI too."""


PLANTS = {
    "decode, a unit is read without __syncwarp": Plant(
        "attention/attention_decode.cuh", "UNITS<D> - 2>();\n    __syncwarp();", "UNITS<D> - 2>();",
        "attention_decode_bf16_d64", in_check=True,
    ),
    "decode, results are merged without a barrier": Plant(
        "attention/attention_decode.cu", "warp, lane);\n  __syncthreads();\n  merge", "warp, lane);\n  merge",
        "attention_decode_bf16_d64",
    ),
    "experts, places are taken without atomics": Plant(
        "experts/routing.cu", "p.order[atomicAdd(&places[expert], 1)]", "p.order[places[expert]++]",
        "route",
    ),
    "merge, the next piece comes without a barrier": Plant(
        "attention/attention_merge.cu", "    }\n    __syncthreads();\n  }", "    }\n  }", "attention_merge_f16",
        in_check=True,
    ),
    "prefill, the wait is for one group too few": Plant(
        "attention/attention_prefill_item.cuh", "cp_async_wait<STAGES - 2>", "cp_async_wait<STAGES - 1>",
        "attention_prefill_f16_d96",
    ),
    "packed, a unit is read without __syncwarp": Plant(
        "linear_packed.cu", "__syncwarp();  // the unit is there", "// the unit is there", "linear_q4_t2c1_bf16"
    ),
    "wgmma, copies are read without a fence": Plant(
        "attention/attention_prefill_sm90.cu", "    fence_for_wgmma();\n", "", "attention_prefill_sm90_bf16_d64"
    ),
    "norms, both sums in one place": Plant(
        "norms.cu", "SHARED(float, squares, WARPS);", "float(&squares)[WARPS] = sums;", "layer_norm_bf16"
    ),
    "add, pieces of two blocks overlap": Plant(
        "activations.cu",
        "AddParams& p) {\n  const int vectors = p.width / VECTOR, i = blockIdx.y * blockDim.x",
        "AddParams& p) {\n  const int vectors = p.width / VECTOR, i = blockIdx.y * (blockDim.x - 1)",
        "add_bf16",
    ),
    "sampler, a block arrives without a fence": Plant(
        "sampler/sampler_once.cuh", "__threadfence();\n    is_last", "is_last", "sample"
    ),
}  # fmt: skip


def alone(kernel: str, folder: Path) -> Path:
    """Copy all sources to a folder, and return the kernel's own there, without its other kernels."""
    source = folder / programs.source_of(kernel).relative_to(loader.SOURCES)
    shutil.copytree(loader.SOURCES, folder)
    others = rf"^\w*KERNEL\((?!{kernel},).*\n"
    source.write_text(re.sub(others, "", source.read_text(), flags=re.MULTILINE))
    return source


def planted(plant: Plant, folder: Path) -> Path:
    """Return the kernel's source with the bug; see `alone`."""
    source, changed = alone(plant.kernel, folder), folder / plant.file
    changed.write_text(changed.read_text().replace(plant.right, plant.wrong))
    return source


@pytest.mark.parametrize("name", PLANTS)
def test_plant_has_one_place(name: str) -> None:
    plant = PLANTS[name]
    assert (loader.SOURCES / plant.file).read_text().count(plant.right) == 1


@pytest.mark.parametrize(
    "name", [name if plant.in_check else pytest.param(name, marks=pytest.mark.slow) for name, plant in PLANTS.items()]
)
def test_planted_race_is_found_in_every_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = PLANTS[name]
    copied = tmp_path / "src"
    program = Program(planted(plant, copied), include=(copied,), flags=RACES)
    launch_from(monkeypatch, lambda _: program)
    for order in ORDERS:
        with pytest.raises(EmulatorError, match=f"{plant.kernel}, order {order}, .*: a race in "):
            run(plant.kernel, order)
