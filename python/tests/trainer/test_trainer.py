"""A step uses the gradient of the whole batch, however it is split or ordered. A refused step
changes nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_workers.algorithms import DapoConfig, GrpoConfig
from rollout_workers.trainer import (
    AdamWConfig,
    BadBatch,
    NonFiniteGradient,
    Schedule,
    StepOutOfTurn,
    Trainer,
    TrainerConfig,
    TrainSample,
)
from rollout_workers.trainer.optim.optimizer import FlatAdamW

from .addition import answer, demonstrations, sampled_batch
from .oracle import grpo_loss, sample_logprobs, sft_loss


def trainer(model_dir: Path, **changes: object) -> Trainer:
    """A trainer of the small model on one thread."""
    config = TrainerConfig(schedule=Schedule(peak=1e-3), threads=1)
    return Trainer(model_dir, dataclasses.replace(config, **changes))


def gradients(
    learner: Trainer, samples: list[TrainSample], on_progress: Callable[[int, int], None] | None = None
) -> list[torch.Tensor]:
    """The flat gradient of each update of a step, in the order of the parameters, recorded instead
    of applied. The gradients of a critic with a separate optimizer come last."""
    caught: list[list[torch.Tensor]] = []

    def catch(optimizer: FlatAdamW) -> Callable[[float, float], None]:
        def step(_rate: float, _norm: float) -> None:
            if optimizer is learner.optimizer:
                caught.append([])
            caught[-1].extend(part.flatten().clone() for part in optimizer._gradients)
            optimizer.clear()

        return step

    with pytest.MonkeyPatch.context() as patch:
        for optimizer in filter(None, (learner.optimizer, learner.critic_optimizer)):
            patch.setattr(optimizer, "step", catch(optimizer))
        learner.train_step(samples, learner.step + 1, on_progress)
    return [torch.cat(parts) for parts in caught]


def gradient(learner: Trainer, samples: list[TrainSample], on_progress: Callable[[int, int], None] | None = None) -> torch.Tensor:
    """The gradient of a step's first update."""
    return gradients(learner, samples, on_progress)[0]


def oracle_gradient(learner: Trainer, loss: torch.Tensor) -> torch.Tensor:
    """The gradient of a loss, by autograd."""
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, learner.optimizers.parameters)])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_grpo_agrees_with_the_oracle(model_dir: Path, temperature: float) -> None:
    learner, samples = trainer(model_dir, temperature=temperature), sampled_batch(0)
    loss = grpo_loss(learner.policy.model, samples, temperature)
    wanted = oracle_gradient(learner, loss)
    found = gradient(learner, samples)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)
    assert wanted.abs().max() > 1e-3


