"""An evaluation gives the metrics of a step on the same samples, and does not change the
trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_workers.trainer import BadBatch, LoraConfig, Schedule, Trainer, TrainerConfig, TrainSample
from rollout_workers.trainer.distributed.ranks import Ranks

from .addition import demonstrations
from .oracle import sample_logprobs
from .team import together
from .test_families import labelled, pairs

CONFIG = TrainerConfig(schedule=Schedule(peak=1e-3), threads=1)
DATA: dict[str, Callable[[int], list[TrainSample]]] = {
    "sft": demonstrations,
    "dpo": pairs,
    "ipo": pairs,
    "kto": labelled,
    "reward_model": pairs,
}


def of(algorithm: str, lora: bool = False) -> TrainerConfig:
    return dataclasses.replace(CONFIG, algorithm=algorithm, lora=LoraConfig(rank=4) if lora else None)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("algorithm", DATA)
def test_metrics_equal_those_of_a_step(model_dir: Path, algorithm: str, lora: bool) -> None:
    learner, blind = Trainer(model_dir, of(algorithm, lora)), Trainer(model_dir, of(algorithm, lora))
    for step in (1, 2):
        samples = DATA[algorithm](step)
        found = learner.evaluate(list(reversed(samples)))
        metrics = learner.train_step(samples, step).metrics
        assert found == {name: metrics[name] for name in found} and found["loss"] > 0
        assert blind.train_step(samples, step).metrics["loss"] == metrics["loss"]
    assert learner.weights_digest() == blind.weights_digest()
    assert len(learner.models.cache) == len(blind.models.cache), "held-out pairs must not be cached"


def test_the_loss_of_held_out_answers_is_their_cross_entropy(model_dir: Path) -> None:
    samples = demonstrations(3)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        parts = [sample_logprobs(model, s)[torch.from_numpy(s.loss_mask[1:]).bool()] for s in samples]
    found = Trainer(model_dir, of("sft")).evaluate(samples)
    assert found["loss"] == pytest.approx(-float(torch.cat(parts).mean()), rel=1e-5)


@pytest.mark.parametrize("algorithm", ["dpo", "ipo"])
def test_a_policy_equal_to_its_reference_has_no_preference(model_dir: Path, algorithm: str) -> None:
    learner = Trainer(model_dir, of(algorithm))
    samples = [sample for seed in range(8) for sample in again(pairs(seed), seed)]
    assert learner.evaluate(samples)["rewards/accuracy"] == 0
    assert learner.train_step(samples, 1).metrics["rewards/accuracy"] == 0
    assert learner.evaluate(samples)["rewards/accuracy"] > 0.5


def again(samples: list[TrainSample], number: int) -> list[TrainSample]:
    """The same samples with other group keys."""
    return [dataclasses.replace(sample, group_key=f"{number}/{sample.group_key}") for sample in samples]


def test_held_out_pairs_are_not_saved_in_the_state(model_dir: Path, tmp_path: Path) -> None:
    learner = Trainer(model_dir, of("dpo"))
    learner.train_step(pairs(1), 1)
    known = len(learner.models.cache)
    learner.evaluate(pairs(2))
    learner.save_state(tmp_path)
    resumed = Trainer(model_dir, of("dpo"))
    resumed.load_state(tmp_path)
    assert len(learner.models.cache) == len(resumed.models.cache) == known


def test_a_sample_without_trained_tokens_is_refused(model_dir: Path) -> None:
    chosen, rejected = pairs(1)[:2]
    empty = dataclasses.replace(rejected, loss_mask=rejected.loss_mask * 0)
    with pytest.raises(BadBatch, match="no token to train on"):
        Trainer(model_dir, of("dpo")).evaluate([chosen, empty])


def evaluated(ranks: Ranks, model_dir: Path, algorithm: str) -> dict[str, float]:
    """Runs on each rank, with micro-batches of unequal sizes."""
    config = dataclasses.replace(of(algorithm), tokens_per_microbatch=48)
    return Trainer(model_dir, config, ranks).evaluate(DATA[algorithm](1))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "reward_model"])
def test_several_ranks_give_the_metrics_of_one(model_dir: Path, tmp_path: Path, algorithm: str) -> None:
    wanted = Trainer(model_dir, of(algorithm)).evaluate(DATA[algorithm](1))
    one, other = together(2, tmp_path, evaluated, model_dir, algorithm)
    assert one == other
    assert one == pytest.approx(wanted, rel=1e-4, abs=1e-6)
