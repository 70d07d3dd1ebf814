"""Estimators of KL(policy || other) from the log-probabilities of tokens that the policy sampled.

Schulman, "Approximating KL divergence" (2020). With ``d = log p_other - log p_policy`` of a sampled token:

    k1 = -d               unbiased, high variance, may be negative; as a loss term its gradient has mean 0: measure only
    k2 = d^2 / 2          biased, low variance; as a loss term its gradient is that of the reverse KL
    k3 = exp(d) - 1 - d   unbiased, never negative; GRPO's choice (arXiv 2402.03300, equation 4)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """float [N], [N] -> float [N]."""
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """float [N], [N] -> float [N]."""
    return (other - logprobs).square() / 2


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """float [N], [N] -> float [N]."""
    difference = other - logprobs
    return difference.expm1() - difference


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
