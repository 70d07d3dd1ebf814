"""Training algorithms as pure functions: losses, advantage estimators, and what they need."""

from rollout_workers.algorithms.grpo import GrpoConfig
from rollout_workers.algorithms.registry import UnknownAlgorithm, build_algorithm
from rollout_workers.algorithms.sft import SftConfig
from rollout_workers.algorithms.types import Algorithm, LossTerms, Needs, TokenBatch

__all__ = [
    "Algorithm",
    "GrpoConfig",
    "LossTerms",
    "Needs",
    "SftConfig",
    "TokenBatch",
    "UnknownAlgorithm",
    "build_algorithm",
]
