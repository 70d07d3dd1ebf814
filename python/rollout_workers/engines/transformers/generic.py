"""Decodes with the module's own forward, for every architecture that accepts a 4-D mask and a cache
object."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from rollout_workers.engines.errors import ModelUnsupported
from rollout_workers.engines.transformers.attention import Windows
from rollout_workers.engines.transformers.kv import KvCache, KvShape, Segment, step_index


class GenericForward:
    """Implements ``Forward``. Every step is one segment."""

    splits = False

    def __init__(self, module: PreTrainedModel, max_len: int) -> None:
        self.module = module
        self.windows = Windows(module.config.get_text_config(), max_len)
        self.shape = self._measure()

    def rebuilt(self) -> GenericForward:
        return self

    def prefill(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = ids.shape
        positions = torch.arange(width, device=ids.device)
        seen = positions <= positions.unsqueeze(-1)
        mask = torch.zeros((width, width), dtype=self.shape.dtype, device=ids.device)
        mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
        layers = [_Prompt() for _ in range(self.shape.layers)]
        logits = self._run(ids, positions.expand(rows, width), mask.expand(rows, 1, width, width), layers)
        kept = torch.stack([layer.kept for layer in layers])
        return logits[torch.arange(rows, device=ids.device), lengths - 1], kept.permute(0, 2, 4, 1, 3, 5)

    def decode(self, tokens: Tensor, positions: Tensor, cache: KvCache, segments: Sequence[Segment]) -> Tensor:
        index = step_index(positions, segments, cache)
        ((segment, mask),) = index.reads
        layers = [_Slots(kv, index.flat, segment) for kv in cache.data]
        return self._run(tokens.unsqueeze(-1), positions.unsqueeze(-1), mask, layers)[:, -1]

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor, layers: Sequence[CacheLayerMixin]) -> Tensor:
        return self.module(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self.windows.masks(mask, positions),
            past_key_values=Cache(layers=[*layers]),
            use_cache=True,
        ).logits

    @torch.inference_mode()
    def _measure(self) -> KvShape:
        """The shape of a token's keys and values, found by running one token."""
        device = next(self.module.parameters()).device
        cache = self.module(
            input_ids=torch.zeros((1, 1), dtype=torch.int64, device=device),
            past_key_values=DynamicCache(config=self.module.config),
            use_cache=True,
        ).past_key_values
        states = [(layer.keys, layer.values) for layer in getattr(cache, "layers", ()) if layer.is_initialized]
        shapes = {(t.shape, t.dtype) for pair in states for t in pair}
        if len(shapes) != 1:
            raise ModelUnsupported(
                f"{self.module.config.model_type}: keys and values of all layers must have one shape, found {shapes or 'none'}"
            )
        ((_, heads, _, dim), dtype), *_ = shapes
        return KvShape(len(states), heads, dim, dtype)


class _Prompt(CacheLayerMixin):
    """Stores the KV of a prefill: ``kept`` [2, P, heads, T, dim]."""

    kept: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.kept = torch.stack((key_states, value_states))
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _Slots(CacheLayerMixin):
    """A layer of the engine's cache for one decoding step. Writes one position per row and returns
    the first ``length``."""

    def __init__(self, kv: Tensor, flat: Tensor, segment: Segment) -> None:
        super().__init__()
        self.kv, self.flat, self.segment = kv, flat, segment

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        new = torch.stack((key_states.squeeze(2), value_states.squeeze(2)), dim=1)
        self.kv.view(-1, new[0].numel()).index_copy_(0, self.flat, new.view(new.shape[0], -1))
        read = self.kv[: self.segment.stop, : self.segment.length]
        return read[:, :, 0].transpose(1, 2), read[:, :, 1].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.segment.length, 0

    def get_seq_length(self) -> int:
        return self.segment.length - 1

    def get_max_length(self) -> int:
        return self.kv.shape[1]
