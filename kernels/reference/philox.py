"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), vectorised in numpy.

Counter-based: the noise of a token is a function of (seed, position, token id) and of nothing else, so a draw does not
depend on the batch, on earlier draws or on the process.
"""

from __future__ import annotations

import numpy as np

from kernels.ops import Float32, Int64, UInt32, UInt64

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_TILE = 1 << 14  # counters at a time: the working set stays in the second-level cache


def philox4x32(counter: UInt32, key: UInt32, rounds: int = 10) -> UInt32:
    """Return counter [4, n], key [2, n or 1] -> [4, n], the words as the paper numbers them."""
    c0, c1, c2, c3 = counter.astype(np.uint32)
    k0, k1 = key.astype(np.uint32)
    w0, w1 = np.uint32(_W0), np.uint32(_W1)
    for _ in range(rounds):
        # A 64-bit product seen as two 32-bit words: low and high without a shift or a mask.
        p0 = np.multiply(c0, _M0, dtype=np.uint64).view(np.uint32)
        p1 = np.multiply(c2, _M1, dtype=np.uint64).view(np.uint32)
        c0, c2 = p1[1::2] ^ c1 ^ k0, p0[1::2] ^ c3 ^ k1
        c1, c3 = p1[0::2], p0[0::2]
        k0, k1 = k0 + w0, k1 + w1
    return np.stack((c0, c1, c2, c3))


def gumbel(seed: UInt64, position: Int64, vocab: int) -> Float32:
    """Return [R, vocab] float32 standard Gumbel noise as kernels.ops.SamplingRows defines it."""
    rows, words = len(seed), -(-vocab // 4)
    noise = np.empty((rows, words * 4), np.float32)
    tile_rows = max(1, _TILE // words)
    for first in range(0, rows, tile_rows):  # tiles, not rows: a tile holds about 16k counters
        part = slice(first, min(first + tile_rows, rows))
        count = part.stop - part.start
        where = position[part].astype(np.uint64)
        counter = np.zeros((4, count, words), np.uint32)
        counter[0] = np.arange(words, dtype=np.uint32)
        counter[1] = (where & _LOW).astype(np.uint32)[:, None]
        counter[2] = (where >> np.uint64(32)).astype(np.uint32)[:, None]
        key = np.empty((2, count, words), np.uint32)
        key[0] = (seed[part] & _LOW).astype(np.uint32)[:, None]
        key[1] = (seed[part] >> np.uint64(32)).astype(np.uint32)[:, None]
        bits = philox4x32(counter.reshape(4, -1), key.reshape(2, -1))
        noise[part] = _gumbel_of(bits.T.reshape(count, words * 4))
    return noise[:, :vocab]


def _gumbel_of(bits: UInt32) -> Float32:
    u = bits.astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2.0**-32)
    np.minimum(u, np.float32(1 - 2.0**-24), out=u)
    np.log1p(np.negative(u, out=u), out=u)
    np.log(np.negative(u, out=u), out=u)
    return np.negative(u, out=u)
