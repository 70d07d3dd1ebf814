"""Training algorithms as pure functions: losses, advantage estimators, and what they need."""

from rollout_workers.algorithms.cispo import CispoConfig
from rollout_workers.algorithms.dapo import DapoConfig
from rollout_workers.algorithms.distillation import DistillationConfig
from rollout_workers.algorithms.dpo import DpoConfig
from rollout_workers.algorithms.dr_grpo import DrGrpoConfig
from rollout_workers.algorithms.grpo import GrpoConfig
from rollout_workers.algorithms.gspo import GspoConfig
from rollout_workers.algorithms.ipo import IpoConfig
from rollout_workers.algorithms.kto import KtoConfig
from rollout_workers.algorithms.online_dpo import OnlineDpoConfig
from rollout_workers.algorithms.ppo import PpoConfig
from rollout_workers.algorithms.registry import UnknownAlgorithm, build_algorithm, config_type
from rollout_workers.algorithms.reinforce_pp import ReinforcePpConfig
from rollout_workers.algorithms.reward_model import RewardModelConfig
from rollout_workers.algorithms.rloo import RlooConfig
from rollout_workers.algorithms.sft import SftConfig
from rollout_workers.algorithms.types import (
    Algorithm,
    Estimate,
    EstimatorBatch,
    Family,
    LossTerms,
    Needs,
    PairBatch,
    ScoreBatch,
    TokenBatch,
    UnpairedBatch,
    Updates,
    ValueBatch,
)

__all__ = [
    "Algorithm",
    "CispoConfig",
    "DapoConfig",
    "DistillationConfig",
    "DpoConfig",
    "DrGrpoConfig",
    "Estimate",
    "EstimatorBatch",
    "Family",
    "GrpoConfig",
    "GspoConfig",
    "IpoConfig",
    "KtoConfig",
    "LossTerms",
    "Needs",
    "OnlineDpoConfig",
    "PairBatch",
    "PpoConfig",
    "ReinforcePpConfig",
    "RewardModelConfig",
    "RlooConfig",
    "ScoreBatch",
    "SftConfig",
    "TokenBatch",
    "UnknownAlgorithm",
    "UnpairedBatch",
    "Updates",
    "ValueBatch",
    "build_algorithm",
    "config_type",
]
