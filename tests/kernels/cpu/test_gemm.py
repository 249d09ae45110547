"""The CPU's linear layers against float64, in every instruction set that this machine can run."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gguf.quants import IQ4_NL
from numpy.typing import NDArray

from kernels.cpu.commands import BFLOAT16, FLOAT32, EmbedArgs, LinearArgs, Step, command
from kernels.cpu.library import Library
from kernels.formats import INT4, TABLES, W8A8, GroupFormat
from kernels.ops import W8A8_INPUTS, Groups
from tests.kernels import cpu_variants
from tests.kernels.sequences import HARD_VECTORS
from tests.support.checkpoints.w8a8 import product

pytestmark = pytest.mark.sanitized

KINDS = (
    # weights, activations, output
    ("float32", FLOAT32, FLOAT32),
    ("bfloat16", BFLOAT16, BFLOAT16),
    ("bfloat16", BFLOAT16, FLOAT32),
    ("bfloat16", FLOAT32, FLOAT32),
    ("int8", FLOAT32, FLOAT32),
    ("int8", BFLOAT16, BFLOAT16),
)
KIND_NAMES = [f"{weights}-{('f32', 'bf16')[x]}-{('f32', 'bf16')[out]}" for weights, x, out in KINDS]
GROUPS = [(bits, group, kind) for bits in (4, 8) for group in (32, 128) for kind in ("plain", "mins")]
GROUPS += [(6, 32, "plain"), (6, 32, "mins"), (2, 16, "mins"), (4, 16, "plain"), (6, 16, "plain")]
GROUPS += [(4, 32, "float4"), (4, 32, "iq4")]
"""Bits, inputs of a group, whether there are minima or a table of numbers."""
SHAPES = ((1, 1), (31, 7), (33, 64), (129, 65), (96, 1024), (40, 2048), (200, 1111))
"""Outputs, inputs. Rows of 1024 float32 or 2048 bfloat16 are the distance that caches dislike."""
ROWS = (1, 2, 3, 4, 6, 7, 13, 14, 15, 29)
LONG, MANY_ROWS = (65, 1024), 250

Array = NDArray[np.generic]


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """To nearest, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(x: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (x.astype(np.uint32) << 16).view(np.float32)


def stored(x: NDArray[np.float32], dtype: int) -> Array:
    return x if dtype == FLOAT32 else to_bf16(x)


def read(x: Array, dtype: int) -> NDArray[np.float64]:
    return (x if dtype == FLOAT32 else from_bf16(x.view(np.uint16))).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Weight:
    memory: Array
    packed: int
    weight_format: int
    outputs: int
    inputs: int


class Gemm:
    """The compiled library, on numpy arrays."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.has_group_order = bool(library.group_order)

    def pack(self, name: str, parts: list[Array], source: int) -> Weight:
        """Parts, [rows, inputs] each, packed last one first into memory that was not zero."""
        arrays = [np.ascontiguousarray(part) for part in parts]
        return self._pack(name, [(part, part.ctypes.data, source) for part in arrays])

    def pack_groups(self, parts: list[Groups]) -> Weight:
        """As pack."""
        pointers = [(part.scales.data_ptr(), None if part.mins is None else part.mins.data_ptr()) for part in parts]
        given = [
            (part.numbers, part.numbers.data_ptr(), FLOAT32, *more) for part, more in zip(parts, pointers, strict=True)
        ]
        return self._pack(parts[0].group_format, given)

    def _pack(self, name: str, parts: list[tuple[Any, ...]]) -> Weight:
        """Of each part, its rows and what the library reads them by."""
        outputs, inputs = sum(len(rows) for rows, *_ in parts), parts[0][0].shape[1]
        number = self._library.format_numbers[name]
        size = self._library.packed_bytes(number, outputs, inputs)
        memory = np.full(size + 64, 0xA5, np.uint8)
        packed = -(-memory.ctypes.data // 64) * 64
        first = outputs
        for rows, *read_by in reversed(parts):
            first -= len(rows)
            self._library.pack(number, packed, (outputs, inputs), first, len(rows), *read_by)
        end = packed - memory.ctypes.data + size
        assert (memory[end:] == 0xA5).all()
        return Weight(memory[end - size : end], packed, number, outputs, inputs)

    def unpack(self, weight: Weight) -> NDArray[np.float64]:
        """Row by row, as embeddings read it."""
        out = np.empty((weight.outputs, weight.inputs), np.float32)
        rows = np.arange(weight.outputs, dtype=np.int32)
        args = EmbedArgs(
            table=weight.packed,
            out=out.ctypes.data,
            hidden=weight.inputs,
            vocab=weight.outputs,
            dtype=FLOAT32,
            table_dtype=weight.weight_format,
            packed=1,
            scale=1,
        )
        made, step = command(weight.outputs, args), Step(tokens_count=weight.outputs, tokens=rows.ctypes.data)
        self._library.run(ctypes.addressof(made), 1, ctypes.addressof(step), 1)
        return out.astype(np.float64)

    def linear(
        self, x: Array, dtype: int, weight: Weight, bias: NDArray[np.float32] | None, out_dtype: int, threads: int = 1
    ) -> Array:
        """What surrounds x is NaN, and what surrounds the output must stay."""
        guarded = np.full((len(x) + 2, weight.inputs), 0xFFFF if dtype == BFLOAT16 else np.nan, x.dtype)
        guarded[1:-1] = x
        kind = np.float32 if out_dtype == FLOAT32 else np.uint16
        out = np.full((len(x) + 2, weight.outputs), 12345, kind)
        args = LinearArgs(
            x=guarded[1:].ctypes.data,
            weight=weight.packed,
            bias=None if bias is None else bias.ctypes.data,
            out=out[1:].ctypes.data,
            inputs=weight.inputs,
            outputs=weight.outputs,
            out_stride=weight.outputs,
            dtype=dtype,
            weight_format=weight.weight_format,
            out_dtype=out_dtype,
        )
        made, step = command(len(x), args), Step()
        self._library.run(ctypes.addressof(made), 1, ctypes.addressof(step), threads)
        assert (out[0] == 12345).all() and (out[-1] == 12345).all()
        return out[1:-1]


def groups(rng: np.random.Generator, kind: tuple[int, int, str], size: tuple[int, int]) -> Groups:
    """Random ones with scales of 11 bits, as float16 has, and the mins of zero points or others of 17 bits."""
    bits, group, what = kind
    outputs, inputs = size
    numbers = torch.from_numpy(rng.integers(0, 1 << bits, size, np.uint8))
    scales = torch.from_numpy(rng.standard_normal((outputs, -(-inputs // group)), np.float32)).half().float()
    mins = scales * torch.from_numpy(rng.integers(0, 64, scales.shape).astype(np.float32)) if what == "mins" else None
    return Groups(bits, group, numbers, scales, mins, table=what if what in TABLES else "")


def w8a8(rng: np.random.Generator, size: tuple[int, int]) -> Groups:
    numbers = torch.from_numpy(rng.integers(0, 256, size, np.uint8))
    scales = torch.from_numpy(np.exp(rng.standard_normal((size[0], 1), np.float32)))
    return Groups(8, size[1], numbers, scales, rounds_rows=True)


def exact(part: Groups) -> NDArray[np.float64]:
    """The weights in float64, rounded once."""
    scales, numbers = (x.double().numpy() for x in (part.scales, part.numbers))
    spread = [
        np.repeat(x, part.group, 1)[:, : numbers.shape[1]]
        for x in (scales, *(() if part.mins is None else (part.mins.double().numpy(),)))
    ]
    if part.table == "iq4":
        meant = np.array(IQ4_NL.kvalues, np.float64)[numbers.astype(int)]
        return (meant * spread[0]).astype(np.float32).astype(np.float64)
    if part.table:  # sign, two bits of exponent, one of fraction
        sign, power, half = numbers.astype(int) >> 3, numbers.astype(int) >> 1 & 3, numbers % 2 / 2
        numbers = np.where(power > 0, 2.0 ** (power - 1) * (1 + half), half) * (1 - 2 * sign)
        return (numbers * spread[0]).astype(np.float32).astype(np.float64)
    found = (numbers - (1 << part.bits - 1)) * spread[0] if part.mins is None else numbers * spread[0] - spread[1]
    return found.astype(np.float32).astype(np.float64)


@pytest.fixture
def gemm(variant: str) -> Gemm:
    return Gemm(cpu_variants.library(variant))


class Expected:
    """x @ w.T + bias in float64, and the worst that float32 sums of such products can be off."""

    def __init__(self, x: NDArray[np.float64], w: NDArray[np.float64], bias: NDArray[np.float32] | None) -> None:
        add = np.float64(0) if bias is None else bias.astype(np.float64)
        self._exact = x @ w.T + add
        self._bound = (np.abs(x) @ np.abs(w).T + np.abs(add)) * (x.shape[1] + 3) * 2.0**-24 + 1e-37

    def check(self, out: Array, out_dtype: int) -> None:
        found, exact, bound = read(out, out_dtype), self._exact[: len(out)], self._bound[: len(out)]
        if out_dtype == BFLOAT16:
            bound = bound + np.abs(exact) * 2.0**-8
        assert np.isfinite(found).all()
        assert (np.abs(found - exact) <= bound).all(), np.abs(found - exact).max()


def test_library_has_a_format_of_every_table_and_of_int4(variant: str) -> None:
    names = cpu_variants.library(variant).group_formats - {W8A8}
    assert {GroupFormat.parse(name).name for name in names} == names
    assert {GroupFormat.parse(name).table for name in names} == {"", *TABLES}
    assert INT4.name in names


def test_groups_take_the_bytes_that_their_format_says(variant: str) -> None:
    library = cpu_variants.library(variant)
    outputs, inputs = 256, 512
    for name in library.group_formats - {W8A8}:
        size = library.packed_bytes(library.format_numbers[name], outputs, inputs)
        assert size == outputs * inputs * GroupFormat.parse(name).bits_per_weight / 8, name


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_product_equals_float64_for_any_shape(gemm: Gemm, kind: tuple[str, int, int]) -> None:
    weight_format, dtype, out_dtype = kind
    rng = np.random.default_rng(1)
    for i, (outputs, inputs) in enumerate(SHAPES):
        source = BFLOAT16 if weight_format == "bfloat16" else FLOAT32
        weight = gemm.pack(weight_format, [stored(rng.standard_normal((outputs, inputs), np.float32), source)], source)
        bias = rng.standard_normal(outputs, np.float32) if i % 2 else None
        rows = (*ROWS, MANY_ROWS) if inputs in LONG else ROWS
        x = stored(rng.standard_normal((max(rows), inputs), np.float32), dtype)
        expected = Expected(read(x, dtype), gemm.unpack(weight), bias)
        for count in rows:
            expected.check(gemm.linear(x[:count], dtype, weight, bias, out_dtype), out_dtype)


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_row_is_equal_to_the_bit_in_any_batch(gemm: Gemm, kind: tuple[str, int, int]) -> None:
    weight_format, dtype, out_dtype = kind
    rng = np.random.default_rng(2)
    for outputs, inputs in ((200, 1111), (65, 1024)):
        weight = gemm.pack(weight_format, [rng.standard_normal((outputs, inputs), np.float32)], FLOAT32)
        bias = rng.standard_normal(outputs, np.float32)
        x = stored(rng.standard_normal((MANY_ROWS, inputs), np.float32), dtype)
        whole = gemm.linear(x, dtype, weight, bias, out_dtype, 1)
        for threads in (2, 5):
            assert np.array_equal(whole, gemm.linear(x, dtype, weight, bias, out_dtype, threads))
        for rows in (*range(1, 17), 27, 45, 113):
            at = int(rng.integers(0, MANY_ROWS - rows + 1))
            part = gemm.linear(x[at : at + rows], dtype, weight, bias, out_dtype, 1 + rows % 8 // 7)
            assert np.array_equal(part, whole[at : at + rows]), rows
        places = rng.permutation(MANY_ROWS)[:40]
        assert np.array_equal(gemm.linear(x[places], dtype, weight, bias, out_dtype), whole[places])


def check_group_order(gemm: Gemm, part: Groups, x: NDArray[np.uint16], bias: NDArray[np.float32]) -> None:
    """Products in float64 within what float32 sums may be off, the same bits in any batch, and exact ones exactly."""
    packed, weight, wide_x = gemm.pack_groups([part]), exact(part), read(x, BFLOAT16)
    whole = gemm.linear(x, BFLOAT16, packed, bias, FLOAT32)
    if part.mins is None:
        expected = Expected(wide_x, weight, bias)
    else:  # numbers and minima are added up apart, and each may be larger than the weight
        below = np.repeat(part.mins.double().numpy(), part.group, 1)[:, : x.shape[1]]
        expected = Expected(np.tile(wide_x, 2), np.concatenate([weight + below, -below], 1), bias)
    expected.check(whole, FLOAT32)
    for rows in (*range(1, 17), 29, 113):
        found = gemm.linear(x[-rows:], BFLOAT16, packed, bias, FLOAT32, 1 + rows % 8 // 7)
        assert np.array_equal(found, whole[-rows:]), rows
    rng = np.random.default_rng(9)
    small = rng.integers(-4, 5, (20, x.shape[1])).astype(np.float32)
    part.scales.fill_(0.5)
    if part.mins is not None:
        part.mins.copy_(torch.from_numpy(rng.integers(0, 16, part.mins.shape).astype(np.float32)))
    sums, packed = small.astype(np.float64) @ exact(part).T, gemm.pack_groups([part])
    for rows in (1, 4, 20):
        assert np.array_equal(gemm.linear(to_bf16(small[:rows]), BFLOAT16, packed, None, FLOAT32), sums[:rows])


@pytest.mark.parametrize("kind", GROUPS, ids=[f"{bits}-{group}-{what}" for bits, group, what in GROUPS])
def test_groups_multiply_as_their_float32_weights_or_by_numbers(gemm: Gemm, kind: tuple[int, int, str]) -> None:
    """To the bit as float32 weights; where bfloat16 activations are multiplied by numbers, with no weight rounded."""
    rng = np.random.default_rng(7)
    for outputs, inputs in ((1, 1), (33, 40), (200, 1111), (65, 1024)):
        part = groups(rng, kind, (outputs, inputs))
        weight = exact(part)
        assert np.array_equal(part.plain().double().numpy(), weight)
        packed = gemm.pack_groups([part])
        assert np.array_equal(gemm.unpack(packed), weight)
        plain = gemm.pack("float32", [weight.astype(np.float32)], FLOAT32)
        bias = rng.standard_normal(outputs, np.float32)
        x = rng.standard_normal((MANY_ROWS, inputs), np.float32)
        if gemm.has_group_order:
            check_group_order(gemm, part, to_bf16(x), bias)
        for dtype in (FLOAT32,) if gemm.has_group_order else (FLOAT32, BFLOAT16):
            for rows in (1, 2, 3, 4, 7, 14, 15, 29, 113, MANY_ROWS):
                some = stored(x[:rows], dtype)
                found = gemm.linear(some, dtype, packed, bias, dtype, 1 + rows // MANY_ROWS)
                assert np.array_equal(found, gemm.linear(some, dtype, plain, bias, dtype)), (dtype, rows)


def test_w8a8_is_its_formula_to_the_bit_in_any_batch(gemm: Gemm) -> None:
    rng = np.random.default_rng(10)
    for i, (outputs, inputs) in enumerate((*SHAPES, (40, 5000))):
        part = w8a8(rng, (outputs, inputs))
        packed = gemm.pack_groups([part])
        assert np.array_equal(gemm.unpack(packed), exact(part))
        numbers, scales = part.numbers.numpy().astype(np.int64) - 128, part.scales.numpy()[:, 0]
        bias = rng.standard_normal(outputs, np.float32) if i % 2 else None
        x = rng.standard_normal((MANY_ROWS, inputs), np.float32) * np.exp(
            rng.standard_normal((MANY_ROWS, 1), np.float32)
        )
        for row, hard in enumerate(HARD_VECTORS.numpy()):
            x[row] = np.resize(hard, inputs)
        for dtype, out_dtype in ((FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32)):
            given = stored(x, dtype)
            expected = product(read(given, dtype).astype(np.float32), numbers, scales, bias)
            for rows in (*ROWS, 113, MANY_ROWS) if inputs in LONG else (1, 4, 29):
                for first in {0, MANY_ROWS - rows}:
                    some = slice(first, first + rows)
                    found = gemm.linear(given[some], dtype, packed, bias, out_dtype, 1 + rows % 8 // 7)
                    wanted = expected[some] if out_dtype == FLOAT32 else from_bf16(to_bf16(expected[some]))
                    assert np.array_equal(read(found, out_dtype), wanted, equal_nan=True), (
                        outputs,
                        inputs,
                        dtype,
                        rows,
                    )


def test_w8a8_sums_are_exact_with_the_most_inputs_and_the_largest_numbers(gemm: Gemm) -> None:
    """Sums of numbers that are 128 larger, as the kernels form them, do not fit into 32 bits."""
    numbers = torch.tensor([[0], [255]], dtype=torch.uint8).expand(2, W8A8_INPUTS).contiguous()
    packed = gemm.pack_groups([Groups(8, W8A8_INPUTS, numbers, torch.ones(2, 1), rounds_rows=True)])
    x = np.full((2, W8A8_INPUTS), 127, np.float32)
    x[1] = -127
    sums = np.array([[-128, 127], [128, -127]]) * 127 * W8A8_INPUTS
    assert np.array_equal(gemm.linear(x, FLOAT32, packed, None, FLOAT32), sums.astype(np.float32))


def test_packing_groups_in_parts_is_packing_the_whole(gemm: Gemm) -> None:
    rng = np.random.default_rng(8)
    makers = [*(partial(groups, rng, kind) for kind in GROUPS), partial(w8a8, rng)]
    for make in makers:
        parts = [make((rows, 136)) for rows in (48, 3, 1, 70, 9)]
        found = gemm.unpack(gemm.pack_groups(parts))
        assert np.array_equal(found, np.concatenate([exact(part) for part in parts]))


def test_one_output_is_one_ascending_chain_of_float32_sums(gemm: Gemm) -> None:
    """Numbers with exact float32 products, so that the oracle needs no fused multiply-add."""
    rng = np.random.default_rng(6)
    w, x = (rng.integers(-2000, 2000, (rows, 700)).astype(np.float32) for rows in (33, 20))
    scale = np.float32(2.0) ** rng.integers(-12, 12, 700).astype(np.float32)
    sums = np.zeros((20, 33), np.float32)
    for k in range(700):
        sums += np.outer(x[:, k] * scale[k], w[:, k])
    out = gemm.linear(x * scale, FLOAT32, gemm.pack("float32", [w], FLOAT32), None, FLOAT32)
    assert np.array_equal(out, sums)


@pytest.mark.parametrize("source", (FLOAT32, BFLOAT16))
@pytest.mark.parametrize("weight_format", ("float32", "bfloat16", "int8"))
def test_packing_in_parts_is_packing_the_whole(gemm: Gemm, weight_format: str, source: int) -> None:
    rng = np.random.default_rng(3)
    for inputs in (64, 37):
        parts = [rng.standard_normal((rows, inputs), np.float32) for rows in (48, 3, 1, 70, 9)]
        one = gemm.pack(weight_format, [stored(np.concatenate(parts), source)], source)
        many = gemm.pack(weight_format, [stored(part, source) for part in parts], source)
        assert np.array_equal(gemm.unpack(one), gemm.unpack(many))
        x = rng.standard_normal((9, inputs), np.float32)
        assert np.array_equal(gemm.linear(x, FLOAT32, one, None, FLOAT32), gemm.linear(x, FLOAT32, many, None, FLOAT32))


def test_unpacked_rows_are_the_source(gemm: Gemm) -> None:
    w = np.random.default_rng(4).standard_normal((71, 39), np.float32)
    assert np.array_equal(gemm.unpack(gemm.pack("float32", [w], FLOAT32)), w)
    assert np.array_equal(gemm.unpack(gemm.pack("bfloat16", [w], FLOAT32)), from_bf16(to_bf16(w)))
    assert np.array_equal(gemm.unpack(gemm.pack("float32", [to_bf16(w)], BFLOAT16)), from_bf16(to_bf16(w)))


def test_int8_rows_are_scaled_by_their_largest_number(gemm: Gemm) -> None:
    rng = np.random.default_rng(5)
    w = rng.standard_normal((71, 39), np.float32) * np.exp(rng.standard_normal((71, 1), np.float32))
    w[17] = 0
    found = gemm.unpack(gemm.pack("int8", [w], FLOAT32))
    scale = np.abs(w).max(1, keepdims=True).astype(np.float64) / 127
    assert (np.abs(found - w) <= scale * 0.50001).all()
    steps = found[scale[:, 0] > 0] / scale[scale[:, 0] > 0]
    assert np.abs(steps - np.rint(steps)).max() < 1e-4
    assert np.abs(steps).max() == pytest.approx(127)