def test_sft_agrees_with_the_oracle(model_dir: Path) -> None:
    learner, samples = trainer(model_dir, algorithm="sft"), demonstrations(0)
    loss = sft_loss(learner.policy.model, samples)
    wanted = oracle_gradient(learner, loss)
    result = learner.train_step(samples, 1)
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(gradient(trainer(model_dir, algorithm="sft"), samples), wanted, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_micro_batches_add_up_to_the_gradient_of_the_whole(model_dir: Path, algorithm: str) -> None:
    samples = sampled_batch(3, groups=12, size=8)
    found: dict[int, torch.Tensor] = {}
    for tokens in (16_384, 128, 40, 16):
        learner = trainer(model_dir, algorithm=algorithm, tokens_per_microbatch=tokens)
        progress: list[tuple[int, int]] = []
        part = gradient(learner, samples, lambda done, total, seen=progress: seen.append((done, total)))
        assert progress == [(n + 1, len(progress)) for n in range(len(progress))]
        found[len(progress)] = part
    assert len(found) == 4 and min(found) == 1 and max(found) >= 8
    for part in found.values():
        torch.testing.assert_close(part, found[1], atol=1e-6, rtol=1e-4)


def test_padded_rows_give_the_same_gradient_as_prefix_trees(model_dir: Path) -> None:
    plain = trainer(model_dir)
    plain.policy.share_prefixes = False
    torch.testing.assert_close(
        gradient(plain, sampled_batch(0)), gradient(trainer(model_dir), sampled_batch(0)), atol=1e-6, rtol=1e-4
    )


def test_skipping_groups_without_advantage_changes_nothing_but_the_work(model_dir: Path) -> None:
    samples = sampled_batch(0)
    skipping, computing = trainer(model_dir), trainer(model_dir)
    needs = dataclasses.replace(computing.algorithm.needs, every_token=True)
    computing.algorithm = dataclasses.replace(computing.algorithm, needs=needs)
    one, all_ = skipping.train_step(samples, 1).metrics, computing.train_step(samples, 1).metrics
    assert one["zero_advantage_groups"] >= 1 / 3
    assert one["tokens/computed"] < all_["tokens/computed"]
    assert one["tokens/trained"] == all_["tokens/trained"]
    assert one["grad_norm"] == pytest.approx(all_["grad_norm"], rel=1e-5)
    for (_, a), (_, b) in zip(skipping.named_weights(), computing.named_weights(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_equal_batches_give_equal_bits_in_any_order(model_dir: Path) -> None:
    digests = set()
    for seed in range(3):
        learner = trainer(model_dir)
        for step in range(1, 4):
            draw = random.Random(step)
            samples = [dataclasses.replace(s, reward=draw.random()) for s in sampled_batch(step, groups=4, size=12)]
            random.Random(seed).shuffle(samples)
            learner.train_step(samples, step)
        digests.add(learner.weights_digest().root)
    assert len(digests) == 1


def test_a_batch_without_any_advantage_is_still_a_step(model_dir: Path) -> None:
    learner = trainer(model_dir)
    before = learner.weights_digest().root
    samples = [dataclasses.replace(sample, reward=1.0) for sample in sampled_batch(0)]
    metrics = learner.train_step(samples, 1).metrics
    assert (metrics["loss"], metrics["grad_norm"], metrics["zero_advantage_groups"]) == (0.0, 0.0, 1.0)
    assert metrics["entropy"] > 0  # from the engine's logprobs: the health check reads it
    assert learner.step == 1 and learner.weights_digest().root == before


@pytest.mark.parametrize("poison", ["weights", "advantages"])
def test_a_step_with_a_non_finite_gradient_changes_nothing(model_dir: Path, poison: str, tmp_path: Path) -> None:
    learner, samples = trainer(model_dir), sampled_batch(0)
    learner.train_step(sampled_batch(1), 1)
    digest, state = learner.weights_digest().root, {n: t.clone() for n, t in learner.optimizer.moments().items()}
    healthy = learner.algorithm
    factor = torch.inf if poison == "weights" else torch.nan
    learner.algorithm = dataclasses.replace(
        healthy,
        loss=lambda tokens: healthy.loss(dataclasses.replace(tokens, logprobs=tokens.logprobs * factor)),
    )
    with pytest.raises(
        NonFiniteGradient, match=r"^loss \S+, gradient norm \S+. The step was not made\. .*`rollout run .* --from RUN --continue`"
    ):
        learner.train_step(samples, 2)
    assert learner.step == 1 and learner.weights_digest().root == digest
    assert all(torch.equal(t, state[n]) for n, t in learner.optimizer.moments().items())

    learner.algorithm = healthy
    learner.train_step(samples, 2)
    duplicate = trainer(model_dir)
    duplicate.train_step(sampled_batch(1), 1)
    duplicate.train_step(samples, 2)
    assert learner.weights_digest().root == duplicate.weights_digest().root


def test_a_step_out_of_turn_is_refused(model_dir: Path) -> None:
    learner = trainer(model_dir)
    with pytest.raises(StepOutOfTurn, match="step 2 was requested, but the learner is at step 0"):
        learner.train_step(sampled_batch(0), 2)


def broken(**changes: object) -> list[TrainSample]:
    """A batch whose second sample is wrong."""
    samples = sampled_batch(0)
    samples[1] = dataclasses.replace(samples[1], **changes)
    return samples


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "has no samples"),
        ([dataclasses.replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in sampled_batch(0)], "no token of the 24"),
        (broken(logprobs=np.zeros(2, np.float32)), "sample 1 of group 0/000000"),
        (broken(prompt_length=99), "the prompt no longer"),
        (broken(reward=float("nan")), "a reward is infinite or NaN"),
        (broken(reward=1e300), r"a reward is 1e\+300, whose square overflows float32"),
    ],
    ids=["empty", "untrained", "arrays", "prompt", "reward", "large reward"],
)
def test_a_bad_batch_is_named(model_dir: Path, samples: list[TrainSample], message: str) -> None:
    learner = trainer(model_dir)
    with pytest.raises(BadBatch, match=message):
        learner.train_step(samples, 1)
    assert learner.step == 0


def test_metrics_of_a_step(model_dir: Path) -> None:
    samples = sampled_batch(0, groups=6, size=4)
    metrics = trainer(model_dir).train_step(samples, 1).metrics
    rewards = [sample.reward for sample in samples]
    lengths = [len(sample.token_ids) - sample.prompt_length for sample in samples]
    assert metrics["samples"] == 24 and metrics["groups"] == 6
    assert metrics["reward/mean"] == pytest.approx(np.mean(rewards))
    assert metrics["reward/std"] == pytest.approx(np.std(rewards))
    assert metrics["tokens"] == sum(len(sample.token_ids) for sample in samples)
    assert metrics["tokens/trained"] == sum(lengths)
    assert [metrics[f"length/{name}"] for name in ("mean", "min", "max")] == [
        pytest.approx(np.mean(lengths)),
        min(lengths),
        max(lengths),
    ]
    assert metrics["learning_rate"] == 1e-3
    assert metrics["clip_fraction"] == 0 and metrics["staleness/max"] == 0
    assert 3.5 < metrics["entropy"] <= np.log(54)
    assert metrics["mismatch/kl"] > 0 and metrics["mismatch/max_ratio"] > 1
    assert all(metrics[f"time/{phase}"] > 0 for phase in ("pack", "forward", "backward", "optimizer", "step"))
    assert metrics["tokens_per_second"] > 0
    assert "kl/reference" not in metrics


