"""Distillation from a teacher model, and groups that are excluded from the batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_workers.algorithms import DapoConfig, DistillationConfig, GrpoConfig
from rollout_workers.trainer import BadBatch, Schedule, Trainer, TrainerConfig, TrainSample
from rollout_workers.trainer.types import BadSettings

from .addition import sampled_batch
from .oracle import sample_logprobs
from .test_trainer import gradient, oracle_gradient

CONFIG = TrainerConfig(algorithm="distillation", schedule=Schedule(peak=1e-3), threads=1)


def taught(model_dir: Path, folder: Path) -> TrainerConfig:
    """A teacher: the same model with different weights."""
    teacher = AutoModelForCausalLM.from_pretrained(model_dir)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    teacher.save_pretrained(folder)
    return dataclasses.replace(CONFIG, settings=DistillationConfig(teacher=str(folder)))


def test_the_gradient_is_that_of_the_divergence_on_sampled_tokens(model_dir: Path, tmp_path: Path) -> None:
    learner, samples = Trainer(model_dir, taught(model_dir, tmp_path)), sampled_batch(3)
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path)
    total, count = torch.zeros(()), 0
    for sample in samples:
        trained = torch.from_numpy(sample.loss_mask[1:]).bool()
        student = sample_logprobs(learner.policy.model, sample)[trained]  # pyright: ignore
        with torch.no_grad():
            gain = sample_logprobs(teacher, sample)[trained] - student
        total, count = total - (student * gain).sum(), count + int(trained.sum())
    wanted = oracle_gradient(learner, total / count)
    torch.testing.assert_close(gradient(learner, samples), wanted, atol=1e-6, rtol=1e-4)
    assert wanted.abs().max() > 1e-4


def full_logprobs(model: torch.nn.Module, sample: TrainSample) -> torch.Tensor:
    """float32 [T - 1, V]: of every token at every position."""
    return model(input_ids=torch.from_numpy(sample.token_ids).long()[None], use_cache=False).logits[0].log_softmax(-1)[:-1]


@pytest.mark.parametrize("tokens", [40, 10_000])
@pytest.mark.parametrize("k", [3, 1000])
def test_the_gradient_over_the_most_likely_tokens_is_exact(model_dir: Path, tmp_path: Path, k: int, tokens: int) -> None:
    """3 of the 54 tokens and the others together; and all of them, where it is the gradient of the
    whole divergence."""
    config = taught(model_dir, tmp_path)
    settings = dataclasses.replace(config.settings, teacher_top_k=k)
    learner = Trainer(model_dir, dataclasses.replace(config, settings=settings, tokens_per_microbatch=tokens))
    teacher, samples = AutoModelForCausalLM.from_pretrained(tmp_path), sampled_batch(3)
    total, covered, count = torch.zeros(()), 0.0, 0
    for sample in samples:
        trained = torch.from_numpy(sample.loss_mask[1:]).bool()
        p = full_logprobs(learner.policy.model, sample)[trained]
        with torch.no_grad():
            q = full_logprobs(teacher, sample)[trained]
        if k < q.shape[1]:
            ids = q.argsort(-1, descending=True)[:, :k]
            p, q = (torch.cat((x.gather(-1, ids), (1 - x.gather(-1, ids).exp().sum(-1, keepdim=True)).log()), -1) for x in (p, q))
            covered += float(q[:, :k].exp().sum())
        else:
            covered += len(q)
        total, count = total + (p.exp() * (p - q)).sum(), count + len(p)
    wanted = oracle_gradient(learner, total / count)
    torch.testing.assert_close(gradient(learner, samples), wanted, atol=1e-6, rtol=1e-3)
    assert wanted.abs().max() > 1e-3
    learner.step = 0
    metrics = learner.train_step(samples, 1).metrics
    assert metrics["loss"] == pytest.approx(float(total.detach() / count), rel=1e-3)
    assert metrics["kl/teacher"] == pytest.approx(metrics["loss"], rel=1e-5)
    assert metrics["teacher/covered"] == pytest.approx(covered / count, rel=1e-4)


def test_several_updates_over_the_most_likely_tokens_come_nearer_to_the_teacher(model_dir: Path, tmp_path: Path) -> None:
    config = taught(model_dir, tmp_path)
    settings = dataclasses.replace(config.settings, teacher_top_k=8, epochs=2, minibatches=2, off_policy=True)
    learner = Trainer(model_dir, dataclasses.replace(config, settings=settings))
    found = [learner.train_step(sampled_batch(3), step).metrics["kl/teacher"] for step in range(1, 9)]
    assert found[-1] < 0.6 * found[0]


def test_the_most_likely_tokens_need_the_teachers_model(model_dir: Path) -> None:
    samples = [dataclasses.replace(s, teacher_logprobs=s.logprobs) for s in sampled_batch(3)]
    learner = Trainer(model_dir, dataclasses.replace(CONFIG, settings=DistillationConfig(teacher_top_k=4)))
    with pytest.raises(BadBatch, match="teacher_top_k needs the teacher's model"):
        learner.train_step(samples, 1)


def test_samples_may_carry_the_teachers_logprobs(model_dir: Path, tmp_path: Path) -> None:
    config, samples = taught(model_dir, tmp_path), sampled_batch(3)
    teacher, carried = AutoModelForCausalLM.from_pretrained(tmp_path), []
    for sample in samples:
        with torch.no_grad():
            logprobs = np.concatenate(([0.0], sample_logprobs(teacher, sample).numpy())).astype(np.float32)
        carried.append(dataclasses.replace(sample, teacher_logprobs=logprobs))
    wanted = gradient(Trainer(model_dir, config), samples)
    torch.testing.assert_close(gradient(Trainer(model_dir, CONFIG), carried), wanted, atol=1e-6, rtol=1e-4)
    with pytest.raises(BadBatch, match="has no logprobs of the teacher"):
        Trainer(model_dir, CONFIG).train_step(samples, 1)


def test_a_teacher_of_another_vocabulary_is_refused(model_dir: Path, tmp_path: Path) -> None:
    config = taught(model_dir, tmp_path)
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path)
    teacher.resize_token_embeddings(teacher.config.vocab_size + 3)
    teacher.save_pretrained(tmp_path)
    with pytest.raises(BadSettings, match="use a teacher with the same tokenizer"):
        Trainer(model_dir, config)


def test_groups_of_equal_rewards_dilute_the_mean_unless_excluded(model_dir: Path) -> None:
    samples = sampled_batch(3)
    samples = [dataclasses.replace(s, reward=1.0) if s.group_key == samples[0].group_key else s for s in samples]
    seen: dict[str, set[float]] = {}
    for sample in samples:
        seen.setdefault(sample.group_key, set()).add(sample.reward)
    dull = {key for key, rewards in seen.items() if len(rewards) == 1}
    assert 0 < len(dull) < len(seen)
    config = dataclasses.replace(CONFIG, algorithm="dapo", settings=DapoConfig(max_tokens=64, overlong_share=0.0))
    alone = dataclasses.replace(CONFIG, algorithm="grpo", settings=GrpoConfig(clip_high=0.28))
    found = gradient(Trainer(model_dir, config), samples)
    kept = [s for s in samples if s.group_key not in dull]
    torch.testing.assert_close(found, gradient(Trainer(model_dir, alone), kept), atol=1e-7, rtol=1e-5)
    assert not torch.allclose(found, gradient(Trainer(model_dir, alone), samples), atol=1e-5, rtol=1e-2)
    assert Trainer(model_dir, config).train_step(samples, 1).metrics["groups/equal_rewards"] == len(dull)
