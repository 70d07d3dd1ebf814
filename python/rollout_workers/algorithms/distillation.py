"""On-policy distillation: the student samples, and the teacher scores each sampled token.

Agarwal et al., arXiv 2306.13649 (student's own samples); Gu et al., arXiv 2306.08543 (reverse KL by
policy gradient); Lu and Thinking Machines Lab, "On-Policy Distillation" (2025: on the sampled
tokens alone). With ``teacher_top_k`` the divergence is computed over the teacher's most likely
tokens instead of the sampled one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rollout_workers.algorithms.importance import bounded_exp, importance_weights
from rollout_workers.algorithms.reduction import REDUCTIONS, reduce_tokens
from rollout_workers.algorithms.surrogate import one_of, present
from rollout_workers.algorithms.types import Algorithm, LossTerms, Needs, TokenBatch, Updates

REST = 1e-6
"""The smallest probability of the tokens outside of the teacher's most likely ones: float32 cannot
tell a smaller one from 0."""


@dataclass(frozen=True, slots=True)
class DistillationConfig:
    """Settings of on-policy distillation, by the names of the run config."""

    reduction: str = "token"
    """``token``, ``sequence`` or ``constant``; see ``reduction.reduce_tokens``."""
    epochs: int = 1
    minibatches: int = 1
    off_policy: bool = False
    """Whether samples may come from older weights. If false, the loss does not use the engine's
    logprobs."""
    importance_cap: float = 2.0
    """Cap of the importance weight against the engine's logprobs; used with ``off_policy``."""
    max_tokens: int = 0
    """Maximum length of a completion; required by ``constant``."""
    teacher: str = ""
    """Folder of the teacher's model, for the learner. Empty if samples carry the logprobs of a
    remote teacher."""
    teacher_top_k: int = 0
    """The number of the teacher's most likely tokens at each position over which the divergence is
    computed; 0: the sampled token alone."""

    def __post_init__(self) -> None:
        one_of("reduction", self.reduction, REDUCTIONS)
        Updates(self.epochs, self.minibatches)


def distillation(config: DistillationConfig) -> Algorithm:
    """On-policy distillation as an algorithm."""
    updates, top = Updates(config.epochs, config.minibatches), config.teacher_top_k
    return Algorithm(
        name="distillation",
        needs=Needs(
            sampled=True,
            teacher=True,
            teacher_top=top,
            engine_logprobs=config.off_policy and not top,
            old_logprobs=updates.count > 1 and not top,
        ),
        loss=partial(top_reverse_kl if top else reverse_kl, config=config),
        updates=updates,
    )


def reverse_kl(tokens: TokenBatch, *, config: DistillationConfig) -> LossTerms:
    """``-(p / p_old) constant(log p_teacher - log p)`` of each sampled token, reduced over the
    batch.

    The expectation over the student's own samples of its gradient is that of KL(student || teacher)
    at each position; what a token does to later ones is left out (a discount of 0). Off policy a
    truncated importance weight of the learner over the engine is put on each token.

    float32 [N] each. Mask: the tokens are those that carry loss. Reduction: ``config.reduction``,
    over ``normalizer`` tokens or ``samples`` (``reduce_tokens``). Sums: ``kl/teacher`` (k1). Raises
    ``ValueError`` where the batch lacks something.
    """
    teacher = present(tokens.teacher_logprobs, "the teacher's logprobs")
    student = tokens.logprobs.detach()
    old = student if tokens.old_logprobs is None else tokens.old_logprobs
    per_token = -bounded_exp(tokens.logprobs - old) * (teacher - student)
    if config.off_policy:
        behaviour = present(tokens.engine_logprobs, "the engine's logprobs")
        per_token = per_token * importance_weights(
            old, behaviour, tokens.sample, correction="truncate", level="token", cap=config.importance_cap, floor=0.0
        )
    loss = reduce_tokens(per_token, tokens, how=config.reduction, length=config.max_tokens)
    return LossTerms(loss=loss, sums={"kl/teacher": (student - teacher).sum()})


def top_reverse_kl(tokens: TokenBatch, *, config: DistillationConfig) -> LossTerms:
    """The divergence of student p from teacher q at the position of each token, over k + 1
    outcomes: the k tokens that are most likely under the teacher, and all others together::

        sum over the k tokens of p log(p / q) + p_rest log(p_rest / q_rest)

    It is at most KL(student || teacher), and equal to it if k is the whole vocabulary. Nothing is
    sampled at the position, so the gradient is exact, and neither a ratio to the policy before the
    first update nor an importance weight is used; as in ``reverse_kl``, what a token does to later
    ones is left out. Probabilities of the rest are at least ``REST``.

    float32 [N, K] each. Mask: the tokens are those that carry loss. Reduction:
    ``config.reduction``, over ``normalizer`` tokens or ``samples`` (``reduce_tokens``). Sums:
    ``kl/teacher``, of these outcomes, and ``teacher/covered``, the teacher's probability of the k
    tokens. Raises ``ValueError`` where the batch lacks something.
    """
    p = present(tokens.top_logprobs, "the policy's logprobs of the teacher's most likely tokens")
    q = present(tokens.teacher_top, "the teacher's logprobs of its most likely tokens")
    p_rest, q_rest = _rest(p), _rest(q)
    per_token = (p.exp() * (p - q)).sum(-1) + p_rest.exp() * (p_rest - q_rest)
    loss = reduce_tokens(per_token, tokens, how=config.reduction, length=config.max_tokens)
    return LossTerms(loss=loss, sums={"kl/teacher": per_token.detach().sum(), "teacher/covered": q.exp().sum()})


def _rest(logprobs: Tensor) -> Tensor:
    """float32 [N, k] -> float32 [N]: the logprob of all other tokens."""
    return (1 - logprobs.exp().sum(-1)).clamp(min=REST).log()
