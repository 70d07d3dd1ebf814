"""Correction for tokens that were sampled by other weights than those that are trained."""

from __future__ import annotations

from torch import Tensor


def truncated_weight(logprobs: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """``min(p / p_behaviour, cap)`` of each token, a constant for the gradient.

    Truncated importance sampling (Ionides 2008; per token as in IMPALA's rho, arXiv 1802.01561). ``behaviour`` are the
    logprobs that the engine sampled with, so the weight covers both older weights and the engine's other arithmetic.
    The cap bounds the variance and biases towards the behaviour policy. float [N], [N] -> float [N].
    """
    return (logprobs.detach() - behaviour).exp().clamp(max=cap)
