"""Trains a model: packs batches, computes losses, updates the weights, and saves and restores the
state.

trainer.py      Trainer and its config          packing.py    samples to micro-batches
objective/      one class per family of losses  model/        policy, critic, reference, teacher
optim/          AdamW and the learning rate     distributed/  several ranks
state.py        the training state on disk      refusal.py    gradients that are not applied
"""

from rollout_workers.trainer.model.adapter import LoraConfig
from rollout_workers.trainer.optim.moments import AdamWConfig
from rollout_workers.trainer.optim.schedule import Schedule
from rollout_workers.trainer.trainer import ActingConfig, Trainer, TrainerConfig
from rollout_workers.trainer.types import (
    BadBatch,
    BadSettings,
    ExplodingGradient,
    LearnerError,
    NonFiniteGradient,
    RankLost,
    StateUnreadable,
    StepOutOfTurn,
    StepResult,
    TrainSample,
)

__all__ = [
    "ActingConfig",
    "AdamWConfig",
    "BadBatch",
    "BadSettings",
    "ExplodingGradient",
    "LearnerError",
    "LoraConfig",
    "NonFiniteGradient",
    "RankLost",
    "Schedule",
    "StateUnreadable",
    "StepOutOfTurn",
    "StepResult",
    "TrainSample",
    "Trainer",
    "TrainerConfig",
]
