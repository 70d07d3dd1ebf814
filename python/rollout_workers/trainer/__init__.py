"""The learner: packs batches, computes losses, moves the weights, saves and restores its state."""

from rollout_workers.trainer.model.adapter import LoraConfig
from rollout_workers.trainer.optim.moments import AdamWConfig
from rollout_workers.trainer.optim.schedule import Schedule
from rollout_workers.trainer.trainer import Trainer, TrainerConfig
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
