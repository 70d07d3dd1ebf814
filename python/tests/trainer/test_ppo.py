"""PPO in the trainer: its gradient agrees with direct forward passes, for each critic and kind of
reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout_workers.algorithms.ppo import PpoConfig
from rollout_workers.trainer import AdamWConfig, Schedule, Trainer, TrainerConfig, TrainSample

from .addition import answer, sampled_batch
from .oracle import sample_logprobs
from .test_trainer import gradient, gradients, oracle_gradient

SETTINGS = PpoConfig(epochs=1, gamma=0.9, gae_lambda=0.7, kl_coefficient=0.4, value_coefficient=0.3)
TEMPERATURE = 0.7


def trainer(model_dir: Path, settings: PpoConfig, **changes: object) -> Trainer:
    """A trainer whose policy differs from its reference and whose critic has different values for
    each token."""
    config = TrainerConfig("ppo", settings, schedule=Schedule(peak=1e-3), temperature=TEMPERATURE, threads=1)
    learner = Trainer(model_dir, dataclasses.replace(config, **changes))
    critic, draw = learner.models.critic, torch.Generator().manual_seed(3)
    assert critic is not None
    with torch.no_grad():
        for parameter in learner.optimizers.parameters:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))
        critic.head.weight.copy_(0.3 * torch.randn(critic.head.weight.shape, generator=draw))
        critic.head.bias.fill_(0.2)
    return learner


def batch(seed: int, *, by_token: bool = False) -> list[TrainSample]:
    """Samples of several lengths; in every third a tool answered between two trained tokens.
    by_token: with token rewards."""
    draw, samples = np.random.default_rng(seed), sampled_batch(seed)
    for number, sample in enumerate(samples):
        if number % 3 == 0:
            sample.loss_mask[sample.prompt_length + 1] = 0
        if by_token:
            sample.token_rewards = draw.normal(size=len(sample.token_ids)).astype(np.float32)
    return samples


def values(learner: Trainer, sample: TrainSample) -> Tensor:
    """The critic's values before every token but the first, [T - 1]."""
    critic = learner.models.critic
    assert critic is not None
    trunk = critic.trunk or learner.policy.model.model  # pyright: ignore
    token_ids = torch.from_numpy(sample.token_ids).long()
    return critic.head(trunk(input_ids=token_ids[None], use_cache=False).last_hidden_state[0, :-1])[:, 0]


def by_hand(learner: Trainer, reference: PreTrainedModel, samples: Sequence[TrainSample], settings: PpoConfig) -> Tensor:
    """The loss of the first update: the estimate by its definition, one token after the other."""
    said, valued, advantages, returns = [], [], [], []
    for sample in samples:
        trained = torch.from_numpy(sample.loss_mask[1:]).bool()
        logprobs = sample_logprobs(learner.policy.model, sample, TEMPERATURE)[trained]  # pyright: ignore
        with torch.no_grad():
            rewards = -settings.kl_coefficient * (logprobs - sample_logprobs(reference, sample, TEMPERATURE)[trained])
        if sample.token_rewards is not None:
            rewards += torch.from_numpy(sample.token_rewards[1:])[trained]
        rewards[-1] += sample.reward
        worth = values(learner, sample)[trained]
        ahead = torch.cat([worth.detach()[1:], torch.zeros(1)])
        deltas = rewards + settings.gamma * ahead - worth.detach()
        decay = settings.gamma * settings.gae_lambda
        for place in range(len(deltas)):
            advantage = sum(decay**later * delta for later, delta in enumerate(deltas[place:]))
            advantages.append(advantage)
            returns.append(advantage + worth[place].detach())
        said.append(logprobs)
        valued.append(worth)
    found = torch.tensor(advantages)
    if settings.whiten_advantages:
        found = (found - found.mean()) / found.std()
    logprobs = torch.cat(said)
    gain = (logprobs - logprobs.detach()).exp() * found
    return -gain.mean() + settings.value_coefficient * (torch.cat(valued) - torch.tensor(returns)).square().mean() / 2


@pytest.mark.parametrize("by_token", [False, True], ids=["outcome", "token rewards"])
@pytest.mark.parametrize("whiten", [True, False], ids=["whitened", "raw"])
@pytest.mark.parametrize("critic", ["head", "network"])
def test_ppo_agrees_with_the_oracle(model_dir: Path, critic: str, whiten: bool, by_token: bool) -> None:
    settings = dataclasses.replace(SETTINGS, critic=critic, whiten_advantages=whiten)
    learner, samples = trainer(model_dir, settings), batch(2, by_token=by_token)
    wanted = oracle_gradient(learner, by_hand(learner, AutoModelForCausalLM.from_pretrained(model_dir), samples, settings))
    found = gradient(learner, samples)
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=2e-4)
    assert wanted.abs().max() > 1e-2
    head = wanted[-33:]  # the critic's head stands last
    assert head.abs().max() > 1e-2


