"""What an algorithm is: a loss, an advantage estimator and a declaration of what they need. All
pure functions.

Shapes: S samples of a batch, N tokens that carry loss, P pairs. Tokens lie flat, without padding
and without a mask: the learner has gathered the positions whose ``loss_mask`` is 1. A batch is cut
into micro-batches of whole samples (whole pairs); a loss sees one of them and the normalisers of
all, and the sum of the parts is the loss of the whole.

Which record a loss takes is the algorithm's ``family``:

| family | record | algorithms |
|---|---|---|
| ``tokens`` | ``TokenBatch`` | SFT, PPO, the GRPO family, distillation |
| ``pairs`` | ``PairBatch`` | DPO, IPO |
| ``ranked`` | ``PairBatch``, of the best and the worst of a group's samples | online DPO |
| ``unpaired`` | ``UnpairedBatch`` | KTO |
| ``scores`` | ``ScoreBatch`` | reward model |

An algorithm with a critic has a ``value_loss`` over ``ValueBatch`` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

Family = Literal["tokens", "pairs", "ranked", "unpaired", "scores"]


@dataclass(frozen=True, slots=True)
class Needs:
    """The inputs that the learner must compute before it calls the loss."""

    sampled: bool = False
    """Samples come from the policy, so the divergence between engine and learner is measured."""
    group_rewards: bool = False
    """Rewards of complete groups, because the estimator compares the samples of a group."""
    reference: bool = False
    """Logprobs of the initial model, from a second forward pass without gradient or a cache."""
    engine_logprobs: bool = False
    """Logprobs of the engine, to correct for older weights."""
    old_logprobs: bool = False
    """Logprobs of the policy before the batch's first update for the whole batch, from a forward
    pass without gradient. If they are not needed, ``old_logprobs`` is absent, and the detached
    ``logprobs`` are used."""
    critic: bool = False
    """A value for every trained token before the estimate, and a ``value_loss`` that is trained
    together with the policy."""
    entropy: bool = False
    """``TokenBatch.entropy`` with gradient."""
    teacher: bool = False
    """The teacher's logprobs of the sampled tokens."""
    teacher_top: int = 0
    """``TokenBatch.teacher_top`` and ``top_logprobs`` with this many tokens, in place of the
    teacher's logprobs of the sampled ones."""
    mismatched: bool = False
    """Sums of logprobs of the batch's prompts with completions of other prompts, under the policy
    and the reference (KTO)."""
    score_head: bool = False
    """A scalar head on the last token instead of the vocabulary (reward model)."""
    every_token: bool = True
    """Whether samples with advantage 0 have a gradient. If not, they are not computed."""


@dataclass(frozen=True, slots=True)
class Updates:
    """The optimizer updates for one batch: ``epochs`` passes, each divided into ``minibatches`` of
    whole samples.

    1 x 1 is one update on policy. Normalizers are those of the minibatch. Several updates need
    ``Needs.old_logprobs``.
    """

    epochs: int = 1
    minibatches: int = 1

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.minibatches < 1:
            raise ValueError(f"epochs ({self.epochs}) and minibatches ({self.minibatches}) must be at least 1")

    @property
    def count(self) -> int:
        """Updates per batch."""
        return self.epochs * self.minibatches


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of a micro-batch that carry loss, flat.

    Example: two samples with completions of 2 and 3 tokens, advantages 0.7 and -0.7, in a batch of
    64 tokens from 16 samples: ``logprobs`` [5], ``sample`` [0, 0, 1, 1, 1], ``advantages`` [0.7,
    0.7, -0.7, -0.7, -0.7], ``normalizer`` 64.0, ``samples`` 16.0.
    """

    logprobs: Tensor
    """float32 [N], with gradient: log-probability of each token under the trained policy."""
    normalizer: float
    """Tokens that carry loss in the whole global batch (of one update), skipped samples
    included."""
    samples: float = 0.0
    """Samples in the whole global batch (of one update), skipped and empty ones included. 0:
    unknown."""
    sample: Tensor | None = None
    """int64 [N]: a number for the token's sample, 0 .. S-1, equal for its tokens only; all tokens
    of a sample are in the micro-batch."""
    advantages: Tensor | None = None
    """float32 [N]: the advantage of the token, or of its sample."""
    old_logprobs: Tensor | None = None
    """float32 [N]: logprobs of the proximal policy. Absent with one update per batch, where they
    equal the detached ``logprobs``."""
    engine_logprobs: Tensor | None = None
    """float32 [N]: logprobs of the behavior policy, as the engine reported them."""
    reference_logprobs: Tensor | None = None
    """float32 [N]: logprobs of the initial model."""
    teacher_logprobs: Tensor | None = None
    """float32 [N]: logprobs of the teacher."""
    teacher_top: Tensor | None = None
    """float32 [N, k]: the teacher's logprobs of the k tokens that are most likely under it at the
    position of each token."""
    top_logprobs: Tensor | None = None
    """float32 [N, k], with gradient: the trained policy's logprobs of the same k tokens."""
    entropy: Tensor | None = None
    """float32 [N], with gradient: entropy in nats of the distribution from which the token was
    sampled."""
    kl_coefficient: float | None = None
    """The current coefficient of the KL controller; absent: the coefficient of the settings."""


@dataclass(frozen=True, slots=True)
class ValueBatch:
    """The critic's inputs for a micro-batch: the same N tokens."""

    values: Tensor
    """float32 [N], with gradient: the critic's value of the state before each token."""
    old_values: Tensor
    """float32 [N]: the same before the batch's first update."""
    returns: Tensor
    """float32 [N]: the targets of the values, from ``Estimate``."""
    normalizer: float
    """Tokens that carry loss in the whole global batch (of one update)."""


