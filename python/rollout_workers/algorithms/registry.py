"""Finds an algorithm by the name of its table in the run config."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from rollout_workers.algorithms.cispo import CispoConfig, cispo
from rollout_workers.algorithms.dapo import DapoConfig, dapo
from rollout_workers.algorithms.distillation import DistillationConfig, distillation
from rollout_workers.algorithms.dpo import DpoConfig, dpo
from rollout_workers.algorithms.dr_grpo import DrGrpoConfig, dr_grpo
from rollout_workers.algorithms.grpo import GrpoConfig, grpo
from rollout_workers.algorithms.gspo import GspoConfig, gspo
from rollout_workers.algorithms.ipo import IpoConfig, ipo
from rollout_workers.algorithms.kto import KtoConfig, kto
from rollout_workers.algorithms.online_dpo import OnlineDpoConfig, online_dpo
from rollout_workers.algorithms.ppo import PpoConfig, ppo
from rollout_workers.algorithms.reinforce_pp import ReinforcePpConfig, reinforce_pp
from rollout_workers.algorithms.reward_model import RewardModelConfig, reward_model
from rollout_workers.algorithms.rloo import RlooConfig, rloo
from rollout_workers.algorithms.sft import SftConfig, sft
from rollout_workers.algorithms.types import Algorithm

BUILDERS: dict[str, tuple[type[Any], Callable[[Any], Algorithm]]] = {
    "sft": (SftConfig, sft),
    "reward_model": (RewardModelConfig, reward_model),
    "ppo": (PpoConfig, ppo),
    "grpo": (GrpoConfig, grpo),
    "dr_grpo": (DrGrpoConfig, dr_grpo),
    "dapo": (DapoConfig, dapo),
    "gspo": (GspoConfig, gspo),
    "cispo": (CispoConfig, cispo),
    "rloo": (RlooConfig, rloo),
    "reinforce_pp": (ReinforcePpConfig, reinforce_pp),
    "dpo": (DpoConfig, dpo),
    "ipo": (IpoConfig, ipo),
    "kto": (KtoConfig, kto),
    "distillation": (DistillationConfig, distillation),
    "online_dpo": (OnlineDpoConfig, online_dpo),
}


class UnknownAlgorithm(ValueError):
    """No algorithm has that name. The message lists the known names."""

    reason = "UNKNOWN_ALGORITHM"


def config_type(name: str) -> type[Any]:
    """The settings' dataclass of an algorithm. Raises ``UnknownAlgorithm``."""
    if name not in BUILDERS:
        close = get_close_matches(name, BUILDERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise UnknownAlgorithm(f"no algorithm {name!r}{hint} There are: {', '.join(BUILDERS)}")
    return BUILDERS[name][0]


def build_algorithm(name: str, settings: Any = None) -> Algorithm:
    """The algorithm ``name`` with ``settings`` (its config dataclass; absent: the defaults).

    Raises ``UnknownAlgorithm``, or ``TypeError`` for the settings of another algorithm.
    """
    expected = config_type(name)
    settings = expected() if settings is None else settings
    if type(settings) is not expected:
        raise TypeError(f"algorithm {name!r} takes {expected.__name__}, not {type(settings).__name__}")
    return BUILDERS[name][1](settings)