@pytest.mark.parametrize("minibatches", [1, 3])
def test_the_divergence_is_0_if_engine_and_learner_agree(model_dir: Path, minibatches: int) -> None:
    """It does not depend on the updates of the step."""
    learner, samples = trainer(model_dir, settings=GrpoConfig(minibatches=minibatches)), sampled_batch(0)
    exact = []
    with torch.no_grad():
        for sample in samples:
            logprobs = np.zeros(len(sample.token_ids), np.float32)
            logprobs[1:] = sample_logprobs(learner.policy.model, sample)
            exact.append(dataclasses.replace(sample, logprobs=logprobs))
    metrics = learner.train_step(exact, 1).metrics
    assert metrics["mismatch/kl"] == pytest.approx(0, abs=1e-9)
    assert metrics["mismatch/max_ratio"] == pytest.approx(1, abs=1e-4)


def test_the_largest_mismatch_is_that_of_the_worst_token(model_dir: Path) -> None:
    learner, samples = trainer(model_dir), sampled_batch(0)
    exact = []
    with torch.no_grad():
        for sample in samples:
            logprobs = np.zeros(len(sample.token_ids), np.float32)
            logprobs[1:] = sample_logprobs(learner.policy.model, sample)
            exact.append(dataclasses.replace(sample, logprobs=logprobs))
    for sample in exact:  # samples without an advantage are not computed
        sample.logprobs[np.flatnonzero(sample.loss_mask)[-1]] += np.log(5)
    metrics = learner.train_step(exact, 1).metrics
    assert metrics["mismatch/max_ratio"] == pytest.approx(5, rel=1e-3) and metrics["mismatch/kl"] > 0


def test_tokens_of_the_environment_do_not_count_as_length(model_dir: Path) -> None:
    """Two turns with six sampled tokens and three tokens of the environment between them; the limit
    is eight."""
    settings = DapoConfig(max_tokens=8, overlong_share=0.5, dynamic_sampling=False)
    learner = trainer(model_dir, algorithm="dapo", settings=settings)
    samples = [answer(0, 0, "1+2=", "12345678", 1.0), answer(0, 1, "1+2=", "12345", 1.0), answer(0, 2, "1+2=", "1", 0.0)]
    samples[0].loss_mask[6:9] = 0
    found = learner.train_step(samples, 1).advantages
    assert found["0/000000", 0] == found["0/000000", 1] > found["0/000000", 2]


def test_the_reference_does_not_change(model_dir: Path) -> None:
    learner = trainer(model_dir, settings=GrpoConfig(kl_coefficient=0.1))
    divergences = [learner.train_step(sampled_batch(s), s).metrics["kl/reference"] for s in (1, 2, 3)]
    assert divergences[0] == pytest.approx(0, abs=1e-7)
    assert divergences[2] > divergences[1] > 1e-6


def test_off_policy_uses_importance_weights(model_dir: Path) -> None:
    """A token whose probability in the engine is e times lower than in the learner has weight e, up
    to the cap."""
    learner = trainer(model_dir, settings=GrpoConfig(off_policy=True, importance_cap=2.0))
    on_policy = gradient(trainer(model_dir), sampled_batch(0))
    for shift, factor in ((-0.5, np.exp(-0.5)), (5.0, 2.0)):
        shifted = []
        with torch.no_grad():
            for sample in sampled_batch(0):
                logprobs = np.zeros(len(sample.token_ids), np.float32)
                logprobs[1:] = sample_logprobs(learner.policy.model, sample) - shift
                shifted.append(dataclasses.replace(sample, logprobs=logprobs))
        learner.step = 0
        torch.testing.assert_close(gradient(learner, shifted), on_policy * factor, atol=1e-5, rtol=1e-3)


def test_it_learns(model_dir: Path) -> None:
    learner = trainer(model_dir, algorithm="sft", schedule=Schedule(peak=3e-3), optimizer=AdamWConfig(beta2=0.95))
    losses = [learner.train_step(demonstrations(step, rows=32), step).metrics["loss"] for step in range(1, 41)]
    assert losses[0] > 3.5
    assert losses[-1] < 2.3


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_learner_selects_deterministic_kernels_only_if_it_promises_bits(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, deterministic: bool
) -> None:
    from rollout.config.v1.run_config_pb2 import RunConfig
    from rollout_workers.learner.settings import trainer_config
    from rollout_workers.trainer import trainer

    config = RunConfig(mode="sync", deterministic=deterministic)
    config.algorithm.sft.SetInParent()
    config.model.dtype, config.train.learning_rate, config.train.steps = "float32", 1e-3, 1
    config.train.schedule, config.train.tokens_per_microbatch = "constant", 512
    calls: list[bool] = []
    monkeypatch.setattr(trainer, "repeat_bits", lambda: calls.append(True))
    Trainer(model_dir, trainer_config(config, 1))
    assert calls == [True] * deterministic
