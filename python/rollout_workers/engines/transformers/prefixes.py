"""The prefix cache: KV of earlier prompts and samples, by their tokens. All of it belongs to the
current weights, because the decoder drops it when they change."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 16
"""Tokens of one step of the search. Shorter sequences are not kept."""
_TRIED = 8

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Computed tokens int64[T]: KV [layers, T, 2, heads, dim], and the logits [V] after the last
    one if they are known."""

    tokens: Ints
    kv: Tensor
    logits: Tensor | None
    blocks: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Its memory in bytes."""
        return self.kv.nbytes + (0 if self.logits is None else self.logits.nbytes)

    def common(self, tokens: Ints) -> int:
        """The number of first tokens that it shares with ``tokens``."""
        most = min(len(tokens), len(self.tokens))
        differs = self.tokens[:most] != tokens[:most]
        return int(differs.argmax()) if differs.any() else most


class Prefixes:
    """The prefixes that were used last, up to ``capacity`` bytes. Each is found by the hash of its
    first tokens, at every multiple of ``BLOCK``."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._size = capacity, 0
        self._used: OrderedDict[int, Prefix] = OrderedDict()  # by id, the one used last at the end
        self._by_block: defaultdict[int, dict[int, Prefix]] = defaultdict(dict)

    def find(self, tokens: Ints) -> tuple[Prefix, int] | None:
        """The prefix that shares the most first tokens with ``tokens``, and their number; None if
        it is less than a block."""
        deepest: dict[int, Prefix] = {}
        for block in _blocks(tokens):
            if not (found := self._by_block.get(block)):
                break
            deepest = found
        best, most = None, BLOCK - 1
        for prefix in islice(reversed(deepest.values()), _TRIED):
            if (count := prefix.common(tokens)) > most:
                best, most = prefix, count
        if best is None:
            return None
        self._used.move_to_end(id(best))
        return best, most

    def whole(self, tokens: Ints) -> Prefix | None:
        """The prefix with exactly these tokens and the logits after them."""
        for prefix in self._by_block.get((_blocks(tokens) or (0,))[-1], {}).values():
            if prefix.logits is not None and len(prefix.tokens) == len(tokens) == prefix.common(tokens):
                self._used.move_to_end(id(prefix))
                return prefix
        return None

    def keep(self, tokens: Ints, kv: Tensor, logits: Tensor | None = None) -> None:
        """Keep a copy of a computed sequence. A shorter one without logits that it begins with is
        dropped."""
        blocks = _blocks(tokens)
        if not blocks or not self._capacity:
            return
        if (found := self.find(tokens)) is not None:
            known, count = found
            if count == len(tokens) and logits is None:
                return
            if count == len(known.tokens) and (known.logits is None or count == len(tokens)):
                self._drop(known)
        prefix = Prefix(tokens.copy(), kv.clone(), None if logits is None else logits.clone(), blocks)
        self._used[id(prefix)] = prefix
        self._size += prefix.size
        for block in blocks:
            self._by_block[block][id(prefix)] = prefix
        while self._size > self._capacity:
            self._drop(next(iter(self._used.values())))

    def clear(self) -> None:
        """Drop everything."""
        self._used.clear()
        self._by_block.clear()
        self._size = 0

    def _drop(self, prefix: Prefix) -> None:
        del self._used[id(prefix)]
        self._size -= prefix.size
        for block in prefix.blocks:
            del self._by_block[block][id(prefix)]
            if not self._by_block[block]:
                del self._by_block[block]


def _blocks(tokens: Ints) -> tuple[int, ...]:
    """The hash of the first 16, 32, ... tokens."""
    found, known = [], 0
    for start in range(0, len(tokens) - len(tokens) % BLOCK, BLOCK):
        known = hash((known, tokens[start : start + BLOCK].tobytes()))
        found.append(known)
    return tuple(found)
