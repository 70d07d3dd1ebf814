"""What an algorithm is: a loss, an advantage estimator and a declaration of what they need. All pure functions.

Shapes: S samples of a batch, N tokens that carry loss. The N tokens lie flat, without padding and without a mask: the
learner has gathered the positions whose ``loss_mask`` is 1. A batch is cut into micro-batches of any size; a loss sees the
tokens of one and the normaliser of all, and the sum of the parts is the loss of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Needs:
    """What the learner must have at hand before it calls the loss."""

    sampled: bool = False
    """Samples come from the policy: the divergence between engine and learner means something and is measured."""
    group_rewards: bool = False
    """Rewards of complete groups: the estimator compares the samples of a group."""
    reference: bool = False
    """Logprobs of the initial model: a second forward, without gradient."""
    engine_logprobs: bool = False
    """Logprobs that the engine sampled with: the loss corrects for the weights being older."""
    every_token: bool = True
    """Whether samples whose advantage is 0 have a gradient still. Where not, their forward is skipped."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of a micro-batch that carry loss, flat.

    Example: two samples with completions of 2 and 3 tokens, advantages 0.7 and -0.7, in a batch of 64 tokens:
    ``logprobs`` [5], ``advantages`` [0.7, 0.7, -0.7, -0.7, -0.7], ``normalizer`` 64.0.
    """

    logprobs: Tensor
    """float32 [N], with gradient: log-probability of each token under the policy that is trained."""
    normalizer: float
    """Tokens that carry loss in the whole global batch, skipped samples included."""
    advantages: Tensor | None = None
    """float32 [N]: the advantage of the token's sample."""
    old_logprobs: Tensor | None = None
    """float32 [N]: logprobs of the proximal policy. Absent with one update a batch: the detached ``logprobs`` are they."""
    engine_logprobs: Tensor | None = None
    """float32 [N]: logprobs of the behaviour policy, as the engine reported them."""
    reference_logprobs: Tensor | None = None
    """float32 [N]: logprobs of the initial model."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A micro-batch's part of the loss."""

    loss: Tensor
    """float32 scalar: sum over these tokens / normaliser of all."""
    sums: Mapping[str, Tensor]
    """Metric -> float32 scalar, detached: sum over these tokens; the learner divides by the tokens it has seen."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A training algorithm, with its settings bound."""

    name: str
    needs: Needs
    loss: Callable[[TokenBatch], LossTerms]
    advantages: Callable[[Tensor, Tensor], Tensor] | None = None
    """(rewards float64 [S], group of each sample int64 [S]) -> advantages float64 [S]. Absent where rewards don't count."""