@pytest.mark.parametrize("critic", ["head", "network"])
def test_the_gradient_does_not_depend_on_how_a_batch_is_split(model_dir: Path, critic: str) -> None:
    """Splits into micro-batches, and into the minibatches of an epoch before any update."""
    settings = dataclasses.replace(SETTINGS, critic=critic)
    texts = [["7", "19", "105"], ["42", "168", "3"], ["12", "9", "150"]]  # as many tokens in each group
    samples = [answer(g, n, f"{g}+7=", text, n - g / 2) for g, of_one in enumerate(texts) for n, text in enumerate(of_one)]
    whole = gradient(trainer(model_dir, settings), samples)
    for tokens in (60, 12):
        found = gradient(trainer(model_dir, settings, tokens_per_microbatch=tokens), samples)
        torch.testing.assert_close(found, whole, atol=2e-6, rtol=1e-4)
    parts = gradients(trainer(model_dir, dataclasses.replace(settings, minibatches=3), tokens_per_microbatch=30), samples)
    assert len(parts) == 3 and not torch.allclose(parts[0], parts[1], atol=1e-3)
    torch.testing.assert_close(torch.stack(parts).mean(0), whole, atol=2e-6, rtol=1e-4)


def test_a_separate_critic_has_its_own_rate_on_the_policys_schedule(model_dir: Path) -> None:
    """Checks step 3 of 4, where both rates are half of their peak. The size of Adam's first update
    equals the rate."""
    settings = dataclasses.replace(SETTINGS, critic="network", critic_learning_rate=0.02)
    schedule = Schedule(peak=0.001, shape="linear", steps=4)
    learner = trainer(model_dir, settings, schedule=schedule, optimizer=AdamWConfig(weight_decay=0.0, max_grad_norm=0.0))
    critic = learner.models.critic
    assert critic is not None
    learner.step = 2
    before = [critic.head.weight.detach().clone(), learner.policy.model.model.norm.weight.detach().clone()]  # pyright: ignore
    learner.train_step(batch(2), 3)
    after = [critic.head.weight.detach(), learner.policy.model.model.norm.weight.detach()]  # pyright: ignore
    for one, other, rate in zip(before, after, (0.01, 0.0005), strict=True):
        torch.testing.assert_close((other - one).abs(), torch.full_like(one, rate), atol=2e-6, rtol=1e-2)


def test_the_critic_is_trained_alone_while_it_warms_up(model_dir: Path, tmp_path: Path) -> None:
    """The policy stays bit for bit the same, with weight decay and several updates per step. Its
    first update is then Adam's first one, with the size of the rate. A state saved during the
    warm-up continues it."""
    settings = dataclasses.replace(
        SETTINGS, critic="network", critic_warmup_steps=2, epochs=2, kl_target=0.1, critic_learning_rate=1e-2
    )
    optimizer = AdamWConfig(weight_decay=0.1, max_grad_norm=0.0)

    def make() -> Trainer:
        return trainer(model_dir, settings, optimizer=optimizer)

    learner = make()
    critic = learner.models.critic
    assert critic is not None
    first, heads = learner.weights_digest().root, [critic.head.weight.detach().clone()]
    errors = []
    for step in (1, 2):
        metrics = learner.train_step(batch(2), step).metrics
        errors.append(metrics["value/error"])
        heads.append(critic.head.weight.detach().clone())
        assert learner.weights_digest().root == first and not torch.equal(heads[-1], heads[-2])
        assert "grad_norm" not in metrics and metrics["learning_rate"] == 0 < metrics["value/grad_norm"]
        assert metrics["kl/coefficient"] == 0.4
        if step == 1:
            learner.save_state(tmp_path)
    assert errors[1] < errors[0]
    norm = learner.policy.model.model.norm.weight  # pyright: ignore
    before = norm.detach().clone()
    metrics = learner.train_step(batch(2), 3).metrics
    assert metrics["grad_norm"] > 0 and metrics["learning_rate"] == 1e-3
    torch.testing.assert_close((norm.detach() - before).abs().max(), torch.tensor(2e-3), atol=2e-4, rtol=0)
    resumed = make()
    resumed.load_state(tmp_path)
    for step in (2, 3):
        resumed.train_step(batch(2), step)
    assert resumed.weights_digest().root == learner.weights_digest().root != first


def test_a_head_has_no_warm_up() -> None:
    with pytest.raises(ValueError, match="critic_warmup_steps needs critic 'network'"):
        PpoConfig(critic_warmup_steps=1)
