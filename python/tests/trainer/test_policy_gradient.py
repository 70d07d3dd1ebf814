"""How settings of the GRPO family change a step's gradient: entropy, length, truncation. Compared
with direct forward passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.trajectory.v1.trajectory_pb2 import EpisodeLink
from rollout_workers.algorithms import DapoConfig, GrpoConfig, config_type
from rollout_workers.algorithms.advantage import group_relative
from rollout_workers.trainer import Schedule, Trainer, TrainSample

from .addition import sampled_batch
from .oracle import grpo_loss, sample_logprobs
from .test_trainer import gradient, oracle_gradient, trainer


def entropy(learner: Trainer, samples: Sequence[TrainSample], temperature: float) -> Tensor:
    """The mean over trained tokens of the entropy of their distributions."""
    found = []
    for sample in samples:
        token_ids = torch.from_numpy(sample.token_ids).long()
        logits = learner.policy.model(input_ids=token_ids[None], use_cache=False).logits[0, :-1] / temperature
        logprobs = logits.log_softmax(-1)
        found.append(-(logprobs.exp() * logprobs).sum(-1)[torch.from_numpy(sample.loss_mask[1:]).bool()])
    return torch.cat(found).mean()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_entropy_bonus_agrees_with_the_oracle(model_dir: Path, temperature: float) -> None:
    """Includes groups with equal rewards, whose only gradient is that of the entropy."""
    settings = GrpoConfig(entropy_coefficient=3.0)
    learner, samples = trainer(model_dir, settings=settings, temperature=temperature), sampled_batch(0)
    bonus = oracle_gradient(learner, -3.0 * entropy(learner, samples, temperature))
    wanted = oracle_gradient(learner, grpo_loss(learner.policy.model, samples, temperature)) + bonus
    torch.testing.assert_close(gradient(learner, samples), wanted, atol=2e-6, rtol=2e-4)
    assert bonus.abs().max() > 1e-3


def with_cut_off(seed: int) -> list[TrainSample]:
    """Marks every fifth sample as truncated, independent of its length."""
    return [dataclasses.replace(s, truncated=number % 5 == 0) for number, s in enumerate(sampled_batch(seed))]


def loss_of(learner: Trainer, samples: Sequence[TrainSample], rewards: Sequence[float], left_out: Sequence[bool]) -> Tensor:
    """On-policy GRPO with shaped rewards, without the excluded samples."""
    keys = sorted({sample.group_key for sample in samples})
    groups = torch.tensor([keys.index(sample.group_key) for sample in samples])
    advantages = group_relative(torch.tensor(rewards, dtype=torch.float64), groups).tolist()
    total, count = torch.zeros(()), 0
    for sample, advantage, out in zip(samples, advantages, left_out, strict=True):
        if not out:
            trained = torch.from_numpy(sample.loss_mask[1:]).bool()
            total = total - advantage * sample_logprobs(learner.policy.model, sample)[trained].sum()  # pyright: ignore
            count += int(trained.sum())
    return total / count


def test_dapo_penalizes_long_answers_and_fully_penalizes_truncated_ones(model_dir: Path) -> None:
    settings = DapoConfig(max_tokens=5, overlong_share=0.4, overlong_penalty=0.6, dynamic_sampling=False)
    learner, samples = trainer(model_dir, algorithm="dapo", settings=settings), with_cut_off(0)
    lengths = [len(sample.token_ids) - sample.prompt_length for sample in samples]
    assert {3, 4} <= set(lengths)
    share = {2: 0.0, 3: 0.0, 4: 0.5}  # of the last two of five tokens
    rewards = [s.reward - 0.6 * (1.0 if s.truncated else share[n]) for s, n in zip(samples, lengths, strict=True)]
    wanted = oracle_gradient(learner, loss_of(learner, samples, rewards, [False] * len(samples)))
    torch.testing.assert_close(gradient(learner, samples), wanted, atol=2e-6, rtol=2e-4)


def test_a_truncated_sample_counts_in_its_group_but_not_in_the_loss(model_dir: Path) -> None:
    learner, samples = trainer(model_dir, settings=GrpoConfig(mask_truncated=True)), with_cut_off(0)
    left_out = [sample.truncated for sample in samples]
    wanted = oracle_gradient(learner, loss_of(learner, samples, [sample.reward for sample in samples], left_out))
    torch.testing.assert_close(gradient(learner, samples), wanted, atol=2e-6, rtol=2e-4)
    learner.step = 0
    trained = sum(int(sample.loss_mask.sum()) for sample in samples if not sample.truncated)
    assert learner.train_step(samples, 1).metrics["tokens/trained"] == trained


@pytest.mark.parametrize("reduction", ["sequence", "constant"])
def test_truncated_samples_are_not_in_the_mean_over_samples(model_dir: Path, reduction: str) -> None:
    """TRL 1.16 divides by all samples (grpo_trainer.py, loss types grpo and dr_grpo): its gradient
    is ours times the share of samples that are not truncated."""
    settings = GrpoConfig(mask_truncated=True, reduction=reduction, max_tokens=7)
    learner, samples = trainer(model_dir, settings=settings), with_cut_off(0)
    keys = sorted({sample.group_key for sample in samples})
    groups = torch.tensor([keys.index(sample.group_key) for sample in samples])
    advantages = group_relative(torch.tensor([sample.reward for sample in samples], dtype=torch.float64), groups).tolist()
    of_trl = torch.zeros(())
    for sample, advantage in zip(samples, advantages, strict=True):
        mask = torch.from_numpy(sample.loss_mask[1:]).float() * (not sample.truncated)
        per_token = -advantage * sample_logprobs(learner.policy.model, sample)  # pyright: ignore
        length = 7.0 if reduction == "constant" else float(mask.sum().clamp(min=1))
        of_trl = of_trl + (per_token * mask).sum() / length / len(samples)
    share = sum(not sample.truncated for sample in samples) / len(samples)
    assert 0.5 < share < 0.9
    wanted = oracle_gradient(learner, of_trl / share)
    torch.testing.assert_close(gradient(learner, samples), wanted, atol=2e-6, rtol=2e-4)


def test_a_reward_of_0_counts_among_samples_with_process_rewards(model_dir: Path) -> None:
    """Both in another group and in the same group. The reward is then the reward of the last
    token."""
    learner, samples = trainer(model_dir), sampled_batch(0)
    plain = trainer(model_dir).train_step(sampled_batch(0), 1).advantages
    for sample in samples[:2]:  # of the first group
        sample.token_rewards = np.where(np.arange(len(sample.token_ids)) == sample.prompt_length, 1.0, 0.0).astype(np.float32)
        sample.reward = 0.0
    samples[2].reward = samples[3].reward = 0.0
    found = learner.train_step(samples, 1).advantages
    for sample in samples[4:]:
        key = (sample.group_key, sample.sample)
        assert found[key] == pytest.approx(plain[key], abs=1e-6)
    assert any(plain.values()) and found[samples[2].group_key, 2] < -0.5 < 0 < found[samples[0].group_key, 0]


@pytest.mark.parametrize("first", [0, 1])
def test_the_parts_of_a_forked_sample_count_once_in_its_group(model_dir: Path, first: int) -> None:
    """One sample comes as two parts, each of which trains some of its tokens. The gradient is that
    of the whole sample: a sample of two parts has one reward in the baseline."""
    learner, whole = trainer(model_dir), [dataclasses.replace(s, sample=16 * s.sample) for s in sampled_batch(0)]
    rewards: dict[str, set[float]] = {}
    for sample in whole:
        rewards.setdefault(sample.group_key, set()).add(sample.reward)
    number = [at for at, s in enumerate(whole) if len(rewards[s.group_key]) > 1][first]
    trained = np.flatnonzero(whole[number].loss_mask)
    masks = [whole[number].loss_mask.copy(), whole[number].loss_mask.copy()]
    masks[0][trained[1:]] = 0
    masks[1][trained[:1]] = 0
    parts = [dataclasses.replace(whole[number], sample=whole[number].sample + at, part=at, loss_mask=masks[at]) for at in (0, 1)]
    forked = [*whole[:number], *parts, *whole[number + 1 :]]
    wanted = oracle_gradient(learner, grpo_loss(learner.policy.model, whole, 1.0))
    torch.testing.assert_close(gradient(learner, forked), wanted, atol=2e-6, rtol=2e-4)


def test_child_sessions_with_rewards_of_their_own_are_compared_with_each_other(model_dir: Path) -> None:
    """Others have the advantage of the sample that they belong to."""
    whole = [dataclasses.replace(sample, sample=16 * sample.sample) for sample in sampled_batch(0)]
    plain = trainer(model_dir).train_step(whole, 1).advantages
    samples: list[TrainSample] = []
    for number, sample in enumerate(whole):
        own, shared = (EpisodeLink(child=child, rewarded=child == 0) for child in (0, 1))
        samples += [
            sample,
            dataclasses.replace(sample, sample=sample.sample + 1, part=1, parent=own, reward=float(number % 3)),
            dataclasses.replace(sample, sample=sample.sample + 2, part=2, parent=shared),
        ]
    learner = trainer(model_dir)
    result = learner.train_step(samples, 1)
    groups = {sample.group_key for sample in whole}
    numbers = {key: number for number, key in enumerate(sorted(groups))}
    rewards = torch.tensor([float(number % 3) for number in range(len(whole))], dtype=torch.float64)
    wanted = group_relative(rewards, torch.tensor([numbers[sample.group_key] for sample in whole]))
    for sample, advantage in zip(whole, wanted.tolist(), strict=True):
        found = [result.advantages[sample.group_key, sample.sample + part] for part in range(3)]
        assert found == pytest.approx([plain[sample.group_key, sample.sample], advantage, found[0]], abs=1e-6)
    assert result.metrics["reward/mean"] == pytest.approx(np.mean([sample.reward for sample in whole]))


def agreeing(learner: Trainer, samples: list[TrainSample]) -> list[TrainSample]:
    """The samples with the learner's own logprobs as the engine's."""
    exact = []
    with torch.no_grad():
        for sample in samples:
            logprobs = np.zeros(len(sample.token_ids), np.float32)
            logprobs[1:] = sample_logprobs(learner.policy.model, sample)
            exact.append(dataclasses.replace(sample, logprobs=logprobs))
    return exact


@pytest.mark.parametrize("tokens", [30, 10_000])
def test_the_share_of_masked_samples_is_over_samples(model_dir: Path, tokens: int) -> None:
    """However the batch is split into micro-batches, and however long each sample is."""
    settings = GrpoConfig(off_policy=True, importance_sample_mask="sequence")
    learner = trainer(model_dir, settings=settings, tokens_per_microbatch=tokens)
    samples = agreeing(learner, sampled_batch(0))
    rewards: dict[str, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group_key, set()).add(sample.reward)
    computed = [sample for sample in samples if len(rewards[sample.group_key]) > 1]  # others have no advantage
    far = [sample for sample in computed if sample.sample == 0]
    for sample in far:
        sample.logprobs[np.flatnonzero(sample.loss_mask)[0]] -= np.log(2.5)
    metrics = learner.train_step(samples, 1).metrics
    assert metrics["importance/masked_samples"] == pytest.approx(len(far) / len(computed))
    of = [sum(int(sample.loss_mask.sum()) for sample in group) for group in (far, computed)]
    assert metrics["importance/masked"] == pytest.approx(of[0] / of[1])


def test_clips_differ_only_with_several_updates(model_dir: Path) -> None:
    """GRPO, DAPO, CISPO, and GSPO on the same batch. In one update on policy the first three have
    equal gradients, so in the second their ratios are equal, too: DAPO clips fewer tokens than
    GRPO, and CISPO the fewest, whose gradient it bounds and keeps. GSPO clips whole samples at a
    narrow range, and so the most tokens."""

    def step(name: str, updates: int) -> tuple[Mapping[str, float], torch.Tensor]:
        settings: dict[str, object] = {"epochs": updates, "minibatches": 1}
        if name == "dapo":
            settings |= {"max_tokens": 100, "dynamic_sampling": False, "overlong_share": 0.0}
        learner = trainer(model_dir, algorithm=name, settings=config_type(name)(**settings), schedule=Schedule(peak=1e-2))
        metrics = learner.train_step(sampled_batch(0), 1).metrics
        return metrics, torch.cat([tensor.flatten() for _, tensor in learner.named_weights()])

    names = ("grpo", "dapo", "cispo", "gspo")
    once = {name: step(name, 1) for name in names}
    assert all(metrics["clip_fraction"] == 0 for metrics, _ in once.values())
    for name in ("dapo", "cispo"):
        torch.testing.assert_close(once[name][1], once["grpo"][1], atol=2e-5, rtol=0)
    several = {name: step(name, 2) for name in names}
    clipped = {name: metrics["clip_fraction"] for name, (metrics, _) in several.items()}
    assert clipped["cispo"] < clipped["dapo"] < clipped["grpo"] < clipped["gspo"]
    for number, name in enumerate(names):
        for other in names[:number]:
            assert (several[name][1] - several[other][1]).abs().max() > 1e-3, (name, other)
