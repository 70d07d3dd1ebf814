"""Estimators of KL(policy || other) from the log-probabilities of tokens that the policy sampled,
and their weight.

Schulman, "Approximating KL divergence" (2020). With ``d = log p_other - log p_policy`` of a sampled
token:

    k1 = -d               unbiased, high variance, may be negative; as a loss term its gradient has mean 0: measure only
    k2 = d^2 / 2          biased, low variance; as a loss term its gradient is that of the reverse KL
    k3 = exp(d) - 1 - d   unbiased, never negative; GRPO's choice (arXiv 2402.03300, equation 4)
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from rollout_workers.algorithms.importance import LOG_RATIO_LIMIT


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """float [N], [N] -> float [N]."""
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """float [N], [N] -> float [N]."""
    return (other - logprobs).square() / 2


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """float [N], [N] -> float [N]. Beyond ``LOG_RATIO_LIMIT`` it is linear in ``d``, so it keeps
    growing for a policy further from the reference, with the gradient that it has at the limit."""
    difference = other - logprobs
    held = difference.clamp(max=LOG_RATIO_LIMIT)
    return held.expm1() - held + math.expm1(LOG_RATIO_LIMIT) * (difference - LOG_RATIO_LIMIT).relu()


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def adapted_coefficient(coefficient: float, divergence: float, samples: int, *, target: float, horizon: float) -> float:
    """The KL coefficient of the next step, moved towards a target divergence.

    Ziegler et al., arXiv 1909.08593, section 2.2:
    ``coefficient * (1 + clip(divergence / target - 1, -0.2, 0.2) * samples / horizon)``.
    ``divergence`` and ``target`` in the same unit, nats a token here; ``samples`` of the step;
    ``horizon`` in samples, and no less than a step has: beyond 5 times that the coefficient would
    fall below 0.
    """
    error = min(max(divergence / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * min(1.0, samples / horizon))
