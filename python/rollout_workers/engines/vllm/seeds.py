"""The seed of a token. Imports no vLLM."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def token_seed(seed: int, index: int) -> int:
    """The seed of one token, which depends on the sample's seed and the token's index (splitmix64
    of both)."""
    return _mixed((_mixed(seed & _MASK) + index * _GOLDEN) & _MASK) >> 1


def _mixed(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
