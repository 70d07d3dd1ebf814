"""Conversations: only the assistant's turns are trained on; all other text is context."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from rollout_workers.trainer import Schedule, Trainer, TrainerConfig, TrainSample

from .addition import answer
from .oracle import sft_loss
from .test_trainer import gradient, oracle_gradient


def conversations() -> list[TrainSample]:
    """Two questions with an answer each in one sample, and again with another second question: a
    shared beginning."""
    first, second, third = (answer(n, 0, prompt, text, 0.0, logprob=0.0) for n, (prompt, text) in enumerate(TURNS))
    return [joined(first, second), joined(first, third), third]


TURNS = (("12+34=", "46"), ("5+6=", "11"), ("70+9=", "79"))


def joined(first: TrainSample, second: TrainSample) -> TrainSample:
    parts = {
        name: np.concatenate((getattr(first, name), getattr(second, name))) for name in ("token_ids", "loss_mask", "logprobs")
    }
    return dataclasses.replace(first, group_key=second.group_key, **parts)


def test_turns_agree_with_the_oracle(model_dir: Path) -> None:
    learner = Trainer(model_dir, TrainerConfig(algorithm="sft", schedule=Schedule(peak=1e-3), threads=1))
    samples = conversations()
    runs = np.flatnonzero(np.diff(samples[0].loss_mask, prepend=0) == 1)
    assert len(runs) == 2
    wanted = oracle_gradient(learner, sft_loss(learner.policy.model, samples))
    torch.testing.assert_close(gradient(learner, samples), wanted, atol=1e-6, rtol=1e-4)
    assert wanted.abs().max() > 1e-3
