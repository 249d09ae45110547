"""Matrices that stay packed on the device, in 4 bits or fp8 with a scale for each 128 or 32 inputs, and their products.

A few rows go through `linear_packed`, which unpacks in registers. For more the matrix is unpacked into the model's type
in memory that is free again after the product, which is torch's. `kernels/cuda/src/linear_packed.cu` says how the words
lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.device import Device, dtype_name, launch, pointer, put
from kernels.formats import CUDA_FORMATS
from kernels.ops import Groups

PACKINGS = {packing.bits: packing for packing in (calls.Q4, calls.FP8)}
"""By Groups.bits."""
MAX_ROWS = 64
"""Of a product without unpacking. Beyond it the weights are unpacked and multiplied by torch."""

TILE, UNIT = calls.PACKED_TILE, calls.PACKED_UNIT
_PLACES = tuple(4 * (i // 2 + i % 2 * 4) for i in range(8))
"""Where each of 8 inputs in 4 bits lies in its word, in bits."""
_BYTES = (2, 0, 3, 1)
"""Which of 4 inputs in fp8 each byte of a word holds."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [outputs, inputs] as linear_packed.cu has it."""

    packing: calls.Packing
    outputs: int
    inputs: int
    group: int
    words: Tensor  # [tiles, units, VECTORS of the packing, 32, 4] int32
    scales: Tensor  # [tiles, units, groups of a unit, TILE] float32
    mins: Tensor | None
    bias: Tensor | None  # [outputs] float32

    @property
    def numbers(self) -> int:
        """Return how many weights it has."""
        return self.outputs * self.inputs


