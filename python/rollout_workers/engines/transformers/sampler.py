"""Vectorized sampling: draws tokens from logits, with both kinds of logprobs.

Every kernel here works row by row along the vocabulary, and a row alone determines which kernels
process it. So the bits of a row do not depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_workers.engines.transformers.edits import Edited, Edits


class Picked(NamedTuple):
    """tokens int64[B], logprobs f32[B] of the sampling distribution, raw_logprobs f32[B] of the
    logits' softmax. top: for each of ``Controls.top`` the logprobs f32[N, K] of that softmax and
    the tokens int64[N, K]."""

    tokens: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor
    top: tuple[tuple[Tensor, Tensor], ...] = ()


class Filters(NamedTuple):
    """Filters of F rows. rows int64[F], top_k int64[F, 1] (>= 1), top_p f32[F, 1], log_min_p f32[F,
    1] (-inf is off)."""

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor


@dataclass(frozen=True, slots=True)
class Controls:
    """The sampling parameters of B rows. None disables a parameter for all of them.

    temperature f32[B, 1]: above 0 (1 in greedy rows). greedy bool[B]. shaped bool[B]: the rows that
    a temperature or a filter changes, if there are any; the logprobs of other rows equal their raw
    logprobs bit for bit. filters: of the rows that have one. edits: of the rows that have one. top:
    rows int64[N] whose K most likely tokens are reported, and K.
    """

    temperature: Tensor | None = None
    greedy: Tensor | None = None
    shaped: Tensor | None = None
    filters: Filters | None = None
    edits: Edits | None = None
    top: tuple[tuple[Tensor, int], ...] = ()


def sample(logits: Tensor, uniform: Tensor, controls: Controls, edited: Edited | None = None) -> Picked:
    """Draw one token per row by inverting the distribution function. logits [B, V] float, uniform
    f64[B] in [0, 1), edited: the logits of rows that ``controls.edits`` changes."""
    raw = torch.log_softmax(logits.float(), dim=-1)
    base = raw
    if edited is not None:
        base = raw.index_copy(0, edited.rows, torch.log_softmax(edited.logits, dim=-1))
    scores = base if controls.temperature is None else base / controls.temperature
    if controls.filters is not None:
        scores = _filter(scores, controls.filters)
    tokens = _invert(torch.softmax(scores, dim=-1), uniform)
    if controls.greedy is not None:
        tokens = torch.where(controls.greedy, base.argmax(dim=-1), tokens)
    index = tokens.unsqueeze(-1)
    picked = raw_picked = raw.gather(-1, index).squeeze(-1)
    if edited is not None:
        picked = base.gather(-1, index).squeeze(-1)
    if controls.shaped is not None:
        shaped = torch.log_softmax(scores, dim=-1).gather(-1, index).squeeze(-1)
        picked = torch.where(controls.shaped, shaped, picked)
    if controls.greedy is not None:
        picked = picked.masked_fill(controls.greedy & picked.isfinite(), 0.0)
    top = tuple((best.values, best.indices) for rows, count in controls.top for best in (raw[rows].topk(count, dim=-1),))
    return Picked(tokens, picked, raw_picked, top)


_BLOCK = 64
"""Tokens per block of the two-level search."""
_LARGE = 4096
"""Vocabularies from this size on are searched in blocks, because a float64 sum for each token uses
more memory than it saves time."""


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds uniform * total; never a token with
    probability 0.

    probabilities f32[B, V], uniform f64[B]; returns int64[B]. Sums are in float64. A large
    vocabulary is searched in two levels, first the block and then the token in it, which reads each
    probability once.
    """
    vocabulary = probabilities.shape[-1]
    if vocabulary < _LARGE:
        return _search(probabilities, uniform.unsqueeze(-1)).clamp_(max=vocabulary - 1)
    if missing := -vocabulary % _BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, missing))
    blocks = probabilities.view(len(probabilities), -1, _BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    block = _search(sums, uniform.unsqueeze(-1))
    before = sums.cumsum(dim=-1).sub_(sums)
    inside = sums.gather(-1, block.unsqueeze(-1))
    wanted = uniform.unsqueeze(-1) * sums.sum(dim=-1, keepdim=True) - before.gather(-1, block.unsqueeze(-1))
    chosen = blocks.gather(1, block.view(-1, 1, 1).expand(-1, -1, _BLOCK)).squeeze(1)
    return block * _BLOCK + _search(chosen, (wanted / inside).clamp_(min=0.0))


def _search(weights: Tensor, fraction: Tensor) -> Tensor:
    """The first index of each row whose cumulative weight exceeds fraction * total. weights [B, N],
    fraction f64[B, 1]."""
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    below = torch.minimum(fraction * total, total * (1 - 2.0**-50))
    return torch.searchsorted(cumulated, below, right=True).squeeze(-1)


def _filter(scores: Tensor, filters: Filters) -> Tensor:
    """Scores [B, V] with -inf for tokens that a row's top_k, top_p, or min_p drops. Tokens that tie
    with the last kept token stay."""
    every = len(filters.rows) == len(scores)
    rows = scores if every else scores[filters.rows]
    ordered = rows.sort(dim=-1, descending=True).values
    top = ordered[:, :1]
    kth = ordered.gather(-1, filters.top_k - 1)
    ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1)
    before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
    kept = (before < filters.top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    least = torch.maximum(kth, torch.maximum(ordered.gather(-1, kept - 1), top + filters.log_min_p))
    rows = rows.masked_fill(rows < least, -torch.inf)
    return rows if every else scores.index_copy(0, filters.rows, rows)
