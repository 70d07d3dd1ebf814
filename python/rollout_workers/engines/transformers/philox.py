"""Random numbers that depend only on a seed and a token's index: Philox4x32-10.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The 64-bit seed
is the key, and the number of the pair of tokens is the counter. Each block of 128 bits serves two
consecutive tokens with 53 bits each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10


def philox4x32(key: NDArray[np.uint64], counter: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], ...]:
    """Four words of 32 bits (in uint64 arrays) per element. key: 64 bits. counter: the low 64 of
    128 bits."""
    zero = np.zeros(np.broadcast_shapes(key.shape, counter.shape), np.uint64)
    k0, k1 = key & _LOW, key >> _HALF
    c0, c1, c2, c3 = (counter & _LOW) + zero, (counter >> _HALF) + zero, zero, zero
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> _HALF) ^ c1 ^ k0, right & _LOW, (left >> _HALF) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: NDArray[np.uint64], start: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """The numbers in [0, 1) of tokens start[i] .. start[i] + count of each seed, f64[n, count].
    start, count: even."""
    pairs = (start[:, None] // 2 + np.arange(count // 2)[None, :]).astype(np.uint64)
    words = philox4x32(seeds[:, None], pairs)
    out = np.empty((len(seeds), count))
    out[:, 0::2] = _unit(words[0], words[1])
    out[:, 1::2] = _unit(words[2], words[3])
    return out


def _unit(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.float64]:
    """53 bits as a multiple of 2**-53 below 1."""
    return ((high << np.uint64(21)) ^ (low >> np.uint64(11))).astype(np.float64) * np.float64(2.0**-53)
