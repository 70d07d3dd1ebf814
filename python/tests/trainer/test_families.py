"""The gradient of each family of losses equals the oracle's, however the batch is split, and a
resumed run has the same bits."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rollout_workers.algorithms.ipo import IpoConfig
from rollout_workers.algorithms.kto import mismatch
from rollout_workers.algorithms.online_dpo import OnlineDpoConfig
from rollout_workers.algorithms.ppo import PpoConfig
from rollout_workers.trainer import BadBatch, LoraConfig, Schedule, Trainer, TrainerConfig, TrainSample
from rollout_workers.trainer import trainer as trainer_module
from rollout_workers.trainer.objective.base import sequence_sums
from rollout_workers.trainer.objective.score import ending
from rollout_workers.trainer.objective.unpaired import _crossed
from rollout_workers.trainer.packing import pack

from .addition import answer, sampled_batch
from .oracle import sample_logprobs
from .test_trainer import gradient, oracle_gradient

CONFIG = TrainerConfig(algorithm="dpo", schedule=Schedule(peak=1e-3), threads=1)
PPO = TrainerConfig(algorithm="ppo", settings=PpoConfig(epochs=2, minibatches=2), schedule=Schedule(peak=1e-3), threads=1)
CRITIC = dataclasses.replace(PPO, settings=PpoConfig(epochs=1, critic="network", critic_learning_rate=1e-2, kl_target=0.01))


def pairs(seed: int, count: int = 8, margin: float = 0.0) -> list[TrainSample]:
    """A right answer and a wrong one for each prompt; two prompts are the same."""
    draw = random.Random(seed)
    out = []
    for group in range(count):
        a, b = (12, 34) if group < 2 else (draw.randrange(100), draw.randrange(100))
        out.append(answer(group, 0, f"{a}+{b}=", str(a + b), margin * group, logprob=0.0))
        out.append(answer(group, 1, f"{a}+{b}=", str(draw.randrange(1000)), 0.0, logprob=0.0))
    return out


def labelled(seed: int) -> list[TrainSample]:
    """Single completions with a label."""
    return [dataclasses.replace(s, group_key=f"0/{n:06d}", sample=0, reward=float(n % 3 > 0)) for n, s in enumerate(pairs(seed))]


def totals(model: torch.nn.Module, samples: list[TrainSample], temperature: float = 1.0) -> torch.Tensor:
    """Sums of trained logprobs, from one call of the model per sample."""
    parts = [sample_logprobs(model, s, temperature)[torch.from_numpy(s.loss_mask[1:]).bool()].sum() for s in samples]  # pyright: ignore
    return torch.stack(parts)


def moved(model_dir: Path, config: TrainerConfig, batch: Callable[[int], list[TrainSample]]) -> Trainer:
    """A trainer whose policy differs from its reference."""
    learner = Trainer(model_dir, config)
    learner.train_step(batch(1), 1)
    return learner


def test_dpo_agrees_with_the_oracle(model_dir: Path) -> None:
    learner, samples = moved(model_dir, CONFIG, pairs), pairs(2)
    sums = totals(learner.policy.model, samples)
    with torch.no_grad():
        reference = totals(AutoModelForCausalLM.from_pretrained(model_dir), samples)
    ratio = sums - reference
    wanted = oracle_gradient(learner, -logsigmoid(0.1 * (ratio[::2] - ratio[1::2])).mean())
    torch.testing.assert_close(gradient(learner, samples), wanted, atol=1e-6, rtol=1e-4)
    assert wanted.abs().max() > 1e-3


@pytest.mark.parametrize("normalize", [True, False])
def test_ipo_agrees_with_the_oracle(model_dir: Path, normalize: bool) -> None:
    """The completions of a pair differ in length; each log-ratio is a mean over its completion."""
    config = dataclasses.replace(CONFIG, algorithm="ipo", settings=IpoConfig(beta=0.5, length_normalize=normalize))
    learner, samples = moved(model_dir, config, pairs), pairs(2)
    lengths = torch.tensor([float(s.loss_mask.sum()) for s in samples])
    assert not torch.equal(lengths[::2], lengths[1::2])
    with torch.no_grad():
        reference = totals(AutoModelForCausalLM.from_pretrained(model_dir), samples)
    ratio = (totals(learner.policy.model, samples) - reference) / (lengths if normalize else 1)
    wanted = oracle_gradient(learner, (ratio[::2] - ratio[1::2] - 1).square().mean())
    torch.testing.assert_close(gradient(learner, samples), wanted, atol=2e-6, rtol=2e-4)
    assert wanted.abs().max() > 1e-3


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_online_dpo_agrees_with_the_oracle(model_dir: Path, loss: str) -> None:
    config = dataclasses.replace(CONFIG, algorithm="online_dpo", settings=OnlineDpoConfig(loss=loss), temperature=0.7)
    learner, samples = moved(model_dir, config, sampled_batch), sampled_batch(2)
    groups = [[s for s in samples if s.group_key == key] for key in dict.fromkeys(s.group_key for s in samples)]
    unequal = [group for group in groups if len({s.reward for s in group}) > 1]
    assert 0 < len(unequal) < len(groups)
    picked = [next(s for s in group if s.reward == wanted) for group in unequal for wanted in (1.0, 0.0)]
    sums = totals(learner.policy.model, picked, 0.7)
    with torch.no_grad():
        reference = totals(AutoModelForCausalLM.from_pretrained(model_dir), picked, 0.7)
    margin = (sums - reference)[::2] - (sums - reference)[1::2]
    per_pair = -logsigmoid(0.1 * margin) if loss == "sigmoid" else (margin - 5).square()
    wanted = oracle_gradient(learner, per_pair.mean())
    torch.testing.assert_close(gradient(learner, samples), wanted, atol=2e-6, rtol=2e-4)
    learner.step = 1
    metrics = learner.train_step(samples, 2).metrics
    assert (metrics["pairs"], metrics["groups/equal_rewards"]) == (len(unequal), len(groups) - len(unequal))


def test_online_dpo_ignores_groups_with_equal_rewards(model_dir: Path) -> None:
    learner = Trainer(model_dir, dataclasses.replace(CONFIG, algorithm="online_dpo"))
    tied = [dataclasses.replace(sample, reward=0.5) for sample in sampled_batch(1)]
    before = learner.weights_digest().root
    metrics = learner.train_step(tied, 1).metrics
    assert (metrics["pairs"], metrics["loss"], metrics["grad_norm"], metrics["groups/equal_rewards"]) == (0, 0, 0, 6)
    assert "kl/coefficient" not in metrics, "beta is not the coefficient of a KL term"
    assert learner.weights_digest().root == before
    with pytest.raises(BadBatch, match="infinite or NaN"):
        learner.train_step([dataclasses.replace(tied[0], reward=float("nan")), *tied[1:]], 2)


def test_sums_over_long_samples_are_as_exact_as_their_type() -> None:
    """The loss uses small differences of these sums. The reference's sums are computed in
    float64."""
    logprobs = -2 * torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    long = TrainSample("0", 0, np.zeros(20_001, np.int32), 1, np.ones(20_001, np.uint8), np.zeros(20_001, np.float32))
    (micro,) = pack([long], [0], tokens=1 << 20)
    assert sequence_sums(micro, logprobs, 1).tolist() == [logprobs.double().sum().float().item()]


def test_kto_agrees_with_the_oracle(model_dir: Path) -> None:
    learner, samples = moved(model_dir, dataclasses.replace(CONFIG, algorithm="kto"), labelled), labelled(2)
    others = mismatch([s.token_ids[: s.prompt_length].tobytes() for s in samples])  # each prompt is that of several samples
    crossed = [_crossed(samples[i], samples[j]) for i, j in enumerate(others)]
    initial = AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        point = (totals(learner.policy.model, crossed) - totals(initial, crossed)).mean().clamp(min=0)
        reference = totals(initial, samples)
    gain = totals(learner.policy.model, samples) - reference - point
    sign = torch.tensor([1.0 if s.reward > 0 else -1.0 for s in samples])
    wanted = oracle_gradient(learner, torch.sigmoid(-0.1 * sign * gain).mean())
    torch.testing.assert_close(gradient(learner, samples), wanted, atol=1e-6, rtol=1e-4)
    learner.step = 1
    rewards = 0.1 * (gain + point).detach()
    margin = float(rewards[sign > 0].mean() - rewards[sign < 0].mean())
    assert learner.train_step(samples, 2).metrics["rewards/margin"] == pytest.approx(margin, rel=1e-4)


@pytest.mark.parametrize("margin", [0.0, 0.25])
def test_a_reward_model_agrees_with_the_oracle_and_loads_as_a_classifier(model_dir: Path, tmp_path: Path, margin: float) -> None:
    learner, samples = Trainer(model_dir, dataclasses.replace(CONFIG, algorithm="reward_model")), pairs(2, margin=margin)
    model = learner.policy.model

    def score(classifier: PreTrainedModel, sample: TrainSample) -> torch.Tensor:
        token_ids = torch.from_numpy(sample.token_ids).long()[None].to(classifier.device)
        return classifier(input_ids=token_ids, use_cache=False).logits[0, 0].cpu()

    scores = torch.stack([score(model, sample) for sample in samples])
    margins = torch.tensor([s.reward for s in samples[::2]])
    wanted = oracle_gradient(learner, -logsigmoid(scores[::2] - scores[1::2] - margins).mean())
    torch.testing.assert_close(gradient(learner, samples), wanted, atol=1e-6, rtol=1e-4)
    learner.step = 0
    for step in range(1, 16):
        metrics = learner.train_step(pairs(2, margin=margin), step).metrics
    assert metrics["rewards/accuracy"] >= 0.9
    learner.write_weights(tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert loaded.config.num_labels == 1
    with torch.no_grad():
        for sample in samples[:4]:
            torch.testing.assert_close(score(loaded, sample), score(model, sample), atol=1e-6, rtol=1e-5)


CASES = {
    "dpo": (CONFIG, pairs),
    "dpo with adapters": (dataclasses.replace(CONFIG, lora=LoraConfig(rank=4)), pairs),
    "kto": (dataclasses.replace(CONFIG, algorithm="kto"), labelled),
    "reward model": (dataclasses.replace(CONFIG, algorithm="reward_model"), pairs),
    "reward model with adapters": (dataclasses.replace(CONFIG, algorithm="reward_model", lora=LoraConfig(rank=4)), pairs),
    "ppo": (PPO, sampled_batch),
    "ppo, own critic": (CRITIC, sampled_batch),
    "reinforce++": (dataclasses.replace(CONFIG, algorithm="reinforce_pp"), sampled_batch),
}


@pytest.mark.parametrize("name", ["dpo", "kto", "reward model", "ppo, own critic"])
def test_one_two_and_many_micro_batches_give_the_same_gradient(model_dir: Path, name: str) -> None:
    config, batch = CASES[name]
    found: dict[int, torch.Tensor] = {}
    for tokens in (1 << 14, 60, 16):
        learner = moved(model_dir, config, batch)
        learner.models.tokens = tokens
        progress: list[int] = []
        part = gradient(learner, batch(3), lambda _done, total, seen=progress: seen.append(total))
        found[progress[-1]] = part
    assert len(found) == 3 and min(found) == 1 and max(found) >= 6
    for part in found.values():
        torch.testing.assert_close(part, found[1], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_restored_state_resumes_bit_for_bit(model_dir: Path, tmp_path: Path, name: str) -> None:
    config, batch = CASES[name]
    learner = Trainer(model_dir, config)
    for step in (1, 2):
        learner.train_step(batch(step), step)
    learner.save_state(tmp_path)
    duplicate = Trainer(model_dir, config)
    duplicate.load_state(tmp_path)
    for step in (3, 4):
        seed = step - 2 if "ppo" not in name else step  # the same data again
        learner.train_step(batch(seed), step)
        duplicate.train_step(batch(seed), step)
    assert duplicate.weights_digest().root == learner.weights_digest().root
    assert duplicate.models.kl_coefficient == learner.models.kl_coefficient
    for one, other in zip(learner.optimizers.parameters, duplicate.optimizers.parameters, strict=True):
        assert torch.equal(one, other)


def test_state_that_is_not_restored_changes_the_result(model_dir: Path, tmp_path: Path) -> None:
    """Checks that the test above would detect a KL coefficient, critic, or moments that were not
    restored."""
    learner = moved(model_dir, CRITIC, sampled_batch)
    assert learner.models.kl_coefficient != CRITIC.settings.kl_coefficient
    assert learner.models.critic is not None and learner.critic_optimizer is not None
    learner.save_state(tmp_path)
    fresh = Trainer(model_dir, CRITIC)
    assert fresh.models.critic is not None
    assert not torch.equal(fresh.models.critic.head.weight, learner.models.critic.head.weight)
    fresh.load_state(tmp_path)
    assert torch.equal(fresh.models.critic.head.weight, learner.models.critic.head.weight)
    assert fresh.models.kl_coefficient == learner.models.kl_coefficient
    assert fresh.critic_optimizer is not None and fresh.critic_optimizer.steps == learner.critic_optimizer.steps == 1


def test_the_reference_is_evaluated_once_for_each_row(model_dir: Path) -> None:
    learner = Trainer(model_dir, CONFIG)
    assert learner.models.reference is not None
    asked = []
    original = learner.models.reference.logprobs
    learner.models.reference.logprobs = lambda batch, **k: asked.append(batch.sample) or original(batch, **k)  # type: ignore
    for step in (1, 2, 3):
        learner.train_step(pairs(step % 2), step)
    distinct = {s.token_ids.tobytes() for seed in (0, 1) for s in pairs(seed)}
    assert len(learner.models.cache) == len(distinct)
    assert sum(len(set(rows.tolist())) for rows in asked) == len(distinct)


def test_a_prompt_is_computed_once_for_both_of_a_pair(model_dir: Path) -> None:
    prompt = "12+34=" * 8
    samples = [answer(n // 2, n % 2, prompt, text, 0.0) for n, text in enumerate(["46", "7", "46", "8"])]
    metrics = Trainer(model_dir, CONFIG).train_step(samples, 1).metrics
    assert metrics["tokens/computed"] < 0.6 * metrics["tokens"]


def test_several_updates_a_batch_use_the_logprobs_from_before_the_first(model_dir: Path) -> None:
    settings = PpoConfig(epochs=3, minibatches=2, kl_coefficient=0.0)
    learner = Trainer(model_dir, dataclasses.replace(PPO, settings=settings, schedule=Schedule(peak=1e-2)))
    metrics = learner.train_step(sampled_batch(0), 1).metrics
    assert metrics["updates"] == 6 and learner.optimizer.steps == 6
    assert metrics["clip_fraction"] > 0  # the ratio leaves 1 after the first update
    with pytest.MonkeyPatch.context() as patch:
        calls = []

        def poisoned(loss: float) -> float:
            calls.append(loss)
            return loss if len(calls) < 4 else float("nan")

        original = trainer_module.check_gradient
        patch.setattr(trainer_module, "check_gradient", lambda loss, *more: original(poisoned(loss), *more))
        digest, moments = learner.weights_digest().root, {n: t.clone() for n, t in learner.optimizer.moments().items()}
        with pytest.raises(Exception, match="The step was not made"):
            learner.train_step(sampled_batch(1), 2)
    assert learner.weights_digest().root == digest and learner.optimizer.steps == 6
    assert all(torch.equal(tensor, moments[name]) for name, tensor in learner.optimizer.moments().items())


def test_a_gradient_beyond_the_limit_is_refused(model_dir: Path) -> None:
    learner = Trainer(model_dir, dataclasses.replace(CONFIG, refuse_grad_norm=1e-6))
    with pytest.raises(Exception, match=r"^loss \S{1,12}, gradient norm \S{1,12}, above `train.refuse_grad_norm` = 1e-06"):
        learner.train_step(pairs(0), 1)
    assert learner.step == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[:-1], "15 samples cannot be paired"),
        (lambda s: s[1:] + s[:0] + [dataclasses.replace(s[0], group_key="9/0")], "is not a pair"),
        (lambda s: [dataclasses.replace(s[0], loss_mask=np.zeros_like(s[0].loss_mask)), *s[1:]], "has no token to train on"),
    ],
    ids=["odd", "other groups", "empty"],
)
def test_invalid_pairs_are_refused(
    model_dir: Path, change: Callable[[list[TrainSample]], list[TrainSample]], message: str
) -> None:
    with pytest.raises(BadBatch, match=message):
        Trainer(model_dir, CONFIG).train_step(change(pairs(0)), 1)


def test_the_end_that_is_scored_is_the_last_token() -> None:
    sample = pairs(0)[0]
    longer = ending(sample)
    assert longer.loss_mask.tolist() == [0] * len(sample.token_ids) + [1]
    assert longer.token_ids[:-1].tolist() == sample.token_ids.tolist()
