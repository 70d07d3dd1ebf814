"""Attention over prefix trees by pieces, without the pairs that a mask over whole rows would
compute and discard.

A row holds a tree in depth-first order (packing.py). It is split into pieces that do not branch. A
piece attends to the path from the root and, causally, to itself. So a group of eight answers of 32
tokens to a prompt of 256 needs 0.14 M pairs of positions instead of the 0.26 M of its row. Pieces
of similar size are computed together. Each piece copies its keys; that costs as much memory as
separate rows, and gradients are added in a fixed order.

transformers calls this through its registry of attention functions. Without a layout it is plain
attention.
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
    """n pieces of similar size, padded to ``queries`` positions that attend to ``keys``."""

    queries: int
    keys: int
    query: Gather
    """n * queries flat positions of the rows."""
    key: Gather
    """n * keys flat positions: the path to each piece, and the piece."""
    visible: Tensor | None
    """bool [n, queries, keys]: which keys a query attends to. None for pieces at a root, which are
    plainly causal."""
    masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float | None) -> Tensor:
        """query: [positions, heads * D]; key, value: [positions, kv_heads * D]. Returns [n *
        queries, heads * D]."""
        size = query.shape[1] // heads
        shared = query.shape[1] // key.shape[1]
        q = self.query(query).view(-1, self.queries, heads, size)
        k, v = (self.key(part).view(-1, self.keys, heads // shared, size).transpose(1, 2) for part in (key, value))
        if self.visible is None:
            found = functional.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=shared > 1
            )
            return found.transpose(1, 2).reshape(-1, heads * size)
        # heads that share keys become additional queries
        q = q.unflatten(2, (-1, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(shared, query.dtype), scale=scale)
        return found.unflatten(2, (shared, -1)).permute(0, 3, 1, 2, 4).reshape(-1, heads * size)

    def _mask(self, shared: int, dtype: torch.dtype) -> Tensor:
        """The additive mask [n, 1, shared * queries, keys], computed once for all layers."""
        assert self.visible is not None
        if (shared, dtype) not in self.masks:
            mask = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            mask.masked_fill_(~self.visible, torch.finfo(dtype).min)
            self.masks[shared, dtype] = mask.repeat(1, shared, 1)[:, None]
        return self.masks[shared, dtype]


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """How the rows of a micro-batch are split."""

    pieces: tuple[Pieces, ...]
    back: Gather
    """The index of each flat position in the concatenated outputs of the pieces; arbitrary for
    padding."""


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
    """An attention function of transformers: query [B, heads, T, D], key and value [B, kv_heads, T,
    D] -> [B, T, heads, D]."""
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    rows, heads, width, size = query.shape
    q, k, v = (part.transpose(1, 2).reshape(rows * width, -1) for part in (query, key, value))
    found = torch.cat([pieces.attend(q, k, v, heads, scaling) for pieces in tree.pieces])
    return tree.back(found).view(rows, width, heads, size), None


def install(model: PreTrainedModel, agrees: Callable[[], bool]) -> bool:
    """Make a model that uses ``scaled_dot_product_attention`` use ``attend``, if it then still
    ``agrees``.

    Returns the last result of ``agrees``.
    """
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
    """Whether a model, or a part of it, accepts the argument ``tree``."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME
