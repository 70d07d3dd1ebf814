"""Training algorithms as pure functions: losses, advantage estimators, and what they need."""

from rollout_workers.algorithms.grpo import GrpoConfig
from rollout_workers.algorithms.registry import UnknownAlgorithm, build_algorithm
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
    "Estimate",
    "EstimatorBatch",
    "Family",
    "GrpoConfig",
    "LossTerms",
    "Needs",
    "PairBatch",
    "ScoreBatch",
    "SftConfig",
    "TokenBatch",
    "UnknownAlgorithm",
    "UnpairedBatch",
    "Updates",
    "ValueBatch",
    "build_algorithm",
]
