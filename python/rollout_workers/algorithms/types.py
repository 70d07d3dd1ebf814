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
    """What the learner must have at hand before it calls the loss."""

    sampled: bool = False
    """Samples come from the policy: the divergence between engine and learner means something and
    is measured."""
    group_rewards: bool = False
    """Rewards of complete groups: the estimator compares the samples of a group."""
    reference: bool = False
    """Logprobs of the initial model: a second forward, without gradient, or a cache of it."""
    engine_logprobs: bool = False
    """Logprobs that the engine sampled with: the loss corrects for the weights being older."""
    old_logprobs: bool = False
    """Logprobs of the policy before the batch's first update, of the whole batch: one forward
    without gradient. Where not, ``old_logprobs`` stays absent, and the detached ``logprobs`` are
    they."""
    critic: bool = False
    """A value for every trained token before the estimate, and ``value_loss`` trained with the
    policy."""
    entropy: bool = False
    """``TokenBatch.entropy`` with gradient."""
    teacher: bool = False
    """The teacher's logprobs of the sampled tokens."""
    mismatched: bool = False
    """Sums of logprobs of the batch's prompts with completions of other prompts, under policy and
    reference (KTO)."""
    score_head: bool = False
    """A scalar head on the last token in place of the vocabulary (reward model)."""
    every_token: bool = True
    """Whether samples whose advantage is 0 have a gradient still. Where not, their forward is
    skipped."""


@dataclass(frozen=True, slots=True)
class Updates:
    """Optimizer updates that one batch gives: ``epochs`` passes over it, each cut into
    ``minibatches`` of whole samples.

    1 x 1 is one update on policy. Normalisers are those of the minibatch. More than one needs
    ``Needs.old_logprobs``.
    """

    epochs: int = 1
    minibatches: int = 1

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.minibatches < 1:
            raise ValueError(f"epochs ({self.epochs}) and minibatches ({self.minibatches}) must be at least 1")

    @property
    def count(self) -> int:
        """Updates a batch."""
        return self.epochs * self.minibatches


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of a micro-batch that carry loss, flat.

    Example: two samples with completions of 2 and 3 tokens, advantages 0.7 and -0.7, in a batch of
    64 tokens from 16 samples: ``logprobs`` [5], ``sample`` [0, 0, 1, 1, 1], ``advantages`` [0.7,
    0.7, -0.7, -0.7, -0.7], ``normalizer`` 64.0, ``samples`` 16.0.
    """

    logprobs: Tensor
    """float32 [N], with gradient: log-probability of each token under the policy that is
    trained."""
    normalizer: float
    """Tokens that carry loss in the whole global batch (of one update), skipped samples
    included."""
    samples: float = 0.0
    """Samples in the whole global batch (of one update), skipped and empty ones included. 0: not
    given."""
    sample: Tensor | None = None
    """int64 [N]: a number for the token's sample, 0 .. S-1, equal for its tokens alone; all tokens
    of a sample are here."""
    advantages: Tensor | None = None
    """float32 [N]: the advantage of the token, or of its sample."""
    old_logprobs: Tensor | None = None
    """float32 [N]: logprobs of the proximal policy. Absent with one update a batch: the detached
    ``logprobs`` are they."""
    engine_logprobs: Tensor | None = None
    """float32 [N]: logprobs of the behaviour policy, as the engine reported them."""
    reference_logprobs: Tensor | None = None
    """float32 [N]: logprobs of the initial model."""
    teacher_logprobs: Tensor | None = None
    """float32 [N]: logprobs of the teacher."""
    entropy: Tensor | None = None
    """float32 [N], with gradient: entropy in nats of the distribution that the token was drawn
    from."""
    kl_coefficient: float | None = None
    """What the KL controller stands at; absent: the coefficient of the settings."""


@dataclass(frozen=True, slots=True)
class ValueBatch:
    """The critic's side of a micro-batch: the same N tokens."""

    values: Tensor
    """float32 [N], with gradient: the critic's value of the state before each token."""
    old_values: Tensor
    """float32 [N]: the same before the batch's first update."""
    returns: Tensor
    """float32 [N]: what the values should be, from ``Estimate``."""
    normalizer: float
    """Tokens that carry loss in the whole global batch (of one update)."""


@dataclass(frozen=True, slots=True)
class PairBatch:
    """P preference pairs of a micro-batch: the same prompt, a completion that was preferred, one
    that was not."""

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
    """Pairs in the whole global batch: the normaliser."""


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
    """Samples in the whole global batch: the normaliser."""


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """P preference pairs of a micro-batch, as a reward model scores them."""

    chosen: Tensor
    """float32 [P], with gradient: score of prompt and chosen completion, read at its last token."""
    rejected: Tensor
    """float32 [P], with gradient."""
    pairs: float
    """Pairs in the whole global batch: the normaliser."""
    margins: Tensor | None = None
    """float32 [P]: the margin of the chosen completion, if the data has one."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A micro-batch's part of the loss."""

    loss: Tensor
    """float32 scalar: sum over these tokens (pairs, samples) / normaliser of all."""
    sums: Mapping[str, Tensor]
    """Metric -> float32 scalar, detached: sum over these tokens (pairs, samples); the learner
    divides by as many as it saw."""


@dataclass(frozen=True, slots=True)
class EstimatorBatch:
    """A whole global batch as an estimator sees it: S samples, T tokens that carry loss, all
    float64, nothing with gradient.

    The T tokens lie sample after sample, each sample's in its order. A sample may have none.
    """

    rewards: Tensor
    """float64 [S]: one score a sample; 0 where ``token_rewards`` say it all."""
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
    """What the KL controller stands at; absent: the coefficient of the settings."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages of a whole global batch."""

    advantages: Tensor
    """float64 [T]."""
    returns: Tensor | None = None
    """float64 [T]: targets of the critic, where there is one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By the field's names; ``kl/reference`` where rewards were lowered by it."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A training algorithm, with its settings bound."""

    name: str
    needs: Needs
    loss: Callable[[Any], LossTerms]
    """Takes the record of ``family``."""
    advantages: Callable[[Tensor, Tensor], Tensor] | None = None
    """(rewards float64 [S], group of each sample int64 [S]) -> advantages float64 [S]: the short
    way, where one reward a sample decides. Absent where it doesn't."""
    estimate: Callable[[EstimatorBatch], Estimate] | None = None
    """Advantages from all that a batch can hold: process rewards, values, or logprobs of a forward
    that comes first; ``needs`` names which. To be called where ``advantages`` is absent, and where
    samples carry token rewards. Absent where neither rewards nor a teacher count."""
    value_loss: Callable[[ValueBatch], LossTerms] | None = None
    """Present exactly where ``needs.critic``."""
    family: Family = "tokens"
    updates: Updates = field(default_factory=Updates)
    shape: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """(rewards float64 [S], sampled tokens int64 [S], truncated bool [S]) -> rewards float64 [S],
    before any estimate; absent: as they are. DAPO's overlong penalty."""
    drop_equal_groups: bool = False
    """Whether groups whose rewards are all equal are left out of the loss and of its normalisers
    (DAPO's dynamic sampling)."""
    mask_truncated: bool = False
    """Whether samples that were cut off at the longest completion are left out of the loss, once
    advantages are estimated."""
    initial_kl_coefficient: float = 0.0
    """Weight of the divergence from the initial model in the first step."""
    next_kl_coefficient: Callable[[float, float, int], float] | None = None
    """(coefficient, ``kl/reference`` of the step, samples of the step) -> coefficient of the next
    step: the adaptive KL controller. Its one number is state of the learner. Absent: the
    coefficient stays."""
