"""Checks which kinds of attention and which sequence lengths the engine can decode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollout_workers.engines.errors import ModelUnsupported
from rollout_workers.engines.registry import ENGINES

FULL, SLIDING, CHUNKED = ENGINES["transformers"].capabilities.attention
Masks = Tensor | dict[str, Tensor]


def check_attention(config: Any, max_len: int) -> None:
    """Raise ``ModelUnsupported`` if sequences of ``max_len`` tokens can't be decoded like in the
    model's plain forward.

    A probe of a few tokens does not reveal that. The config of the text model says which layers
    behave differently for long sequences.
    """
    strange = sorted(kinds(config) - {FULL, SLIDING, CHUNKED})
    if strange:
        raise ModelUnsupported(f"{config.model_type} has layers of {', '.join(strange)}, which this engine can't decode")
    limit, why = longest(config)
    if limit and limit < max_len:
        raise ModelUnsupported(f"`engine.max_model_len` is {max_len}, but {config.model_type} {why}; set it to {limit} or less")


def longest(config: Any) -> tuple[int, str]:
    """The maximum number of tokens that can be decoded, and the reason for the limit; 0: the config
    has no limit."""
    found: list[tuple[int, str]] = []
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        positions = getattr(config, "max_position_embeddings", 0)
        if part.get("rope_type") == "longrope":
            positions = part.get("original_max_position_embeddings") or positions
        if part.get("rope_type") in ("longrope", "dynamic"):
            found.append((positions, f"computes other position embeddings for sequences longer than {positions} tokens"))
    if CHUNKED in kinds(config):
        found.append((config.attention_chunk_size, f"attends within chunks of {config.attention_chunk_size} tokens"))
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        found.append(
            (config.window_size, f"has layers with an unsupported kind of attention to the last {config.window_size} tokens")
        )
    return min(found, default=(0, ""))


def kinds(config: Any) -> set[str]:
    """The kinds of attention in the layers of a text model."""
    return set(getattr(config, "layer_types", None) or [SLIDING if getattr(config, "sliding_window", None) else FULL])


class Windows:
    """Builds masks for layers that attend to the last few tokens only, if ``max_len`` exceeds their
    window."""

    def __init__(self, config: Any, max_len: int) -> None:
        size = getattr(config, "sliding_window", None) if SLIDING in kinds(config) else None
        self._size: int | None = size if size and size < max_len else None
        self._mixed = len(kinds(config)) > 1

    def masks(self, mask: Tensor, positions: Tensor) -> Masks:
        """The attention mask for a module: one for all layers, or one for each kind.

        mask: additive [B, 1, Q, K], for layers with full attention. positions: int64 [B, Q] of the
        queries; key k is at position k.
        """
        if self._size is None:
            return mask
        gone = torch.arange(mask.shape[-1], device=mask.device) <= positions[:, None, :, None] - self._size
        windowed = mask.masked_fill(gone, torch.finfo(mask.dtype).min)
        return {FULL: mask, SLIDING: windowed} if self._mixed else windowed
