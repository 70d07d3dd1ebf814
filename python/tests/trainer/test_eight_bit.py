"""8-bit moments: they use less memory, training works, and a restored run has the same bits."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from rollout_workers.trainer import AdamWConfig, BadSettings, Schedule, Trainer, TrainerConfig
from rollout_workers.trainer.optim.moments import EightBitMoments

from .addition import demonstrations, sampled_batch

pytestmark = pytest.mark.timeout(400)  # starts processes for the ranks, on a machine that may be busy
CONFIG = TrainerConfig(
    algorithm="sft", schedule=Schedule(peak=3e-3), optimizer=AdamWConfig(weight_decay=0.01, kind="adamw_8bit"), threads=1
)
FLOAT = dataclasses.replace(CONFIG, optimizer=AdamWConfig(weight_decay=0.01))
installed = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def test_without_the_library_it_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name, *rest))
    with pytest.raises(BadSettings, match=r"needs the package bitsandbytes, .*`rollout-workers\[adamw-8bit\]`"):
        Trainer(model_dir, CONFIG)


@installed
def test_it_learns_as_in_float32_from_a_quarter_of_the_memory(model_dir: Path) -> None:
    eight, four = Trainer(model_dir, CONFIG), Trainer(model_dir, FLOAT)
    losses: dict[Trainer, list[float]] = {eight: [], four: []}
    for step in range(1, 21):
        for learner, found in losses.items():
            found.append(learner.train_step(demonstrations(step), step).metrics["loss"])
    assert losses[eight][-1] < 0.75 * losses[eight][0]
    assert losses[eight][-1] == pytest.approx(losses[four][-1], rel=0.03)
    moments = eight.optimizer._moments
    assert isinstance(moments, EightBitMoments)
    codes = [tensor for tensor in moments.tensors() if tensor.dtype == torch.uint8]
    elements = sum(parameter.numel() for parameter in eight.optimizer.parameters)
    assert sum(tensor.numel() for tensor in codes) == 2 * elements
    assert sum(tensor.nbytes for tensor in moments.tensors()) < 2.1 * elements


@installed
def test_a_state_holds_the_codes(model_dir: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, algorithm="grpo")
    learner, other = Trainer(model_dir, config), Trainer(model_dir, config)
    for step in (1, 2, 3):
        learner.train_step(sampled_batch(step), step)
    learner.save_state(tmp_path)
    other.load_state(tmp_path)
    for mine, theirs in zip(learner.optimizer._moments.tensors(), other.optimizer._moments.tensors(), strict=True):
        assert torch.equal(mine, theirs)
    for trainer in (learner, other):
        trainer.train_step(sampled_batch(4), 4)
    assert learner.weights_digest() == other.weights_digest()
    kept = other.optimizer.snapshot()
    other.train_step(sampled_batch(5), 5)
    other.optimizer.restore(kept)
    assert learner.weights_digest() == other.weights_digest()


@installed
def test_two_ranks_resume_bit_for_bit_and_one_rank_resumes_their_state(model_dir: Path, tmp_path: Path) -> None:
    from .team import together
    from .test_ranks import trained

    state = tmp_path / "state"
    (digest, _, _), _ = together(2, tmp_path, trained, model_dir, CONFIG, 1, 5, "", str(state))
    (resumed, _, _), _ = together(2, tmp_path, trained, model_dir, CONFIG, 4, 5, str(state))
    assert resumed == digest
    learner = Trainer(model_dir, CONFIG)
    learner.load_state(state)
    assert learner.train_step(demonstrations(4), 4).metrics["grad_norm"] > 0