def pack(gpu: Device, parts: Iterable[Groups], outputs: int, inputs: int, bias: Tensor | None) -> Quantized:
    """Return the parts, one under the other. Raise ValueError for parts of another format, or too few or many rows."""
    calls.demand_vectors(inputs)
    tiles, units = -(-outputs // TILE), -(-inputs // UNIT)
    name, group, first = "", UNIT, 0
    packing, numbers = calls.Q4, gpu.empty((0,), torch.uint8)
    scales: list[Tensor] = []
    for part in parts:
        if not name:
            name, group = part.group_format, part.group
            if name not in CUDA_FORMATS:
                known = ", ".join(sorted(CUDA_FORMATS))
                raise ValueError(f"weights in {name}: the cuda backend has no kernels for it, but for {known}")
            packing = PACKINGS[part.bits]
            zero = 0 if part.table else 8
            numbers = _fill(gpu, (tiles * TILE, units * UNIT), torch.uint8, zero)
            held = (tiles * TILE, units * (UNIT // group))
            scales = [_fill(gpu, held, torch.float32, 0) for _ in range(1 if part.mins is None else 2)]
        rows, width = part.numbers.shape
        if part.group_format != name or width != inputs:
            raise ValueError(f"rows of {width} numbers in {part.group_format} were given after others")
        if first + rows > outputs:
            raise ValueError(f"{first + rows} rows were given for a weight of {outputs}")
        _put_rows(gpu, part.numbers, numbers, first)
        for held_there, values in zip(scales, (part.scales, part.mins), strict=False):
            if values is not None:
                _put_rows(gpu, values, held_there, first)
        first += rows
    if first != outputs or not name:
        raise ValueError(f"{first} rows were given for a weight of {outputs}")
    shape = (tiles, units, packing.tile_words // 32, 32, 4)
    words = _compute(gpu, shape, torch.int32, lambda: (_words if packing is calls.Q4 else _words_of_codes)(numbers))
    ordered = [
        _compute(gpu, (tiles, units, UNIT // group, TILE), torch.float32, partial(_by_unit, values, units))
        for values in scales
    ]
    mins = ordered[1] if len(ordered) == 2 else None
    return Quantized(packing, outputs, inputs, group, words, ordered[0], mins, None if bias is None else put(gpu, bias))


def multiply(gpu: Device, x: Tensor, weight: Quantized, out: Tensor) -> None:
    """Write x [N, inputs] times the matrix to out [N, outputs], of which the rows may lie apart; N is not 0."""
    if x.shape[0] > MAX_ROWS:
        _multiply_unpacked(gpu, x, weight, out)
        return
    call = calls.linear_packed(
        weight.packing,
        dtype_name(x.dtype),
        x.shape[0],
        weight.inputs,
        weight.outputs,
        weight.group,
        x.data_ptr(),
        weight.words.data_ptr(),
        weight.scales.data_ptr(),
        pointer(weight.mins),
        pointer(weight.bias),
        out.data_ptr(),
        out.stride(0),
    )
    launch(gpu.main, call, x, weight.words, weight.scales, weight.mins, weight.bias, out)


def _multiply_unpacked(gpu: Device, x: Tensor, weight: Quantized, out: Tensor) -> None:
    plain, bias = unpacked(gpu, weight, x.dtype), weight.bias
    if bias is None:
        gpu.main.run(lambda: torch.mm(x, plain.t(), out=out))
        return
    rounded = gpu.empty((weight.outputs,), x.dtype)
    gpu.main.run(lambda: rounded.copy_(bias))
    gpu.main.run(lambda: torch.addmm(rounded, x, plain.t(), out=out))


def unpacked(gpu: Device, weight: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the weights, [outputs, inputs], each rounded once to the type."""
    out = gpu.empty((weight.outputs, weight.inputs), dtype)
    call = calls.unpack(
        weight.packing,
        dtype_name(dtype),
        weight.inputs,
        weight.outputs,
        weight.group,
        weight.words.data_ptr(),
        weight.scales.data_ptr(),
        pointer(weight.mins),
        out.data_ptr(),
    )
    launch(gpu.main, call, weight.words, weight.scales, weight.mins, out)
    return out


def _compute(gpu: Device, shape: tuple[int, ...], dtype: torch.dtype, work: Callable[[], Tensor]) -> Tensor:
    """Return a tensor with what `work` gives; complete when this returns."""
    made = gpu.empty(shape, dtype)
    gpu.main.run(lambda: made.copy_(work()))
    gpu.main.record().wait()
    return made


def _fill(gpu: Device, shape: tuple[int, ...], dtype: torch.dtype, value: int) -> Tensor:
    made = gpu.empty(shape, dtype)
    gpu.main.run(lambda: made.fill_(value))
    return made


def _put_rows(gpu: Device, values: Tensor, target: Tensor, first: int) -> None:
    put(gpu, values, target[first : first + values.shape[0], : values.shape[1]])


def _words(numbers: Tensor) -> Tensor:
    """Return [tiles, units, 2, 32, 4] int32 of numbers [tiles * TILE, units * UNIT] uint8, below 16."""
    rows, width = numbers.shape
    words = torch.zeros((rows, width // 8), dtype=torch.int32, device=numbers.device)
    for i, place in enumerate(_PLACES):
        words |= numbers[:, i::8].int() << place
    # [tile, half (output g or g + 8), g, unit, v, chunk of v, t] -> [tile, unit, v, g, t, chunk of v, half]
    cut = words.view(rows // TILE, 2, 8, width // UNIT, 2, 2, 4)
    return cut.permute(0, 3, 4, 2, 6, 5, 1).reshape(rows // TILE, width // UNIT, 2, 32, 4)


def _words_of_codes(codes: Tensor) -> Tensor:
    """Return [tiles, units, 4, 32, 4] int32 of codes [tiles * TILE, units * UNIT] uint8."""
    rows, width = codes.shape
    # [tile, half (output g or g + 8), g, unit, chunk, t, word, byte] -> [tile, unit, chunk, g, t, half, word, byte]
    cut = codes.view(rows // TILE, 2, 8, width // UNIT, 4, 4, 2, 4)[..., _BYTES]
    ordered = cut.permute(0, 3, 4, 2, 5, 1, 6, 7).contiguous()
    return ordered.view(torch.int32).view(rows // TILE, width // UNIT, 4, 32, 4)


def _by_unit(values: Tensor, units: int) -> Tensor:
    """Return [tiles, units, groups of a unit, TILE] of values [tiles * TILE, groups]."""
    return values.view(-1, TILE, units, values.shape[1] // units).permute(0, 2, 3, 1)
