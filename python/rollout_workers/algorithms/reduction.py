"""Reduces per-token losses to one number over the global batch, however it is split."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_workers.algorithms.types import TokenBatch

REDUCTIONS = ("token", "sequence", "constant")


def reduce_tokens(per_token: Tensor, tokens: TokenBatch, *, how: str = "token", length: int = 0) -> Tensor:
    """A micro-batch's part of the loss. float32 [N] -> float32 scalar. Mask: the tokens are those
    that carry loss.

    ``token``: the mean over all tokens of the batch, ``sum / normalizer`` (DAPO, arXiv 2503.14476,
    equation 8), where longer samples count more. ``sequence``: the mean over samples of the mean
    over each one's tokens (GRPO, arXiv 2402.03300, equation 3); a sample without tokens counts as
    0. ``constant``: the sum over ``samples * length`` (Dr. GRPO, arXiv 2503.20783, listing 1), with
    ``length`` the longest completion that may be sampled.

    Raises ``ValueError`` if the batch lacks ``sample`` or ``samples`` and the reduction needs them.
    """
    if how == "token":
        return per_token.sum() / tokens.normalizer
    if how not in REDUCTIONS:
        raise ValueError(f"reduction {how!r} is unknown; take one of {', '.join(REDUCTIONS)}")
    if tokens.samples <= 0:
        raise ValueError(f"reduction {how!r} needs the number of samples in the batch")
    if how == "constant":
        if length < 1:
            raise ValueError("reduction 'constant' needs the longest completion, at least 1 token")
        return per_token.sum() / (tokens.samples * length)
    return (per_token / lengths_of(samples_of(tokens)).to(per_token.dtype)).sum() / tokens.samples


def samples_of(tokens: TokenBatch) -> Tensor:
    """The sample of each token. Mask: the tokens are those that carry loss. Returns int64 [N].
    Raises ``ValueError`` if the batch has no sample index."""
    if tokens.sample is None:
        raise ValueError("these settings are computed per sample, but the batch has no sample index for its tokens")
    return tokens.sample


def lengths_of(sample: Tensor) -> Tensor:
    """Tokens of each token's sample. int64 [N] -> int64 [N]."""
    return torch.bincount(sample)[sample]


def sum_over_sample(per_token: Tensor, sample: Tensor) -> Tensor:
    """The sum over each token's sample, at every token. float [N], int64 [N] -> float [N], with
    gradient."""
    if not per_token.numel():
        return per_token
    return per_token.new_zeros(int(sample.max()) + 1).index_add(0, sample, per_token)[sample]


def mean_over_sample(per_token: Tensor, sample: Tensor) -> Tensor:
    """The mean over each token's sample, at every token. float [N], int64 [N] -> float [N], with
    gradient."""
    return sum_over_sample(per_token, sample) / lengths_of(sample).to(per_token.dtype)
