"""Supervised fine-tuning: the negative log-likelihood of the trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_workers.algorithms.types import Algorithm, LossTerms, Needs, TokenBatch


@dataclass(frozen=True, slots=True)
class SftConfig:
    """Settings of SFT. Which tokens are trained on stands in each sample's loss mask; the worker
    that tokenises a row sets it."""

    train_on_prompt: bool = False
    """Whether the prompt's tokens are trained on too."""


def sft(config: SftConfig) -> Algorithm:
    """SFT as an algorithm."""
    return Algorithm(name="sft", needs=Needs(), loss=token_nll)


def token_nll(tokens: TokenBatch) -> LossTerms:
    """``-sum(log p) / normaliser``: a mean over the tokens of the global batch, so long answers
    weigh by their length.

    float32 [N]. Mask: the tokens are those that carry loss. Reduction: the sum over ``normalizer``,
    the tokens of the whole batch.
    """
    return LossTerms(loss=-tokens.logprobs.sum() / tokens.normalizer, sums={})
