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
from rollout_workers.engines.transformers.kv import KvCache, KvShape, Segment, chunk_index, step_index


class GenericForward:
    """Implements ``Forward``. Every step is one segment."""

    splits = False
    extends = True

    def __init__(self, module: PreTrainedModel, max_len: int) -> None:
        self.module, self.max_len = module, max_len
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

    def extend(self, ids: Tensor, starts: Tensor, lengths: Tensor, kv: Tensor) -> Tensor:
        chunk = chunk_index(ids.shape[1], starts, kv, self.max_len)
        layers = [_Slots(of_layer, chunk.flat, Segment(0, len(ids), kv.shape[2]), ids.shape[1]) for of_layer in kv]
        logits = self._run(ids, chunk.positions, chunk.mask, layers)
        return logits[torch.arange(len(ids), device=ids.device), lengths - 1]

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
    """A layer of KV for one pass. Writes ``new`` positions per row and returns the first
    ``length``."""

    def __init__(self, kv: Tensor, flat: Tensor, segment: Segment, new: int = 1) -> None:
        super().__init__()
        self.kv, self.flat, self.segment, self.new = kv, flat, segment, new

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        new = torch.stack((key_states, value_states), dim=1).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1)
        self.kv.view(-1, new.shape[1]).index_copy_(0, self.flat, new)
        read = self.kv[: self.segment.stop, : self.segment.length]
        return read[:, :, 0].transpose(1, 2), read[:, :, 1].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.segment.length, 0

    def get_seq_length(self) -> int:
        return self.segment.length - self.new

    def get_max_length(self) -> int:
        return self.kv.shape[1]
