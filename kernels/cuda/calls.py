"""How each kernel is launched: its Params as numpy packs them, grid, block, shared memory. Pure arithmetic.

A Call goes to `Program.launch(*call, stream)` of the loader or of the emulator. Addresses are integers
(`tensor.data_ptr()`), 0 where there is none; all begin at a multiple of 16 bytes; `dtype` is BF16 or F16. The meaning
of each operation is in kernels/ops.py, the layout of its Params in src/, in the order of the fields here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

BF16, F16 = "bf16", "f16"
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}

VECTOR = 8  # numbers in 16 bytes
WARP = 32
ROW_THREADS, ROW_VECTORS = 1024, 4  # norms.cu: THREADS, HELD
PIECE_THREADS = 256  # activations.cu, gather.cu, rope.cu: THREADS
COPIED = 4  # gather.cu
PADDING = -(2**31)
"""A token of a row that is not there."""
MAX_NORM_HIDDEN = ROW_THREADS * ROW_VECTORS * VECTOR

Params = npt.NDArray[np.void]
Sizes = tuple[int, int, int]


class Call(NamedTuple):
    """One launch, but for the stream. `params` may be changed and launched again."""

    name: str
    grid: Sizes
    block: Sizes
    shared: int  # bytes of dynamic shared memory
    params: Params


def _struct(pointers: str, *others: tuple[str, str]) -> np.dtype[np.void]:
    """A C struct: 64-bit addresses first, then the rest, padded as a compiler pads."""
    return np.dtype([*((name, "u8") for name in pointers.split()), *others], align=True)


NORM = _struct("x residual out weight bias", ("hidden", "i4"), ("eps", "f4"))
ACTIVATION = _struct("x out", ("width", "i4"), ("activation", "i4"))
ADD = _struct("x residual", ("width", "i4"))
EMBED = _struct("table places out tokens positions last_tokens", ("hidden", "i4"), ("scale", "f4"))
SELECT = _struct("x out rows", ("width", "i4"))
COPY = _struct(
    "source target from_ to",
    ("source_stride", "i8"),
    ("target_stride", "i8"),
    ("source_part_stride", "i8"),
    ("target_part_stride", "i8"),
    ("part_bytes", "i8"),
)
ROPE = _struct(
    "qkv q keys values bias angles q_norm k_norm positions slots",
    ("block_stride", "i8"),
    ("rows", "i4"),
    ("heads", "i4"),
    ("kv_heads", "i4"),
    ("head_dim", "i4"),
    ("block_size", "i4"),
    ("rotary", "i4"),
    ("q_eps", "f4"),
    ("k_eps", "f4"),
)


def norm(
    dtype: str,
    rows: int,
    hidden: int,
    x: int,
    out: int,
    weight: int,
    eps: float,
    bias: int = 0,
    residual: int = 0,
    layer_norm: bool = False,
) -> Call:
    """RMSNorm or LayerNorm of x [rows, hidden], of residual + x with a residual, which is then stored."""
    vectors = _vectors(hidden)
    if hidden > MAX_NORM_HIDDEN:
        raise ValueError(f"a row of {hidden} numbers; the norms take {MAX_NORM_HIDDEN} at most")
    name = "layer_norm" if layer_norm else "rms_norm"
    params = _filled(NORM, (x, residual, out, weight, bias, hidden, eps))
    return Call(f"{name}_{dtype}", (_some(rows), 1, 1), (_whole_warps(vectors, ROW_THREADS), 1, 1), 0, params)


def gated(dtype: str, rows: int, width: int, x: int, out: int, activation: str) -> Call:
    """activation(first half) * second half of x [rows, 2 width]."""
    params = _filled(ACTIVATION, (x, out, width, ACTIVATIONS[activation]))
    return _pieces(f"gated_{dtype}", rows, width, params)


def activate(dtype: str, rows: int, width: int, x: int, out: int, activation: str) -> Call:
    """activation(x), x [rows, width]; out may be x."""
    params = _filled(ACTIVATION, (x, out, width, ACTIVATIONS[activation]))
    return _pieces(f"activate_{dtype}", rows, width, params)


def add(dtype: str, rows: int, width: int, x: int, residual: int) -> Call:
    """residual += x in place, both [rows, width]."""
    return _pieces(f"add_{dtype}", rows, width, _filled(ADD, (x, residual, width)))


def embed(
    dtype: str,
    rows: int,
    hidden: int,
    table: int,
    out: int,
    tokens: int,
    scale: float = 1.0,
    places: int = 0,
    positions: int = 0,
    last_tokens: int = 0,
) -> Call:
    """Rows of table times scale, plus rows of places.

    tokens: int32; ~s, below zero, is last_tokens[s] (int32), and PADDING leaves its row of out as it is.
    """
    params = _filled(EMBED, (table, places, out, tokens, positions, last_tokens, hidden, scale))
    return _pieces(f"embed_{dtype}", rows, hidden, params)


def select(rows: int, width: int, x: int, out: int, chosen: int) -> Call:
    """out[r] = x[chosen[r]], of 16-bit numbers; where chosen is below zero out stays as it is."""
    return _pieces("select_rows", rows, width, _filled(SELECT, (x, out, chosen, width)))


def copy_blocks(
    pairs: int,
    source: int,
    target: int,
    strides: tuple[int, int],
    part_bytes: int,
    parts: int = 1,
    part_strides: tuple[int, int] = (0, 0),
    from_: int = 0,
    to: int = 0,
) -> Call:
    """Copies block from_[i] of source to block to[i] of target; without from_ (or to) block i.

    from_ and to are int32; a pair with a number below zero is skipped. Strides, of the source and of the target, are
    bytes from block to block and, where a block lies in several parts, from part to part; all multiples of 16.
    """
    if any(size % 16 for size in (*strides, *part_strides, part_bytes)):
        raise ValueError(
            f"copies go 16 bytes at a time: strides {strides}, {part_strides}, parts of {part_bytes} bytes"
        )
    vectors = part_bytes // 16
    threads = _whole_warps(-(-vectors // COPIED), PIECE_THREADS)
    params = _filled(COPY, (source, target, from_, to, *strides, *part_strides, part_bytes))
    grid = (_some(pairs), -(-vectors // (threads * COPIED)), parts)
    return Call("copy_blocks", grid, (threads, 1, 1), 0, params)


def rope_and_write(
    dtype: str,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    block_stride: int,
    qkv: int,
    q: int,
    keys: int,
    values: int,
    slots: int,
    bias: int = 0,
    angles: int = 0,
    rotary: int = 0,
    positions: int = 0,
    q_norm: int = 0,
    k_norm: int = 0,
    eps: tuple[float, float] = (0.0, 0.0),
) -> Call:
    """Splits qkv, adds the bias, norms and rotates, writes k and v of each row to slots[row] and q to q.

    keys and values: this layer's K and V of block 0, [kv_heads, block_size, head_dim], block_stride numbers from one
    block to the next. slots: int32, block * block_size + place; below zero neither k nor v is written. eps: of q_norm
    and of k_norm.
    """
    _vectors(head_dim)
    if rotary % 2 or rotary > head_dim or bool(angles) != bool(rotary):
        raise ValueError(f"{rotary} rotary numbers in heads of {head_dim}, angles {'given' if angles else 'missing'}")
    warps = PIECE_THREADS // WARP
    pointers = (qkv, q, keys, values, bias, angles, q_norm, k_norm, positions, slots)
    sizes = (rows, heads, kv_heads, head_dim, block_size, rotary)
    params = _filled(ROPE, (*pointers, block_stride, *sizes, *eps))
    grid = (-(-_some(rows) * (heads + 2 * kv_heads) // warps), 1, 1)
    return Call(f"rope_and_write_{dtype}", grid, (PIECE_THREADS, 1, 1), warps * head_dim * 4, params)


def _filled(struct: np.dtype[np.void], values: Sequence[Any]) -> Params:
    params = np.zeros(1, struct)
    params[0] = tuple(values)
    return params


def _pieces(name: str, rows: int, width: int, params: Params) -> Call:
    vectors = _vectors(width)
    threads = _whole_warps(vectors, PIECE_THREADS)
    return Call(name, (_some(rows), -(-vectors // threads), 1), (threads, 1, 1), 0, params)


def _vectors(width: int) -> int:
    if width < VECTOR or width % VECTOR:
        raise ValueError(f"a row of {width} numbers; the CUDA kernels take multiples of {VECTOR}")
    return width // VECTOR


def _some(rows: int) -> int:
    if rows < 1:
        raise ValueError(f"{rows} rows: there is nothing to launch")
    return rows


def _whole_warps(threads: int, most: int) -> int:
    return min(most, -(-threads // WARP) * WARP)
