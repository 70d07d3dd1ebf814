"""Attention over prefix trees, piece by piece: what a mask over whole rows would throw away is never computed.

A row holds a tree in depth-first order (packing.py). It is cut into pieces, stretches that don't branch; a piece sees what leads
to it from the root, and of itself what comes before. So a group of eight answers of 32 tokens to a prompt of 256 needs 0.14 M
pairs of positions instead of the 0.26 M of its row. Pieces of about one size are gathered side by side and computed at once. A
piece's keys come to it as copies, which costs what not sharing them would, and adds up their gradients in a fixed order.

Models call this through the library's registry of attention functions; without a layout it is plain attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rollout_workers.trainer.model.gather import Gather

NAME = "rollout_tree"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of about one size, n of them, padded to ``queries`` positions that see ``keys``."""

    queries: int
    keys: int
    query: Gather
    """n * queries flat positions of the rows."""
    key: Gather
    """n * keys flat positions: what leads to a piece, and itself."""
    seen: Tensor | None
    """bool [n, queries, keys]: what a query sees. None where nothing leads to the pieces: what comes before it."""
    masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float | None) -> Tensor:
        """query: [positions, heads * D]; key, value: [positions, kv_heads * D]. Returns [n * queries, heads * D]."""
        size = query.shape[1] // heads
        shared = query.shape[1] // key.shape[1]
        q = self.query(query).view(-1, self.queries, heads, size)
        k, v = (self.key(part).view(-1, self.keys, heads // shared, size).transpose(1, 2) for part in (key, value))
        if self.seen is None:
            found = functional.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=shared > 1
            )
            return found.transpose(1, 2).reshape(-1, heads * size)
        # heads that share their keys are more queries of these
        q = q.unflatten(2, (-1, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(shared, query.dtype), scale=scale)
        return found.unflatten(2, (shared, -1)).permute(0, 3, 1, 2, 4).reshape(-1, heads * size)

    def _mask(self, shared: int, dtype: torch.dtype) -> Tensor:
        """Additive, [n, 1, shared * queries, keys]; made once for all layers."""
        assert self.seen is not None
        if (shared, dtype) not in self.masks:
            mask = torch.zeros(self.seen.shape, dtype=dtype, device=self.seen.device)
            mask.masked_fill_(~self.seen, torch.finfo(dtype).min)
            self.masks[shared, dtype] = mask.repeat(1, shared, 1)[:, None]
        return self.masks[shared, dtype]


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """How the rows of a micro-batch are cut."""

    pieces: tuple[Pieces, ...]
    back: Gather
    """For each flat position of the rows its place in the pieces' outputs, one behind the other; any for padding."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: TreeLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of the library: query [B, heads, T, D], key and value [B, kv_heads, T, D] -> [B, T, heads, D]."""
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    rows, heads, width, size = query.shape
    q, k, v = (part.transpose(1, 2).reshape(rows * width, -1) for part in (query, key, value))
    found = torch.cat([pieces.attend(q, k, v, heads, scaling) for pieces in tree.pieces])
    return tree.back(found).view(rows, width, heads, size), None


def install(model: PreTrainedModel, agrees: Callable[[], bool]) -> bool:
    """Have a model that attends by ``scaled_dot_product_attention`` use ``attend``, unless it then no longer ``agrees``. Returns
    whether it agrees as it is left."""
    if model.config._attn_implementation != "sdpa":
        return agrees()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    if agrees():
        return True
    model.set_attn_implementation("sdpa")
    return agrees()


def installed(module: Any) -> bool:
    """Whether ``tree`` may be given to a call of a model, or of a part of it."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME
