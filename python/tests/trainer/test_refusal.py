"""A refused gradient: the batch is stored, and the run stops, skips the step, or restores an
earlier state."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_workers.trainer import NonFiniteGradient, Schedule, Trainer, TrainerConfig
from rollout_workers.trainer.refusal import Refusals, Refused, save_batch

from .addition import sampled_batch

CONFIG = TrainerConfig(schedule=Schedule(peak=1e-3), threads=1)


def poisoned(learner: Trainer, step: int) -> None:
    """Makes the loss of this step NaN."""
    healthy = learner.algorithm

    def loss(tokens):  # type: ignore[no-untyped-def]
        terms = healthy.loss(tokens)
        return dataclasses.replace(terms, loss=terms.loss * torch.nan) if learner.step + 1 == step else terms

    learner.algorithm = dataclasses.replace(healthy, loss=loss)


@pytest.mark.parametrize("action", ["stop", "skip", "restore"])
def test_each_policy_stores_the_batch_and_reports_it(model_dir: Path, tmp_path: Path, action: str) -> None:
    reported: list[Refused] = []
    learner = Trainer(model_dir, dataclasses.replace(CONFIG, refusals=Refusals(action, tmp_path / "refused", reported.append)))
    poisoned(learner, 3)
    learner.train_step(sampled_batch(1), 1)
    saved = learner.weights_digest().root
    learner.save_state(tmp_path / "state")
    learner.train_step(sampled_batch(2), 2)
    before = learner.weights_digest().root
    if action == "stop":
        with pytest.raises(NonFiniteGradient, match=r"The batch is in .*step-000003\.npz"):
            learner.train_step(sampled_batch(3), 3)
        assert learner.step == 2
    else:
        metrics = learner.train_step(sampled_batch(3), 3).metrics
        assert metrics["refused"] == 1 and metrics["samples"] == 24 and metrics["time/step"] > 0 and learner.step == 3
    assert learner.weights_digest().root == (saved if action == "restore" else before)
    assert [(r.step, r.reason, r.action) for r in reported] == [(3, "NON_FINITE_GRADIENT", action)]
    with np.load(reported[0].batch) as kept:
        samples = sampled_batch(3)
        assert kept["token_ids"].tolist() == np.concatenate([s.token_ids for s in samples]).tolist()
        assert kept["lengths"].sum() == len(kept["loss_mask"]) and len(kept["rewards"]) == len(samples)
        assert json.loads(str(kept["error"]))["reason"] == "NON_FINITE_GRADIENT"
    if action != "stop":
        learner.train_step(sampled_batch(4), 4)
        assert learner.weights_digest().root not in (saved, before)


def test_training_after_a_restore_equals_loading_the_state(model_dir: Path, tmp_path: Path) -> None:
    """After a refusal at step 3 the weights are those of a run that loads the state and makes step
    4 next."""
    learner = Trainer(model_dir, dataclasses.replace(CONFIG, refusals=Refusals("restore")))
    poisoned(learner, 3)
    learner.train_step(sampled_batch(1), 1)
    learner.save_state(tmp_path)
    for step in (2, 3, 4):
        learner.train_step(sampled_batch(step), step)
    loaded = Trainer(model_dir, CONFIG)
    loaded.load_state(tmp_path)
    loaded.step = 3
    loaded.train_step(sampled_batch(4), 4)
    assert learner.weights_digest().root == loaded.weights_digest().root


def test_token_rewards_are_stored_too(tmp_path: Path) -> None:
    first, second, *_ = sampled_batch(1)
    rewarded = dataclasses.replace(second, token_rewards=np.arange(len(second.token_ids), dtype=np.float32))
    with np.load(save_batch(tmp_path / "kept" / "batch.npz", [first, rewarded], NonFiniteGradient("no"))) as kept:
        assert rewarded.token_rewards is not None and "teacher_logprobs" not in kept
        want = [*[np.nan] * len(first.token_ids), *rewarded.token_rewards]
        np.testing.assert_array_equal(kept["token_rewards"], want)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="use one of stop, skip, restore"):
        Refusals("ignore")
