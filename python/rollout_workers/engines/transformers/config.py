"""The configuration of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and modes, which are fixed for the lifetime of the engine.

    slots: number of samples that are decoded concurrently. max_len: tokens of prompt and completion
    together; KV memory is slots * max_len * layers * 2 * kv_heads * head_dim elements.
    deterministic: the same request and seed give the same bits, independent of other requests (see
    the package's documentation). A step then computes whole blocks of ``block_rows`` slots.
    threads: torch threads of the decoding thread; None: torch's default. In deterministic mode the
    result depends on it. device: where weights and KV are stored; None: the module's device.
    kv_on_swap: what samples in progress do with KV of older weights: "keep" or "recompute" it.
    prefill_tokens: about how many tokens of prompts one prefill pass computes, padding included
    (not in deterministic mode). chunk_tokens: a longer prompt is computed in parts of so many
    tokens, between decoding steps. prefix_bytes: memory for KV of earlier prompts and samples,
    which later prompts that begin with the same tokens reuse; 0 is off, None: as much as the KV
    cache, at most 1 GB. Deterministic mode reuses only whole prompts. block_rows: rows of a
    deterministic step's forward pass, on which the result depends; limited to ``slots``.

    Raises ``ValueError`` for a value outside its range.
    """

    slots: int = 64
    max_len: int = 1024
    deterministic: bool = False
    threads: int | None = None
    device: str | None = None
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    prefill_tokens: int = 4096
    chunk_tokens: int = 256
    prefix_bytes: int | None = None
    block_rows: int = 128

    def __post_init__(self) -> None:
        for name, least in (
            ("slots", 1),
            ("max_len", 2),
            ("prefill_tokens", 1),
            ("chunk_tokens", 1),
            ("prefix_bytes", 0),
            ("block_rows", 1),
            ("threads", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if self.kv_on_swap not in ("keep", "recompute"):
            raise ValueError(f"kv_on_swap is {self.kv_on_swap!r}; it must be 'keep' or 'recompute'")

    @property
    def rows(self) -> int:
        """Rows of the KV cache: the slots, rounded up to whole blocks in deterministic mode."""
        block = self.block
        return -(-self.slots // block) * block if self.deterministic else self.slots

    @property
    def block(self) -> int:
        """Rows of a deterministic step's forward pass."""
        return min(self.block_rows, self.slots)
