"""The check at the start of deterministic mode: whether this machine computes the same bits for a
row in every slot."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollout_workers.engines.errors import ModelUnsupported
from rollout_workers.engines.transformers.config import EngineConfig
from rollout_workers.engines.transformers.forward import Forward
from rollout_workers.engines.transformers.kv import KvCache, Segment
from rollout_workers.engines.transformers.prefill import bucket_shape
from rollout_workers.engines.transformers.row_order import segments


def verify(forward: Forward, cache: KvCache, config: EngineConfig, vocabulary: int) -> None:
    """Run a probe in every row of both passes, next to copies of itself and then next to other
    rows, and compare the bits.

    Raises ``ModelUnsupported`` with the name of the pass in which the bits depend on a row's place
    or neighbors.
    """
    probe = _Probe(forward, cache, config, vocabulary)
    rows_of_prefill, _ = bucket_shape(probe.length, config.max_len)
    for name, rows, run in (("prefill", rows_of_prefill, probe.prefill), ("decode", config.block, probe.decode)):
        place = torch.arange(rows, device=cache.data.device)
        alike = run(place >= 0)
        for chosen in (place % 2 == 0, place % 2 == 1):
            mixed = run(chosen)
            if not all(torch.equal(m[chosen], a[:1].expand_as(a)[chosen]) for m, a in zip(mixed, alike, strict=True)):
                raise ModelUnsupported(
                    f"deterministic mode: in a {name} pass of {rows} rows the bits of a row depend on other rows on this "
                    "machine; try a number of rows that is a multiple of 16, or one thread"
                )


class _Probe:
    """One prompt of half a bucket, and the results of the passes for the rows that contain it."""

    def __init__(self, forward: Forward, cache: KvCache, config: EngineConfig, vocabulary: int) -> None:
        few = min(config.max_len, 32) if forward.splits else config.max_len
        self.forward, self.cache = forward, KvCache(cache.data[:, : config.block, :few].clone())
        self.config, self.vocabulary = config, vocabulary
        self.random = torch.Generator().manual_seed(0)
        self.length = min(9, config.max_len - 1)
        self.ids = self._integers(self.length + 1, below=vocabulary)
        self.kv = torch.randn(cache.data[:, 0, : self.length].shape, generator=self.random).to(cache.data)

    def prefill(self, chosen: Tensor) -> tuple[Tensor, ...]:
        """Last logits [rows, V] and KV [rows, ...]. The ``chosen`` rows contain the probe, the
        others a random prompt."""
        rows, width = bucket_shape(self.length, self.config.max_len)
        ids, lengths = self._integers(rows, width, below=self.vocabulary), 1 + self._integers(rows, below=width)
        ids[chosen, : self.length], lengths[chosen] = self.ids[: self.length], self.length
        logits, kv = self.forward.prefill(ids, lengths)
        return logits, kv[:, :, : self.length].transpose(0, 1)

    def decode(self, chosen: Tensor) -> tuple[Tensor, ...]:
        """Logits [rows, V] and KV [rows, ...] of the probe's positions, with the same rows."""
        rows, data = len(chosen), self.cache.data
        data.copy_(torch.randn(data.shape, generator=self.random))
        data[:, chosen, : self.length] = self.kv.unsqueeze(1)
        tokens, positions = self._integers(rows, below=self.vocabulary), self._integers(rows, below=data.shape[2])
        tokens[chosen], positions[chosen] = self.ids[-1], self.length
        reads = [Segment(0, rows, self.config.max_len)]
        if self.forward.splits:
            reads = segments(positions.cpu().numpy(), np.ones(rows, bool), self.config.max_len)
        logits = self.forward.decode(tokens, positions, self.cache, reads)
        return logits, data[:, :, : self.length + 1].transpose(0, 1).clone()

    def _integers(self, *shape: int, below: int) -> Tensor:
        return torch.randint(below, shape, generator=self.random).to(self.cache.data.device)