@dataclass(frozen=True, slots=True)
class PairBatch:
    """P preference pairs of a micro-batch: a prompt, the chosen completion, and the rejected
    completion."""

    chosen: Tensor
    """float32 [P], with gradient: sum of the trained tokens' logprobs under the policy. 0 for an
    empty completion."""
    rejected: Tensor
    """float32 [P], with gradient."""
    reference_chosen: Tensor
    """float32 [P]: the same under the initial model."""
    reference_rejected: Tensor
    """float32 [P]."""
    chosen_lengths: Tensor
    """int64 [P]: trained tokens of each."""
    rejected_lengths: Tensor
    """int64 [P]."""
    pairs: float
    """Pairs in the whole global batch: the normalizer."""


@dataclass(frozen=True, slots=True)
class UnpairedBatch:
    """S completions of a micro-batch, each with a label."""

    logprobs: Tensor
    """float32 [S], with gradient: sum of the trained tokens' logprobs under the policy."""
    reference_logprobs: Tensor
    """float32 [S]."""
    desirable: Tensor
    """bool [S]."""
    reference_point: float
    """KTO's z0: the divergence from the initial model, of the whole global batch; see
    ``kto.reference_point``."""
    samples: float
    """Samples in the whole global batch: the normalizer."""


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """P preference pairs of a micro-batch, as a reward model scores them."""

    chosen: Tensor
    """float32 [P], with gradient: score of prompt and chosen completion, read at its last token."""
    rejected: Tensor
    """float32 [P], with gradient."""
    pairs: float
    """Pairs in the whole global batch: the normalizer."""
    margins: Tensor | None = None
    """float32 [P]: the margin of the chosen completion, if the data has one."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A micro-batch's part of the loss."""

    loss: Tensor
    """float32 scalar: the sum over these tokens (pairs, samples), divided by the normalizer of the
    batch."""
    sums: Mapping[str, Tensor]
    """Metric -> float32 scalar, detached: sum over these tokens (pairs, samples), which the learner
    divides by their number in the batch."""
    shares: Mapping[str, tuple[Tensor, float]] = field(default_factory=dict)
    """Metric -> (float32 scalar, detached, and what it is divided by): both are added up over the
    batch."""


@dataclass(frozen=True, slots=True)
class EstimatorBatch:
    """The input of an estimator: a whole global batch with S samples and T tokens that carry loss,
    all float64, without gradient.

    The T tokens are ordered by sample and position. A sample may have none.
    """

    rewards: Tensor
    """float64 [S]: one score per sample; 0 if ``token_rewards`` contain the whole reward."""
    groups: Tensor
    """int64 [S]: 0 .. G-1."""
    sample: Tensor
    """int64 [T], ascending: the token's sample."""
    token_rewards: Tensor | None = None
    """float64 [T]: process or token rewards, in addition to ``rewards``."""
    logprobs: Tensor | None = None
    """float64 [T]: of the policy before the batch's first update."""
    reference_logprobs: Tensor | None = None
    """float64 [T]."""
    values: Tensor | None = None
    """float64 [T]: the critic's, before the batch's first update."""
    teacher_logprobs: Tensor | None = None
    """float64 [T]."""
    kl_coefficient: float | None = None
    """The current coefficient of the KL controller; absent: the coefficient of the settings."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages of a whole global batch."""

    advantages: Tensor
    """float64 [T]."""
    returns: Tensor | None = None
    """float64 [T]: targets of the critic, if there is one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By name; ``kl/reference`` if the divergence was subtracted from rewards."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A training algorithm, with its settings bound."""

    name: str
    needs: Needs
    loss: Callable[[Any], LossTerms]
    """The loss, a function of the record of ``family``."""
    advantages: Callable[[Tensor, Tensor], Tensor] | None = None
    """(rewards float64 [S], group of each sample int64 [S]) -> advantages float64 [S]: for
    estimates that only need one reward per sample. Absent otherwise."""
    estimate: Callable[[EstimatorBatch], Estimate] | None = None
    """Advantages from the other inputs of a batch: process rewards, values, or logprobs of an
    earlier forward pass; ``needs`` names them. Use it if ``advantages`` is absent or samples have
    token rewards. Absent if neither rewards nor a teacher are used."""
    value_loss: Callable[[ValueBatch], LossTerms] | None = None
    """Present if and only if ``needs.critic``."""
    critic_warmup_steps: int = 0
    """First steps in which the loss is that of the values alone, and the policy does not change."""
    family: Family = "tokens"
    updates: Updates = field(default_factory=Updates)
    shape: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """(rewards float64 [S], sampled tokens int64 [S], truncated bool [S]) -> rewards float64 [S],
    applied before the estimate; absent: rewards stay unchanged. DAPO's overlong penalty."""
    drop_equal_groups: bool = False
    """Whether groups with equal rewards are excluded from the loss and its normalizers (DAPO's
    dynamic sampling)."""
    mask_truncated: bool = False
    """Whether truncated samples are excluded from the loss after advantages are estimated."""
    initial_kl_coefficient: float = 0.0
    """Weight of the divergence from the initial model in the first step."""
    next_kl_coefficient: Callable[[float, float, int], float] | None = None
    """(coefficient, ``kl/reference`` of the step, samples of the step) -> coefficient of the next
    step: the adaptive KL controller, whose coefficient is part of the learner's state. Absent: the
    coefficient is constant."""
