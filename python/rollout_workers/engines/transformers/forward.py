"""The two passes that decoding needs, and the choice of their implementation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout_workers.engines.errors import ModelUnsupported
from rollout_workers.engines.transformers.attention import check_attention
from rollout_workers.engines.transformers.generic import GenericForward
from rollout_workers.engines.transformers.kv import KvCache, KvShape, Segment
from rollout_workers.engines.transformers.llama import LlamaForward

log = logging.getLogger(__name__)
F = TypeVar("F", bound="Forward")


class Forward(Protocol):
    """The interface between a model and the decoding loop. Both passes run in inference mode, in
    one thread."""

    shape: KvShape
    splits: bool
    extends: bool

    def rebuilt(self) -> Forward:
        """The same implementation, rebuilt after the module moved to another device."""
        ...

    def prefill(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """ids int64[P, T] padded on the right, lengths int64[P] -> last logits [P, V], KV [layers,
        P, T, 2, heads, dim]."""
        ...

    def extend(self, ids: Tensor, starts: Tensor, lengths: Tensor, kv: Tensor) -> Tensor:
        """ids int64[P, T] padded on the right, lengths int64[P] of them, which continue sequences
        of ``starts`` int64[P] tokens -> last logits [P, V].

        kv [layers, P, L, 2, heads, dim], L >= starts + T: has the KV of the tokens before, else
        zeros, and gets that of the new ones. Only if the forward ``extends``.
        """
        ...

    def decode(self, tokens: Tensor, positions: Tensor, cache: KvCache, segments: Sequence[Segment]) -> Tensor:
        """Rows 0..B of the cache get tokens int64[B] at positions int64[B]; segments cover the rows
        in order.

        Returns logits [B, V]. A step has one segment unless the forward ``splits``.
        """
        ...


def choose_forward(module: PreTrainedModel, max_len: int) -> Forward:
    """The Llama forward if it supports the architecture and agrees with the module, else the
    module's own.

    Raises ``ModelUnsupported`` if decoding with the module's own forward differs from its plain
    forward, or would differ at ``max_len``.
    """
    check_attention(module.config.get_text_config(), max_len)
    reason = LlamaForward.refusal(module, max_len)
    if reason is None:
        llama = LlamaForward(module, max_len)
        error = disagreement(llama, module)
        if error is None:
            return _checked(llama, module)
        reason = f"its logits are off by {error:.2e}"
    log.info("decoding %s with its own forward instead of the fast one: %s", type(module).__name__, reason)
    try:
        generic = GenericForward(module, max_len)
        error = disagreement(generic, module)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as cause:
        if isinstance(cause, torch.OutOfMemoryError):
            raise
        raise ModelUnsupported(f"{type(module).__name__} can't be decoded step by step with a cache: {cause}") from cause
    if error is not None:
        raise ModelUnsupported(
            f"{type(module).__name__}: decoding step by step is off by {error:.2e} from its plain forward; "
            "this engine needs a causal decoder with plain (not recurrent) attention"
        )
    return _checked(generic, module)


def _checked(forward: F, module: PreTrainedModel) -> F:
    """The forward, which ``extends`` only if that agrees with the module's plain forward."""
    try:
        error = extension_error(forward, module)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as cause:
        if isinstance(cause, torch.OutOfMemoryError):
            raise
        error = cause
    if error is not None:
        log.info("%s: prompts are computed whole, because parts of them differ: %s", type(module).__name__, error)
        forward.extends = False
    return forward


@torch.inference_mode()
def extension_error(forward: Forward, module: PreTrainedModel) -> float | None:
    """Like ``disagreement``, between a prompt in two parts and the whole prompt."""
    device = next(module.parameters()).device
    vocabulary = module.config.get_text_config().vocab_size
    ids = torch.arange(2 * 8, device=device).mul_(7919).remainder_(vocabulary).view(2, 8)
    expected = module(input_ids=ids, use_cache=False).logits.float()
    starts, lengths, rows = (torch.tensor(numbers, device=device) for numbers in ([5, 3], [3, 2], [0, 1]))
    logits, kv = forward.prefill(ids[:, :5], starts)
    whole = torch.zeros((*kv.shape[:2], 8, *kv.shape[3:]), dtype=kv.dtype, device=device)
    whole[:, 0, :5], whole[:, 1, :3] = kv[:, 0], kv[:, 1, :3]
    new = torch.stack([ids[row, starts[row] : starts[row] + 3] for row in range(2)])
    logits = forward.extend(new, starts, lengths, whole)
    return _relative((logits.float() - expected[rows, starts + lengths - 1]).abs().max(), expected, forward)


def _relative(worst: Tensor, expected: Tensor, forward: Forward) -> float | None:
    relative = (worst / expected.abs().max().clamp(min=1e-6)).item()
    return None if relative <= 64 * torch.finfo(forward.shape.dtype).eps ** 0.75 else relative


@torch.inference_mode()
def disagreement(forward: Forward, module: PreTrainedModel) -> float | None:
    """The difference between decoding (prefill and three steps) and the module's plain forward;
    None if it is within rounding.

    The measure is the largest difference of logits divided by the largest logit.
    """
    device = next(module.parameters()).device
    vocabulary = module.config.get_text_config().vocab_size
    ids = torch.arange(3 * 8, device=device).mul_(7919).remainder_(vocabulary).view(3, 8)
    expected = module(input_ids=ids, use_cache=False).logits.float()
    cache = KvCache.empty(forward.shape, 3, 8, device)
    lengths = torch.tensor([5, 3, 4]).to(device)
    rows = torch.arange(3, device=device)
    logits, prompt = forward.prefill(ids[:, :5], lengths)
    cache.write(rows, prompt)
    worst = (logits.float() - expected[rows, lengths - 1]).abs().max()
    for step in range(3):
        at = lengths + step
        logits = forward.decode(ids[rows, at], at, cache, [Segment(0, 3, 8)])
        worst = torch.maximum(worst, (logits.float() - expected[rows, at]).abs().max())
    return _relative(worst, expected, forward)
