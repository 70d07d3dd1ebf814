"""Frozen weights do not change, and recomputed activations give the same gradient."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from rollout_workers.algorithms.ppo import PpoConfig
from rollout_workers.trainer import BadSettings, LoraConfig, Schedule, Trainer, TrainerConfig

from .addition import sampled_batch

CONFIG = TrainerConfig(schedule=Schedule(peak=1e-3), threads=1)


def test_frozen_tensors_stay(model_dir: Path) -> None:
    learner = Trainer(model_dir, dataclasses.replace(CONFIG, freeze=("model.layers.0.*", "lm_head.weight")))
    before = {name: tensor.clone() for name, tensor in learner.named_weights()}
    learner.train_step(sampled_batch(1), 1)
    moved = {name for name, tensor in learner.named_weights() if not torch.equal(tensor, before[name])}
    assert moved == {
        name for name in before if not name.startswith("model.layers.0.") and "embed" not in name
    }  # tied to the head


@pytest.mark.parametrize(("pattern", "message"), [("model.layer.0.*", "matches no tensor"), ("*", "nothing is left to train")])
def test_invalid_patterns_are_refused(model_dir: Path, pattern: str, message: str) -> None:
    with pytest.raises(BadSettings, match=message):
        Trainer(model_dir, dataclasses.replace(CONFIG, freeze=(pattern,)))


def test_checkpointing_applies_to_the_critic_too(model_dir: Path) -> None:
    digests = []
    for checkpointing in (False, True):
        settings = PpoConfig(critic="network")
        config = dataclasses.replace(CONFIG, algorithm="ppo", settings=settings, gradient_checkpointing=checkpointing)
        learner = Trainer(model_dir, config)
        assert learner.models.critic is not None
        count = [0]
        layer = next(m for m in learner.models.critic.modules() if isinstance(m, GradientCheckpointingLayer))
        layer.mlp.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))  # pyright: ignore
        learner.train_step(sampled_batch(1), 1)
        digests.append((learner.weights_digest().root, count[0]))
    assert digests[0][0] == digests[1][0]
    assert digests[1][1] > digests[0][1]


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_checkpointing_computes_activations_again_to_the_same_bits(model_dir: Path, lora: LoraConfig | None) -> None:
    digests, calls = [], []
    for checkpointing in (False, True):
        learner = Trainer(model_dir, dataclasses.replace(CONFIG, lora=lora, gradient_checkpointing=checkpointing))
        layer = next(m for m in learner.policy.model.modules() if isinstance(m, GradientCheckpointingLayer))
        count = [0]
        layer.mlp.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))  # pyright: ignore
        for step in (1, 2):
            learner.train_step(sampled_batch(step), step)
        calls.append(count[0])
        digests.append(learner.weights_digest().root)
        assert not learner.policy.model.training
    assert calls == [2, 4]
    assert digests[0] == digests[1]
