"""An independent computation of the gradient: one sample at a time with direct calls of the model,
without packing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from rollout_workers.trainer import TrainSample


def sample_logprobs(model: PreTrainedModel, sample: TrainSample, temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of every token but the first, [T - 1]."""
    token_ids = torch.from_numpy(sample.token_ids).long().to(model.device)
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1] / temperature
    return torch.stack([logits[i].log_softmax(0)[token_ids[i + 1]] for i in range(len(logits))]).cpu()


def grpo_loss(model: PreTrainedModel, samples: Sequence[TrainSample], temperature: float = 1.0) -> torch.Tensor:
    """On-policy GRPO: ``-sum over samples and tokens of A * p / p.detach() / all tokens``."""
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    total = torch.zeros(())
    for sample in samples:
        rewards = [mate.reward for mate in samples if mate.group_key == sample.group_key]
        advantage = (sample.reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-4)
        probabilities = sample_logprobs(model, sample, temperature).exp()
        for probability, trained in zip(probabilities, sample.loss_mask[1:], strict=True):
            if trained:
                total = total - advantage * probability / probability.detach()
    return total / tokens


def sft_loss(model: PreTrainedModel, samples: Sequence[TrainSample]) -> torch.Tensor:
    """Mean negative log-likelihood over the trained tokens of all samples."""
    parts = [sample_logprobs(model, sample)[torch.from_numpy(sample.loss_mask[1:]).bool()] for sample in samples]
    return -torch.cat(parts).mean()
