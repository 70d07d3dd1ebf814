"""The learning rate of every step of a run, against the schedules of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from rollout.config.v1 import run_config_pb2
from rollout_workers.algorithms import PpoConfig
from rollout_workers.trainer import Schedule, Trainer, TrainerConfig
from rollout_workers.trainer.optim.optimizer import FlatAdamW
from rollout_workers.trainer.optim.schedule import SHAPES

from .addition import demonstrations, sampled_batch

PEAK = 1e-3
THEIRS = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def theirs(shape: str, warmup: int, steps: int) -> list[float]:
    """The factors of transformers' schedule for its steps 0 to ``steps``."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    made = get_scheduler(THEIRS[shape], optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    found = []
    for _ in range(steps + 1):
        found.append(made.get_last_lr()[0])
        optimizer.step()
        made.step()
    return found


def wanted(shape: str, warmup: int, steps: int) -> list[float]:
    """The expected rates of our steps. During the warm-up our factor is one step ahead of
    transformers, whose first factor is 0. After the peak both are the same."""
    up, factors = theirs("constant", warmup, steps), theirs(shape, warmup, steps)
    return [PEAK * (up[step] if step <= warmup else factors[step - 1]) for step in range(1, steps + 1)]


def test_every_shape_of_the_config_is_compared() -> None:
    field = run_config_pb2.TrainConfig.DESCRIPTOR.fields_by_name["schedule"]
    (offered,) = (rules.string for option, rules in field.GetOptions().ListFields() if option.full_name == "buf.validate.field")
    assert set(getattr(offered, "in")) == set(SHAPES) == set(THEIRS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 40), (1, 40), (7, 40), (39, 40), (40, 40), (60, 40), (3, 3000)])
def test_every_rate_of_a_run_is_that_of_transformers(shape: str, warmup: int, steps: int) -> None:
    schedule = Schedule(PEAK, shape, warmup, steps)
    found = [schedule.rate(step) for step in range(1, steps + 1)]
    assert found == pytest.approx(wanted(shape, warmup, steps), rel=1e-12, abs=0)
    assert min(found) > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("resumed", [False, True], ids=["at once", "resumed"])
def test_the_rate_reaches_every_update(
    model_dir: Path, tmp_path: Path, shape: str, resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainerConfig(algorithm="sft", schedule=Schedule(PEAK, shape, 2, 6), threads=1)
    given = caught(monkeypatch)
    learner, reported = Trainer(model_dir, config), []
    for step in range(1, 7):
        reported.append(learner.train_step(demonstrations(step, rows=2), step).metrics["learning_rate"])
        if resumed and step in (1, 4):  # within the warm-up, and after it
            learner.save_state(tmp_path / str(step))
            learner = Trainer(model_dir, config)
            learner.load_state(tmp_path / str(step))
    assert given == reported == pytest.approx(wanted(shape, 2, 6))


def test_all_updates_of_a_step_have_its_rate(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate critic uses the same factor with its own peak."""
    settings = PpoConfig(epochs=2, minibatches=2, critic="network", critic_learning_rate=4 * PEAK)
    config = TrainerConfig("ppo", settings, schedule=Schedule(PEAK, "linear", 1, 3), threads=1)
    given = caught(monkeypatch)
    learner = Trainer(model_dir, config)
    for step in (1, 2, 3):
        learner.train_step(sampled_batch(step, groups=2), step)
    assert given == pytest.approx([times * rate for rate in wanted("linear", 1, 3) for _ in range(4) for times in (1, 4)])


def caught(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records the rate of each later update of an optimizer."""
    rates: list[float] = []
    step = FlatAdamW.step

    def note(self: FlatAdamW, rate: float, norm: float) -> None:
        rates.append(rate)
        step(self, rate, norm)

    monkeypatch.setattr(FlatAdamW, "step", note)
    return rates
