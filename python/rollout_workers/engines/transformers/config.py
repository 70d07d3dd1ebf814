"""What an engine is built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and modes; nothing here changes while the engine lives.

    slots: samples decoded at once. max_len: tokens of prompt and answer together; KV memory is
    slots * max_len * layers * 2 * kv_heads * head_dim elements.
    deterministic: the same request and seed give the same bits, whatever else runs (see the
    package's doc). A step then runs whole blocks of ``block_rows`` slots.
    threads: of torch in the decoding thread; None leaves torch's own number. In deterministic mode
    it is part of the result.
    device: where weights and KV live, None is where the module is.
    kv_on_swap: what samples in flight do with the KV of older weights: "keep" it, or "recompute" it
    under the new ones.
    prefill_tokens: a prefill pass takes prompts up to about this many tokens, padding included (not
    in deterministic mode).
    block_rows: rows of a deterministic step's forward pass; part of the result. At most ``slots``
    are used. Raises ``ValueError`` for a value outside its range.
    """

    slots: int = 64
    max_len: int = 1024
    deterministic: bool = False
    threads: int | None = None
    device: str | None = None
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    prefill_tokens: int = 4096
    block_rows: int = 128

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("max_len", 2), ("prefill_tokens", 1), ("block_rows", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, it is {value}")
        if self.kv_on_swap not in ("keep", "recompute"):
            raise ValueError(f"kv_on_swap must be 'keep' or 'recompute', it is {self.kv_on_swap!r}")

    @property
    def rows(self) -> int:
        """Rows of the KV cache: the slots, filled up to whole blocks in deterministic mode."""
        block = self.block
        return -(-self.slots // block) * block if self.deterministic else self.slots

    @property
    def block(self) -> int:
        """Rows of a deterministic step's forward pass."""
        return min(self.block_rows, self.slots)
