"""What the layers of a model see of the tokens before one, and how long a sequence may be so that
engines decode it right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollout_workers.engines.errors import ModelUnsupported
from rollout_workers.engines.registry import ENGINES

FULL, SLIDING, CHUNKED = ENGINES["transformers"].capabilities.attention
Masks = Tensor | dict[str, Tensor]


def check_attention(config: Any, max_len: int) -> None:
    """Raises ``ModelUnsupported`` where a sequence of ``max_len`` tokens can't be decoded as the
    model's plain forward would.

    A probe of a few tokens does not show it: what changes with length is read from the config of
    the text model.
    """
    strange = sorted(kinds(config) - {FULL, SLIDING, CHUNKED})
    if strange:
        raise ModelUnsupported(f"{config.model_type} has layers of {', '.join(strange)}, which this engine can't decode")
    limit, why = longest(config)
    if limit and limit < max_len:
        raise ModelUnsupported(f"{config.model_type} {why}; set `engine.max_model_len` to {limit} or less, it is {max_len}")


def longest(config: Any) -> tuple[int, str]:
    """The most tokens that can be decoded, and why no more; 0: nothing in the config limits
    them."""
    found: list[tuple[int, str]] = []
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        positions = getattr(config, "max_position_embeddings", 0)
        if part.get("rope_type") == "longrope":
            positions = part.get("original_max_position_embeddings") or positions
        if part.get("rope_type") in ("longrope", "dynamic"):
            found.append((positions, f"turns the positions of sequences beyond {positions} tokens by their length"))
    if CHUNKED in kinds(config):
        found.append((config.attention_chunk_size, f"attends within chunks of {config.attention_chunk_size} tokens"))
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        found.append(
            (config.window_size, f"has layers that look back {config.window_size} tokens, by a method that is not supported")
        )
    return min(found, default=(0, ""))


def kinds(config: Any) -> set[str]:
    """The kinds of attention that a text model's layers have."""
    return set(getattr(config, "layer_types", None) or [SLIDING if getattr(config, "sliding_window", None) else FULL])


class Windows:
    """Masks for layers that see the last few tokens only, where ``max_len`` is more than these."""

    def __init__(self, config: Any, max_len: int) -> None:
        size = getattr(config, "sliding_window", None) if SLIDING in kinds(config) else None
        self._size: int | None = size if size and size < max_len else None
        self._mixed = len(kinds(config)) > 1

    def masks(self, mask: Tensor, positions: Tensor) -> Masks:
        """What a module takes as its attention mask: one for all layers, or one for each kind.

        mask: additive [B, 1, Q, K], of layers that see all. positions: int64 [B, Q] of the queries;
        key k is at position k.
        """
        if self._size is None:
            return mask
        gone = torch.arange(mask.shape[-1], device=mask.device) <= positions[:, None, :, None] - self._size
        windowed = mask.masked_fill(gone, torch.finfo(mask.dtype).min)
        return {FULL: mask, SLIDING: windowed} if self._mixed else windowed
